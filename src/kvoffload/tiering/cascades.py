# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way down, from the primary tier to the tiers below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.tiering.primary import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.tier_jobs import EndedJob, GuardedTier, Transfers
from kvoffload.tiering.waiting import RequestState

__all__ = ["Cascades"]


class Cascades:
    """Pins blocks, one pin per tier, and sends them down; each job gives its own pins back when it ends.

    What a request-level tier asked for while the block was still being written is *parked* here until it is
    ready (then it goes down) or gone (then it is forgotten).
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager, transfers: Transfers) -> None:
        self._primary = primary
        self._transfers = transfers
        self._parked: dict[OffloadKey, list[RequestState]] = {}
        self._blocks_sent = 0
        self._blocks_failed = 0

    def __repr__(self) -> str:
        return f"Cascades(parked={self.num_parked})"

    @property
    def num_parked(self) -> int:
        return sum(map(len, self._parked.values()))

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    @property
    def stats(self) -> dict[str, int]:
        """Blocks whose cascade ended, by outcome."""
        return {"ok": self._blocks_sent, "failed": self._blocks_failed}

    def send(self, tiers: Iterable[GuardedTier], keys: Sequence[OffloadKey], req_context: ReqContext) -> list[EndedJob]:
        """Sends ready blocks to each of ``tiers``, as one job per tier. Answers those that were not taken."""
        not_taken: list[EndedJob] = []
        if not keys:
            return not_taken
        for tier in tiers:
            spec = self._primary.prepare_read(keys, req_context)
            refused = self._transfers.submit(tier, keys, spec.block_ids, req_context, is_promotion=False)
            if refused is not None:
                self.ended(refused)
                not_taken.append(refused)
        return not_taken

    def ended(self, job: EndedJob) -> None:
        self._blocks_sent += len(job.succeeded)
        self._blocks_failed += len(job.failed)
        self._primary.complete_read(job.job.keys, job.job.req_context)

    def send_or_park(self, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """Sends what is ready of ``keys`` to the tiers that want the whole of ``request``, and parks what is being
        written. Absent blocks are skipped: there is nothing to read."""
        ready: list[OffloadKey] = []
        for key in keys:
            block = self._primary.peek(key)
            if block is None:
                continue
            if block.is_ready:
                ready.append(key)
            else:
                self._parked.setdefault(key, []).append(request)
                request.parked += 1
        self.send(request.whole_request_tiers, ready, request.context)

    def settle(self, keys: Iterable[OffloadKey] | None = None) -> list[RequestState]:
        """Looks again at what is parked (among ``keys``, or all of it); answers the requests it moved on for."""
        if not self._parked:
            return []
        again: dict[int, tuple[RequestState, list[OffloadKey]]] = {}
        for key in list(self._parked) if keys is None else keys:
            if key not in self._parked:
                continue
            block = self._primary.peek(key)
            if block is not None and not block.is_ready:
                continue
            for request in self._parked.pop(key):
                request.parked -= 1
                again.setdefault(id(request), (request, []))[1].append(key)
        for request, ready in again.values():
            self.send_or_park(request, ready)
        return [request for request, _ in again.values()]

    def forget_parked(self) -> list[RequestState]:
        """Gives up everything that is parked; answers the requests it was parked for."""
        requests = {id(request): request for parked in self._parked.values() for request in parked}
        for request in requests.values():
            request.parked = 0
        self._parked.clear()
        return list(requests.values())

    def check_invariants(self) -> None:
        """Every parked block is being written, and every request counts what is parked for it."""
        counts: dict[int, int] = {}
        for key, requests in self._parked.items():
            block = self._primary.peek(key)
            assert block is not None
            assert not block.is_ready, f"{key!r} is parked although it is ready"
            for request in requests:
                assert request.whole_request_tiers
                counts[id(request)] = counts.get(id(request), 0) + 1
        for requests in self._parked.values():
            for request in requests:
                assert request.parked == counts[id(request)]
