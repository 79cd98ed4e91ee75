# SPDX-License-Identifier: Apache-2.0
"""Claims: the blocks of requests that wait, and what happens to them meanwhile. Scheduler thread only.

What arrives, fails or leaves changes the answers of the prefixes that hold it where they are, so that a request that
asks again gets what has not changed without another look.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import ceil

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus
from kvoffload.miss import Miss
from kvoffload.tiering.requests import Prefix, Request, Wait

__all__ = ["Claims"]


class _Claim:
    """One claimed block: the ranges that hold it, with its index in each, and whether its promotion is in flight."""

    __slots__ = ("is_arriving", "prefixes")

    def __init__(self) -> None:
        self.prefixes: dict[Prefix, int] = {}
        self.is_arriving = False


class Claims(Collection[OffloadKey]):
    """Blocks that waiting requests protect from eviction, and the limits on them.

    A block is claimed while a waiting request has hit it or has it promoted, and while its promotion is in flight, even
    if no request waits for it any more. Each request that waits for a shared block claims it; it counts once. There are
    two limits, in blocks: ``max_per_request`` on the claims of one request, ``max_total`` on all claimed blocks. A
    claim is not a pin: when a running request's store finds no other room it may evict a claimed block, since waiting
    requests must never starve running ones.

    Claims also ensure that each wait makes progress. Blocks that a request has hit stay until it has its whole prefix
    or meets a limit, beyond which the answer is ``False``.
    """

    def __init__(self, num_blocks: int, claim_share: float, promotion_share: float, clock: Callable[[], float]) -> None:
        # Rounded up, or little could be promoted into a tiny tier. One block is left for running requests, unless the
        # share says that all may be claimed, or there is only one.
        left = 0 if promotion_share >= 1 else 1
        self.max_total = max(1, min(ceil(num_blocks * promotion_share), num_blocks - left))
        self.max_per_request = max(1, min(ceil(num_blocks * claim_share), self.max_total))
        self._clock = clock
        self._claims: dict[OffloadKey, _Claim] = {}
        self._new: dict[OffloadKey, None] = {}
        """What ``take_new`` will return."""

    def __repr__(self) -> str:
        return f"Claims({len(self)} of {self.max_total}, max_per_request={self.max_per_request})"

    # A collection, in the order of the claims; `in` is O(1).

    def __contains__(self, key: object) -> bool:
        return key in self._claims

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._claims)

    def __len__(self) -> int:
        return len(self._claims)

    # Limits.

    def room_of(self, request: Request | None, hits: Collection[OffloadKey] = ()) -> tuple[int, int]:
        """How many unclaimed blocks may be promoted for ``request``: (by its own limit, by the limit of all). ``hits``
        are the ready blocks that it will claim when it begins to wait. ``None``: no request waits for them."""
        total = self.max_total - len(self._claims)
        if request is None:
            return self.max_total, total
        if request.wait is not None:
            return self.max_per_request - request.wait.num_claims, total
        return self.max_per_request - len(hits), total - sum(key not in self._claims for key in hits)

    # Claims of one range.

    def claim(self, wait: Wait, prefix: Prefix, at: int) -> bool:
        """Claims a block of ``prefix`` that is here or on its way, and has an answer; ``False`` beyond a limit, which
        leaves it unprotected."""
        key = prefix.keys[at]
        claim = self._claims.get(key)
        if claim is not None and claim.prefixes.get(prefix) == at:
            return True
        is_own = claim is not None and self._is_own(claim, wait, prefix)
        if not is_own and wait.num_claims >= self.max_per_request:
            return False
        if claim is None:
            if len(self._claims) >= self.max_total:
                return False
            claim = self._claims[key] = _Claim()
            self._new[key] = None
        if prefix in claim.prefixes:
            return False  # the range names a block twice; its first place is claimed
        claim.prefixes[prefix] = at
        wait.num_claims += not is_own
        if prefix.answers[at] is None:
            wait.add_open(1, self._clock())
        return True

    def is_held(self, prefix: Prefix, at: int) -> bool:
        """Whether ``prefix`` claims the block in some place."""
        claim = self._claims.get(prefix.keys[at])
        return claim is not None and prefix in claim.prefixes

    def begin_promotions(self, keys: Sequence[OffloadKey], wait: Wait | None, prefix: Prefix | None, at: int) -> None:
        """Promotions of ``keys`` begin. They are the blocks of ``prefix`` from ``at`` on, with answers ``None``.
        Without a ``prefix`` no request waits for them. The caller checked the limits, and that no request claims them
        yet."""
        claims = self._claims
        for index, key in enumerate(keys, at):
            claim = claims[key] = _Claim()
            claim.is_arriving = True
            if prefix is not None:
                claim.prefixes[prefix] = index
        if wait is not None:
            wait.num_claims += len(keys)
            wait.add_open(len(keys), self._clock())

    def release(self, wait: Wait, prefix: Prefix, start: int) -> None:
        """Ends the claims of ``prefix`` on its blocks from ``start`` on, and forgets their answers."""
        num_open = 0
        for at in range(start, len(prefix.answers)):
            key = prefix.keys[at]
            claim = self._claims.get(key)
            if claim is None or claim.prefixes.get(prefix) != at:
                continue
            num_open += prefix.answers[at] is None
            del claim.prefixes[prefix]
            wait.num_claims -= not self._is_own(claim, wait, prefix)
            self._drop_if_unclaimed(key, claim)
        wait.add_open(-num_open, self._clock())
        del prefix.answers[start:]
        prefix.head = min(prefix.head, start)

    def split(self, wait: Wait, prefix: Prefix, start: int) -> None:
        """The blocks of ``prefix`` from ``start`` on become a range of their own."""
        rest = Prefix(prefix.request, prefix.keys[start:])
        rest.answers = prefix.answers[start:]
        for at, key in enumerate(rest.keys[: len(rest.answers)]):
            claim = self._claims.get(key)
            if claim is None or claim.prefixes.get(prefix) != start + at:
                continue
            del claim.prefixes[prefix]
            claim.prefixes[rest] = at
        del prefix.keys[start:], prefix.answers[start:]
        prefix.head = min(prefix.head, start)
        if rest.keys[0] in wait.prefixes:
            self.release(wait, rest, 0)
        elif rest.answers:
            wait.prefixes[rest.keys[0]] = rest

    def _is_own(self, claim: _Claim, wait: Wait, prefix: Prefix) -> bool:
        """Whether some range of the wait holds the block."""
        prefixes = wait.prefixes
        if len(prefixes) <= 1:
            return prefix in claim.prefixes
        if len(prefixes) <= len(claim.prefixes):
            return any(each in claim.prefixes for each in prefixes.values())
        return any(each.request.wait is wait for each in claim.prefixes)

    # What happens to claimed blocks.

    def arrived(self, keys: Iterable[OffloadKey], source: str | None = None, ended_s: float | None = None) -> None:
        """Blocks became ready: promoted from ``source``, or stored; at ``ended_s``, if that is known."""
        if not self._claims:
            return
        now_s = self._clock() if ended_s is None else min(ended_s, self._clock())
        for key in keys:
            claim = self._claims.get(key)
            if claim is None:
                continue
            for prefix, at in claim.prefixes.items():
                self._answer(prefix, at, True, now_s)
                if source is not None and prefix.request.wait is not None:
                    prefix.request.wait.sources[key] = source

    def end_promotions(self, keys: Iterable[OffloadKey]) -> None:
        """The promotions of ``keys`` are no longer in flight."""
        for key in keys:
            claim = self._claims[key]
            claim.is_arriving = False
            self._drop_if_unclaimed(key, claim)

    def left(self, keys: Iterable[OffloadKey], verdict: Miss | None = None, ended_s: float | None = None) -> None:
        """Blocks were evicted, or did not arrive: no request claims them any more. With a ``verdict`` they are misses
        for each request that waited for them. A block that had arrived for a wait is not promoted for it again."""
        if not self._claims:
            return
        now_s = self._clock() if ended_s is None else min(ended_s, self._clock())
        for key in keys:
            claim = self._claims.pop(key, None)
            if claim is None:
                continue
            self._new.pop(key, None)
            prefixes, claim.prefixes = claim.prefixes, {}
            counted: set[int] = set()
            for prefix, at in prefixes.items():
                request, wait = prefix.request, prefix.request.wait
                assert wait is not None
                prefix.head = min(prefix.head, at)
                self._answer(prefix, at, False, now_s)
                if id(wait) not in counted:
                    counted.add(id(wait))
                    wait.num_claims -= 1
                if verdict is not None:
                    request.verdicts[key] = verdict
                elif wait.sources.pop(key, None) is not None:
                    wait.lost.add(key)

    @staticmethod
    def _answer(prefix: Prefix, at: int, answer: bool, now_s: float) -> None:
        wait = prefix.request.wait
        assert wait is not None
        if prefix.answers[at] is None:
            wait.add_open(-1, now_s)
        prefix.answers[at] = answer
        if not answer:
            prefix.kept = None

    def take_new(self) -> list[OffloadKey]:
        """Blocks claimed since the last call, in that order, but for those that were claimed when their promotion
        began: these are the most recent already."""
        new = list(self._new)
        self._new.clear()
        return new

    def clear(self) -> None:
        """The cache was reset: no block is claimed, and no answer holds."""
        for claim in self._claims.values():
            for prefix in claim.prefixes:
                prefix.head = 0
        self._claims.clear()
        self._new.clear()

    def check_invariants(
        self,
        requests: Collection[Request],
        arriving: set[OffloadKey],
        get: Callable[[OffloadKey], BlockStatus | None],
    ) -> None:
        """Recomputes the claims from ``requests``, the promotions in flight, and the primary tier's blocks."""
        assert {key for key, claim in self._claims.items() if claim.is_arriving} == arriving
        assert self._new.keys() <= self._claims.keys()
        assert len(self._claims) <= self.max_total
        waits = {id(request.wait) for request in requests if request.wait is not None}
        for key, claim in self._claims.items():
            assert claim.prefixes or claim.is_arriving
            for prefix, at in claim.prefixes.items():
                assert prefix.keys[at] == key
                assert id(prefix.request.wait) in waits
                assert prefix.request.wait is not None
                assert prefix in prefix.request.wait.prefixes.values()
        for request in requests:
            if request.wait is None:
                continue
            own = {key for key, claim in self._claims.items() if any(p.request is request for p in claim.prefixes)}
            assert request.wait.num_claims == len(own) <= self.max_per_request
            for prefix in request.wait.prefixes.values():
                assert prefix.head <= len(prefix.answers) <= len(prefix.keys)
                for key, answer in zip(prefix.keys[: prefix.head], prefix.answers):
                    assert prefix in self._claims[key].prefixes
                    block = get(key)
                    assert block is not None
                    assert answer == (block.is_ready or None), f"{key!r} is answered {answer}"
            tracked = sum(
                prefix.answers[at] is None
                for claim in self._claims.values()
                for prefix, at in claim.prefixes.items()
                if prefix.request is request
            )
            untracked = sum(len(prefix.untracked) for prefix in request.wait.prefixes.values())
            assert request.wait.num_open == tracked + untracked, request.wait

    def _drop_if_unclaimed(self, key: OffloadKey, claim: _Claim) -> None:
        if not claim.prefixes and not claim.is_arriving:
            del self._claims[key]
            self._new.pop(key, None)
