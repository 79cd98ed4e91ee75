# SPDX-License-Identifier: Apache-2.0
"""The choice of how much to load, compared with trying every number of blocks."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.tiering.worth import Choice, Pace, Run, assign, choose

SECONDS = st.one_of(st.just(0.0), st.integers(0, 40).map(lambda n: n / 8), st.floats(0, 5))
PACES = st.builds(Pace, st.one_of(SECONDS, st.just(math.inf)), SECONDS)


def arrivals_s(runs: list[Run], sources: list[Pace]) -> list[float]:
    """Return, by definition, the times at which this many leading blocks have arrived."""
    flat = [run.sources[0] for run in runs for _ in range(run.num_blocks)]
    arrived_s, taken = [0.0], [0] * len(sources)
    for source in flat:
        taken[source] += 1
        arrived_s.append(max(arrived_s[-1], sources[source].seconds(taken[source])))
    return arrived_s


@st.composite
def hits(draw: st.DrawFn) -> tuple[list[Run], list[Pace]]:
    sources = [Pace(), *draw(st.lists(PACES, min_size=1, max_size=4))]
    runs = draw(
        st.lists(st.builds(Run, st.integers(0, len(sources) - 1).map(lambda at: (at,)), st.integers(1, 9)), max_size=7)
    )
    return runs, sources


@given(
    hits(),
    SECONDS,
    st.sampled_from([0.0, 0.01, 0.3]),
    SECONDS,
    st.booleans(),
    SECONDS,
    st.one_of(st.just(math.inf), SECONDS),
    st.one_of(st.none(), st.sets(st.integers(1, 63))),
)
@settings(max_examples=by_size(quick=100, thorough=5_000), deadline=None)
def test_it_is_the_best_of_all(
    hit: tuple[list[Run], list[Pace]],
    block_compute_s: float,
    growth_s: float,
    queue_s: float,
    before_turn: bool,
    turn_s: float,
    slack_s: float,
    ends: set[int] | None,
) -> None:
    assert_best(*hit, block_compute_s, growth_s, queue_s, before_turn, turn_s, queue_s + slack_s, ends)


@pytest.mark.parametrize("fastest_s", [1e-6, 1e-3, 1.0])
def test_it_is_the_best_of_all_at_every_scale_of_time(fastest_s: float) -> None:
    """A block takes microseconds from memory, milliseconds from a disk, seconds from a slow link. Drawn often: queues
    as long as a part of a run, where the best number of blocks is at neither end of it. Small examples have few."""
    rng = random.Random(0)

    def seconds() -> float:
        return fastest_s * 10 ** rng.uniform(0, 1.5)

    for _ in range(by_size(quick=400, thorough=10_000)):
        sources = [Pace(rng.choice([0.0, seconds()]), seconds()) for _ in range(rng.randint(1, 3))]
        runs = [Run((rng.randrange(len(sources)),), rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        num_blocks = sum(run.num_blocks for run in runs)
        ends = rng.choice([None, {rng.randint(1, num_blocks) for _ in range(4)}])
        queue_s = rng.uniform(0, num_blocks) * seconds()
        slack_s = queue_s + rng.choice([math.inf, rng.uniform(0, num_blocks) * seconds()])
        before_turn, turn_s = rng.choice([False, True]), rng.choice([0.0, rng.uniform(0, num_blocks) * seconds()])
        block_compute_s, growth_s = seconds(), rng.choice([0.0, 0.1 * seconds()])
        assert_best(runs, sources, block_compute_s, growth_s, queue_s, before_turn, turn_s, slack_s, ends)


def assert_best(
    runs: list[Run],
    sources: list[Pace],
    block_compute_s: float,
    growth_s: float,
    queue_s: float,
    before_turn: bool,
    turn_s: float,
    slack_s: float,
    ends: set[int] | None,
) -> None:
    times_s = {"block_compute_s": block_compute_s, "growth_s": growth_s}
    times_s |= {"queue_s": queue_s, "before_turn": before_turn, "turn_s": turn_s, "slack_s": slack_s}
    pick = partial(choose, runs, sources, **times_s)
    choice = pick(ends=None if ends is None else sorted(ends))
    arrived_s = arrivals_s(runs, sources)
    total = len(arrived_s) - 1

    def begins_s(loaded: int) -> float:
        """Return when the engine begins to compute the rest."""
        is_free = arrived_s[loaded] <= (queue_s if before_turn else 0.0)
        return queue_s if is_free else max(arrived_s[loaded], queue_s + turn_s)

    times = {
        loaded: begins_s(loaded) + (total - loaded) * (block_compute_s + growth_s * (total + loaded) / 2)
        for loaded in range(total + 1)
        if ends is None or loaded in ends or not loaded
    }
    # Relative to the time without a hit: a tolerance in seconds would be slack where all of it takes microseconds.
    close = partial(pytest.approx, rel=1e-9, abs=1e-12 * times[0])

    def best_s(rounding: float) -> float:
        latest_s = (rounding * (slack_s + at * (block_compute_s + growth_s * at / 2)) for at in range(total))
        late = (at for at, (each_s, by_s) in enumerate(zip(arrived_s[1:], latest_s)) if each_s > by_s and each_s)
        in_time = next(late, total)
        return min(time_s for loaded, time_s in times.items() if loaded <= in_time)

    assert times[choice.num_blocks] in (close(best_s(1 - 1e-9)), close(best_s(1 + 1e-9)))
    assert choice.saved_s == close(times[0] - times[choice.num_blocks])
    assert choice.wait_s == close(arrived_s[choice.num_blocks])


def test_nothing_to_load() -> None:
    assert choose([], [], block_compute_s=1.0) == Choice(0, 0.0, 0.0)


def test_ties_are_loaded() -> None:
    assert choose([Run((0,), 5)], [Pace(0.0, 1.0)], block_compute_s=1.0).num_blocks == 5


@pytest.mark.parametrize("unit_s", [1.0, 1e-3, 1e-6])
def test_a_busy_engine_makes_loading_free(unit_s: float) -> None:
    slow = [Pace(0.0, 3.0 * unit_s)]
    assert choose([Run((0,), 10)], slow, block_compute_s=unit_s).num_blocks == 0
    assert choose([Run((0,), 10)], slow, block_compute_s=unit_s, queue_s=12.5 * unit_s).num_blocks == 4


def test_a_load_that_misses_its_turn_must_save_more_than_what_overtakes_it() -> None:
    pick = partial(choose, [Run((0,), 10)], [Pace(0.0, 0.25)], block_compute_s=1.0, before_turn=False)
    assert pick(turn_s=9.9).num_blocks == 10
    assert pick(turn_s=10.1).num_blocks == 0
    assert pick(turn_s=10.1, queue_s=1.0).num_blocks == 0, "the queue before it does not make loading free"
    assert pick(turn_s=10.1, queue_s=1.0, before_turn=True).num_blocks == 4, "unless its turn is to come"


def test_a_few_slow_blocks_are_worth_the_fast_ones_behind_them() -> None:
    sources = [Pace(), Pace(0.5, 2.0)]
    assert choose([Run((0,), 3), Run((1,), 2)], sources, block_compute_s=1.0).num_blocks == 3
    assert choose([Run((0,), 3), Run((1,), 2), Run((0,), 9)], sources, block_compute_s=1.0) == Choice(14, 4.5, 9.5)


def test_a_part_ends_where_it_is_of_use() -> None:
    slow = [Pace(0.0, 3.0)]
    for ends, best in ([4, 10], 4), ([3, 10], 3), ([1, 6, 10], 1), ([10], 0), ([], 0):
        choice = choose([Run((0,), 10)], slow, block_compute_s=1.0, queue_s=12.5, ends=ends)
        assert choice.num_blocks == best, ends


def test_blocks_behind_the_last_end_before_a_slow_run_save_nothing() -> None:
    sources = [Pace(), Pace(0.0, 2.0)]
    runs = [Run((0,), 8), Run((1,), 4)]
    assert choose(runs, sources, block_compute_s=1.0, ends=[5, 10]).num_blocks == 10
    assert choose(runs, sources, block_compute_s=1.0, ends=[7, 12]).num_blocks == 7


def test_a_run_comes_from_the_source_that_ends_it_first_after_the_runs_before_it() -> None:
    paces = [Pace(0.0, 1.0), Pace(2.0, 0.5)]
    runs = [Run((0, 1), 3), Run((0, 1), 8), Run((), 1), Run((1,), 2), Run((0, 1), 1)]
    assert assign(runs, paces) == [Run((0,), 3), Run((1,), 8), Run((), 1), Run((1,), 2), Run((0,), 1)]
