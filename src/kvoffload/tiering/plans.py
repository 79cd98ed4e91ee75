# SPDX-License-Identifier: Apache-2.0
"""Decide which blocks of a hit are loaded, and from where: ``plan``, a pure function of a survey and of speeds."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from kvoffload.tiering.segments import HERE, Place, Segment, joined, side_by_side
from kvoffload.tiering.worth import Choice, Pace, Run, assign, choose

LEAST_GAIN = 0.1
"""A load must be at least 10 % faster than recomputing: a request waits only if that saves this share of computing the
blocks that are not there. Estimates have errors, a tie gains nothing, and while it waits the engine takes others before
it, which no estimate knows of."""
RISK_SHARE = 0.05
RISK_S = 0.04
"""The time budget of a wait: it may fall behind computing by this share of computing the prompt, and so many seconds.
Whatever a tier does, no first token comes later by more than that and ``FIRST_READ``."""
FIRST_READ = 1.25
"""By this factor the first read of a wait may be slower than expected: its latency and queue, and one block, which
counts no more than computing it."""
_LEAST_READ_S = RISK_S / 16
"""A read is no shorter, however little a request has left."""
PORTION_S = 0.1
"""A promotion is cut into jobs of about this duration, so that a request can use what arrived by its deadline, and a
tier that has become slower is noticed soon."""
FOREVER = 1e12
"""Seconds of computing a block while the engine's speed is not known: any load is worth it."""

Declined = Literal["slow", "busy", "unmeasured", "late"]
"""Why a block of a lower tier is not loaded: its tier is slower than computing; it would be fast enough, but for its
queue; nothing is known of it; it did not arrive by the deadline."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """One tier at the time of a plan."""

    pace: Pace | None
    """Of further blocks, its queue included; ``None``: it was never measured."""
    queue_s: float = 0.0
    """Until all that is outstanding has arrived."""
    room_blocks: int = 0
    """Blocks that may be read from it while it was never measured."""
    is_idle: bool = False
    """Nothing is outstanding."""
    reason: Declined = "unmeasured"
    """Why blocks of it are declined now, if they are."""
    portion_s: float = PORTION_S
    """How long one read takes, ..."""
    answer_s: float | None = None
    """... and an answer to whether it has a block; ``None``: it never gave one."""
    found_share: float = 0.5
    """How often it then had the block."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds that a plan uses, in seconds."""

    block_compute_s: float
    queue_s: float
    """Of the engine: prompts of running requests come first."""
    links: tuple[LinkState, ...]
    """By tier."""


class SoFar(NamedTuple):
    """How long a request has waited when a plan is made for it."""

    num_blocks: int = 0
    """The blocks of its prompt, as far as it asked. If the survey has more, these count."""
    spent_s: float = 0.0
    """It has waited for its blocks, ..."""
    granted_s: float = 0.0
    """... and may for so long whatever comes, by the plan before."""
    num_paid: int | None = None
    """Each leading block that is here beyond this number pays for the wait. At the first plan so many were here, less
    the blocks in host memory behind the blocks that are read. ``None``: this is the first plan."""


NOTHING = SoFar()


class Chosen(NamedTuple):
    """The blocks that a plan begins to read from one tier, and the alternatives."""

    tier: int
    num_blocks: int
    seconds: dict[int, float]
    """Until they are here, from this tier or from any other that has all of them."""
    computing_s: float


class Plan(NamedTuple):
    """How much of a range of blocks is loaded, and from where."""

    stop: int
    """Blocks to load, from the first one on."""
    wait_s: float = 0.0
    """Until all of them are expected in host memory."""
    deadline_s: float = math.inf
    """From now. Blocks that have not arrived by then are computed, unless others have arrived that pay for the wait."""
    declined: tuple[tuple[int, Declined, Sequence[int], tuple[int, ...]], ...] = ()
    """Blocks that are in a tier and are not loaded: the tier, the reason, the blocks, and all tiers that have them."""
    segments: tuple[Segment, ...] = ()
    """The first ``stop`` blocks with their sources."""
    num_paid: int = 0
    """As in ``SoFar``."""
    is_lost: bool = False
    """It ends a wait before all that was planned has come."""
    chosen: tuple[Chosen, ...] = ()
    portion_s: float = math.inf
    """No read takes longer than this."""


