# SPDX-License-Identifier: Apache-2.0
"""Test that the simulator and an engine that really computes, stores and loads find the same hits, block by block."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.reference.inside import num_final_stores, take_reports
from tests.engines.reference.zoo import VOCAB, tiny_model
from tests.sizes import by_size
from tests.tiering.rig import quiesce

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.result import Result
from kvoffload.sim.trace import NO_SESSION, Trace
from kvoffload.sim.trace_files import load_trace
from kvoffload.tiering.base import CascadeMode, JobMetadata
from kvoffload.tiering.options import STORES, MemoryOptions
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import StoreTier, TierLimits

BLOCK_TOKENS = 4
CHUNK_TOKENS = 40
POLICIES = ["lru", "arc", "density"]


def conversations(num_requests: int, seed: int) -> Trace:
    """Prompts that share a head of three blocks, grow by turns, and now and then are longer than the small tiers."""
    rng = random.Random(seed)
    ids: list[list[int]] = []
    fresh = 3
    histories: list[list[int]] = [[0, 1, 2] for _ in range(8)]
    for _ in range(num_requests):
        which = min(int(rng.expovariate(0.4)), 7)
        grown = rng.randint(1, 6) if rng.random() < 0.9 else 20
        histories[which] = [*histories[which], *range(fresh, fresh + grown)]
        fresh += grown
        ids.append(histories[which])
        if len(histories[which]) > 40:
            histories[which] = [0, 1, 2]
    order: dict[int, int] = {}
    flat = [order.setdefault(block, len(order)) for path in ids for block in path]
    counts = np.array([len(path) for path in ids], dtype=np.int64)
    return Trace(
        name="made",
        block_tokens=BLOCK_TOKENS,
        times_s=np.arange(num_requests, dtype=np.float64) * 1000,
        input_tokens=counts * BLOCK_TOKENS + np.array([rng.choice([0, 0, 1, 3]) for _ in ids]),
        output_tokens=np.array([rng.choice([1, 2, 6, 11]) for _ in ids], dtype=np.int64),
        sessions=np.full(num_requests, NO_SESSION, dtype=np.int64),
        offsets=np.concatenate(([0], np.cumsum(counts))),
        ids=np.array(flat, dtype=np.int32),
    )


def prompt(trace: Trace, request: int, vocabulary: range = range(VOCAB)) -> list[int]:
    tokens: list[int] = []
    for block in trace.blocks(request).tolist():
        tokens += random.Random(block).choices(vocabulary, k=trace.block_tokens)
    missing = int(trace.input_tokens[request]) - len(tokens)
    return tokens + random.Random(-1 - request).choices(vocabulary, k=missing)


class PromptTier(StoreTier):
    """Every job has ended when the call returns, as in the simulator with links of infinite speed."""

    def submit_store(self, job: JobMetadata) -> None:
        super().submit_store(job)
        quiesce(self)

    def submit_load(self, job: JobMetadata) -> None:
        super().submit_load(job)
        quiesce(self)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        quiesce(self)
        self._store.touch(list(keys))


class PromptOptions(MemoryOptions, frozen=True, kw_only=True):
    """``{"type": "prompt", "max_blocks": ...}``: a store that evicts as the simulator's disk does."""

    max_blocks: int

    def build(self, primary_kv_view: memoryview, namespace: str) -> PromptTier:
        assert primary_kv_view.shape is not None
        block_bytes = primary_kv_view.shape[1]
        store = MemoryStore(block_bytes, self.max_blocks * block_bytes)
        limits = TierLimits(threads=1, max_backlog_blocks=1 << 20)
        tier = PromptTier(primary_kv_view, self.label, store, limits, exclusive=True)
        quiesce(tier)  # the scan
        return tier


@pytest.fixture
def prompt_tier() -> Iterator[str]:
    STORES.register("prompt", PromptOptions)
    yield "prompt"
    STORES.unregister("prompt")


