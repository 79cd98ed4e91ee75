# SPDX-License-Identifier: Apache-2.0
"""Test ``load_policy="cost"``: the blocks that a manager reads, declines, probes and gives up, by its measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.tiering.rig import BLOCK_BYTES, Memory, Rig, content, prefix

from kvoffload.base import OffloadingManager, OffloadPolicy, ReqContext, StepWork, make_offload_key
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.lost_blocks import Loss
from kvoffload.miss import Miss
from kvoffload.testing import FakeTier
from kvoffload.testing.clock import ManualClock
from kvoffload.tiering import load_policy, plans
from kvoffload.tiering.load_policy import BlockWorth, LoadPlanner
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.plans import SoFar
from kvoffload.tiering.segments import Place, Segment

TOKENS = 10
"""The number of tokens in a block."""


class Machine(Rig):
    """A manager over a tier. Once ``compute`` was called, a block takes a second to compute, and ``read_s`` to read."""

    def __init__(self, num_blocks: int = 64, num_tiers: int = 1, **options: Any) -> None:
        policies = [OffloadPolicy.BLOCK_LEVEL] * num_tiers
        worth = options.pop("block_worth", BlockWorth(BLOCK_BYTES, (TOKENS,)))
        super().__init__(num_blocks, policies, block_worth=worth, **options)
        self.read_s = 0.1
        self._started = 0

    def compute(self, blocks: int = 4) -> None:
        """Make steps in which a prompt is computed, so that the speed is known."""
        tokens = blocks * TOKENS
        for at in range(3):
            self.manager.note_step(StepWork(tokens, tokens, 0, is_continued=at > 0))
            self.clock.advance(blocks)
        self.manager.note_step(StepWork())

    def read(self, tier: int = 0) -> int:
        """Ends the tier's oldest job after the time that its blocks take. Returns how many there are."""
        job_id = min(self.tiers[tier].jobs)
        num_blocks = len(self.tiers[tier].jobs[job_id].keys)
        self.clock.advance(num_blocks * self.read_s)
        self.tiers[tier].finish([job_id])
        self.manager.on_schedule_end()
        self.manager.check_invariants()
        return num_blocks

    def serve(self, num_blocks: int, of: str) -> int:
        """Serve a request for a prefix until it is answered, and make its loads.

        Returns the number of blocks in its hit.
        """
        self._started += 1
        context = self.start(f"served-{self._started}")
        blocks = prefix(num_blocks, of=of)
        while None in (answers := self.ask(blocks, context)):
            self.step()
            for tier in range(len(self.tiers)):
                while self.tiers[tier].jobs:
                    self.read(tier)
        hit = answers.index(False) if False in answers else len(answers)
        if hit:
            self.load(blocks[:hit], context)
        self.manager.on_request_finished(context)
        self.manager.check_invariants()
        return hit

    def learn(self, read_s: float) -> None:
        """Let the manager learn that the tier reads a block in ``read_s``, and that the engine computes one in a
        second."""
        self.read_s = read_s
        self.below(prefix(3, of="learnt"))
        assert self.serve(3, of="learnt") == 3
        self.compute()

    def declined(self) -> dict[str, float]:
        stats = self.manager.get_stats()
        return {sample[2]: count for sample, count in stats.items() if sample[0] == "tier_declined_blocks"}


def test_before_anything_is_known_every_hit_is_loaded() -> None:
    machine = Machine()
    machine.below(prefix(20, of="a"))
    assert machine.serve(20, of="a") == 20
    assert machine.declined() == {}


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not() -> None:
    fast, slow = Machine(), Machine()
    fast.learn(read_s=0.5)
    slow.learn(read_s=2.0)
    for machine in (fast, slow):
        machine.below(prefix(8, of="a"))
    assert fast.serve(8, of="a") == 8
    assert slow.serve(8, of="a") == 0
    assert slow.declined() == {"slow": 8}
    assert slow.manager.get_stats()["tier_read_bytes_per_second", "tier0"] == pytest.approx(BLOCK_BYTES / 2.0)
    assert slow.manager.get_stats()["prefill_tokens_per_second",] == pytest.approx(TOKENS)


@pytest.mark.parametrize(("expected_block_s", "loaded"), [(0.5, 6), (2.0, 0)])
def test_what_the_user_expects_decides_until_it_is_measured(expected_block_s: float, loaded: int) -> None:
    worth = BlockWorth(BLOCK_BYTES, (TOKENS,), TOKENS / 1.0, (None, BLOCK_BYTES / expected_block_s))
    machine = Machine(num_tiers=3, block_worth=worth)
    machine.below(prefix(6, of="a"), tier=1)
    assert machine.serve(6, of="a") == loaded
    machine.below(prefix(6, of="b"), tier=2)
    assert machine.serve(6, of="b") == 6, "nothing is known of the last tier"


def test_what_was_measured_replaces_what_the_user_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_policy, "PROBE_BYTES", 4 * BLOCK_BYTES)
    worth = BlockWorth(BLOCK_BYTES, (TOKENS,), TOKENS / 1.5, (BLOCK_BYTES / 2.0,))
    machine = Machine(block_worth=worth)
    machine.below(prefix(8, of="a"))
    assert machine.serve(8, of="a") == 0
    machine.step()
    while machine.tiers[0].jobs:
        machine.read()  # the probe
    machine.below(prefix(8, of="b"))
    assert machine.serve(8, of="b") == 8
    machine.compute()
    assert machine.manager.get_stats()["prefill_tokens_per_second",] == pytest.approx(TOKENS)


