# SPDX-License-Identifier: Apache-2.0
"""Transfers in flight, and the fences they put around GPU blocks. Scheduler thread only.

A job lives from the ``prepare_*`` that pinned its slots to its last rank's report. Until then its GPU blocks are
*fenced*: a store still reads them, a load still writes them. When the engine hands a fenced block out again, the job
is flushed, once: the workers wait for it before the step's loads and forward pass, so later hand-outs are safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvoffload.base import Direction, OffloadKey, TransferResult
from kvoffload.connector.requests import RequestOffloadState

__all__ = ["JobRecord", "JobTable"]


@dataclass(slots=True, eq=False)
class JobRecord:
    """One transfer of one request on all ranks."""

    job_id: int
    direction: Direction
    request: RequestOffloadState
    """Outlives the request in the engine: the context is needed to give pins back."""
    keys: tuple[OffloadKey, ...]
    """Pinned by ``prepare_load``, or reserved by ``prepare_store``; empty for a load that was lost before that."""
    gpu_block_ids: frozenset[int]
    waiting_ranks: set[int]
    epoch: int
    """Cache resets before it began; an older job than the cache is stale."""
    success: bool = True
    num_bytes: int = 0
    seconds: float = 0.0
    submitted: bool = False
    """Told to the workers; a job that is not may still be called back."""
    flushed: bool = False


class JobTable:
    """All jobs in flight, by id, with their fences."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, JobRecord] = {}
        # Usually one job a block: two when the same block is stored again after a reset.
        self._fences: dict[int, list[int]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(self._jobs.values())

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def __getitem__(self, job_id: int) -> JobRecord:
        return self._jobs[job_id]

    @property
    def has_fences(self) -> bool:
        return bool(self._fences)

    def __repr__(self) -> str:
        return f"JobTable({len(self._jobs)} in flight, {len(self._fences)} GPU blocks fenced)"

    def begin(
        self,
        direction: Direction,
        request: RequestOffloadState,
        keys: Iterable[OffloadKey],
        gpu_block_ids: Iterable[int],
        epoch: int,
    ) -> JobRecord:
        job = JobRecord(
            self._next_id,
            direction,
            request,
            tuple(keys),
            frozenset(gpu_block_ids),
            set(range(self._num_ranks)),
            epoch,
        )
        self._next_id += 1
        self._jobs[job.job_id] = job
        request.job_ids.add(job.job_id)
        for block_id in job.gpu_block_ids:
            self._fences.setdefault(block_id, []).append(job.job_id)
        return job

    def record(self, rank: int, result: TransferResult) -> JobRecord | None:
        """Records one rank's result. Returns the job, removed, if that rank was the last; otherwise ``None``, also for
        unknown jobs and for ranks that reported it before."""
        job = self._jobs.get(result.job_id)
        if job is None or rank not in job.waiting_ranks:
            return None
        job.waiting_ranks.discard(rank)
        job.success &= result.success
        job.num_bytes += result.num_bytes
        job.seconds += result.seconds
        if job.waiting_ranks:
            return None
        self.remove(job)
        return job

    def remove(self, job: JobRecord) -> None:
        """Ends a job: no fences, nothing for its request to wait for."""
        del self._jobs[job.job_id]
        job.request.job_ids.discard(job.job_id)
        self._unfence(job)

    def flush_for_blocks(self, gpu_block_ids: Iterable[int]) -> list[int]:
        """The jobs to flush because these GPU blocks were handed out; the same job is never named twice."""
        flushed: list[int] = []
        for block_id in gpu_block_ids:
            if block_id in self._fences:
                for job_id in tuple(self._fences[block_id]):
                    flushed += self._flush(self._jobs[job_id])
        return flushed

    def flush_for_request(self, request: RequestOffloadState) -> list[int]:
        """The jobs to flush because the request lost all its GPU blocks."""
        return [job_id for each in sorted(request.job_ids) for job_id in self._flush(self._jobs[each])]

    def _flush(self, job: JobRecord) -> list[int]:
        if job.flushed or not job.submitted:
            return []
        job.flushed = True
        self._unfence(job)
        return [job.job_id]

    def _unfence(self, job: JobRecord) -> None:
        for block_id in job.gpu_block_ids:
            jobs = self._fences.get(block_id)
            if jobs and job.job_id in jobs:
                jobs.remove(job.job_id)
                if not jobs:
                    del self._fences[block_id]

    def check_invariants(self) -> None:
        """Recomputes the fences and each request's jobs from scratch."""
        fences: dict[int, list[int]] = {}
        for job in self._jobs.values():
            assert job.waiting_ranks, f"{job} has ended on every rank and is still here"
            assert job.job_id in job.request.job_ids, f"{job} is unknown to its request"
            if not job.flushed:
                for block_id in job.gpu_block_ids:
                    fences.setdefault(block_id, []).append(job.job_id)
        assert {b: sorted(j) for b, j in fences.items()} == {b: sorted(j) for b, j in self._fences.items()}
