# SPDX-License-Identifier: Apache-2.0
"""One direction of copies between a CUDA device and the region: a stream, and the thread that submits to it.

The engine's thread only records what a job waits for and queues it. Half a microsecond of processor time a copy, and
the wait that a full queue of the driver costs, are paid by the lane's thread. It submits a job when the compute before
it is done, so that nothing queues up in the driver, and in pieces, so that others' small copies come in between.

The order does not depend on the thread: on the device's own timeline each job waits for the compute and for the jobs
that it must come after. So whoever needs a job submitted now (``hurry``) submits it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.base import Direction
from kvoffload.cpu.copy.driver import CudaError, Driver, Event
from kvoffload.cpu.copy.gather import Gatherer
from kvoffload.cpu.copy.plan import Extent, Runs
from kvoffload.errors import TransferError
from kvoffload.logs import RateLimitedLog

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]

PIECE_BYTES = 16 << 20
"""A copy engine does the copies of one stream back to back, and everybody else's small ones wait until it looks up
between two pieces (torchrec issues 4303 and 4373: 32 MiB with a tiny operation between). To be measured on a device."""
PIECE_RUNS = 4096
OPEN_PIECES = 3
"""Submitted and not done. Two keep the copy engine busy while the thread wakes up."""
DRAIN_S = 30.0
"""A stream that has not ended by then is not waited for at shutdown."""

_ATTEMPTS = 3
_POLL_S = 100e-6


class Events:
    """A pool of events of one kind. Any thread."""

    def __init__(self, driver: Driver, is_timed: bool) -> None:
        self._driver = driver
        self._is_timed = is_timed
        self._spare: list[Event] = []  # appending and popping are atomic

    def take(self) -> Event:
        try:
            return self._spare.pop()
        except IndexError:
            return self._driver.create_event(self._is_timed)

    def moment(self) -> Moment:
        """A new one, of one user."""
        return Moment(self, self.take())

    def give_back(self, event: Event) -> None:
        """Nothing will be asked of it any more. Streams that wait for it do so for what it meant so far."""
        self._spare.append(event)

    def close(self) -> None:
        while self._spare:
            with contextlib.suppress(CudaError):
                self._driver.destroy_event(self._spare.pop())


class EventPools:
    """Events with timing, for the start and the end of jobs, and events for order alone, which cost the device less."""

    def __init__(self, driver: Driver) -> None:
        self.timed, self.untimed = Events(driver, is_timed=True), Events(driver, is_timed=False)

    def close(self) -> None:
        self.timed.close()
        self.untimed.close()


class Moment:
    """An event with users: it goes back to its pool when the last has let go, and means the same until then."""

    __slots__ = ("_events", "_lock", "_users", "event")

    def __init__(self, events: Events, event: Event) -> None:
        self.event = event
        self._events = events
        self._users = 1
        self._lock = threading.Lock()

    def share(self) -> Moment:
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            is_unused = not self._users
        if is_unused:
            self._events.give_back(self.event)


class DeviceHealth:
    """Whether the device still runs anything. Once it does not, every job has failed."""

    def __init__(self) -> None:
        self.is_broken = False

    def set_broken(self) -> None:
        if not self.is_broken:
            self.is_broken = True
            logger.error("The CUDA device is broken; nothing is offloaded or loaded any more.")


@dataclass(eq=False, slots=True)
class Job:
    """One transfer."""

    job_id: int
    extent: Extent
    make_runs: Callable[[], Runs]
    awaited: list[Moment]
    """The compute before it, and the ends of ``blockers``. Let go when it is submitted."""
    blockers: list[Job]
    """Jobs of the other lane that must end before it starts."""
    ended: Moment
    """Recorded when it is submitted."""
    started: Event | None = None
    num_bytes: int = 0
    is_submitted: bool = False
    """All that it does is in the stream, or as much of it as the driver took."""
    has_end: bool = False
    """``ended`` tells when nothing of it runs. Without, only a stream that is idle does."""
    failed: bool = False


class Lane:
    """The engine's thread makes it, and calls the methods without an underscore."""

    other: Lane
    """That of the other direction."""

    def __init__(
        self,
        driver: Driver,
        device: int,
        direction: Direction,
        health: DeviceHealth,
        pools: EventPools,
        spacer: int,
        borders: Int64s,
        gather_below: int,
    ) -> None:
        """``spacer`` is a byte of device memory that nobody reads. No copy may cross ``borders``, host addresses. Pages
        of fewer than ``gather_below`` bytes may be gathered."""
        self.direction = direction
        self.stream = driver.create_stream()
        self._driver = driver
        self._device = device
        self._health = health
        self._pools = pools
        self._spacer = spacer
        self._borders = borders
        self._gatherer = Gatherer.if_wanted(driver, PIECE_BYTES, gather_below)
        self._log = RateLimitedLog(logger)
        self._submitting = threading.Lock()
        """Held by whoever submits."""
        self._changed = threading.Condition()
        """Of what follows, and of ``is_submitted``."""
        self._queue: deque[Job] = deque()
        """Not submitted. Jobs are submitted in this order."""
        self._num_hurries = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Lane({self.direction.value}, queued={len(self._queue)})"

    def put(self, job: Job) -> None:
        """Queues a job. Raises ``RuntimeError`` if no thread can be had, with nothing queued."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"kvoffload-cuda-{self.direction.value}", daemon=True)
                thread.start()
                self._thread = thread
            self._queue.append(job)
            self._changed.notify_all()

    def hurry(self, job: Job) -> None:
        """Returns when ``job`` and all before it are submitted. Waits for no copy."""
        if job.is_submitted:
            return
        self._num_hurries += 1
        with self._changed:
            queue = [*self._queue]
        for each in queue:
            for blocker in [*each.blockers]:  # which came earlier than each
                self.other.hurry(blocker)
            self._submit(each, is_paced=False)
            if each is job:
                break
        self._num_hurries -= 1

    def check(self) -> None:
        """After an error: is it that of one call, or is the device broken?"""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(CudaError):
                self._driver.is_idle(self.stream)
                return
        self._health.set_broken()

    def has_ended(self, job: Job) -> bool:
        """Whether nothing of ``job`` runs, and nothing of it will. Does not block."""
        if self._health.is_broken or not job.is_submitted:
            return self._health.is_broken
        try:
            return self._driver.is_done(job.ended.event) if job.has_end else self._driver.is_idle(self.stream)
        except CudaError:
            self._log.exception(f"the end of transfer {job.job_id} cannot be seen")
            job.failed, job.has_end = True, False
            self.check()
            return self._health.is_broken

    def wait(self, job: Job) -> None:
        """Returns when ``job`` has ended: somebody is about to use its memory."""
        self.hurry(job)
        while not self.has_ended(job):
            time.sleep(_POLL_S)

    def close(self) -> bool:
        """Waits until what is queued is submitted and has ended, but not for ever. ``False`` if something of it may
        still run. Does not submit: with a device that hangs that may never return."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + DRAIN_S
        if self._thread is not None:
            self._thread.join(DRAIN_S)
            if self._thread.is_alive():
                return False
        while not self._is_idle():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> None:
        """After ``close``, if nothing runs any more."""
        with contextlib.suppress(CudaError):
            self._driver.destroy_stream(self.stream)
        if self._gatherer is not None:
            self._gatherer.close()

    def _is_idle(self) -> bool:
        try:
            return self._health.is_broken or self._driver.is_idle(self.stream)
        except CudaError:
            self.check()
            return self._health.is_broken

    # What follows runs on the lane's thread, or in ``hurry``.

    def _run(self) -> None:
        with contextlib.suppress(CudaError):  # then submitting fails, and says so
            self._driver.use_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    return
                job = self._queue[0]
                blockers, awaited = [*job.blockers], [moment.share() for moment in job.awaited]
            self._await(blockers, awaited)
            self._submit(job, is_paced=True)

    def _await(self, blockers: list[Job], awaited: list[Moment]) -> None:
        """Waits on the host, without holding up anybody: what is submitted then can run at once."""
        for blocker in blockers:
            with self.other._changed:
                self.other._changed.wait_for(lambda job=blocker: job.is_submitted)  # type: ignore[misc]
        for moment in awaited:
            with contextlib.suppress(CudaError):
                self._driver.synchronize_event(moment.event)
            moment.release()

    def _submit(self, job: Job, is_paced: bool) -> None:
        with self._submitting:
            if job.is_submitted:
                return
            try:
                self._start(job, is_paced)
            except Exception:  # noqa: BLE001 - a transfer that cannot be submitted is a miss
                self._log.exception(f"transfer {job.job_id} could not be submitted")
                job.failed = True
            # After a failure too: copies may run already, and it has ended when they have.
            with contextlib.suppress(CudaError):
                self._driver.record(job.ended.event, self.stream)
                job.has_end = True
            job.failed |= not job.has_end
            with self._changed:
                for moment in job.awaited:
                    moment.release()
                job.awaited, job.blockers = [], []
                self._queue.remove(job)
                job.is_submitted = True
                self._changed.notify_all()

    def _start(self, job: Job, is_paced: bool) -> None:
        if self._health.is_broken:
            raise TransferError("The device is broken.")
        driver, stream = self._driver, self.stream
        runs = job.make_runs().cut_at(self._borders)
        if self._gatherer is not None:
            runs = runs.in_order_of(runs.host)
        job.num_bytes = runs.num_bytes
        job.started = self._pools.timed.take()
        for moment in job.awaited:
            driver.wait_event(stream, moment.event)
        driver.record(job.started, stream)
        open_pieces: deque[Moment] = deque()
        try:
            for piece in runs.pieces(PIECE_BYTES, PIECE_RUNS):
                if open_pieces:
                    driver.fill(self._spacer, 0, 1, stream)
                if len(open_pieces) == OPEN_PIECES:
                    # Not by a call that waits: whoever hurries, a shutdown too, would wait with it.
                    while is_paced and not self._num_hurries and not driver.is_done(open_pieces[0].event):
                        time.sleep(_POLL_S)
                    open_pieces.popleft().release()
                self._copy(piece)
                open_pieces.append(self._pools.untimed.moment())
                driver.record(open_pieces[-1].event, stream)
        finally:
            for moment in open_pieces:
                moment.release()

    def _copy(self, runs: Runs) -> None:
        if self._gatherer is not None:
            runs = self._gatherer.copy(runs, self.direction, self._borders, self.stream)
        if self.direction is Direction.STORE:
            self._driver.copy_runs(runs.host, runs.device, runs.lengths, self.stream)
        else:
            self._driver.copy_runs(runs.device, runs.host, runs.lengths, self.stream)