def test_slow_blocks_before_many_in_host_memory_are_loaded() -> None:
    machine = Machine()
    machine.learn(read_s=2.0)
    blocks = prefix(10, of="a")
    machine.below(blocks[:2])
    context = machine.start("writer")
    machine.store(blocks[2:], context)
    assert machine.serve(10, of="a") == 10


def test_what_was_declined_stays_declined_while_the_engines_own_cache_grows_and_shrinks() -> None:
    """So the request begins a block later, or earlier. Once that was a new range, which no plan held back."""
    machine = Machine(num_tiers=2)
    machine.learn(read_s=0.1)
    machine.below(prefix(3, of="slow"), tier=1)
    machine.read_s = 5.0
    assert machine.serve(3, of="slow") == 3, "nothing is known of the tier"
    machine.compute()
    blocks = prefix(40, of="a")
    machine.below(blocks[:10])
    machine.below(blocks[10:], tier=1)
    request = machine.start("r")
    assert machine.ask(blocks, request) == [None] * 10 + [False]
    machine.step()
    for begin in (1, 2, 0, 3):
        assert machine.ask(blocks[begin:], request) == [None] * (10 - begin) + [False]
        machine.step()
    assert [len(job.keys) for job in machine.tiers[1].jobs.values()] == [1], "a probe, for which nobody waits"
    machine.read_s = 0.1
    num_read = 0
    while machine.tier.jobs:
        num_read += machine.read()
    assert num_read == 10
    assert machine.ask(blocks[2:], request) == [True] * 8 + [False]
    assert machine.ask(blocks[12:], request) == [False], "the engine has more than was to be loaded"


def test_what_is_queued_before_it_counts() -> None:
    machine = Machine()
    machine.learn(read_s=0.5)
    machine.below(prefix(8, of="a"))
    machine.below(prefix(8, of="b"))
    machine.below(prefix(8, of="c"))
    first, second, third = (machine.start(name) for name in ("first", "second", "third"))
    assert machine.ask(prefix(8, of="a"), first) == [None] * 8
    # Eight blocks before its own: ready after 8 seconds (and caution), when computing has ended as well.
    assert machine.ask(prefix(8, of="b"), second) == [False]
    assert machine.declined() == {"busy": 8}
    machine.manager.note_step(StepWork(TOKENS, TOKENS, queued_tokens=20 * TOKENS))
    assert machine.ask(prefix(8, of="c"), third) == [None] * 8, "a busy engine makes loading cheaper"


@pytest.mark.parametrize(("num_blocks", "is_worth_waiting"), [(5, True), (30, False)])
def test_nobody_waits_for_little(num_blocks: int, is_worth_waiting: bool) -> None:
    machine = Machine()
    machine.learn(read_s=1.5)
    machine.below(prefix(num_blocks, of="a"))
    machine.manager.note_step(StepWork(TOKENS, TOKENS, queued_tokens=3 * TOKENS))
    context = machine.start("r")
    # The first two come while the engine is busy with other prompts for three seconds, which saves 1.7 s.
    answers = machine.ask(prefix(num_blocks, of="a"), context)
    assert answers == ([None, None, False] if is_worth_waiting else [False])


def test_blocks_that_nobody_may_wait_for_are_no_reason_not_to_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(num_tiers=2)
    machine.learn(read_s=0.1)
    monkeypatch.setattr(load_policy, "PROBE_BYTES", BLOCK_BYTES)
    blocks = prefix(300, of="a")
    machine.below(blocks[:2], 0)
    machine.below(blocks[2:], 1)
    # Of the second tier, which was never measured, one block is read, to measure it.
    assert machine.ask(blocks, machine.start("r")) == [None] * 3 + [False]


def test_what_is_there_is_used_although_the_rest_is_not_worth_waiting_for() -> None:
    machine = Machine()
    machine.learn(read_s=1.5)
    machine.below(prefix(30, of="a"))
    context = machine.start("r")
    machine.store(prefix(2, of="a"), context)
    machine.manager.note_step(StepWork(TOKENS, TOKENS, queued_tokens=3 * TOKENS))
    assert machine.ask(prefix(30, of="a"), context) == [True, True, False]


def test_a_request_counts_its_declined_blocks_once() -> None:
    machine = Machine()
    machine.learn(read_s=2.0)
    machine.below(prefix(8, of="a"))
    context = machine.start("r")
    for _ in range(5):
        assert machine.ask(prefix(8, of="a"), context) == [False]
        machine.step()
    assert machine.declined() == {"slow": 8}


