# SPDX-License-Identifier: Apache-2.0
"""``load_policy="cost"``: keeps what was measured of tiers and engine, and weighs a hit with it (``worth.py``)."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from kvoffload.base import OffloadKey, StepWork, get_offload_group_idx
from kvoffload.metrics import HOST, Histogram, Stats
from kvoffload.tiering.speeds import LinkSpeed, LinkSpeedEstimator, PrefillSpeedEstimator
from kvoffload.tiering.worth import Choice, Pace, Run, choose

__all__ = ["BlockWorth", "LoadCosts", "LoadPolicy", "Place", "WaitPlan"]

_log = logging.getLogger(__name__)

LoadPolicy = Literal["cost", "always"]
"""Which hits in lower tiers are loaded: those that are expected to be there before their tokens would be computed, or
all of them."""

CAUTION = 1.1
"""Loading must be expected to be faster than computing by this factor: estimates have errors, and a tie gains
nothing."""
LEAST_GAIN = 0.1
"""A request waits only if that saves this share of computing the blocks that are not there: while it waits, the engine
takes others before it, which no estimate knows of."""
PATIENCE = 1.25
"""A request waits for its blocks at most this many times as long as computing them would take."""
PROBE_INTERVAL_S = 5.0
"""Time without a read after which a tier whose blocks are declined is measured again."""
PROBE_BYTES = 64 << 20
"""Bytes read to measure a tier: all that may be under way from one that was never measured, and the most of a later
probe."""
PROBE_S = 1.0
"""A later probe takes no longer than this, if the tier is still as slow as it was."""
PORTION_S = 0.1
"""A promotion is cut into jobs of about this duration, so that a request can use what came up when it gives up, and a
tier that has become slower is noticed soon ..."""
LEAST_PORTION_BYTES = 4 << 20
"""... but not into smaller ones than this."""
TOO_SLOW = 2.0
"""A tier from which a block takes this many times as long as computing it, with nothing queued before it, is reported
as too slow, ..."""
_SURE_SAMPLES = 3
"""... in the log once this many reads have been measured."""
STUCK_S = 30.0
"""A read that is later than this, and than so many times what was expected of it, is stuck, if others overtook it or
nothing else ends either."""
_STUCK = 4.0
_FOREVER = 1e12
"""Seconds of computing a block while the engine's speed is not known: any load is worth it."""


@dataclass(frozen=True, slots=True)
class BlockWorth:
    """What a block costs and saves."""

    num_bytes: int
    """Of every block."""
    tokens: tuple[int, ...]
    """By KV group: the tokens that one block saves computing. 0 for groups whose blocks are not weighed, because a hit
    needs only some of them (windows and states): they are loaded if the other groups' blocks are."""
    prefill_tokens_per_s: float | None = None
    """Of the engine, until it was measured."""
    read_bytes_per_s: tuple[float | None, ...] = ()
    """By tier, until it was measured. ``None``, or left out at the end: not known."""


class Place(NamedTuple):
    """Where a block of a hit is."""

    tier: int | None = None
    """The tier that has it; ``None``: host memory."""
    is_coming: bool = False
    """It is being promoted already."""
    is_stuck: bool = False
    """And by a read that is stuck."""


HERE = Place()


@dataclass(slots=True)
class WaitPlan:
    """What a waiting request waits for."""

    declined: set[OffloadKey]
    """Blocks that it does not load, nor what follows them. A prefix without one is loaded as far as it is there."""
    began_s: float
    expected_s: float
    """Of waiting."""
    give_up_s: float
    """When it stops waiting."""
    unmeasured: int | None = None
    """The tier that was never measured, because of which it waits for no more blocks."""

    def postpone(self, seconds: float) -> None:
        """The request had all that it waited for, and waited for the engine, for so long. Now it waits for more."""
        self.began_s += seconds
        self.give_up_s += seconds


class _Read(NamedTuple):
    """A promotion's job."""

    number: int
    """Among those of its tier."""
    slots: Sequence[int]
    submitted_s: float
    stuck_s: float
    """From when on it may be stuck."""


