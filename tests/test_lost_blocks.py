# SPDX-License-Identifier: Apache-2.0
"""Lost blocks: the last loss of each key, in bounded memory, or none at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.base import OffloadKey, make_offload_key
from kvoffload.lost_blocks import NO_LOSSES, Loss, LostBlocks
from kvoffload.miss import Miss
from kvoffload.testing.clock import ManualClock

PLACES = ((Miss.EVICTED, "CPU"), (Miss.EVICTED, "disk"), (Miss.FILTERED, ""), (Miss.REFUSED, ""))


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


@given(st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=9), st.sampled_from(PLACES), st.integers(0, 100))))
def test_the_last_loss_of_each_of_the_newest_keys(calls: list[tuple[list[int], tuple[Miss, str], int]]) -> None:
    clock = ManualClock()
    lost = LostBlocks(20, clock)
    expected: dict[int, tuple[Miss, str, float]] = {}
    for numbers, (miss, place), seconds in calls:
        clock.advance(seconds)
        lost.record([key(number) for number in numbers], miss, place)
        for number in numbers:
            expected.pop(number, None)
            expected[number] = (miss, place, clock.now_s)
        while len(expected) > 20:
            del expected[next(iter(expected))]
    found = lost.find([key(number) for number in range(41)])
    for number, loss in enumerate(found):
        if number in expected:
            miss, place, at_s = expected[number]
            assert loss == Loss(miss, place, pytest.approx(clock.now_s - at_s))
        else:
            assert loss is None


def test_a_cause_names_the_place_where_there_is_one() -> None:
    assert Loss(Miss.EVICTED, "disk").cause == "evicted disk"
    assert Loss(Miss.FILTERED).cause == "filtered"
    assert Miss.of("evicted disk") is Miss.EVICTED
    assert Miss.of("promotion failed") is Miss.PROMOTION_FAILED
    assert Miss.of("of another version") is None


def test_without_a_trace_nothing_is_remembered() -> None:
    NO_LOSSES.record([key(1)], Miss.EVICTED, "CPU")
    assert NO_LOSSES.find([key(1), key(2)]) == [None, None]
