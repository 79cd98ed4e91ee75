# SPDX-License-Identifier: Apache-2.0
"""Cascades: writes of stored blocks from host memory to the tiers below. Scheduler thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.metrics import Stats
from kvoffload.tiering.requests import TierRequest
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs

_LEAST_BACKLOG_BLOCKS = 64
_BACKLOG_SHARE = 4


class Cascades:
    """Pins blocks, once per tier, and submits them as jobs. The end of a job releases its pins. A tier gets no more
    blocks while its jobs pin as many as it may have (``SecondaryTierManager.max_backlog_blocks``).

    A stored block goes to the ``on_store_tiers``, and to the tiers that want its whole request.

    A request-level tier may ask for a block that is still being written to host memory. Such a block is *parked* until
    it is ready, and then written to the tier, or until it is gone.
    """

    def __init__(
        self, primary: CPUPrimaryTierOffloadingManager, jobs: TierJobs, on_store_tiers: Iterable[GuardedTier]
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self._on_store_tiers = tuple(on_store_tiers)
        self._storing: dict[OffloadKey, TierRequest] = {}
        """Blocks that are being stored in host memory, with their requests."""
        self.parked: dict[OffloadKey, list[TierRequest]] = {}
        """Parked blocks, with the requests for which they will be written to tiers. Others only read it."""
        self.outcomes = Counter({"ok": 0, "failed": 0, "dropped": 0})
        """Number of blocks whose write has ended, by outcome. Others only read it."""
        self._dropped: Counter[str] = Counter()
        """Blocks beyond a tier's backlog, by the tier's name."""
        self.num_pinned: Counter[GuardedTier] = Counter()
        """Number of pinned blocks, by tier. Others only read it."""

    def __repr__(self) -> str:
        return f"Cascades(storing={len(self._storing)}, parked={self.num_parked})"

    @property
    def num_parked(self) -> int:
        return sum(map(len, self.parked.values()))

    @property
    def can_retry(self) -> bool:
        """Return whether some parked block is ready to be written to a tier, or gone. The others are still being
        written to host memory."""
        return any(not self._is_being_written(key) for key in self.parked)

    def get_stats(self) -> Stats:
        return {("tier_dropped_blocks", name): count for name, count in self._dropped.items()}

    def submit(self, tiers: Iterable[GuardedTier], keys: Sequence[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Submit ready blocks to each of ``tiers``, as one job per tier. Return the blocks that a tier did not take.

        A tier takes as many leading blocks as its backlog has room for. If it holds the first or the last block,
        because they were computed again, the blocks that it holds only count as used.
        """
        not_taken: list[OffloadKey] = []
        for tier in tiers if keys else ():
            # A tier that lacks both ends of a run hardly ever has a block between them, and its store would notice.
            missing = keys
            if any(tier.holds([keys[0], keys[-1]])):
                held = tier.holds(keys)
                tier.touch([key for key, is_held in zip(keys, held) if is_held], context)
                missing = [key for key, is_held in zip(keys, held) if not is_held]
            taken = missing[: max(self._max_backlog(tier) - self.num_pinned[tier], 0)]
            if len(taken) < len(missing):
                dropped = missing[len(taken) :]
                self._dropped[tier.name] += len(dropped)
                self.outcomes["dropped"] += len(dropped)
                not_taken += dropped
            if not taken:
                continue
            slots = self._primary.prepare_read(taken, context).slots
            self.num_pinned[tier] += len(taken)
            job = TierJob(tier, context, taken, slots, is_promotion=False)
            if not self._jobs.submit(job):
                self.end([job])
                not_taken += taken
        return not_taken

    def _max_backlog(self, tier: GuardedTier) -> int:
        default = max(_LEAST_BACKLOG_BLOCKS, self._primary.num_blocks // _BACKLOG_SHARE)
        return default if tier.max_backlog_blocks is None else tier.max_backlog_blocks

    def end(self, jobs: Iterable[TierJob]) -> None:
        """Release the pins of jobs that have ended."""
        keys: list[OffloadKey] = []
        for job in jobs:
            self.outcomes["ok"] += len(job.succeeded)
            self.outcomes["failed"] += len(job.failed) - job.num_dropped
            self.outcomes["dropped"] += job.num_dropped
            self.num_pinned[job.tier] -= len(job.keys)
            keys += job.keys
        self._primary.complete_read(keys)

    def begin_stores(
        self, request: TierRequest, keys_to_store: Sequence[OffloadKey], keys: Sequence[OffloadKey]
    ) -> None:
        """Record that ``request`` stores ``keys_to_store``: host memory lacked these blocks of ``keys``."""
        self._storing.update(dict.fromkeys(keys_to_store, request))
        request.may_submit += len(keys_to_store)
        if request.whole_request_tiers:
            # Blocks that this request is storing itself are submitted when they are complete.
            others = [key for key in dict.fromkeys(keys) if self._storing.get(key) is not request]
            self.submit_or_park(request, others)

    def end_stores(self, keys: Sequence[OffloadKey]) -> Collection[TierRequest]:
        """Submit the stored blocks among ``keys``, whose writes to host memory have ended. Return the requests that may
        submit less from now on."""
        stored: dict[TierRequest, list[OffloadKey]] = {}
        storing = self._storing
        request: TierRequest | None = None
        for key, block in zip(keys, self._primary.slots.get_all(keys) if storing else ()):
            owner = storing.pop(key, None)
            if owner is None:
                continue
            if owner is not request:
                request = owner
                ready = stored.setdefault(request, [])
            request.may_submit -= 1
            if block is not None:
                ready.append(key)
        for request, ready in stored.items():
            tiers: Sequence[GuardedTier] = self._on_store_tiers
            if request.whole_request_tiers:
                tiers = sorted({*tiers, *request.whole_request_tiers}, key=lambda tier: tier.index)
            self.submit(tiers, ready, request.context)
        return [*stored, *(self.retry_parked(keys) if self.parked else ())]

    def submit_or_park(self, request: TierRequest, keys: Iterable[OffloadKey]) -> None:
        """Submit the ready blocks among ``keys`` to the tiers that want the whole ``request``, and park the blocks that
        are being written. Absent blocks are skipped."""
        ready: list[OffloadKey] = []
        for key in keys:
            block = self._primary.slots.get(key)
            if block is None:
                continue
            if block.is_ready:
                ready.append(key)
            else:
                self.parked.setdefault(key, []).append(request)
                request.may_submit += 1
        self.submit(request.whole_request_tiers, ready, request.context)

    def retry_parked(self, keys: Iterable[OffloadKey] | None = None) -> list[TierRequest]:
        """Check the parked blocks again (``keys``, or all). Return the requests that have fewer of them now."""
        if not self.parked:
            return []
        again: dict[TierRequest, list[OffloadKey]] = {}
        for key in list(self.parked) if keys is None else keys:
            if key not in self.parked or self._is_being_written(key):
                continue
            for request in self.parked.pop(key):
                request.may_submit -= 1
                again.setdefault(request, []).append(key)
        for request, ready in again.items():
            self.submit_or_park(request, ready)
        return list(again)

    def _is_being_written(self, key: OffloadKey) -> bool:
        block = self._primary.slots.get(key)
        return block is not None and not block.is_ready

    def reset(self) -> list[TierRequest]:
        """Forget every block that is being stored or parked. Return their requests."""
        forgotten = [*self._storing.values(), *(request for requests in self.parked.values() for request in requests)]
        for request in forgotten:
            request.may_submit -= 1
        self._storing.clear()
        self.parked.clear()
        return forgotten

    def check_invariants(self, requests: Iterable[TierRequest], promoted: Collection[OffloadKey]) -> None:
        """Check that stored and parked blocks are being written, that some tier wants the whole request of each parked
        block, and that the counts of ``requests`` (and of others that store) agree. No block is both stored and
        ``promoted``."""
        pinned: Counter[GuardedTier] = Counter()
        for job in self._jobs.in_flight.values():
            pinned[job.tier] += 0 if job.is_promotion else len(job.keys)
        assert +pinned == +self.num_pinned
        assert all(count <= self._max_backlog(tier) for tier, count in pinned.items())
        for key in self._storing:
            assert key not in promoted
            block = self._primary.slots.get(key)
            assert block is not None
            assert not block.is_ready
        for request in {*requests, *self._storing.values()}:
            parked = sum(each is request for parked in self.parked.values() for each in parked)
            assert request.may_submit == parked + sum(each is request for each in self._storing.values())
        for key, requests in self.parked.items():
            block = self._primary.slots.get(key)
            assert block is not None
            assert not block.is_ready, f"{key!r} is parked although it is ready"
            assert all(request.whole_request_tiers for request in requests)
