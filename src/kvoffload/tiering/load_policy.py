# SPDX-License-Identifier: Apache-2.0
"""Which hits in lower tiers are loaded: ``plan`` decides, a pure function of what was measured.

``LoadPlanner`` measures the tiers and the engine, and plans for the lookups.
"""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from kvoffload.base import OffloadKey, StepWork, get_offload_group_idx
from kvoffload.metrics import HOST, Histogram, Stats
from kvoffload.tiering.links import Link
from kvoffload.tiering.speeds import PrefillSpeedEstimator
from kvoffload.tiering.worth import Choice, Pace, Run, choose, spread

__all__ = [
    "HERE",
    "BlockWorth",
    "LinkState",
    "LoadPlanner",
    "LoadPolicy",
    "Place",
    "Plan",
    "Segment",
    "SoFar",
    "Speeds",
    "plan",
]

_log = logging.getLogger(__name__)

LoadPolicy = Literal["cost", "always"]
"""Which hits in lower tiers are loaded: those that are expected to be there before their tokens would be computed, or
all of them."""

LEAST_GAIN = 0.1
"""A load must be at least 10 % faster than recomputing: a request waits only if that saves this share of computing the
blocks that are not there. Estimates have errors, a tie gains nothing, and while it waits the engine takes others before
it, which no estimate knows of."""
RISK_SHARE = 0.05
RISK_S = 0.04
"""Until a wait has brought something, it may take this share of computing the prompt, and so many seconds: no first
token comes later by more than that, whatever a tier does."""
PATIENCE = 1.25
"""A tier that is known to have the first block may take this many times as long for it as expected, and a wait this
many times as long as computing the prompt, however rarely the engine asks."""
PROBE_INTERVAL_S = 5.0
"""Time without a read after which a tier whose blocks are declined is measured again."""
PROBE_BYTES = 64 << 20
"""Bytes read to measure a tier: all that may be outstanding from one that was never measured, and the most of a later
probe."""
PROBE_S = 1.0
"""A later probe takes no longer than this, if the tier is still as slow as it was."""
PORTION_S = 0.1
"""A promotion is cut into jobs of about this duration, so that a request can use what arrived by its deadline, and a
tier that has become slower is noticed soon ..."""
LEAST_PORTION_BYTES = 4 << 20
"""... but not into smaller ones than this."""
TOO_SLOW = 2.0
"""A tier from which a block takes this many times as long as computing it, with nothing queued before it, is reported
as too slow, ..."""
_LEAST_PAUSE_S = 0.005
"""A plan is looked at no more often than this without an answer that is new."""
_SURE_SAMPLES = 3
"""... in the log once this many reads have been measured."""
_FOREVER = 1e12
"""Seconds of computing a block while the engine's speed is not known: any load is worth it."""

Declined = Literal["slow", "busy", "unmeasured", "late"]
"""Why a block of a lower tier is not loaded: its tier is slower than computing; it would be fast enough, but for its
queue; nothing is known of it; it did not arrive by the deadline."""


# ------------------------------------------------------------------------------------------------------------- planning


class Place(NamedTuple):
    """Where a block of a hit is. Tiers are numbers, in the configured order."""

    tiers: tuple[int, ...] = ()
    """Those that have it, or the one that it is being promoted from. None: host memory, or on its way there from the
    device, unless some are ..."""
    unknown: tuple[int, ...] = ()
    """... those that do not know yet whether they have it."""
    is_arriving: bool = False
    """It is being promoted already, ..."""
    is_overdue: bool = False
    """... by a read that is overdue."""

    @property
    def is_unknown(self) -> bool:
        """No tier is known to have it, and some may."""
        return bool(self.unknown) and not self.tiers

    @property
    def is_below(self) -> bool:
        """It may have to be promoted."""
        return not self.is_arriving and bool(self.tiers or self.unknown)


HERE = Place()


class Segment(NamedTuple):
    """Consecutive blocks of a hit in one place. In a plan: from one source, or from a tier that is waited for."""

    place: Place
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LinkState:
    """One tier at the time of a plan."""

    pace: Pace | None
    """Of further blocks, its queue included; ``None``: it was never measured."""
    queue_s: float = 0.0
    """Until all that is outstanding has arrived."""
    room_blocks: int = 0
    """Blocks that may be read from it while it was never measured, ..."""
    is_idle: bool = False
    """... and none of them is being read."""
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
    """What a plan knows, in seconds."""

    block_compute_s: float
    queue_s: float
    """Of the engine: prompts of running requests come first."""
    links: tuple[LinkState, ...]
    """By tier."""