def test_a_lost_wait_ends_early_and_uses_what_is_there() -> None:
    """It once went on until 1.25 times computing everything had passed."""
    machine = Machine(max_wait_s=100.0)
    machine.learn(read_s=0.25)
    machine.below(prefix(12, of="a"))
    context = machine.start("r")
    assert machine.ask(prefix(12, of="a"), context) == [None] * 12
    machine.step()
    assert {len(job.keys) for job in machine.tier.jobs.values()} == {1}, "what the request can afford in vain"
    for _ in range(4):
        machine.read()
    assert machine.ask(prefix(12, of="a"), context) == [True] * 4 + [None] * 8
    machine.clock.advance(0.3)  # a short delay is not a reason
    assert machine.ask(prefix(12, of="a"), context) == [True] * 4 + [None] * 8
    machine.clock.advance(0.6)  # as late as it is now, the rest would take longer than computing
    for _ in range(2):
        assert machine.ask(prefix(12, of="a"), context) == [True] * 4 + [False]
        machine.step()
    assert machine.declined() == {"late": 8}
    machine.load(prefix(4, of="a"), context)
    machine.finish()
    machine.manager.on_request_finished(context)


def test_blocks_that_no_tier_has_are_not_late() -> None:
    """Of a prompt of 100 blocks 12 were found, and all of them chosen. Once 88 were counted and explained as late."""
    machine = Machine(max_wait_s=1000.0)
    machine.learn(read_s=0.25)
    blocks = prefix(100, of="a")
    machine.below(blocks[:12])
    context = machine.start("r")
    assert machine.ask(blocks, context) == [None] * 12 + [False]
    machine.step()
    while machine.tier.jobs:
        machine.read()
    machine.clock.advance(plans.FIRST_READ * 12)
    for _ in range(2):
        assert machine.ask(blocks, context) == [True] * 12 + [False]
        machine.step()
    assert machine.declined() == {}
    assert machine.manager.explain(blocks[12:], context) == [Loss(Miss.NEW)] * 88
    machine.load(blocks[:12], context)


def test_each_block_that_is_late_counts_once_however_many_prefixes_a_request_asks_for() -> None:
    """The windows of a hybrid model are ranges of one group. The end of one must not overwrite the end of another."""
    machine = Machine(max_wait_s=1000.0)
    machine.learn(read_s=0.25)
    context, ranges = machine.start("r"), [prefix(4, of="a"), prefix(3, of="b")]
    for blocks in ranges:
        machine.below(blocks)
        assert machine.ask(blocks, context) == [None] * len(blocks)
    machine.step()
    machine.clock.advance(plans.FIRST_READ * 10)
    for _ in range(3):
        for blocks in ranges:
            assert machine.ask(blocks, context) == [False]
        machine.step()
    assert machine.declined() == {"late": 7}
    machine.finish()


@pytest.mark.parametrize("arrives", [False, True])
def test_a_busy_engine_makes_nothing_late(arrives: bool) -> None:
    """It asked once, when the tier had to find out, and then not before the deadline. The tier has known for long."""
    machine = Machine(max_wait_s=1000.0)
    machine.learn(read_s=0.25)
    blocks = prefix(4, of="a")
    machine.below(blocks)
    machine.tier.answers.update(dict.fromkeys(blocks))
    context = machine.start("r")
    assert machine.ask(blocks, context) == [None] * 4
    machine.step()
    machine.clock.advance(0.1)
    if arrives:
        machine.tier.answers.clear()
    for _ in range(20):
        machine.step()
        machine.clock.advance(1.0)
    machine.tier.answers.clear()
    assert machine.ask(blocks, context) == ([None] * 4 if arrives else [False])
    assert machine.declined() == ({} if arrives else {"late": 4})
    machine.step()
    if arrives:
        while machine.tier.jobs:
            machine.read()
        assert machine.ask(blocks, context) == [True] * 4
        machine.load(blocks, context)


def test_a_refused_probe_is_no_reason_of_the_requests_own() -> None:
    machine = Machine()
    machine.learn(read_s=2.0)
    machine.below(prefix(4, of="a"))
    machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    machine.write(prefix(64, of="busy"), machine.start("writer"))  # leaves no slot to probe with
    context = machine.start("r")
    assert machine.ask(prefix(4, of="a"), context) == [False]
    assert machine.manager.explain(prefix(1, of="a"), context) == [Loss(Miss.DECLINED)]
    assert not machine.tier.jobs


def test_a_tier_that_is_late_is_not_given_more() -> None:
    machine = Machine()
    machine.learn(read_s=0.1)
    machine.below(prefix(4, of="a"))
    machine.below(prefix(4, of="b"))
    assert machine.ask(prefix(4, of="a"), machine.start("first")) == [None] * 4
    machine.step()
    machine.clock.advance(30.0)  # of 0.4 s
    assert machine.ask(prefix(4, of="b"), machine.start("second")) == [False]
    assert machine.declined() == {"busy": 4}


