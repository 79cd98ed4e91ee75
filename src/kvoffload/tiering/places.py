# SPDX-License-Identifier: Apache-2.0
"""Where blocks are: in the primary tier, on their way to it, or below. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.miss import Miss
from kvoffload.tiering.load_policy import LoadPlanner
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import Question, Request
from kvoffload.tiering.segments import HERE, Place, Segment
from kvoffload.tiering.tier_jobs import GuardedTier
from kvoffload.tiering.waits import Waits

__all__ = ["Places", "Survey"]


class Survey(NamedTuple):
    """Where consecutive blocks are."""

    segments: list[Segment]
    is_end: bool
    """The next block is nowhere."""

    @property
    def num_blocks(self) -> int:
        return sum(segment.num_blocks for segment in self.segments)

    def place_at(self, index: int) -> Place:
        """Of the block with this index."""
        return next(segment.place for segment in self.segments if (index := index - segment.num_blocks) < 0)


class Places:
    """Looks blocks up, and changes nothing but what ``tiers`` note of their lookups. What a request peeked at is
    remembered until it asks for it, so that each block is looked up once in a step; ``forget`` ends that."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        waits: Waits,
        promotions: Promotions,
        planner: LoadPlanner,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._waits = waits
        self._promotions = promotions
        self._clock = clock
        self._planner = planner
        self._known: dict[tuple[int, int], Place] = {(0, 0): HERE}
        """Places, by the tiers that have a block and those that must find out, as bits."""
        self._peeked: dict[OffloadKey, Place | None] = {}
        self._asked: dict[GuardedTier, _Asked] = {}

    def __repr__(self) -> str:
        return f"Places(tiers={[tier.name for tier in self._tiers]}, peeked={len(self._peeked)})"

    def forget(self) -> None:
        """The step has ended, another request asks, or the cache was reset."""
        self._peeked.clear()

    def progress(self) -> tuple[int, ...] | None:
        """Another one whenever a tier may know more; ``None``: some tier cannot tell."""
        found = [tier.progress() for tier in self._tiers]
        return None if None in found else tuple(found)  # type: ignore[arg-type]

    def peek(self, request: Request, key: OffloadKey) -> bool | None:
        """Whether some tier has ``key``, which the primary tier lacks; ``None``: that is not known yet."""
        place = self._peeked[key] = self.below(request, key)
        return place is not None and (None if place.is_unknown else True)

    def survey(self, request: Request, keys: Sequence[OffloadKey], first: int = 0) -> Survey:
        """Where ``keys`` are, up to the first that is nowhere. They are the blocks of a range from ``first`` on.

        Ends where the request could claim no more: what comes after may be evicted while it waits. Blocks before the
        first that must be waited for need no claims.
        """
        own = len(request.wait.answers) if request.wait is not None else 0
        most = own + self._waits.room_beside(()) - first
        segments: list[Segment] = []
        last, count = HERE, 0
        is_end = False
        for at, (key, block) in enumerate(zip(keys, self._primary.slots.get_all(keys), strict=True)):
            if at >= most and (segments or last != HERE):
                break
            if block is not None:
                place: Place | None = HERE if block.is_ready else self._promotions.place_of(key)
            else:
                place = self.below(request, key)
            if place is None:
                is_end = True
                break
            if place is not last and place != last:
                if count:
                    segments.append(Segment(last, count))
                last, count = place, 0
            count += 1
        if count:
            segments.append(Segment(last, count))
        return Survey(segments, is_end)

    def below(self, request: Request, key: OffloadKey) -> Place | None:
        """The tiers that have ``key``, and those that are still finding out. ``None``: no tier has it, or it is a miss
        for this request. One that is too slow to be of use beside others is not asked."""
        if request.verdicts.get(key) is Miss.PROMOTION_FAILED:
            return None
        if request.wait is not None and key in request.wait.lost:
            request.verdicts[key] = Miss.NO_ROOM
            return None
        if key in self._peeked:
            return self._peeked.pop(key)
        having = unknown = 0
        for tier in self._tiers:
            if having and not self._planner.adds(tier.index, self._known[having, 0].tiers):
                continue
            found = tier.lookup(key, request.context)
            if (asked := self._asked.get(tier)) is not None and asked.key == key:
                self._saw(tier, asked, found)
            if found:
                having |= 1 << tier.index
                if (having, 0) not in self._known:
                    self._known[having, 0] = Place(self._numbers(having))
            elif found is None:
                unknown |= 1 << tier.index
                if tier not in self._asked:
                    now_s = self._clock()
                    self._asked[tier] = _Asked(key, request, now_s, tier.progress(), now_s)
        if not having and not unknown:
            return None
        place = self._known.get((having, unknown))
        if place is None:
            place = self._known[having, unknown] = Place(self._numbers(having), self._numbers(unknown))
        return place

    def _numbers(self, bits: int) -> tuple[int, ...]:
        return tuple(tier.index for tier in self._tiers if bits & 1 << tier.index)

    def measure(self) -> None:
        """Sees whether tiers have answered, unless they were asked just now. Of each tier one block at a time is
        watched, whether or not a request waits for it."""
        for tier, asked in [*self._asked.items()]:
            if asked.seen_s < self._clock():
                is_same = asked.progress is not None and asked.progress == tier.progress()
                self._saw(tier, asked, None if is_same else tier.lookup(asked.key, asked.request.context))

    def _saw(self, tier: GuardedTier, asked: _Asked, found: bool | None) -> None:
        if found is None:
            asked.seen_s = self._clock()
        else:
            self._end(tier, found)

    def _end(self, tier: GuardedTier, found: bool | None) -> None:
        asked = self._asked.pop(tier)
        seconds = inf if found is None else self._clock() - asked.asked_s
        self._planner.link(tier.index).answers.add(asked.seen_s - asked.asked_s, seconds, found)

    def end(self, request: Request) -> None:
        """The request has ended: no tier is asked for it any more."""
        for tier in [tier for tier, asked in self._asked.items() if asked.request is request]:
            self._end(tier, None)

    def is_answered(self, request: Request, question: Question) -> bool:
        """Whether all untracked blocks of ``question`` have the answers that are waited for, up to the first that is
        nowhere. Never for a prefetch: the time in which it gives way counts against its patience."""
        if request.context.is_prefetch:
            return False
        for key in question.untracked:
            block = self._primary.slots.get(key)
            if block is None:
                place = self.below(request, key)
                if place is None:
                    return True
                if any(tier in question.waited for tier in place.unknown):
                    return False
            elif not block.is_ready:
                return False
        return True


@dataclass(slots=True)
class _Asked:
    """A block of which a tier must find out."""

    key: OffloadKey
    request: Request
    asked_s: float
    progress: int | None
    seen_s: float
    """When it was seen last that there is no answer yet."""