class SoFar(NamedTuple):
    """What a request has waited when it is planned for."""

    num_blocks: int = 0
    """Of its prompt, as far as it asked; fewer than surveyed: those that were surveyed."""
    spent_s: float = 0.0
    """It has waited for its blocks, ..."""
    granted_s: float = 0.0
    """... and may for so long whatever comes, by the plan before."""
    num_here: int | None = None
    """Leading blocks that were here when it was planned for first; ``None``: it is now."""


_NOTHING = SoFar()


class Plan(NamedTuple):
    """How much of a range of blocks is loaded, and from where."""

    stop: int
    """Blocks to load, from the first one on."""
    wait_s: float = 0.0
    """Until all of them are expected in host memory."""
    deadline_s: float = math.inf
    """From now: what has not arrived by then is computed, unless others have come meanwhile that are worth the wait."""
    declined: tuple[tuple[int, Declined, range, tuple[int, ...]], ...] = ()
    """The tier, the reason and the blocks of what is found below and not loaded, and all tiers that have them."""
    segments: tuple[Segment, ...] = ()
    """The first ``stop`` blocks with their sources."""
    num_here: int = 0
    """Leading blocks that are here."""
    is_lost: bool = False
    """It ends a wait before all that was planned has come."""


def plan(
    survey: Sequence[Segment], speeds: Speeds, ends: Sequence[int] | None = None, so_far: SoFar = _NOTHING
) -> Plan:
    """The number of leading blocks for which the first token comes earliest, and their sources (``worth.choose``).

    With ``ends``, which rise, a part of the hit is of use only if it has that many blocks; all of it always is. Blocks
    in host memory are never declined.

    A wait must not cost what it may not bring. Until blocks arrive it takes at most what the request can afford
    (``RISK_SHARE``), or a little longer than a tier that has the first of them is expected to take, if that saves as
    much. Each block that has arrived pays for the time that computing it would take.
    """
    total = sum(segment.num_blocks for segment in survey)
    here = survey[0].num_blocks if survey and survey[0].place == HERE else 0
    compute_s = max(so_far.num_blocks, total) * speeds.block_compute_s
    earned_s = speeds.queue_s - so_far.spent_s
    if so_far.num_here is not None:
        earned_s += max(here - so_far.num_here, 0) * speeds.block_compute_s
    afford_s = earned_s + RISK_SHARE * compute_s + RISK_S
    rest_s = speeds.queue_s - so_far.spent_s + here * speeds.block_compute_s + RISK_SHARE * compute_s + RISK_S
    """For what makes the blocks that are here of use: a state, say."""
    if here == total:
        return Plan(total, 0.0, rest_s, (), tuple(survey), num_here=here)
    useful = None if ends is None else [*ends[: bisect_left(ends, total)], total]
    options = _Options(survey, speeds, useful, here, so_far.spent_s)
    waited: tuple[int, ...] = ()
    best = options.choose(waited)
    for answer_s, tier in options.unknown():
        if answer_s > max(afford_s, best.wait_s):
            continue
        choice = options.choose((*waited, tier))
        share = speeds.links[tier].found_share
        if share * (choice.saved_s - best.saved_s) > (1 - share) * max(0.0, answer_s - best.wait_s):
            waited, best = (*waited, tier), choice
    stop = max(best.num_blocks, here)
    portion_s = _portion_s(stop - here, speeds.block_compute_s)
    segments = options.sources(waited, stop, best.wait_s, portion_s)
    deadline_s = max(afford_s, so_far.granted_s)
    if stop > here:
        first = next(segment.place for segment in segments if segment.place != HERE)
        link = speeds.links[(first.tiers or first.unknown)[0]]
        if link.pace is None or (not first.tiers and link.answer_s is None):
            deadline_s = min(deadline_s, earned_s + LEAST_GAIN * compute_s)
        elif first.tiers and not first.is_arriving and deadline_s > 0:
            portion_s = min(max(portion_s, link.pace.block_s), link.portion_s)
            due_s = PATIENCE * (link.pace.first_s + portion_s)
            if due_s > deadline_s and best.saved_s < due_s:
                stop, segments = here, tuple(survey[:1]) if here else ()
            deadline_s = max(deadline_s, due_s)
    declined: list[tuple[int, Declined, range, tuple[int, ...]]] = []
    if stop - here > 1 and ends is None and deadline_s > 0 and (probed := options.unmeasured(stop - 1)) is not None:
        stop -= 1
        declined = [(probed, "unmeasured", range(stop, stop + 1), (probed,))]
        segments = options.sources(waited, stop, best.wait_s, portion_s)
    most_s = PATIENCE * (speeds.queue_s + compute_s)
    is_late = stop > here and (deadline_s <= 0 or so_far.spent_s > most_s)
    if is_late:
        stop, segments = here, tuple(survey[:1]) if here else ()
    if stop == here:
        deadline_s = rest_s
    begun = sum(segment.num_blocks for segment in itertools.takewhile(lambda each: not each.place.is_below, survey))
    is_lost = so_far.num_here is not None and (is_late or stop < begun)
    return Plan(
        stop,
        best.wait_s if stop > here else 0.0,
        deadline_s,
        (*declined, *_declined(survey, stop + len(declined), speeds, is_lost=is_lost, is_late=is_late)),
        segments,
        here,
        is_lost,
    )


