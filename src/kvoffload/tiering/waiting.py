# SPDX-License-Identifier: Apache-2.0
"""Who holds which blocks of the primary tier back from eviction while it waits, and how much of it may be held."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import ceil

from kvoffload.base import OffloadKey
from kvoffload.tiering.requests import RequestState

__all__ = ["Claims"]


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
