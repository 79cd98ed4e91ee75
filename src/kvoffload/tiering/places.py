# SPDX-License-Identifier: Apache-2.0
"""Where blocks are: in the primary tier, on their way to it, or below. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.miss import Miss
from kvoffload.tiering.load_policy import HERE, Place, Segment
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import Question, Request
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
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._waits = waits
        self._promotions = promotions
        self._places = [(tier, Place(tier.index), Place(tier.index, is_unknown=True)) for tier in tiers]
        self._peeked: dict[OffloadKey, Place | None] = {}

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
        most = own + min(self._waits.room_of(request)) - first
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
        """The first tier that has ``key``; without one, the first that is still finding out. ``None``: no tier has it,
        or it is a miss for this request."""
        if request.verdicts.get(key) is Miss.PROMOTION_FAILED:
            return None
        if request.wait is not None and key in request.wait.lost:
            request.verdicts[key] = Miss.NO_ROOM
            return None
        if key in self._peeked:
            return self._peeked.pop(key)
        unknown: Place | None = None
        for tier, place, unknown_place in self._places:
            found = tier.lookup(key, request.context)
            if found:
                return place
            if found is None and unknown is None:
                unknown = unknown_place
        return unknown

    def is_answered(self, request: Request, question: Question) -> bool:
        """Whether all untracked blocks of ``question`` have an answer by now, up to the first that is nowhere. Never
        for a prefetch: the time in which it gives way counts against its patience."""
        if request.context.is_prefetch:
            return False
        for key in question.untracked:
            block = self._primary.slots.get(key)
            if block is None:
                is_known = True
                for tier in self._tiers:
                    if found := tier.lookup(key, request.context):
                        break
                    is_known &= found is False
                else:
                    return is_known
            elif not block.is_ready:
                return False
        return True
