# SPDX-License-Identifier: Apache-2.0
"""Lookup and promotion: the answers that a request gets for its blocks, the loads that these start, and the requests
that wait for them.

``Lookups`` answers, and ``Promotions`` carries out. While a request waits, ``Claims`` protect its blocks from eviction,
and ``WaitingRequests`` measures its patience.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import ceil, inf

from kvoffload.base import OffloadKey, ReqContext, get_offload_group_idx
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.metrics import Histogram
from kvoffload.tiering.load_policy import HERE, LoadCosts, Place, WaitPlan
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs

__all__ = ["Claims", "Lookups", "Promotions", "RequestState", "WaitingRequests"]

_READ_AT = 1024
"""A run of so many blocks is read while the rest of its prefix is being looked up."""

OnReserved = Callable[[int, Collection[OffloadKey]], None]
"""Called after each reservation with its number of blocks and the keys that it evicted."""


# --------------------------------------------------------------------------------------------------- requests that wait


@dataclass(frozen=True, slots=True)
class Head:
    """Answers for the first blocks of a prefix."""

    keys: list[OffloadKey]
    answers: list[bool | None]

    def is_of(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether ``keys`` begins with these blocks. Much cheaper than to ask for each of them."""
        return [*keys[: len(self.keys)]] == self.keys


@dataclass(slots=True, eq=False)
class Asked:
    """A lookup in which some block had no answer."""

    keys: Sequence[OffloadKey]
    num_answers: int
    """The first ``keys`` that it got answers for, but for a final miss."""
    num_arrived: int = 0
    """The first of those that nothing is on its way for any more."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from ``on_new_request`` (or its first call) until its tiers are informed of its end.

    A request *waits* from its first answer ``None`` until it loads, runs, ends or has no patience left, or the engine
    has let it wait as long although it has its answers. Only while it waits are its hits its claims.
    """

    context: ReqContext
    patience_s: float
    """Seconds of waiting for answers it has left; spent by every wait, never refilled."""
    whole_request_tiers: tuple[GuardedTier, ...] = ()
    """The tiers that asked for ``REQUEST_LEVEL``."""
    waiting_since: float | None = None
    """When its wait began; later, by as long as it had its answers meanwhile."""
    answered_since: float | None = None
    """When, in this wait, the last of its blocks was answered for or arrived. From then on it waits for the engine."""
    unanswered_step: int = -1
    """The last step in which a block of it had no answer."""
    asked: list[Asked] = field(default_factory=list)
    """The lookups of that step that lacked answers."""
    hits: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks answered ``True`` in step ``hits_step``, in order, while it did not wait."""
    hits_step: int = -1
    claims: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks that are not evicted for other waiting requests while it waits, in the order in which it got them."""
    head: Head | None = None
    """What it was answered for the claimed blocks that its prefix begins with, while none of them has changed."""
    promoted: set[OffloadKey] = field(default_factory=set)
    """Blocks promoted for it in this wait: a second time would be a loop, so it is a miss instead."""
    failed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed while it waited for them: misses for good."""
    refused: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion was refused, and counted: a request that waits for others asks again in each step."""
    plan: WaitPlan | None = None
    """What it waits for, if that was weighed."""
    num_declined: int = 0
    """Blocks that were counted as declined for it."""
    unknown: set[OffloadKey] = field(default_factory=set)
    """Blocks that no tier had answered for when they were asked for last."""
    stores_in_flight: int = 0
    """Blocks between ``prepare_store`` and ``complete_store``, each of which may still be cascaded for it."""
    parked: int = 0
    """Request-level cascades that wait for their block to be written."""
    finished: bool = False

    def record_hit(self, key: OffloadKey, step: int) -> None:
        if self.hits_step != step:
            self.hits.clear()
            self.hits_step = step
        self.hits[key] = None

    def waited_s(self, now_s: float) -> float:
        """How long it has waited for answers, in this wait."""
        if self.waiting_since is None:
            return 0.0
        return (now_s if self.answered_since is None else self.answered_since) - self.waiting_since

    @property
    def may_still_submit(self) -> bool:
        """Whether something begun for it may yet become a job of a tier."""
        return bool(self.stores_in_flight or self.parked)


class _Claimed:
    """One claimed block: the requests that claim it, and whether its promotion is in flight."""

    __slots__ = ("claimants", "promoting")

    def __init__(self) -> None:
        self.claimants: dict[int, RequestState] = {}
        self.promoting = False

    def forget_heads(self) -> None:
        for request in self.claimants.values():
            request.head = None


