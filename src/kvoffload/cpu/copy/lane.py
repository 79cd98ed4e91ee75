# SPDX-License-Identifier: Apache-2.0
"""Make the copies of one direction between a CUDA device and the region, with a stream and a thread that submits to it.

The engine's thread only records the events that a job waits for, and queues the job. The lane's thread spends half a
microsecond of CPU time on each copy, and waits if the driver's queue is full. It submits a job once the compute before
the job is done, so that nothing queues up in the driver. It submits in pieces, so that small copies of other streams
can run between them.

The order does not depend on this thread: on the device's own timeline, each job waits for the compute and for the jobs
that must come before it. So a caller that needs a job submitted immediately (``hurry``) submits it itself.
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
from kvoffload.cpu.copy.plan import Extent, Runs
from kvoffload.errors import TransferError
from kvoffload.logs import RateLimitedLog

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]

PIECE_BYTES = 16 << 20
"""The largest piece. A copy engine makes the copies of one stream back to back, so small copies of other streams wait
until there is a gap between two pieces (torchrec issues 4303 and 4373: 32 MiB with a tiny operation between). This
value has not been measured on a device."""
PIECE_RUNS = 256
"""The most runs in a piece. A channel seems to hold about 1,024 launches (undocumented; the probe measures it). The
next call then blocks and may hold the context's lock, which stalls the engine's own launches. ``OPEN_PIECES`` pieces
stay below this number."""
OPEN_PIECES = 3
"""The most pieces that are submitted and not done. Two keep the copy engine busy while the thread wakes up."""
DRAIN_S = 30.0
"""The time limit for a stream at shutdown, in seconds."""

_ATTEMPTS = 3
_POLL_S = 100e-6


class Events:
    """A pool of events of one kind. Any thread may use it."""

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
        """Return a new moment with one user."""
        return Moment(self, self.take())

    def give_back(self, event: Event) -> None:
        """Return an event that nobody will query again. Streams that wait for it are not affected by its next use."""
        self._spare.append(event)

    def close(self) -> None:
        while self._spare:
            with contextlib.suppress(CudaError):
                self._driver.destroy_event(self._spare.pop())


class EventPools:
    """Two pools: events with timing, for the start and end of jobs, and cheaper events that only keep order."""

    def __init__(self, driver: Driver) -> None:
        self.timed, self.untimed = Events(driver, is_timed=True), Events(driver, is_timed=False)

    def close(self) -> None:
        self.timed.close()
        self.untimed.close()


class Moment:
    """An event with users. It keeps its meaning until the last user releases it, and then returns to its pool."""

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
    """Whether the device is broken. If it is, every call and every job fails."""

    def __init__(self) -> None:
        self.is_broken = False

    def set_broken(self) -> None:
        if not self.is_broken:
            self.is_broken = True
            logger.error("The CUDA device is broken, so kvoffload stops offloading and loading.")


@dataclass(eq=False, slots=True)
class Job:
    """One transfer."""

    job_id: int
    extent: Extent
    make_runs: Callable[[], Runs]
    awaited: list[Moment]
    """The compute before this job, and the ends of ``blockers``. Released when the job is submitted."""
    blockers: list[Job]
    """Jobs of the other lane that must end before this one starts."""
    ended: Moment
    """Recorded after the job's last copy, if ``has_end``."""
    started: Event | None = None
    num_bytes: int = 0
    has_copies: bool = False
    """Whether the driver may have accepted some of the job's copies."""
    is_submitted: bool = False
    """Whether all of the job's work, or as much as the driver accepted, is in the stream."""
    has_end: bool = False
    """Whether ``ended`` was recorded. A wait for an event that was never recorded has no effect, so other jobs must not
    rely on ``ended`` until then."""
    failed: bool = False


