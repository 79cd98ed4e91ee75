# SPDX-License-Identifier: Apache-2.0
"""Promotions: reads from lower tiers into slots of host memory. Scheduler thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache

from kvoffload.base import OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.miss import REFUSALS, Miss
from kvoffload.tiering.load_policy import LoadPlanner
from kvoffload.tiering.requests import TierRequest, Wait
from kvoffload.tiering.segments import HERE, Place, Segment
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs
from kvoffload.tiering.waits import Waits


class Promotions:
    """Reserves a slot for each block at once, gathers a step's reads into jobs, and publishes the blocks that arrive.

    A slot stays reserved until the tier has reported the end of its job, even if no request needs the block, because
    memory that a late read may write to must not be reused. ``on_reserved`` is called after each reservation. A
    promotion that no request waits for, a probe, belongs to ``probe_context``.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        waits: Waits,
        jobs: TierJobs,
        planner: LoadPlanner,
        on_reserved: Callable[[PrepareStoreOutput], object],
    ) -> None:
        self._primary = primary
        self._waits = waits
        self._jobs = jobs
        self._planner = planner
        self._on_reserved = on_reserved
        self.probe_context = ReqContext("kvoffload:probe")
        self._probed: set[GuardedTier] = set()
        """The tiers that know ``probe_context``."""
        self.queue: dict[tuple[int, int], TierJob] = {}
        """Jobs to submit, by tier and request. Other code only reads it."""
        self._job_of: dict[OffloadKey, TierJob] = {}
        """The job of every block that is being promoted, queued or in progress."""
        waits.promoted = self._job_of.keys()
        self.refused = Counter({miss.label: 0 for miss in REFUSALS})
        self.outcomes = Counter({"ok": 0, "failed": 0})

    def __repr__(self) -> str:
        return f"Promotions(in_flight={len(self._job_of)}, jobs_queued={len(self.queue)})"

    def __len__(self) -> int:
        return len(self._job_of)

    def place_of(self, key: OffloadKey) -> Place:
        """Return the source of a block that is being written: a tier, or the GPU, which counts as host memory."""
        job = self._job_of.get(key)
        return HERE if job is None else _place(job.tier.index, job.is_overdue)

    def begun(self, keys: Sequence[OffloadKey], survey: Sequence[Segment]) -> dict[int, int]:
        """Return the ``Link.num_begun`` of the last surveyed block on its way, by tier."""
        found: dict[int, int] = {}
        at = 0
        for place, num_blocks in survey:
            at += num_blocks
            if place.is_arriving:
                (tier,) = place.tiers
                found[tier] = max(found.get(tier, 0), self._job_of[keys[at - 1]].begun)
        return found

    # ---------------------------------------------------------------------------------------------------- begin

    def begin(self, tier: GuardedTier, wait: Wait, keys: Sequence[OffloadKey]) -> int:
        """Reserve slots for the head of ``keys``, as many as fit, and queue their reads from ``tier``. The request
        waits for each of these blocks. Returns their number. The reason why the next block was rejected becomes its
        verdict."""
        request, hits = wait.request, wait.hits
        begun, most = 0, len(keys)
        while begun < len(keys):
            room = self._waits.room_beside(hits)
            if room <= 0:
                self._refuse(request, keys[begun], Miss.PROMOTION_SHARE)
                break
            # Blocks that are certain to find a slot are reserved in one call, and the others one by one.
            portion = keys[begun : begun + max(1, min(self._certain_room(hits), room, most))]
            slots = self._reserve(portion, request.context, hits)
            if slots is None and len(portion) > 1:
                most = 1  # a transfer from before a reset still uses the slot of one of them
                continue
            if slots is None:
                self._refuse(request, portion[0], Miss.NO_ROOM)
                break
            self._waits.begin(wait)
            hits = ()
            self._waits.promote(portion, wait)
            self._queue(tier, portion, slots, wait)
            begun += len(portion)
        return begun

    def probe(self, tier: GuardedTier, keys: Sequence[OffloadKey], asking: Wait) -> None:
        """Promote ``keys``, for which no request waits, if there is room in addition to the hits of ``asking``."""
        keys = keys[: self._waits.room_beside(())]
        slots = self._reserve(keys, self.probe_context, asking.hits) if keys else None
        if slots is not None:
            if tier not in self._probed:
                self._probed.add(tier)
                tier.wants_whole_request(self.probe_context)  # announces it; the answer does not matter
            self._waits.promote(keys, None)
            self._queue(tier, keys, slots, None)

    def _queue(self, tier: GuardedTier, keys: Sequence[OffloadKey], slots: list[int], wait: Wait | None) -> None:
        context = self.probe_context if wait is None else wait.request.context
        name = tier.index, id(context)  # an engine may use a request's id again
        job = self.queue.get(name)
        if job is None:
            job = self.queue[name] = TierJob(tier, context, is_promotion=True)
        assert isinstance(job.keys, list)
        job.keys += keys  # copying the list for each block of a long prefix would take seconds
        job.slots += slots
        if wait is not None and wait.plan is not None and wait.is_planned(keys):
            job.portion_s = min(job.portion_s, wait.plan.portion_s)
        self._job_of.update(dict.fromkeys(keys, job))
        job.begun = self._planner.link(tier.index).begin(len(keys))

    def _certain_room(self, hits: Collection[OffloadKey]) -> int:
        """Return the number of blocks that are certain to find a slot without evicting any of ``hits``."""
        slots, claimed = self._primary.slots, self._waits.claimed
        return slots.num_free + slots.num_idle - sum(key not in claimed for key in hits)

    def _refuse(self, request: TierRequest, key: OffloadKey, verdict: Miss) -> None:
        if request.verdicts.get(key) not in REFUSALS:  # a request that waits for other blocks asks again in each step
            self.refused[verdict.label] += 1
        self._waits.refuse(request, [key], verdict)

    def _reserve(
        self, keys: Sequence[OffloadKey], context: ReqContext, hits: Collection[OffloadKey]
    ) -> list[int] | None:
        """Reserve a slot for each of ``keys`` without evicting any of ``hits``, and return the slots."""
        # A reservation inserts its last key first. Reversed, the first key is inserted first and gets the slot of the
        # first victim, as if the keys came one by one.
        reserved = self._primary.prepare_write(keys[::-1], context, hits)
        if reserved is None:
            return None
        self._on_reserved(reserved)
        assert isinstance(reserved.store_spec, CPULoadStoreSpec)
        return reserved.store_spec.slots[::-1]

    # ------------------------------------------------------------------------------------------ submit, and end

    def submit(self, context: ReqContext | None = None) -> None:
        """Submit the queued jobs of all requests or of one request."""
        for name in [name for name, job in self.queue.items() if context is None or job.req_context is context]:
            self._submit(name)

    def _submit(self, name: tuple[int, int]) -> None:
        queued = self.queue.pop(name)
        tier, context, keys, slots = queued.tier, queued.req_context, queued.keys, queued.slots
        size = self._planner.portion_blocks(tier.index, queued.portion_s, len(keys))
        for start in range(0, len(keys), size):
            stop = start + size
            job = queued
            if len(keys) > size:
                job = TierJob(tier, context, keys[start:stop], slots[start:stop], is_promotion=True)
                job.begun = queued.begun - max(len(keys) - stop, 0)
                self._job_of.update(dict.fromkeys(job.keys, job))
            self._planner.link(tier.index).submit(job)
            if not self._jobs.submit(job):
                self.end(job)

    def end(self, job: TierJob) -> None:
        """Publish the blocks that arrived. The others are permanent misses for each request that waited for them."""
        self.outcomes["ok"] += len(job.succeeded)
        self.outcomes["failed"] += len(job.failed)
        link = self._planner.link(job.tier.index)
        link.end(job, len(job.succeeded), job.ended_s)
        if job.succeeded:
            self._primary.complete_write(job.succeeded, job.req_context)
        if job.failed:
            self._primary.complete_write(job.failed, job.req_context, success=False)
        if job.is_stale:
            return  # only its slots remain
        for key in job.keys:
            del self._job_of[key]
        self._waits.arrived(job.succeeded, job.tier.name, job.ended_s)
        self._waits.gone(job.failed, Miss.PROMOTION_FAILED, job.ended_s)

    def reset(self) -> None:
        """Drop the queued jobs, because all waits have ended. Host memory forgets the blocks, and the slots of jobs in
        flight are freed when those jobs end."""
        for job in self.queue.values():
            self._primary.complete_write(job.keys, job.req_context, success=False)
            self._planner.link(job.tier.index).drop(len(job.keys))
        self.queue.clear()
        self._job_of.clear()

    def close(self) -> None:
        """Inform the tiers that there are no more probes. Idempotent."""
        while self._probed:
            self._probed.pop().on_request_finished(self.probe_context)

    def check_invariants(self) -> None:
        """Check that every promotion is queued or in a job, once, and that its slot is reserved for it alone."""
        submitted = [job for job in self._jobs.in_flight.values() if job.is_promotion]
        queued = Counter(job.tier.index for job in self.queue.values() for _ in job.keys)
        reading = Counter(job.tier.index for job in submitted for _ in job.keys)
        self._planner.check_invariants(queued, reading)
        moving = [*self.queue.values(), *(job for job in submitted if not job.is_stale)]
        assert self._job_of == {key: job for job in moving for key in job.keys}
        assert len(self._job_of) == sum(len(job.keys) for job in moving)
        for job in moving:
            for key, slot in zip(job.keys, job.slots, strict=True):
                block = self._primary.slots.get(key)
                assert block is not None
                assert not block.is_ready
                assert block.block_id == slot


@cache
def _place(tier: int, is_overdue: bool) -> Place:
    return Place((tier,), is_arriving=True, is_overdue=is_overdue)
