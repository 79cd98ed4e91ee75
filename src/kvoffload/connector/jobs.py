# SPDX-License-Identifier: Apache-2.0
"""Transfers in flight, their fences around GPU blocks, and the messages about them. Scheduler thread only.

A job exists from the ``prepare_*`` that pinned its slots until its last rank reports. Until then its GPU blocks are
*fenced*, because a store still reads them or a load still writes them. When the engine allocates a fenced block again,
the job is *flushed*: the workers wait for it before that step's loads and forward pass. One flush removes all fences of
the job, because all later work of the engine is ordered after it.

An engine that writes new blocks before it flushes provides a ``GPUBlockPool``, which holds the blocks of a fenced
store, so that they cannot be allocated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoffload.base import (
    Direction,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadKey,
    TransferResult,
    get_offload_group_idx,
)
from kvoffload.connector.engine import NO_BLOCK, GPUBlockPool
from kvoffload.connector.epochs import Epoch
from kvoffload.connector.groups import GroupGeometry
from kvoffload.connector.messages import ConnectorMeta, TransferJob
from kvoffload.connector.requests import Request
from kvoffload.metrics import Histogram, Stats

_NOTHING = ConnectorMeta()
# Python looks up a module's name several times faster than a member of an enumeration.
_LOAD, _STORE = Direction.LOAD, Direction.STORE


@dataclass(slots=True, eq=False)
class JobRecord:
    """The scheduler side's record of one ``TransferJob``: its request, and the progress of the ranks."""

    job_id: int
    direction: Direction
    request: Request
    """May outlive the request in the engine, because its context is needed to release the pins."""
    keys: tuple[OffloadKey, ...]
    """The keys that ``prepare_load`` pinned or ``prepare_store`` reserved; empty for a lost load."""
    gpu_block_ids: tuple[int, ...]
    """The GPU blocks, each once, in the order of the transfer."""
    waiting_ranks: int
    """Bit set of the ranks that have not reported yet: bit r is rank r."""
    epoch: Epoch
    """The request's epoch when the job began. If it is not the current epoch, the job is stale."""
    success: bool = True
    num_bytes: int = 0
    seconds: float = 0.0
    submitted: bool = False
    """Whether it was sent to the workers. Final stores count as sent from the start, because they start before any
    flush. A job that was not submitted can be cancelled, but not flushed."""
    flushed: bool = False
    """Whether the workers wait for it before its GPU blocks are used again, so that it needs no fences."""
    within_step: bool = False
    """Whether it is a load that its own step waits for. Its request runs in that step, and may have stores."""


