# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

pytest.importorskip("transformers")
from kvoffload.demo.comparison import Comparison, Difference, Latency, WayResult, judge
from kvoffload.demo.workload import ChatWorkload, Turn
from kvoffload.engines.reference.engine import EngineOptions


def turn(
    conversation: int, number: int, tokens: Sequence[int], seconds: float = 0.1, logit: float = 3.0, margin: float = 0.5
) -> Turn:
    count = len(tokens)
    return Turn(conversation, number, tuple(tokens), (margin,) * count, (logit,) * count, 40, 16, 8, seconds)


def way(name: str, *turns: Turn) -> WayResult:
    stats = {("load_bytes",): 2e9, ("load_seconds",): 4.0, ("store_bytes",): 1e9, ("store_seconds",): 0.0}
    return WayResult(name, turns, 1.5, 100, 0, stats)


def test_the_same_tokens_are_identical_and_rounding_is_what_the_logits_differ_by() -> None:
    verdict = judge([way("a", turn(0, 0, [1, 2], margin=0.25)), way("b", turn(0, 0, [1, 2], logit=3.125))])
    assert verdict.identical
    assert (verdict.smallest_margin, verdict.largest_rounding) == (0.25, 0.125)
    assert not verdict.is_sharp


def test_a_choice_won_by_far_more_than_rounding_is_sharp() -> None:
    assert judge([way("a", turn(0, 0, [1])), way("b", turn(0, 0, [1], logit=3.0001))]).is_sharp


def test_only_the_first_difference_of_a_conversation_counts() -> None:
    first = way("a", turn(0, 0, [1, 2]), turn(0, 1, [3, 4]), turn(1, 0, [5, 6]))
    other = way("b", turn(0, 0, [1, 9]), turn(0, 1, [9, 9]), turn(1, 0, [5, 6]))
    verdict = judge([first, other])
    assert verdict.differences == (Difference("b", 0, 0, 1, 0.5),)


def test_rounding_is_not_learned_from_a_way_that_differs() -> None:
    """A wrong block changes logits before it flips a token. If this counted as rounding, it would excuse the flip."""
    first = way("a", turn(0, 0, [1, 2]))
    wrong = way("wrong", turn(0, 0, [1, 9], logit=3.4))
    assert judge([first, wrong]).largest_rounding is None
    assert not judge([first, wrong]).is_sharp
    verdict = judge([first, way("right", turn(0, 0, [1, 2], logit=3.0001)), wrong])
    assert verdict.is_sharp
    assert not verdict.identical


def test_latency_is_the_median_and_the_value_that_95_percent_do_not_exceed() -> None:
    turns = [turn(number, 0, [1], seconds=number + 1.0) for number in range(100)]
    assert Latency.of(turns) == Latency(50.5, 95.0)
    assert Latency.of(turns[:1]) == Latency(1.0, 1.0)


def test_a_comparison_as_json_says_all_that_the_tables_say() -> None:
    results = way("a", turn(0, 0, [1]), turn(0, 1, [2])), way("b", turn(0, 0, [1]), turn(0, 1, [2]))
    figures = Comparison(ChatWorkload(1, 2), EngineOptions(), results, judge(results)).as_json()
    figures = json.loads(json.dumps(figures, allow_nan=False))
    assert figures["tokens"]["identical"] is True
    assert [each["name"] for each in figures["ways"]] == ["a", "b"]
    assert figures["ways"][0]["metrics"]["load_bytes"] == 2 * 10**9
    assert (figures["ways"][0]["device_hit_tokens"], figures["ways"][0]["offloaded_hit_tokens"]) == (32, 16)
