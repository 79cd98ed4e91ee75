# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.base import StepWork
from kvoffload.testing.clock import ManualClock
from kvoffload.tiering.speeds import (
    AnswerEstimator,
    LinkSpeedEstimator,
    PrefillSpeedEstimator,
    fit_link,
    fit_rise,
    weighted_median,
)
from kvoffload.tiering.worth import Pace

MB = 1e6


@given(
    st.floats(0, 0.5),
    st.floats(1e-10, 1e-7),
    st.lists(st.integers(1, 10**9), min_size=3, max_size=30).filter(lambda sizes: max(sizes) > 100 * min(sizes)),
)
@settings(max_examples=by_size(quick=100, thorough=3000))
def test_exact_samples_give_a_line_that_explains_them(latency_s: float, byte_s: float, sizes: list[int]) -> None:
    speed = fit_link([(size, latency_s + size * byte_s) for size in sizes])
    ordered = sorted(sizes)
    third = (len(sizes) + 2) // 3
    assert speed.first_s <= latency_s * (1 + 1e-6) + 1e-6
    if ordered[-third] > 2 * ordered[third - 1]:
        # As fast as the largest sample was as a whole, since it was never seen faster.
        assert speed.block_s == pytest.approx(byte_s + latency_s / max(sizes), rel=1e-3)


def test_equal_sizes_give_a_bandwidth_alone() -> None:
    assert fit_link([(100, 1.0), (100, 3.0), (100, 2.0)]) == Pace(0.0, 0.02)


def test_no_link_is_faster_than_it_was_seen() -> None:
    # Large jobs that took no longer than small ones: all of it would be latency.
    assert fit_link([(10, 1.0), (10, 1.0), (1000, 1.0), (1000, 0.9)]).block_s == pytest.approx(0.0009)


def test_no_sample_is_shorter_than_the_latency() -> None:
    """It became slow after the first one. The line through them has 0.44 s at nothing."""
    assert fit_link([(32, 0.341), (9, 0.808), (4, 0.487)]).first_s <= 0.341


def test_a_stall_does_not_count() -> None:
    clock = ManualClock()
    link = LinkSpeedEstimator(clock)
    assert link.speed is None
    rng = random.Random(3)
    for at in range(20):
        clock.advance(0.2)
        num_bytes = rng.choice([1, 8, 64]) * MB
        link.add(num_bytes, 30.0 if at % 7 == 3 else 0.001 + num_bytes / 1e9)
    assert link.speed is not None
    assert link.speed.seconds(64 * MB) == pytest.approx(0.065, rel=0.05)


@pytest.mark.parametrize(
    ("factor", "interval_s", "enough"), [(2, 0.1, 20), (2, 5.0, 3), (10, 0.1, 2), (10, 5.0, 2), (0.1, 0.1, 2)]
)
def test_a_lasting_change_is_believed_and_a_large_one_at_the_second_read(
    factor: float, interval_s: float, enough: int
) -> None:
    clock = ManualClock()
    link = LinkSpeedEstimator(clock)
    for _ in range(50):
        clock.advance(interval_s)
        link.add(64 * MB, 0.064)
    for _ in range(enough):
        clock.advance(interval_s)
        link.add(64 * MB, factor * 0.064)
    assert link.speed == Pace(0.0, pytest.approx(factor * 1e-9))


def test_both_reads_that_show_a_change_count() -> None:
    link = LinkSpeedEstimator(ManualClock())
    for seconds in [0.064] * 50 + [0.64, 0.96]:
        link.add(64 * MB, seconds)
    assert link.speed == Pace(0.0, pytest.approx(0.8 / (64 * MB)))


def test_answers_that_are_slower_or_faster_than_usual_count_though_nobody_saw_when_they_came() -> None:
    answers = AnswerEstimator()
    answers.add(0.5, inf, None)
    assert answers.seconds == 0.5, "at least"
    answers.add(0.099, 0.1, True)
    assert answers.seconds == 0.1
    for _ in range(2):
        answers.add(0.4, inf, None)
    assert answers.seconds == 0.4
    for _ in range(3):
        answers.add(0.0, 0.2, False)
    assert answers.seconds == 0.2
    assert answers.found_share == 2 / 6


@pytest.mark.parametrize("is_small_first", [True, False])
def test_reads_of_another_size_are_no_change(is_small_first: bool) -> None:
    """The time per block in a small read is mostly latency."""
    link = LinkSpeedEstimator(ManualClock())
    small, large = (1, 0.0101), (100, 0.02)
    first, second = (small, large) if is_small_first else (large, small)
    for _ in range(10):
        link.add(*first)
    assert [link.add(*second) for _ in range(2)] == [False, False]


def test_a_quiet_period_is_not_forgotten() -> None:
    clock = ManualClock()
    link = LinkSpeedEstimator(clock)
    for _ in range(10):
        link.add(64 * MB, 0.064)
    clock.advance(10_000)
    link.add(64 * MB, 6.4)  # a disk that had to wake up
    assert link.speed == Pace(0.0, pytest.approx(1e-9))


def test_the_median_by_weight() -> None:
    assert weighted_median([(5.0, 1), (1.0, 1), (9.0, 3)]) == 9.0
    assert weighted_median([(5.0, 3), (1.0, 1), (9.0, 1)]) == 5.0


# ------------------------------------------------------------------------------------------------------------- prefill


