# SPDX-License-Identifier: Apache-2.0
"""``LoadPlanner`` measures the tiers and the engine, and plans for the lookups."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvoffload.base import OffloadKey, ReqContext, StepWork, get_offload_group_idx
from kvoffload.metrics import HOST, Histogram, Stats
from kvoffload.tiering.links import Link
from kvoffload.tiering.plans import (
    FOREVER,
    LEAST_GAIN,
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
"""The hits in lower tiers that are loaded: ``cost`` for hits that should arrive before their tokens would be computed,
``always`` for all of them."""

PROBE_INTERVAL_S = 5.0
"""If blocks of a tier are declined, it is measured again after this time without a read."""
PROBE_BYTES = 16 << 20
"""Bytes read to measure a tier: all that may be outstanding from one that was never measured, and the most of a later
probe."""
PROBE_S = 1.0
"""A later probe takes no longer than this, if the tier is as slow as when it was measured."""
MOST_JOBS = 64
"""The most jobs of a promotion without a plan."""
LEAST_PORTION_BYTES = 4 << 20
"""No job of a promotion is smaller than this, however long it takes."""
TOO_SLOW = 2.0
"""A tier is reported as too slow if reading a block takes this many times as long as computing it, without a queue."""
_SURE_SAMPLES = 3
"""The number of measured reads before the log reports a slow tier."""
AHEAD_S = 0.3
"""A tier with reads for this time begins none for requests that wait for their turn."""
_NEVER = Pace(math.inf, math.inf)
_LEAST_PAUSE_S = 0.005
"""Without a new answer, a plan is checked no more often than this."""


@dataclass(frozen=True, slots=True)
class BlockWorth:
    """The cost and the gain of a block."""

    num_bytes: int
    """The size of every block."""
    tokens: tuple[int, ...] = ()
    """The tokens that one block saves computing, by KV group. 0 for groups whose blocks are not weighed, because a hit
    needs only some of them (windows and states): they are loaded if the other groups' blocks are."""
    prefill_tokens_per_s: float | None = None
    """The engine's expected speed, until it was measured."""
    read_bytes_per_s: tuple[float | None, ...] = ()
    """The expected speed of each tier, until it was measured. ``None``, or omitted at the end: not known."""