def test_a_tier_with_one_read_that_hangs_is_loaded_from_again() -> None:
    """Its queue looked longer with every minute, and it was not probed."""
    machine = Machine()
    machine.learn(read_s=0.1)
    hung_keys = prefix(4, of="hung")
    machine.below(hung_keys)
    first = machine.start("first")
    assert machine.ask(hung_keys, first) == [None] * 4
    machine.step()
    hung = set(machine.tier.jobs)
    machine.manager.on_request_finished(first)
    machine.clock.advance(31.0)
    for job in machine.tier.jobs.values():
        job.is_overdue = True

    def read_others() -> None:
        for job_id in sorted(machine.tier.jobs.keys() - hung):
            machine.clock.advance(len(machine.tier.jobs[job_id].keys) * machine.read_s)
            machine.tier.finish([job_id])
            machine.step()
            machine.manager.check_invariants()

    for name in ("a", "b", "c"):
        machine.below(prefix(4, of=name))
        assert machine.ask(prefix(4, of=name), machine.start(name)) == [None] * 4
        machine.step()
        read_others()
        assert machine.ask(hung_keys, machine.start(f"hung-{name}")) == [False], "no request waits for what hangs"
        machine.clock.advance(60.0)
    speed = machine.manager.get_stats()["tier_read_bytes_per_second", "tier0"]
    machine.tier.finish(sorted(hung))
    machine.step()
    machine.manager.check_invariants()
    stats = machine.manager.get_stats()
    assert stats["tier_read_queue_bytes", "tier0"] == 0
    assert stats["tier_read_bytes_per_second", "tier0"] == speed, "an overdue read says nothing of the speed"
    assert machine.ask(hung_keys, machine.start("last")) == [True] * 4


def test_of_a_tier_that_stands_still_one_request_in_half_a_minute_waits() -> None:
    machine = Machine()
    machine.learn(read_s=0.1)
    tried, begun_s = 0, dict[int, float]()
    for number in range(40):
        for job_id, job in machine.tier.jobs.items():
            job.is_overdue = machine.clock() - begun_s.setdefault(job_id, machine.clock()) > 30.0
        machine.below(prefix(4, of=f"n{number}-"))
        context = machine.start(f"n{number}")
        tried += machine.ask(prefix(4, of=f"n{number}-"), context)[0] is None
        machine.step()
        machine.manager.on_request_finished(context)
        machine.manager.check_invariants()
        machine.clock.advance(4.0)
    assert 4 <= tried <= 6, "in 160 s; the tier's own deadline ends it"
    while machine.tier.jobs:
        machine.read()
    machine.below(prefix(4, of="after"))
    assert machine.serve(4, of="after") == 4


def test_jobs_of_a_slow_tier_that_reads_on_are_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_policy, "LEAST_PORTION_BYTES", BLOCK_BYTES)
    machine = Machine()
    machine.learn(read_s=0.1)
    machine.below(prefix(8, of="a"))
    assert machine.ask(prefix(8, of="a"), machine.start("first")) == [None] * 8
    machine.step()
    machine.read_s = 20.0
    for left in range(7, 0, -1):
        assert machine.read() == 1
        machine.clock.advance(5.0)
        machine.below(prefix(4, of=f"b{left}-"))
        assert machine.ask(prefix(4, of=f"b{left}-"), machine.start(f"b{left}")) == [False]
        assert machine.manager.get_stats()["tier_read_queue_bytes", "tier0"] >= left * BLOCK_BYTES


def test_an_unmeasured_tier_is_read_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_policy, "PROBE_BYTES", 5 * BLOCK_BYTES)
    machine = Machine()
    machine.below(prefix(9, of="a"))
    machine.below(prefix(9, of="b"))
    assert machine.ask(prefix(9, of="a"), machine.start("first")) == [None] * 5 + [False]
    assert machine.ask(prefix(9, of="b"), machine.start("second")) == [False]
    assert machine.declined() == {"unmeasured": 4 + 9}


def test_jobs_and_probes_of_a_slow_tier_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_policy, "LEAST_PORTION_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(load_policy, "PROBE_BYTES", 20 * BLOCK_BYTES)
    machine = Machine(num_blocks=256)
    machine.learn(read_s=0.02)
    machine.below(prefix(12, of="a"))
    assert machine.ask(prefix(12, of="a"), machine.start("r")) == [None] * 12
    machine.step()
    assert [len(job.keys) for job in machine.tier.jobs.values()] == [5, 5, 2], "a tenth of a second each"
    while machine.tier.jobs:
        machine.read()
    machine.read_s = 2.0
    machine.below(prefix(1, of="slow"))
    for number in range(4):
        machine.below(prefix(3, of=f"slow-{number}"))
        machine.serve(3, of=f"slow-{number}")
        machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    machine.step()
    while machine.tier.jobs:
        machine.read()
    machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    machine.below(prefix(50, of="b"))
    assert machine.ask(prefix(50, of="b"), machine.start("s")) == [False]
    machine.step()
    assert sum(len(job.keys) for job in machine.tier.jobs.values()) == 1, "a second, and one block at least"


def test_a_tier_that_recovered_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_policy, "PROBE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(load_policy, "PROBE_S", 4.0)
    machine = Machine()
    machine.below(prefix(2, of="learnt"))
    machine.read_s = 2.0
    machine.serve(2, of="learnt")
    machine.compute()
    machine.read_s = 0.1
    hits = []
    for number in range(8):
        machine.below(prefix(6, of=f"p{number}"))
        hits.append(machine.serve(6, of=f"p{number}"))
        machine.step()
        while machine.tier.jobs:  # the probe, for which nobody waits
            assert machine.read() == 2
        machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    assert hits[0] == 0
    assert hits[-1] == 6