class _Budget(NamedTuple):
    """How long a wait may still last, in seconds from now."""

    answers_s: float
    """For answers: the time that arrived blocks have earned, and the time that every wait may lose."""
    reads_s: float
    """For reads: no more than they can bring, of a short prompt."""
    rest_s: float
    """For a block without which the blocks in host memory are useless, such as a state."""
    portion_s: float
    """For one read: a quarter of the rest, whatever has been earned."""


def plan(survey: Sequence[Segment], speeds: Speeds, ends: Sequence[int] | None = None, so_far: SoFar = NOTHING) -> Plan:
    """The number of leading blocks for which the first token comes earliest (``worth.choose``), and their sources.

    With ``ends``, which rise, a part of the hit is of use only if it has that many blocks; all of it always is. Blocks
    in host memory are never declined.

    A wait must not cost more than it may bring, so it has a time budget (``RISK_SHARE``): it falls behind computing by
    no more than that. Each leading block that has arrived pays for the time that computing it would take, and so do
    blocks in host memory behind the blocks that are read. Blocks that are expected later than that are not read, even
    if all of them would save time: a tier that stops before the end would make the whole wait useless.
    """
    total = sum([num_blocks for _, num_blocks in survey])
    here = survey[0].num_blocks if survey and survey[0].place == HERE else 0
    num_paid = so_far.num_paid
    if num_paid is None:
        num_paid = 2 * here - sum([num_blocks for place, num_blocks in survey if place == HERE])
    budget = _budget(max(so_far.num_blocks, total), here, num_paid, speeds, so_far)
    if here == total:
        return Plan(total, 0.0, budget.rest_s, (), tuple(survey), num_paid=num_paid)
    useful = None if ends is None else [*ends[: bisect_left(ends, total)], total]
    # The first read may take its latency, and one block if the tier is faster than computing, whatever that costs.
    begins = not any(place.is_arriving for place, _ in survey)
    pace = _first_read(survey, speeds.links)
    latency_s = pace.first_s if begins else 0.0
    first_s = max(budget.answers_s, FIRST_READ * min(pace.block_s, speeds.block_compute_s)) + FIRST_READ * latency_s
    slack_s = first_s - here * speeds.block_compute_s if begins or so_far.num_paid is None else math.inf
    options = _Options(survey, speeds, useful, so_far, slack_s)
    best = options.choose(())
    for answer_s, tier in options.unknown():
        if answer_s <= max(budget.answers_s, best.choice.wait_s):
            other = options.choose((*best.waited, tier))
            share = speeds.links[tier].found_share
            gained_s = other.choice.saved_s - best.choice.saved_s
            if share * gained_s > (1 - share) * max(0.0, answer_s - best.choice.wait_s):
                best = other
    stop = max(best.choice.num_blocks, here)
    segments = options.sources(best, stop)
    deadline_s = max(budget.answers_s, so_far.granted_s)
    if stop > here:
        first = next(segment.place for segment in segments if segment.place != HERE)
        link = speeds.links[(first.tiers or first.unknown)[0]]
        if first.tiers or link.answer_s is None:
            deadline_s = max(budget.reads_s, so_far.granted_s)
        if first.tiers and link.pace is not None and not first.is_arriving and deadline_s > 0:
            due_s = FIRST_READ * (latency_s + min(max(budget.portion_s, link.pace.block_s), link.portion_s))
            if due_s > deadline_s and best.choice.saved_s < due_s + so_far.spent_s:
                stop = here
            deadline_s = max(deadline_s, min(due_s, first_s))
    is_late = stop > here and deadline_s <= 0
    if is_late or stop == here:
        stop, segments, deadline_s = here, tuple(survey[:1]) if here else (), budget.rest_s
    declined: list[tuple[int, Declined, Sequence[int], tuple[int, ...]]] = []
    if stop - here > 1 and useful is None and (probed := options.unmeasured(stop - 1)) is not None:
        stop -= 1
        declined = [(probed, "unmeasured", range(stop, stop + 1), (probed,))]
        segments = options.sources(best, stop)
    num_begun = sum(num_blocks for _, num_blocks in itertools.takewhile(lambda each: not each.place.is_below, survey))
    is_lost = so_far.num_paid is not None and (is_late or stop < num_begun)
    return Plan(
        stop,
        best.choice.wait_s if stop > here else 0.0,
        deadline_s,
        (*declined, *_declined(survey, stop + len(declined), speeds, is_lost=is_lost, is_late=is_late)),
        segments,
        num_paid,
        is_lost,
        options.chosen(segments),
        budget.portion_s,
    )


