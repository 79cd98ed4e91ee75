# SPDX-License-Identifier: Apache-2.0
"""The simulator and an engine that really computes, stores and loads find the same hits, block for block."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.reference.zoo import VOCAB, tiny_model

from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams
from kvoffload.sim.driver import SimConfig, simulate
from kvoffload.sim.load import load_trace
from kvoffload.sim.trace import NO_SESSION, Trace

BLOCK_TOKENS = 4
CHUNK_TOKENS = 40


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


def prompt(trace: Trace, request: int) -> list[int]:
    tokens: list[int] = []
    for block in trace.blocks(request).tolist():
        tokens += random.Random(block).choices(range(VOCAB), k=BLOCK_TOKENS)
    missing = int(trace.input_tokens[request]) - len(tokens)
    return tokens + random.Random(-1 - request).choices(range(VOCAB), k=missing)


def served(trace: Trace, cpu_blocks: int, **config: Any) -> list[int]:
    """Blocks that the engine loaded from host memory, by request, one request at a time and nothing on the device.

    A store ends before the next step, which is how the simulator takes it.
    """
    options = EngineOptions(num_blocks=128, block_tokens=BLOCK_TOKENS, max_batch_tokens=CHUNK_TOKENS)
    model = tiny_model("llama")
    with Engine(model, options) as bare:
        block_bytes = bare.layout.block_bytes(1)
    offloading = parse_config({"cpu_bytes_to_use": cpu_blocks * block_bytes, "offload_prompt_only": True, **config})
    hits = []
    with Engine(model, options, offloading) as engine:
        assert engine.get_stats()["primary_blocks",] == cpu_blocks
        for number in range(len(trace)):
            engine.reset_cache(device=True, offloaded=False)
            sampling = SamplingParams(max_tokens=int(trace.output_tokens[number]))
            request = engine.add_request(prompt(trace, number), sampling)
            while not request.is_done:
                engine.step()
                end_transfers(engine)
            hits.append(request.external_hit_tokens // BLOCK_TOKENS)
    return hits


def end_transfers(engine: Engine) -> None:
    assert engine._connector is not None
    assert engine._worker is not None
    while engine.get_stats()["jobs_in_flight",]:
        engine._scheduler.take_outcome(engine._connector.update_connector_output(engine._worker.get_report()))


def simulated(trace: Trace, cpu_blocks: int, policy: str) -> tuple[list[int], int]:
    found: list[int] = []
    config = SimConfig(cpu_blocks=cpu_blocks, block_bytes=1000, policy=policy, chunk_tokens=CHUNK_TOKENS)
    result = simulate(trace, config, served=lambda _, gpu, cpu, disk: found.append(gpu + cpu + disk))
    return found, result.refused_stores


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
@pytest.mark.parametrize("cpu_blocks", [6, 30, 90, 1000])
def test_the_same_hits_block_for_block(policy: str, cpu_blocks: int) -> None:
    trace = conversations(50, seed=cpu_blocks)
    found, refused = simulated(trace, cpu_blocks, policy)
    assert found == served(trace, cpu_blocks, eviction_policy=policy)
    assert sum(found) > 0
    assert (refused > 0) == (cpu_blocks == 6)


def test_what_an_engine_recorded_is_what_it_served(tmp_path: Path) -> None:
    """Recorded by the connector, loaded and simulated: the same hits again."""
    trace = conversations(30, seed=7)
    path = tmp_path / "served.jsonl"
    hits = served(trace, 60, record_trace=str(path))
    recorded = load_trace(path)
    assert recorded.block_tokens == BLOCK_TOKENS
    assert recorded.input_tokens.tolist() == trace.input_tokens.tolist()
    assert recorded.output_tokens.tolist() == trace.output_tokens.tolist()
    assert recorded.ids.tolist() == trace.ids.tolist()
    assert simulated(recorded, 60, "lru")[0] == hits
