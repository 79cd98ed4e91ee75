# SPDX-License-Identifier: Apache-2.0
"""Copy runs within host memory without holding the GIL. This is the backend for CPU engines.

Each run is one ``memmove`` through ctypes, which costs about a microsecond, so runs below 64 KiB are slower.

Copies run on a few threads. Two jobs *conflict* if one writes a slot or GPU block that the other reads or writes. A job
starts when all earlier jobs that conflict with it have ended; other jobs may be reordered. Loads start before stores,
because a request waits for a load and no request waits for a store.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.base import (
    CanonicalKVCaches,
    Direction,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.plan import CopyLayout, Extent, Runs, plan_parts

logger = logging.getLogger(__name__)

CopyRuns = Callable[[Runs], None]
Int64s = npt.NDArray[np.int64]


def make_host_handlers(
    kv_caches: CanonicalKVCaches, kv_view: memoryview, layout: CopyLayout, num_threads: int
) -> dict[tuple[str, str], OffloadingHandler]:
    """Return the handlers for both directions of one worker.

    They share one queue with ``num_threads`` threads, and keep the KV caches and ``kv_view`` alive until ``shutdown``.
    """
    keep_alive = (kv_caches, kv_view)
    queue = TransferQueue(num_threads)
    store = HostHandler(queue, Direction.STORE, layout, copy_to_host, keep_alive)
    load = HostHandler(queue, Direction.LOAD, layout, copy_to_device, keep_alive)
    return {("GPU", "CPU"): store, ("CPU", "GPU"): load}


class HostHandler(OffloadingHandler):
    """One direction of copies within host memory, over a queue that both directions share.

    A CPU engine computes on the worker's own thread, so compute submitted before ``transfer_async`` has ended.
    """

    def __init__(
        self, queue: TransferQueue, direction: Direction, layout: CopyLayout, copy_runs: CopyRuns, keep_alive: object
    ) -> None:
        self._queue = queue
        self._direction = direction
        self._layout = layout
        self._copy_runs = copy_runs
        self._keep_alive: object = keep_alive

    def __repr__(self) -> str:
        return f"HostHandler({self._direction.value}, {self._queue!r})"

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        gpu, cpu = spec if self._direction is Direction.STORE else spec[::-1]
        if not isinstance(gpu, GPULoadStoreSpec) or not isinstance(cpu, CPULoadStoreSpec):
            raise TypeError(f"A {self._direction.value} copies between GPU and CPU blocks, not {spec!r}.")
        extent = Extent(frozenset(cpu.block_ids.tolist()), frozenset(gpu.block_ids.tolist()))
        self._queue.submit(job_id, self._direction, extent, lambda: self._plan(gpu, cpu))

    def get_finished(self) -> list[TransferResult]:
        return self._queue.take_finished(self._direction)

    def wait(self, job_ids: Collection[int]) -> None:
        self._queue.wait(job_ids)

    def shutdown(self) -> None:
        self._queue.shutdown()
        self._keep_alive = None

    def _plan(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> CopyPlan:
        parts, num_bytes = plan_parts(self._layout, gpu, cpu, self._direction, self._queue.num_threads)
        return CopyPlan([functools.partial(self._copy_runs, part) for part in parts], num_bytes)


# ---------------------------------------------------------------------------------------------------- the order of jobs


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The copies of a job: parts that may run in parallel, and their total number of bytes."""

    parts: Sequence[Callable[[], None]]
    num_bytes: int


@dataclass(eq=False, slots=True)
class _QueuedTransfer:
    job_id: int
    direction: Direction
    make_plan: Callable[[], CopyPlan]
    extent: Extent
    num_blockers: int = 0
    """The number of open jobs that must end before this one starts."""
    blocked: list[_QueuedTransfer] = field(default_factory=list)
    """Later jobs that wait for this one, in the order of submission."""
    num_bytes: int = 0
    open_parts: int = 0
    failed: bool = False
    started_s: float = 0.0


class _Memory:
    """The open jobs that use each slot, or each GPU block: its last writer, and the jobs that read it after that.

    A job that uses an id waits only for these. They in turn wait for earlier conflicting jobs, so all conflicting jobs
    run in the order of submission. A job costs O(ids), however many jobs are open.
    """

    def __init__(self) -> None:
        self._writer: dict[int, _QueuedTransfer] = {}
        self._readers: dict[int, dict[_QueuedTransfer, None]] = {}

    def write(self, job: _QueuedTransfer, ids: Iterable[int]) -> Iterator[_QueuedTransfer]:
        """Record that ``job`` will write ``ids``. Yields the jobs that it must wait for."""
        for each in ids:
            readers = self._readers.pop(each, None)
            if readers:
                yield from readers  # they wait for the last writer
            elif each in self._writer:
                yield self._writer[each]
            self._writer[each] = job

    def read(self, job: _QueuedTransfer, ids: Iterable[int]) -> Iterator[_QueuedTransfer]:
        """Record that ``job`` will read ``ids``. Yields the jobs that it must wait for."""
        for each in ids:
            if each in self._writer:
                yield self._writer[each]
            self._readers.setdefault(each, {})[job] = None

    def release(self, job: _QueuedTransfer, ids: Iterable[int]) -> None:
        """Remove ``job``, which has ended, from the users of ``ids``."""
        for each in ids:
            if self._writer.get(each) is job:
                del self._writer[each]
            readers = self._readers.get(each)
            if readers is not None and job in readers:
                del readers[job]
                if not readers:
                    del self._readers[each]


