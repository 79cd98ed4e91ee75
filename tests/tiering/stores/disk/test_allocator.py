# SPDX-License-Identifier: Apache-2.0
"""Free runs and the order of eviction, against plain sets and lists."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiering.test_waits import lines_run

from kvoffload.tiering.stores.disk import allocator as allocator_module
from kvoffload.tiering.stores.disk.allocator import (
    BUSY,
    SLAB_STRIDE,
    Allocator,
    FreeRuns,
    Run,
    free_runs,
    is_held,
    runs_of,
)

BASE = 3 * SLAB_STRIDE


def slots_of(runs: list[Run]) -> list[int]:
    return [slot for run in runs for slot in range(run.start, run.stop)]


def add(allocator: Allocator, slab: int, used_ns: np.ndarray) -> None:
    allocator.add_slab(slab, used_ns)
    allocator.add_free(used_ns, free_runs(slab, used_ns))


def full(num_slots: int, slab: int = 3) -> Allocator:
    """Return an allocator whose slot ``i`` was used at time ``i + 1``."""
    allocator = Allocator()
    add(allocator, slab, np.arange(1, num_slots + 1, dtype=np.int64))
    return allocator


@given(st.sets(st.integers(0, 60)))
def test_runs_are_maximal_and_have_the_same_slots(slots: set[int]) -> None:
    runs = runs_of(sorted(slots))
    assert slots_of(runs) == sorted(slots)
    assert all(later.start > run.stop for run, later in itertools.pairwise(runs))


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_free_runs_never_lose_or_share_a_slot(rng: random.Random, num_steps: int) -> None:
    free, out = FreeRuns(), [Run(0, 50), Run(SLAB_STRIDE, 20)]
    have = set[int]()
    for _ in range(num_steps):
        if out and rng.random() < 0.5:
            run = out.pop(rng.randrange(len(out)))
            cut = rng.randrange(run.count + 1)
            for part in (Run(run.start, cut), Run(run.start + cut, run.count - cut)):
                if part.count:
                    free.add(part)
            have |= set(slots_of([run]))
        else:
            count = rng.randrange(1, 30)
            taken = free.take(count)
            slots = slots_of(taken)
            assert len(slots) == len(set(slots)) == min(count, len(have))
            assert set(slots) <= have
            have -= set(slots)
            out += taken
        assert free.num_slots == len(have)
        assert free.runs() == runs_of(sorted(have))


def test_a_short_request_leaves_long_runs_whole() -> None:
    free = FreeRuns()
    for run in (Run(0, 10), Run(20, 3), Run(30, 5)):
        free.add(run)
    assert free.take(4) == [Run(30, 4)]
    assert free.take(1) == [Run(34, 1)]
    assert free.take(12) == [Run(0, 10), Run(20, 2)]
    assert free.runs() == [Run(22, 1)]


def test_single_slots_of_a_begun_run_cost_little() -> None:
    free = FreeRuns()
    free.add(Run(0, 1000))
    first, second = (lines_run(lambda: free.take(1)) for _ in range(2))
    assert 2 * second < first
    free.add(Run(0, 2))
    assert free.runs() == [Run(0, 1000)]


def test_of_long_runs_the_one_that_was_begun_is_used_up_first() -> None:
    free = FreeRuns()
    for slab in (1, 2):
        free.add(Run(slab * SLAB_STRIDE, 200_000))
    slots = [slot for _ in range(50) for slot in slots_of(free.take(70))]
    assert slots == list(range(slots[0], slots[0] + 3500)), "across sections too"
    assert len(free.take(400_000)) == 2
    assert free.runs() == []


def test_slabs_are_no_neighbours() -> None:
    free = FreeRuns()
    free.add(Run(SLAB_STRIDE - 2, 1))
    free.add(Run(SLAB_STRIDE, 4))
    assert len(free.runs()) == 2
    free.drop_slab(1)
    assert free.runs() == [Run(SLAB_STRIDE - 2, 1)]
    assert free.num_slots == 1


def test_a_small_store_evicts_exactly_the_least_recently_used() -> None:
    allocator = full(10)
    assert allocator.use(BASE, 100)
    assert not allocator.use(BASE + 2 * SLAB_STRIDE, 100), "another process's"
    order = []
    for _ in range(9):
        assert allocator.grain_of(1) == 1
        order += slots_of(allocator.evict(1, before_ns=1000))
    assert order == [BASE + index for index in range(1, 10)]


def test_nothing_used_after_the_limit_is_evicted() -> None:
    allocator = full(10)
    assert sorted(slots_of(allocator.evict(8, before_ns=3))) == [BASE, BASE + 1, BASE + 2]
    assert allocator.evict(1, before_ns=3) == []


def test_what_is_used_after_the_plan_stays() -> None:
    allocator = full(1600)
    first = slots_of(allocator.evict(10, before_ns=10_000))
    assert set(first) < set(range(BASE, BASE + 25)), "one in 64 slots is looked at"
    kept = sorted(set(range(BASE, BASE + 25)) - set(first))[::2]
    for slot in kept:
        allocator.use(slot, 5000)
    rest = slots_of(allocator.evict(5, before_ns=10_000))
    assert not set(rest) & set(kept)


def test_busy_and_free_slots_are_not_evicted() -> None:
    allocator = full(8)
    for slot in range(BASE, BASE + 3):
        allocator.use(slot, BUSY)
    allocator.release(Run(BASE + 2, 1))
    assert sorted(slots_of(allocator.evict(8, before_ns=1000))) == [BASE + index for index in range(3, 8)]
    assert allocator.take(5) == [Run(BASE + 2, 1)]
    assert not is_held(allocator._used_ns[3]).any()


def test_of_a_large_store_a_sample_says_what_is_old(monkeypatch) -> None:
    monkeypatch.setattr(allocator_module, "_SAMPLE", 1000)
    allocator, rng = Allocator(), random.Random(0)
    times = np.array(rng.sample(range(1, 20_001), 20_000), np.int64)
    add(allocator, 1, times[:15_000].copy())
    add(allocator, 2, times[15_000:].copy())
    evicted = list[int]()
    while len(evicted) < 640:
        evicted += slots_of(allocator.evict(64, before_ns=1 << 40))
    old = [times[slot % SLAB_STRIDE + 15_000 * (slot // SLAB_STRIDE - 1)] for slot in evicted]
    assert max(old) < 20_000 // 64 * 8, "of ten plans"
    assert len(allocator.evict(100, before_ns=1 << 40)) > 0
    allocator.check_invariants()


def test_slots_of_a_dropped_slab_are_forgotten() -> None:
    allocator = full(64)
    add(allocator, 4, np.zeros(5, np.int64))
    allocator.evict(2, before_ns=1000)
    allocator.drop_slab(3)
    allocator.release(Run(BASE, 2))
    allocator.use(BASE, 7)
    assert allocator.num_slots == 5
    assert allocator.evict(1, before_ns=1000) == []
    assert allocator.take(9) == [Run(4 * SLAB_STRIDE, 5)]


def test_free_runs_of_new_and_dropped_slabs_are_those_of_single_slots() -> None:
    rng, allocator, oracle = random.Random(0), Allocator(), FreeRuns()
    used = {slab: np.array([rng.choice((0, 0, 5)) for _ in range(200)]) for slab in range(1, 9)}
    for slab, used_ns in used.items():
        add(allocator, slab, used_ns)
        for index in np.flatnonzero(used_ns == 0).tolist():
            oracle.add(Run(slab * SLAB_STRIDE + index, 1))
        allocator.check_invariants()
        assert allocator.free.runs() == oracle.runs()
    allocator.evict(20, before_ns=10)
    for slab in (2, 3, 5, 99):
        allocator.drop_slab(slab)
    allocator.check_invariants()
    assert allocator.free.runs() == [run for run in oracle.runs() if run.slab not in (2, 3, 5)]
    assert allocator.num_slots == 1000
    assert sorted(allocator.take(10_000)) == [run for run in oracle.runs() if run.slab not in (2, 3, 5)]


@pytest.mark.parametrize(("num_slots", "mean_run"), [(300, 4), (4096, 15)])
def test_prefixes_come_and_go_as_runs(num_slots: int, mean_run: int) -> None:
    """Prefixes have 20 to 60 blocks. Blocks that are evicted together are adjacent."""
    allocator, rng, now = Allocator(), random.Random(0), 1
    add(allocator, 1, np.zeros(num_slots, np.int64))
    held: dict[int, list[int]] = {}
    num_runs = num_blocks = 0
    for number in range(600):
        count = rng.randrange(20, 60)
        while allocator.free.num_slots < count:
            for run in allocator.evict(allocator.grain_of(count - allocator.free.num_slots), now):
                allocator.release(run)
        runs = allocator.take(count)
        held[number] = slots_of(runs)
        now += count
        for stamp, slot in enumerate(held[number], now):
            allocator.use(slot, stamp)
        if number > 300:
            num_runs, num_blocks = num_runs + len(runs), num_blocks + count
    assert num_blocks / num_runs > mean_run