class JobTable:
    """All jobs in flight by id, their fences by GPU block, and the messages that the next step sends to the workers.

    A job begins in a step and is *submitted* with the step's meta (``take``). It ends when all ranks have reported it
    (``record``), or when it is cancelled before that (``cancel_load``).
    """

    def __init__(self, geometry: Sequence[GroupGeometry], num_ranks: int) -> None:
        self.in_flight: dict[int, JobRecord] = {}
        """Jobs by id. Other code only reads it."""
        self.fences: dict[int, tuple[int, ...]] = {}
        """Job ids by GPU block: usually one, but two if the same block is stored again after a reset. Other code only
        tests whether there are any."""
        self.pool: GPUBlockPool | None = None
        """Holds the GPU blocks of fenced stores, for engines whose flushes come too late. Set before the first job
        begins."""
        self.num_loading_blocks = 0
        """Number of GPU blocks of all loads in flight. Other code only reads it."""
        self._num_ranks = num_ranks
        self._next_id = 0
        self._loads: list[TransferJob] = []
        self.final_stores: list[TransferJob] = []
        self._flushes: set[int] = set()
        self._num_flushed = 0
        self._ended_loads = _EndedJobs(_LOAD, geometry, num_ranks)
        self._ended_stores = _EndedJobs(_STORE, geometry, num_ranks)

    def __repr__(self) -> str:
        return f"JobTable({len(self.in_flight)} in flight, {len(self.fences)} GPU blocks fenced)"

    # -------------------------------------------------------------------------------------------------- begin, and send

    def begin(
        self, direction: Direction, request: Request, keys: Iterable[OffloadKey], gpu_block_ids: Iterable[int]
    ) -> JobRecord:
        job_id, fences = self._next_id, self.fences
        self._next_id += 1
        blocks = tuple(dict.fromkeys(gpu_block_ids))
        waiting = (1 << self._num_ranks) - 1
        job = JobRecord(job_id, direction, request, tuple(keys), blocks, waiting, request.epoch)
        self.in_flight[job_id] = job
        request.job_ids.add(job_id)
        for block_id in job.gpu_block_ids:
            fences[block_id] = (*fences[block_id], job_id) if block_id in fences else (job_id,)
        if direction is _LOAD:
            self.num_loading_blocks += len(blocks)
        elif self.pool is not None:
            self.pool.hold(job.gpu_block_ids)
        return job

    def begin_load(
        self,
        request: Request,
        keys: Iterable[OffloadKey],
        source: LoadStoreSpec | None,
        destination: GPULoadStoreSpec,
        gpu_block_ids: Sequence[int],
        within_step: bool = False,
    ) -> JobRecord:
        """Begin a load to ``gpu_block_ids``, ignoring ``NO_BLOCK``. Without a ``source``, it is a lost load."""
        job = self.begin(_LOAD, request, keys, [each for each in gpu_block_ids if each != NO_BLOCK])
        job.within_step = within_step
        self._loads.append(TransferJob(job.job_id, request.context.req_id, source, destination, within_step))
        return job

    def new_load(self, request: Request) -> JobRecord | None:
        """Return the load of the request that the workers do not have yet."""
        jobs = map(self.in_flight.__getitem__, request.job_ids)
        return next((job for job in jobs if not job.submitted), None)

    def cancel_load(self, request: Request) -> JobRecord | None:
        """End the load of the request that the workers do not have yet, and return it."""
        job = self.new_load(request)
        if job is not None:
            self._loads = [load for load in self._loads if load.job_id != job.job_id]
            self.remove(job)
        return job

    def add_final_stores(self, stores: Iterable[TransferJob]) -> None:
        """Add the stores of a request that ends. They count as submitted, because they start before any flush."""
        for transfer in stores:
            self.in_flight[transfer.job_id].submitted = True
            self.final_stores.append(transfer)

    def take(self, stores: Sequence[TransferJob]) -> ConnectorMeta:
        """Return the meta of this step, including ``stores``. Its jobs then count as submitted."""
        if not (stores or self._loads or self.final_stores or self._flushes):
            return _NOTHING
        meta = ConnectorMeta(tuple(self._loads), tuple(stores), tuple(self.final_stores), frozenset(self._flushes))
        for transfer in (*meta.loads, *meta.stores):
            self.in_flight[transfer.job_id].submitted = True
        self._loads, self.final_stores, self._flushes = [], [], set()
        return meta

    # ------------------------------------------------------------------------------------------------------------- end

    def record(self, rank: int, result: TransferResult) -> JobRecord | None:
        """Record one rank's result. For the last rank, remove the job, count it and return it.

        Otherwise return ``None``. Unknown jobs and repeated results of a rank change nothing.
        """
        job_id, success, num_bytes, seconds = result
        job = self.in_flight.get(job_id)
        if job is None or not job.waiting_ranks & 1 << rank:
            return None
        job.waiting_ranks ^= 1 << rank
        job.success &= success
        job.num_bytes += num_bytes
        job.seconds += seconds
        if job.waiting_ranks:
            return None
        self.remove(job)
        (self._ended_stores if job.direction is _STORE else self._ended_loads).count(job)
        return job

    def fail_stores(self) -> None:
        """Mark every store in flight as failed, whatever workers report, because the bytes that it read do not match
        its keys."""
        for job in self.in_flight.values():
            job.success &= job.direction is _LOAD

    def remove(self, job: JobRecord) -> None:
        """End a job: remove its fences, and detach it from its request."""
        del self.in_flight[job.job_id]
        if job.direction is _LOAD:
            self.num_loading_blocks -= len(job.gpu_block_ids)
        job.request.job_ids.discard(job.job_id)
        if not job.flushed:
            self._unfence(job)

    # ----------------------------------------------------------------------------------------------------------- flush

    def flush_for_blocks(self, gpu_block_ids: Iterable[int]) -> None:
        """Let the workers wait for the jobs that use these newly allocated GPU blocks. No job is flushed twice."""
        for block_id in gpu_block_ids:
            if block_id in self.fences:
                for job_id in self.fences[block_id]:
                    self._flush(self.in_flight[job_id])

    def flush_for_request(self, request: Request) -> None:
        """Flush the request's jobs, because it lost all its GPU blocks."""
        for job_id in sorted(request.job_ids):
            self._flush(self.in_flight[job_id])

    def _flush(self, job: JobRecord) -> None:
        if job.submitted and not job.flushed:
            job.flushed = True
            self._flushes.add(job.job_id)
            self._num_flushed += 1
            self._unfence(job)

    def _unfence(self, job: JobRecord) -> None:
        fences, own = self.fences, (job.job_id,)
        for block_id in job.gpu_block_ids:
            jobs = fences.get(block_id)
            if jobs == own:
                del fences[block_id]
            elif jobs:
                fences[block_id] = tuple(each for each in jobs if each != job.job_id)
        if job.direction is _STORE and self.pool is not None:
            self.pool.release(job.gpu_block_ids)

    # -----------------------------------------------------------------------------------------------------------------

    def get_stats(self) -> Stats:
        stats: Stats = {("jobs_in_flight",): len(self.in_flight), ("fenced_jobs",): self._num_flushed}
        return stats | self._ended_loads.get_stats() | self._ended_stores.get_stats()

    def check_invariants(self) -> None:
        """Recompute the fences and each request's jobs from scratch. For tests."""
        fences: dict[int, list[int]] = {}
        for job in self.in_flight.values():
            assert job.waiting_ranks, f"{job} has ended on every rank and is still here"
            assert job.job_id in job.request.job_ids, f"{job} is unknown to its request"
            if not job.flushed:
                for block_id in job.gpu_block_ids:
                    fences.setdefault(block_id, []).append(job.job_id)
        loading = [len(job.gpu_block_ids) for job in self.in_flight.values() if job.direction is _LOAD]
        assert self.num_loading_blocks == sum(loading)
        assert {b: sorted(j) for b, j in fences.items()} == {b: sorted(j) for b, j in self.fences.items()}


