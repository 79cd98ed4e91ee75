# SPDX-License-Identifier: Apache-2.0
"""Cascades: copies of ready blocks from the primary tier to lower ones. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.requests import Request
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs

__all__ = ["Cascades"]


class Cascades:
    """Pins blocks, once per tier, and submits them; the end of each job gives its own pins back.

    A request-level tier may ask for a block that is still being written. Such a block is *parked* here until it is
    ready, and then cascaded, or until it is gone, and then dropped.
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager, jobs: TierJobs) -> None:
        self._primary = primary
        self._jobs = jobs
        self.parked: dict[OffloadKey, list[Request]] = {}
        """Blocks that are being written, with the requests they will be cascaded for. Others only read it."""
        self._blocks_written = 0
        self._blocks_failed = 0

    def __repr__(self) -> str:
        return f"Cascades(parked={self.num_parked})"

    @property
    def num_parked(self) -> int:
        return sum(map(len, self.parked.values()))

    @property
    def outcomes(self) -> dict[str, int]:
        """Blocks whose cascade ended, by outcome."""
        return {"ok": self._blocks_written, "failed": self._blocks_failed}

    def submit(self, tiers: Iterable[GuardedTier], keys: Sequence[OffloadKey], context: ReqContext) -> list[TierJob]:
        """Submits ready blocks to each of ``tiers``, as one job per tier. Returns the jobs that were not taken."""
        not_taken: list[TierJob] = []
        if not keys:
            return not_taken
        for tier in tiers:
            spec = self._primary.prepare_read(keys, context)
            refused = self._jobs.submit(tier, keys, spec.block_ids, context, is_promotion=False)
            if refused is not None:
                self.end(refused)
                not_taken.append(refused)
        return not_taken

    def end(self, job: TierJob) -> None:
        """Gives back the pins of a job that has ended."""
        self._blocks_written += len(job.succeeded)
        self._blocks_failed += len(job.failed)
        self._primary.complete_read(job.metadata.keys, job.metadata.req_context)

    def submit_or_park(self, request: Request, keys: Iterable[OffloadKey]) -> None:
        """Submits the ready ones of ``keys`` to the tiers that want the whole of ``request``, and parks those that are
        being written. Absent blocks are skipped: there is nothing to read."""
        ready: list[OffloadKey] = []
        for key in keys:
            block = self._primary.slots.get(key)
            if block is None:
                continue
            if block.is_ready:
                ready.append(key)
            else:
                self.parked.setdefault(key, []).append(request)
                request.open_work += 1
        self.submit(request.whole_request_tiers, ready, request.context)

    def retry_parked(self, keys: Iterable[OffloadKey] | None = None) -> list[Request]:
        """Looks again at the parked blocks (those of ``keys``, or all); returns the requests that have fewer now."""
        if not self.parked:
            return []
        again: dict[int, tuple[Request, list[OffloadKey]]] = {}
        for key in list(self.parked) if keys is None else keys:
            if key not in self.parked:
                continue
            block = self._primary.slots.get(key)
            if block is not None and not block.is_ready:
                continue
            for request in self.parked.pop(key):
                request.open_work -= 1
                again.setdefault(id(request), (request, []))[1].append(key)
        for request, ready in again.values():
            self.submit_or_park(request, ready)
        return [request for request, _ in again.values()]

    def drop_parked(self) -> list[Request]:
        """Forgets every parked block; returns the requests that had any."""
        parked = [request for requests in self.parked.values() for request in requests]
        for request in parked:
            request.open_work -= 1
        self.parked.clear()
        return parked

    def check_invariants(self) -> None:
        """Every parked block is being written, for requests of which some tier wants all."""
        for key, requests in self.parked.items():
            block = self._primary.slots.get(key)
            assert block is not None
            assert not block.is_ready, f"{key!r} is parked although it is ready"
            assert all(request.whole_request_tiers for request in requests)