def served(
    trace: Trace,
    cpu_blocks: int,
    gpu_blocks: int = 0,
    *,
    family: str = "llama",
    chunk_tokens: int = CHUNK_TOKENS,
    **config: Any,
) -> list[tuple[int, int]]:
    """Blocks that the engine found on the device and those it loaded from below, by request, one request at a time.

    A store ends before the next step, which is how the simulator takes it. Without ``gpu_blocks`` the device has room
    for every request, and keeps nothing of it.
    """
    options = EngineOptions(num_blocks=gpu_blocks or 128, block_tokens=BLOCK_TOKENS, max_batch_tokens=chunk_tokens)
    model = tiny_model(family)
    with Engine(model, options) as bare:
        block_bytes = bare.layout.block_bytes(1)
    offloading = parse_config({"cpu_bytes_to_use": cpu_blocks * block_bytes, "offload_prompt_only": True, **config})
    hits = []
    with Engine(model, options, offloading) as engine:
        assert engine.get_stats()["primary_blocks",] == cpu_blocks
        for number in range(len(trace)):
            if not gpu_blocks:
                engine.reset_cache(device=True, offloaded=False)
            hits.append(serve_one(engine, trace, number))
    return hits


def serve_one(engine: Engine, trace: Trace, number: int) -> tuple[int, int]:
    """Serve one request, and return the blocks that it found on the device and the blocks loaded from below."""
    sampling = SamplingParams(max_tokens=int(trace.output_tokens[number]))
    request = engine.add_request(prompt(trace, number), sampling)
    while not request.is_done:
        engine.step()
        end_transfers(engine)
    if num_final_stores(engine):
        engine.step()
        end_transfers(engine)
    return request.device_hit_tokens // BLOCK_TOKENS, request.external_hit_tokens // BLOCK_TOKENS


def end_transfers(engine: Engine) -> None:
    while engine.get_stats()["jobs_in_flight",] > num_final_stores(engine):
        take_reports(engine)


def simulated(
    trace: Trace, cpu_blocks: int, policy: str = "lru", chunk_tokens: int = CHUNK_TOKENS, **more: Any
) -> tuple[list[tuple[int, int]], Result]:
    found: list[tuple[int, int]] = []
    config = SimConfig(
        cpu_blocks=cpu_blocks,
        block_bytes=1000,
        policy=policy,
        chunk_tokens=chunk_tokens,
        load_bytes_per_s=math.inf,
        load_latency_s=0,
        engine="reference",
        disk_read_bytes_per_s=1e18,
        disk_write_bytes_per_s=1e18,
        disk_latency_s=0,
        load_policy="always",
        **more,
    )
    result = simulate(
        trace, config, on_request=lambda _, __, hit, ___: found.append((hit["device"], hit.total() - hit["device"]))
    )
    return found, result


@pytest.mark.parametrize(("cpu_blocks", "policy"), by_size([(6, "lru")], [*product([6, 30, 90, 1000], POLICIES)]))
def test_the_same_hits_block_for_block(cpu_blocks: int, policy: str) -> None:
    trace = conversations(by_size(quick=16, thorough=50), seed=cpu_blocks)
    found, result = simulated(trace, cpu_blocks, policy)
    assert found == served(trace, cpu_blocks, eviction_policy=policy)
    assert sum(below for _, below in found) > 0
    assert (result.sum_of("refused_stores") > 0) == (cpu_blocks <= 30)


@pytest.mark.parametrize("policy", by_size(["density"], ["lru", "density"]))
@pytest.mark.parametrize(
    ("gpu_blocks", "cpu_blocks"), by_size([(80, 150)], [(70, 90), (80, 150), (110, 120), (1000, 90)])
)
def test_the_same_hits_with_a_device_that_keeps_prefixes(gpu_blocks: int, cpu_blocks: int, policy: str) -> None:
    trace = conversations(by_size(quick=30, thorough=60), seed=gpu_blocks)
    found, _ = simulated(trace, cpu_blocks, policy, gpu_blocks=gpu_blocks)
    assert found == served(trace, cpu_blocks, gpu_blocks, eviction_policy=policy)
    assert sum(device for device, _ in found) > 0
    assert (sum(below for _, below in found) > 0) == (gpu_blocks < 1000)