class TransferQueue:
    """The copies of one worker, in both directions.

    The worker's thread calls ``submit``, ``take_finished``, ``wait`` and ``shutdown``. Plans and copies run on
    ``num_threads`` daemon threads, which the first job starts. A job fails if its plan or one of its copies raises.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._job_ended = threading.Condition(self._lock)
        self._open: dict[int, _QueuedTransfer] = {}
        self._slots, self._gpu_blocks = _Memory(), _Memory()
        self._ready: dict[Direction, deque[_QueuedTransfer]] = {direction: deque() for direction in Direction}
        self._parts: deque[tuple[_QueuedTransfer, Callable[[], None]]] = deque()
        self._finished: dict[Direction, list[TransferResult]] = {direction: [] for direction in Direction}
        self._closing = False
        self._threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        return f"TransferQueue(threads={self.num_threads}, open={sorted(self._open)})"

    def submit(self, job_id: int, direction: Direction, extent: Extent, make_plan: Callable[[], CopyPlan]) -> None:
        """Queue a job.

        It fails at once if its id is already open, if no thread can be started, or after ``shutdown``.
        """
        job = _QueuedTransfer(job_id, direction, make_plan, extent)
        with self._lock:
            if self._closing or job_id in self._open or not self._start_threads():
                self._finished[direction].append(TransferResult(job_id, success=False))
                return
            # Stores read GPU blocks and write slots, loads the reverse.
            if direction is Direction.STORE:
                blockers = {*self._slots.write(job, extent.slots), *self._gpu_blocks.read(job, extent.gpu_blocks)}
            else:
                blockers = {*self._slots.read(job, extent.slots), *self._gpu_blocks.write(job, extent.gpu_blocks)}
            for blocker in blockers:
                blocker.blocked.append(job)
            job.num_blockers = len(blockers)
            self._open[job_id] = job
            if not blockers:
                self._ready[direction].append(job)
                self._has_work.notify()

    def take_finished(self, direction: Direction) -> list[TransferResult]:
        """Return the results of the jobs of one direction that ended since the last call, each once."""
        with self._lock:
            finished, self._finished[direction] = self._finished[direction], []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when none of ``job_ids`` is open. Unknown ids are not open."""
        with self._job_ended:
            self._job_ended.wait_for(lambda: self._open.keys().isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Fail the jobs that have not started, and wait for the running ones. Idempotent."""
        with self._lock:
            self._closing = True
            for job in [job for job in self._open.values() if not job.started_s]:
                self._remove(job)
                self._finished[job.direction].append(TransferResult(job.job_id, success=False))
            for ready in self._ready.values():
                ready.clear()
            self._has_work.notify_all()
            self._job_ended.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    # Everything below runs on the queue's threads, or with the lock held.

    def _start_threads(self) -> bool:
        """Start missing threads, and return whether any thread exists. The next job retries failed starts."""
        while len(self._threads) < self.num_threads:
            name = f"kvoffload-copy-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process has reached its limit of threads
                break
            self._threads.append(thread)
        return bool(self._threads)

    def _run(self) -> None:
        while True:
            with self._has_work:
                self._has_work.wait_for(lambda: self._parts or any(self._ready.values()) or self._closing)
                if self._parts:
                    job, part = self._parts.popleft()
                elif started := self._start_next():
                    job, part = started
                elif self._closing:
                    return
                else:
                    continue
            self._do(job, part)

    def _start_next(self) -> tuple[_QueuedTransfer, Callable[[], None]] | None:
        for direction in (Direction.LOAD, Direction.STORE):
            if self._ready[direction]:
                job = self._ready[direction].popleft()
                job.started_s = time.monotonic()
                job.open_parts = 1
                return job, functools.partial(self._plan, job)
        return None

    def _plan(self, job: _QueuedTransfer) -> None:
        plan = job.make_plan()
        if not plan.parts:
            return
        with self._lock:
            job.num_bytes = plan.num_bytes
            job.open_parts += len(plan.parts)
            self._parts.extend((job, part) for part in plan.parts)
            self._has_work.notify(len(plan.parts))

    def _do(self, job: _QueuedTransfer, part: Callable[[], None]) -> None:
        failed = False
        try:
            part()
        except BaseException:
            # The job fails after any exception, and its blocks become misses. If the exception ended this thread
            # instead, the job would stay open and ``wait`` would never return.
            logger.exception("Transfer %d failed.", job.job_id)
            failed = True
        with self._lock:
            job.failed |= failed
            job.open_parts -= 1
            if not job.open_parts:
                self._end(job)

    def _remove(self, job: _QueuedTransfer) -> None:
        del self._open[job.job_id]
        self._slots.release(job, job.extent.slots)
        self._gpu_blocks.release(job, job.extent.gpu_blocks)

    def _end(self, job: _QueuedTransfer) -> None:
        self._remove(job)
        seconds = time.monotonic() - job.started_s
        result = TransferResult(job.job_id, not job.failed, 0 if job.failed else job.num_bytes, seconds)
        self._finished[job.direction].append(result)
        for later in job.blocked:
            later.num_blockers -= 1
            if not later.num_blockers and not self._closing:
                self._ready[later.direction].append(later)
                self._has_work.notify()
        self._job_ended.notify_all()


# ---------------------------------------------------------------------------------------------------------- moving runs


def copy_to_host(runs: Runs) -> None:
    """Copy runs from the device's side to the region. The caller keeps both sides alive."""
    _move(runs.host, runs.device, runs.lengths)


def copy_to_device(runs: Runs) -> None:
    """Copy runs from the region to the device's side. The caller keeps both sides alive."""
    _move(runs.device, runs.host, runs.lengths)


def _move(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
    for destination, source, length in zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(destination, source, length)  # this releases the GIL