def _portion_s(num_blocks: int, block_compute_s: float) -> float:
    """How long a read may take if so many blocks are read for a request: what it can afford in vain brings four."""
    return (RISK_SHARE * num_blocks * block_compute_s + RISK_S) / 4


class _Options:
    """What may be loaded of a survey. Sources are the tiers, by number, then what arrives from each of them, then host
    memory."""

    def __init__(
        self, survey: Sequence[Segment], speeds: Speeds, ends: Sequence[int] | None, here: int, spent_s: float
    ) -> None:
        self._survey, self._speeds, self._ends, self._here = survey, speeds, ends, here
        links = speeds.links
        self._answer_s = [0.0 if link.answer_s is None else abs(link.answer_s - spent_s) for link in links]
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
            first_s = max(link.queue_s - num_blocks * block_s, 0.0)
            self._paces.append(Pace(first_s, (link.queue_s - first_s) / num_blocks if num_blocks else 0.0))
        self._paces.append(Pace())

    def _pace(self, tier: int) -> Pace:
        pace = self._speeds.links[tier].pace or Pace()
        if tier in self._late:
            pace = pace._replace(first_s=max(pace.first_s, pace.first_s + self._answer_s[tier]))
        return pace

    def unknown(self) -> list[tuple[float, int]]:
        """Tiers that must find out about some blocks, and how long that takes. The first to answer comes first."""
        tiers = {tier for segment in self._survey for tier in segment.place.unknown}
        return sorted((self._answer_s[tier] if tier in self._late else 0.0, tier) for tier in tiers)

    def _runs(self, waited: Sequence[int]) -> list[Run]:
        """The survey, if the tiers ``waited`` for have all that they do not know of, and the other ones nothing."""
        links, runs = self._speeds.links, list[Run]()
        rooms = {tier: link.room_blocks for tier, link in enumerate(links)}
        for place, num_blocks in self._survey:
            if place.is_arriving:
                runs.append(Run(() if place.is_overdue else (len(links) + place.tiers[0],), num_blocks))
            elif place == HERE:
                runs.append(Run((2 * len(links),), num_blocks))
            else:
                names = place.tiers
                if place.unknown:
                    names = tuple(sorted({*names, *(tier for tier in place.unknown if tier in waited)}))
                measured = [tier for tier in names if links[tier].pace is not None]
                alone_s = {tier: self._paces[tier].seconds(num_blocks) for tier in measured}
                if alone_s or not names:
                    # One that is so much slower than another is of no use beside it.
                    most_s = min(alone_s.values(), default=0.0) / LEAST_GAIN
                    runs.append(Run(tuple(tier for tier in names if alone_s.get(tier, math.inf) <= most_s), num_blocks))
                    continue
                free = min(rooms[names[0]], num_blocks)
                rooms[names[0]] -= free
                runs += [Run(names[:1], free)] * bool(free) + [Run((), num_blocks - free)] * (free < num_blocks)
        return runs

    def unmeasured(self, block: int) -> int | None:
        """A tier that was never measured and has this block, as another one has: it is measured with it in the
        background, which costs computing one block. Otherwise nobody would ever know which of them is faster."""
        links, at = self._speeds.links, 0
        for place, num_blocks in self._survey:
            at += num_blocks
            if block < at:
                if len(place.tiers) < 2 or self._speeds.block_compute_s >= _FOREVER:
                    return None
                return next((tier for tier in place.tiers[::-1] if links[tier].is_idle), None)
        return None

    def choose(self, waited: Sequence[int]) -> Choice:
        """The best choice, or what is here or arrives already if waiting for more gains too little."""
        runs = self._runs(waited)
        pick = partial(
            choose, sources=self._paces, block_compute_s=self._speeds.block_compute_s, queue_s=self._speeds.queue_s
        )
        best = pick(runs, ends=self._ends)
        if not best.wait_s:
            return best
        num_begun = next(
            (at for at, run in enumerate(runs) if not run.sources or run.sources[0] < self._num), len(runs)
        )
        begun = pick(runs[:num_begun], ends=self._ends)
        reachable = sum(run.num_blocks for run in itertools.takewhile(lambda run: run.sources, runs))
        least_s = LEAST_GAIN * (reachable - begun.num_blocks) * self._speeds.block_compute_s
        return best if best.saved_s - begun.saved_s >= least_s or best.num_blocks <= begun.num_blocks else begun

    @property
    def _num(self) -> int:
        return len(self._speeds.links)

    def sources(self, waited: Sequence[int], stop: int, wait_s: float, portion_s: float) -> tuple[Segment, ...]:
        """The first ``stop`` blocks, each from one source."""
        links = self._speeds.links
        runs, left = list[Run](), stop
        for run in self._runs(waited):
            count = min(run.num_blocks, left)
            left -= count
            if count:
                runs.append(Run(run.sources, count))
        portions = [
            max(1, int(min(portion_s, link.portion_s) / pace.block_s) if pace.block_s else stop)
            for link, pace in zip(links, self._paces)
        ]
        chosen = iter(spread(runs, self._paces, wait_s, [*portions, *[stop] * (self._num + 1)], self._late))
        found = list[Segment]()
        run, left = Run((), 0), 0
        for place, num_blocks in self._survey:
            while num_blocks:
                if not left:
                    run = next(chosen, Run((), 0))
                    if not run.num_blocks:
                        return tuple(found)
                    left = run.num_blocks
                count = min(num_blocks, left)
                num_blocks, left = num_blocks - count, left - count
                source = run.sources[0]
                if place.is_below:
                    resolved = Place((source,)) if source in place.tiers else Place((), (source,))
                    found.append(Segment(resolved, count))
                else:
                    found.append(Segment(place, count))
        return tuple(found)


