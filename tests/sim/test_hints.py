# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from tests.sim.policy_replay import replay_policy
from tests.sizes import by_size

from kvoffload.base import NextUse, OffloadKey
from kvoffload.cpu.policies.base import POLICIES, Victims
from kvoffload.cpu.policies.density import DensityCachePolicy
from kvoffload.cpu.policies.density.score import HintScore
from kvoffload.errors import ConfigError
from kvoffload.sim.hints import hinter, true_hints, wrong_hints
from kvoffload.sim.optimum import optimum
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace

UNKNOWN, SOON, LATER, NEVER = NextUse
EVICTED = {
    ("synthetic-chat-9", 1): "0493397d36c2cab4",
    ("synthetic-chat-9", 2): "37f202afdc39b651",
    ("synthetic-chat-9", 5): "ca69fe381a3b5768",
    ("synthetic-chat-9", 10): "a02142dc8ba843b4",
    ("synthetic-documents-9", 5): "b9f4700c41c80487",
    ("synthetic-mixed-9", 10): "f1d2026ad87f27e2",
    ("synthetic-assistants-9", 1): "7b585941a442548c",
    ("synthetic-assistants-9", 2): "d5bbf88e29dc1b18",
    ("synthetic-assistants-9", 5): "6590222817e53bb8",
    ("synthetic-assistants-9", 10): "cd9eaac07f0b5604",
    ("lmcache_agent_b256", 1): "8d72d20d9cd4d564",
    ("lmcache_agent_b256", 2): "09049e1b9d0c7d8f",
    ("lmcache_agent_b256", 5): "0b96f03d2aa61d26",
    ("lmcache_agent_b256", 10): "f7119802cc4e0d5d",
    ("mooncake_conversation", 1): "7df69fd6c1304321",
    ("mooncake_conversation", 2): "57497ffe49b2bab0",
    ("mooncake_conversation", 5): "7b4a0c965b6da782",
    ("mooncake_conversation", 10): "0d82f9470086b3fe",
}
"""The start of the SHA-256 of all keys that ``density`` without hints evicts, in order."""


def hints_of(trace: Trace) -> list[NextUse]:
    return [trace.next_use(request) for request in range(len(trace))]


class TestTrueHints:
    def test_a_session_says_when_its_next_request_comes(self, trace_of: Callable[..., Trace]) -> None:
        trace = trace_of([[0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 1, 3, 4, 5]])
        times_s = np.array([0.0, 1.0, 60.0, 600.0, 1201.0])
        sessions = np.array([7, 2, 7, 7, 7])
        assert hints_of(true_hints(replace(trace, times_s=times_s, sessions=sessions))) == [
            SOON,
            NEVER,
            LATER,
            UNKNOWN,
            NEVER,
        ]

    def test_without_sessions_the_next_use_of_the_last_whole_block_counts(self, trace_of: Callable[..., Trace]) -> None:
        trace = trace_of([[0, 1, 2], [0, 1, 3], [0, 4]])
        partial = replace(trace, input_tokens=trace.input_tokens - 1)
        assert hints_of(true_hints(trace)) == [NEVER, NEVER, NEVER]
        assert hints_of(true_hints(partial)) == [SOON, NEVER, NEVER]

    def test_a_request_without_a_whole_block_never_comes_back(self, trace_of: Callable[..., Trace]) -> None:
        trace = trace_of([[0], [0]])
        assert hints_of(true_hints(replace(trace, input_tokens=np.array([3, 3])))) == [NEVER, NEVER]


class TestWrongHints:
    def test_a_share_says_something_else(self) -> None:
        true = true_hints(synthesize("chat", 2000, seed=3))
        wrong = wrong_hints(true, 0.3)
        assert true.next_uses is not None
        assert wrong.next_uses is not None
        known = true.next_uses != UNKNOWN
        assert (wrong.next_uses == true.next_uses)[~known].all()
        assert (wrong.next_uses != true.next_uses)[known].mean() == pytest.approx(0.3, abs=0.04)
        assert set(wrong.next_uses[known].tolist()) == {SOON, LATER, NEVER}
        assert (wrong_hints(true, 1.0).next_uses != true.next_uses)[known].all()

    def test_the_same_seed_gives_the_same(self) -> None:
        true = true_hints(synthesize("chat", 200, seed=3))
        assert hints_of(wrong_hints(true, 0.5, 1)) == hints_of(wrong_hints(true, 0.5, 1))
        assert hints_of(wrong_hints(true, 0.5, 1)) != hints_of(wrong_hints(true, 0.5, 2))

    def test_without_hints_none_is_wrong(self) -> None:
        assert wrong_hints(synthesize("chat", 20), 0.5).next_uses is None