@pytest.mark.parametrize("cascade", by_size(["on_store"], ["on_store", "on_evict"]))
@pytest.mark.parametrize(
    ("gpu_blocks", "cpu_blocks", "disk_blocks"),
    by_size([(0, 64, 130)], [(0, 30, 60), (0, 64, 130), (70, 50, 50), (0, 40, 1000)]),
)
def test_the_same_hits_with_a_disk_below(
    gpu_blocks: int, cpu_blocks: int, disk_blocks: int, cascade: CascadeMode, prompt_tier: str
) -> None:
    # Below a device, a disk that stores everything needs 80 requests until it holds blocks that are nowhere above it.
    trace = conversations(80 if gpu_blocks else by_size(quick=34, thorough=80), seed=disk_blocks)
    found, result = simulated(trace, cpu_blocks, gpu_blocks=gpu_blocks, disk_blocks=disk_blocks, cascade=cascade)
    tier = {"type": prompt_tier, "max_blocks": disk_blocks, "cascade": cascade}
    config = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], "eviction_policy": "lru"}
    config["load_policy"] = "always"  # the engine's choices would depend on how fast this machine is now
    assert found == served(trace, cpu_blocks, gpu_blocks, **config)
    assert result.disk_hit_blocks > 0


WHOLE = 4096
"""Tokens of a step that computes any prompt at once: the engine keeps a state at the end of each chunk, and the
simulator, like vLLM, at the last whole block of a prompt."""


@pytest.mark.long
@pytest.mark.parametrize(("cpu_blocks", "policy"), [*product([12, 50, 90, 1000], POLICIES)])
def test_the_same_hits_of_a_model_with_states(cpu_blocks: int, policy: str) -> None:
    trace = conversations(by_size(quick=30, thorough=60), seed=cpu_blocks)
    found, result = simulated(trace, cpu_blocks, policy, WHOLE, state_slots=1)
    assert found == served(trace, cpu_blocks, family="falcon_h1", chunk_tokens=WHOLE, eviction_policy=policy)
    assert sum(below for _, below in found) > 0
    assert result.sum_of("loaded_blocks") > result.hit_blocks["host"], "states are loaded too"
    if cpu_blocks == 1000:
        # With room for all, the shared part of a prompt is found only where another prompt ended.
        plain, _ = simulated(trace, cpu_blocks, policy, WHOLE)
        assert sum(below for _, below in found) < sum(below for _, below in plain)


@pytest.mark.parametrize("cascade", by_size(["on_evict"], ["on_store", "on_evict"]))
@pytest.mark.parametrize(("cpu_blocks", "disk_blocks"), by_size([(64, 130)], [(64, 130), (50, 1000)]))
def test_the_same_hits_of_a_model_with_states_and_a_disk(
    cpu_blocks: int, disk_blocks: int, cascade: CascadeMode, prompt_tier: str
) -> None:
    trace = conversations(by_size(quick=36, thorough=80), seed=disk_blocks)
    found, result = simulated(trace, cpu_blocks, "lru", WHOLE, disk_blocks=disk_blocks, cascade=cascade, state_slots=1)
    tier = {"type": prompt_tier, "max_blocks": disk_blocks, "cascade": cascade}
    config = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], "eviction_policy": "lru"}
    config["load_policy"] = "always"
    assert found == served(trace, cpu_blocks, family="falcon_h1", chunk_tokens=WHOLE, **config)
    assert result.disk_hit_blocks > 0


def test_what_an_engine_recorded_is_what_it_served(tmp_path: Path) -> None:
    """Recorded by the connector, loaded and simulated: the same hits again."""
    trace = conversations(15, seed=7)
    path = tmp_path / "served.jsonl"
    hits = served(trace, 60, record_trace=str(path), eviction_policy="lru")
    recorded = load_trace(path)
    assert recorded.block_tokens == BLOCK_TOKENS
    assert recorded.input_tokens.tolist() == trace.input_tokens.tolist()
    assert recorded.output_tokens.tolist() == trace.output_tokens.tolist()
    assert recorded.ids.tolist() == trace.ids.tolist()
    assert simulated(recorded, 60)[0] == hits