def _budget(num_blocks: int, here: int, num_paid: int, speeds: Speeds, so_far: SoFar) -> _Budget:
    """For a prompt of ``num_blocks``, of which the first ``here`` are in host memory."""
    compute_s = num_blocks * speeds.block_compute_s
    risk_s = RISK_SHARE * compute_s + RISK_S
    earned_s = speeds.queue_s - so_far.spent_s + max(here - num_paid, 0) * speeds.block_compute_s
    answers_s = earned_s + risk_s
    reads_s = min(answers_s, earned_s + LEAST_GAIN * compute_s)
    return _Budget(
        answers_s,
        reads_s,
        speeds.queue_s - so_far.spent_s + here * speeds.block_compute_s + risk_s,
        max(min(max(reads_s, so_far.granted_s), risk_s) / 4, _LEAST_READ_S),
    )


def _first_read(survey: Sequence[Segment], links: Sequence[LinkState]) -> Pace:
    """How the first block comes that may have to be read: from the fastest of the tiers that have it, or of those that
    must find out."""
    head = next((place for place, _ in survey if place.is_below), HERE)
    paces = [links[tier].pace for tier in head.tiers or head.unknown]
    return min([pace for pace in paces if pace is not None], default=Pace())


class _Option(NamedTuple):
    """One way to load a hit."""

    waited: tuple[int, ...]
    """The tiers whose answers it waits for. It takes them to have all blocks that they do not know of."""
    runs: list[Run]
    """The survey, each run with its source."""
    choice: Choice


