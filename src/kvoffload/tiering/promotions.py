# SPDX-License-Identifier: Apache-2.0
"""Lookup and promotion: the answers a request gets for its blocks, and the loads that these start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvoffload.base import OffloadKey
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs
from kvoffload.tiering.waiting import Claims, RequestState, WaitingRequests

__all__ = ["Lookups", "Promotions"]

OnReserved = Callable[[int, Collection[OffloadKey]], None]
"""Called after each reservation with its number of blocks and the keys that it evicted."""


class Lookups:
    """Answers from the primary tier. A block that it lacks is looked up in ``tiers``, in order, and promoted from the
    first that has it. ``poll`` takes in the jobs that have ended, and returns whether there were any."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        claims: Claims,
        promotions: Promotions,
        waiting: WaitingRequests,
        poll: Callable[[], bool],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._claims = claims
        self._promotions = promotions
        self._waiting = waiting
        self._poll = poll
        self.out_of_patience = 0

    def one(self, request: RequestState, key: OffloadKey) -> bool | None:
        return self._answer(request, key, self._primary.lookup(key, request.context))

    def prefix(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Equal to the loop of ``one``, but consecutive misses that a tier can serve get their slots in one call.

        Such misses gather in ``run``. The invariant: nothing that the run's reservation could change has been looked
        at since the run began. So the run is promoted before the loop looks at one of its own keys again, before a
        block that the primary tier has (the run may evict it), before anything that a limit refuses, and when it has
        used up the room that is certain to be there.
        """
        look, context = self._primary.lookup, request.context
        is_impatient = self._waiting.is_over(request)
        answers = [] if is_impatient else self._claimed_head(request, keys)
        # A claimed block may have been evicted all the same. It is then a miss to be promoted, already looked up once.
        if was_evicted := answers[-1:] == [False]:
            answers.pop()
        run: dict[OffloadKey, GuardedTier] = {}
        room = 0
        for key in keys[len(answers) :]:
            if key in run and not self._promote_run(request, run, answers):
                return answers
            answer = False if was_evicted else look(key, context)
            was_evicted = False
            tier = None
            if answer is False and not is_impatient:
                tier, answer = self._tier_with(request, key)
                if tier is not None and not run:
                    room = self._certain_room(request)
                if tier is not None and len(run) < room and key not in self._claims:
                    run[key] = tier
                    answers.append(None)
                    continue
                if run and not self._promote_run(request, run, answers):
                    return answers
                if tier is not None:
                    answer = self._promote(request, key, tier)
                elif answer is None:
                    self._waiting.begin(request)
            else:
                if run:
                    if not self._promote_run(request, run, answers):
                        return answers
                    answer = self._peek(key)  # the run may have evicted it
                answer = self._answer(request, key, answer)
            answers.append(answer)
            if answer is False:
                return answers
        if run:
            self._promote_run(request, run, answers)
        return answers

    def _claimed_head(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """The primary tier's answers for the blocks that ``keys`` begins with and ``request`` claims already, up to
        one that was evicted all the same (``False``). So a waiting request asks for a long prefix cheaply."""
        if not request.claims:
            return []
        self._poll()
        return self._primary.lookup_prefix([*takewhile(request.claims.__contains__, keys)], request.context)

    def _answer(self, request: RequestState, key: OffloadKey, answer: bool | None) -> bool | None:
        """The answer for ``key`` that ``request`` gets, when the primary tier says ``answer``."""
        if answer is None and key in self._promotions and self._poll():
            answer = self._peek(key)
        if answer is True:
            self._waiting.record_hit(request, key)
            return True
        if self._waiting.is_over(request):
            self.out_of_patience += answer is None or request.waiting_since is not None
            self._waiting.give_up(request)
            return False
        if answer is None:
            self._waiting.begin(request)
            self._claims.claim(request, key)
            return None
        tier, answer = self._tier_with(request, key)
        if tier is not None:
            return self._promote(request, key, tier)
        if answer is None:
            self._waiting.begin(request)
        return answer

    def _peek(self, key: OffloadKey) -> bool | None:
        """The primary tier's answer, without counting as a lookup."""
        block = self._primary.slots.get(key)
        return False if block is None else True if block.is_ready else None

    def _tier_with(self, request: RequestState, key: OffloadKey) -> tuple[GuardedTier | None, bool | None]:
        """The first tier that has ``key``; without one, ``None`` while a tier is still finding out, else ``False``."""
        if key in request.failed or key in request.promoted:
            return None, False
        is_unknown = False
        for tier in self._tiers:
            found = tier.lookup(key, request.context)
            if found:
                return tier, None
            is_unknown |= found is None
        return None, None if is_unknown else False

    def _certain_room(self, request: RequestState) -> int:
        """Blocks that are certain to find a slot, within all limits, if promoted for ``request`` now."""
        slots, claims = self._primary.slots, self._claims
        hits = len(request.hits) if request.waiting_since is None else 0  # they become claims when it begins to wait
        num_claimed = len(claims)
        # Blocks that are neither busy nor claimed. A block that is being promoted is both, and is subtracted once.
        unclaimed = slots.num_blocks - slots.num_busy - (num_claimed - len(self._promotions))
        limit = min(claims.max_per_request - len(request.claims), claims.max_total - num_claimed)
        return min(unclaimed, limit) - hits

    def _promote_run(
        self, request: RequestState, run: dict[OffloadKey, GuardedTier], answers: list[bool | None]
    ) -> bool:
        """Begins the promotions of ``run``, whose answers are the last ones, and empties it. ``False``: the policy
        refused room that was there, and the answers end with that miss."""
        self._waiting.begin(request)
        begun = self._promotions.begin_all(request, run)
        if not begun:
            del answers[len(answers) - len(run) + 1 :]
            answers[-1] = False
        run.clear()
        return begun

    def _promote(self, request: RequestState, key: OffloadKey, tier: GuardedTier) -> bool | None:
        was_waiting = request.waiting_since is not None
        self._waiting.begin(request)  # first: its hits must not be evicted to make room for this block
        if self._promotions.begin(request, key, tier):
            return None
        if not was_waiting:
            self._waiting.end(request)
        return False


@dataclass(slots=True, eq=False)
class _Batch:
    """The loads of one step for one (tier, request)."""

    tier: GuardedTier
    request: RequestState
    slots: dict[OffloadKey, int] = field(default_factory=dict)


class Promotions:
    """Reserves a primary slot per block at once, gathers a step's loads into batches, and publishes what arrives.

    A slot stays reserved until the tier has reported the end of its job, whoever still wants the block: memory that a
    late read may write to is never reused. ``on_reserved`` is called after each reservation.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        claims: Claims,
        jobs: TierJobs,
        on_reserved: OnReserved | None = None,
    ) -> None:
        self._primary = primary
        self._claims = claims
        self._jobs = jobs
        self._on_reserved = on_reserved
        self.queue: dict[tuple[int, int], _Batch] = {}
        """Loads to submit, by tier and request. Others only read it."""
        self._wanted_by: dict[OffloadKey, RequestState] = {}
        self._reserved_since_refresh = 0
        self.refused = Counter({"claim_share": 0, "promotion_share": 0, "no_room": 0})
        self.outcomes = Counter({"ok": 0, "failed": 0})

    def __repr__(self) -> str:
        return f"Promotions(in_flight={len(self._wanted_by)}, batches_queued={len(self.queue)})"

    def __contains__(self, key: object) -> bool:
        return key in self._wanted_by

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._wanted_by)

    def __len__(self) -> int:
        return len(self._wanted_by)

    def begin(self, request: RequestState, key: OffloadKey, tier: GuardedTier) -> bool:
        """Reserves a slot for ``key`` and queues its load; ``False``, counted by reason, if a limit refuses it."""
        reason = self._claims.refusal(request, key)
        if reason is None:
            return self.begin_all(request, {key: tier})
        self.refused[reason] += 1
        return False

    def begin_all(self, request: RequestState, run: Mapping[OffloadKey, GuardedTier]) -> bool:
        """``begin`` for each of ``run``, none of which a limit refuses: all of them, or none."""
        # A reservation inserts its last key first. Reversed, the first key of the run is inserted first and gets the
        # first victim's slot, as if the keys came one by one.
        slots = self._reserve(request, list(run)[::-1])
        if slots is None:
            self.refused["no_room"] += 1
            return False
        self._claims.begin_promotions(request, run)
        request.promoted.update(run)
        self._wanted_by.update(dict.fromkeys(run, request))
        batch: _Batch | None = None
        for (key, tier), slot in zip(run.items(), reversed(slots), strict=True):
            if batch is None or batch.tier is not tier:
                batch = self.queue.setdefault((tier.index, id(request)), _Batch(tier, request))
            batch.slots[key] = slot
        return True

    def submit(self, request: RequestState | None = None) -> None:
        """Submits what is queued, for all requests or one of them."""
        due = [name for name, batch in self.queue.items() if request is None or batch.request is request]
        for name in due:
            batch = self.queue.pop(name)
            refused = self._jobs.submit(
                batch.tier,
                list(batch.slots),
                list(batch.slots.values()),
                batch.request.context,
                is_promotion=True,
            )
            if refused is not None:
                self.end(refused)

    def end(self, job: TierJob) -> None:
        """Publishes what arrived. The rest is a miss, for good, for each request that waited for it."""
        self.outcomes["ok"] += len(job.succeeded)
        self.outcomes["failed"] += len(job.failed)
        if job.succeeded:
            self._primary.complete_write(job.succeeded, job.metadata.req_context)
        if job.failed:
            self._primary.complete_write(job.failed, job.metadata.req_context, success=False)
        if job.is_stale:
            return  # only its slots are left of it
        for key in job.succeeded:
            del self._wanted_by[key]
            self._claims.end_promotion(key, success=True)
        for key in job.failed:
            self._wanted_by.pop(key).failed.add(key)
            for waiter in self._claims.end_promotion(key, success=False):
                waiter.failed.add(key)

    def reset(self) -> None:
        """Nobody waits any more, and what is queued is not begun. The primary tier forgets the blocks; the slots of
        jobs in flight are given back when those end."""
        for batch in self.queue.values():
            self._primary.complete_write(list(batch.slots), batch.request.context, success=False)
        self.queue.clear()
        self._wanted_by.clear()

    def check_invariants(self) -> None:
        """Every promotion is queued or in a job, once, and its slot is reserved and nobody else's."""
        moving = [(key, slot) for batch in self.queue.values() for key, slot in batch.slots.items()]
        for job in self._jobs.in_flight.values():
            if job.metadata.is_promotion and not job.is_stale:
                moving += zip(job.metadata.keys, job.metadata.block_ids.tolist(), strict=True)
        assert len(moving) == len(self._wanted_by)
        assert {key for key, _ in moving} == set(self._wanted_by)
        for key, slot in moving:
            block = self._primary.slots.get(key)
            assert block is not None
            assert not block.is_ready
            assert block.block_id == slot

    def _reserve(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[int] | None:
        """A slot for each of ``keys``, none of them a claimed block's."""
        # Each eviction steps over the claimed blocks that it meets. To keep them out of its way they become the most
        # recent when they are claimed, and again whenever a quarter of the tier has been replaced.
        claimed = self._claims.take_new()
        self._reserved_since_refresh += len(keys)
        if self._reserved_since_refresh > self._primary.num_blocks // 4:
            self._reserved_since_refresh, claimed = 0, list(self._claims)
        if claimed and not self._primary.slots.num_free:
            self._primary.slots.touch(claimed, counts=False)
        reserved = self._primary.prepare_write(keys, request.context, self._claims)
        if reserved is None:
            return None
        if self._on_reserved is not None:
            self._on_reserved(len(reserved.keys_to_store), reserved.evicted_keys)
        assert isinstance(reserved.store_spec, CPULoadStoreSpec)
        slots: list[int] = reserved.store_spec.block_ids.tolist()
        return slots