class Claims(Collection[OffloadKey]):
    """Blocks that waiting requests protect from eviction, and the limits on them.

    A block is claimed while a waiting request has hit it or has it promoted, and while its promotion is in flight, even
    if no request waits for it any more. Each request that waits for a shared block claims it; it counts once. There are
    two limits, in blocks: ``max_per_request`` on the claims of one request, ``max_total`` on all claimed blocks. A
    claim is no pin: when a running request's store finds no other room it may evict a claimed block, since waiting
    requests must never starve running ones.

    Claims also ensure that each wait makes progress. Blocks that a request has hit stay, so its claims only grow, until
    it has its whole prefix or meets a limit, beyond which the answer is ``False``.
    """

    def __init__(self, num_blocks: int, claim_share: float, promotion_share: float) -> None:
        # Rounded up, or little could be promoted into a tiny tier. One block is left for running requests, unless the
        # share says that all may be claimed, or there is only one.
        left = 0 if promotion_share >= 1 else 1
        self.max_total = max(1, min(ceil(num_blocks * promotion_share), num_blocks - left))
        self.max_per_request = max(1, min(ceil(num_blocks * claim_share), self.max_total))
        self._claimed: dict[OffloadKey, _Claimed] = {}
        self._new: dict[OffloadKey, None] = {}
        self.have_changed = False
        """Some block became ready, in flight or absent since the last step."""

    def __repr__(self) -> str:
        return f"Claims({len(self)} of {self.max_total}, max_per_request={self.max_per_request})"

    # A collection, in the order of the claims; `in` is O(1).

    def __contains__(self, key: object) -> bool:
        return key in self._claimed

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._claimed)

    def __len__(self) -> int:
        return len(self._claimed)

    def room_of(self, request: RequestState) -> int:
        """Blocks that ``request`` claims or may claim now."""
        return min(self.max_per_request, self.max_total - len(self._claimed) + len(request.claims))

    # Changes.

    def refusal(self, request: RequestState, key: OffloadKey) -> str | None:
        """Why ``request`` may not have ``key`` promoted; ``None`` if it may."""
        if len(request.claims) >= self.max_per_request and key not in request.claims:
            return "claim_share"
        if len(self._claimed) >= self.max_total and key not in self._claimed:
            return "promotion_share"
        return None

    def claim(self, request: RequestState, key: OffloadKey) -> bool:
        """Claims ``key`` for ``request``; ``False`` beyond a limit, which leaves the block unprotected."""
        if key in request.claims:
            return True
        if self.refusal(request, key):
            return False
        claimed = self._claimed.get(key)
        if claimed is None:
            claimed = self._claimed[key] = _Claimed()
            self._new[key] = None
        claimed.claimants[id(request)] = request
        request.claims[key] = None
        return True

    def note_changed(self, keys: Iterable[OffloadKey]) -> None:
        """Some of ``keys`` may be ready, in flight or absent now, and were not before: who claims them asks again."""
        for key in keys:
            self.have_changed = True
            claimed = self._claimed.get(key)
            if claimed is not None:
                claimed.forget_heads()

    def release(self, request: RequestState) -> None:
        """Ends all claims of ``request``."""
        request.head = None
        for key in request.claims:
            claimed = self._claimed[key]
            del claimed.claimants[id(request)]
            self._drop_if_unclaimed(key, claimed)
        request.claims.clear()

    def begin_promotions(self, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """``keys`` are being promoted for ``request``; ``refusal`` had no reason against any of them."""
        blocks, claims, claimant = self._claimed, request.claims, id(request)
        for key in keys:
            claimed = blocks.get(key)
            if claimed is None:
                claimed = blocks[key] = _Claimed()
            claimed.claimants[claimant] = request
            claimed.promoting = True
            claims[key] = None
            self._new.pop(key, None)

    def end_promotion(self, key: OffloadKey, success: bool) -> list[RequestState]:
        """The promotion of ``key`` has ended. Returns the requests that claim it. If it failed, their claims end."""
        self.have_changed = True
        claimed = self._claimed[key]
        claimed.forget_heads()
        claimed.promoting = False
        waiters = list(claimed.claimants.values())
        if not success:
            for request in waiters:
                del request.claims[key]
            claimed.claimants.clear()
        self._drop_if_unclaimed(key, claimed)
        return waiters

    def take_new(self) -> list[OffloadKey]:
        """Ready blocks claimed since the last call, in that order. Promoted ones are the most recent already."""
        new = list(self._new)
        self._new.clear()
        return new

    def clear(self) -> None:
        """Ends every claim of every request."""
        self.have_changed = True
        for claimed in self._claimed.values():
            claimed.forget_heads()
            for request in claimed.claimants.values():
                request.claims.clear()
        self._claimed.clear()
        self._new.clear()

    def check_invariants(self, requests: list[RequestState], promoting: set[OffloadKey]) -> None:
        """Recomputes the claims from ``requests`` and the promotions in flight."""
        expected = {key for request in requests for key in request.claims} | promoting
        assert set(self._claimed) == expected, set(self._claimed) ^ expected
        assert {key for key, claimed in self._claimed.items() if claimed.promoting} == promoting
        for key, claimed in self._claimed.items():
            assert list(claimed.claimants.values()) == [r for r in claimed.claimants.values() if key in r.claims]
            assert len(claimed.claimants) == sum(key in request.claims for request in requests)
        assert len(self._claimed) <= self.max_total
        assert all(len(request.claims) <= self.max_per_request for request in requests)
        assert all(request.waiting_since is not None or not request.claims for request in requests)
        assert self._new.keys() <= self._claimed.keys()

    def _drop_if_unclaimed(self, key: OffloadKey, claimed: _Claimed) -> None:
        if not claimed.claimants and not claimed.promoting:
            del self._claimed[key]
            self._new.pop(key, None)


class WaitingRequests:
    """Which requests wait, since when, and for how long they still may.

    A request's claims are what it hit in the step in which it began to wait, and what it hits while it waits. Patience
    is one budget for the whole life of a request: each wait for answers is taken off it. Once it has its answers, it
    may wait for the engine, which costs no patience; its claims end all the same when it has waited as long as it had
    patience for, and it may wait for answers again.
    """

    def __init__(self, claims: Claims, clock: Callable[[], float]) -> None:
        self._claims = claims
        self._clock = clock
        self._waiting: dict[int, RequestState] = {}
        self._due_s = inf
        """Before this time, no wait becomes as long as its request has patience."""
        self._step = 0
        self.waits = Histogram("promotion_wait_seconds")
        """How long the waits that have ended were."""

    def __repr__(self) -> str:
        return f"WaitingRequests({len(self._waiting)})"

    def record_hit(self, request: RequestState, key: OffloadKey) -> None:
        """``key`` is ready for ``request``. If the request waits, claims the block; else records it in case it will."""
        if request.waiting_since is None:
            request.record_hit(key, self._step)
        else:
            self._claims.claim(request, key)

    def is_over(self, request: RequestState) -> bool:
        """Whether ``request`` has no patience left: it may neither begin to wait nor go on."""
        return request.waited_s(self._clock()) >= request.patience_s

    def now_s(self, request: RequestState) -> float:
        """The time by which ``request`` is late: it stands still while the request waits for the engine."""
        return self._clock() if request.answered_since is None else request.answered_since

    def begin(self, request: RequestState) -> None:
        """``request`` waits from now on; no change if it waits already."""
        if request.waiting_since is not None:
            return
        request.waiting_since = self._clock()
        self._due_s = min(self._due_s, request.waiting_since + request.patience_s)
        self._waiting[id(request)] = request
        if request.hits_step == self._step:
            for key in request.hits:
                self._claims.claim(request, key)
        request.hits.clear()

    def end(self, request: RequestState, *, is_shown: bool = True) -> None:
        """Ends the wait and its claims. If the request is not waiting, only clears its recorded hits. A wait that no
        answer has shown is not measured."""
        request.hits.clear()
        if request.waiting_since is None:
            return
        waited_s = request.waited_s(self._clock())
        if is_shown:
            self.waits.observe(waited_s)
        request.patience_s -= waited_s
        request.waiting_since = request.answered_since = None
        request.plan = None
        request.promoted.clear()
        request.asked.clear()
        del self._waiting[id(request)]
        self._claims.release(request)

    def note_answers(self, request: RequestState, keys: Sequence[OffloadKey], answers: Sequence[bool | None]) -> None:
        """``request`` asked for ``keys`` and was given these answers. It asks once for each group of its blocks, so all
        answers of a step count."""
        if request.waiting_since is None:
            return
        # Counting is ten times as fast as to look for ``None``.
        if answers.count(True) + answers.count(False) < len(answers):
            if request.unanswered_step != self._step:
                request.unanswered_step = self._step
                request.asked.clear()
            request.asked.append(Asked(keys, len(answers) - (answers[-1] is False)))
            if request.answered_since is not None:
                pause_s = self._clock() - request.answered_since
                request.waiting_since += pause_s
                if request.plan is not None and request.plan.began_s <= request.answered_since:
                    request.plan.postpone(pause_s)
                request.answered_since = None
        elif request.answered_since is None and request.unanswered_step != self._step:
            request.answered_since = self._clock()

    def unanswered(self) -> list[RequestState]:
        """The requests that wait for answers."""
        return [request for request in self._waiting.values() if request.answered_since is None]

    def note_arrived(self, request: RequestState, arrived_s: float) -> None:
        """All that ``request`` had no answer for has arrived, at ``arrived_s``: its wait for answers ends there, not
        when the engine asks again, which may be long after."""
        assert request.waiting_since is not None
        request.answered_since = max(request.waiting_since, arrived_s)

    def undo(self, request: RequestState, hits: Mapping[OffloadKey, None]) -> None:
        """Ends a wait that began just now, and that no answer has shown. ``hits`` were recorded before, and are again:
        they were answered, so nothing else that is promoted for the request in this step may evict them."""
        self.end(request, is_shown=False)
        request.hits.update(hits)

    def reset(self) -> None:
        """The cache was reset: nobody claims or has been promised anything any more, and what is worth loading is to be
        chosen anew. The waits go on."""
        for request in self._waiting.values():
            request.plan = None
            request.promoted.clear()
            self._claims.release(request)

    def give_up(self, request: RequestState) -> None:
        """Ends the wait for good: ``request`` has no patience left."""
        self.end(request)
        request.patience_s = 0.0

    def end_step(self) -> None:
        """Ends the waits of requests that ran out of patience and ask no more, or that the engine has let wait as long
        although they have their answers, so that their claims end too. Hits of this step become claims of no later
        wait."""
        self._step += 1
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = inf
        for request in list(self._waiting.values()):
            assert request.waiting_since is not None
            if now_s - request.waiting_since < request.patience_s:
                self._due_s = min(self._due_s, request.waiting_since + request.patience_s)
            elif request.answered_since is None:
                self.give_up(request)
            else:
                self.end(request)

    def check_invariants(self, requests: Collection[RequestState]) -> None:
        """``requests``: all there are."""
        assert self._waiting.keys() <= {id(request) for request in requests}
        for request in requests:
            assert (request.waiting_since is not None) == (id(request) in self._waiting)
            assert request.answered_since is None or request.waiting_since is not None


# --------------------------------------------------------------------------------------------------------------- lookup


class Lookups:
    """Answers from the primary tier. A block that it lacks is looked up in ``tiers``, in order, and promoted from the
    first that has it. ``poll`` takes in the jobs that have ended, and returns whether there were any.

    With ``costs``, a hit is promoted only as far as that is worth it. The rest of it is a miss for this request.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        claims: Claims,
        promotions: Promotions,
        waiting: WaitingRequests,
        poll: Callable[[], bool],
        costs: LoadCosts | None = None,
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._claims = claims
        self._promotions = promotions
        self._waiting = waiting
        self._poll = poll
        self._costs = costs
        self._places = [Place(tier.index) for tier in tiers]
        self._asking: RequestState | None = None
        """The request that asked last, in this step."""
        self._found: dict[OffloadKey, tuple[GuardedTier | None, bool | None]] = {}
        """What the tiers answered when it peeked, or when its hit was surveyed, for blocks that no walk has reached
        since. So each block is looked up once."""
        self._rest: WaitPlan | None = None
        """What the request that asked last plans, in case it waits for blocks that are not weighed."""
        self.out_of_patience = 0

    def one(self, request: RequestState, key: OffloadKey) -> bool | None:
        if self._costs is not None:
            return self.prefix(request, [key])[0]
        self._begin_lookup(request)
        answer = self._answer(request, key, self._primary.lookup(key, request.context))
        self._waiting.note_answers(request, [key], [answer])
        return answer

    def prefix(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """The answers for ``keys`` in order, up to the first ``False``. Where nothing is weighed, equal to the loop of
        ``one``. Weighed together, more or fewer blocks may be worth loading than one by one."""
        self._begin_lookup(request)
        answers = self._weighed(request, keys)
        self._waiting.note_answers(request, keys, answers)
        return answers

    def _begin_lookup(self, request: RequestState) -> None:
        self._forget_found_by_others(request)
        if request.waiting_since is not None:
            self._poll()  # what arrived since the last step took none of its patience

    def note_arrivals(self, arrived_s: float) -> None:
        """Some blocks have arrived, the last of them at ``arrived_s``. Requests that have all of theirs now wait for
        the engine."""
        for request in self._waiting.unanswered():
            if self._has_all(request, ask_tiers=False):
                self._waiting.note_arrived(request, arrived_s)

    def end_step(self, now_s: float) -> None:
        """What the tiers answered holds no longer. Tiers that were finding out are asked again: requests wait for that
        too."""
        self.forget_found()
        have_changed, self._claims.have_changed = self._claims.have_changed, False
        for request in self._waiting.unanswered():
            if (have_changed or request.unknown) and self._has_all(request, ask_tiers=True):
                self._waiting.note_arrived(request, now_s)

    def _has_all(self, request: RequestState, ask_tiers: bool) -> bool:
        """Whether nothing that ``request`` had no answer for is on its way any more. O(1) while the next block is."""
        while request.asked:
            asked = request.asked[-1]
            for at in range(asked.num_arrived, min(asked.num_answers, len(asked.keys))):
                if self._is_awaited(request, asked.keys[at], ask_tiers):
                    asked.num_arrived = at
                    return False
            request.asked.pop()
        return True

    def _is_awaited(self, request: RequestState, key: OffloadKey, ask_tiers: bool) -> bool:
        block = self._primary.slots.get(key)
        if block is not None:
            return not block.is_ready
        return key in request.unknown and not (ask_tiers and self._tier_with(request, key)[1] is not None)

    def forget_found(self) -> None:
        """What the tiers answered holds no longer."""
        self._asking = self._rest = None
        self._found.clear()

    def _forget_found_by_others(self, request: RequestState) -> None:
        if request is not self._asking:
            self._asking, self._rest = request, None
            self._found.clear()

    def _weighed(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        costs = self._costs
        if costs is None or not keys or self._waiting.is_over(request):
            return self._walk(request, keys)
        if not costs.weighs(keys[0]) and request.plan is None:
            answers = self._walk(request, keys)
            if request.waiting_since is not None:
                request.plan = self._rest
            return answers
        self._poll()
        before = request.plan
        if before is not None and not (costs.weighs(keys[0]) and costs.should_choose_again(before)):
            return self._walk_to(request, keys, self._planned(request, before, keys, costs))
        request.plan = None
        costs.set_stuck_aside()
        places = self._survey(request, keys)
        num_found = sum(num_blocks for _, num_blocks in places)
        if all(place == HERE for place, _ in places):
            self._rest = costs.plan_for_rest(keys[0], num_found, None)
            return self._walk(request, keys)
        useful = request.context.hit_ends
        ends = None if useful is None else [at for at, key in enumerate(keys, 1) if key in useful]
        choice = costs.choose(keys[0], places, ends)
        limit = choice.num_blocks
        here = places[0][1] if places and places[0][0] == HERE else 0
        if limit == num_found:
            limit = len(keys)
        elif limit < here:
            limit = here  # nothing is saved by declining them, although the request can use only those up to an end
        answers = self._walk_to(request, keys, limit)
        declined = keys[limit] if limit < len(keys) else None
        if request.waiting_since is not None:
            request.plan = costs.plan(keys[0], places, choice, declined, before)
        else:
            self._rest = costs.plan_for_rest(keys[0], min(limit, num_found), declined)
        if limit < len(keys) and (request.plan is None or request.plan.unmeasured is None):
            request.num_declined = costs.count_declined(places, limit, request.num_declined)
            self._probe_tiers(request, keys, places, limit, costs)
        return answers

    def peek(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """What is somewhere of ``keys``, up to the first ``False``. Only tiers and the reuse filter notice. A block on
        its way is there."""
        self._forget_found_by_others(request)
        may_wait = not self._waiting.is_over(request)
        answers: list[bool | None] = []
        for key, block in zip(keys, self._primary.slots.get_all(keys), strict=True):
            answer: bool | None = block is not None
            if not answer and may_wait:
                found = self._found[key] = self._tier_with(request, key)
                answer = found[1]
            answers.append(answer)
            if answer is False:
                break
        self._primary.count_peek(keys[: len(answers)], request.context)
        return answers

    def _walk_to(self, request: RequestState, keys: Sequence[OffloadKey], limit: int) -> list[bool | None]:
        """The answers for the first ``limit`` of ``keys``; the next one is a miss."""
        if limit >= len(keys):
            return self._walk(request, keys)
        answers = self._walk(request, keys[:limit]) if limit else []
        if answers and answers[-1] is False:
            return answers
        request.context.trail.misses[keys[limit]] = "declined by cost"
        return [*answers, False]

    def _survey(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[tuple[Place, int]]:
        """Where the blocks of the hit are, in runs of blocks in the same place. Changes nothing but what the tiers note
        of their lookups. A tier that does not know yet is taken to have the block.

        Ends where the request could claim no more: what is behind may be evicted while it waits. Blocks before the
        first that must be waited for need no claims.
        """
        runs: list[tuple[Place, int]] = []
        last, count = HERE, 0
        promotions, most = self._promotions, self._claims.room_of(request)
        for at, (key, block) in enumerate(zip(keys, self._primary.slots.get_all(keys), strict=True)):
            if at >= most and (runs or last != HERE):
                break
            if block is not None:
                place = promotions.place_of(key) if block.pins < 0 else HERE
            else:
                found = self._found[key] = self._tier_with(request, key)
                tier = found[0]
                if tier is None:
                    break
                place = self._places[tier.index]
            if place is not last and place != last:
                if count:
                    runs.append((last, count))
                last, count = place, 0
            count += 1
        if count:
            runs.append((last, count))
        return runs

    def _planned(self, request: RequestState, plan: WaitPlan, keys: Sequence[OffloadKey], costs: LoadCosts) -> int:
        """How many of ``keys`` a waiting request waits for. If it has waited too long, those that are there."""
        group = get_offload_group_idx(keys[0])
        own = [key for key in plan.declined if get_offload_group_idx(key) == group]
        limit = min((keys.index(key) for key in own if key in keys), default=len(keys))
        if self._waiting.now_s(request) < plan.give_up_s:
            return limit
        ready = 0
        for block in self._primary.slots.get_all(keys[:limit]):
            if block is None or not block.is_ready:
                break
            ready += 1
        late = self._survey(request, keys[ready:limit])
        if not late:
            return limit  # the hit ends here: no tier has the next block
        costs.count_late(late[0][0], sum(num_blocks for _, num_blocks in late))
        plan.declined.add(keys[ready])
        return ready

    def _probe_tiers(
        self,
        request: RequestState,
        keys: Sequence[OffloadKey],
        places: Sequence[tuple[Place, int]],
        limit: int,
        costs: LoadCosts,
    ) -> None:
        """Probes each tier that has blocks of ``places`` behind the first ``limit``, with the first run of them."""
        end = 0
        seen: set[int] = set()
        for place, num_blocks in places:
            end += num_blocks
            if end <= limit or place.tier is None or place.is_coming or place.tier in seen:
                continue
            seen.add(place.tier)
            if costs.wants_probe(place.tier):
                start = max(limit, end - num_blocks)
                most = min(num_blocks, costs.probe_blocks(place.tier))
                self._probe(request, keys[start : min(end, start + most)], self._tiers[place.tier])

    def _probe(self, request: RequestState, keys: Sequence[OffloadKey], tier: GuardedTier) -> None:
        """Promotes ``keys`` in the background: ``request``, which does not load them, does not wait for them either. If
        it waits for others, they are its claims as well until it has those."""
        was_waiting, hits = request.waiting_since is not None, dict(request.hits)
        misses = dict(request.context.trail.misses)
        self._waiting.begin(request)  # first: its hits must not be evicted to make room for these blocks
        for key in keys:
            if self._primary.slots.get(key) is not None or self._tier_with(request, key) != (tier, True):
                break
            if not self._promotions.begin(request, key, tier):
                break
        request.context.trail.misses = misses  # the request was refused them for a reason of its own
        if not was_waiting:
            self._waiting.undo(request, hits)

    def _walk(self, request: RequestState, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Equal to the loop of ``_answer``, but consecutive misses that a tier can serve get their slots in one call.

        Such misses gather in ``run``. The invariant: nothing that the run's reservation could change has been looked
        at since the run began. So the run is promoted before the loop looks at one of its own keys again, before a
        block that the primary tier has (the run may evict it), before anything that a limit refuses, and when it has
        used up the room that is certain to be there. A long run is promoted as well, and its loads go out at once.
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
                first, answer = self._tier_with(request, key)
                tier = first if answer else None
                if tier is not None and not run:
                    room = self._certain_room(request)
                if tier is not None and len(run) < room and key not in self._claims:
                    run[key] = tier
                    answers.append(None)
                    if len(run) >= _READ_AT:
                        if not self._promote_run(request, run, answers):
                            return answers
                        self._promotions.submit(request)
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
        one that was evicted all the same (``False``). So a waiting request asks for a long prefix cheaply, and not
        again while none of these blocks has changed."""
        if not request.claims:
            return []
        head = request.head
        if head is not None and head.is_of(keys):
            answers, asked = list(head.answers), len(head.keys)
        else:
            answers, asked = [], 0
        more = [*takewhile(request.claims.__contains__, islice(keys, asked, None))]
        if more:
            answers += self._primary.lookup_prefix(more, request.context)
            if answers[-1] is not False and not self._primary.counts_lookups:
                request.head = Head([*keys[: len(answers)]], list(answers))
        return answers

    def _answer(self, request: RequestState, key: OffloadKey, answer: bool | None) -> bool | None:
        """The answer for ``key`` that ``request`` gets, when the primary tier says ``answer``."""
        if answer is None and key in self._promotions and self._poll():
            answer = self._peek(key)
        if answer is True:
            self._waiting.record_hit(request, key)
            return True
        if self._waiting.is_over(request):
            self.out_of_patience += answer is None or request.waiting_since is not None
            request.context.trail.misses.update(dict.fromkeys(request.unknown, "out of patience"))
            request.unknown.clear()
            if answer is None:
                request.context.trail.misses[key] = "out of patience"
            self._waiting.give_up(request)
            return False
        if answer is None:
            self._waiting.begin(request)
            self._claims.claim(request, key)
            return None
        tier, answer = self._tier_with(request, key)
        if tier is not None and answer:
            return self._promote(request, key, tier)
        if answer is None:
            self._waiting.begin(request)
        return answer

    def _peek(self, key: OffloadKey) -> bool | None:
        """The primary tier's answer, without counting as a lookup."""
        block = self._primary.slots.get(key)
        return False if block is None else True if block.is_ready else None

    def _tier_with(self, request: RequestState, key: OffloadKey) -> tuple[GuardedTier | None, bool | None]:
        """The first tier that has ``key``, and ``True``; without one, the first that is still finding out, and
        ``None``; else no tier, and ``False``."""
        if key in request.failed or key in request.promoted:
            request.context.trail.misses[key] = "promotion failed" if key in request.failed else "no room"
            return None, False
        if (found_before := self._found.pop(key, None)) is not None:
            return found_before
        finds_out: GuardedTier | None = None
        for tier in self._tiers:
            found = tier.lookup(key, request.context)
            if found:
                request.unknown.discard(key)
                return tier, True
            if found is None and finds_out is None:
                finds_out = tier
        if finds_out is not None:
            request.unknown.add(key)
            return finds_out, None
        request.unknown.discard(key)
        return None, False

    def _certain_room(self, request: RequestState) -> int:
        """Blocks that are certain to find a slot, within all limits, if promoted for ``request`` now."""
        slots, claims = self._primary.slots, self._claims
        hits = len(request.hits) if request.waiting_since is None else 0  # they become claims when it begins to wait
        num_claimed = len(claims)
        # Blocks that are neither busy nor claimed. A block that is being promoted is both, and is subtracted once.
        unclaimed = slots.num_blocks - slots.num_busy - (num_claimed - len(self._promotions))
        limit = min(claims.max_per_request - len(request.claims), claims.max_total - num_claimed)
        return min(unclaimed, limit) - hits

    def check_invariants(self, requests: Iterable[RequestState]) -> None:
        """What requests remember of their heads is what they would be answered now."""
        for request in requests:
            if request.head is not None:
                assert request.head.answers == [self._peek(key) for key in request.head.keys]
                assert request.claims.keys() >= set(request.head.keys)

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
        was_waiting, hits = request.waiting_since is not None, dict(request.hits)
        self._waiting.begin(request)  # first: its hits must not be evicted to make room for this block
        if self._promotions.begin(request, key, tier):
            return None
        if not was_waiting:
            self._waiting.undo(request, hits)
        return False


# ------------------------------------------------------------------------------------------------------------ promotion


@dataclass(slots=True, eq=False)
class _Batch:
    """The loads of one step for one (tier, request)."""

    tier: GuardedTier
    request: RequestState
    place: Place
    """Of each of its blocks."""
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
        costs: LoadCosts | None = None,
    ) -> None:
        self._primary = primary
        self._claims = claims
        self._jobs = jobs
        self._on_reserved = on_reserved
        self._costs = costs
        self.queue: dict[tuple[int, int], _Batch] = {}
        """Loads to submit, by tier and request. Others only read it."""
        self._batches: dict[OffloadKey, _Batch] = {}
        """Of every block that is being promoted, the batch that it was queued in."""
        self._reserved_since_refresh = 0
        self.refused = Counter({"claim_share": 0, "promotion_share": 0, "no_room": 0})
        self.outcomes = Counter({"ok": 0, "failed": 0})

    def __repr__(self) -> str:
        return f"Promotions(in_flight={len(self._batches)}, batches_queued={len(self.queue)})"

    def __contains__(self, key: object) -> bool:
        return key in self._batches

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def place_of(self, key: OffloadKey) -> Place:
        """Where a block that is being written comes from: a tier, or the device, which is as good as here."""
        batch = self._batches.get(key)
        if batch is None:
            return HERE
        if self._costs is not None and self._costs.is_stuck(batch.tier.index, batch.slots[key]):
            return batch.place._replace(is_stuck=True)
        return batch.place

    def begin(self, request: RequestState, key: OffloadKey, tier: GuardedTier) -> bool:
        """Reserves a slot for ``key`` and queues its load; ``False``, counted by reason, if a limit refuses it."""
        reason = self._claims.refusal(request, key)
        if reason is None:
            return self.begin_all(request, {key: tier})
        self._count_refusal(request, key, reason)
        request.context.trail.misses[key] = reason
        return False

    def _count_refusal(self, request: RequestState, key: OffloadKey, reason: str) -> None:
        if key not in request.refused:
            request.refused.add(key)
            self.refused[reason] += 1

    def begin_all(self, request: RequestState, run: Mapping[OffloadKey, GuardedTier]) -> bool:
        """``begin`` for each of ``run``, none of which a limit refuses: all of them, or none."""
        # A reservation inserts its last key first. Reversed, the first key of the run is inserted first and gets the
        # first victim's slot, as if the keys came one by one.
        slots = self._reserve(request, list(run)[::-1])
        if slots is None:
            self._count_refusal(request, next(iter(run)), "no_room")
            request.context.trail.misses.update(dict.fromkeys(run, "no room"))
            return False
        self._claims.begin_promotions(request, run)
        request.promoted.update(run)
        batch: _Batch | None = None
        for (key, tier), slot in zip(run.items(), reversed(slots), strict=True):
            if batch is None or batch.tier is not tier:
                batch = self.queue.setdefault((tier.index, id(request)), _Batch(tier, request, Place(tier.index, True)))
            batch.slots[key] = slot
            self._batches[key] = batch
        if self._costs is not None:
            for tier, num_blocks in Counter(run.values()).items():
                self._costs.begun(tier.index, num_blocks)
        return True

    def submit(self, request: RequestState | None = None) -> None:
        """Submits what is queued, for all requests or one of them."""
        due = [name for name, batch in self.queue.items() if request is None or batch.request is request]
        for name in due:
            batch = self.queue.pop(name)
            keys, slots = list(batch.slots), list(batch.slots.values())
            size = len(keys) if self._costs is None else self._costs.portion_blocks(batch.tier.index)
            for start in range(0, len(keys), size):
                self._submit(batch, keys[start : start + size], slots[start : start + size])

    def _submit(self, batch: _Batch, keys: list[OffloadKey], slots: list[int]) -> None:
        if self._costs is not None:
            self._costs.submitted(batch.tier.index, slots)
        refused = self._jobs.submit(batch.tier, keys, slots, batch.request.context, is_promotion=True)
        if refused is not None:
            self.end(refused)

    def end(self, job: TierJob) -> None:
        """Publishes what arrived. The rest is a miss, for good, for each request that waited for it."""
        self.outcomes["ok"] += len(job.succeeded)
        self.outcomes["failed"] += len(job.failed)
        if self._costs is not None:
            self._costs.ended(job.tier.index, job.metadata.block_ids.tolist(), len(job.succeeded), job.ended_s)
        if job.succeeded:
            self._primary.complete_write(job.succeeded, job.metadata.req_context)
        if job.failed:
            self._primary.complete_write(job.failed, job.metadata.req_context, success=False)
        if job.is_stale:
            return  # only its slots are left of it
        for key in job.succeeded:
            del self._batches[key]
            for waiter in self._claims.end_promotion(key, success=True):
                waiter.context.trail.sources[key] = job.tier.name
        for key in job.failed:
            self._batches.pop(key).request.failed.add(key)
            for waiter in self._claims.end_promotion(key, success=False):
                waiter.failed.add(key)

    def reset(self) -> None:
        """Nobody waits any more, and what is queued is not begun. The primary tier forgets the blocks; the slots of
        jobs in flight are given back when those end."""
        for batch in self.queue.values():
            self._primary.complete_write(list(batch.slots), batch.request.context, success=False)
            if self._costs is not None:
                self._costs.dropped(batch.tier.index, len(batch.slots))
        self.queue.clear()
        self._batches.clear()

    def check_invariants(self) -> None:
        """Every promotion is queued or in a job, once, and its slot is reserved and nobody else's."""
        moving = [(key, slot) for batch in self.queue.values() for key, slot in batch.slots.items()]
        for job in self._jobs.in_flight.values():
            if job.metadata.is_promotion and not job.is_stale:
                moving += zip(job.metadata.keys, job.metadata.block_ids.tolist(), strict=True)
        assert len(moving) == len(self._batches)
        assert {key for key, _ in moving} == set(self._batches)
        if self._costs is not None:
            submitted: Counter[int] = Counter()
            for job in self._jobs.in_flight.values():
                submitted[job.tier.index] += len(job.metadata.keys) if job.metadata.is_promotion else 0
            queued = Counter(submitted)
            for batch in self.queue.values():
                queued[batch.tier.index] += len(batch.slots)
            self._costs.check_invariants(queued, submitted)
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