class _TierReads:
    """What is under way from one tier, and how fast it was."""

    __slots__ = (
        "busy_since_s",
        "ended",
        "ended_s",
        "estimator",
        "is_reported_slow",
        "last_read",
        "num_reads",
        "queued",
        "reads",
        "stuck",
        "submitted",
    )

    def __init__(self, clock: Callable[[], float], bytes_per_s: float | None) -> None:
        self.estimator = LinkSpeedEstimator(clock, LinkSpeed(0.0, 1 / bytes_per_s) if bytes_per_s else None)
        self.queued = 0
        """Blocks whose promotion has begun and not ended, but for those of ``stuck``."""
        self.submitted = 0
        """Those of them that the tier is reading."""
        self.busy_since_s = 0.0
        """Since when the tier has been reading, or when its last job ended."""
        self.ended = 0
        """Blocks read since then."""
        self.ended_s = 0.0
        self.reads: dict[int, _Read] = {}
        """Jobs that the tier is reading, in the order of their submits, by their first slots: nobody else gets a slot
        before its job ends."""
        self.stuck: dict[int, _Read] = {}
        """Jobs that count no more: neither as queued, nor as a reason to wait for blocks of others."""
        self.num_reads = self.last_read = 0
        """Jobs submitted so far, and the number of the last one that has read something."""
        self.is_reported_slow = False
        """The log says that the tier is too slow."""

    def remaining_s(self, now_s: float, block_bytes: int) -> float:
        """Until all that is queued is there. What is late already is expected to be late by as much again."""
        speed = self.estimator.speed
        if not self.queued or speed is None:
            return 0.0
        needed_s = speed.seconds(self.queued * block_bytes)
        elapsed_s = now_s - self.busy_since_s if self.submitted else 0.0
        return abs(needed_s - elapsed_s)

    def submit(self, slots: Sequence[int], now_s: float, block_bytes: int) -> None:
        if not self.submitted:
            self.busy_since_s, self.ended = now_s, 0
        self.submitted += len(slots)
        self.num_reads += 1
        speed = self.estimator.speed
        expected_s = 0.0 if speed is None else speed.seconds(self.submitted * block_bytes)
        stuck_s = now_s + expected_s + max(_STUCK * expected_s, STUCK_S)
        self.reads[slots[0]] = _Read(self.num_reads, slots, now_s, stuck_s)

    def end(self, slots: Sequence[int], num_read: int) -> bool:
        """Whether the end says something of the tier's speed."""
        read = self.reads.pop(slots[0], None)
        if read is not None:
            self.queued -= len(slots)
            self.submitted -= len(slots)
        else:
            read = self.stuck.pop(slots[0])
            if read.number < self.last_read:
                return False  # the tier has not been reading this one job all the time
        if num_read:
            self.last_read = max(self.last_read, read.number)
        return True

    def set_stuck_aside(self, now_s: float) -> None:
        """A tier that reads slowly, one job after the other, has late jobs too: none of them is overtaken."""
        while self.reads:
            first, read = next(iter(self.reads.items()))
            if now_s <= read.stuck_s or (read.number > self.last_read and now_s - self.ended_s <= STUCK_S):
                return
            self.stuck[first] = self.reads.pop(first)
            self.queued -= len(read.slots)
            self.submitted -= len(read.slots)

    def is_stalled(self, now_s: float) -> bool:
        """Whether nothing was read since some job got stuck. Such a tier is tried once more each time that it has
        stood still twice as long."""
        submitted = [read.submitted_s for read in self.stuck.values() if read.number > self.last_read]
        return bool(submitted) and now_s - submitted[-1] < submitted[-1] - submitted[0]