def _declined(
    survey: Sequence[Segment], stop: int, speeds: Speeds, *, is_lost: bool, is_late: bool
) -> list[tuple[int, Declined, range, tuple[int, ...]]]:
    found: list[tuple[int, Declined, range, tuple[int, ...]]] = []
    at = 0
    for place, num_blocks in survey:
        blocks = range(max(at, stop), at + num_blocks)
        at += num_blocks
        tiers = place.tiers or (place.unknown if is_late else ())
        if blocks and tiers and (is_lost or not place.is_arriving):
            tier = min(tiers, key=lambda tier: speeds.links[tier].pace or Pace(math.inf))
            reason = "late" if is_late or place.is_arriving else speeds.links[tier].reason
            found.append((tier, reason, blocks, place.tiers))
    return found


# -------------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True, slots=True)
class BlockWorth:
    """What a block costs and saves."""

    num_bytes: int
    """Of every block."""
    tokens: tuple[int, ...] = ()
    """By KV group: the tokens that one block saves computing. 0 for groups whose blocks are not weighed, because a hit
    needs only some of them (windows and states): they are loaded if the other groups' blocks are."""
    prefill_tokens_per_s: float | None = None
    """Of the engine, until it was measured."""
    read_bytes_per_s: tuple[float | None, ...] = ()
    """By tier, until it was measured. ``None``, or left out at the end: not known."""


