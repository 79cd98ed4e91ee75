# SPDX-License-Identifier: Apache-2.0
"""Serve more prompts with vLLM than its KV cache holds, twice: ``python examples/vllm_offline.py [MODEL]``.

Without MODEL, the script uses ``small-model``: Qwen3's architecture with few layers and random weights, so it needs no
download and no GPU. The second round finds all prompts in host memory. ``docs/tutorial.md`` explains the output.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
os.environ.setdefault("KVOFFLOAD_CONFIG", str(HERE / "offload.yaml"))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; otherwise vLLM for CPUs asks for 92% of the memory

NUM_PROMPTS, PROMPT_TOKENS, BLOCK_TOKENS = 8, 1024, 32
GPU_BLOCKS = 80
"""The engine's own KV cache holds 80 blocks of 32 tokens: two and a half prompts."""


def main(model: str | None) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model or str(HERE / "small-model"),
        skip_tokenizer_init=True,
        load_format="auto" if model else "dummy",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=GPU_BLOCKS,
    )
    prompts = [[100 + number] * PROMPT_TOKENS for number in range(NUM_PROMPTS)]
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    answers: list[list[int]] = []
    for round_ in ("first", "second"):
        tokens, found, seconds = [], 0, []
        for prompt in prompts:
            start_s = time.perf_counter()
            (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - start_s)
            found += output.num_cached_tokens or 0
            tokens += output.outputs[0].token_ids
        answers.append(tokens)
        total = NUM_PROMPTS * PROMPT_TOKENS
        print(
            f"{round_} round: {found:,} of {total:,} prompt tokens found, "
            f"median time to first token {1e3 * statistics.median(seconds):,.0f} ms",
            flush=True,
        )
    assert answers[0] == answers[1], "offloading changed a token"


if __name__ == "__main__":
    main(*sys.argv[1:2] or [None])
