# SPDX-License-Identifier: Apache-2.0
"""Test ``load_policy="cost"`` with tiers whose speed jumps: no request waits too long, and choices are right while
speeds are stable."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.sizes import by_size
from tests.tiering.rig import BLOCK_BYTES, Rig, content, prefix

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext, StepWork
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.tiering.load_policy import PROBE_INTERVAL_S, BlockWorth
from kvoffload.tiering.plans import FIRST_READ

TOKENS = 10
COMPUTE_S = 1.0
"""The seconds to compute a block."""
LENGTH = 6
READ_S = (0.02, 0.3, 0.6, 1.6, 4.0, 50.0)
"""The possible seconds to read a block from a tier."""
CLEAR = 1.4
"""A tier that differs from computing by this factor is on the right side of every caution."""


class LoadPolicyMachine(RuleBasedStateMachine):
    """A machine whose tiers read their jobs one after the other, each at its current speed.

    Every chain of blocks is requested by one request, and is in one tier.
    """

    @initialize(num_tiers=st.integers(1, 2))
    def begin(self, num_tiers: int) -> None:
        policies = [OffloadPolicy.BLOCK_LEVEL] * num_tiers
        self.rig = Rig(48, policies, block_worth=BlockWorth(BLOCK_BYTES, (TOKENS,)), max_wait_s=1e6)
        self.read_s = dict.fromkeys(self.rig.tiers, 0.3)
        self.left_s = dict.fromkeys(self.rig.tiers, 0.0)
        """The time that a tier still needs for its oldest job, once it has started it."""
        self.waiting: dict[str, tuple[ReqContext, list[OffloadKey], float | None, float]] = {}
        """By id: the request, its blocks, since when it waits, and the work of the engine at that time."""
        self.awaited: dict[str, list[OffloadKey]] = {}
        """By id: the blocks that were here or on their way when the request asked last."""
        self.queued_tokens = 0
        self.ends: dict[str, set[OffloadKey] | None] = {}
        self.num_chains = 0

    # ---------------------------------------------------------------------------------------------- the world

    def pass_time(self, seconds: float) -> None:
        """Advance the clock in small steps, so that jobs end at the right times."""
        end_s = self.rig.clock() + seconds
        while True:
            due = {tier: self.left_s[tier] for tier in self.rig.tiers if tier.jobs}
            step_s = min([*due.values(), end_s - self.rig.clock()])
            self.rig.clock.advance(max(step_s, 0.0))
            for tier in due:
                self.left_s[tier] -= step_s
                if self.left_s[tier] <= 1e-9:
                    tier.finish([min(tier.jobs)])
                    self.rig.step()
                    self._begin_next(tier)
            if self.rig.clock() >= end_s - 1e-9:
                return

    def _begin_next(self, tier: FakeTier) -> None:
        if tier.jobs:
            job = tier.jobs[min(tier.jobs)]
            self.left_s[tier] = len(job.keys) * self.read_s[tier] if job.is_promotion else 0.0

    def step(self) -> None:
        self._submitting(self.rig.step)

    def _submitting(self, call: Callable[[], object]) -> None:
        """Call ``call``, and let idle tiers start the jobs that it submits."""
        idle = [tier for tier in self.rig.tiers if not tier.jobs]
        call()
        for tier in idle:
            self._begin_next(tier)

    def _finish(self, context: ReqContext) -> None:
        self._submitting(lambda: self.rig.manager.on_request_finished(context))

    # ------------------------------------------------------------------------------------------------- rules

    @rule(tier=st.integers(0, 1), read_s=st.sampled_from(READ_S))
    def jump(self, tier: int, read_s: float) -> None:
        self.read_s[self.rig.tiers[tier % len(self.rig.tiers)]] = read_s

    @rule(blocks=st.integers(2, 8), queued=st.sampled_from([0, 0, 3, 30]))
    def compute(self, blocks: int, queued: int) -> None:
        tokens = blocks * TOKENS
        for at in range(3):
            self.rig.manager.note_step(StepWork(tokens, tokens, queued * TOKENS, is_continued=at > 0))
            self.step()
            self.pass_time(blocks * COMPUTE_S)
        self.queued_tokens = queued * TOKENS

    @rule(
        tier=st.integers(0, 1),
        length=st.integers(1, LENGTH),
        in_host=st.integers(0, 3),
        ends=st.none() | st.sets(st.integers(1, LENGTH)),
    )
    def arrive(self, tier: int, length: int, in_host: int, ends: set[int] | None) -> None:
        self._arrive(self.rig.tiers[tier % len(self.rig.tiers)], length, in_host, ends)

    def _arrive(self, tier: FakeTier, length: int, in_host: int = 0, ends: set[int] | None = None) -> int | None:
        """Returns the blocks of its hit, or ``None`` if it waits."""
        self.num_chains += 1
        blocks = prefix(length, of=f"chain{self.num_chains}-")
        tier.put(blocks, map(content, blocks))
        slots = self.rig.primary.slots
        if in_host and slots.num_free + slots.num_idle >= in_host:
            writer = self.rig.start(f"writer{self.num_chains}")
            self._submitting(lambda: self.rig.store(blocks[:in_host], writer, finish=False))
            self._finish(writer)
            self.step()
        context = self.rig.start(f"r{self.num_chains}")
        self.ends[context.req_id] = None if ends is None else {blocks[min(end, length) - 1] for end in ends}
        self.waiting[context.req_id] = (context, blocks, self.rig.clock(), self.queued_tokens / TOKENS * COMPUTE_S)
        return self._ask(context.req_id)

    def _ask(self, req_id: str) -> int | None:
        context, blocks, since_s, queue_s = self.waiting[req_id]
        awaited = self.rig.primary.slots.get_all(self.awaited.get(req_id, ()))
        has_arrived = bool(awaited) and all(block is not None and block.is_ready for block in awaited)
        # The time until an engine asks again does not count, and then there may be room for more blocks.
        if since_s is None or has_arrived:
            since_s, queue_s = self.rig.clock(), self.queued_tokens / TOKENS * COMPUTE_S
            self.waiting[req_id] = (context, blocks, since_s, queue_s)
        answers = list[bool | None]()
        self._submitting(lambda: answers.extend(self.rig.ask(blocks, context, self.ends[req_id])))
        self.awaited[req_id] = blocks[: answers.index(False) if False in answers else len(answers)]
        if None in answers:
            knows_speed = ("prefill_tokens_per_second",) in self.rig.manager.get_stats()
            waited_s = self.rig.clock() - since_s
            if knows_speed and waited_s > 0:
                # Of speeds that are measured by whole steps, here without an error.
                assert waited_s <= FIRST_READ * (queue_s + len(blocks) * COMPUTE_S) + 1e-6 or self._began_unmeasured
            return None
        hit = answers.index(False) if False in answers else len(answers)
        if hit:
            self.rig.load(blocks[:hit], context)
        self._finish(context)
        del self.waiting[req_id]
        return hit

    @property
    def _began_unmeasured(self) -> bool:
        """Return whether some request started to wait before the engine's speed was known.

        Such a wait has no bound of its own.
        """
        waits = [request.wait for request in self.rig.manager._requests.values()]
        return any(wait is not None and wait.deadline_s is not None and wait.deadline_s > 1e9 for wait in waits)

    @rule(seconds=st.sampled_from([0.05, 1.0, 3.0]))
    def go_on(self, seconds: float) -> None:
        self.step()
        self.pass_time(seconds)
        for req_id in list(self.waiting):
            self._ask(req_id)

    @rule()
    def abort(self) -> None:
        if self.waiting:
            context, *_ = self.waiting.pop(next(iter(self.waiting)))
            self._finish(context)

    @rule()
    def reset(self) -> None:
        for tier in self.rig.tiers:
            tier.hangs = True
        self.rig.manager.reset_cache()
        for tier in self.rig.tiers:
            tier.hangs = False
        for req_id, (context, blocks, *_) in list(self.waiting.items()):  # chosen again at their next question
            self.waiting[req_id] = (context, blocks, None, 0.0)

    @rule(tier=st.integers(0, 1))
    def settle(self, tier: int) -> None:
        """Check that choices are right within half a minute of use at stable speeds, whatever happened earlier."""
        chosen = self.rig.tiers[tier % len(self.rig.tiers)]
        self._end_everything()
        self.compute(4, 0)
        hit: int | None = None
        for _ in range(7):
            hit = self._arrive(chosen, LENGTH)
            while hit is None:
                self.step()
                self.pass_time(0.05)
                hit = self._ask(next(iter(self.waiting)))
            self.step()
            self._end_jobs()
            self.pass_time(PROBE_INTERVAL_S)
        if self.read_s[chosen] * CLEAR < COMPUTE_S:
            assert hit == LENGTH
        elif self.read_s[chosen] > CLEAR * COMPUTE_S:
            assert hit == 0

    def _end_jobs(self) -> None:
        for _ in range(1000):
            if not any(tier.jobs for tier in self.rig.tiers):
                return
            self.pass_time(max(self.left_s.values()) + 0.01)
        raise AssertionError("jobs do not end")

    def _end_everything(self) -> None:
        """Everybody is answered, however slow the tiers are."""
        for _ in range(1000):
            if not self.waiting:
                break
            self.step()
            self.pass_time(max([1.0, *(self.left_s[tier] for tier in self.rig.tiers if tier.jobs)]))
            for req_id in list(self.waiting):
                self._ask(req_id)
        assert not self.waiting, "deferred for ever"
        self._end_jobs()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "rig"):
            self.rig.manager.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self._end_everything()
            self.rig.manager.shutdown()


TestLoadPolicyMachine = LoadPolicyMachine.TestCase
TestLoadPolicyMachine.settings = settings(
    max_examples=by_size(quick=25, thorough=300), stateful_step_count=30, deadline=None
)


def test_an_engine_that_asks_rarely_waits_no_longer_than_patience() -> None:
    """A tier becomes slow during a wait, and each time the engine asks, another block has just arrived."""
    state = LoadPolicyMachine()
    state.begin(num_tiers=1)
    state.settle(tier=0)
    state.arrive(ends=set(), in_host=0, length=4, tier=0)
    state.jump(read_s=4.0, tier=0)
    state.settle(tier=0)
    state.teardown()
