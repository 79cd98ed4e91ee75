# SPDX-License-Identifier: Apache-2.0
"""Copy runs within host memory without holding the GIL. This is the backend for CPU engines.

Each run is one ``memmove`` through ctypes, which costs about a microsecond, so runs below 64 KiB are slower.

Copies run on a few threads. Jobs that use the same slots or GPU blocks run one after another, in the order of
submission. Otherwise, loads start before stores, because a request waits for a load and no request waits for a store.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

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
    extent: Extent
    make_plan: Callable[[], CopyPlan]
    after: int = 0
    """For a load: how many stores must start before it, because the last of them uses the same memory."""
    num_bytes: int = 0
    open_parts: int = 1
    """Number of calls that have not ended. The first one makes the plan."""
    failed: bool = False
    started_s: float = 0.0


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
        self._open: set[int] = set()
        self._waiting: dict[Direction, deque[_QueuedTransfer]] = {direction: deque() for direction in Direction}
        self._running: set[_QueuedTransfer] = set()
        self._parts: deque[tuple[_QueuedTransfer, Callable[[], None]]] = deque()
        """Parts of running jobs that no thread has taken."""
        self._num_stores = self._num_started = 0
        """Numbers of stores that were submitted, and that have started."""
        self._last_store: dict[int, int] = {}
        """The number of the last store that uses each slot, or each GPU block (as ``~block``)."""
        self._finished: dict[Direction, list[TransferResult]] = {direction: [] for direction in Direction}
        self._closing = False
        self._threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        return f"TransferQueue(threads={self.num_threads}, open={sorted(self._open)})"

    def submit(self, job_id: int, direction: Direction, extent: Extent, make_plan: Callable[[], CopyPlan]) -> None:
        """Queue a job.

        It fails at once if its id is already open, if no thread can be started, or after ``shutdown``.
        """
        job = _QueuedTransfer(job_id, direction, extent, make_plan)
        ids = [*extent.slots, *(~block for block in extent.gpu_blocks)]
        with self._lock:
            if self._closing or job_id in self._open or not self._start_threads():
                self._finished[direction].append(TransferResult(job_id, success=False))
                return
            if direction is Direction.STORE:
                self._num_stores += 1
                self._last_store.update(dict.fromkeys(ids, self._num_stores))
            else:
                job.after = max((self._last_store.get(each, 0) for each in ids), default=0)
            self._open.add(job_id)
            self._waiting[direction].append(job)
            self._has_work.notify()

    def take_finished(self, direction: Direction) -> list[TransferResult]:
        """Return the results of the jobs of one direction that ended since the last call, each once."""
        with self._lock:
            finished, self._finished[direction] = self._finished[direction], []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when none of ``job_ids`` is open. Unknown ids are not open."""
        with self._job_ended:
            self._job_ended.wait_for(lambda: self._open.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Fail the jobs that have not started, and wait for the running ones. Idempotent."""
        with self._lock:
            self._closing = True
            for direction, waiting in self._waiting.items():
                self._open.difference_update(job.job_id for job in waiting)
                self._finished[direction] += [TransferResult(job.job_id, success=False) for job in waiting]
                waiting.clear()
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
                self._has_work.wait_for(lambda: self._parts or self._start_next() or self._closing)
                if not self._parts:
                    return
                job, part = self._parts.popleft()
            self._do(job, part)

    def _start_next(self) -> bool:
        """Start the next job, and return whether one was started: the first load or, if that load must wait for stores,
        the first store. It starts after all running jobs that use its memory."""
        loads, stores = self._waiting[Direction.LOAD], self._waiting[Direction.STORE]
        # If the first load waits for a store, no load is older than that store, so no store overtakes a load.
        waiting = loads if loads and loads[0].after <= self._num_started else stores
        if not waiting or any(waiting[0].extent.overlaps(job.extent) for job in self._running):
            return False
        job = waiting.popleft()
        job.started_s = time.monotonic()
        self._num_started += job.direction is Direction.STORE
        self._running.add(job)
        self._parts.append((job, functools.partial(self._plan, job)))
        return True

    def _plan(self, job: _QueuedTransfer) -> None:
        plan = job.make_plan()
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

    def _end(self, job: _QueuedTransfer) -> None:
        seconds = time.monotonic() - job.started_s
        result = TransferResult(job.job_id, not job.failed, 0 if job.failed else job.num_bytes, seconds)
        self._finished[job.direction].append(result)
        self._open.remove(job.job_id)
        self._running.remove(job)
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