@pytest.mark.parametrize(("num_on_first", "num_on_second", "hit"), [(6, 10, 6), (2, 20, 0)])
def test_a_lower_tier_that_recovered_is_found_again_behind_blocks_of_another(
    num_on_first: int, num_on_second: int, hit: int
) -> None:
    """Only the tier of the first declined block was probed, and none while the request waited."""
    machine = Machine(num_tiers=2)
    machine.compute()
    for tier, read_s in ((0, 0.1 if hit else 3.0), (1, 20.0)):
        machine.read_s = read_s
        machine.below(prefix(3, of=f"learnt{tier}"), tier)
        machine.serve(3, of=f"learnt{tier}")
    machine.read_s = 0.1
    num_blocks = num_on_first + num_on_second
    hits = []
    for number in range(8):
        machine.clock.advance(load_policy.PROBE_INTERVAL_S)
        blocks = prefix(num_blocks, of=f"r{number}-")
        machine.below(blocks[:num_on_first], 0)
        machine.below(blocks[num_on_first:], 1)
        hits.append(machine.serve(num_blocks, of=f"r{number}-"))
        machine.step()
        probed = [len(job.keys) for tier in machine.tiers for job in tier.jobs.values()]
        assert all(num <= max(1, int(load_policy.PROBE_S / 0.1)) for num in probed)
        for tier in (0, 1):
            while machine.tiers[tier].jobs:
                machine.read(tier)
    assert hits[0] == hit
    assert hits[-1] == num_blocks


def test_a_request_that_waits_probes_another_tier_once() -> None:
    machine = Machine(num_tiers=2)
    machine.compute()
    for tier, read_s in ((0, 0.1), (1, 20.0)):
        machine.read_s = read_s
        machine.below(prefix(3, of=f"learnt{tier}"), tier)
        machine.serve(3, of=f"learnt{tier}")
    machine.read_s = 0.1
    machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    blocks = prefix(9, of="a")
    machine.below(blocks[:4], 0)
    machine.below(blocks[4:], 1)
    context = machine.start("r")
    for _ in range(3):
        assert machine.ask(blocks, context) == [None] * 4 + [False]
        machine.step()
        machine.manager.check_invariants()
        assert [job.keys for job in machine.tiers[1].jobs.values()] == [(blocks[4],)]
    while machine.tiers[0].jobs:
        machine.read(0)
    assert machine.ask(blocks, context) == [True] * 4 + [False]
    machine.load(blocks[:4], context)
    machine.finish()
    machine.manager.on_request_finished(context)
    assert machine.ask(blocks[:5], machine.start("next")) == [True] * 5


def test_each_tier_has_its_own_speed() -> None:
    machine = Machine(num_tiers=2)
    machine.compute()
    blocks = prefix(12, of="a")
    machine.below(prefix(3, of="slow"), 0)
    machine.read_s = 3.0
    assert machine.serve(3, of="slow") == 3
    machine.below(prefix(3, of="fast"), 1)
    machine.read_s = 0.1
    assert machine.serve(3, of="fast") == 3
    machine.below(blocks[:6], 1)
    machine.below(blocks[6:], 0)
    assert machine.serve(12, of="a") == 6
    assert machine.declined() == {"slow": 6}


@pytest.mark.parametrize(("finding_out", "is_loaded"), [(0, True), (1, False)])
def test_a_block_that_a_tier_must_find_out_about_is_weighed_as_that_tiers(finding_out: int, is_loaded: bool) -> None:
    """If it were weighed like a block of the last tier, a remote tier before a slow disk would no longer be read."""
    machine = Machine(num_tiers=2)
    machine.compute()
    for tier, read_s in ((0, 0.1), (1, 3.0)):
        machine.below(prefix(3, of=f"learnt{tier}"), tier)
        machine.read_s = read_s
        assert machine.serve(3, of=f"learnt{tier}") == 3
    blocks = prefix(12, of="a")
    machine.below(blocks, finding_out)
    machine.tiers[finding_out].answers.update(dict.fromkeys(blocks))
    assert machine.ask(blocks, machine.start("r"))[0] is (None if is_loaded else False)


def test_blocks_that_a_tier_must_find_out_about_are_not_counted_as_declined() -> None:
    """A store that must be asked has no answer when a prompt is new, so this includes blocks that no tier contains."""
    machine = Machine(block_worth=BlockWorth(BLOCK_BYTES, (TOKENS,), 1e6, (1.0,)))
    for number in range(3):
        blocks, context = prefix(8, of=f"a{number}-"), machine.start(f"r{number}")
        machine.tier.answers |= dict.fromkeys(blocks)
        assert machine.ask(blocks, context) == [False]
        assert machine.manager.explain(blocks, context) == [Loss(Miss.SLOW_ANSWER)] * 8
        machine.step()
        machine.tier.answers |= dict.fromkeys(blocks, False)
    assert machine.declined() == {}
    machine.below(prefix(4, of="b"))
    machine.tier.answers |= dict.fromkeys(prefix(8, of="b")[4:])
    later = machine.start("later")
    assert machine.ask(prefix(8, of="b"), later) == [False]
    assert machine.manager.explain(prefix(8, of="b"), later) == [Loss(Miss.DECLINED)] * 4 + [Loss(Miss.NEW)] * 4
    assert machine.declined() == {"slow": 4}


