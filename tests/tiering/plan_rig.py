# SPDX-License-Identifier: Apache-2.0
"""Requests over tiers whose speeds are known to the test alone, in virtual time, through the public seam."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from kvoffload.base import OffloadKey, ReqContext, RequestOffloadingContext, make_offload_key
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.sim.disk import VirtualMemory
from kvoffload.testing.clock import ManualClock
from kvoffload.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.manager import TieringOffloadingManager

COMPUTE_S = 0.01
"""The seconds to compute a block."""
TOKENS = 16
"""The number of tokens in a block."""
LATEST = 1.05, 0.05
"""No request may be later than this many times computing it, and as many seconds."""


@dataclass
class World:
    """The blocks that one request finds in lower tiers. Times count from its arrival."""

    num_blocks: int
    has: list[frozenset[int]]
    """The blocks of each tier."""
    failing: list[frozenset[int]] = field(default_factory=list)
    """The blocks of each tier whose reads fail at their end."""
    changes: list[tuple[float, float]] = field(default_factory=list)
    """By tier, (seconds, factor): from that time on, its blocks take this many times as long."""


class VirtualTier(SecondaryTierManager):
    """A tier that reads one job after the other, each block in ``block_s``.

    With ``answer_s``, it must find out which blocks it contains.
    """

    def __init__(self, name: str, clock: ManualClock, block_s: float, answer_s: float | None = None) -> None:
        super().__init__(VirtualMemory().create_kv_memoryview(), name)
        self.block_s, self.answer_s = block_s, answer_s
        self.change: tuple[float, float] | None = None
        """The time from which blocks take longer, and the factor, or ``None``."""
        self.keys: set[OffloadKey] = set()
        self.failing: set[OffloadKey] = set()
        self.num_read = 0
        self._clock = clock
        self._asked: dict[OffloadKey, float] = {}
        self._told: set[OffloadKey] = set()
        self._jobs: deque[tuple[float, JobMetadata]] = deque()
        self._ended: list[JobResult] = []
        self._free_s = 0.0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self.answer_s is not None and self._clock() < self._asked.setdefault(key, self._clock()) + self.answer_s:
            return None
        return key in self.keys

    def take_news(self) -> list[OffloadKey]:
        now_s, answer_s = self._clock(), self.answer_s
        if answer_s is None:
            return []
        new = [key for key, asked_s in self._asked.items() if asked_s + answer_s <= now_s and key not in self._told]
        self._told.update(new)
        return new

    def submit_load(self, job: JobMetadata) -> None:
        self._free_s = self._end_s(max(self._free_s, self._clock()), len(job.keys) * self.block_s)
        self._jobs.append((self._free_s, job))

    def _end_s(self, begin_s: float, work_s: float) -> float:
        if self.change is None:
            return begin_s + work_s
        at_s, factor = self.change
        before_s = min(max(at_s - begin_s, 0.0), work_s)
        return begin_s + before_s + (work_s - before_s) * factor

    def submit_store(self, job: JobMetadata) -> None:
        self._ended.append(JobResult(job.job_id, success=False))

    def get_finished_jobs(self) -> list[JobResult]:
        while self._jobs and self._jobs[0][0] <= self._clock():
            end_s, job = self._jobs.popleft()
            good = [key for key in job.keys if key in self.keys and key not in self.failing]
            self.num_read += len(good)
            self._ended.append(JobResult(job.job_id, len(good) == len(job.keys), good, end_s))
        ended, self._ended = self._ended, []
        return ended

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def next_s(self) -> float:
        """When something happens next."""
        now_s = self._clock()
        answers = [asked_s + self.answer_s for asked_s in {*self._asked.values()}] if self.answer_s is not None else []
        return min([end_s for end_s, _ in self._jobs] + [at_s for at_s in answers if at_s > now_s], default=math.inf)

    def settle(self) -> None:
        """Let the measured speeds adapt to a lasting change, without further requests."""
        if self.change is not None and self.change[0] <= self._clock():
            self.block_s *= self.change[1]
        self.change = None
        self._asked.clear()
        self._told.clear()


class Served(NamedTuple):
    """The outcome of a request."""

    first_token_s: float
    num_hit: int
    waited_s: float


class PlanRig:
    """A manager over virtual tiers. ``paces`` contains, by tier, the seconds per block and per answer (``None``: it
    answers at once).

    With ``is_busy``, the engine also computes other prompts: a request asks once in each step, whatever happens in
    between.
    """

    def __init__(
        self,
        paces: Sequence[tuple[float, float | None]],
        *,
        block_bytes: int = 2 << 20,
        step_s: float = 0.005,
        is_busy: bool = False,
        are_measured: bool = True,
        policy: str = "cost",
    ) -> None:
        self.clock, self.step_s, self.is_busy = ManualClock(), step_s, is_busy
        self.tiers = [VirtualTier(f"tier{at}", self.clock, *pace) for at, pace in enumerate(paces)]
        self.primary = CPUPrimaryTierOffloadingManager(4096, VirtualMemory())  # type: ignore[arg-type]
        worth = BlockWorth(block_bytes, (TOKENS,), TOKENS / COMPUTE_S)
        self.manager = TieringOffloadingManager(
            self.primary,
            self.tiers,
            block_worth=worth if policy == "cost" else None,
            max_wait_s=1e6,
            clock=self.clock,
        )
        self._count = 0
        self.keys: list[OffloadKey] = []
        """Of the last request."""
        if are_measured:
            for tier in range(len(self.tiers)):
                self._learn(tier)

    def _learn(self, tier: int) -> None:
        """Read from the tier and ask it often enough that its speeds are known."""
        only = [frozenset(range(330)) if at == tier else frozenset[int]() for at in range(len(self.tiers))]
        other = [each.answer_s for each in self.tiers]
        for at, each in enumerate(self.tiers):
            if at != tier:
                each.answer_s = None
        for _ in range(2):  # long enough that the slowest answer is worth waiting for
            self.serve(World(330, only))
            self.clock.advance(6.0)  # the next request may probe it
        for each, answer_s in zip(self.tiers, other, strict=True):
            each.answer_s = answer_s

    def ask(self, world: World) -> ReqContext:
        """Let a request arrive and ask once."""
        self._count += 1
        keys = self.keys = [make_offload_key(f"{self._count}-{at:06}".encode(), 0) for at in range(world.num_blocks)]
        begin_s = self.clock()
        for at, tier in enumerate(self.tiers):
            tier.keys = {keys[block] for block in world.has[at]}
            tier.failing = {keys[block] for block in world.failing[at]} if world.failing else set()
            if world.changes:
                tier.change = begin_s + world.changes[at][0], world.changes[at][1]
        context = ReqContext(f"r{self._count}")
        self.manager.on_new_request(context)
        self.manager.lookup_prefix(keys, context)
        return context

    def serve(self, world: World) -> Served:
        """Serve one request from its arrival to its first token, and until the tiers are idle again."""
        begin_s, context, keys = self.clock(), self.ask(world), self.keys
        while None in (answers := self.manager.lookup_prefix(keys, context)):
            self.manager.on_schedule_end()
            if self.is_busy:
                self.clock.advance(self.step_s)
            else:
                self._pass(self.step_s)
        num_hit = answers.index(False) if False in answers else len(answers)
        waited_s = self.clock() - begin_s
        if num_hit:
            self.manager.prepare_load(keys[:num_hit], context)
            self.manager.complete_load(keys[:num_hit], context)
        self.manager.on_schedule_end()
        self.clock.advance((world.num_blocks - num_hit) * COMPUTE_S)
        self.manager.on_schedule_end()
        self.manager.on_request_finished(context)
        while any(tier.has_pending_work() for tier in self.tiers):
            self._pass(math.inf)
            self.manager.on_schedule_end()
        self.manager.check_invariants()
        for tier in self.tiers:
            tier.settle()
        self.manager.primary_tier.reset_cache()
        return Served(waited_s + (world.num_blocks - num_hit) * COMPUTE_S, num_hit, waited_s)

    def _pass(self, most_s: float) -> None:
        """Time, until something happens or the engine steps."""
        next_s = min(tier.next_s() for tier in self.tiers)
        self.clock.advance(min(max(next_s - self.clock(), 0.0) + 1e-9, most_s))


# ---------------------------------------------------------------------------------------------------------- the optimum


def optimum_s(rig: PlanRig, world: World) -> float:
    """Return the earliest possible first token, with perfect knowledge, if each block may come from any tier that
    contains it.

    A tier that must be asked can be read once it has answered. For some numbers of blocks, this bisects the time by
    which they have arrived, each with a flow of blocks to tiers. It shares nothing with the planner, and knows when
    speeds will change and reads will fail.
    """
    good = [
        has - (world.failing[at] if world.failing else frozenset()) if has else has for at, has in enumerate(world.has)
    ]
    sources = [tuple(at for at, has in enumerate(good) if block in has) for block in range(world.num_blocks)]
    reach = next((block for block, found in enumerate(sources) if not found), world.num_blocks)
    ends = {block for block in range(1, reach) if sources[block] != sources[block - 1]} | {reach}
    best_s = world.num_blocks * COMPUTE_S
    begin = 0
    for end in sorted(ends):
        for count in {begin + max(1, round((end - begin) * part / 8)) for part in range(1, 9)} if end > begin else ():
            saved_s = (world.num_blocks - count) * COMPUTE_S
            best_s = min(best_s, saved_s + _arrival_s(rig, world, Counter(sources[:count]), best_s - saved_s))
        begin = end
    return best_s


def _arrival_s(rig: PlanRig, world: World, work: Counter[tuple[int, ...]], most_s: float) -> float:
    """By when all blocks have arrived: ``work`` counts them by the tiers that have them. ``inf``: after ``most_s``."""
    if most_s <= 0 or not _fits(work, [_read_by(rig, world, at, most_s) for at in range(len(rig.tiers))]):
        return math.inf
    low_s, high_s = 0.0, most_s
    while high_s - low_s > 1e-4:
        middle_s = (low_s + high_s) / 2
        fits = _fits(work, [_read_by(rig, world, at, middle_s) for at in range(len(rig.tiers))])
        low_s, high_s = (low_s, middle_s) if fits else (middle_s, high_s)
    return high_s


def _read_by(rig: PlanRig, world: World, at: int, time_s: float) -> float:
    """Blocks that a tier can have read."""
    tier = rig.tiers[at]
    begin_s = tier.answer_s or 0.0
    change_s, factor = world.changes[at] if world.changes else (math.inf, 1.0)
    before_s = max(min(time_s, change_s) - begin_s, 0.0)
    after_s = max(time_s - max(begin_s, change_s), 0.0)
    return before_s / tier.block_s + after_s / (tier.block_s * factor)


def _fits(work: Counter[tuple[int, ...]], capacity: list[float]) -> bool:
    """Return whether a flow exists.

    It looks for paths that free a tier by moving reads to another tier, one after the other.
    """
    left = [*capacity]
    placed: Counter[tuple[tuple[int, ...], int]] = Counter()

    def push(kind: tuple[int, ...], amount: float, seen: set[int]) -> float:
        done = 0.0
        for tier in kind:
            if tier in seen or done >= amount - 1e-9:
                continue
            seen.add(tier)
            for other in {each for each, at in placed if at == tier and placed[each, at] > 1e-9}:
                lacking = amount - done - left[tier]
                if lacking > 1e-9 and other != kind:
                    moved = push(other, min(lacking, placed[other, tier]), seen)
                    placed[other, tier] -= moved  # type: ignore[assignment]
                    left[tier] += moved
            taken = min(amount - done, left[tier])
            left[tier] -= taken
            placed[kind, tier] += taken  # type: ignore[assignment]
            done += taken
        return done

    for kind, count in work.items():
        total = 0.0
        while total < count - 1e-6:
            pushed = push(kind, count - total, set())
            if pushed < 1e-9:
                return False
            total += pushed
    return True


# ------------------------------------------------------------------------------------------------------- random worlds


def random_rig(random: Random) -> PlanRig:
    """One to four tiers, asked or with an index, from 0.02 to 20 times computing."""
    paces = []
    for _ in range(random.randint(1, 4)):
        answer_s = random.uniform(0.0, 0.2) if random.random() < 0.5 else None
        paces.append((COMPUTE_S * math.exp(random.uniform(math.log(0.02), math.log(20))), answer_s))
    return PlanRig(paces, block_bytes=random.choice([16, 256 << 10, 2 << 20]))


def random_world(random: Random, num_tiers: int, *, are_calm: bool = False) -> World:
    """Blocks on one, several or no tier. Unless they ``are_calm``, speeds change and reads fail."""
    num_blocks = round(math.exp(random.uniform(math.log(8), math.log(400))))
    has: list[frozenset[int]] = []
    for _ in range(num_tiers):
        shape = random.choice(["all", "head", "part", "none", "same"])
        begin, end = 0, num_blocks
        if shape == "head":
            end = random.randint(1, num_blocks)
        elif shape == "part":
            begin, end = sorted([random.randint(0, num_blocks), random.randint(0, num_blocks)])
        found: Iterable[int] = range(begin, end) if shape != "none" else ()
        has.append(has[-1] if shape == "same" and has else frozenset(found))
    world = World(num_blocks, has)
    if not are_calm:
        compute_s = num_blocks * COMPUTE_S
        world.changes = [
            (random.uniform(0, compute_s), math.exp(random.uniform(-3, 3)) if random.random() < 0.2 else 1.0)
            for _ in has
        ]
        world.failing = [
            frozenset(random.sample(sorted(each), 1)) if each and random.random() < 0.05 else frozenset()
            for each in has
        ]
    return world
