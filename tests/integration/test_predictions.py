# SPDX-License-Identifier: Apache-2.0
"""The simulator predicts the reference engine under load: throughput, time to first token, and hits by tier."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from tests.engines.reference.inside import num_final_stores
from tests.engines.reference.zoo import tiny_model
from tests.engines.virtual_time import (
    CHUNK_TOKENS,
    SEEDS,
    SIDE_BY_SIDE,
    Observed,
    Workload,
    assert_close,
    predict,
    serve,
)
from tests.integration.test_simulator_agrees import end_transfers
from tests.sizes import by_size

from kvoffload.config import parse_config
from kvoffload.connector.short_loads import ShortLoads
from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams
from kvoffload.engines.reference.request import Request

BLOCK_TOKENS = 16
GPU_BLOCKS, CPU_BLOCKS = 200, 400


class Reference:
    """The reference engine, step by step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now_s = 0.0
        self.requests: dict[int, Request] = {}
        self._waiting: set[int] = set()

    def add(self, number: int, prompt: list[int], output: int) -> None:
        self.requests[number] = self.engine.add_request(prompt, SamplingParams(max_tokens=output))
        self._waiting.add(number)

    @property
    def has_requests(self) -> bool:
        return self.engine.has_requests or bool(num_final_stores(self.engine))

    def step(self) -> tuple[int, list[int]]:
        before = self.engine.counts.computed_tokens
        self.engine.step()
        end_transfers(self.engine)
        first = [number for number in self._waiting if self.requests[number].output_token_ids]
        self._waiting.difference_update(first)
        return self.engine.counts.computed_tokens - before, first


def served(workload: Workload) -> Observed:
    options = EngineOptions(GPU_BLOCKS, BLOCK_TOKENS, max_batch_tokens=CHUNK_TOKENS, max_requests=SIDE_BY_SIDE)
    model = tiny_model("llama")
    with Engine(model, options) as bare:
        block_bytes = bare.layout.block_bytes(1)
    size = CPU_BLOCKS * block_bytes
    config = parse_config({"cpu_bytes_to_use": size, "offload_prompt_only": True, "eviction_policy": "lru"})
    # Copies take no time in the simulation, so each load is short, however long a copy takes on this machine.
    short = patch.object(ShortLoads, "fits", lambda self, *_: self._is_on)
    with short, Engine(model, options, config) as engine:
        stepped = Reference(engine)
        seconds, ttft_s = serve(stepped, workload)
        counts = engine.counts
        return Observed(seconds, ttft_s, counts.device_hit_tokens, counts.external_hit_tokens)


@pytest.mark.parametrize("load", [0.5, 0.9, 1.5])
@pytest.mark.parametrize("seed", by_size(SEEDS[:1], SEEDS))
def test_predictions_for_the_reference_engine(load: float, seed: int) -> None:
    workload = Workload(load, BLOCK_TOKENS, seed=seed)
    predicted = predict(workload, GPU_BLOCKS, CPU_BLOCKS, "reference")
    assert_close(predicted, served(workload), workload)
