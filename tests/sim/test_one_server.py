# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from tests.sizes import by_size

from kvoffload.config import DEFAULTS
from kvoffload.errors import ConfigError
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.disk import SimDisk
from kvoffload.sim.optimum import optimum
from kvoffload.sim.report import moved_blocks
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace

MachineTimes = SimConfig(
    cpu_blocks=100,
    block_bytes=1000,
    prefill_tokens_per_s=16.0,
    load_bytes_per_s=10_000.0,
    load_latency_s=0.5,
    disk_read_bytes_per_s=1000.0,
    disk_write_bytes_per_s=1000.0,
    disk_latency_s=0.25,
)
"""A block of 16 tokens takes a second to prefill, 0.1 s to load, a second on the disk's links."""


def first_tokens(trace: Trace, config: SimConfig) -> dict[int, float]:
    """Seconds to the first token, by request."""
    found: dict[int, float] = {}
    simulate(trace, config, on_request=lambda request, _, __, at_s: found.update({request: at_s}))
    return {request: at_s - float(trace.times_s[request]) for request, at_s in found.items()}


def test_times_by_hand(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1], [0, 1, 2], [0, 1]])
    trace.times_s[:] = [0, 1, 50]
    trace.input_tokens[:] = [33, 49, 32]
    result = simulate(trace, MachineTimes)
    waited, stored, loaded = 33 / 16 - 1, 0.5 + 0.2, 0.5 + 0.2
    first, second = 33 / 16, waited + stored + loaded + 17 / 16
    third = 0.5 + 0.1 + 1  # the last token is computed, so of two whole blocks one is a hit
    assert result.ttft_s["mean"] == pytest.approx((first + second + third) / 3)
    assert result.ttft_s["max"] == pytest.approx(second)
    assert (result.hit_blocks["host"], result.hit_tokens, result.accesses) == (3, 48, 7)
    assert result.sum_of("loaded_blocks") * result.server.block_bytes == 3000
    assert result.sum_of("stored_blocks") * result.server.block_bytes == 3000


def test_a_block_comes_back_from_disk(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0], [1], [2], [0]])
    trace.times_s[:] = [0, 100, 200, 300]
    trace.input_tokens[:] = 17
    result = simulate(trace, replace(MachineTimes, cpu_blocks=2, disk_blocks=5))
    assert (result.hit_blocks["host"], result.disk_hit_blocks) == (0, 1)
    assert moved_blocks(result, "written") * result.server.block_bytes == 3000
    assert moved_blocks(result, "read") * result.server.block_bytes == 1000
    assert result.ttft_s["p50"] == pytest.approx(17 / 16)
    assert result.ttft_s["max"] == pytest.approx(1.25 + 0.6 + 1 / 16)


