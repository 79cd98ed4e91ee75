# SPDX-License-Identifier: Apache-2.0
"""Test fleets in virtual time: laws for any traffic, and the behaviour of single parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.errors import ConfigError
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, SharedStore, SimConfig
from kvoffload.sim.engine import Hits
from kvoffload.sim.result import Result
from kvoffload.sim.routers import ROUTERS, Asked, Fleet
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace

SERVER = SimConfig(cpu_blocks=60, block_bytes=1 << 20, gpu_blocks=20, prefill_tokens_per_s=2000.0)
FAST = SharedStore(2000, server_bytes_per_s=1e12, store_bytes_per_s=1e12, latency_s=0.0)


def traffic(num_requests: int = 300, seed: int = 0, stretch: float = 1.0) -> Trace:
    return synthesize("chat", num_requests, seed).whole_blocks().stretched(stretch)


def to_one(asked: Asked, fleet: Fleet) -> int:
    return 0


@given(
    seed=st.integers(0, 1000),
    cpu_blocks=st.integers(1, 200),
    gpu_blocks=st.integers(0, 60),
    disk_blocks=st.sampled_from([0, 100, 1000]),
    stretch=st.floats(0.05, 5.0),
)
@settings(deadline=None, max_examples=by_size(6, 15))
def test_one_server_is_the_simulation_of_one_server_to_the_last_digit(
    seed: int, cpu_blocks: int, gpu_blocks: int, disk_blocks: int, stretch: float
) -> None:
    trace = traffic(by_size(40, 80), seed, stretch)
    config = replace(SERVER, cpu_blocks=cpu_blocks, gpu_blocks=gpu_blocks, disk_blocks=disk_blocks)
    alone = simulate(trace, config)
    fleets = [
        simulate(trace, FleetConfig(config)),
        simulate(trace, FleetConfig(config, servers=3), router=to_one),
    ]
    for result in fleets:
        hits = result.hit_blocks
        below = hits.total() - hits["device"] - hits["host"]
        assert (hits["device"], hits["host"], below) == (
            alone.hit_blocks["device"],
            alone.hit_blocks["host"],
            alone.disk_hit_blocks,
        )
        assert result.ttft_s == alone.ttft_s
        assert result.sum_of("prefill_s") == alone.sum_of("prefill_s")
        assert result.accesses == alone.accesses


@given(
    seed=st.integers(0, 1000),
    servers=st.integers(1, 6),
    router=st.sampled_from(sorted(ROUTERS)),
    is_shared=st.booleans(),
)
@settings(deadline=None, max_examples=by_size(8, 20))
def test_no_token_and_no_second_is_lost(seed: int, servers: int, router: str, is_shared: bool) -> None:
    trace = traffic(by_size(40, 80), seed, 0.3)
    config = FleetConfig(SERVER, servers, router, FAST if is_shared else None)
    served: dict[int, Hits] = {}
    result = simulate(trace, config, on_request=lambda request, _, hit, __: served.update({request: hit}))
    assert sorted(served) == [*range(len(trace))], "each request is answered once"
    assert sum(server.requests for server in result.servers) == len(trace)
    hits = sum(hit.total() for hit in served.values())
    computed = result.sum_of("computed_tokens")
    assert result.sum_of("prefill_s") * SERVER.prefill_tokens_per_s == pytest.approx(computed)
    if not result.sum_of("preemptions"):
        assert result.hit_blocks.total() == hits
        assert computed + hits * trace.block_tokens == trace.total_input_tokens
    else:  # tokens lost by a preemption are computed again
        assert computed + hits * trace.block_tokens >= trace.total_input_tokens


@given(seed=st.integers(0, 1000), servers=st.integers(1, 4), router=st.sampled_from(sorted(ROUTERS)))
@settings(deadline=None, max_examples=by_size(6, 10))
def test_littles_law_holds_for_what_a_router_sees(seed: int, servers: int, router: str) -> None:
    trace = traffic(60, seed, 0.2)
    inner = ROUTERS[router]()
    seen: list[tuple[float, int]] = []

    def watch(asked: Asked, fleet: Fleet) -> int:
        seen.append((asked.time_s, sum(server.requests for server in fleet.servers)))
        return inner(asked, fleet)

    ends: list[float] = []
    simulate(trace, FleetConfig(SERVER, servers), router=watch, on_request=lambda _, __, ___, end_s: ends.append(end_s))
    for time_s, waiting in seen:
        arrived = int((trace.times_s <= time_s).sum())
        tied = int((trace.times_s == time_s).sum())
        answered = sum(end_s <= time_s for end_s in ends)
        assert arrived - tied - answered <= waiting <= arrived - answered


def paths(trace_of: Callable[..., Trace], prompts: list[list[int]], gap_s: float = 100.0) -> Trace:
    trace = trace_of(prompts)
    return replace(trace, times_s=np.arange(len(prompts)) * gap_s, input_tokens=trace.input_tokens + 1)


def found(trace: Trace, config: FleetConfig) -> tuple[list[Hits], Result]:
    hits: list[Hits] = []
    result = simulate(trace, config, on_request=lambda _, __, hit, ___: hits.append(hit))
    return hits, result


@pytest.mark.parametrize("servers", [1, 3])
def test_a_result_so_far_has_the_least_times_that_are_possible(servers: int) -> None:
    trace = synthesize("chat", by_size(100, 200), 2).whole_blocks().stretched(0.1)
    config = FleetConfig(SERVER, servers)
    found: list[Result] = []
    whole = simulate(trace, config, is_hopeless=lambda so_far: bool(found.append(so_far)))
    assert whole == simulate(trace, config)
    assert len(found) > 10
    for earlier, later in pairwise([*found, whole]):
        assert all(seconds <= later.ttft_s[name] for name, seconds in earlier.ttft_s.items())
        assert earlier.answering_s <= later.answering_s
        assert earlier.sum_of("busy_s") <= later.sum_of("busy_s")
        assert earlier.sum_of("requests") <= later.sum_of("requests")
        assert (earlier.requests, earlier.arriving_s) == (later.requests, later.arriving_s)
    assert found[0].ttft_s["p50"] == 0 < found[-1].ttft_s["p50"]
    assert simulate(trace, config, is_hopeless=lambda so_far: so_far.sum_of("requests") > 9) in found


def test_one_server_finds_what_another_one_shared(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    server = replace(SERVER, gpu_blocks=0, load_policy="always")
    hits, result = found(trace, FleetConfig(server, 2, "round-robin", FAST))
    assert hits == [Counter(), Counter(shared=3), Counter(host=3)]
    assert [member.read_blocks.get("shared", 0) for member in result.servers] == [0, 3]
    assert [member.written_blocks.get("shared", 0) for member in result.servers] == [3, 0]


def test_a_pool_is_shared_by_the_servers_of_one_machine(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1, 2]] * 4)
    server = replace(SERVER, gpu_blocks=0, load_policy="always")
    hits, _ = found(trace, FleetConfig(server, 4, "round-robin", pool=FAST, servers_per_machine=2))
    assert hits == [Counter(), Counter(pool=3), Counter(), Counter(pool=3)]


def test_blocks_expire(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1], [0, 1], [2], [0, 1]])
    server = replace(SERVER, gpu_blocks=0, load_policy="always")
    kept, _ = found(trace, FleetConfig(server, 2, "round-robin", replace(FAST, ttl_s=150.0)))
    assert kept[1] == Counter(shared=2)
    gone, _ = found(trace, FleetConfig(server, 2, "round-robin", replace(FAST, ttl_s=50.0)))
    assert gone[1] == Counter()


def test_prefill_apart_hands_its_blocks_over(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1, 2, 3]] * 3)
    server = replace(SERVER, gpu_blocks=0, load_policy="always", chunk_tokens=trace.block_tokens)
    numbers: list[int] = []
    result = simulate(
        trace,
        FleetConfig(server, 3, "round-robin", FAST, prefill_servers=1),
        on_request=lambda _, number, *__: numbers.append(number),
    )
    assert numbers == [0, 1, 0, 2, 0, 1]
    assert result.handover_s["max"] < result.ttft_s["max"]


@given(
    blocks=st.integers(1, 12),
    chunk_blocks=st.integers(1, 5),
    odd_tokens=st.integers(1, 15),
    bytes_per_s=st.floats(1e8, 1e11),
    latency_s=st.floats(0.0, 0.05),
)
@settings(deadline=None, max_examples=60)
def test_a_decoding_server_takes_what_has_arrived_and_computes_the_rest(
    blocks: int, chunk_blocks: int, odd_tokens: int, bytes_per_s: float, latency_s: float
) -> None:
    trace = synthesize("chat", 1, 0).whole_blocks()
    tokens = trace.block_tokens
    prompt = blocks * tokens + odd_tokens
    trace = replace(
        trace, input_tokens=np.array([prompt]), offsets=np.array([0, blocks]), ids=np.arange(blocks, dtype=np.int32)
    )
    # Twelve of these blocks are one portion of a promotion.
    server = replace(
        SERVER,
        block_bytes=1 << 18,
        gpu_blocks=0,
        load_policy="always",
        chunk_tokens=chunk_blocks * tokens,
        load_bytes_per_s=math.inf,
        load_latency_s=1e-9,  # a store that a step begins has ended with the next one
    )
    shared = SharedStore(100, bytes_per_s, float("inf"), latency_s)
    hits: list[Hits] = []
    result = simulate(
        trace,
        FleetConfig(server, 2, "round-robin", shared, prefill_servers=1),
        on_request=lambda _, __, hit, ___: hits.append(hit),
    )

    def transfer_s(num_blocks: int) -> float:
        return latency_s + num_blocks * server.block_bytes / bytes_per_s

    # A chunk's blocks are in host memory when the next chunk has been computed, and are then written in one job.
    speed, chunk_tokens = server.prefill_tokens_per_s, chunk_blocks * tokens
    ends_s = [min(end, prompt) / speed for end in range(chunk_tokens, prompt + chunk_tokens, chunk_tokens)]
    first_token_s = ends_s[-1]
    arrived, free_s = 0, 0.0
    for at, begin_s in enumerate(ends_s[1:]):
        stop = min((at + 1) * chunk_blocks, blocks)
        free_s = max(free_s, begin_s) + transfer_s(stop - at * chunk_blocks)
        arrived = stop if free_s <= first_token_s else arrived
    assert [hit["shared"] for hit in hits] == [0, arrived]
    seconds = (prompt - arrived * tokens) / speed
    if arrived:
        seconds += transfer_s(arrived)
        seconds += server.load_latency_s + arrived * server.block_bytes / server.load_bytes_per_s
    assert result.handover_s["max"] == pytest.approx(seconds, abs=1e-7)


def test_a_prefill_server_generates_one_token_and_hand_overs_are_no_hits(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1], [2, 3], [4, 5], [0, 1]])
    trace = replace(trace, output_tokens=np.full(4, 2 * trace.block_tokens))
    # The device has room for three prompts, and not for all that they generate.
    server = replace(SERVER, gpu_blocks=9, load_policy="always", load_bytes_per_s=math.inf, load_latency_s=0.0)
    at_once = SharedStore(2000, float("inf"), float("inf"), latency_s=0.0)
    result = simulate(trace, FleetConfig(server, 2, "round-robin", at_once, prefill_servers=1))
    assert result.hit_blocks == {"device": 2}
    assert result.hit_rate == 2 / 8
    assert result.handed_over == 1.0
    together = simulate(trace, FleetConfig(server, 1))
    assert together.hit_blocks == {"device": 1, "host": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"servers": 0}, "at least one server"),
        ({"shared": FAST, "server": replace(SERVER, cpu_blocks=0)}, "host memory above it"),
        ({"servers": 2, "prefill_servers": 2, "shared": FAST}, "one to decode"),
        ({"servers": 2, "prefill_servers": 1}, "requires a shared tier"),
        ({"router": "round"}, "round-robin"),
    ],
)
def test_a_fleet_that_cannot_exist_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FleetConfig(**{"server": SERVER, **change})  # type: ignore[arg-type]


def test_a_router_that_chooses_nobody_is_told_so() -> None:
    with pytest.raises(ConfigError, match="chose server 7"):
        simulate(traffic(3), FleetConfig(SERVER, 2), router=lambda asked, fleet: 7)