def test_nothing_is_waited_for_after_the_blocks_that_are_worth_loading() -> None:
    """A question about a declined block must not start a wait whose claims last until the request's time limit has
    passed."""
    machine = Machine(block_worth=BlockWorth(BLOCK_BYTES, (TOKENS,), 1e6, (1.0,)))
    blocks, context = prefix(6), machine.start("r")
    machine.store(blocks[:4], machine.start("writer"))
    machine.tier.answers |= dict.fromkeys(blocks[4:])
    assert machine.ask(blocks, context) == [True] * 4 + [False]
    machine.step()
    assert machine.manager.get_stats()["claimed_blocks",] == 0
    machine.clock.advance(20.0)  # the engine lacks room for it
    machine.step()
    machine.tier.answers.clear()
    machine.manager.note_step(StepWork(TOKENS, TOKENS, queued_tokens=10**9))  # any load is worth it now
    machine.below(blocks[4:])
    assert machine.ask(blocks, context) == [True] * 4 + [None] * 2, "it has its patience"


def test_real_waits_are_compared_with_expected_ones() -> None:
    machine = Machine()
    machine.learn(read_s=0.5)
    for name, read_s in (("a", 0.5), ("b", 0.48), ("c", 0.9)):
        machine.read_s = read_s
        machine.below(prefix(4, of=name))
        machine.serve(4, of=name)
    stats = machine.manager.get_stats()
    # Two seconds are expected.
    assert stats["promotion_wait_ratio", "count", "1.0"] == 2
    assert stats["promotion_wait_ratio", "count", "2.0"] == 1


def twins(read_s: float, num_blocks: int) -> list[tuple[Machine, ReqContext]]:
    """Two managers with the same past, and a request of each for ``num_blocks`` blocks of a tier."""
    made = []
    for _ in range(2):
        machine = Machine()
        machine.learn(read_s)
        machine.below(prefix(num_blocks, of="a"))
        made.append((machine, machine.start("r")))
    return made


@pytest.mark.parametrize("read_s", [0.1, 0.95, 2.0])
def test_a_lookup_is_a_prefix_of_one_block(read_s: float) -> None:
    single, batch = twins(read_s, 4)
    for key in prefix(6, of="a"):
        assert [single[0].manager.lookup(key, single[1])] == batch[0].ask([key], batch[1])
        assert single[0].declined() == batch[0].declined()
    for machine, _ in (single, batch):
        machine.step()
    assert single[0].tier.log == batch[0].tier.log


def test_where_everything_is_worth_loading_a_prefix_is_the_loop_of_its_blocks() -> None:
    looped, batch = twins(0.001, 6)
    asked = prefix(8, of="a")
    found = OffloadingManager.lookup_prefix(looped[0].manager, asked, looped[1])
    assert found == batch[0].ask(asked, batch[1]) == [None] * 6 + [False]
    for machine, _ in (looped, batch):
        machine.step()
    assert looped[0].tier.log == batch[0].tier.log


def test_blocks_weighed_together_may_be_fewer_than_one_by_one() -> None:
    """Four blocks of a fast tier before sixty of a slow one save less than a tenth of the whole. One by one, the first
    is worth a wait, and a request that waits is not weighed again."""
    answers = []
    for ask in (OffloadingManager.lookup_prefix, TieringOffloadingManager.lookup_prefix):
        machine = Machine(num_tiers=2, num_blocks=128)
        machine.compute()
        for tier, read_s in ((0, 0.1), (1, 20.0)):
            machine.read_s = read_s
            machine.below(prefix(3, of=f"learnt{tier}"), tier)
            machine.serve(3, of=f"learnt{tier}")
        blocks = prefix(64, of="a")
        machine.below(blocks[:4], 0)
        machine.below(blocks[4:], 1)
        answers.append(ask(machine.manager, blocks, machine.start("r")))
    assert answers == [[None] * 64, [False]]


def test_blocks_weighed_together_may_be_more_than_one_by_one() -> None:
    """Two slow blocks before twenty in host memory."""
    answers = []
    for ask in (OffloadingManager.lookup_prefix, TieringOffloadingManager.lookup_prefix):
        machine = Machine()
        machine.learn(read_s=2.0)
        blocks = prefix(22, of="a")
        machine.below(blocks[:2])
        machine.store(blocks[2:], machine.start("writer"))
        answers.append(ask(machine.manager, blocks, machine.start("r")))
    assert answers == [[False], [None] * 2 + [True] * 20]


def test_lookups_of_single_blocks_are_weighed_too() -> None:
    machine = Machine()
    machine.learn(read_s=2.0)
    machine.below(prefix(1, of="a"))
    assert machine.manager.lookup(prefix(1, of="a")[0], machine.start("r")) is False


def test_blocks_of_groups_that_are_not_weighed_are_loaded() -> None:
    machine = Machine()
    machine.learn(read_s=2.0)
    window = [key[:-1] + b"\x01" for key in prefix(4, of="w")]
    machine.below(window)  # type: ignore[arg-type]
    assert machine.ask(window, machine.start("r")) == [None] * 4  # type: ignore[arg-type]


