# SPDX-License-Identifier: Apache-2.0
"""The sketch of lost blocks: never a cause that was not recorded, and as good a memory as it claims."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.base import OffloadKey, make_offload_key
from kvoffload.lost_blocks import Loss, LostBlocks
from kvoffload.testing.clock import ManualClock

CAUSES = ("evicted CPU", "evicted disk", "filtered", "refused")


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


@given(st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=9), st.sampled_from(CAUSES), st.integers(0, 100))))
def test_the_last_cause_of_each_key_like_a_dict(calls: list[tuple[list[int], str, int]]) -> None:
    clock = ManualClock()
    lost = LostBlocks(20, clock)
    expected: dict[int, tuple[str, float]] = {}
    for numbers, cause, seconds in calls:
        clock.advance(seconds)
        lost.record([key(number) for number in numbers], cause)
        expected.update(dict.fromkeys(numbers, (cause, clock.now_s)))
        if seconds > 90:
            lost.find([key(0)])
    found = lost.find([key(number) for number in range(41)])
    for number, loss in enumerate(found):
        if number in expected and loss is not None:
            cause, at_s = expected[number]
            assert loss == Loss(cause, pytest.approx(clock.now_s - at_s, abs=0.11))
        else:
            # Two of 41 keys share a place in 2**20 with a probability of less than 1 in 1000.
            assert loss is None
    known = sum(number in expected for number in range(41))
    assert sum(loss is not None for loss in found) >= known - 2


def test_memory_is_bounded_and_forgets_as_it_says() -> None:
    lost = LostBlocks(12)
    size, num_keys = 1 << 12, 3 << 12
    for first in range(0, num_keys, 64):
        lost.record([key(number) for number in range(first, first + 64)], "evicted CPU")
    found = lost.find([key(number) for number in range(num_keys)])
    for ago in (size // 4, size, 2 * size):
        window = found[num_keys - ago - 512 : num_keys - ago]
        share = sum(loss is not None for loss in window) / len(window)
        assert share == pytest.approx(math.exp(-(ago + 256) / size), abs=0.1)
    assert sum(loss is not None for loss in lost.find([key(num_keys + n) for n in range(100_000)])) == 0


def test_more_causes_than_there_are_numbers_are_not_recorded() -> None:
    lost = LostBlocks()
    for number in range(300):
        lost.record([key(number)], f"cause {number}")
    found = lost.find([key(number) for number in range(300)])
    assert [loss.cause for loss in found if loss] == [f"cause {number}" for number in range(255)]
    assert lost.find([]) == []


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=9, unique=True))
def test_keys_of_odd_lengths_never_have_a_cause_that_was_not_recorded(names: list[bytes]) -> None:
    lost = LostBlocks()
    keys = [OffloadKey(name) for name in names]
    lost.record(keys, "evicted CPU")
    causes = {loss.cause for loss in lost.find(keys) if loss}
    assert causes == {"evicted CPU"}, "the keys of one call are found by the same call"
    assert lost.find([key(1)]) == [None]
    lost.record(keys[:1], "filtered")
    (loss,) = lost.find(keys[:1])
    assert loss is not None
    assert loss.cause == "filtered"