def plain_lru(trace: Trace, capacity: int, chunk: int) -> list[int]:
    """Hits per request: whole blocks, the hit used from tail to head, then the rest stored chunk by chunk until that
    drives out blocks of the same prompt, and at the end the whole prompt used from tail to head."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in range(len(trace)):
        prompt = int(trace.input_tokens[request])
        path = trace.blocks(request).tolist()[: prompt // trace.block_tokens]
        usable = path[: (prompt - 1) // trace.block_tokens]
        hit = sum(1 for _ in takewhile(cache.__contains__, usable))
        for block in reversed(path[:hit]):
            cache.move_to_end(block)
        for at in range(hit, len(path), chunk):
            fresh = [block for block in path[at : at + chunk] if block not in cache]
            victims = [block for block in cache if block not in path[at : at + chunk]]
            victims = victims[: max(len(cache) + len(fresh) - capacity, 0)]
            for block in victims:
                del cache[block]
            cache |= dict.fromkeys(reversed(fresh))
            if set(victims) & set(path):
                break
        for block in reversed(path):
            if block in cache:
                cache.move_to_end(block)
        hits.append(hit)
    return hits


@pytest.mark.parametrize("share", by_size([10], [2, 10]))
def test_hits_are_those_of_a_plain_lru_request_by_request(shared_trace: Callable[..., Trace], share: int) -> None:
    trace = shared_trace("mooncake_conversation", max_requests=by_size(300, 1200))
    trace = replace(trace, times_s=np.arange(len(trace)) * 1e4)  # one at a time
    config = SimConfig(
        cpu_blocks=trace.num_unique * share // 100,
        block_bytes=1,
        policy="lru",
        load_bytes_per_s=math.inf,
        load_latency_s=0.0,
    )
    found: list[int] = []
    simulate(trace, config, on_request=lambda _, __, hit, ___: found.append(hit.total()))
    assert found == plain_lru(trace, config.cpu_blocks, config.chunk_tokens // trace.block_tokens)


def test_the_defaults_are_those_of_serving() -> None:
    config = SimConfig(cpu_blocks=1, block_bytes=1)
    assert (config.policy, config.store_threshold) == (DEFAULTS.eviction_policy, DEFAULTS.store_threshold)
    assert (config.max_wait_s, config.cascade) == (DEFAULTS.max_wait_s, None)


def test_the_same_input_gives_the_same_result(shared_trace: Callable[..., Trace]) -> None:
    trace = shared_trace("lmcache_agent_b256", max_requests=by_size(150, None))
    config = SimConfig(cpu_blocks=400, gpu_blocks=200, disk_blocks=900, block_bytes=8_000_000, policy="density")
    assert simulate(trace, config) == simulate(trace, config)


def test_tiers_add_up(shared_trace: Callable[..., Trace]) -> None:
    trace = shared_trace("lmcache_agent_b256", max_requests=by_size(300, None))
    small = SimConfig(cpu_blocks=300, block_bytes=1000, policy="lru", cascade="on_store")
    alone = simulate(trace, small)
    with_device = simulate(trace, replace(small, gpu_blocks=100))
    with_disk = simulate(trace, replace(small, gpu_blocks=100, disk_blocks=trace.num_unique))
    assert alone.hit_rate < with_disk.hit_rate
    assert with_device.hit_blocks["device"] > 0
    tiny = simulate(trace, replace(small, cpu_blocks=60, disk_blocks=trace.num_unique))
    assert tiny.disk_hit_blocks > 0
    assert with_disk.hit_blocks["device"] == with_device.hit_blocks["device"]
    (bound,) = optimum(trace, [trace.num_unique])
    assert with_disk.hit_blocks["device"] + with_disk.hit_blocks["host"] + with_disk.disk_hit_blocks <= bound
    assert moved_blocks(with_disk, "written") <= trace.num_unique, "each block once"
    assert with_disk.utilisation <= 1


def test_requests_larger_than_host_memory_are_served(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([list(range(50)), list(range(50))])
    result = simulate(trace, SimConfig(cpu_blocks=4, gpu_blocks=3, disk_blocks=100, block_bytes=10, chunk_tokens=160))
    assert result.sum_of("refused_stores") > 0
    assert result.hit_blocks["device"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_blocks": -1},
        {"cpu_blocks": 0, "disk_blocks": 1},
        {"disk_blocks": -1},
        {"gpu_blocks": -1},
        {"prefill_tokens_per_s": 0},
        {"block_bytes": 0},
        {"nodes_step_s": -0.1},
    ],
)
def test_a_machine_that_cannot_be(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(MachineTimes, **change)


def test_a_disk_slower_than_computing_changes_nothing(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1], [2, 3], [4, 5], *([[0, 1], [2, 3], [4, 5]] * 4)])
    trace.times_s[:] = [100 * request for request in range(len(trace))]
    trace.input_tokens[:] = 33
    trace.output_tokens[:] = 3  # the steps that decode show how long a prompt took
    machine = replace(MachineTimes, cpu_blocks=4, policy="lru")
    slow = replace(machine, disk_blocks=10, disk_read_bytes_per_s=400.0)
    without, cost, always = (
        simulate(trace, machine),
        simulate(trace, slow),
        simulate(trace, replace(slow, load_policy="always")),
    )
    assert without.sum_of("declined_blocks") == always.sum_of("declined_blocks") == 0
    assert cost.sum_of("declined_blocks") > 0
    assert cost.ttft_s["p50"] == pytest.approx(without.ttft_s["p50"])
    assert always.ttft_s["p50"] > 2 * without.ttft_s["p50"]
    assert always.disk_hit_blocks > cost.disk_hit_blocks


def test_an_engine_over_nodes_asks_its_disk_by_steps(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0], [1], [2], [0]])
    trace.times_s[:] = [0, 10, 20, 100]
    trace.input_tokens[:] = 17
    nodes = replace(MachineTimes, cpu_blocks=2, disk_blocks=5, nodes_step_s=0.1)
    found = first_tokens(trace, nodes)
    assert found[3] == pytest.approx(1.25 + 0.2 + 0.6 + 1 / 16)


def test_a_device_that_is_said_to_be_gigantic_has_room_for_everything() -> None:
    trace = synthesize("chat", 60, 3).whole_blocks()
    large = simulate(trace, SimConfig(10, 1 << 20, gpu_blocks=100_000))
    gigantic = simulate(trace, SimConfig(10, 1 << 20, gpu_blocks=1 << 60))
    assert (gigantic.servers, gigantic.ttft_s) == (large.servers, large.ttft_s)


def test_requests_that_queue_are_looked_up_again_only_for_a_reason(
    trace_of: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty prompts queue for a busy server, and the disk has their blocks. More steps need no more lookups."""
    asked = Counter[int]()
    lookup = SimDisk.lookup

    def counted(disk: SimDisk, *args: Any) -> bool | None:
        asked[chunk] += 1
        return lookup(disk, *args)

    monkeypatch.setattr(SimDisk, "lookup", counted)
    trace = trace_of([[100 * number + at for at in range(20)] for number in (*range(120), *range(30))])
    trace = replace(trace, times_s=np.repeat([0.0, 10_000.0], (120, 30)))
    for chunk in (64, 32):
        config = SimConfig(800, 2**20, disk_blocks=4000, chunk_tokens=chunk, prefill_tokens_per_s=400.0)
        result = simulate(trace, config)
        assert result.disk_hit_blocks > 500
    assert asked[32] < 1.3 * asked[64], asked
