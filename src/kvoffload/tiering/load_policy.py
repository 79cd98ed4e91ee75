# SPDX-License-Identifier: Apache-2.0
"""``LoadPlanner`` measures the tiers and the engine, and plans for the lookups."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvoffload.base import OffloadKey, StepWork, get_offload_group_idx
from kvoffload.metrics import HOST, Histogram, Stats
from kvoffload.tiering.links import Link
from kvoffload.tiering.plans import (
    FOREVER,
    LEAST_GAIN,
    NOTHING,
    PORTION_S,
    Declined,
    LinkState,
    Plan,
    SoFar,
    Speeds,
    plan,
)
from kvoffload.tiering.segments import HERE, Segment
from kvoffload.tiering.speeds import PrefillSpeedEstimator
from kvoffload.tiering.worth import Pace

_log = logging.getLogger(__name__)

LoadPolicy = Literal["cost", "always"]
"""Which hits in lower tiers are loaded: those that are expected to be there before their tokens would be computed, or
all of them."""

PROBE_INTERVAL_S = 5.0
"""Time without a read after which a tier whose blocks are declined is measured again."""
PROBE_BYTES = 16 << 20
"""Bytes read to measure a tier: all that may be outstanding from one that was never measured, and the most of a later
probe."""
PROBE_S = 1.0
"""A later probe takes no longer than this, if the tier is still as slow as it was."""
MOST_JOBS = 64
"""Jobs of a promotion that no plan was made for."""
LEAST_PORTION_BYTES = 4 << 20
"""No job of a promotion is smaller than this, however long it takes."""
TOO_SLOW = 2.0
"""A tier from which a block takes this many times as long as computing it, with nothing queued before it, is reported
as too slow, ..."""
_SURE_SAMPLES = 3
"""... in the log once this many reads have been measured."""
AHEAD_S = 0.3
"""A tier that has reads for so long begins none for requests that wait for their turn."""
_NEVER = Pace(math.inf, math.inf)
_LEAST_PAUSE_S = 0.005
"""A plan is looked at no more often than this without an answer that is new."""


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
        self,
        survey: Sequence[Segment],
        key: OffloadKey,
        ends: Sequence[int] | None,
        so_far: SoFar = NOTHING,
        tokens_ahead: int | None = None,
    ) -> Plan:
        """For the blocks of ``survey``, of whose group, which is weighed, ``key`` is one; ``ends`` and ``so_far`` as in
        ``plan``."""
        is_below = any(segment.place != HERE for segment in survey)
        speeds = self.speeds(self._tokens[get_offload_group_idx(key)], is_below, tokens_ahead)
        return plan(survey, speeds, ends, so_far)

    def sources(self, survey: Sequence[Segment]) -> tuple[Segment, ...]:
        """The blocks of ``survey`` with their sources, however long they take, up to one in a read that is overdue: it
        may never end."""
        survey = [*itertools.takewhile(lambda segment: not segment.place.is_overdue, survey)]
        is_plain = all(len(place.tiers) + len(place.unknown) < 2 for place, _ in survey)
        return tuple(survey) if is_plain else plan(survey, self.speeds(0)).segments

    def can_read_ahead(self) -> bool:
        """Whether some tier will have nothing to read soon."""
        return any(link.queue_s() < AHEAD_S for link in self._links)

    def speeds(self, tokens: int, with_links: bool = True, tokens_ahead: int | None = None) -> Speeds:
        """What is known now, for blocks of ``tokens`` tokens; with 0, as if they could not be computed.

        ``tokens_ahead`` as in ``ReqContext``. A request that waits for its turn reads nothing from a tier that has
        enough to read until the next step: a request before it may come to need the tier.
        """
        tokens_per_s = self._prefill.tokens_per_s
        queued_tokens = self._prefill.queued_tokens if tokens_ahead is None else tokens_ahead
        queue_s = 0.0 if tokens_per_s is None else queued_tokens / tokens_per_s
        # Each token is charged for the blocks of all weighed groups.
        share = tokens * self._bytes_per_token / self._block_bytes if tokens else 1.0
        links = [self._state_of(link, share) for link in self._links if with_links]
        if tokens_ahead is not None:
            links = [link if link.queue_s < AHEAD_S else replace(link, pace=_NEVER, reason="busy") for link in links]
        return Speeds(self._compute_s(tokens) if tokens else FOREVER, queue_s, tuple(links))

    def _state_of(self, link: Link, share: float) -> LinkState:
        speed, queue_s = link.speed, link.queue_s()
        is_slow = self._slowness(link) > 1 - LEAST_GAIN
        return LinkState(
            None if speed is None else Pace(queue_s + speed.first_s, speed.block_s * link.slowdown() * share),
            queue_s,
            room_blocks=max(0, self._num_blocks(PROBE_BYTES) - link.num_due),
            is_idle=not link.num_outstanding,
            reason="unmeasured" if speed is None else "slow" if is_slow else "busy",
            portion_s=PORTION_S if speed is None else self._portion_s(speed),
            answer_s=link.answers.seconds,
            found_share=link.answers.found_share,
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
        return FOREVER if speed is None else tokens / speed

    def _num_blocks(self, num_bytes: float) -> int:
        """As many as fit, but at least one."""
        return max(1, int(num_bytes / self._block_bytes))

    def portion_blocks(self, tier: int, most_s: float, num_blocks: int) -> int:
        """Blocks per job of a promotion of ``num_blocks``, each of whose jobs may take ``most_s``."""
        speed = self._links[tier].speed
        if most_s == math.inf or speed is None:  # no plan relies on its jobs: their number has a bound
            portion = self._portion_s(speed) / speed.block_s if speed else self._num_blocks(LEAST_PORTION_BYTES)
            return max(int(portion + 1e-6), -(-num_blocks // MOST_JOBS))
        return max(1, int(min(self._portion_s(speed), most_s) / speed.block_s + 1e-6))

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
            "Tier %r is read at %.3g MB/s, and the engine computes the same blocks at %.3g MB/s: only requests that "
            "queue in the engine load from it. Give it a faster device, or remove it.",
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
            link.check_invariants(queued[tier] + reading[tier], reading[tier])
