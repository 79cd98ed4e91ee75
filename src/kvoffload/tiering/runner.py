# SPDX-License-Identifier: Apache-2.0
"""Asynchrony for synchronous work, written once: jobs, lanes, threads, deadlines, drain."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["Ended", "Job", "Lane", "Overdue", "TierRunner"]

_log = logging.getLogger(__name__)


class Lane(IntEnum):
    """Kinds of work, in the order in which threads take them up."""

    LOOKUP = 0
    LOAD = 1
    STORE = 2
    UPKEEP = 3
    """Work that may take long; has a thread of its own."""


class Overdue(Exception):
    """A piece was not begun in time, or was called off before it began."""


@dataclass(slots=True, eq=False)
class Job:
    """``num_items`` things to do. ``work(start, stop)`` does some of them in an I/O thread, one answer for each.

    Everything but ``work`` belongs to the thread that submits and polls.
    """

    lane: Lane
    num_items: int
    work: Callable[[int, int], list[bool]]
    answers: list[bool] = field(init=False)
    """Of items that ended; ``False`` before."""
    open_pieces: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.answers = [False] * self.num_items


@dataclass(slots=True, eq=False)
class _Piece:
    job: Job
    start: int
    stop: int
    since_s: float
    """When it was queued; once it runs, when it was begun."""
    is_reported: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """Part of a job ended: items ``start`` to ``stop``, by ``error`` if there is one. ``was_begun``: it did I/O."""

    job: Job
    start: int
    stop: int
    error: Exception | None
    was_begun: bool
    is_last: bool
    """The job has ended with it."""


class TierRunner:
    """Runs jobs in ``threads`` daemon threads, and one more for upkeep, in pieces, so that many threads share one job.

    ``submit`` and ``poll`` are for one thread, and neither blocks. A piece that was begun ends when its work returns
    or raises and not before, however late: nobody may reuse memory that it still touches. A piece that waits longer
    than ``timeout_s`` ends with ``Overdue`` without having been begun. ``clock`` gives seconds and never goes back;
    only ``drain`` and ``shutdown`` wait, in real time.
    """

    def __init__(
        self, name: str, threads: int, *, timeout_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_threads = threads
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._ended_some = threading.Condition(self._lock)
        self._for_io, self._for_upkeep = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queues: tuple[deque[_Piece], ...] = tuple(deque() for _ in Lane)
        self._running: dict[_Piece, None] = {}
        self._ended: deque[tuple[_Piece, list[bool] | None, Exception | None, bool]] = deque()
        self._is_closing = False
        # Items submitted and not polled as ended, per lane; owned by the thread that submits.
        self._backlog = [0] * len(Lane)
        self._num_open_pieces = 0
        self._next_check_s = 0.0
        io, upkeep = ((Lane.LOOKUP, Lane.LOAD, Lane.STORE), self._for_io), ((Lane.UPKEEP,), self._for_upkeep)
        self._threads = [
            threading.Thread(target=self._serve, args=duty, name=f"kvoffload-{name}-{index}", daemon=True)
            for index, duty in enumerate([*[io] * threads, upkeep])
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"TierRunner(threads={self.num_threads}, backlog={self._backlog}, running={len(self._running)})"

    # ----------------------------------------------------------------------------------- for the one that submits

    @property
    def is_closing(self) -> bool:
        """Long work looks here now and then, and stops."""
        return self._is_closing

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, running or unpolled."""
        return not self._num_open_pieces

    def backlog(self, lane: Lane) -> int:
        """Items of a lane that have not been polled as ended."""
        return self._backlog[lane]

    def submit(self, job: Job, piece_items: int) -> None:
        """Queues ``job`` (of one item at least) in pieces of at most ``piece_items``."""
        now_s = self._clock()
        pieces = [
            _Piece(job, start, min(start + piece_items, job.num_items), now_s)
            for start in range(0, job.num_items, piece_items)
        ]
        job.open_pieces = len(pieces)
        self._backlog[job.lane] += job.num_items
        self._num_open_pieces += len(pieces)
        with self._lock:
            self._queues[job.lane].extend(pieces)
            (self._for_upkeep if job.lane is Lane.UPKEEP else self._for_io).notify(len(pieces))

    def poll(self) -> list[Ended]:
        """What ended since the last call, each once; the job's answers are filled in."""
        told = []
        while self._ended:
            piece, answers, error, was_begun = self._ended.popleft()
            job = piece.job
            if answers is not None:
                job.answers[piece.start : piece.stop] = answers
            job.open_pieces -= 1
            self._num_open_pieces -= 1
            self._backlog[job.lane] -= piece.stop - piece.start
            told.append(Ended(job, piece.start, piece.stop, error, was_begun, not job.open_pieces))
        return told

    def newly_overdue(self) -> list[Job]:
        """Jobs with a piece that has been running for more than ``timeout_s``, once per piece. Waiting pieces that
        are overdue end here. Cheap to call often."""
        now_s = self._clock()
        if not self._num_open_pieces or now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + self._timeout_s / 20
        late_since_s = now_s - self._timeout_s
        with self._lock:
            stuck = [piece for piece in self._running if piece.since_s < late_since_s and not piece.is_reported]
            for queue in self._queues[: Lane.UPKEEP]:
                while queue and queue[0].since_s < late_since_s:
                    self._call_off(queue.popleft())
        for piece in stuck:
            piece.is_reported = True
        return [piece.job for piece in stuck if piece.job.lane is not Lane.UPKEEP]

    def num_stuck(self, lanes: Iterable[Lane] = tuple(Lane)) -> int:
        """Pieces reported as overdue that still run."""
        with self._lock:
            return sum(piece.is_reported and piece.job.lane in lanes for piece in self._running)

    def cancel_queued(self, *lanes: Lane) -> None:
        """Ends what has not begun; what runs goes on."""
        with self._lock:
            self._cancel(lanes)

    def drain(self, timeout_s: float) -> bool:
        """Waits until no load or store is queued or running. What is still queued after ``timeout_s`` is called off;
        ``False`` if something runs even then."""
        with self._lock:
            if not self._ended_some.wait_for(self._has_no_transfers, timeout_s):
                self._cancel((Lane.LOAD, Lane.STORE))
            return self._has_no_transfers()

    def shutdown(self, timeout_s: float) -> int:
        """Calls off what is queued, waits for what runs, ends the threads; answers how many hang (and are left to
        the end of the process)."""
        with self._lock:
            self._cancel(Lane)
            self._is_closing = True
            self._for_io.notify_all()
            self._for_upkeep.notify_all()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    # ------------------------------------------------------------------------------------------- with _lock held

    def _has_no_transfers(self) -> bool:
        queued = self._queues[Lane.LOAD] or self._queues[Lane.STORE]
        return not queued and not any(piece.job.lane in (Lane.LOAD, Lane.STORE) for piece in self._running)

    def _cancel(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            while self._queues[lane]:
                self._call_off(self._queues[lane].popleft())

    def _call_off(self, piece: _Piece) -> None:
        self._ended.append((piece, None, Overdue("called off before it was begun"), False))
        self._ended_some.notify_all()

    def _take(self, lanes: tuple[Lane, ...]) -> _Piece | None:
        for lane in lanes:
            if self._queues[lane]:
                piece = self._queues[lane].popleft()
                piece.since_s = self._clock()
                self._running[piece] = None
                return piece
        return None

    # --------------------------------------------------------------------------------------------- in the threads

    def _serve(self, lanes: tuple[Lane, ...], work_came: threading.Condition) -> None:
        while True:
            with self._lock:
                work_came.wait_for(lambda: self._is_closing or any(self._queues[lane] for lane in lanes))
                piece = self._take(lanes)
            if piece is None:
                return  # closing
            answers, error = self._do(piece)
            with self._lock:
                del self._running[piece]
                self._ended.append((piece, answers, error, True))
                self._ended_some.notify_all()
            del piece  # it refers to memory that others want to release

    @staticmethod
    def _do(piece: _Piece) -> tuple[list[bool] | None, Exception | None]:
        try:
            answers = piece.job.work(piece.start, piece.stop)
            if len(answers) != piece.stop - piece.start:
                raise ValueError(f"{len(answers)} answers for {piece.stop - piece.start} blocks")
        except Exception as exc:  # noqa: BLE001 - the boundary where a store's trouble becomes a failed job
            return None, exc
        return answers, None
