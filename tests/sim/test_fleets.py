# SPDX-License-Identifier: Apache-2.0
"""Test fleets in virtual time: laws for any traffic, and the behaviour of single parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.errors import ConfigError
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import Death, FleetConfig, SharedStore, SimConfig
from kvoffload.sim.engine import Hit
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
    trace = traffic(80, seed, stretch)
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
            alone.gpu_hit_blocks,
            alone.cpu_hit_blocks,
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
    dies=st.booleans(),
)
@settings(deadline=None, max_examples=by_size(8, 20))
def test_no_token_and_no_second_is_lost(seed: int, servers: int, router: str, is_shared: bool, dies: bool) -> None:
    trace = traffic(80, seed, 0.3)
    middle_s = float(trace.times_s[40])
    deaths = (Death(servers - 1, middle_s, middle_s + 50.0),) if dies else ()
    config = FleetConfig(SERVER, servers, router, FAST if is_shared else None, deaths=deaths)
    served: dict[int, Hit] = {}
    result = simulate(trace, config, on_request=lambda request, _, hit, __: served.update({request: hit}))
    assert sorted(served) == [*range(len(trace))], "each request is answered once"
    assert sum(server.requests for server in result.servers) == len(trace)
    hits = sum(hit.device + hit.host + hit.disk for hit in served.values())
    computed = result.sum_of("computed_tokens")
    assert result.sum_of("prefill_s") * SERVER.prefill_tokens_per_s == pytest.approx(computed)
    if not dies and not result.sum_of("preemptions"):
        assert result.hit_blocks.total() == hits
        assert computed + hits * trace.block_tokens == trace.total_input_tokens
    else:  # tokens lost with a server or by a preemption are computed again
        assert computed + hits * trace.block_tokens >= trace.total_input_tokens


def test_who_comes_while_no_server_lives_is_served_as_if_it_came_when_one_is_back() -> None:
    trace = traffic(12)
    back_s = float(trace.times_s[-1]) + 1.0
    ends: list[dict[int, float]] = []
    for times_s, deaths in ((trace.times_s, (Death(0, 0.0, back_s),)), (np.full(len(trace), back_s), ())):
        ends.append({})
        config = FleetConfig(SERVER, 1, deaths=deaths)
        simulate(
            replace(trace, times_s=times_s),
            config,
            on_request=lambda request, _, __, end_s: ends[-1].update({request: end_s}),
        )
    assert ends[0] == pytest.approx(ends[1]) and len(ends[0]) == 12


@given(seed=st.integers(0, 1000), servers=st.integers(1, 4), router=st.sampled_from(sorted(ROUTERS)))
@settings(deadline=None, max_examples=10)
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


def found(trace: Trace, config: FleetConfig) -> tuple[list[dict[str, int]], Result]:
    hits: list[dict[str, int]] = []
    result = simulate(
        trace, config, on_request=lambda _, __, hit, ___: hits.append({"host": hit.host, **dict(hit.below)})
    )
    return hits, result


def test_one_server_finds_what_another_one_shared(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    server = replace(SERVER, gpu_blocks=0, load_policy="always")
    hits, result = found(trace, FleetConfig(server, 2, "round-robin", FAST))
    assert hits == [{"host": 0}, {"host": 0, "shared": 3}, {"host": 3}]
    assert [member.read_blocks.get("shared", 0) for member in result.servers] == [0, 3]
    assert [member.written_blocks.get("shared", 0) for member in result.servers] == [3, 0]


def test_a_pool_is_shared_by_the_servers_of_one_machine(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1, 2]] * 4)
    server = replace(SERVER, gpu_blocks=0, load_policy="always")
    hits, _ = found(trace, FleetConfig(server, 4, "round-robin", pool=FAST, servers_per_machine=2))
    assert hits == [{"host": 0}, {"host": 0, "pool": 3}, {"host": 0}, {"host": 0, "pool": 3}]


def test_blocks_expire(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1], [0, 1], [2], [0, 1]])
    server = replace(SERVER, gpu_blocks=0, load_policy="always")
    kept, _ = found(trace, FleetConfig(server, 2, "round-robin", replace(FAST, ttl_s=150.0)))
    assert kept[1] == {"host": 0, "shared": 2}
    gone, _ = found(trace, FleetConfig(server, 2, "round-robin", replace(FAST, ttl_s=50.0)))
    assert gone[1] == {"host": 0}


def test_a_store_that_is_away_is_a_miss_and_comes_back_with_its_blocks(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1], [0, 1], [3], [0, 1], [4]])
    server = replace(SERVER, gpu_blocks=0, cpu_blocks=2, load_policy="always")
    away = replace(FAST, away=((50.0, 250.0),))
    hits, result = found(trace, FleetConfig(server, 2, "round-robin", away))
    assert [outage[:3] for outage in result.outages] == [("shared", 50.0, 250.0)]
    assert hits[1] == {"host": 0}, "away"
    assert hits[3]["host"] == 2 or hits[3].get("shared") == 2
    no_return, _ = found(trace, FleetConfig(server, 2, "round-robin", replace(FAST, away=((50.0, 1e9),))))
    assert all("shared" not in hit for hit in no_return)


def test_a_server_that_dies_loses_its_memory_keeps_its_disk_and_its_requests_go_elsewhere(
    trace_of: Callable[..., Trace],
) -> None:
    trace = paths(trace_of, [[0, 1, 2], [0, 1, 2], [5, 6, 7, 8], [0, 1, 2]])
    server = replace(SERVER, gpu_blocks=0, disk_blocks=50, cascade="on_store", load_policy="always")
    config = FleetConfig(server, 1, deaths=(Death(0, 200.001, 250.0),))
    hits, result = found(trace, config)
    assert hits[1] == {"host": 3}
    assert hits[3] == {"host": 0, "disk": 3}
    assert sum(member.requests for member in result.servers) == 4
    assert result.ttft_s["max"] > 50.0, "the request that was in flight waited for the return"


def test_a_server_was_busy_with_the_request_that_it_died_of(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1, 2, 3]])
    seconds = int(trace.input_tokens[0]) / SERVER.prefill_tokens_per_s
    server = replace(SERVER, gpu_blocks=0)
    _, result = found(trace, FleetConfig(server, 1, deaths=(Death(0, seconds / 2, seconds),)))
    (member,) = result.servers
    assert member.busy_s == pytest.approx(1.5 * seconds)
    assert result.utilisation == pytest.approx(0.75)


def test_a_server_that_dies_writes_nothing_more(trace_of: Callable[..., Trace]) -> None:
    trace = paths(trace_of, [[0, 1, 2], [0, 1, 2]])
    server = replace(SERVER, gpu_blocks=0, disk_blocks=50, cascade="on_evict", load_policy="always")
    hits, _ = found(trace, FleetConfig(server, 1, deaths=(Death(0, 50.0, 60.0),)))
    assert hits[1] == {"host": 0}, "what was in memory alone is lost"


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
    hits: list[Hit] = []
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
    assert [hit.below.get("shared", 0) for hit in hits] == [0, arrived]
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
        ({"servers": 2, "prefill_servers": 1}, "needs a shared tier"),
        ({"router": "round"}, "round-robin"),
        ({"deaths": (Death(3, 0.0, 1.0),)}, "The death of server 3 from 0 s to 1 s names none of the 1 servers"),
        ({"deaths": (Death(0, 2.0, 1.0),)}, "The death of server 0 from 2 s to 1 s must end after it begins"),
        ({"deaths": (Death(0, 9.0, 12.0), Death(0, 1.0, 9.0))}, "before the server is back"),
    ],
)
def test_a_fleet_that_cannot_exist_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FleetConfig(**{"server": SERVER, **change})  # type: ignore[arg-type]


def test_a_router_that_chooses_nobody_is_told_so() -> None:
    with pytest.raises(ConfigError, match="chose server 7"):
        simulate(traffic(3), FleetConfig(SERVER, 2), router=lambda asked, fleet: 7)
