# SPDX-License-Identifier: Apache-2.0
"""What the tiering manager remembers of one request.

Who holds which blocks of the primary tier back from eviction while it waits, and how much of it may be held.

Which requests wait, and for how long they still may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.tiering.tier_jobs import GuardedTier

__all__ = ["Claims", "RequestState", "Waits"]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from ``on_new_request`` (or its first use) until its tiers have been told of its end.

    A request *waits* from its first answer ``None`` until it loads, runs, ends or has no patience left. Only while
    it waits are the blocks it was told of its claims (``kvoffload.tiering.waiting``).
    """

    context: ReqContext
    patience_s: float
    """Seconds of waiting it has left; spent by every wait, never refilled."""
    whole_request_tiers: tuple[GuardedTier, ...] = ()
    """The tiers that asked for ``REQUEST_LEVEL``."""
    waiting_since: float | None = None
    told: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks answered ``True`` in step ``told_step``, in order, while it did not wait."""
    told_step: int = -1
    claims: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks kept for it while it waits, in the order it came to them."""
    promoted: set[OffloadKey] = field(default_factory=set)
    """Blocks promoted for it in this wait: a second time would be a loop, so it is a miss instead."""
    failed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed while it waited for them: misses for good."""
    stores_in_flight: int = 0
    """Blocks between ``prepare_store`` and ``complete_store``, each of which may still be cascaded for it."""
    parked: int = 0
    """Request-level cascades that wait for their block to be written."""
    finished: bool = False

    def remember_told(self, key: OffloadKey, step: int) -> None:
        if self.told_step != step:
            self.told.clear()
            self.told_step = step
        self.told[key] = None

    def has_waited_enough(self, now_s: float) -> bool:
        waited_s = 0.0 if self.waiting_since is None else now_s - self.waiting_since
        return waited_s >= self.patience_s

    @property
    def may_still_submit(self) -> bool:
        """Whether something begun for it may yet become a job of a tier."""
        return bool(self.stores_in_flight or self.parked)


class _Held:
    """One block that waiting requests hold: by whom, and whether its promotion is still on the way."""

    __slots__ = ("claimants", "promoting")

    def __init__(self) -> None:
        self.claimants: dict[int, RequestState] = {}
        self.promoting = False


class Claims(Collection[OffloadKey]):
    """The set of blocks that promotions must not evict.

    A block is held while a waiting request claims it (it was told ``True`` of it, or it is being promoted for it)
    or while its promotion is in flight, wanted or not. Shared blocks are claimed by each request that waits for
    them and count once. Two limits, in blocks: ``per_request`` for the claims of one request and ``in_all`` for
    everything held. Nothing here is pinned: when a running request's store finds no other room, it may evict a
    claimed block, since waiting must never starve running.

    This is why waiting ends (law 7): what a request was told stays, so its claims only grow until it has its
    prefix, or meets a limit, beyond which the answer is ``False``.
    """

    def __init__(self, num_blocks: int, claim_share: float, promotion_share: float) -> None:
        # Rounded up, or little could be promoted into a tiny tier; but a block is left for running requests, unless
        # all may be held or there is but one.
        left = 0 if promotion_share >= 1 else 1
        self.in_all = max(1, min(ceil(num_blocks * promotion_share), num_blocks - left))
        self.per_request = max(1, min(ceil(num_blocks * claim_share), self.in_all))
        self._held: dict[OffloadKey, _Held] = {}
        self._fresh: dict[OffloadKey, None] = {}

    def __repr__(self) -> str:
        return f"Claims(held={len(self._held)}, per_request={self.per_request}, in_all={self.in_all})"

    # A collection, in the order things were held; `in` is O(1).

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    # Changes.

    def refusal(self, request: RequestState, key: OffloadKey) -> str | None:
        """Why ``request`` may not have ``key`` promoted; ``None`` if it may."""
        if len(request.claims) >= self.per_request and key not in request.claims:
            return "claim_share"
        if len(self._held) >= self.in_all and key not in self._held:
            return "promotion_share"
        return None

    def claim(self, request: RequestState, key: OffloadKey) -> bool:
        """Holds ``key`` for ``request``; ``False`` beyond a limit, which leaves the block unprotected."""
        if key in request.claims:
            return True
        if self.refusal(request, key):
            return False
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held()
            self._fresh[key] = None
        held.claimants[id(request)] = request
        request.claims[key] = None
        return True

    def release(self, request: RequestState) -> None:
        """Ends all claims of ``request``."""
        for key in request.claims:
            held = self._held[key]
            del held.claimants[id(request)]
            self._drop_if_free(key, held)
        request.claims.clear()

    def promotions_begun(self, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """``keys`` are being promoted for ``request``, which ``refusal`` had nothing against."""
        held, claims, claimant = self._held, request.claims, id(request)
        for key in keys:
            block = held.get(key)
            if block is None:
                block = held[key] = _Held()
            block.claimants[claimant] = request
            block.promoting = True
            claims[key] = None
            self._fresh.pop(key, None)

    def promotion_ended(self, key: OffloadKey, success: bool) -> list[RequestState]:
        """The promotion of ``key`` is over. If it failed, no claim on it is left, and the answer is who waited."""
        held = self._held[key]
        held.promoting = False
        waiters: list[RequestState] = []
        if not success:
            waiters = list(held.claimants.values())
            for request in waiters:
                del request.claims[key]
            held.claimants.clear()
        self._drop_if_free(key, held)
        return waiters

    def take_fresh(self) -> list[OffloadKey]:
        """Blocks told ready and held since the last call, in that order. Promoted ones are the most recent already."""
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    def clear(self) -> None:
        """Forgets everything, whoever holds it."""
        for held in self._held.values():
            for request in held.claimants.values():
                request.claims.clear()
        self._held.clear()
        self._fresh.clear()

    def check_invariants(self, requests: list[RequestState], promoting: set[OffloadKey]) -> None:
        """Recomputes what is held from ``requests`` and the promotions in flight."""
        expected = {key for request in requests for key in request.claims} | promoting
        assert set(self._held) == expected, set(self._held) ^ expected
        assert {key for key, held in self._held.items() if held.promoting} == promoting
        for key, held in self._held.items():
            assert list(held.claimants.values()) == [r for r in held.claimants.values() if key in r.claims]
            assert len(held.claimants) == sum(key in request.claims for request in requests)
        assert len(self._held) <= self.in_all
        assert all(len(request.claims) <= self.per_request for request in requests)
        assert all(request.waiting_since is not None or not request.claims for request in requests)
        assert self._fresh.keys() <= self._held.keys()

    def _drop_if_free(self, key: OffloadKey, held: _Held) -> None:
        if not held.claimants and not held.promoting:
            del self._held[key]
            self._fresh.pop(key, None)


class Waits:
    """A request waits from its first answer ``None`` until it loads, runs, ends or has no patience left.

    What it was told in the step it began to wait, and what it is told while it waits, are its claims. Patience is
    one budget for the whole life of a request: each wait is taken off it.
    """

    def __init__(self, claims: Claims, clock: Callable[[], float]) -> None:
        self._claims = claims
        self._clock = clock
        # In the order their waits began, so that the longest waits are in front.
        self._waiting: dict[int, RequestState] = {}
        self._step = 0

    def __repr__(self) -> str:
        return f"Waits(waiting={len(self._waiting)})"

    def next_step(self) -> None:
        self._step += 1

    def told_ready(self, request: RequestState, key: OffloadKey) -> None:
        """``request`` is told that ``key`` is ready: a claim if it waits, else remembered in case it will."""
        if request.waiting_since is None:
            request.remember_told(key, self._step)
        else:
            self._claims.claim(request, key)

    def is_over(self, request: RequestState) -> bool:
        """Whether ``request`` may not wait, or not any longer."""
        return request.has_waited_enough(self._clock())

    def begin(self, request: RequestState) -> None:
        """No change if it waits already."""
        if request.waiting_since is not None:
            return
        request.waiting_since = self._clock()
        self._waiting[id(request)] = request
        if request.told_step == self._step:
            for key in request.told:
                self._claims.claim(request, key)
        request.told.clear()

    def end(self, request: RequestState) -> None:
        """Its claims end with it. No change to a request that does not wait, but that what it was told is forgotten."""
        request.told.clear()
        if request.waiting_since is None:
            return
        request.patience_s -= self._clock() - request.waiting_since
        request.waiting_since = None
        request.promoted.clear()
        del self._waiting[id(request)]
        self._claims.release(request)

    def end_all(self) -> None:
        for request in list(self._waiting.values()):
            self.end(request)

    def give_up(self, request: RequestState) -> None:
        """It has no patience left, for good."""
        self.end(request)
        request.patience_s = 0.0

    def expire(self) -> None:
        """Ends the waits that nobody comes back for, so that their claims end too."""
        while self._waiting:
            longest = next(iter(self._waiting.values()))
            if not self.is_over(longest):
                return
            self.give_up(longest)

    def check_invariants(self, requests: Collection[RequestState]) -> None:
        """``requests``: all there are."""
        assert self._waiting.keys() <= {id(request) for request in requests}
        for request in requests:
            assert (request.waiting_since is not None) == (id(request) in self._waiting)
