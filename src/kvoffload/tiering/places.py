# SPDX-License-Identifier: Apache-2.0
"""Find blocks: in host memory, on their way to it, or in the tiers below. Scheduler thread only."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.cpu.policies.base import BlockStatus
from kvoffload.tiering.load_policy import LoadPlanner
from kvoffload.tiering.promotions import Promotions
from kvoffload.tiering.requests import TierRequest, Unanswered
from kvoffload.tiering.segments import HERE, Place, Segment, joined
from kvoffload.tiering.tier_jobs import GuardedTier
from kvoffload.tiering.waits import Waits

_RUN = 64
"""The number of blocks in the first call to a tier. A prefix that no tier has costs one such call for each tier."""
_GROWTH = 16
"""If the tier has answered for all blocks, the next call asks for so many times as many."""


class Places:
    """Finds blocks in host memory and all tiers, and measures how long the tiers take to answer. Changes nothing,
    except that a tier may ask its store. Scheduler thread only."""

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
        self._asked: dict[GuardedTier, _Asked] = {}

    def __repr__(self) -> str:
        return f"Places(tiers={[tier.name for tier in self._tiers]})"

    def where(self, request: TierRequest, keys: Sequence[OffloadKey], answers: list[bool | None]) -> list[bool | None]:
        """Return for each of ``keys`` whether any tier has it. ``answers`` says which blocks host memory has."""
        missing = [at for at, answer in enumerate(answers) if not answer]
        if request.verdicts:
            missing = [at for at in missing if request.readable([keys[at]])]
        for tier in self._tiers:
            if missing:
                for at, found in zip(missing, tier.lookup_each([keys[at] for at in missing], request.context)):
                    answers[at] = found if found is not False else answers[at]
                missing = [at for at in missing if not answers[at]]
        return answers

    def survey(self, request: TierRequest, keys: Sequence[OffloadKey]) -> list[Segment]:
        """Return the places of ``keys``, up to the first block that no tier has."""
        found: list[Segment] = []
        blocks = self._primary.slots.get_all(keys)
        absent = bytes(map(operator.is_, blocks, itertools.repeat(None)))
        at = 0
        while at < len(keys):
            stop = absent.find(1 - absent[at], at)
            stop = len(keys) if stop < 0 else stop
            part = self.below(request, keys[at:stop]) if absent[at] else self._here(keys[at:stop], blocks[at:stop])
            found += part
            if sum([num_blocks for _, num_blocks in part]) < stop - at:
                break
            at = stop
        return joined(found)

    def _here(self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus | None]) -> list[Segment]:
        """Return the places of blocks that host memory has, up to one whose store has lasted too long."""
        places: list[Place] = []
        for key, block in zip(keys, blocks):
            assert block is not None
            if block.pins >= 0:
                places.append(HERE)
                continue
            places.append(self._promotions.place_of(key))
            if places[-1] == HERE and self._primary.is_overdue(block):
                places.pop()
                break
        return [Segment(place, len([*same])) for place, same in itertools.groupby(places)]

    def below(self, request: TierRequest, keys: Sequence[OffloadKey]) -> list[Segment]:
        """Return for ``keys``, which host memory lacks, the tiers that have them and the tiers that must ask their
        stores. Ends at the first block that no tier has, or that is a miss for this request.

        A tier is asked for a run of blocks, and answers up to its first miss. If another tier has that block, the next
        call asks for each of the following blocks. A tier that is too slow to be useful beside others is asked only
        for blocks that the others lack.
        """
        keys = request.readable(keys)
        views = [_View(tier) for tier in self._tiers]
        found: list[Segment] = []
        at = 0
        while views and at < len(keys):
            sure: list[int] = []
            for view in views:
                if not view.knows(at) and (not sure or self._planner.adds(view.tier.index, sure)):
                    self._ask(view, request, keys, at)
                if view.knows(at) and view.answers[at]:
                    sure.append(view.tier.index)
            stop = min(len(view.answers) for view in views if view.knows(at))
            is_partial = not all(view.knows(at) for view in views)
            for answers, num_blocks in _runs([view.answers[at:stop] or [False] * (stop - at) for view in views]):
                place = _place(answers)
                if place is HERE:  # no tier has it
                    return found
                found.append(Segment(place, num_blocks))
                at += num_blocks
                if is_partial:
                    break  # a tier that was not asked may have the next block
        return found

    def _ask(self, view: _View, request: TierRequest, keys: Sequence[OffloadKey], at: int) -> None:
        """Ask a tier for the blocks from ``at`` on. If it must ask its store, time its answer for one of them."""
        tier, keys = view.tier, keys[at : at + view.size]
        lookup = tier.lookup_each if view.has_missed else tier.lookup_prefix
        answers = lookup(keys, request.context)
        view.answers += [False] * (at - len(view.answers)) + answers
        view.has_missed |= answers[-1] is False
        view.size *= _GROWTH
        asked = self._asked.get(tier)
        if asked is None:
            if None in answers:
                now_s, key = self._clock(), keys[answers.index(None)]
                self._asked[tier] = _Asked(key, request, now_s, now_s)
        elif (asked.request is request or asked.may_be_known) and asked.key in keys[: len(answers)]:
            self._saw(tier, asked, answers[keys.index(asked.key)])

    # ------------------------------------------------------------------------------------------------- answers

    def note_news(self, tier: GuardedTier, news: Collection[OffloadKey] | None) -> None:
        """Record that ``tier`` may know more about these blocks (``None``: about any block)."""
        asked = self._asked.get(tier)
        if asked is not None and (news is None or asked.key in news):
            asked.may_be_known = True

    def measure(self) -> None:
        """Check whether the tiers have answered, unless they were asked only now. Each tier's answer is timed for one
        block at a time, whether or not a request still waits for the block."""
        for tier, asked in [*self._asked.items()]:
            if asked.seen_s < self._clock():
                self._saw(tier, asked, tier.lookup(asked.key, asked.request.context) if asked.may_be_known else None)

    def _saw(self, tier: GuardedTier, asked: _Asked, found: bool | None) -> None:
        if found is None:
            asked.seen_s, asked.may_be_known = self._clock(), False
        else:
            self._end(tier, found)

    def _end(self, tier: GuardedTier, found: bool | None) -> None:
        asked = self._asked.pop(tier)
        seconds = inf if found is None else self._clock() - asked.asked_s
        self._planner.link(tier.index).answers.add(asked.seen_s - asked.asked_s, seconds, found)

    def end(self, request: TierRequest) -> None:
        """Stop timing answers for a request that has ended."""
        for tier in [tier for tier, asked in self._asked.items() if asked.request is request]:
            self._end(tier, None)

    def is_unanswered(self, request: TierRequest, rest: Unanswered) -> bool:
        """Return whether the request still waits for the first of these blocks."""
        key = rest.keys[0]
        block = self._primary.slots.get(key)
        if block is not None:
            return not block.is_ready
        places = [place for place, _ in self.below(request, [key])]
        return any(tier in rest.waited for place in places for tier in place.unknown)


@dataclass(slots=True)
class _Asked:
    """A block whose answer is timed, because the tier must ask its store."""

    key: OffloadKey
    request: TierRequest
    asked_s: float
    seen_s: float
    """The last time at which the answer was still missing."""
    may_be_known: bool = False
    """Whether the tier has reported since then that it may know more, or cannot tell."""


@dataclass(slots=True)
class _View:
    """The answers of one tier about the leading blocks of a survey. ``False`` for blocks that it was not asked for."""

    tier: GuardedTier
    answers: list[bool | None] = field(default_factory=list)
    size: int = _RUN
    """The number of blocks of the next call."""
    has_missed: bool = False
    """Whether it lacks a block that another tier has."""

    def knows(self, at: int) -> bool:
        return len(self.answers) > at


def _runs(columns: list[list[bool | None]]) -> Iterable[tuple[tuple[bool | None, ...], int]]:
    """Yield each run of blocks with equal answers of all tiers: the answers, and the number of blocks. ``columns``: the
    answers of each tier."""
    if all(column.count(column[0]) == len(column) for column in columns):  # most of the long ones
        return [(tuple(column[0] for column in columns), len(columns[0]))]
    return ((answers, len([*same])) for answers, same in itertools.groupby(zip(*columns)))


@cache
def _place(answers: tuple[bool | None, ...]) -> Place:
    """Return the place of a block by the answers of all tiers; ``HERE``: no tier has it."""
    tiers = tuple(tier for tier, answer in enumerate(answers) if answer)
    unknown = tuple(tier for tier, answer in enumerate(answers) if answer is None)
    return Place(tiers, unknown) if tiers or unknown else HERE
