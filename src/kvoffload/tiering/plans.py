# SPDX-License-Identifier: Apache-2.0
"""Decide which blocks of a hit to load, and from where: ``plan`` is a pure function of a survey and of speeds."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

from kvoffload.base import Weighed
from kvoffload.tiering.segments import HERE, Place, Segment, joined, side_by_side
from kvoffload.tiering.worth import Choice, Pace, Run, assign, choose

LEAST_GAIN = 0.1
"""A load must be at least 10% faster than computing: a request waits only if that saves this share of computing the
missing blocks. Estimates contain errors, a tie gains nothing, and while the request waits, the engine admits others
before it, which no estimate includes."""
RISK_SHARE = 0.05
RISK_S = 0.04
"""The time budget of a wait: it may fall behind computing by this share of computing the prompt plus this number of
seconds. Whatever a tier does, the first token is never later by more than this budget and ``FIRST_READ``."""
FIRST_READ = 1.25
"""The first read of a wait may be slower than expected by this factor. It covers latency, queue and one block, which
counts at most as much as computing it."""
_LEAST_READ_S = RISK_S / 16
"""The least duration of a read, however little of its budget a request has left."""
PORTION_S = 0.1
"""A promotion is cut into jobs of about this duration, so that a request can use the blocks that arrive by its
deadline, and a slower tier is noticed soon."""
FOREVER = 1e12
"""Seconds of computing a block while the engine's speed is not known: any load is worth it."""

Declined = Literal["slow", "busy", "unmeasured", "late"]
"""The reason why a block of a lower tier is not loaded: its tier is slower than computing; the tier's queue is too
long; the tier was never measured; the block did not arrive by the deadline."""


class LinkState(NamedTuple):
    """One tier at the time of a plan."""

    pace: Pace | None
    """The pace of further blocks, including its queue; ``None``: it was never measured."""
    queue_s: float = 0.0
    """Seconds until all outstanding blocks have arrived."""
    behind_s: float = 0.0
    """The part of ``queue_s`` for reads behind the surveyed blocks that are already on their way."""
    room_blocks: int = 0
    """Number of blocks that may be read from it before it has been measured."""
    is_idle: bool = False
    """Whether no reads are outstanding."""
    reason: Declined = "unmeasured"
    """The reason that applies if its blocks are declined."""
    portion_s: float = PORTION_S
    """The duration of one read."""
    answer_s: float | None = None
    """The time in which it answers whether it has a block; ``None``: it has never answered."""
    found_share: float = 0.5
    """The share of answers that were positive."""
    name: str = ""


class Speeds(NamedTuple):
    """The speeds that a plan uses, in seconds."""

    block_compute_s: float
    """The time to compute the first block."""
    queue_s: float
    """The engine's queue, because prompts of running requests come first."""
    links: tuple[LinkState, ...]
    """The state of each tier."""
    turn_s: float = 0.0
    """The time of the requests that overtake the request if it misses its turn."""
    before_turn: bool = True
    """Whether the request's turn has not come, so that loading costs nothing during ``queue_s``."""
    growth_s: float = 0.0
    """Extra time to compute each further block, because its tokens attend to more tokens."""

    def computing_s(self, start: int, stop: int) -> float:
        """Return the time to compute the blocks from ``start`` to before ``stop``."""
        return (stop - start) * (self.block_compute_s + self.growth_s * (start + stop) / 2)


class SoFar(NamedTuple):
    """The waiting time of a request when a plan is made for it."""

    num_blocks: int = 0
    """Number of blocks of its prompt that it has asked for. If the survey contains more, that number counts."""
    spent_s: float = 0.0
    """The time that it has waited for its blocks."""
    granted_s: float = 0.0
    """The time that the previous plan allowed it to wait in any case."""
    num_paid: int | None = None
    """Each leading block in host memory beyond this number pays for the wait. It is the number at the first plan, minus
    the blocks in host memory behind the blocks that are read. ``None``: this is the first plan."""


NOTHING = SoFar()


class Plan(NamedTuple):
    """The decision for a range of blocks: how many to load, and from where."""

    stop: int
    """Number of blocks to load, from the first one on."""
    wait_s: float = 0.0
    """Seconds until all of them are expected in host memory."""
    deadline_s: float = math.inf
    """Seconds until the deadline. Blocks that have not arrived by then are computed, unless other arrived blocks pay
    for a longer wait."""
    declined: tuple[tuple[int, Declined, Sequence[int], tuple[int, ...]], ...] = ()
    """Blocks in a tier that are not loaded: the tier, the reason, the blocks, and all tiers that have them."""
    segments: tuple[Segment, ...] = ()
    """The first ``stop`` blocks with their sources."""
    num_paid: int = 0
    """As in ``SoFar``."""
    is_lost: bool = False
    """Whether it ends a wait before all planned blocks have arrived."""
    weighed: tuple[Weighed, ...] = ()
    """The reads that it begins, and the alternatives."""
    portion_s: float = math.inf
    """Limit on the duration of each read."""


