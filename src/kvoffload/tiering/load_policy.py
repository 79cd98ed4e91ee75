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
from typing import Literal, NamedTuple

from kvoffload.base import OffloadKey, StepWork, get_offload_group_idx
from kvoffload.metrics import HOST, Histogram, Stats
from kvoffload.tiering.links import Link
from kvoffload.tiering.speeds import PrefillSpeedEstimator
from kvoffload.tiering.worth import Choice, Pace, Run, choose

__all__ = [
    "HERE",
    "BlockWorth",
    "LinkState",
    "LoadPlanner",
    "LoadPolicy",
    "Place",
    "Plan",
    "Segment",
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
PATIENCE = 1.25
"""A request waits for its blocks at most this many times as long as computing them would take."""
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
_SURE_SAMPLES = 3
"""... in the log once this many reads have been measured."""
_FOREVER = 1e12
"""Seconds of computing a block while the engine's speed is not known: any load is worth it."""

Declined = Literal["slow", "busy", "unmeasured", "late"]
"""Why a block of a lower tier is not loaded: its tier is slower than computing; it would be fast enough, but for its
queue; nothing is known of it; it did not arrive by the deadline."""


# ------------------------------------------------------------------------------------------------------------- planning


class Place(NamedTuple):
    """Where a block of a hit is."""

    tier: int | None = None
    """The tier that has it; ``None``: host memory, or on its way there from the device."""
    is_arriving: bool = False
    """It is being promoted already, ..."""
    is_overdue: bool = False
    """... by a read that is overdue."""
    is_unknown: bool = False
    """The tier does not know yet whether it has it, and is taken to."""


HERE = Place()


class Segment(NamedTuple):
    """Consecutive blocks of a hit in one place."""

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
    """Blocks that may be read from it while it was never measured."""
    reason: Declined = "unmeasured"
    """Why blocks of it are declined now, if they are."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a plan knows, in seconds."""

    block_compute_s: float
    queue_s: float
    """Of the engine: prompts of running requests come first."""
    links: tuple[LinkState, ...]
    """By tier."""


class Plan(NamedTuple):
    """How much of a range of blocks is loaded."""

    stop: int
    """Blocks to load, from the first one on."""
    wait_s: float = 0.0
    """Until all of them are expected in host memory."""
    deadline_s: float = math.inf
    """From now: what has not arrived by then is computed."""
    declined: tuple[tuple[Place, Declined, range], ...] = ()
    """The place, the reason and the blocks of what is found below and not loaded."""


def plan(survey: Sequence[Segment], speeds: Speeds, ends: Sequence[int] | None = None) -> Plan:
    """The number of leading blocks for which the first token comes earliest (``worth.choose``).

    With ``ends``, which rise, a part of the hit is of use only if it has that many blocks; all of it always is. Blocks
    in host memory are never declined.
    """
    if not survey or (len(survey) == 1 and survey[0].place == HERE):
        stop = survey[0].num_blocks if survey else 0
        return Plan(stop, 0.0, PATIENCE * (speeds.queue_s + stop * speeds.block_compute_s))
    paces, runs = [Pace(), Pace(math.inf)], list[Run]()
    sources: dict[Place, int] = {HERE: 0}
    rooms = {tier: link.room_blocks for tier, link in enumerate(speeds.links)}
    for place, num_blocks in survey:
        if place.tier is not None and not place.is_arriving and speeds.links[place.tier].pace is None:
            free = min(rooms[place.tier], num_blocks)
            rooms[place.tier] -= free
            runs += [Run(0, free)] * bool(free) + [Run(1, num_blocks - free)] * (free < num_blocks)
            continue
        place = place._replace(is_unknown=False)
        if place not in sources:
            sources[place] = len(paces)
            paces.append(_pace(place, speeds.links))
        runs.append(Run(sources[place], num_blocks))
    total = sum(segment.num_blocks for segment in survey)
    here = survey[0].num_blocks if survey and survey[0].place == HERE else 0
    useful = None if ends is None else [*ends[: bisect_left(ends, total)], total]
    choice = _choose(runs, paces, speeds, here, useful)
    stop = max(choice.num_blocks, here)
    num_waited = stop - here if choice.wait_s else stop
    deadline_s = PATIENCE * (speeds.queue_s + num_waited * speeds.block_compute_s)
    return Plan(stop, choice.wait_s, deadline_s, tuple(_declined(survey, stop, speeds)))


def _plan_all(survey: Sequence[Segment]) -> Plan:
    """All blocks, up to one in a read that is overdue: it may never end, and patience is not spent on it."""
    due = itertools.takewhile(lambda segment: not segment.place.is_overdue, survey)
    return Plan(sum(segment.num_blocks for segment in due))


def _pace(place: Place, links: Sequence[LinkState]) -> Pace:
    assert place.tier is not None
    link = links[place.tier]
    if place.is_overdue:
        return Pace(math.inf)
    if place.is_arriving or link.pace is None:
        return Pace(link.queue_s)
    return link.pace


def _choose(
    runs: Sequence[Run], paces: Sequence[Pace], speeds: Speeds, here: int, ends: Sequence[int] | None
) -> Choice:
    """The best choice, or what is in host memory if waiting for more gains too little."""
    best = choose(runs, paces, block_compute_s=speeds.block_compute_s, queue_s=speeds.queue_s, ends=ends)
    if not best.wait_s:
        return best
    at_once = Choice(0, 0.0, 0.0)
    if here:
        at_once = choose(runs[:1], paces, block_compute_s=speeds.block_compute_s, queue_s=speeds.queue_s, ends=ends)
    reachable = sum(run.num_blocks for run in runs if paces[run.source].first_s < math.inf)
    least_s = LEAST_GAIN * (reachable - at_once.num_blocks) * speeds.block_compute_s
    return best if best.saved_s - at_once.saved_s >= least_s else at_once


def _declined(survey: Sequence[Segment], stop: int, speeds: Speeds) -> list[tuple[Place, Declined, range]]:
    found: list[tuple[Place, Declined, range]] = []
    at = 0
    for place, num_blocks in survey:
        blocks = range(max(at, stop), at + num_blocks)
        at += num_blocks
        if blocks and place.tier is not None and not (place.is_arriving or place.is_unknown):
            found.append((place, speeds.links[place.tier].reason, blocks))
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
        self._links = tuple(Link(name, worth.num_bytes, speed, clock) for name, speed in zip(tiers, expected))
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

    def plan(self, survey: Sequence[Segment], key: OffloadKey, ends: Sequence[int] | None) -> Plan:
        """For the blocks of ``survey``, of whose group ``key`` is one; ``ends`` as in ``plan``."""
        if not self.weighs(key):
            return _plan_all(survey)
        is_below = any(segment.place.tier is not None for segment in survey)
        return plan(survey, self.speeds(self._tokens[get_offload_group_idx(key)], is_below), ends)

    def speeds(self, tokens: int, with_links: bool = True) -> Speeds:
        """What is known now, for blocks of ``tokens`` tokens."""
        tokens_per_s = self._prefill.tokens_per_s
        queue_s = 0.0 if tokens_per_s is None else self._prefill.queued_tokens / tokens_per_s
        # Each token is charged for the blocks of all weighed groups.
        links = [self._state_of(link, tokens * self._bytes_per_token) for link in self._links if with_links]
        return Speeds(self._compute_s(tokens), queue_s, tuple(links))

    def _state_of(self, link: Link, bytes_per_block: float) -> LinkState:
        speed = link.speed
        if speed is None:
            return LinkState(None, room_blocks=max(0, self._num_blocks(PROBE_BYTES) - link.num_due))
        queue_s = link.queue_s()
        reason: Declined = "slow" if self._slowness(link) > 1 - LEAST_GAIN else "busy"
        return LinkState(Pace(queue_s + speed.latency_s, speed.byte_s * bytes_per_block), queue_s, reason=reason)

    def _slowness(self, link: Link) -> float:
        """How many times as long loading takes as computing, with nothing queued."""
        speed = link.speed
        return 0.0 if speed is None else speed.byte_s * self._bytes_per_token / self._compute_s(1)

    def _compute_s(self, tokens: int) -> float:
        speed = self._prefill.tokens_per_s
        return _FOREVER if speed is None else tokens / speed

    def _num_blocks(self, num_bytes: float) -> int:
        """As many as fit, but at least one."""
        return max(1, int(num_bytes / self._block_bytes))

    def portion_blocks(self, tier: int) -> int:
        """Blocks per job of a promotion."""
        speed = self._links[tier].speed
        return self._num_blocks(max(LEAST_PORTION_BYTES, PORTION_S / speed.byte_s if speed is not None else 0.0))

    def probe_blocks(self, tier: int) -> int:
        """Declined blocks of the tier to read all the same, so that it is measured; 0: none."""
        link = self._links[tier]
        if link.num_due or self._clock() - link.estimator.measured_s < PROBE_INTERVAL_S:
            return 0
        return self._num_blocks(PROBE_BYTES if link.speed is None else min(PROBE_BYTES, PROBE_S / link.speed.byte_s))

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
            1e-6 / speed.byte_s,
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
                stats["tier_read_bytes_per_second", link.name] = 1 / link.speed.byte_s
                stats["tier_read_latency_seconds", link.name] = link.speed.latency_s
            stats["tier_read_queue_bytes", link.name] = link.num_outstanding * self._block_bytes
            stats["tier_too_slow", link.name] = int(self._slowness(link) >= TOO_SLOW)
        if self._prefill.tokens_per_s is not None:
            stats[("prefill_tokens_per_second",)] = self._prefill.tokens_per_s
        return stats

    def check_invariants(self, queued: Counter[int], reading: Counter[int]) -> None:
        """``queued`` and ``reading``: blocks of promotions under way, by tier."""
        for tier, link in enumerate(self._links):
            link.check_invariants(queued[tier], reading[tier])