@pytest.mark.parametrize("num_below", [0, 4])
def test_a_state_is_waited_for_no_longer_than_computing_its_hit(num_below: int) -> None:
    """Nothing was planned for a request that waited for no block of attention."""
    machine = Machine(block_worth=BlockWorth(BLOCK_BYTES, (TOKENS, 0)), max_wait_s=100.0)
    machine.learn(read_s=2.0)
    blocks, state = prefix(4 + num_below, of="a"), [make_offload_key(b"state", 1)]
    machine.below([*blocks[4:], *state])
    machine.store(blocks[:4], machine.start("writer"))
    context = machine.start("r")
    attention = [True] * 4 + [False] * bool(num_below)
    began_s = machine.clock()
    while True:
        assert machine.ask(blocks, context) == attention
        answers = machine.ask(state, context)
        if answers != [None]:
            break
        machine.step()
        machine.manager.check_invariants()
        machine.clock.advance(0.1)
    assert answers == [False]
    risk_s = plans.RISK_SHARE * len(blocks) + plans.RISK_S
    assert machine.clock() - began_s == pytest.approx(4 + risk_s, abs=0.2)
    assert machine.ask(blocks, context) == attention
    assert machine.declined()["late"] == 1
    while machine.tier.jobs:
        machine.read()
    assert machine.ask(state, context) == [False], "its answer stands"
    machine.manager.on_request_finished(context)
    later = machine.start("later")
    assert machine.ask(blocks[:4], later) == [True] * 4
    assert machine.ask(state, later) == [True]


def test_a_reset_forgets_what_was_queued() -> None:
    machine = Machine()
    machine.learn(read_s=0.1)
    machine.below(prefix(4, of="a"))
    context = ReqContext("r")
    machine.manager.on_new_request(context)
    assert machine.ask(prefix(4, of="a"), context) == [None] * 4
    machine.manager.reset_cache()
    machine.manager.check_invariants()
    assert machine.manager.get_stats()["tier_read_queue_bytes", "tier0"] == 0


# ----------------------------------------------------------------------------------------------------- too slow a tier


def test_a_tier_that_is_never_worth_reading_is_reported_once_and_written_to(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.learn(read_s=5.0)
    for name in "abc":
        machine.below(prefix(4, of=name))
        assert machine.serve(4, of=name) == 0
        machine.step()
        while machine.tier.jobs:
            machine.read()  # the probe
        machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    assert machine.manager.get_stats()["tier_too_slow", "tier0"] == 1
    machine.store(prefix(2, of="s"), machine.start("writer"))
    assert machine.tier.calls("submit_store")[-1].keys == tuple(prefix(2, of="s"))
    machine.read_s = 0.1
    for name in "defg":
        machine.below(prefix(4, of=name))
        machine.serve(4, of=name)
        machine.step()
        while machine.tier.jobs:
            machine.read()
        machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    assert machine.manager.get_stats()["tier_too_slow", "tier0"] == 0
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("load_policy")]
    assert len(messages) == 1, messages


# ---------------------------------------------------------------------------------------- where a part of a hit may end


@pytest.mark.parametrize(("ends", "num_loaded"), [((1, 5), 1), ((3, 5), 3), ((2, 5), 2), ((5,), 0)])
def test_a_part_of_a_hit_ends_at_a_state(ends: tuple[int, ...], num_loaded: int) -> None:
    machine = Machine()
    machine.learn(read_s=1.55)
    blocks = prefix(5, of="a")
    machine.below(blocks)
    machine.manager.note_step(StepWork(TOKENS, TOKENS, queued_tokens=3 * TOKENS))
    context = machine.start("r")
    useful = {blocks[end - 1] for end in ends}
    for _ in range(2):  # while it waits, its choice does not change
        assert machine.ask(blocks, context, useful) == [None] * num_loaded + [False]
        machine.step()


def test_blocks_in_host_memory_behind_the_last_state_are_not_declined() -> None:
    machine = Machine()
    machine.learn(read_s=2.0)
    blocks = prefix(10, of="a")
    machine.below(blocks)
    context = machine.start("writer")
    machine.store(blocks[:4], context)
    request = machine.start("r")
    assert machine.ask(blocks, request, {blocks[2], blocks[9]}) == [True] * 4 + [False]
    assert machine.declined() == {"slow": 6}


def test_blocks_in_host_memory_before_the_first_state_are_no_reason_not_to_load() -> None:
    """They would save nothing alone."""
    machine = Machine()
    machine.learn(read_s=1.0)
    blocks = prefix(10, of="a")
    machine.below(blocks)
    machine.store(blocks[:4], machine.start("writer"))
    request = machine.start("r")
    assert machine.ask(blocks, request, {blocks[9]}) == [True] * 4 + [None] * 6


def test_a_tier_whose_first_state_lies_far_back_is_measured_by_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_policy, "PROBE_BYTES", 4 * BLOCK_BYTES)
    machine = Machine()
    machine.compute()
    blocks = prefix(12, of="a")
    machine.below(blocks)
    context = machine.start("r")
    assert machine.ask(blocks, context, {blocks[11]}) == [False], "four blocks alone are of no use"
    machine.step()
    assert machine.read() == 4
    later = machine.start("later")
    assert machine.ask(blocks, later, {blocks[11]}) == [True] * 4 + [None] * 8


