# SPDX-License-Identifier: Apache-2.0
"""Test the connector under an engine with real bytes, with any order of arrivals, aborts, steps, and ends and failures
of jobs.

The oracle is the bytes: each GPU block and each ready slot is a function of its meaning. After every rule, all blocks
that count as valid are checked, and all bookkeeping is recomputed. At the end, everything must drain.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.sizes import by_size
from tests.stateful.chaos import LENGTHS, MAX_NEW, Chaos, Setup

from kvoffload.metrics import add_stats

MAX_WAITING = 8


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="kvoffload")  # transfers refused on plan


class ConnectorMachine(RuleBasedStateMachine):
    """Hypothesis chooses: finds short sequences, and makes them shorter."""

    chaos: Chaos | None = None

    @initialize(seed=st.integers(0, 1 << 16))
    def start(self, seed: int) -> None:
        self.chaos = Chaos(Setup.random(random.Random(seed)))

    @rule(
        shapes=st.lists(
            st.tuples(st.integers(0, 1), st.sampled_from(LENGTHS), st.integers(0, MAX_NEW), st.integers(0, 2)),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, shapes: list[tuple[int, int, int, int]]) -> None:
        for shape in shapes[: MAX_WAITING - len(self.chaos.engine.waiting)]:
            self.chaos.arrive(*shape)

    @rule(n=st.integers(1, 6))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.chaos.step()

    @rule(n=st.integers(4, 20), lag=st.integers(1, 4), seed=st.integers(0, 99))
    def serve(self, n: int, lag: int, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(n):
            self.chaos.end_some_jobs(chance, lag, failures=0.1)
            self.chaos.step()

    @precondition(lambda self: self.chaos.pending())
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def end_job(self, data: st.DataObject, success: bool) -> None:
        rank, job = data.draw(st.sampled_from(self.chaos.pending()))
        self.chaos.engine.handlers[rank].run(job, success)

    @precondition(lambda self: self.chaos.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = self.chaos.live()
        self.chaos.engine.abort(live[data.draw(st.integers(0, len(live) - 1))])

    @precondition(lambda self: self.chaos.generating())
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        generating = self.chaos.generating()
        self.chaos.stop(generating[data.draw(st.integers(0, len(generating) - 1))])

    @rule(
        what=st.sampled_from(["device", "device", "device", "reset", "refuse", "fail", "preempt", "move"]),
        rank=st.integers(0, 1),
    )
    def disturb(self, what: str, rank: int) -> None:
        disturb(self.chaos, what, rank)

    @invariant()
    def judge(self) -> None:
        if self.chaos is not None:
            self.chaos.judge()

    def teardown(self) -> None:
        if self.chaos is not None:
            self.chaos.drain()


def disturb(chaos: Chaos, what: str, rank: int) -> None:
    match what:
        case "device":  # unused blocks leave the device, so that only offloaded blocks can restore them
            chaos.engine.pool.forget_all()
        case "reset":
            chaos.engine.connector.reset_cache()
        case "preempt":
            chaos.engine.preempt_all()
        case "move":
            chaos.engine.move_cached()
        case "refuse":
            chaos.engine.handlers[rank % len(chaos.engine.handlers)].refuse_next = True
        case "fail":
            chaos.engine.handlers[rank % len(chaos.engine.handlers)].fail_next_wait = True


TestConnectorMachine = ConnectorMachine.TestCase
TestConnectorMachine.settings = settings(max_examples=by_size(quick=20, thorough=200), stateful_step_count=40)


def soak(seed: int, rounds: int) -> Chaos:
    """Plain chance: long, dense runs, which a shrinking search seldom proposes."""
    chance = random.Random(seed)
    chaos = Chaos(Setup.random(chance))
    lag = chance.choice([1, 2, 5])
    for _ in range(rounds):
        if len(chaos.engine.waiting) < MAX_WAITING and chance.random() < 0.5:
            chaos.arrive(
                chance.randrange(2), chance.choice(LENGTHS), chance.randrange(MAX_NEW + 1), chance.randrange(3)
            )
        if chance.random() < 0.03 and chaos.live():
            chaos.engine.abort(chance.choice(chaos.live()))
        if chance.random() < 0.03 and chaos.generating():
            chaos.stop(chance.choice(chaos.generating()))
        if chance.random() < 0.15:
            disturb(chaos, "device", 0)
        if chance.random() < 0.15:
            disturb(chaos, "move", 0)
        if chance.random() < 0.03:
            disturb(chaos, chance.choice(["reset", "refuse", "preempt"]), chance.randrange(2))
        if chance.random() < 0.1:
            disturb(chaos, "fail", chance.randrange(2))
        chaos.end_some_jobs(chance, lag, failures=0.05)
        chaos.step()
    chaos.drain()
    return chaos


def test_soak() -> None:
    seeds = range(by_size(quick=20, thorough=120))
    runs = [soak(seed, 120) for seed in seeds]
    total = Counter(add_stats(run.engine.connector.get_stats() for run in runs))
    # The runs must have been where it hurts; otherwise passing means little.
    for sample in [
        ("hit_tokens",),
        ("lookups_deferred",),
        ("load_jobs", "ok"),
        ("load_jobs", "failed"),
        ("store_jobs", "ok"),
        ("store_jobs", "failed"),
        ("stale_jobs",),
        ("fenced_jobs",),
        ("primary_stores_refused",),
        ("primary_blocks_evicted",),
    ]:
        assert total[sample] >= 10, f"{sample} only {total[sample]} times"
    assert sum(run.final_stores for run in runs) >= 10
    assert sum(run.stopped for run in runs) >= 10
    assert sum(run.engine.num_preempted for run in runs) >= 10
    assert sum(run.orders_judged for run in runs) >= 50
    assert sum(run.final_stores_flushed for run in runs) >= 5
    assert sum(run.states_stored for run in runs) >= 10
    assert sum(run.states_loaded for run in runs) >= 10
    assert sum(run.loads_within_steps for run in runs) >= 10
    assert sum(run.engine.num_undone for run in runs) >= 3
    assert sum(run.flushed_for_copies for run in runs) >= 3
