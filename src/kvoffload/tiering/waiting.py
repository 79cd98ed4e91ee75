# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for blocks of lower tiers: what each one claims meanwhile, how much, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.tiering.tier_jobs import GuardedTier

__all__ = ["Claims", "RequestState", "WaitingRequests"]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from ``on_new_request`` (or its first call) until its tiers are informed of its end.

    A request *waits* from its first answer ``None`` until it loads, runs, ends or has no patience left. Only while it
    waits are its hits its claims.
    """

    context: ReqContext
    patience_s: float
    """Seconds of waiting it has left; spent by every wait, never refilled."""
    whole_request_tiers: tuple[GuardedTier, ...] = ()
    """The tiers that asked for ``REQUEST_LEVEL``."""
    waiting_since: float | None = None
    hits: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks answered ``True`` in step ``hits_step``, in order, while it did not wait."""
    hits_step: int = -1
    claims: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks that are not evicted for other waiting requests while it waits, in the order in which it got them."""
    promoted: set[OffloadKey] = field(default_factory=set)
    """Blocks promoted for it in this wait: a second time would be a loop, so it is a miss instead."""
    failed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed while it waited for them: misses for good."""
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

    def has_waited_enough(self, now_s: float) -> bool:
        waited_s = 0.0 if self.waiting_since is None else now_s - self.waiting_since
        return waited_s >= self.patience_s

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

    def __repr__(self) -> str:
        return f"Claims({len(self)} of {self.max_total}, max_per_request={self.max_per_request})"

    # A collection, in the order of the claims; `in` is O(1).

    def __contains__(self, key: object) -> bool:
        return key in self._claimed

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._claimed)

    def __len__(self) -> int:
        return len(self._claimed)

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

    def release(self, request: RequestState) -> None:
        """Ends all claims of ``request``."""
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
        """The promotion of ``key`` has ended. If it failed, all claims on it end; returns the requests that had one."""
        claimed = self._claimed[key]
        claimed.promoting = False
        waiters: list[RequestState] = []
        if not success:
            waiters = list(claimed.claimants.values())
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
        for claimed in self._claimed.values():
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
    is one budget for the whole life of a request: each wait is taken off it.
    """

    def __init__(self, claims: Claims, clock: Callable[[], float]) -> None:
        self._claims = claims
        self._clock = clock
        # In the order their waits began, so that the longest waits are in front.
        self._waiting: dict[int, RequestState] = {}
        self._step = 0

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
        return request.has_waited_enough(self._clock())

    def begin(self, request: RequestState) -> None:
        """``request`` waits from now on; no change if it waits already."""
        if request.waiting_since is not None:
            return
        request.waiting_since = self._clock()
        self._waiting[id(request)] = request
        if request.hits_step == self._step:
            for key in request.hits:
                self._claims.claim(request, key)
        request.hits.clear()

    def end(self, request: RequestState) -> None:
        """Ends the wait and its claims. If the request is not waiting, only clears its recorded hits."""
        request.hits.clear()
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
        """Ends the wait for good: ``request`` has no patience left."""
        self.end(request)
        request.patience_s = 0.0

    def end_step(self) -> None:
        """Ends the waits of requests that ran out of patience and ask no more, so that their claims end too. Hits of
        this step become claims of no later wait."""
        self._step += 1
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