class _Options:
    """The ways to load the blocks of a survey. Sources are the tiers, by number, then the blocks that arrive from each
    of them already, then host memory."""

    def __init__(
        self, survey: Sequence[Segment], speeds: Speeds, ends: Sequence[int] | None, so_far: SoFar, slack_s: float
    ) -> None:
        self._survey, self._speeds, self._ends, self._slack_s = survey, speeds, ends, slack_s
        links = speeds.links
        self._begun = 2 * len(links) if so_far.num_paid is None else len(links)
        """The first source that needs no new wait. For a request that waits already that is the first arriving one, for
        another one host memory."""
        self._answer_s = [0.0 if link.answer_s is None else abs(link.answer_s - so_far.spent_s) for link in links]
        answered = {tier for segment in survey for tier in segment.place.tiers if segment.place.is_below}
        self._late = {tier for segment in survey for tier in segment.place.unknown} - answered
        """Tiers that have answered for no block."""
        arriving = [0] * len(links)
        for place, num_blocks in survey:
            if place.is_arriving and not place.is_overdue:
                arriving[place.tiers[0]] += num_blocks
        self._paces = [self._pace(tier) for tier in range(len(links))]
        for link, num_blocks in zip(links, arriving):
            block_s = 0.0 if link.pace is None else link.pace.block_s
            # The blocks of a read come together, at its end.
            first_s = min(max(link.queue_s - num_blocks * block_s, 0.0) + link.portion_s, link.queue_s)
            self._paces.append(Pace(first_s, (link.queue_s - first_s) / num_blocks if num_blocks else 0.0))
        self._paces.append(Pace())

    def _pace(self, tier: int) -> Pace:
        pace = self._speeds.links[tier].pace or Pace()
        if tier in self._late:
            pace = pace._replace(first_s=pace.first_s + self._answer_s[tier])
        return pace

    def unknown(self) -> list[tuple[float, int]]:
        """Tiers that must find out about some blocks, and how long that takes. The first to answer comes first."""
        tiers = {tier for segment in self._survey for tier in segment.place.unknown}
        return sorted((self._answer_s[tier] if tier in self._late else 0.0, tier) for tier in tiers)

    def _runs(self, waited: tuple[int, ...]) -> list[Run]:
        links, runs = self._speeds.links, list[Run]()
        rooms = [link.room_blocks for link in links]
        for place, num_blocks in self._survey:
            if place.is_arriving:
                runs.append(Run(() if place.is_overdue else (len(links) + place.tiers[0],), num_blocks))
            elif place == HERE:
                runs.append(Run((2 * len(links),), num_blocks))
            else:
                names = place.tiers
                if place.unknown:
                    names = tuple(sorted({*names, *(tier for tier in place.unknown if tier in waited)}))
                measured = tuple(tier for tier in names if links[tier].pace is not None)
                if measured or not names:
                    runs.append(Run(measured, num_blocks))
                    continue
                free = min(rooms[names[0]], num_blocks)
                rooms[names[0]] -= free
                runs += [Run(names[:1], free)] * bool(free) + [Run((), num_blocks - free)] * (free < num_blocks)
        return assign(runs, self._paces)

    def unmeasured(self, block: int) -> int | None:
        """A tier that was never measured and has this block, as another one has: it is measured with it in the
        background, which costs computing one block. Otherwise nobody would ever know which of them is faster."""
        links, at = self._speeds.links, 0
        for place, num_blocks in self._survey:
            at += num_blocks
            if block < at:
                if len(place.tiers) < 2 or self._speeds.block_compute_s >= FOREVER:
                    return None
                new = (tier for tier in place.tiers[::-1] if links[tier].pace is None and links[tier].is_idle)
                return next(new, None)
        return None

    def choose(self, waited: tuple[int, ...]) -> _Option:
        """The best choice, or the blocks that are on their way already if waiting for more gains too little."""
        runs = self._runs(waited)
        pick = partial(
            choose,
            paces=self._paces,
            block_compute_s=self._speeds.block_compute_s,
            queue_s=self._speeds.queue_s,
            slack_s=self._slack_s,
            ends=self._ends,
        )
        best = pick(runs)
        if best.wait_s:
            begun = pick([*itertools.takewhile(lambda run: run.sources and run.sources[0] >= self._begun, runs)])
            reachable = sum(run.num_blocks for run in itertools.takewhile(lambda run: run.sources, runs))
            least_s = LEAST_GAIN * (reachable - begun.num_blocks) * self._speeds.block_compute_s
            if best.num_blocks > begun.num_blocks and best.saved_s - begun.saved_s < least_s:
                best = begun
        return _Option(waited, runs, best)

    def chosen(self, segments: Sequence[Segment]) -> tuple[Chosen, ...]:
        """The reads that ``segments`` begin."""
        counts, others, links = Counter[int](), dict[int, set[int]](), self._speeds.links
        for place, source, num_blocks in side_by_side(self._survey, segments):
            if place.is_below and source.tiers:
                tier = source.tiers[0]
                counts[tier] += num_blocks
                others[tier] = others.get(tier, {*place.tiers}) & {*place.tiers}
        return tuple(
            Chosen(
                tier,
                count,
                {name: pace.seconds(count) for name in others[tier] if (pace := links[name].pace) is not None},
                count * self._speeds.block_compute_s,
            )
            for tier, count in counts.items()
        )

    def sources(self, option: _Option, stop: int) -> tuple[Segment, ...]:
        """The first ``stop`` blocks, each run from one source."""
        found: list[tuple[Place, int]] = []
        for place, sources, num_blocks in side_by_side(self._survey, option.runs):
            num_blocks = min(num_blocks, stop)
            stop -= num_blocks
            if not num_blocks:
                break
            found.append((_from(place, sources[0]) if place.is_below else place, num_blocks))
        return tuple(joined(found))


def _from(place: Place, tier: int) -> Place:
    """``tier`` as the source of blocks in ``place``: it has them, or is waited for."""
    return Place((tier,)) if tier in place.tiers else Place((), (tier,))


def _declined(
    survey: Sequence[Segment], stop: int, speeds: Speeds, *, is_lost: bool, is_late: bool
) -> list[tuple[int, Declined, Sequence[int], tuple[int, ...]]]:
    blocks: dict[Place, list[int]] = {}
    at = 0
    for place, num_blocks in survey:
        at += num_blocks
        if at > stop:
            blocks.setdefault(place, []).extend(range(max(at - num_blocks, stop), at))
    found: list[tuple[int, Declined, Sequence[int], tuple[int, ...]]] = []
    for place, indices in blocks.items():
        tiers = place.tiers or (place.unknown if is_late else ())
        if tiers and (is_lost or not place.is_arriving):
            tier = min(tiers, key=lambda tier: speeds.links[tier].pace or Pace(math.inf))
            reason = "late" if is_late or place.is_arriving else speeds.links[tier].reason
            found.append((tier, reason, indices, place.tiers))
    return found