class LoadPlanner:
    """Measures the tiers and the engine, and plans what to load. One for a manager, on its thread.

    A hit is loaded as far as that is expected to be faster than computing it (``load_policy="cost"``). Blocks that are
    not weighed are all loaded; with ``load_policy="always"`` none is.

    Speeds are those measured in this process; until there are any, those that the user expects (``BlockWorth``). Of a
    tier without either, ``PROBE_BYTES`` (at least one block) may be outstanding, whatever they cost. Before the
    engine's speed is known, every load from a tier that was measured is worth it.
    """

    def __init__(self, tiers: Sequence[str], worth: BlockWorth, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._block_bytes = worth.num_bytes
        self._tokens = worth.tokens
        self._bytes_per_token = sum(worth.num_bytes / tokens for tokens in worth.tokens if tokens)
        expected = itertools.chain(worth.read_bytes_per_s, itertools.repeat(None))
        self._links = tuple(
            Link(name, Pace(0.0, worth.num_bytes / speed) if speed else None, clock)
            for name, speed in zip(tiers, expected)
        )
        self._prefill = PrefillSpeedEstimator(clock, worth.prefill_tokens_per_s)
        self._reported_slow: set[int] = set()
        self._declined: Counter[tuple[str, Declined]] = Counter()
        self._wait_ratios = Histogram("promotion_wait_ratio")

    def __repr__(self) -> str:
        return f"LoadPlanner(prefill={self._prefill.tokens_per_s}, {self._links})"

    # ------------------------------------------------------------------------------------------------- planning

    def weighs(self, key: OffloadKey) -> bool:
        """Whether a plan for blocks of this one's group can leave some out."""
        group = get_offload_group_idx(key)
        return group < len(self._tokens) and bool(self._tokens[group])

    def plan(
        self, survey: Sequence[Segment], key: OffloadKey, ends: Sequence[int] | None, so_far: SoFar = _NOTHING
    ) -> Plan:
        """For the blocks of ``survey``, of whose group, which is weighed, ``key`` is one; ``ends`` and ``so_far`` as in
        ``plan``."""
        is_below = any(segment.place != HERE for segment in survey)
        return plan(survey, self.speeds(self._tokens[get_offload_group_idx(key)], is_below), ends, so_far)

    def sources(self, survey: Sequence[Segment]) -> tuple[Segment, ...]:
        """The blocks of ``survey`` with their sources, however long they take, up to one in a read that is overdue: it
        may never end."""
        survey = [*itertools.takewhile(lambda segment: not segment.place.is_overdue, survey)]
        is_plain = all(len(place.tiers) + len(place.unknown) < 2 for place, _ in survey)
        return tuple(survey) if is_plain else plan(survey, self.speeds(0)).segments

    def speeds(self, tokens: int, with_links: bool = True) -> Speeds:
        """What is known now, for blocks of ``tokens`` tokens; with 0, as if they could not be computed."""
        tokens_per_s = self._prefill.tokens_per_s
        queue_s = 0.0 if tokens_per_s is None else self._prefill.queued_tokens / tokens_per_s
        # Each token is charged for the blocks of all weighed groups.
        share = tokens * self._bytes_per_token / self._block_bytes if tokens else 1.0
        links = [self._state_of(link, share) for link in self._links if with_links]
        return Speeds(self._compute_s(tokens) if tokens else _FOREVER, queue_s, tuple(links))

    def _state_of(self, link: Link, share: float) -> LinkState:
        speed, answers = link.speed, link.answers
        if speed is None:
            room_blocks = max(0, self._num_blocks(PROBE_BYTES) - link.num_due)
            return LinkState(
                None,
                room_blocks=room_blocks,
                is_idle=not link.num_outstanding,
                answer_s=answers.seconds,
                found_share=answers.found_share,
            )
        queue_s = link.queue_s()
        reason: Declined = "slow" if self._slowness(link) > 1 - LEAST_GAIN else "busy"
        return LinkState(
            Pace(queue_s + speed.first_s, speed.block_s * link.slowdown() * share),
            queue_s,
            reason=reason,
            portion_s=self._portion_s(speed),
            answer_s=answers.seconds,
            found_share=answers.found_share,
        )

    def _portion_s(self, speed: Pace) -> float:
        """How long a read takes."""
        return max(PORTION_S, self._num_blocks(LEAST_PORTION_BYTES) * speed.block_s)

    def _slowness(self, link: Link) -> float:
        """How many times as long loading takes as computing, with nothing queued."""
        if link.speed is None:
            return 0.0
        return link.speed.block_s / self._block_bytes * self._bytes_per_token / self._compute_s(1)

    def _compute_s(self, tokens: int) -> float:
        speed = self._prefill.tokens_per_s
        return _FOREVER if speed is None else tokens / speed

    def _num_blocks(self, num_bytes: float) -> int:
        """As many as fit, but at least one."""
        return max(1, int(num_bytes / self._block_bytes))

    def portion_blocks(self, tier: int, keys: Sequence[OffloadKey]) -> int:
        """Blocks per job of a promotion, for a request that waits for ``keys`` of them."""
        speed = self._links[tier].speed
        if speed is None:
            return self._num_blocks(LEAST_PORTION_BYTES)
        portion_s = self._portion_s(speed)
        if keys and self.weighs(keys[0]):
            tokens = self._tokens[get_offload_group_idx(keys[0])]
            portion_s = min(portion_s, _portion_s(len(keys), self._compute_s(tokens)))
        return max(1, int(portion_s / speed.block_s + 1e-6))

    def probe_blocks(self, tier: int) -> int:
        """Declined blocks of the tier to read all the same, so that it is measured; 0: none."""
        link = self._links[tier]
        if link.num_due or self._clock() - link.estimator.measured_s < PROBE_INTERVAL_S:
            return 0
        most = self._num_blocks(PROBE_BYTES)
        return most if link.speed is None else min(most, max(1, int(PROBE_S / link.speed.block_s)))

    def due_s(self, plan: Plan) -> float:
        """From now: when ``plan`` is to be looked at again at the latest, since a read will be late. If it is late by
        then, when it is later by a quarter, so that a long stall costs few plans."""
        tiers = {tier for place, _ in plan.segments for tier in place.tiers}
        late_s = [self._links[tier].late_s() for tier in tiers]
        return min([plan.deadline_s, *(max(each_s, -each_s / 4, _LEAST_PAUSE_S) for each_s in late_s)])

    def is_late(self, plan: Plan) -> bool:
        """Whether a tier that ``plan`` reads from is late."""
        return any(self._links[tier].slowdown() > 1 for place, _ in plan.segments for tier in place.tiers)

    def adds(self, tier: int, others: Sequence[int]) -> bool:
        """Whether it may be worth reading blocks from ``tier`` that ``others`` have: it is not so much slower that
        sharing the work with it gains less than a load must."""
        speed = self._links[tier].speed
        rates = [1 / other.block_s for each in others if (other := self._links[each].speed) is not None]
        return speed is None or not rates or 1 / speed.block_s >= LEAST_GAIN * sum(rates)

    # --------------------------------------------------------------------------------------------- measurements

    def note_step(self, work: StepWork) -> None:
        """The engine computes a step."""
        self._prefill.note_step(work)

    def link(self, tier: int) -> Link:
        """Which records the reads of the tier."""
        return self._links[tier]

    def end_poll(self) -> None:
        """All jobs that have ended were recorded."""
        for tier, link in enumerate(self._links):
            is_sure = link.measure() and link.estimator.num_samples >= _SURE_SAMPLES
            if is_sure and tier not in self._reported_slow and self._slowness(link) >= TOO_SLOW:
                self._report_slow(tier)

    def _report_slow(self, tier: int) -> None:
        self._reported_slow.add(tier)
        speed = self._links[tier].speed
        assert speed is not None
        _log.warning(
            "Tier %r is read at %.3g MB/s, and the engine computes the same blocks at %.3g MB/s: loading from it does "
            "not pay. Give it a faster device, or remove it.",
            self._links[tier].name,
            1e-6 * self._block_bytes / speed.block_s,
            1e-6 * self._bytes_per_token / self._compute_s(1),
        )

    # -------------------------------------------------------------------------------------------------- metrics

    def count_declined(self, tier: int | None, reason: Declined, num_blocks: int) -> None:
        """Blocks of a tier, or with ``None`` of host memory, were found and not loaded."""
        if num_blocks:
            self._declined[HOST if tier is None else self._links[tier].name, reason] += num_blocks

    def count_wait(self, expected_s: float, waited_s: float) -> None:
        """A wait has ended with its blocks."""
        if expected_s > 0:
            self._wait_ratios.observe(max(0.0, waited_s) / expected_s)

    def get_stats(self) -> Stats:
        stats: Stats = {("tier_declined_blocks", *labels): count for labels, count in self._declined.items()}
        stats |= self._wait_ratios.stats()
        for link in self._links:
            if link.speed is not None:
                stats["tier_read_bytes_per_second", link.name] = self._block_bytes / link.speed.block_s
                stats["tier_read_latency_seconds", link.name] = link.speed.first_s
            if link.answers.seconds is not None:
                stats["tier_answer_seconds", link.name] = link.answers.seconds
            stats["tier_read_queue_bytes", link.name] = link.num_outstanding * self._block_bytes
            stats["tier_too_slow", link.name] = int(self._slowness(link) >= TOO_SLOW)
        if self._prefill.tokens_per_s is not None:
            stats[("prefill_tokens_per_second",)] = self._prefill.tokens_per_s
        return stats

    def check_invariants(self, queued: Counter[int], reading: Counter[int]) -> None:
        """``queued`` and ``reading``: blocks of promotions under way, by tier."""
        for tier, link in enumerate(self._links):
            link.check_invariants(queued[tier], reading[tier])
