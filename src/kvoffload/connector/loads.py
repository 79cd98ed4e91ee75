# SPDX-License-Identifier: Apache-2.0
"""Loads of hits to the device, from the pins they take to their end. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.base import Direction, GPULoadStoreSpec, LoadStoreSpec, OffloadingManager, OffloadKey
from kvoffload.connector.engine import NO_BLOCK
from kvoffload.connector.groups import GroupGeometry, hit_unit_tokens
from kvoffload.connector.jobs import EndedJobs, JobRecord, JobTable, Outbox
from kvoffload.connector.messages import TransferJob
from kvoffload.connector.requests import RequestOffloadState
from kvoffload.errors import TransferError
from kvoffload.metrics import Stats

__all__ = ["Loads"]


class Loads:
    """Begins, cancels and ends the load of a request's ``Hit``, and knows which keys are being loaded."""

    def __init__(
        self, manager: OffloadingManager, geometry: Sequence[GroupGeometry], jobs: JobTable, outbox: Outbox
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._unit_tokens = hit_unit_tokens(tuple(geometry))
        self._jobs = jobs
        self._outbox = outbox
        self._loading: dict[OffloadKey, int] = {}
        """Keys that are being loaded to the device, with the job that loads them: the first, if several do."""
        self._ended = EndedJobs(Direction.LOAD, geometry, jobs.num_ranks)

    def __repr__(self) -> str:
        return f"Loads({len(self._loading)} blocks being loaded)"

    def begin(self, state: RequestOffloadState) -> None:
        """Loads the request's hit to its GPU blocks. Without pins or GPU blocks for all of it, the load is lost: it is
        sent, and the workers report it as failed."""
        hit = state.hit
        keys: list[OffloadKey] = []
        gpu_ids: list[int] = []
        sizes: list[int] = []
        starts: list[int] = []
        # Elsewhere no hit can end, and the tokens after the last whole block would be taken for loaded.
        complete = hit.tokens % self._unit_tokens == 0
        for group, own in zip(self._geometry, state.groups, strict=True):
            positions = group.gpu_blocks_for_hit(hit.computed_tokens, hit.tokens)
            blocks = group.blocks_for_hit(hit.computed_tokens, hit.tokens)
            ids = own.gpu_block_ids[positions.start : positions.stop]
            complete &= len(ids) == len(positions) and NO_BLOCK not in ids
            keys += own.keys[blocks.start : blocks.stop]
            gpu_ids += ids
            sizes.append(len(ids))
            starts.append(positions.start)
        destination = GPULoadStoreSpec(gpu_ids, sizes, starts)
        source: LoadStoreSpec | None = None
        if complete:
            try:
                source = self._manager.prepare_load(keys, state.context)
            except TransferError:
                source = None
        fenced = [block_id for block_id in gpu_ids if block_id != NO_BLOCK]
        job = self._jobs.begin(Direction.LOAD, state, keys if source is not None else (), fenced)
        hit.load_job_id = job.job_id
        if source is None:
            hit.load_failed = True
            self._outbox.lost_loads.append(TransferJob(job.job_id, state.context.req_id, destination, destination))
            return
        for key in keys:
            self._loading.setdefault(key, job.job_id)
        self._outbox.loads.append(TransferJob(job.job_id, state.context.req_id, source, destination))

    def end(self, job: JobRecord) -> bool:
        """The load ended on all ranks. Returns whether its request still waits for it: if not, it was aborted or
        preempted meanwhile."""
        self._ended.count(job)
        self._release(job)
        hit = job.request.hit
        if hit.load_job_id != job.job_id:
            return False
        hit.end_load(job.success)
        return True

    def forget(self, state: RequestOffloadState) -> None:
        """The request ended. Cancels its load if the workers do not have it yet. One that runs is left to end; its GPU
        blocks are fenced."""
        job = self._new_job(state)
        if job is not None:
            self._outbox.cancel_load(job.job_id)
            self._jobs.remove(job)
            self._release(job)
        state.hit.load_job_id = None

    def is_new(self, state: RequestOffloadState) -> bool:
        """Whether the request has a load that the workers do not have yet."""
        return self._new_job(state) is not None

    def is_in_flight(self, job_id: int | None) -> bool:
        return job_id in self._jobs.in_flight

    def job_of(self, key: OffloadKey) -> int | None:
        """The load in flight that brings ``key``."""
        return self._loading.get(key)

    def _new_job(self, state: RequestOffloadState) -> JobRecord | None:
        job_id = state.hit.load_job_id
        if job_id is None or self._jobs.in_flight[job_id].submitted:
            return None
        return self._jobs.in_flight[job_id]

    def _release(self, job: JobRecord) -> None:
        if not job.keys:  # a lost load: nothing was pinned for it
            return
        for key in job.keys:
            # Other requests may ask for the key in this very step, and must not wait for a load that has ended. An
            # entry of another load of the key stays.
            if self._loading.get(key) == job.job_id:
                del self._loading[key]
        self._manager.complete_load(job.keys, job.request.context)

    def get_stats(self) -> Stats:
        return self._ended.get_stats()

    def check_invariants(self) -> None:
        """For tests: keys that are being loaded belong to loads in flight."""
        for key, job_id in self._loading.items():
            job = self._jobs.in_flight[job_id]
            assert job.direction is Direction.LOAD
            assert key in job.keys
