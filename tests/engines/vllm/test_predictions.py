# SPDX-License-Identifier: Apache-2.0
"""The simulator predicts vLLM under load: throughput, time to first token, and hits by tier."""

from __future__ import annotations

import pytest
from tests.engines.models import SmallModel
from tests.engines.virtual_time import SEEDS, Observed, Workload, assert_close, predict
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.prompts import BLOCK_BYTES, BLOCK_TOKENS

GPU_BLOCKS, CPU_BLOCKS = 110, 220
LOADS = [0.5, 0.9, 1.5]


@pytest.mark.vllm
def test_predictions_for_vllm(llama: SmallModel) -> None:
    extra = {"cpu_bytes_to_use": CPU_BLOCKS * BLOCK_BYTES, "offload_prompt_only": True, "eviction_policy": "lru"}
    # One GPU block is vLLM's own.
    asked = [[load, seed] for seed in SEEDS for load in LOADS]
    found = run_child("in_virtual_time", model=llama.path, extra=extra, gpu_blocks=GPU_BLOCKS + 1, workloads=asked)
    for (load, seed), observed in zip(asked, found, strict=True):
        workload = Workload(load, BLOCK_TOKENS, seed=seed)
        assert_close(predict(workload, GPU_BLOCKS, CPU_BLOCKS, "vllm"), Observed(**observed), workload)