class TestHinter:
    def test_oracle_and_noisy(self) -> None:
        trace = synthesize("chat", 200, seed=3)
        assert hints_of(hinter("oracle")(trace)) == hints_of(true_hints(trace))
        assert hints_of(hinter("noisy:0.3")(trace)) == hints_of(wrong_hints(true_hints(trace), 0.3))

    @pytest.mark.parametrize(
        "text", ["", "orcale", "noisy", "noisy:", "noisy:2", "noisy:-0.1", "noisy:nan", "oracle:1"]
    )
    def test_others_are_refused_in_a_sentence(self, text: str) -> None:
        with pytest.raises(ConfigError, match="hints must be oracle, or noisy:P"):
            hinter(text)


def cells() -> list[Any]:
    quick = [("synthetic-chat-9", 5), ("synthetic-assistants-9", 10)]
    return [pytest.param(*cell, marks=[] if cell in quick else pytest.mark.long) for cell in EVICTED]


class Recorder(DensityCachePolicy):
    """A policy that records the blocks that the last instance has evicted."""

    evicted = sha256()
    last: Recorder

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        Recorder.evicted, Recorder.last = sha256(), self

    def evict(self, n: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> Victims | None:
        victims = super().evict(n, protected, incoming)
        for one, _ in victims or ():
            Recorder.evicted.update(one)
        return victims


@pytest.fixture
def recorder() -> Iterator[str]:
    POLICIES.register("recorder", Recorder)
    yield "recorder"
    POLICIES.unregister("recorder")


@pytest.mark.parametrize(("name", "percent"), cells())
def test_without_hints_the_same_blocks_are_evicted_as_ever(
    shared_trace: Callable[..., Trace], recorder: str, name: str, percent: int
) -> None:
    word, _, rest = name.partition("-")
    kind, _, seed = rest.partition("-")
    trace = synthesize(kind, 600, int(seed)) if word == "synthetic" else shared_trace(name)
    replay_policy(trace, recorder, max(1, round(trace.num_unique * percent / 100)))
    assert Recorder.evicted.hexdigest()[:16] == EVICTED[name, percent]


def test_hints_that_are_not_in_use_change_nothing(recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are in other classes then, but those are worth the same."""
    monkeypatch.setattr(HintScore, "favours_hints", False)
    trace, evicted = synthesize("chat", by_size(250, 600), 9), []
    for each in (trace, true_hints(trace)):
        replay_policy(each, recorder, trace.num_unique // 10)
        evicted.append(Recorder.evicted.hexdigest())
    assert evicted[0] == evicted[1]


def test_operators_see_whether_hints_are_in_use(recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, capacity = synthesize("chat", 150, 9), 128  # a smaller one learns nothing
    replay_policy(trace, recorder, capacity)
    assert Recorder.last.get_stats() == {("hint_score",): 0, ("hints_in_use",): 0}
    replay_policy(true_hints(trace), recorder, capacity)
    stats = Recorder.last.get_stats()
    assert stats["hint_score",] > 0
    assert stats["hints_in_use",] == 1
    monkeypatch.setattr(HintScore, "favours_hints", False)
    replay_policy(true_hints(trace), recorder, capacity)
    assert Recorder.last.get_stats()["hints_in_use",] == 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_policies_that_know_no_hints_ignore_them(policy: str) -> None:
    trace = synthesize("agents", 12, seed=1)
    capacity = trace.num_unique // 20
    assert replay_policy(true_hints(trace), policy, capacity) == replay_policy(trace, policy, capacity)


def points(trace: Trace, capacity: int) -> float:
    return 100 * replay_policy(trace, "density", capacity).hit_rate


@pytest.mark.long
def test_a_session_that_ends_does_not_take_shared_prompts_from_the_others() -> None:
    """In a cache of a few prompts, blocks that hundreds of sessions share must outlive one session's hint about its own
    next use."""
    trace = synthesize("assistants", 4000, seed=10)
    capacity = trace.num_unique // 100
    assert points(true_hints(trace), capacity) > points(trace, capacity) + 0.5


@pytest.mark.long
def test_hints_take_at_most_a_tenth_more_memory() -> None:
    trace = synthesize("assistants", 1000, seed=5)
    capacity, peaks = trace.num_unique // 50, []
    for each in (trace, true_hints(trace)):
        tracemalloc.start()
        points(each, capacity)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 1.1 * peaks[0]


@pytest.mark.long
def test_sessions_with_known_returns() -> None:
    """True hints close a third of the gap to the optimum. Wrong ones cost at most a point."""
    trace = synthesize("chat", 4000, seed=1)
    true = true_hints(trace)
    assert true.next_uses is not None
    turned = true.next_uses.copy()
    turned[len(turned) // 2 :] = np.array([UNKNOWN, NEVER, LATER, SOON])[turned[len(turned) // 2 :]]
    shuffled = np.random.default_rng(1).permutation(true.next_uses)
    for percent in (1, 2, 5, 10):
        capacity = trace.num_unique * percent // 100
        without = points(trace, capacity)
        best = 100 * optimum(trace, [capacity])[0] / trace.num_accesses
        assert points(true, capacity) > without + (best - without) / 3
        assert points(replace(trace, next_uses=turned), capacity) > without - 1
        assert points(replace(trace, next_uses=shuffled), capacity) > without - 1
