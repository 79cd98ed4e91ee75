# SPDX-License-Identifier: Apache-2.0
"""Where blocks are: in the primary tier, on their way to it, or below. Scheduler thread only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
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

_RUN = 64
"""Blocks of which a tier is asked in one call. A prefix that is nowhere costs one such call for each tier."""
_NOWHERE = 0, 0


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

    def peek(self, request: Request, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """What is somewhere of ``keys``, up to the first that is nowhere; ``None``: that is not known yet."""
        places, is_end = self._where(request, keys, is_peek=True)
        answers = [None if place.is_unknown else True for place in places]
        return [*answers, False] if is_end else answers

    def survey(self, request: Request, keys: Sequence[OffloadKey], first: int = 0) -> Survey:
        """Where ``keys`` are, up to the first that is nowhere. They are the blocks of a range from ``first`` on.

        Ends where the request could claim no more: what comes after may be evicted while it waits. Blocks before the
        first that must be waited for need no claims, and unknown ones have none.
        """
        own = len(request.wait.answers) if request.wait is not None else 0
        most = own + self._waits.room_beside(()) - first
        places, is_end = self._where(request, keys, most)
        segments = [Segment(place, len([*same])) for place, same in itertools.groupby(places)]
        return Survey(segments, is_end)

    def _where(
        self, request: Request, keys: Sequence[OffloadKey], most: float = inf, *, is_peek: bool = False
    ) -> tuple[list[Place], bool]:
        """The places of the leading ones of ``keys``, and whether they end because the next one is nowhere.

        They end after ``most``, too, unless all so far are here or the last one is unknown. With ``is_peek``, what is
        found below is remembered until the request has asked.
        """
        found: list[Place] = []
        blocks = self._primary.slots.get_all(keys)
        are_here = True
        while (at := len(found)) < len(keys) and (are_here or at < most or found[-1].is_unknown):
            if (block := blocks[at]) is not None:
                found.append(HERE if block.is_ready else self._promotions.place_of(keys[at]))
                are_here = are_here and found[-1] == HERE
                continue
            are_here = False
            # Few may be claimed, but after an unknown block there are mostly more.
            least = _RUN if found and found[-1].is_unknown else 1
            limit = int(min(len(keys), max(most, at + least)))
            absent = keys[at : next((end for end in range(at, limit) if blocks[end] is not None), limit)]
            places = self.below(request, absent)
            if is_peek:
                self._peeked.update(zip(absent, [*places, None], strict=False))
            found += places
            if len(places) < len(absent):
                return found, True
        return found, False

    def below(self, request: Request, keys: Sequence[OffloadKey]) -> list[Place]:
        """The tiers that have each of ``keys``, which the primary tier lacks, and those that are still finding out; up
        to the first that no tier has, or that is a miss for this request. A tier that is too slow to be of use beside
        others is not asked."""
        found: list[Place] = []
        lost = request.wait.lost if request.wait is not None else ()
        verdicts, peeked, first = request.verdicts, self._peeked, 0
        for at, key in enumerate(keys) if verdicts or lost or peeked else ():
            if key not in peeked and key not in lost and verdicts.get(key) is not Miss.PROMOTION_FAILED:
                continue
            found += self._ask(request, keys[first:at])
            if len(found) < at or key in lost or verdicts.get(key) is Miss.PROMOTION_FAILED:
                return found
            if (place := peeked.pop(key)) is None:
                return found
            found.append(place)
            first = at + 1
        return found + self._ask(request, keys[first:])

    def _ask(self, request: Request, keys: Sequence[OffloadKey]) -> list[Place]:
        """The same for blocks of which nothing is known."""
        found: list[Place] = []
        while len(found) < len(keys):
            run = keys[len(found) : len(found) + _RUN]
            known = [_NOWHERE] * len(run)
            """Of each block, the tiers that have it and those that do not know, as bits."""
            for tier in self._tiers:
                if tier.index == 0:
                    asked: Sequence[int] = range(len(run))
                    answers = self._answers(tier, request, run)
                    del known[len(answers) :]  # whether what comes after is of use, the other tiers say
                else:
                    asked, answers = self._not_enough(tier, known), []
                    while len(answers) < len(asked):
                        answers += self._answers(tier, request, [run[at] for at in asked[len(answers) :]])
                bit = 1 << tier.index
                for at, answer in zip(asked, answers):
                    if answer is not False:
                        having, unknown = known[at]
                        known[at] = (having | bit, unknown) if answer else (having, unknown | bit)
            stop = known.index(_NOWHERE) if _NOWHERE in known else len(known)
            places = {state: _place(*state) for state in {*known[:stop]}}
            found += [places[state] for state in known[:stop]]
            if stop < len(known):
                break
        return found

    def _not_enough(self, tier: GuardedTier, known: Sequence[tuple[int, int]]) -> list[int]:
        """Which of these blocks no tier before ``tier`` has, or only one beside which ``tier`` is of use."""
        adds = {0: True}
        for having in {having for having, _ in known if having}:
            adds[having] = self._planner.adds(tier.index, _place(having, 0).tiers)
        return [at for at, (having, _) in enumerate(known) if adds[having]]

    def _answers(self, tier: GuardedTier, request: Request, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Of ``tier`` for ``keys``, up to the first ``False``. Of its unknown blocks one is watched."""
        answers = tier.lookup_prefix(keys, request.context)
        asked = self._asked.get(tier)
        if asked is not None and asked.key in keys[: len(answers)]:
            self._saw(tier, asked, answers[keys.index(asked.key)])
        if None in answers and tier not in self._asked:
            now_s, key = self._clock(), keys[answers.index(None)]
            self._asked[tier] = _Asked(key, request, now_s, tier.progress(), now_s)
        return answers

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
        keys = [*question.untracked]
        for part in (keys[:1], keys[1:]):  # a tier mostly has no answer to the first one yet
            places, is_end = self._where(request, part)
            blocks = self._primary.slots.get_all(part[: len(places)])
            if any(block is not None and not block.is_ready for block in blocks):
                return False
            if any(tier in question.waited for place in places for tier in place.unknown):
                return False
            if is_end:
                return True
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


@cache
def _place(having: int, unknown: int) -> Place:
    """Of a block that some tiers have and others must find out, as bits."""
    return Place(_tiers(having), _tiers(unknown))


def _tiers(bits: int) -> tuple[int, ...]:
    return tuple(tier for tier in range(bits.bit_length()) if bits >> tier & 1)