class _Budget(NamedTuple):
    """The remaining time of a wait, in seconds from now."""

    answers_s: float
    """For answers: the time that arrived blocks have earned, plus the time that every wait may lose."""
    reads_s: float
    """For reads: for a short prompt, at most the time that they can save."""
    rest_s: float
    """For a block, such as a state, without which the blocks in host memory are useless."""
    portion_s: float
    """For one read: a quarter of the remaining time, whatever has been earned."""


def plan(survey: Sequence[Segment], speeds: Speeds, ends: Sequence[int] | None = None, so_far: SoFar = NOTHING) -> Plan:
    """Return the number of leading blocks for which the first token comes earliest (``worth.choose``), and their
    sources.

    With ``ends`` (in ascending order), a part of the hit is useful only if its number of blocks is one of them; the
    whole hit is always useful. Blocks in host memory are never declined.

    A wait must not cost more than it can gain, so it has a time budget (``RISK_SHARE``), by which it may fall behind
    computing. Each leading block that has arrived adds the time that computing it would take to the budget, and so do
    blocks in host memory behind the blocks that are read. Blocks that are expected later are not read, even if all of
    them together would save time, because a tier that stops before the end would make the whole wait useless.
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
    # The first read may take its latency, plus one block if the tier is faster than computing, whatever that costs.
    begins = not any(place.is_arriving for place, _ in survey)
    pace = _first_read(survey, speeds.links)
    latency_s = pace.first_s if begins else 0.0
    block_compute_s = speeds.computing_s(here, here + 1)
    first_s = max(budget.answers_s, FIRST_READ * min(pace.block_s, block_compute_s)) + FIRST_READ * latency_s
    slack_s = first_s - speeds.computing_s(0, here) if begins or so_far.num_paid is None else math.inf
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
        options.weighed(segments),
        budget.portion_s,
    )


def _budget(num_blocks: int, here: int, num_paid: int, speeds: Speeds, so_far: SoFar) -> _Budget:
    """Return the budget for a prompt of ``num_blocks`` blocks, whose first ``here`` blocks are in host memory."""
    compute_s = speeds.computing_s(0, num_blocks)
    risk_s = RISK_SHARE * compute_s + RISK_S
    earned_s = speeds.queue_s - so_far.spent_s + max(here - num_paid, 0) * compute_s / max(num_blocks, 1)
    answers_s = earned_s + risk_s
    reads_s = min(answers_s, earned_s + LEAST_GAIN * compute_s)
    return _Budget(
        answers_s,
        reads_s,
        speeds.queue_s - so_far.spent_s + speeds.computing_s(0, here) + risk_s,
        max(min(max(reads_s, so_far.granted_s), risk_s) / 4, _LEAST_READ_S),
    )


def _first_read(survey: Sequence[Segment], links: Sequence[LinkState]) -> Pace:
    """Return the pace of the first block that may have to be read: the pace of the fastest tier that has it or must ask
    its store."""
    head = next((place for place, _ in survey if place.is_below), HERE)
    paces = [links[tier].pace for tier in head.tiers or head.unknown]
    return min([pace for pace in paces if pace is not None], default=Pace())


class _Option(NamedTuple):
    """One way to load a hit."""

    waited: tuple[int, ...]
    """The tiers whose answers it waits for. It assumes that they have all blocks whose presence they do not know."""
    runs: list[Run]
    """The runs of the survey, each with its source."""
    choice: Choice


class _Options:
    """The ways to load the blocks of a survey. Sources are the tiers by number, followed by the blocks that are already
    arriving from each of them, and then host memory."""

    def __init__(
        self, survey: Sequence[Segment], speeds: Speeds, ends: Sequence[int] | None, so_far: SoFar, slack_s: float
    ) -> None:
        self._survey, self._speeds, self._ends, self._slack_s = survey, speeds, ends, slack_s
        links = speeds.links
        self._begun = 2 * len(links) if so_far.num_paid is None else len(links)
        """The first source that needs no new wait. If the request already waits, this is the first arriving source;
        otherwise it is host memory."""
        self._answer_s = [0.0 if link.answer_s is None else abs(link.answer_s - so_far.spent_s) for link in links]
        answered = {tier for segment in survey for tier in segment.place.tiers if segment.place.is_below}
        self._late = {tier for segment in survey for tier in segment.place.unknown} - answered
        """Tiers that have not answered for any block."""
        arriving = [0] * len(links)
        for place, num_blocks in survey:
            if place.is_arriving and not place.is_overdue:
                arriving[place.tiers[0]] += num_blocks
        self._paces = [self._pace(tier) for tier in range(len(links))]
        for link, num_blocks in zip(links, arriving):
            block_s = 0.0 if link.pace is None else link.pace.block_s
            # The blocks of a read arrive together, at its end.
            last_s = max(link.queue_s - link.behind_s, 0.0)
            first_s = min(max(last_s - num_blocks * block_s, 0.0) + link.portion_s, last_s)
            self._paces.append(Pace(first_s, (last_s - first_s) / num_blocks if num_blocks else 0.0))
        self._paces.append(Pace())

    def _pace(self, tier: int) -> Pace:
        pace = self._speeds.links[tier].pace or Pace()
        if tier in self._late:
            pace = pace._replace(first_s=pace.first_s + self._answer_s[tier])
        return pace

    def unknown(self) -> list[tuple[float, int]]:
        """Return the tiers that must ask their stores about some blocks, with the expected times of their answers,
        earliest first."""
        tiers = {tier for segment in self._survey for tier in segment.place.unknown}
        return sorted((self._answer_s[tier] if tier in self._late else 0.0, tier) for tier in tiers)

    def _runs(self, waited: tuple[int, ...]) -> list[Run]:
        links = self._speeds.links
        runs: list[Run] = []
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
        """Return a tier that was never measured and that has this block, as another tier does. It is measured with this
        block in the background, at the cost of computing one block. Otherwise, nothing would ever show which tier is
        faster."""
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
        """Return the best choice, or only the blocks in flight if waiting for more gains too little."""
        runs = self._runs(waited)
        pick = partial(
            choose,
            paces=self._paces,
            block_compute_s=self._speeds.block_compute_s,
            growth_s=self._speeds.growth_s,
            queue_s=self._speeds.queue_s,
            before_turn=self._speeds.before_turn,
            turn_s=self._speeds.turn_s,
            slack_s=self._slack_s,
            ends=self._ends,
        )
        best = pick(runs)
        if best.wait_s:
            begun = pick([*itertools.takewhile(lambda run: run.sources and run.sources[0] >= self._begun, runs)])
            reachable = sum(run.num_blocks for run in itertools.takewhile(lambda run: run.sources, runs))
            least_s = LEAST_GAIN * self._speeds.computing_s(begun.num_blocks, reachable)
            if best.num_blocks > begun.num_blocks and best.saved_s - begun.saved_s < least_s:
                best = begun
        return _Option(waited, runs, best)

    def weighed(self, segments: Sequence[Segment]) -> tuple[Weighed, ...]:
        """Return the reads that ``segments`` begin, one for each tier, and the alternatives."""
        links, at = self._speeds.links, 0
        having: dict[int, set[int]] = {}
        counts: dict[int, int] = {}
        computing_s: dict[int, float] = {}
        for place, source, num_blocks in side_by_side(self._survey, segments):
            at += num_blocks
            if place.is_below and source.tiers:
                (tier,) = source.tiers
                counts[tier] = counts.get(tier, 0) + num_blocks
                computing_s[tier] = computing_s.get(tier, 0.0) + self._speeds.computing_s(at - num_blocks, at)
                having[tier] = having.get(tier, {*place.tiers}) & {*place.tiers}
        found: list[Weighed] = []
        for tier, count in counts.items():
            paces = {links[each].name: pace for each in having[tier] if (pace := links[each].pace) is not None}
            seconds = {name: pace.seconds(count) for name, pace in paces.items()}
            own_s, compute_s = seconds.pop(links[tier].name, 0.0), computing_s[tier]
            found.append(Weighed(links[tier].name, count, own_s, seconds, compute_s if compute_s < FOREVER else None))
        return tuple(found)

    def sources(self, option: _Option, stop: int) -> tuple[Segment, ...]:
        """Return the first ``stop`` blocks, with one source for each run."""
        found: list[tuple[Place, int]] = []
        for place, sources, num_blocks in side_by_side(self._survey, option.runs):
            num_blocks = min(num_blocks, stop)
            stop -= num_blocks
            if not num_blocks:
                break
            found.append((_from(place, sources[0]) if place.is_below else place, num_blocks))
        return tuple(joined(found))


def _from(place: Place, tier: int) -> Place:
    """Return ``tier`` as the source of blocks in ``place``: either it has them, or its answer is awaited."""
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
