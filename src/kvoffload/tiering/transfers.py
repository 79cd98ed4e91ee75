# SPDX-License-Identifier: Apache-2.0
"""The jobs of a tier over a block store: cut into slices for I/O threads, and their ends put together again."""

from __future__ import annotations

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

__all__ = ["StoreTransfers"]

_SLICE_BYTES = 4 << 20
_MAX_SLICE_BLOCKS = 64


class StoreTransfers:
    """Loads and stores between the slots of ``primary_kv_view`` and ``store``.

    While reads are off, loads fail; while writes are off, stores are dropped, except for the first slice of a job now
    and then, which is the probe. A job of which a call hangs has no result, because its slots may still be written.
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
        max_backlog_blocks: int,
    ) -> None:
        self._slots: npt.NDArray[np.uint8] | None = np.asarray(primary_kv_view)
        block_bytes = self._slots.shape[1]
        self._store = store
        self._index = index
        self._runner = runner
        self._losses = losses
        self._reads = reads
        self._writes = writes
        self._max_backlog = max_backlog_blocks
        self._max_slice_blocks = store.batch_blocks or max(1, min(_MAX_SLICE_BLOCKS, _SLICE_BYTES // block_bytes))
        self._open: dict[IoTask, None] = {}
        """Tasks of jobs without a result, oldest first."""
        self._results: list[JobResult] = []
        self._loaded = _Counts(tier_type, "read", block_bytes)
        self._stored = _Counts(tier_type, "write", block_bytes)
        self._num_dropped = 0

    def submit_store(self, job: JobMetadata) -> None:
        num_admitted = self._num_admitted(len(job.keys))
        self._num_dropped += len(job.keys) - num_admitted
        if not num_admitted:
            self._results.append(JobResult(job.job_id, success=False))
            return
        self._index.begin_store(job.keys[:num_admitted])
        self._submit(job, IoQueue.STORE, num_admitted, self._store.write, self._store_slice_ended)

    def submit_load(self, job: JobMetadata) -> None:
        if not self._reads.breaker.is_closed:
            self._loaded.num_failures += len(job.keys)
            self._results.append(JobResult(job.job_id, success=False))
            return
        self._submit(job, IoQueue.LOAD, len(job.keys), self._store.read_into, self._load_slice_ended)

    def take_results(self) -> list[JobResult]:
        """The jobs that ended since the last call."""
        if not self._results:
            return []
        results, self._results = self._results, []
        return results

    @property
    def is_pending(self) -> bool:
        """Whether a job goes on, or its result waits. Jobs that hang do not count."""
        # Oldest first: all that are looked at before the first that goes on hang.
        return bool(self._results) or any(not task.hangs for task in self._open)

    def release(self) -> None:
        """The tier has ended: the slots may be unmapped once no call refers to them."""
        self._slots = None

    def stats(self, tier_type: str) -> Stats:
        return {
            ("tier_blocks_stored", tier_type): self._stored.num_blocks,
            ("tier_blocks_loaded", tier_type): self._loaded.num_blocks,
            ("tier_store_failures", tier_type): self._stored.num_failures,
            ("tier_load_failures", tier_type): self._loaded.num_failures,
            ("tier_dropped_blocks", tier_type): self._num_dropped,
            ("tier_queued_jobs", tier_type): len(self._open),
            **self._loaded.stats(),
            **self._stored.stats(),
        }

    def _num_admitted(self, num_blocks: int) -> int:
        """How many of a job's blocks are to be written, from its first block on."""
        num_admitted = min(num_blocks, self._max_backlog - self._runner.backlog(IoQueue.STORE))
        if num_admitted <= 0:
            return 0
        if self._writes.breaker.is_closed:
            return num_admitted
        return min(num_admitted, self._slice_blocks_of(num_blocks)) if self._writes.begin_probe() else 0

    def _slice_blocks_of(self, num_blocks: int) -> int:
        """Blocks per slice of a job: so few that all threads share the job, and that no slice delays the next one
        long."""
        return min(self._max_slice_blocks, -(-num_blocks // self._runner.num_threads))

    def _submit(
        self,
        job: JobMetadata,
        queue: IoQueue,
        num_blocks: int,
        call: Callable[[Sequence[OffloadKey], Sequence[memoryview]], list[bool]],
        slice_ended: Callable[[IoResult], None],
    ) -> None:
        # The work refers to the slots itself, so that a call which hangs beyond ``shutdown`` keeps them mapped.
        slots, keys, block_ids, losses = self._slots, job.keys, job.block_ids, self._losses
        assert slots is not None

        def transfer(start: int, stop: int) -> list[bool]:
            try:
                return call(keys[start:stop], [memoryview(slots[slot]) for slot in block_ids[start:stop].tolist()])
            finally:
                losses.queue()

        def ended(result: IoResult) -> None:
            slice_ended(result)
            if result.is_last:
                del self._open[result.task]
                # The outcomes are fewer than the keys where a part of the job was dropped.
                good = [key for key, is_good in zip(keys, result.task.outcomes, strict=False) if is_good]
                all_good = len(good) == len(keys)
                some_good = good if good and not all_good else None
                self._results.append(JobResult(job.job_id, all_good, some_good, result.ended_s))

        task = IoTask(queue, num_blocks, transfer, keys, ended)
        self._open[task] = None
        self._runner.submit(task, self._slice_blocks_of(num_blocks))

    def _store_slice_ended(self, result: IoResult) -> None:
        self._writes.record(result)
        self._index.end_store(result.keys, result.outcomes)
        self._stored.count(result)
        if result.status is IoStatus.CANCELLED:
            self._num_dropped += len(result.outcomes)
        else:
            self._stored.num_failures += result.outcomes.count(False)

    def _load_slice_ended(self, result: IoResult) -> None:
        self._reads.record(result)
        self._index.end_hang(result.keys)
        self._loaded.count(result)
        missing = [key for key, is_loaded in zip(result.keys, result.outcomes, strict=True) if not is_loaded]
        self._loaded.num_failures += len(missing)
        if result.status is IoStatus.DONE:
            self._losses.forget(missing)
        if missing:
            self._losses.log_corruption(missing)


class _Counts:
    """Blocks that a tier's loads moved, or its stores, and the store's time for them."""

    def __init__(self, tier_type: str, direction: str, block_bytes: int) -> None:
        self._labels = tier_type, direction
        self._block_bytes = block_bytes
        self.num_blocks = self.num_failures = 0
        self._seconds = 0.0
        self._batches = Histogram("tier_batch_seconds", tier_type, direction)

    def count(self, result: IoResult) -> None:
        """A call of the store has ended, or was cancelled."""
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
