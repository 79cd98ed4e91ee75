# SPDX-License-Identifier: Apache-2.0
"""Hit rates of conversations that vLLM serves with little host memory. In the environment of ``make test-vllm``::

    .venv-vllm/bin/python -m bench.served_trace BLOCKS [POLICY]

BLOCKS is the size of host memory in GPU blocks. Only vLLM's interface and kvoffload's series are used, so that
``PYTHONPATH=OTHER/src:.`` measures another version. Not among ``BENCHES``: the development environment has no vLLM.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

CONVERSATIONS, TURNS, AT_ONCE = 24, 4, 8
BLOCK_TOKENS, GPU_BLOCKS = 32, 160
BLOCK_BYTES = 2 * BLOCK_TOKENS * 2 * 64 * 4
"""Of the model's one layer: key/value heads, tokens, keys and values, head size, float32."""


def serve(model: str, blocks: int, policy: str) -> tuple[int, int, int]:
    """(prompt tokens, those from vLLM's prefix cache and host memory together, those from host memory)."""
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1280,
        num_gpu_blocks_override=GPU_BLOCKS,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=1 << 28,
        max_num_batched_tokens=512,
        max_num_seqs=AT_ONCE,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config={
            "kv_connector": "KVOffloadConnector",
            "kv_connector_module_path": "kvoffload.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cpu_bytes_to_use": blocks * BLOCK_BYTES, "eviction_policy": policy},
        },
    )
    engine = llm.llm_engine
    chance = random.Random(7)
    said: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    queue = [(turn, each) for turn in range(TURNS) for each in chance.sample(range(CONVERSATIONS), CONVERSATIONS)]
    running: dict[str, int] = {}
    prompt_tokens = cached_tokens = 0
    while queue or running:
        while queue and len(running) < AT_ONCE and queue[0][1] not in running.values():
            turn, number = queue.pop(0)
            said[number] += [chance.randrange(2, 500) for _ in range(chance.randrange(60, 180))]
            parameters = SamplingParams(temperature=0, max_tokens=chance.randrange(40, 120), ignore_eos=True)
            engine.add_request(f"{number}-{turn}", {"prompt_token_ids": list(said[number])}, parameters)
            running[f"{number}-{turn}"] = number
        for output in engine.step():
            if output.finished:
                number = running.pop(output.request_id)
                prompt_tokens += len(said[number])
                cached_tokens += output.num_cached_tokens or 0
                said[number] += output.outputs[0].token_ids
    series: dict[str, Any] = {sample.name: sample.value for metric in REGISTRY.collect() for sample in metric.samples}
    engine.engine_core.shutdown()
    return prompt_tokens, cached_tokens, int(series["kvoffload_hit_tokens_total"])


def main() -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    from tests.engines.vllm.drafts import write_drafts

    blocks, policy = int(sys.argv[1]), (sys.argv[2:] or ["density"])[0]
    with tempfile.TemporaryDirectory() as directory:
        prompt, cached, host = serve(write_drafts(Path(directory))["eagle"].target, blocks, policy)
    print(
        f"{blocks} blocks: {prompt} prompt tokens, {cached / prompt:.1%} cached, {host / prompt:.1%} from host memory"
    )


if __name__ == "__main__":
    main()
