# SPDX-License-Identifier: Apache-2.0
"""The jobs of a tier over a block store: cut them into slices for I/O threads, and combine the results."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.metrics import Histogram, Stats
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.health import StoreHealth
from kvoffload.tiering.losses import StoreLosses
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import IoQueue, IoResult, IoStatus, IoTask, TierRunner
from kvoffload.tiering.stores.base import BlockStore

_SLICE_BYTES = 4 << 20
"""Maximum number of bytes in a slice, so that no slice occupies a thread for long."""
_LEAST_STORE_BYTES = 1 << 20
"""For smaller stores, waking another thread costs more than it gains."""
_MAX_SLICE_BLOCKS = 64
"""Maximum number of blocks in a slice. A store's ``batch_blocks`` replaces both limits."""


def slice_blocks(store: BlockStore, block_bytes: int) -> int:
    """Return the maximum number of blocks of ``block_bytes`` that one call of ``store`` moves."""
    return store.batch_blocks or max(1, min(_MAX_SLICE_BLOCKS, _SLICE_BYTES // block_bytes))


class StoreTransfers:
    """Moves blocks between the slots of ``primary_kv_view`` and ``store``.

    Each load becomes a task at once. Stores are gathered until ``submit_stores``, at the end of the step, and then
    become one task: while requests decode, single blocks are stored now and then, and each task wakes a thread that
    needs the interpreter. Each job gets its own result, with the last slice that contains blocks of it.

    While reads are off, loads fail. While writes are off, stores are dropped, except for an occasional first slice of a
    job, which is the probe. A job with a hanging call has no result, because its slots may still be written.
    """

    def __init__(
        self,
        tier_type: str,
        primary_kv_view: memoryview,
        store: BlockStore,
        index: PresenceIndex,
        runner: TierRunner,
        losses: StoreLosses,
        *,
        reads: StoreHealth,
        writes: StoreHealth,
    ) -> None:
        self._slots: npt.NDArray[np.uint8] | None = np.asarray(primary_kv_view)
        block_bytes = self._slots.shape[1]
        self._store = store
        self._index = index
        self._runner = runner
        self._losses = losses
        self._reads = reads
        self._writes = writes
        self._max_slice_blocks = slice_blocks(store, block_bytes)
        self._least_store_blocks = -(-_LEAST_STORE_BYTES // block_bytes)
        self._gathered: list[JobMetadata] = []
        """Stores that ``submit_stores`` will submit."""
        self._open: dict[IoTask, None] = {}
        """The tasks that have not ended, oldest first."""
        self._num_open_jobs = 0
        """Number of jobs in tasks that have no result."""
        self._results: list[JobResult] = []
        self._loaded = _Counts(tier_type, "read", block_bytes)
        self._stored = _Counts(tier_type, "write", block_bytes)
        self._num_dropped = 0

    def submit_store(self, job: JobMetadata) -> None:
        self._gathered.append(job)

    def submit_load(self, job: JobMetadata) -> None:
        if not self._reads.breaker.is_closed:
            self._loaded.num_failures += len(job.keys)
            self._results.append(JobResult(job.job_id, success=False))
            return
        self._submit([(job, len(job.keys))], IoQueue.LOAD)

    def submit_stores(self) -> None:
        """Submit the gathered stores, because the step ends."""
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        room = self._room_for(gathered)
        admitted: list[tuple[JobMetadata, int]] = []
        for job in gathered:
            count = len(job.keys)
            if count > room:
                self._num_dropped += count - room
                count = room
            room -= count
            if count:
                admitted.append((job, count))
            else:
                self._results.append(JobResult(job.job_id, success=False, num_dropped=len(job.keys)))
        self._submit(admitted, IoQueue.STORE)

    def take_results(self) -> list[JobResult]:
        """Return the jobs that ended since the last call."""
        if not self._results:
            return []
        results, self._results = self._results, []
        return results

    @property
    def is_pending(self) -> bool:
        """Whether a job continues, or its result waits to be taken. Jobs that hang do not count."""
        # Oldest first, so the loop visits only hanging tasks before the first one that continues.
        return bool(self._results or self._gathered) or any(not task.hangs for task in self._open)

    def release(self) -> None:
        """Drop the slots, because the tier has ended. They may be unmapped once no call refers to them."""
        self._slots = None

    def stats(self, tier_type: str) -> Stats:
        return {
            ("tier_blocks_stored", tier_type): self._stored.num_blocks,
            ("tier_blocks_loaded", tier_type): self._loaded.num_blocks,
            ("tier_store_failures", tier_type): self._stored.num_failures,
            ("tier_load_failures", tier_type): self._loaded.num_failures,
            ("tier_dropped_blocks", tier_type): self._num_dropped,
            ("tier_queued_jobs", tier_type): len(self._gathered) + self._num_open_jobs,
            **self._loaded.stats(),
            **self._stored.stats(),
        }

    def _room_for(self, jobs: Sequence[JobMetadata]) -> int:
        """Return how many of the first blocks of ``jobs`` may be written."""
        num_blocks = sum(len(job.keys) for job in jobs)
        if self._writes.breaker.is_closed:
            return num_blocks
        return self._slice_blocks_of(num_blocks, IoQueue.STORE) if self._writes.begin_probe() else 0

    def _slice_blocks_of(self, num_blocks: int, queue: IoQueue) -> int:
        """Return the number of blocks per slice of a task. It is small enough that all threads share the task and no
        slice delays the next one for long, but large enough to justify waking a thread."""
        shared = -(-num_blocks // self._runner.num_threads)
        least = self._least_store_blocks if queue is IoQueue.STORE else 1
        return min(self._max_slice_blocks, max(shared, least))

    def _submit(self, wanted: Sequence[tuple[JobMetadata, int]], queue: IoQueue) -> None:
        """Submit the given number of first blocks of each job, at least one, as one task."""
        if not wanted:
            return
        keys: list[OffloadKey] = []
        slots: list[int] = []
        stops: list[int] = []
        for job, count in wanted:
            keys += job.keys[:count]
            slots += job.slots[:count]
            stops.append(len(keys))
        num_blocks = len(keys)
        if len(wanted) > 1 and len(set(keys)) != num_blocks:
            for each in wanted:  # a call of a store must not name a block twice
                self._submit([each], queue)
            return
        outcomes, num_open = [False] * num_blocks, [count for _, count in wanted]
        num_dropped = [len(job.keys) - count for job, count in wanted]
        call: Callable[[Sequence[OffloadKey], Sequence[memoryview]], list[bool]]
        if queue is IoQueue.LOAD:
            call, take_result = self._store.read_into, self._take_load_result
        else:
            call, take_result = self._store.write, self._take_store_result
            self._index.begin_store(keys)
        # The work refers to the memory itself, so that a call that hangs beyond ``shutdown`` keeps it mapped.
        rows, losses = self._slots, self._losses
        assert rows is not None

        def transfer(start: int, stop: int) -> list[bool]:
            try:
                return call(keys[start:stop], [memoryview(rows[slot]) for slot in slots[start:stop]])
            finally:
                losses.queue()

        def on_result(result: IoResult) -> None:
            try:
                take_result(result)
            finally:  # the job ends even if the bookkeeping raises
                end_jobs(result)

        def end_jobs(result: IoResult) -> None:
            touched = range(bisect_right(stops, result.start), bisect_left(stops, result.stop) + 1)
            if result.status is IoStatus.OVERDUE:
                for at in touched:
                    wanted[at][0].is_overdue = True
                return
            outcomes[result.start : result.stop] = result.outcomes
            for at in touched:
                (job, count), stop = wanted[at], stops[at]
                num_ended = min(stop, result.stop) - max(stop - count, result.start)
                num_open[at] -= num_ended
                num_dropped[at] += num_ended if result.status is IoStatus.CANCELLED else 0
                if num_open[at]:
                    continue
                self._num_open_jobs -= 1
                own = outcomes[stop - count : stop]
                # There are fewer outcomes than keys if a part of the job was dropped.
                is_good, good = count == len(job.keys) and all(own), None
                if not is_good and any(own):
                    good = [key for key, is_stored in zip(job.keys, own, strict=False) if is_stored]
                self._results.append(JobResult(job.job_id, is_good, good, result.ended_s, num_dropped[at]))
            if result.is_last:
                del self._open[result.task]

        task = IoTask(queue, num_blocks, transfer, keys, on_result)
        self._open[task] = None
        self._num_open_jobs += len(wanted)
        self._runner.submit(task, self._slice_blocks_of(num_blocks, queue))

    def _take_store_result(self, result: IoResult) -> None:
        self._writes.record(result)
        if result.status is IoStatus.OVERDUE:
            return
        self._index.end_store(result.keys, result.outcomes)
        self._stored.count(result)
        if result.status is IoStatus.CANCELLED:
            self._num_dropped += len(result.outcomes)
        else:
            self._stored.num_failures += result.outcomes.count(False)

    def _take_load_result(self, result: IoResult) -> None:
        self._reads.record(result)
        if result.status is IoStatus.OVERDUE:
            self._index.begin_hang(result.keys)
            return
        self._index.end_hang(result.keys)
        self._loaded.count(result)
        missing = [key for key, is_loaded in zip(result.keys, result.outcomes, strict=True) if not is_loaded]
        self._loaded.num_failures += len(missing)
        if missing and result.status is IoStatus.DONE:
            self._losses.forget(missing)


class _Counts:
    """Counts the blocks that a tier's loads or stores moved, and the store's time for them."""

    def __init__(self, tier_type: str, direction: str, block_bytes: int) -> None:
        self._labels = tier_type, direction
        self._block_bytes = block_bytes
        self.num_blocks = self.num_failures = 0
        self._seconds = 0.0
        self._batches = Histogram("tier_batch_seconds", tier_type, direction)

    def count(self, result: IoResult) -> None:
        """Count a call of the store that has ended or was cancelled."""
        self.num_blocks += result.outcomes.count(True)
        if result.status is IoStatus.DONE:
            self._seconds += result.seconds
            self._batches.observe(result.seconds)

    def stats(self) -> Stats:
        return {
            ("tier_io_bytes", *self._labels): self.num_blocks * self._block_bytes,
            ("tier_io_seconds", *self._labels): self._seconds,
            **self._batches.stats(),
        }