class LoadPlanner:
    """Measures the tiers and the engine, and plans loads. Each manager has one, on its thread.

    With ``load_policy="cost"``, a hit is loaded as far as this should be faster than computing it. Blocks that are not
    weighed are all loaded; with ``load_policy="always"``, no block is weighed.

    Speeds are measured in this process. Until then, the user's expected speeds are used (``BlockWorth``). If a tier has
    neither, ``PROBE_BYTES`` (at least one block) may be outstanding, whatever they cost. Until the engine's speed is
    known, every load from a measured tier is worth it.
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
        """Return whether plans may decline blocks of this block's group."""
        group = get_offload_group_idx(key)
        return group < len(self._tokens) and bool(self._tokens[group])

    def plan(
        self,
        survey: Sequence[Segment],
        key: OffloadKey,
        ends: Sequence[int] | None,
        so_far: SoFar,
        context: ReqContext,
        begun: Mapping[int, int],
    ) -> Plan:
        """Return the plan for the blocks of ``survey``. ``key`` is a block of their group, which is weighed. For
        ``ends`` and ``so_far``, see ``plans.plan``. ``begun``: for each tier that is already reading some of the
        blocks, the ``Link.num_begun`` of the last one."""
        is_below = any(segment.place != HERE for segment in survey)
        tokens = self._tokens[get_offload_group_idx(key)]
        speeds = self.speeds(tokens, is_below, context.tokens_ahead)
        links = speeds.links
        if begun:
            links = tuple(
                state._replace(behind_s=self._links[tier].behind_s(begun[tier])) if tier in begun else state
                for tier, state in enumerate(links)
            )
        speeds = speeds._replace(
            links=links,
            block_compute_s=self._prefill.relative_cost(context.tokens_before) * speeds.block_compute_s,
            growth_s=self._prefill.rise * tokens * speeds.block_compute_s,
            turn_s=self._prefill.turn_s(so_far.num_blocks * tokens, context.tokens_behind),
            before_turn=context.tokens_ahead is not None,
        )
        return plan(survey, speeds, ends, so_far)

    def sources(self, survey: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return the blocks of ``survey`` with their sources, however long they take. Ends at a block in an overdue
        read, which may never end."""
        survey = [*itertools.takewhile(lambda segment: not segment.place.is_overdue, survey)]
        is_plain = all(len(place.tiers) + len(place.unknown) < 2 for place, _ in survey)
        return tuple(survey) if is_plain else plan(survey, self.speeds(0)).segments

    def can_read_ahead(self) -> bool:
        """Return whether some tier will soon be idle."""
        return any(link.queue_s() < AHEAD_S for link in self._links)

    def speeds(self, tokens: int, with_links: bool = True, tokens_ahead: int | None = None) -> Speeds:
        """Return the current speeds for blocks of ``tokens`` tokens; 0 means that they cannot be computed.

        ``tokens_ahead`` as in ``ReqContext``. A request that waits for its turn reads nothing from a tier that has
        enough to read until the next step, because an earlier request may need the tier.
        """
        tokens_per_s = self._prefill.tokens_per_s
        queued_tokens = self._prefill.queued_tokens if tokens_ahead is None else tokens_ahead
        queue_s = 0.0 if tokens_per_s is None else queued_tokens / tokens_per_s
        # Each token pays for the blocks of all weighed groups.
        share = tokens * self._bytes_per_token / self._block_bytes if tokens else 1.0
        links = [self._state_of(link, share) for link in self._links if with_links]
        if tokens_ahead is not None:
            links = [link if link.queue_s < AHEAD_S else link._replace(pace=_NEVER, reason="busy") for link in links]
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
            name=link.name,
        )

    def _portion_s(self, speed: Pace) -> float:
        """Return the duration of a read."""
        return max(PORTION_S, self._num_blocks(LEAST_PORTION_BYTES) * speed.block_s)

    def _slowness(self, link: Link) -> float:
        """Return the duration of loading as a multiple of computing, without a queue."""
        if link.speed is None:
            return 0.0
        return link.speed.block_s / self._block_bytes * self._bytes_per_token / self._compute_s(1)

    def _compute_s(self, tokens: int) -> float:
        speed = self._prefill.tokens_per_s
        return FOREVER if speed is None else tokens / speed

    def _num_blocks(self, num_bytes: float) -> int:
        """Return the number of blocks that fit, but at least one."""
        return max(1, int(num_bytes / self._block_bytes))

    def portion_blocks(self, tier: int, most_s: float, num_blocks: int) -> int:
        """Return the blocks per job of a promotion of ``num_blocks`` whose jobs may take ``most_s`` each."""
        speed = self._links[tier].speed
        if most_s == math.inf or speed is None:  # no plan relies on its jobs: their number has a bound
            portion = self._portion_s(speed) / speed.block_s if speed else self._num_blocks(LEAST_PORTION_BYTES)
            return max(int(portion + 1e-6), -(-num_blocks // MOST_JOBS))
        return max(1, int(min(self._portion_s(speed), most_s) / speed.block_s + 1e-6))

    def probe_blocks(self, tier: int) -> int:
        """Return the number of declined blocks to read anyway, to measure the tier; 0: none."""
        link = self._links[tier]
        if link.num_due or self._clock() - link.estimator.measured_s < PROBE_INTERVAL_S:
            return 0
        most = self._num_blocks(PROBE_BYTES)
        return most if link.speed is None else min(most, max(1, int(PROBE_S / link.speed.block_s)))

    def due_s(self, plan: Plan) -> float:
        """Return the seconds until ``plan`` must be checked again, because a read may then be late. If a read is
        already late, that is when it is late by a further quarter, so that a long stall costs few plans."""
        tiers = {tier for place, _ in plan.segments for tier in place.tiers}
        late_s = [self._links[tier].late_s() for tier in tiers]
        return min([plan.deadline_s, *(max(each_s, -each_s / 4, _LEAST_PAUSE_S) for each_s in late_s)])

    def is_late(self, plan: Plan) -> bool:
        """Return whether a tier that ``plan`` reads from is late."""
        return any(self._links[tier].slowdown() > 1 for place, _ in plan.segments for tier in place.tiers)

    def adds(self, tier: int, others: Sequence[int]) -> bool:
        """Return whether ``tier`` can be useful for blocks that ``others`` have. It cannot if it is so slow that its
        share of the work would gain less than a load must gain."""
        speed = self._links[tier].speed
        rates = [1 / other.block_s for each in others if (other := self._links[each].speed) is not None]
        return speed is None or not rates or 1 / speed.block_s >= LEAST_GAIN * sum(rates)

    # --------------------------------------------------------------------------------------------- measurements

    def note_step(self, work: StepWork) -> None:
        """Record a step that the engine computes."""
        self._prefill.note_step(work)

    def link(self, tier: int) -> Link:
        """Return the link that records the tier's reads."""
        return self._links[tier]

    def end_poll(self) -> None:
        """Measure the tiers, after all ended jobs were recorded."""
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
            "queue in the engine load from it. Use a faster device, or remove the tier.",
            self._links[tier].name,
            1e-6 * self._block_bytes / speed.block_s,
            1e-6 * self._bytes_per_token / self._compute_s(1),
        )

    # -------------------------------------------------------------------------------------------------- metrics

    def count_declined(self, tier: int | None, reason: Declined, num_blocks: int) -> None:
        """Count blocks of a tier (``None``: of host memory) that were found and not loaded."""
        if num_blocks:
            self._declined[HOST if tier is None else self._links[tier].name, reason] += num_blocks

    def count_wait(self, expected_s: float, waited_s: float) -> None:
        """Record the duration of a wait whose blocks have arrived."""
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
        """Check the links' counts. ``queued`` and ``reading``: the number of blocks on their way from each tier."""
        for tier, link in enumerate(self._links):
            link.check_invariants(queued[tier] + reading[tier], reading[tier])