class LoadCosts:
    """What loading and computing cost, as measured in this process. One for a manager, on its thread.

    Before a tier was ever measured, ``PROBE_BYTES`` of its blocks (but at least one block) may be under way at a time,
    whatever they cost; before the engine's speed is known, every load from a tier that was measured is worth it. What
    the user expects (``BlockWorth``) stands in for measurements until there are any.
    """

    def __init__(self, tiers: Sequence[str], worth: BlockWorth, clock: Callable[[], float]) -> None:
        self._names = tuple(tiers)
        self._clock = clock
        self._block_bytes = worth.num_bytes
        self._tokens = worth.tokens
        weighed = [tokens for tokens in worth.tokens if tokens]
        self._bytes_per_token = sum(worth.num_bytes / tokens for tokens in weighed)
        expected = itertools.chain(worth.read_bytes_per_s, itertools.repeat(None))
        self._tiers = tuple(_TierReads(clock, bytes_per_s) for _, bytes_per_s in zip(tiers, expected, strict=False))
        self._prefill = PrefillSpeedEstimator(clock, worth.prefill_tokens_per_s)
        self._declined: Counter[tuple[str, str]] = Counter()
        self._wait_ratios = Histogram("promotion_wait_ratio")

    def __repr__(self) -> str:
        speeds = {name: reads.estimator.speed for name, reads in zip(self._names, self._tiers, strict=True)}
        return f"LoadCosts(prefill={self._prefill.tokens_per_s}, {speeds})"

    # -------------------------------------------------------------------------------------------- measurements

    def note_step(self, work: StepWork) -> None:
        self._prefill.note_step(work)

    def begun(self, tier: int, num_blocks: int) -> None:
        """Promotions were queued."""
        self._tiers[tier].queued += num_blocks

    def dropped(self, tier: int, num_blocks: int) -> None:
        """Queued promotions were given up before they were submitted."""
        self._tiers[tier].queued -= num_blocks

    def submitted(self, tier: int, slots: Sequence[int]) -> None:
        """A promotion's job was submitted, which reads into ``slots``."""
        self._tiers[tier].submit(slots, self._clock(), self._block_bytes)

    def ended(self, tier: int, slots: Sequence[int], num_read: int, ended_s: float | None) -> None:
        """A promotion's job has ended, at ``ended_s`` if the tier knows when; ``num_read`` of its blocks were read.
        The sample is taken in ``end_poll``: jobs whose ends are seen together were read side by side."""
        reads = self._tiers[tier]
        if not reads.end(slots, num_read):
            return
        reads.ended += num_read
        now_s = self._clock()
        reads.ended_s = max(reads.ended_s, now_s if ended_s is None else min(ended_s, now_s))

    def end_poll(self) -> None:
        """All jobs that have ended were recorded."""
        for tier, reads in enumerate(self._tiers):
            if reads.ended_s <= reads.busy_since_s:
                continue
            if reads.ended:
                reads.estimator.add(reads.ended * self._block_bytes, reads.ended_s - reads.busy_since_s)
                self._report_slow(tier)
            reads.ended = 0
            reads.busy_since_s = reads.ended_s

    def _report_slow(self, tier: int) -> None:
        reads = self._tiers[tier]
        if reads.is_reported_slow or reads.estimator.num_samples < _SURE_SAMPLES or not self._is_too_slow(tier):
            return
        reads.is_reported_slow = True
        speed = reads.estimator.speed
        assert speed is not None
        _log.warning(
            "Tier %r is read at %.3g MB/s, and the engine computes the same blocks at %.3g MB/s: loading from it does "
            "not pay. Give it a faster device, or remove it.",
            self._names[tier],
            1e-6 / speed.byte_s,
            1e-6 * self._bytes_per_token / self._compute_s(1),
        )

    def _is_too_slow(self, tier: int) -> bool:
        speed = self._tiers[tier].estimator.speed
        return speed is not None and speed.byte_s * self._bytes_per_token >= TOO_SLOW * self._compute_s(1)

    def set_stuck_aside(self) -> None:
        """Jobs that are stuck are counted no more. To be called before a hit is surveyed."""
        now_s = self._clock()
        for reads in self._tiers:
            if reads.reads:
                reads.set_stuck_aside(now_s)

    def is_stuck(self, tier: int, slot: int) -> bool:
        """Whether the block that is to come into ``slot`` is in a job that is stuck."""
        return any(slot in read.slots for read in self._tiers[tier].stuck.values())

    # ------------------------------------------------------------------------------------------------- choices

    def weighs(self, key: OffloadKey) -> bool:
        """Whether blocks of this one's group are weighed. Others are loaded if a hit needs them."""
        group = get_offload_group_idx(key)
        return group < len(self._tokens) and bool(self._tokens[group])

    def choose(
        self, key: OffloadKey, places: Sequence[tuple[Place, int]], ends: Collection[int] | None = None
    ) -> Choice:
        """How many of the blocks of a hit to load. ``places`` are those of its blocks, in runs, and ``key`` is one of
        them. With ``ends``, a part of the hit is of use only if it has so many blocks."""
        tokens = self._tokens[get_offload_group_idx(key)]
        group_bytes = tokens * self._bytes_per_token  # with those of the other groups that these tokens need
        now_s = self._clock()
        sources: list[Pace] = []
        runs: list[Run] = []
        known: dict[Place, int] = {}
        room: dict[int, int] = {}
        before = 0
        first_blocks: list[int] = []
        for place, num_blocks in places:
            tier = place.tier
            if tier is not None and not place.is_coming and self._tiers[tier].estimator.speed is None:
                free = min(room.setdefault(tier, self._room(tier)), num_blocks)
                room[tier] -= free
                runs += [Run(len(sources), free), Run(len(sources) + 1, num_blocks - free)]
                sources += [Pace(), Pace(math.inf)]
                if before + free:
                    first_blocks.append(before + free)
                before += num_blocks
                continue
            before += num_blocks
            if place not in known:
                known[place] = len(sources)
                sources.append(self._pace(place, now_s, group_bytes))
            runs.append(Run(known[place], num_blocks))
        pick = partial(
            choose,
            sources=sources,
            block_compute_s=self._compute_s(tokens),
            queue_s=self._queue_s(),
            # Whoever waits for the first blocks of a tier, or for those before them, is weighed again, and may get the
            # rest.
            ends=None if ends is None else sorted({*ends, *first_blocks, before}),
        )
        runs = [run for run in runs if run.num_blocks]
        choice = pick(runs)
        if not choice.wait_s:
            return choice
        at_once = pick(runs[:1]) if places[0][0] == HERE else Choice(0, 0.0, 0.0)
        expected = sum(run.num_blocks for run in runs if sources[run.source].first_s < math.inf)
        num_later = expected - at_once.num_blocks
        gain_s = choice.saved_s - at_once.saved_s
        return choice if gain_s >= LEAST_GAIN * num_later * self._compute_s(tokens) else at_once

    def plan(
        self,
        key: OffloadKey,
        places: Sequence[tuple[Place, int]],
        choice: Choice,
        declined: OffloadKey | None,
        before: WaitPlan | None = None,
    ) -> WaitPlan:
        """For a request that waits for what ``choose`` chose, up to ``declined``. ``before``: what it waited for until
        it was weighed again; it does not wait for the engine's queue twice."""
        here = places[0][1] if places and places[0][0] == HERE else 0
        compute_s = max(choice.num_blocks - here, 0) * self._compute_s(self._tokens[get_offload_group_idx(key)])
        now_s = self._clock()
        stops = set() if declined is None else {declined}
        give_up_s = now_s + PATIENCE * (self._queue_s() + compute_s)
        if before is not None:
            give_up_s = min(give_up_s, before.give_up_s + PATIENCE * compute_s)
        return WaitPlan(stops, now_s, choice.wait_s, give_up_s, self._unmeasured_at(places, choice.num_blocks))

    def plan_for_rest(self, key: OffloadKey, num_blocks: int, declined: OffloadKey | None) -> WaitPlan:
        """For a request that waits for none of the ``num_blocks`` it loads, up to ``declined``, but may wait for blocks
        that are not weighed. They save computing those."""
        tokens = self._tokens[get_offload_group_idx(key)]
        now_s = self._clock()
        patience_s = PATIENCE * (self._queue_s() + num_blocks * self._compute_s(tokens))
        return WaitPlan(set() if declined is None else {declined}, now_s, 0.0, now_s + patience_s)

    def should_choose_again(self, plan: WaitPlan) -> bool:
        """Whether what ``plan`` lacked was measured since."""
        return plan.unmeasured is not None and self._tiers[plan.unmeasured].estimator.speed is not None

    def wants_probe(self, tier: int) -> bool:
        """Whether the tier, whose blocks are declined, should be measured again."""
        reads, now_s = self._tiers[tier], self._clock()
        is_old = now_s - reads.estimator.measured_s >= PROBE_INTERVAL_S
        return is_old and not reads.queued and not reads.is_stalled(now_s)

    def probe_blocks(self, tier: int) -> int:
        speed = self._tiers[tier].estimator.speed
        return self._num_blocks(PROBE_BYTES if speed is None else min(PROBE_BYTES, PROBE_S / speed.byte_s))

    def portion_blocks(self, tier: int) -> int:
        """Blocks per job."""
        speed = self._tiers[tier].estimator.speed
        return self._num_blocks(max(LEAST_PORTION_BYTES, PORTION_S / speed.byte_s if speed is not None else 0.0))

    # ------------------------------------------------------------------------------------------------- metrics

    def count_declined(self, places: Sequence[tuple[Place, int]], num_loaded: int, num_counted: int) -> int:
        """Counts the blocks behind the first ``num_loaded``, but for ``num_counted`` that were counted
        for the same request before. Returns how many have been counted now."""
        at = total = 0
        for place, num_blocks in places:
            at += num_blocks
            if place.is_coming or (place.tier is None and at > num_blocks):
                continue  # or it is in host memory, behind a declined block
            declined = min(num_blocks, max(0, at - num_loaded))
            total += declined
            new = min(declined, max(0, total - num_counted))
            if new:
                self._declined[self._name(place), self._reason(place)] += new
        return max(total, num_counted)

    def count_late(self, place: Place, num_blocks: int) -> None:
        """A request has given up waiting for so many blocks, the first of which is in ``place``."""
        self._declined[self._name(place), "late"] += num_blocks

    def count_wait(self, plan: WaitPlan, answered_s: float | None) -> None:
        """A wait has ended with its blocks, now or at ``answered_s``."""
        if plan.expected_s > 0:
            end_s = self._clock() if answered_s is None else answered_s
            self._wait_ratios.observe(max(0.0, end_s - plan.began_s) / plan.expected_s)

    def get_stats(self) -> Stats:
        stats: Stats = {("tier_declined_blocks", *labels): count for labels, count in self._declined.items()}
        stats |= self._wait_ratios.stats()
        for tier, (name, reads) in enumerate(zip(self._names, self._tiers, strict=True)):
            if reads.estimator.speed is not None:
                stats["tier_read_bytes_per_second", name] = 1 / reads.estimator.speed.byte_s
                stats["tier_read_latency_seconds", name] = reads.estimator.speed.latency_s
            stats["tier_read_queue_bytes", name] = reads.queued * self._block_bytes
            stats["tier_too_slow", name] = int(self._is_too_slow(tier))
        if self._prefill.tokens_per_s is not None:
            stats[("prefill_tokens_per_second",)] = self._prefill.tokens_per_s
        return stats

    def check_invariants(self, queued: Counter[int], submitted: Counter[int]) -> None:
        """``queued`` and ``submitted``: blocks of promotions under way, by tier."""
        for tier, reads in enumerate(self._tiers):
            num_stuck = sum(len(read.slots) for read in reads.stuck.values())
            assert reads.queued + num_stuck == queued[tier]
            assert reads.submitted + num_stuck == submitted[tier]
            assert reads.submitted == sum(len(read.slots) for read in reads.reads.values())

    # ------------------------------------------------------------------------------------------------- helpers

    def _room(self, tier: int) -> int:
        """Blocks that may be promoted from a tier that was never measured."""
        reads = self._tiers[tier]
        return 0 if reads.is_stalled(self._clock()) else max(0, self.probe_blocks(tier) - reads.queued)

    def _num_blocks(self, num_bytes: float) -> int:
        """As many as fit, but at least one."""
        return max(1, int(num_bytes / self._block_bytes))

    def _unmeasured_at(self, places: Sequence[tuple[Place, int]], block: int) -> int | None:
        """The tier of a block of ``places``, if it was never measured."""
        for place, num_blocks in places:
            if block < num_blocks:
                has_speed = place.tier is None or self._tiers[place.tier].estimator.speed is not None
                return None if has_speed or place.is_coming else place.tier
            block -= num_blocks
        return None

    def _compute_s(self, tokens: int) -> float:
        speed = self._prefill.tokens_per_s
        return _FOREVER if speed is None else tokens / speed

    def _queue_s(self) -> float:
        speed = self._prefill.tokens_per_s
        return 0.0 if speed is None else self._prefill.queued_tokens / speed

    def _pace(self, place: Place, now_s: float, num_bytes: float) -> Pace:
        if place.tier is None:
            return Pace()
        reads = self._tiers[place.tier]
        if place.is_stuck or reads.is_stalled(now_s):
            return Pace(math.inf)
        queue_s = CAUTION * reads.remaining_s(now_s, self._block_bytes)
        speed = reads.estimator.speed
        if place.is_coming or speed is None:
            return Pace(queue_s)
        return Pace(queue_s + CAUTION * speed.latency_s, CAUTION * speed.byte_s * num_bytes)

    def _name(self, place: Place) -> str:
        return HOST if place.tier is None else self._names[place.tier]

    def _reason(self, place: Place) -> str:
        """Why blocks are declined."""
        if place.tier is None:
            return "slow"
        reads = self._tiers[place.tier]
        if reads.estimator.speed is None:
            return "unmeasured"
        per_token_s = CAUTION * reads.estimator.speed.byte_s * self._bytes_per_token
        return "slow" if per_token_s >= self._compute_s(1) else "busy"
