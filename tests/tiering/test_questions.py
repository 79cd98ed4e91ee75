# SPDX-License-Identifier: Apache-2.0
"""Test a tier's questions to its store: a prefix in growing chunks, and each block that a request needs, with or
without holes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from tests.sizes import by_size
from tests.tiering.store_rig import BLOCK_BYTES, Region, Rig

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.errors import StoreError
from kvoffload.testing import FaultyStore
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering import questions
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.questions import Questions
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import StoreTier, TierLimits


def started(make) -> Rig:
    """Return a tier whose scan finds nothing, so that each block must be asked for."""
    rig = make()
    rig.gate.close_gate("scan")
    return rig.start()


def asked(rig: Rig) -> list[int]:
    """Keys of each question."""
    return [len(keys) for call, keys in rig.store.calls if call == "contains"]


def test_a_new_prompt_costs_one_question_of_a_few_blocks(make) -> None:
    rig = started(make)
    prompt = keys_of(*range(250))
    assert rig.ask(prompt) == [None] * 250
    rig.step()
    rig.until_answered()
    assert rig.tier.lookup(prompt[0], ReqContext("r")) is False
    assert asked(rig) == [8]
    assert not rig.tier.has_pending_work()


def test_beyond_its_bound_a_tier_is_asked_for_no_more_until_it_has_answered(make, monkeypatch) -> None:
    monkeypatch.setattr(questions, "_MAX_ASKING", 3)
    rig = started(make)
    prompt = keys_of(*range(5))
    rig.below(prompt)
    assert rig.ask(prompt) == [None, None, None, False, False]
    assert rig.ask(prompt[:1]) == [None], "what is being asked for is none too many"
    rig.step()
    rig.until_answered()
    assert rig.ask(prompt) == [True, True, True, None, None]


def test_a_prompt_that_is_present_is_asked_for_in_growing_chunks_within_one_step(make) -> None:
    rig = started(make)
    prompt = keys_of(*range(250))
    rig.below(prompt)
    rig.ask(prompt)
    rig.step()
    rig.until_answered()
    assert asked(rig) == [8, 32, 128, 82]
    assert rig.ask(prompt) == [True] * 250


def test_the_rest_of_a_long_present_prefix_is_asked_for_by_all_threads(make) -> None:
    """With a slow store, one thread would take so long for all of it that the question counts as hung."""
    rig = started(lambda: make(max_blocks=3000))
    prompt = keys_of(*range(2000))
    rig.below(prompt[:1900])
    rig.ask(prompt)
    rig.step()
    rig.until_answered()
    assert sorted(asked(rig)) == sorted([8, 32, 128, 512, 344, 256, 256, 256, 208])
    assert rig.ask(prompt) == [True] * 1900 + [False] * 100


@pytest.mark.parametrize("num_blocks", [3, 20])
@pytest.mark.parametrize("kind", ["array", "too few"])
def test_answers_are_foreign(make, kind: str, num_blocks: int) -> None:
    """An array is read like a list. Too few answers are a failure, and must not cause endless questions."""
    rig = started(make)
    prompt = keys_of(*range(num_blocks))
    rig.below(prompt)
    honest = rig.store.contains
    rig.store.contains = lambda keys: np.array(honest(keys)) if kind == "array" else honest(keys)[1:]
    rig.ask(prompt)
    rig.step()
    rig.until(lambda: not rig.tier._questions.are_pending)
    if kind == "array":
        assert rig.ask(prompt) == [True] * num_blocks
    assert len(asked(rig)) <= 2


def test_a_shared_head_is_found_and_the_new_rest_is_not_asked_for(make) -> None:
    rig = started(make)
    prompt = keys_of(*range(250))
    rig.below(prompt[:20])
    rig.ask(prompt)
    rig.step()
    rig.until_answered()
    assert [rig.tier.lookup(key, ReqContext("r")) for key in prompt[:21]] == [True] * 20 + [False]
    assert asked(rig) == [8, 32]


def test_what_comes_after_a_hole_is_asked_for_at_once_if_it_is_needed(make) -> None:
    rig = started(make)
    prompt = keys_of(*range(250))
    rig.below(prompt[100:])
    rig.ask(prompt)
    rig.step()
    rig.until_answered()
    assert rig.ask(prompt[100:]) == [None] * 150
    rig.step()
    rig.until_answered()
    assert rig.ask(prompt[100:]) == [True] * 150
    assert asked(rig) == [8, 150]


def test_two_requests_and_two_groups_are_prefixes_of_their_own(make) -> None:
    rig = started(make)
    first, second = keys_of(*range(100)), keys_of(*range(100, 200))
    for key, name in [*zip(first, ["a"] * 100), *zip(second, ["b"] * 100)]:
        assert rig.tier.lookup(key, ReqContext(name)) is None
    assert rig.tier.lookup(first[0], ReqContext("b")) is None, "asked for once"
    rig.step()
    rig.until_answered()
    assert asked(rig) == [8, 8]


def test_a_failed_question_is_asked_again(make) -> None:
    rig = started(make)
    prompt = keys_of(*range(50))
    rig.below(prompt)
    rig.store.broken = {"contains": StoreError("no")}
    rig.ask(prompt)
    rig.step()
    rig.until_answered()
    rig.store.broken = {}
    assert rig.ask_until_answered(prompt) == [True] * 50


def test_news_do_not_grow_with_the_square_of_the_questions(make) -> None:
    """When failed questions turn off reads, more is known about all blocks. That is one piece of news."""
    rig = started(make)
    rig.store.broken = {"contains": StoreError("no")}
    rig.gate.close_gate("contains")
    prompts = [keys_of(*range(first, first + 20)) for first in range(0, 20 * 60, 20)]
    for n, prompt in enumerate(prompts):
        rig.tier.lookup_prefix(prompt, ReqContext(f"r{n}"))
    rig.tier.take_news()
    rig.tier.on_schedule_end()
    rig.gate.open_gate()
    news: list[OffloadKey] = []
    num_calls, end = 0, time.monotonic() + 120
    while rig.runner.num_open_slices:
        assert time.monotonic() < end
        if rig.runner.ended:
            news += rig.tier.take_news()
            num_calls += 1
        time.sleep(0.001)
    assert not rig.tier._reads.breaker.is_closed
    assert {prompt[0] for prompt in prompts} <= {*news}
    assert len(news) <= (num_calls + 1) * 60 * 20


def test_too_few_answers_are_a_failure(make) -> None:
    rig = started(make)
    contains = rig.inner.contains
    rig.inner.contains = lambda keys: contains(keys)[1:]  # type: ignore[method-assign]
    assert rig.ask(keys_of(*range(50))) == [None] * 50
    rig.step()
    rig.until_answered()
    assert rig.tier._reads.breaker.failures == 1


def test_what_is_remembered_of_skipped_blocks_is_bounded(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_MAX_SKIPPED", 100)
    rig = started(make)
    for number in range(5):
        rig.ask(keys_of(*range(1000 * number, 1000 * number + 100)))
        rig.step()
        rig.until_answered()
        assert isinstance(rig.tier._questions, Questions)
        assert len(rig.tier._questions._skipped) < 200


@pytest.mark.parametrize("seed", range(by_size(4, 40)))
def test_each_block_that_the_store_has_is_found_within_two_answers(make, seed: int) -> None:
    rng = random.Random(seed)
    rig = started(make)
    universe = keys_of(*range(600))
    present = {key for key in universe if rng.random() < rng.choice([0.5, 0.95, 1.0])}
    rig.below([*present])
    for number in range(12):
        start = rng.randrange(len(universe))
        wanted = universe[start : start + rng.choice([1, 5, 60, 300])]
        wanted = wanted[::-1] if rng.random() < 0.2 else wanted
        context = ReqContext(f"r{number % 3}")
        for _ in range(2):
            for key in wanted:
                rig.tier.lookup(key, context)
            rig.step()
            rig.until_answered()
        assert [rig.tier.lookup(key, context) for key in wanted] == [key in present for key in wanted]


class Pair:
    """A manager over two tiers that must ask their stores, each with some blocks of a prompt."""

    def __init__(self, make, rng: random.Random, prompt: Sequence[OffloadKey]) -> None:
        self.rig = make(num_blocks=400)
        self.rig.gate.close_gate("scan")
        self.rig.start()
        self.second = MemoryStore(BLOCK_BYTES)
        self.have = [{key for key in prompt if rng.random() < share} for share in (0.6, rng.choice([0.7, 1.0]))]
        self.rig.below([*self.have[0]])
        blocks = [memoryview(block_of(key, BLOCK_BYTES)) for key in self.have[1]]
        self.second.write([*self.have[1]], blocks)
        self.second.scan = lambda: iter(())  # type: ignore[method-assign]
        self.other = StoreTier(
            self.rig.view, "other", FaultyStore(self.second), TierLimits(threads=2), clock=self.rig.clock
        )
        primary = CPUPrimaryTierOffloadingManager(400, Region(self.rig.view))
        self.manager = TieringOffloadingManager(primary, [self.rig.tier, self.other], clock=self.rig.clock)

    def settle(self) -> None:
        """Wait until the threads of both tiers have finished their work."""
        self.manager.on_schedule_end()
        end = time.monotonic() + 60
        # The scan of the first tier never ends.
        while any(tier.has_pending_work() for tier in (self.rig.tier, self.other)):
            assert time.monotonic() < end, "a tier hangs"
            time.sleep(0.001)
            self.manager.on_schedule_end()
        self.manager.check_invariants()


@pytest.mark.parametrize("seed", range(by_size(4, 30)))
def test_blocks_that_two_stores_share_unevenly_are_a_hit_up_to_the_first_that_neither_has(make, seed: int) -> None:
    rng = random.Random(seed)
    prompt = keys_of(*range(250))
    pair = Pair(make, rng, prompt)
    context = ReqContext("r")
    pair.manager.on_new_request(context)
    steps = 0
    while None in (answers := pair.manager.lookup_prefix(prompt, context)):
        steps += 1
        assert steps <= 8, "a few steps, not one for each hole"
        pair.settle()
    hit = next((at for at, key in enumerate(prompt) if not any(key in have for have in pair.have)), len(prompt))
    assert answers == ([True] * hit + [False])[: len(prompt)]
    pair.other.shutdown()