class Engine:
    """Computes 10,000 tokens a second. ``lag``: steps that are decided before the results of earlier ones are there."""

    def __init__(self, lag: int = 0) -> None:
        self.clock = ManualClock()
        self.speed = PrefillSpeedEstimator(self.clock)
        self._ends = [0.0] * lag
        self._free_s = 0.0

    def step(self, prompt_tokens: int, decodes: int = 0, *, is_continued: bool = True, seconds: float = 0.0) -> None:
        """Decides a step, and waits until the next one may be decided."""
        tokens = prompt_tokens + decodes
        self.speed.note_step(StepWork(tokens, prompt_tokens, 0, is_continued))
        self._free_s = max(self._free_s, self.clock()) + (seconds or tokens / 10_000)
        self._ends.append(self._free_s)
        self.clock.advance(max(0.0, self._ends.pop(0) - self.clock()))


@pytest.mark.parametrize("lag", [0, 1])
def test_the_speed_of_an_engine(lag: int) -> None:
    engine = Engine(lag)
    assert engine.speed.tokens_per_s is None
    for request in range(4):
        engine.clock.advance(100)  # it idled
        engine.step(8000, is_continued=False)
        engine.step(8000)
        engine.step(1000 + request)
        for _ in range(3):
            engine.step(0, 1, seconds=0.005)
    assert engine.speed.tokens_per_s == pytest.approx(10_000, rel=0.01)


def test_an_engine_does_not_look_slow_because_most_of_its_prompts_are_found() -> None:
    engine = Engine()
    for _ in range(6):
        engine.step(2000)
    for _ in range(200):
        engine.clock.advance(1)
        engine.step(20, is_continued=False, seconds=0.02)  # a tenth of the speed: mostly overhead
        for _ in range(3):
            engine.step(0, 1, seconds=0.005)
    assert engine.speed.tokens_per_s == pytest.approx(10_000, rel=0.01)


def test_what_small_steps_showed_long_ago_says_nothing_of_an_engine_that_slowed_down() -> None:
    engine = Engine()
    for _ in range(4):
        engine.step(2000, seconds=0.2)
        for _ in range(3):  # a step is measured by the longer of the two intervals that follow it
            engine.step(500, seconds=0.05)
    for _ in range(40):
        engine.step(2000, seconds=0.8)  # contexts are long now, and every step is full
    assert engine.speed.tokens_per_s == pytest.approx(2_500, rel=0.01)


def test_one_large_slow_step_is_not_believed_for_long() -> None:
    engine = Engine()
    engine.step(8000, seconds=80)  # it warms up
    for _ in range(10):
        engine.step(1000)
    assert engine.speed.tokens_per_s == pytest.approx(10_000, rel=0.01)


def test_an_engine_that_takes_small_steps_alone_is_measured_by_them_in_the_end() -> None:
    engine = Engine()
    for _ in range(6):
        engine.step(2000)
    engine.clock.advance(700)
    for _ in range(20):
        engine.step(200, seconds=0.1)
    assert engine.speed.tokens_per_s == pytest.approx(2_000, rel=0.01)


def test_steps_that_only_decode_or_follow_a_pause_tell_nothing() -> None:
    engine = Engine()
    for _ in range(50):
        engine.step(0, 10, seconds=0.02)
    for _ in range(5):
        engine.step(500, is_continued=False)
        engine.clock.advance(10)
    assert engine.speed.tokens_per_s is None


def test_what_is_left_of_running_prompts_is_the_queue() -> None:
    speed = PrefillSpeedEstimator(ManualClock())
    speed.note_step(StepWork(tokens=100, prompt_tokens=100, queued_tokens=700))
    assert speed.queued_tokens == 700
    speed.note_step(StepWork())
    assert speed.queued_tokens == 0


def test_a_token_that_attends_to_more_tokens_takes_longer() -> None:
    """Prompts of 16,000 tokens in chunks of 1,000. A token takes 0.1 ms, and 10 ns more for each token before it."""
    clock = ManualClock()
    speed = PrefillSpeedEstimator(clock)

    def compute(rise_s: float) -> None:
        for _ in range(3):
            for start in range(0, 16_000, 1000):
                context = 1000 * (start + 500)
                speed.note_step(StepWork(1000, 1000, is_continued=True, context_tokens=context))
                clock.advance(1000 * 1e-4 + context * rise_s)

    compute(0.0)
    assert speed.rise == 0.0
    assert speed.relative_cost(100_000) == 1.0
    compute(1e-8)
    assert speed.tokens_per_s is not None
    for position in (0, 8000, 16_000):
        token_s = speed.relative_cost(position) / speed.tokens_per_s
        assert token_s == pytest.approx(1e-4 + 1e-8 * position, rel=0.2)


def test_positions_that_hardly_differ_say_nothing_about_a_rise() -> None:
    assert fit_rise([(1000.0 + at, 1e-4 * at) for at in range(20)])[1] == 0.0
    assert fit_rise([(1000.0 * at, 1e-4 + 1e-7 * at) for at in range(20)])[1] == 0.0, "nor does noise"
    assert fit_rise([(0.0, 1e-4), (8000.0, 2e-4)])[1] == 0.0, "nor do a few steps"
    assert fit_rise([(1000.0 * at, 1e-4 * (1 + at)) for at in range(20)]) == pytest.approx(
        (9500.0, 1 / 10_500), rel=0.1
    )
