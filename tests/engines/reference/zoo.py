# SPDX-License-Identifier: Apache-2.0
"""Tiny models of each family the reference engine runs, made on the spot."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)

VOCAB = 128
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 11},
    "gemma3_text": {
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    },
    "falcon_h1": {
        "mamba_d_ssm": 48,
        "mamba_n_heads": 3,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "ssm_multipliers": [1.0, 1.5, 1.0, 1.0, 2.0],
    },
}
FAMILIES = tuple(_OWN)


def tiny_model(family: str, seed: int = 0) -> Any:
    """Return a new float32 model with the plain (eager) attention of transformers."""
    return copy.deepcopy(_made(family, seed))


@functools.cache
def _made(family: str, seed: int) -> Any:
    config = AutoConfig.for_model(family, **_SMALL, **_OWN[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    # Large enough that attention is far from uniform, so that a wrong key or value shows.
                    gain = 6.0 if "mamba.out_proj" in name else 1.5
                    parameter.normal_(0.0, 1.0 if "embed" in name else gain * parameter.shape[1] ** -0.5)
                # States that remember more than a few tokens, and that matter.
                elif name.endswith("dt_bias"):
                    parameter.fill_(-3.0)
                elif name.endswith("A_log"):
                    parameter.zero_()
                elif name.endswith("conv1d.weight"):
                    parameter.normal_(0.0, 0.5)
    return model.eval()


def random_prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits (count, vocab) of transformers alone, with no cache at all."""
    tokens, rows = list(prompt), []
    for _ in range(count):
        row = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        rows.append(row)
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :], torch.stack(rows)
