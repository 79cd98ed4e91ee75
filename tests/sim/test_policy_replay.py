# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest
from tests.sim.policy_replay import replay_policy
from tests.sizes import by_size

from kvoffload.cpu.policies.base import POLICIES
from kvoffload.sim.optimum import optimum
from kvoffload.sim.trace import Trace

PERCENT = (1, 5, 10, 20, 50)
CHAT, AGENTS, CODING = "mooncake_conversation", "lmcache_agent_b256", "weka_cc_64_s60"
TRACES = [pytest.param(name, marks=pytest.mark.long) for name in (CHAT, AGENTS, CODING)]
QUICK = {(AGENTS, "lru", 5), (AGENTS, "arc", 10)}
YARDSTICK = {
    (CHAT, "lru"): [5.25, 19.58, 27.89, 34.53, 36.31],
    (CHAT, "arc"): [6.49, 21.02, 28.43, 32.01, 36.27],
    (AGENTS, "lru"): [52.20, 84.18, 89.82, 89.85, 89.90],
    (AGENTS, "arc"): [45.86, 83.78, 89.79, 89.71, 89.66],
    (CODING, "lru"): [28.67, 77.76, 90.81, 95.19, 96.20],
    (CODING, "arc"): [33.22, 77.56, 89.66, 94.92, 96.12],
}
"""The rows of the traces' README, by an independent simulator."""


def published_rows() -> list[Any]:
    """(trace, policy, share, hit rate). Millions of accesses, so that two rows stand for all in the quick size."""
    rows = []
    for (name, policy), rates in YARDSTICK.items():
        for share, rate in zip(PERCENT, rates, strict=True):
            marks = [] if (name, policy, share) in QUICK else [pytest.mark.long]
            rows.append(pytest.param(name, policy, share, rate, marks=marks, id=f"{name}-{policy}-{share}"))
    return rows


@pytest.mark.parametrize(("name", "policy", "share", "rate"), published_rows())
def test_reproduces_the_published_rows(
    shared_trace: Callable[..., Trace], name: str, policy: str, share: int, rate: float
) -> None:
    trace = shared_trace(name)
    run = replay_policy(trace, policy, trace.num_unique * share // 100)
    assert round(100 * run.hit_rate, 2) == rate


def plain_lru(trace: Trace, capacity: int) -> tuple[int, int]:
    """(prefix hits, evictions) by the rule in so many words."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = evictions = 0
    for request in range(len(trace)):
        path = trace.blocks(request).tolist()
        hits += next((at for at, block in enumerate(path) if block not in cache), len(path))
        for block in reversed(path):
            if block in cache:
                cache.move_to_end(block)
                continue
            if len(cache) == capacity:
                cache.popitem(last=False)
                evictions += 1
            cache[block] = None
    return hits, evictions


@pytest.mark.parametrize("share", [0.001, 0.01, 0.2])
def test_runs_of_blocks_are_used_as_single_ones_would_be(shared_trace: Callable[..., Trace], share: float) -> None:
    """This includes requests longer than the cache: those of the coding trace have thousands of blocks."""
    trace = shared_trace("weka_cc_64_s60", max_requests=by_size(15, 100))
    capacity = max(1, int(trace.num_unique * share))
    run = replay_policy(trace, "lru", capacity)
    assert (run.hit_blocks, run.evicted_blocks) == plain_lru(trace, capacity)


@pytest.mark.parametrize("policy", POLICIES.names())
def test_no_policy_beats_the_optimum(shared_trace: Callable[..., Trace], policy: str) -> None:
    trace = shared_trace("mooncake_conversation", max_requests=by_size(300, 1500))
    capacities = [trace.num_unique * share // 100 for share in (1, 10)]
    for bound, capacity in zip(optimum(trace, capacities), capacities, strict=True):
        run = replay_policy(trace, policy, capacity)
        assert 0 < run.hit_blocks <= bound


def test_a_cache_of_the_footprint_reaches_the_optimum(shared_trace: Callable[..., Trace]) -> None:
    trace = shared_trace("lmcache_agent_b256", max_requests=by_size(200, None))
    (bound,) = optimum(trace, [trace.num_unique])
    for policy in POLICIES.names():
        run = replay_policy(trace, policy, trace.num_unique)
        assert run.hit_blocks == bound
        assert run.stored_blocks == trace.num_unique
        assert run.evicted_blocks == 0


def test_a_threshold_writes_less(shared_trace: Callable[..., Trace]) -> None:
    trace = shared_trace("mooncake_conversation", max_requests=by_size(500, 1500))
    everything, twice = (
        replay_policy(trace, "lru", by_size(700, 2000), store_threshold=threshold) for threshold in (1, 2)
    )
    assert twice.stored_blocks < everything.stored_blocks / 2


@pytest.mark.parametrize("trace_name", TRACES)
@pytest.mark.parametrize(("policy", "name"), [("lru", "LRU"), ("arc", "ARC")])
@pytest.mark.parametrize("share", [1, 10])
def test_equals_libcachesim_to_the_last_hit(
    shared_trace: Callable[..., Trace], trace_name: str, policy: str, name: str, share: int
) -> None:
    """The test compares with an outside oracle on the same flat stream: every block of every request from tail to head,
    hit by hit."""
    oracle = pytest.importorskip("libcachesim", reason="libcachesim (GPL, optional) is not installed: nothing to ask")
    trace = shared_trace(trace_name)
    capacity = trace.num_unique * share // 100
    cache = getattr(oracle, name)(cache_size=capacity)
    record = oracle.Request()
    record.obj_size = 1
    hits = 0
    for request in range(len(trace)):
        for block in reversed(trace.blocks(request).tolist()):
            record.obj_id = block
            hits += bool(cache.get(record))
    run = replay_policy(trace, policy, capacity)
    assert hits == run.accesses - run.stored_blocks


@pytest.mark.parametrize("capacity", [1, 2, 7, 40])
def test_storing_runs_at_once_is_the_same_as_one_by_one(capacity: int, trace_of: Callable[..., Trace]) -> None:
    """Against a plain dict that uses block after block; paths longer than the cache included."""
    generator = random.Random(capacity)
    paths = [list(range(50))]
    for number in range(120):
        shared = paths[generator.randrange(len(paths))]
        kept = generator.randrange(len(shared) + 1)
        paths.append(shared[:kept] + [1000 * (number + 1) + step for step in range(generator.randrange(1, 12))])
    cache: OrderedDict[int, None] = OrderedDict()
    hits = evicted = 0
    for path in paths:
        hits += sum(1 for _ in takewhile(cache.__contains__, path))
        for block in reversed(path):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
                evicted += 1
    result = replay_policy(trace_of(paths), "lru", capacity)
    assert (result.hit_blocks, result.evicted_blocks) == (hits, evicted)