class _EndedJobs:
    """Counts the finished jobs of one direction, and the blocks and bytes that successful jobs moved."""

    def __init__(self, direction: Direction, geometry: Sequence[GroupGeometry], num_ranks: int) -> None:
        self._name = direction.value
        self._kinds = [group.kind.value for group in geometry]
        self._num_ranks = num_ranks
        self._num_ok = self._num_failed = self._num_bytes = 0
        self._seconds = 0.0
        self._num_blocks = [0] * len(geometry)
        self._job_seconds = Histogram(f"{self._name}_job_seconds")

    def __repr__(self) -> str:
        return f"_EndedJobs({self._name!r}, {self._num_ok} ok, {self._num_failed} failed)"

    def count(self, job: JobRecord) -> None:
        self._num_bytes += job.num_bytes
        self._seconds += job.seconds
        if not job.success:
            self._num_failed += 1
            return
        self._num_ok += 1
        # Ranks copy in parallel; bytes and seconds of a job are sums over the ranks.
        self._job_seconds.observe(job.seconds / self._num_ranks)
        if len(self._num_blocks) == 1:
            self._num_blocks[0] += len(job.keys)
        else:
            for key in job.keys:
                self._num_blocks[get_offload_group_idx(key)] += 1

    def get_stats(self) -> Stats:
        stats: Stats = {
            (f"{self._name}_jobs", "ok"): self._num_ok,
            (f"{self._name}_jobs", "failed"): self._num_failed,
            (f"{self._name}_bytes",): self._num_bytes,
            (f"{self._name}_seconds",): self._seconds,
        }
        for kind, num_blocks in zip(self._kinds, self._num_blocks, strict=True):
            sample = (f"{self._name}_blocks", kind)
            stats[sample] = stats.get(sample, 0) + num_blocks
        return stats | self._job_seconds.stats()