def test_only_blocks_of_the_declined_prefix_are_read_to_measure_their_tier() -> None:
    """Another group was asked for after it in the same step, and its blocks were taken for the declined ones."""
    machine = Machine(block_worth=BlockWorth(BLOCK_BYTES, (TOKENS, 0)))
    machine.learn(read_s=2.0)
    machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    attention, states = prefix(4, of="a"), [make_offload_key(b"state%d" % at, 1) for at in range(4)]
    machine.below(attention)
    writer, context = machine.start("writer"), machine.start("r")
    busy = machine.write(prefix(64, of="busy"), writer)
    assert machine.ask(attention, context) == [False], "and no slot is left to measure the tier with"
    machine.manager.complete_store(busy, writer)
    num_reads = len(machine.tier.calls("submit_load"))
    for tier in machine.tiers:
        tier.finish()  # its cascade, so that slots are idle again
    assert machine.ask(states, context) == [False], "which no tier has"
    machine.step()
    assert machine.tier.calls("submit_load")[num_reads:] == []


def test_measuring_a_tier_evicts_nothing_that_the_request_was_just_answered() -> None:
    machine = Machine(num_blocks=8)
    machine.learn(read_s=2.0)
    blocks, others = prefix(6, of="a"), prefix(3, of="q")
    machine.store(blocks[:2], machine.start("writer"))
    machine.store(others, machine.start("other"))
    machine.below(blocks[2:])
    machine.manager.touch([*prefix(3, of="learnt"), *others])  # the hit's blocks are the least recently used ones
    machine.clock.advance(load_policy.PROBE_INTERVAL_S)
    context = machine.start("r")
    assert machine.ask(blocks, context) == [True, True, False]
    machine.load(blocks[:2], context)
    machine.step()
    assert machine.tier.jobs, "the tier is measured all the same"


def test_always_loads_all_and_measures_all_the_same() -> None:
    machine = Machine(block_worth=None)
    machine.learn(read_s=2.0)
    machine.below(prefix(8, of="a"))
    assert machine.serve(8, of="a") == 8
    stats = machine.manager.get_stats()
    assert stats["tier_read_bytes_per_second", "tier0"] == pytest.approx(BLOCK_BYTES / 2.0)
    assert machine.declined() == {}


def test_always_promotes_into_memory_without_bytes() -> None:
    """That of a simulation."""

    class NoBytes(Memory):
        def create_kv_memoryview(self) -> memoryview:
            return memoryview(np.empty((self.num_blocks, 0), np.uint8))

    primary = CPUPrimaryTierOffloadingManager(8, NoBytes(8))
    tier = FakeTier(Memory(8).create_kv_memoryview())
    tier.put(prefix(3), map(content, prefix(3)))
    manager = TieringOffloadingManager(primary, [tier])
    assert manager.lookup_prefix(prefix(3), ReqContext("r")) == [None] * 3
    manager.on_schedule_end()
    tier.finish()
    assert manager.lookup_prefix(prefix(3), ReqContext("r")) == [True] * 3


def test_the_end_of_a_long_prompt_is_worth_more_than_its_beginning() -> None:
    """A token takes 1 us at the start of a prompt, and 11 us after 100,000 tokens. From the tier, it takes 4 us."""
    clock = ManualClock()
    worth = BlockWorth(BLOCK_BYTES, (16,), read_bytes_per_s=(BLOCK_BYTES / (16 * 4e-6),))
    planner = LoadPlanner(["tier"], worth, clock)
    for _ in range(3):
        for start in range(0, 100_000, 10_000):
            planner.note_step(StepWork(10_000, 10_000, 0, is_continued=True, context_tokens=10_000 * (start + 5000)))
            clock.advance(10_000 * (1e-6 + 1e-10 * (start + 5000)))
    survey = [Segment(Place((0,)), 50)]

    def loaded(tokens_before: int) -> int:
        context = ReqContext("r", tokens_before=tokens_before)
        return planner.plan(survey, prefix(1)[0], None, SoFar(50), context, {}).stop

    assert [loaded(before) for before in (0, 20_000, 60_000, 100_000)] == [0, 0, 50, 50]


def test_a_request_does_not_wait_for_reads_that_began_after_its_own() -> None:
    """Its 20 blocks come first, in 20 ms. Computing them takes 200 ms, and the 500 blocks behind them half a second."""
    worth = BlockWorth(BLOCK_BYTES, (16,), prefill_tokens_per_s=1600, read_bytes_per_s=(1000 * BLOCK_BYTES,))
    planner, context = LoadPlanner(["tier"], worth, ManualClock()), ReqContext("r")
    link = planner.link(0)
    begun = {0: link.begin(20)}
    link.begin(500)
    survey = [Segment(Place((0,), is_arriving=True), 20)]
    so_far = SoFar(20, 0.01, 0.0, 0)
    assert planner.plan(survey, prefix(1)[0], None, so_far, context, begun).stop == 20
    assert planner.plan(survey, prefix(1)[0], None, so_far, context, {}).stop == 0
