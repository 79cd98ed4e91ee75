# SPDX-License-Identifier: Apache-2.0
"""A small target model with drafters of each kind that are nearly always right, and only with correct KV.

A random drafter is never accepted, so its KV could be anything. Here the target has one layer, and the head of each
kind is the same layer over the embeddings of the shifted tokens. So it computes the target's result one step earlier,
except for the first token, which it never sees. Relative positions are the same, and so are the norms, because all
embeddings have the root mean square 1. The attention output is large compared to the residual, which differs in
EAGLE-3. Attention selects positions anywhere in the context, so a wrong block of the drafter's KV costs accepted
drafts. The tokens are the target's in any case.

A second target has a layer with a sliding window before that layer, so that vLLM makes several KV groups. The window
layer's effect is small: it changes tokens, but the same drafters are still right once in eight times. A third target
has such a layer with full attention, for two stages of a pipeline. Another drafter has more KV heads than the target,
and contains each of the target's heads twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engines.models import HEAD_DIM, VOCAB, write_tokenizer

if TYPE_CHECKING:
    import torch

HIDDEN, MLP, HEADS, KV_HEADS = 256, 512, 4, 2
NUM_DRAFTS = 3
WINDOW = 200
"""Tokens that the second target's sliding window sees."""
_QUIET = 0.004
"""The gain of the window layer's attention. Together with the gains of values and output, it adds a quarter of the
residual."""
_GAINS = {"q": 2.5, "k": 2.5, "v": 8.0, "o": 8.0}
_SEED = 20

Weights = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Speculation:
    """A target, and vLLM's ``speculative_config`` for a drafter of it."""

    target: str
    config: dict[str, Any]
    drafter_kv_heads: int = KV_HEADS


def write_drafts(directory: Path) -> dict[str, Speculation]:
    """Write the models and return them by method. All targets with one layer answer alike."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    embeddings = torch.randn(VOCAB, HIDDEN, generator=generator)
    embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    head = torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
    layer = _layer(generator)
    ones, eye, zero = torch.ones(HIDDEN), torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    whole = {"model.embed_tokens.weight": embeddings, "lm_head.weight": head, "model.norm.weight": ones}
    whole |= _under("model.layers.0.", layer)

    target = _write(directory / "target", _config("LlamaForCausalLM", "llama"), whole)

    # EAGLE: the layer sees fc(embedding, the target's hidden state), without a norm.
    body = {name: weight for name, weight in layer.items() if name != "input_layernorm.weight"}
    eagle = _write(
        directory / "eagle",
        _config("LlamaForCausalLM", "llama"),
        {"fc.weight": torch.cat([eye, zero], 1)} | _under("layers.0.", body),
    )

    # EAGLE-3: the layer's attention sees the embedding and fc(hidden states of several of the target's layers).
    wide = {
        f"self_attn.{name}_proj.weight": torch.nn.functional.pad(layer[f"self_attn.{name}_proj.weight"], (0, HIDDEN))
        for name in "qkv"
    }
    eagle3 = _write(
        directory / "eagle3",
        _config(
            "LlamaForCausalLMEagle3",
            "llama",
            draft_vocab_size=VOCAB,
            norm_output=True,
            num_aux_hidden_states=2,
            eagle_aux_hidden_state_layer_ids=[0, 1],
        ),
        {
            "fc.weight": torch.cat([zero, zero], 1),
            "midlayer.hidden_norm.weight": ones,
            "norm.weight": ones,
            "lm_head.weight": head,
        }
        | _under("midlayer.", layer | wide),
    )

    # MTP: a target of another architecture, which is the same with biases of zero, and brings its drafter along.
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    biased = layer | {f"self_attn.{name}_proj.bias": torch.zeros(size) for name, size in sizes.items()}
    module = biased | {
        "token_layernorm.weight": ones,
        "hidden_layernorm.weight": ones,
        "final_layernorm.weight": ones,
        "input_proj.weight": torch.cat([zero, eye], 1),
    }
    mtp = _write(
        directory / "mtp",
        _config("MiMoForCausalLM", "qwen2", num_nextn_predict_layers=1),
        whole | _under("model.layers.0.", biased) | _under("model.mtp_layers.0.", module),
    )
    # EAGLE with twice as many KV heads: each query head has its own copy of the KV head that it shared.
    copies = HEADS // KV_HEADS
    doubled = body | {
        f"self_attn.{name}_proj.weight": layer[f"self_attn.{name}_proj.weight"]
        .view(KV_HEADS, HEAD_DIM, HIDDEN)
        .repeat_interleave(copies, 0)
        .view(HEADS * HEAD_DIM, HIDDEN)
        for name in "kv"
    }
    eagle_heads = _write(
        directory / "eagle_heads",
        _config("LlamaForCausalLM", "llama", num_key_value_heads=HEADS),
        {"fc.weight": torch.cat([eye, zero], 1)} | _under("layers.0.", doubled),
    )

    # The target with a window layer before its own.
    quiet = _layer(generator)
    quiet["self_attn.o_proj.weight"] *= _QUIET
    quiet["mlp.down_proj.weight"] *= 0.1
    no_layers = {name: weight for name, weight in whole.items() if "layers" not in name}
    windows = _write(
        directory / "windows",
        _config(
            "LlamaForCausalLM",
            "llama",
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=WINDOW,
        ),
        no_layers | _under("model.layers.0.", quiet) | _under("model.layers.1.", layer),
    )
    biases = {name: bias for name, bias in biased.items() if name.endswith(".bias")}
    stages = _write(
        directory / "stages",
        _config("MiMoForCausalLM", "qwen2", num_hidden_layers=2, num_nextn_predict_layers=1),
        no_layers
        | _under("model.layers.0.", quiet | biases)
        | _under("model.layers.1.", biased)
        | _under("model.mtp_layers.0.", module),
    )
    drafts = {"num_speculative_tokens": NUM_DRAFTS}
    return {
        "eagle, other heads": Speculation(target, {"method": "eagle", "model": eagle_heads, **drafts}, HEADS),
        "eagle, windows": Speculation(windows, {"method": "eagle", "model": eagle, **drafts}),
        "mtp, stages": Speculation(stages, {"method": "mtp", **drafts}),
        "eagle": Speculation(target, {"method": "eagle", "model": eagle, **drafts}),
        "eagle3": Speculation(target, {"method": "eagle3", "model": eagle3, **drafts}),
        "mtp": Speculation(mtp, {"method": "mtp", **drafts}),
        "draft_model": Speculation(target, {"method": "draft_model", "model": target, **drafts}),
        "ngram": Speculation(target, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **drafts}),
    }


def _layer(generator: torch.Generator) -> Weights:
    import torch

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    return {
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, _GAINS["q"]),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, _GAINS["k"]),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, _GAINS["v"]),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, _GAINS["o"]),
        "mlp.gate_proj.weight": matrix(MLP, HIDDEN),
        "mlp.up_proj.weight": matrix(MLP, HIDDEN),
        "mlp.down_proj.weight": matrix(HIDDEN, MLP),
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _under(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: weight for name, weight in weights.items()}


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": VOCAB - 1,
        "torch_dtype": "float32",
        **more,
    }


def _write(directory: Path, config: dict[str, Any], weights: Weights) -> str:
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    # Each file has its own copy: tensors must not share memory.
    copies = {name: weight.clone().contiguous() for name, weight in weights.items()}
    save_file(copies, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return str(directory)
