# SPDX-License-Identifier: Apache-2.0
"""Run synchronous calls in I/O threads, with queues, deadlines, cancellation and draining."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError


class IoQueue(IntEnum):
    """The queues of a ``TierRunner``.

    Lookups and loads share threads, and lookups run first. Stores have their own threads. While lookups or loads are
    queued, one slice of a store starts for every eight slices of those.
    """

    LOOKUP = 0
    LOAD = 1
    STORE = 2
    UPKEEP = 3
    """A queue for calls that may take minutes. It has its own thread and no deadline."""


READS = (IoQueue.LOOKUP, IoQueue.LOAD)

_READS_PER_STORE = 8
"""The number of reads per store while reads are queued. On a disk that is never idle, stores would otherwise be
cancelled when they become too old."""


class IoStatus(Enum):
    """The state of a slice of a task: how it ended, or that it is overdue."""

    DONE = "done"
    """The work returned an outcome for each item."""
    FAILED = "failed"
    """The work raised, or returned too few outcomes."""
    CANCELLED = "cancelled"
    """The work never started."""
    OVERDUE = "overdue"
    """The work has been running for too long. This is not its end: another result follows if it ever returns."""


@dataclass(slots=True, eq=False)
class IoTask:
    """A task of ``num_items`` items. ``work(start, stop)`` runs in an I/O thread and returns an outcome per item.

    All other attributes belong to the thread that submits the task.
    """

    queue: IoQueue
    num_items: int
    work: Callable[[int, int], list[bool]]
    keys: Sequence[OffloadKey] = ()
    """The blocks of the items, if the items are blocks."""
    on_result: Callable[[IoResult], None] = lambda result: None
    """A function that the caller who takes results calls with each result. The runner does not call it."""
    num_open_slices: int = field(init=False, default=0)
    num_hung_slices: int = field(init=False, default=0)
    """The number of open slices that are overdue and still running. The runner's threads also change it."""

    @property
    def hangs(self) -> bool:
        """Whether the task is open and all of its remaining slices are overdue."""
        return 0 < self.num_open_slices <= self.num_hung_slices


@dataclass(slots=True, eq=False)
class _Slice:
    """Items ``start`` to ``stop`` of a task, on which one thread works at a time."""

    task: IoTask
    start: int
    stop: int
    since_s: float
    """The time at which the slice was queued, or started once it is running."""
    is_overdue: bool = False
    """Whether the slice has been running for too long and ``take_results`` has reported that."""


@dataclass(slots=True, eq=False)
class IoResult:
    """The end of one slice, items ``start`` to ``stop`` of ``task``, or a single report that it is ``OVERDUE``."""

    task: IoTask
    start: int
    stop: int
    status: IoStatus
    error: BaseException | None
    """The exception that the work raised, if it ``FAILED``."""
    is_last: bool
    """Whether the task has no other open slice and has ended. ``take_results`` sets this."""
    outcomes: Sequence[bool]
    """The outcomes of the slice's items. They are all ``False`` unless it is ``DONE``."""
    seconds: float = 0.0
    """The seconds that the work took, in real time, or 0 if it never started or has not ended."""
    ended_s: float = 0.0
    """The time at which the slice ended, by the runner's clock, or 0 until then."""

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """The blocks of the slice."""
        return self.task.keys[self.start : self.stop]


