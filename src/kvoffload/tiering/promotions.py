# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way up, from a secondary tier into the primary one.

What a request is told of its blocks: ready, not here, or on the way up from a tier below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvoffload.base import OffloadKey
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.tiering.primary import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.tier_jobs import EndedJob, GuardedTier, Transfers
from kvoffload.tiering.waiting import Claims, RequestState, Waits

__all__ = ["Lookups", "Promotions"]


@dataclass(slots=True, eq=False)
class _Batch:
    """The loads of one step for one (tier, request)."""

    tier: GuardedTier
    request: RequestState
    slots: dict[OffloadKey, int] = field(default_factory=dict)


class Promotions:
    """Reserves a primary slot per block at once, gathers a step's loads into batches, and publishes what arrives.

    A slot stays reserved until the tier has told the end of its job, whoever still wants the block: memory that a
    late read may write to is never reused.
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager, claims: Claims, transfers: Transfers) -> None:
        self._primary = primary
        self._claims = claims
        self._transfers = transfers
        self._queue: dict[tuple[int, int], _Batch] = {}
        self._wanted_by: dict[OffloadKey, RequestState] = {}
        self._placed_since_touch = 0
        self.refused = Counter({"claim_share": 0, "promotion_share": 0, "no_room": 0})
        self.outcomes = Counter({"ok": 0, "failed": 0})

    def __repr__(self) -> str:
        return f"Promotions(in_flight={len(self._wanted_by)}, batches_queued={len(self._queue)})"

    def __contains__(self, key: object) -> bool:
        return key in self._wanted_by

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._wanted_by)

    def __len__(self) -> int:
        return len(self._wanted_by)

    @property
    def has_queued(self) -> bool:
        return bool(self._queue)

    def begin(self, request: RequestState, key: OffloadKey, tier: GuardedTier) -> bool:
        """Reserves a slot for ``key`` and queues its load; ``False``, counted by reason, if that may not be."""
        reason = self._claims.refusal(request, key)
        if reason is None:
            return self.begin_all(request, {key: tier})
        self.refused[reason] += 1
        return False

    def begin_all(self, request: RequestState, run: Mapping[OffloadKey, GuardedTier]) -> bool:
        """``begin`` for each of ``run``, against none of which the limits have anything: all of them, or none."""
        # The first key gets the slot of the first victim and is inserted first, as if they came one by one.
        slots = self._reserve(request, list(run)[::-1])
        if slots is None:
            self.refused["no_room"] += 1
            return False
        self._claims.promotions_begun(request, run)
        request.promoted.update(run)
        self._wanted_by.update(dict.fromkeys(run, request))
        batch: _Batch | None = None
        for (key, tier), slot in zip(run.items(), reversed(slots), strict=True):
            if batch is None or batch.tier is not tier:
                batch = self._queue.setdefault((tier.index, id(request)), _Batch(tier, request))
            batch.slots[key] = slot
        return True

    def submit(self, request: RequestState | None = None) -> None:
        """Submits what is queued, for all requests or one of them."""
        if not self._queue:
            return
        due = [place for place, batch in self._queue.items() if request is None or batch.request is request]
        for place in due:
            batch = self._queue.pop(place)
            refused = self._transfers.submit(
                batch.tier,
                list(batch.slots),
                list(batch.slots.values()),
                batch.request.context,
                is_promotion=True,
            )
            if refused is not None:
                self.ended(refused)

    def ended(self, job: EndedJob) -> None:
        """Publishes what arrived. The rest is a miss, for good, for each request that waited for it."""
        self.outcomes["ok"] += len(job.succeeded)
        self.outcomes["failed"] += len(job.failed)
        if job.succeeded:
            self._primary.complete_write(job.succeeded, job.job.req_context)
        if job.failed:
            self._primary.complete_write(job.failed, job.job.req_context, success=False)
        if job.is_stale:
            return  # all but its slots was forgotten
        for key in job.succeeded:
            del self._wanted_by[key]
            self._claims.promotion_ended(key, success=True)
        for key in job.failed:
            self._wanted_by.pop(key).failed.add(key)
            for waiter in self._claims.promotion_ended(key, success=False):
                waiter.failed.add(key)

    def forget(self) -> None:
        """After a reset: nobody waits any more, and what is queued is not begun. The primary tier has forgotten the
        blocks; the slots of jobs in flight are given back when those end."""
        for batch in self._queue.values():
            self._primary.complete_write(list(batch.slots), batch.request.context, success=False)
        self._queue.clear()
        self._wanted_by.clear()

    def check_invariants(self) -> None:
        """Every promotion is queued or in a job, once, and its slot is reserved and nobody else's."""
        moving = [(key, slot) for batch in self._queue.values() for key, slot in batch.slots.items()]
        for job in self._transfers:
            if job.is_promotion and not self._transfers.is_stale(job):
                moving += zip(job.keys, job.block_ids.tolist(), strict=True)
        assert len(moving) == len(self._wanted_by)
        assert {key for key, _ in moving} == set(self._wanted_by)
        for key, slot in moving:
            block = self._primary.peek(key)
            assert block is not None
            assert not block.is_ready
            assert block.block_id == slot

    def _reserve(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[int] | None:
        """A slot for each of ``keys``, taken from blocks that nobody waits for."""
        # What is held goes to the safe end of the policy's order first, or each eviction would step over it again:
        # when it becomes held, and again when a good part of the tier was replaced since.
        held = self._claims.take_fresh()
        self._placed_since_touch += len(keys)
        if self._placed_since_touch > self._primary.num_blocks // 4:
            self._placed_since_touch, held = 0, list(self._claims)
        if held and not self._primary.num_free_blocks:
            self._primary.postpone(held)
        place = self._primary.prepare_write(keys, request.context)
        if place is None:
            return None
        assert isinstance(place.store_spec, CPULoadStoreSpec)
        slots: list[int] = place.store_spec.block_ids.tolist()
        return slots


class Lookups:
    """Answers from the primary tier; what it lacks is asked of the ``tiers`` below in order, and the first that has it
    brings it up. ``poll`` hears which jobs have ended, and says whether any had."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        claims: Claims,
        promotions: Promotions,
        waits: Waits,
        poll: Callable[[], bool],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._claims = claims
        self._promotions = promotions
        self._waits = waits
        self._poll = poll
        self.out_of_patience = 0

    def one(self, request: RequestState, key: OffloadKey) -> bool | None:
        return self._answer(request, key, self._primary.lookup(key, request.context))

    def prefix(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """The loop of ``one``, but for that misses in a row which a tier can serve get their slots in one go.

        Such a run ends before anything that its reservations could change: a key of its own, a block that the primary
        tier has, a limit, or the end of the room that is certain to be there.
        """
        look, context = self._primary.lookup, request.context
        is_impatient = self._waits.is_over(request)
        answers = [] if is_impatient else self._held_head(request, keys)
        if was_taken := answers[-1:] == [False]:
            answers.pop()
        run: dict[OffloadKey, GuardedTier] = {}
        room = 0
        for key in keys[len(answers) :]:
            if key in run and not self._promote_run(request, run, answers):
                return answers
            answer = False if was_taken else look(key, context)
            was_taken = False
            tier = None
            if answer is False and not is_impatient:
                if not run:
                    room = self._certain_room(request)
                tier, answer = self._tier_with(request, key)
                if tier is not None and len(run) < room and key not in self._claims:
                    run[key] = tier
                    answers.append(None)
                    continue
                if run and not self._promote_run(request, run, answers):
                    return answers
                if tier is not None:
                    answer = self._promote(request, key, tier)
                elif answer is None:
                    self._waits.begin(request)
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

    def _held_head(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """The primary tier's answers for the blocks that ``keys`` begins with and ``request`` holds already, up to
        one that was taken from it (``False``). So a long prefix on its way up costs little to ask for in each step."""
        if not request.claims:
            return []
        self._poll()
        return self._primary.lookup_prefix([*takewhile(request.claims.__contains__, keys)], request.context)

    def _answer(self, request: RequestState, key: OffloadKey, answer: bool | None) -> bool | None:
        """What ``request`` is told of ``key``, of which the primary tier says ``answer``."""
        if answer is None and key in self._promotions and self._poll():
            answer = self._peek(key)
        if answer is True:
            self._waits.told_ready(request, key)
            return True
        if self._waits.is_over(request):
            self.out_of_patience += answer is None or request.waiting_since is not None
            self._waits.give_up(request)
            return False
        if answer is None:
            self._waits.begin(request)
            self._claims.claim(request, key)
            return None
        tier, answer = self._tier_with(request, key)
        if tier is not None:
            return self._promote(request, key, tier)
        if answer is None:
            self._waits.begin(request)
        return answer

    def _peek(self, key: OffloadKey) -> bool | None:
        block = self._primary.peek(key)
        return False if block is None else True if block.is_ready else None

    def _tier_with(self, request: RequestState, key: OffloadKey) -> tuple[GuardedTier | None, bool | None]:
        """The first tier that has ``key``; if none has, whether one is still finding out (``None``)."""
        if key in request.failed or key in request.promoted:
            return None, False
        being_found_out = False
        for tier in self._tiers:
            found = tier.lookup(key, request.context)
            if found:
                return tier, None
            being_found_out |= found is None
        return None, None if being_found_out else False

    def _certain_room(self, request: RequestState) -> int:
        """Blocks that find a slot and are within all limits for certain, if promoted for ``request`` now."""
        primary, claims = self._primary, self._claims
        # What it was told becomes its claims once it waits. Held blocks may be idle, but for those in flight.
        told = len(request.told) if request.waiting_since is None else 0
        idle = primary.num_free_blocks + primary.num_idle_blocks - (len(claims) - len(self._promotions))
        limit = min(claims.per_request - len(request.claims), claims.in_all - len(claims))
        return min(idle, limit) - told

    def _promote_run(
        self, request: RequestState, run: dict[OffloadKey, GuardedTier], answers: list[bool | None]
    ) -> bool:
        """Begins the promotions of ``run``, whose answers are the last ones, and empties it. ``False``: the policy
        refused room that was there, and the answers end with that miss."""
        self._waits.begin(request)
        begun = self._promotions.begin_all(request, run)
        if not begun:
            del answers[len(answers) - len(run) + 1 :]
            answers[-1] = False
        run.clear()
        return begun

    def _promote(self, request: RequestState, key: OffloadKey, tier: GuardedTier) -> bool | None:
        was_waiting = request.waiting_since is not None
        self._waits.begin(request)  # first: what it was told so far must not make room for this block
        if self._promotions.begin(request, key, tier):
            return None
        if not was_waiting:
            self._waits.end(request)
        return False