class Lane:
    """One direction of copies.

    The engine's thread creates it and calls its methods with the device's context current.
    """

    other: Lane
    """The lane of the other direction."""

    def __init__(
        self,
        driver: Driver,
        device: int,
        direction: Direction,
        health: DeviceHealth,
        pools: EventPools,
        spacer: int,
        borders: Int64s,
    ) -> None:
        """Create the lane and its stream.

        ``spacer`` is the address of a byte of device memory that nobody reads. No copy may cross one of the host
        addresses ``borders``.
        """
        self.direction = direction
        self.stream = driver.create_stream()
        self._driver = driver
        self._device = device
        self._health = health
        self._pools = pools
        self._spacer = spacer
        self._borders = borders
        self._log = RateLimitedLog(logger)
        self._submitting = threading.Lock()
        """Held by the thread that submits."""
        self._changed = threading.Condition()
        """Guards the fields below and ``Job.is_submitted``."""
        self._queue: deque[Job] = deque()
        """Jobs to submit, in this order."""
        self._num_hurries = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Lane({self.direction.value}, queued={len(self._queue)})"

    def put(self, job: Job) -> None:
        """Queue a job. Raises ``RuntimeError``, with nothing queued, if no thread can be started."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"kvoffload-cuda-{self.direction.value}", daemon=True)
                thread.start()
                self._thread = thread
            self._queue.append(job)
            self._changed.notify_all()

    def hurry(self, job: Job) -> None:
        """Submit ``job`` and all jobs before it now. Does not wait for copies."""
        if job.is_submitted:
            return
        self._num_hurries += 1
        with self._changed:
            queue = [*self._queue]
        for each in queue:
            for blocker in [*each.blockers]:  # all of them are older than ``each``
                self.other.hurry(blocker)
            self._submit(each, is_paced=False)
            if each is job:
                break
        self._num_hurries -= 1

    def check(self) -> None:
        """Find out, after an error, whether the device is broken or only one call failed."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(CudaError):
                self._driver.is_idle(self.stream)
                return
        self._health.set_broken()

    def has_ended(self, job: Job) -> bool:
        """Return whether all copies of ``job`` are over. Does not block.

        CUDA does not promise that copies into host memory have stopped once a broken device reports its error. So the
        slots of such a store stay in use until the process ends.
        """
        if not job.is_submitted:
            return False
        if self._health.is_broken:
            return self.direction is Direction.LOAD or not job.has_copies
        try:
            if self.record_end(job):
                return self._driver.is_done(job.ended.event)
            return self._driver.is_idle(self.stream)
        except CudaError:
            self._log.exception(f"cannot see the end of transfer {job.job_id}")
            job.failed, job.has_end = True, False
            self.check()
            return False

    def record_end(self, job: Job) -> bool:
        """Record ``job.ended`` after all copies of ``job``, unless it is already recorded. Returns whether it is.

        A later attempt also covers jobs that were submitted meanwhile, which is harmless.
        """
        if not job.has_end:
            with contextlib.suppress(CudaError):
                self._driver.record(job.ended.event, self.stream)
                job.has_end = True
        return job.has_end

    def wait(self, job: Job) -> None:
        """Return when ``job`` has ended, because a caller is about to use its memory, or when the device is broken."""
        self.hurry(job)
        while not self.has_ended(job) and not self._health.is_broken:
            time.sleep(_POLL_S)

    def close(self) -> bool:
        """Wait, within a time limit, until all queued jobs are submitted and have ended.

        Returns ``False`` if some of them may still run. The lane's thread submits them, because a device that hangs may
        never return from that.
        """
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
        """Destroy the stream. Call this after ``close``, if no copy is running."""
        with contextlib.suppress(CudaError):
            self._driver.destroy_stream(self.stream)

    def _is_idle(self) -> bool:
        try:
            return self._health.is_broken or self._driver.is_idle(self.stream)
        except CudaError:
            self.check()
            return self._health.is_broken

    # The methods below run on the lane's thread or in ``hurry``.

    def _run(self) -> None:
        with contextlib.suppress(CudaError):  # submitting then fails and reports it
            self._driver.use_device(self._device)
            self._driver.allow_captures()
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
        """Wait on the host, so that the job can run as soon as it is submitted and blocks nothing in the driver."""
        for blocker in blockers:
            with self.other._changed:
                self.other._changed.wait_for(lambda job=blocker: job.is_submitted)  # type: ignore[misc]
            while not self.other.record_end(blocker) and not self.other.has_ended(blocker):
                if self._num_hurries or self._is_closing or self._health.is_broken:
                    break  # the job then fails, or has been submitted
                time.sleep(_POLL_S)
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
            # Also after a failure, because some copies may be running.
            job.failed |= not self.record_end(job)
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
        job.num_bytes = runs.num_bytes
        job.started = self._pools.timed.take()
        for blocker in job.blockers:
            if not self.other.record_end(blocker) and not self.other.has_ended(blocker):
                raise TransferError(f"It must follow transfer {blocker.job_id}, whose end CUDA cannot record.")
        for moment in job.awaited:
            driver.wait_event(stream, moment.event)
        driver.record(job.started, stream)
        open_pieces: deque[Moment] = deque()
        try:
            for piece in runs.pieces(PIECE_BYTES, PIECE_RUNS):
                if open_pieces:
                    driver.fill(self._spacer, 0, 1, stream)
                if len(open_pieces) == OPEN_PIECES:
                    # Polls, because a call that waits would also delay a caller that hurries, and a shutdown.
                    while is_paced and not self._num_hurries and not driver.is_done(open_pieces[0].event):
                        time.sleep(_POLL_S)
                    open_pieces.popleft().release()
                job.has_copies = True
                self._copy(piece)
                open_pieces.append(self._pools.untimed.moment())
                driver.record(open_pieces[-1].event, stream)
        finally:
            for moment in open_pieces:
                moment.release()

    def _copy(self, runs: Runs) -> None:
        if self.direction is Direction.STORE:
            self._driver.copy_runs(runs.host, runs.device, runs.lengths, self.stream)
        else:
            self._driver.copy_runs(runs.device, runs.host, runs.lengths, self.stream)