class TierRunner:
    """Runs lookups and loads in ``threads`` daemon threads, stores in as many others, and upkeep in one more.

    So stores can never occupy all threads for reads. Tasks are cut into slices, so that several threads can share one
    task.

    One thread submits tasks and takes results; neither call blocks. A running slice ends only when its work returns or
    raises, however late that is, so memory that it uses may not be reused until then. A slice that is queued for longer
    than ``timeout_s`` is cancelled. ``clock`` returns seconds and never goes back. Only ``drain`` and ``shutdown``
    wait, in real time. Raises ``ConfigError`` if the threads cannot be started.
    """

    def __init__(
        self, name: str, threads: int, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_threads = threads
        self.timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._slice_ended = threading.Condition(self._lock)
        reads_queued, upkeep_queued = threading.Condition(self._lock), threading.Condition(self._lock)
        self._stores_may_begin = threading.Condition(self._lock)
        self._queued = {
            IoQueue.LOOKUP: reads_queued,
            IoQueue.LOAD: reads_queued,
            IoQueue.STORE: self._stores_may_begin,
            IoQueue.UPKEEP: upkeep_queued,
        }
        self._queues: tuple[deque[_Slice], ...] = tuple(deque() for _ in IoQueue)
        self._reads_since_store = 0
        """The number of slices of lookups and loads that started since the last slice of a store."""
        self._running: dict[_Slice, None] = {}
        self.ended: deque[IoResult] = deque()
        """Results that ``take_results`` will return. Other code only tests whether there are any."""
        self._is_closing = False
        # These belong to the thread that submits. The backlog counts items whose result was not taken, by queue.
        self._backlog = [0] * len(IoQueue)
        self.num_open_slices = 0
        """The number of slices that are queued or running, or whose result was not taken."""
        self.on_ended: Callable[[], None] = lambda: None
        """A function that an I/O thread calls after each of its slices, for callers that wait for results."""
        self._next_check_s = 0.0
        self._threads: list[threading.Thread] = []
        duties = [READS] * threads + [(IoQueue.STORE,)] * threads + [(IoQueue.UPKEEP,)]
        for index, duty in enumerate(duties):
            thread = threading.Thread(target=self._serve, args=(duty,), name=f"kvoffload-{name}-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                self.shutdown(0.0)
                raise ConfigError(
                    f"The tier {name!r} needs {len(duties)} threads, but only {index} could be started; lower its "
                    "threads, or raise the limit of processes (ulimit -u, or the container's limit)."
                ) from exc
            self._threads.append(thread)

    def __repr__(self) -> str:
        return f"TierRunner(threads={self.num_threads}, backlog={self._backlog}, running={len(self._running)})"

    # -------------------------------------------------------------------------------- for the thread that submits

    @property
    def is_closing(self) -> bool:
        """Whether ``shutdown`` was called. Long work checks this from time to time, and stops."""
        return self._is_closing

    def backlog(self, queue: IoQueue) -> int:
        """Return the number of items submitted to ``queue`` whose results were not taken."""
        return self._backlog[queue]

    def submit(self, task: IoTask, slice_items: int) -> None:
        """Queue ``task``, which has at least one item, in slices of at most ``slice_items``."""
        now_s = self._clock()
        slices = [
            _Slice(task, start, min(start + slice_items, task.num_items), now_s)
            for start in range(0, task.num_items, slice_items)
        ]
        task.num_open_slices = len(slices)
        self._backlog[task.queue] += task.num_items
        self.num_open_slices += len(slices)
        with self._lock:
            self._queues[task.queue].extend(slices)
            self._queued[task.queue].notify(len(slices))

    def take_results(self) -> list[IoResult]:
        """Return the slices that ended since the last call, each once, and the slices that became ``OVERDUE``."""
        results = []
        while self.ended:
            result = self.ended.popleft()
            task = result.task
            task.num_open_slices -= 1
            self.num_open_slices -= 1
            self._backlog[task.queue] -= result.stop - result.start
            result.is_last = not task.num_open_slices
            results.append(result)
        now_s = self._clock()
        return results + self._check_deadlines(now_s) if now_s >= self._next_check_s else results

    def _check_deadlines(self, now_s: float) -> list[IoResult]:
        """Cancel slices that have been queued for more than ``timeout_s``.

        Returns, once, a result for each slice that has been running for longer than that. Call it at most 20 times per
        ``timeout_s``.
        """
        self._next_check_s = now_s + self.timeout_s / 20
        late_since_s = now_s - self.timeout_s
        with self._lock:
            overdue = [
                part
                for part in self._running
                if part.since_s < late_since_s and not part.is_overdue and part.task.queue is not IoQueue.UPKEEP
            ]
            for part in overdue:
                part.is_overdue = True
                part.task.num_hung_slices += 1
            for queue in self._queues[: IoQueue.UPKEEP]:
                while queue and queue[0].since_s < late_since_s:
                    self._cancel(queue.popleft())
        return [IoResult(part.task, part.start, part.stop, IoStatus.OVERDUE, None, False, ()) for part in overdue]

    def num_overdue(self, queues: Iterable[IoQueue] = tuple(IoQueue)) -> int:
        """Return the number of slices that are overdue and still running."""
        with self._lock:
            return sum(part.is_overdue and part.task.queue in queues for part in self._running)

    def cancel_queued(self, *queues: IoQueue) -> None:
        """Cancel queued slices. Running slices continue."""
        with self._lock:
            self._cancel_all(queues)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no load or store is queued or running, and return whether that is so.

        After ``timeout_s``, it cancels the queued ones and returns ``False`` if some are still running.
        """
        with self._lock:
            if not self._slice_ended.wait_for(self._has_no_transfers, timeout_s):
                self._cancel_all((IoQueue.LOAD, IoQueue.STORE))
            return self._has_no_transfers()

    def shutdown(self, timeout_s: float) -> int:
        """Cancel queued slices, wait for running ones, and end the threads.

        Returns the number of threads that hang. They live until the process ends.
        """
        with self._lock:
            self._cancel_all(IoQueue)
            self._is_closing = True
            for queued in self._queued.values():
                queued.notify_all()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    # -------------------------------------------------------------------------------------------- with _lock held

    def _has_no_transfers(self) -> bool:
        queued = self._queues[IoQueue.LOAD] or self._queues[IoQueue.STORE]
        return not queued and not any(part.task.queue in (IoQueue.LOAD, IoQueue.STORE) for part in self._running)

    def _cancel_all(self, queues: Iterable[IoQueue]) -> None:
        for queue in queues:
            while self._queues[queue]:
                self._cancel(self._queues[queue].popleft())

    def _cancel(self, part: _Slice) -> None:
        self.ended.append(self._result(part, IoStatus.CANCELLED))
        self._slice_ended.notify_all()
        self._stores_may_begin.notify_all()

    def _store_may_begin(self) -> bool:
        are_queued = self._queues[IoQueue.LOOKUP] or self._queues[IoQueue.LOAD]
        return not are_queued or self._reads_since_store >= _READS_PER_STORE

    def _begin_next(self, queues: tuple[IoQueue, ...]) -> _Slice | None:
        """Take a slice from the first of ``queues`` that may start one."""
        for queue in queues:
            if self._queues[queue] and (queue is not IoQueue.STORE or self._store_may_begin()):
                break
        else:
            return None
        part = self._queues[queue].popleft()
        part.since_s = self._clock()
        self._running[part] = None
        if queue is IoQueue.STORE:
            self._reads_since_store = 0
        elif queue in READS:
            self._reads_since_store += 1
            if self._queues[IoQueue.STORE] and self._store_may_begin():
                self._stores_may_begin.notify_all()
        return part

    # --------------------------------------------------------------------------------------------- in the threads

    def _serve(self, queues: tuple[IoQueue, ...]) -> None:
        while True:
            with self._lock:
                while (part := self._begin_next(queues)) is None:
                    if self._is_closing:
                        return
                    self._queued[queues[0]].wait()
            result = self._run(part)
            with self._lock:
                # Both must change together: a caller who sees that the slice has stopped running can take its result.
                del self._running[part]
                part.task.num_hung_slices -= part.is_overdue
                self.ended.append(result)
                self._slice_ended.notify_all()
            with contextlib.suppress(Exception):  # foreign, and must not end the thread
                self.on_ended()
            # A thread that waits for work must not keep alive the memory that the last slice refers to.
            del part, result

    def _run(self, part: _Slice) -> IoResult:
        begin_s = time.perf_counter()
        try:
            # A store's result is foreign: a numpy array of booleans, for example, is neither true nor false.
            outcomes = [bool(outcome) for outcome in part.task.work(part.start, part.stop)]
            if len(outcomes) != part.stop - part.start:
                raise ValueError(f"{len(outcomes)} outcomes for {part.stop - part.start} blocks")
        except BaseException as exc:  # noqa: BLE001 - the boundary where a store's exception becomes a failed task
            # Not only Exception: a native client's panic may be neither, and must not end the thread.
            return self._result(part, IoStatus.FAILED, exc, seconds=time.perf_counter() - begin_s)
        return self._result(part, IoStatus.DONE, None, outcomes, time.perf_counter() - begin_s)

    def _result(
        self,
        part: _Slice,
        status: IoStatus,
        error: BaseException | None = None,
        outcomes: Sequence[bool] = (),
        seconds: float = 0.0,
    ) -> IoResult:
        outcomes = outcomes or [False] * (part.stop - part.start)
        return IoResult(part.task, part.start, part.stop, status, error, False, outcomes, seconds, self._clock())
