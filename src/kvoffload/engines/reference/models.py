# SPDX-License-Identifier: Apache-2.0
"""Models to serve: a random Llama, or any supported model from a folder or the hub."""

from __future__ import annotations

from typing import Any

import torch

from kvoffload.engines.reference.attention import ATTENTION_NAME
from kvoffload.engines.reference.layout import kv_shape
from kvoffload.errors import ConfigError

__all__ = ["build_random_model", "load_model", "use_paged_attention"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build_random_model(
    *,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 2,
    vocab: int = 4096,
    context_tokens: int = 8192,
    seed: int = 0,
    device: str = "cpu",
) -> Any:
    """A float32 Llama with random weights, the same for the same arguments. Needs no network.

    The weights are scaled so that the next token depends on the context, not on the last token alone. Attention is
    sharper than with the usual initialisation, and its output is larger next to the embeddings. So a single wrong block
    changes the tokens, while rounding (other batches, other chunks) stays far below the differences between logits.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ConfigError(
            f"hidden={hidden} must be an even multiple of heads={heads}, and heads a multiple of kv_heads={kv_heads}."
        )
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context_tokens,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                # Each matrix keeps the size of its input, times the gain of its role.
                gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
                parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5)
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
    model.name_or_path = f"random Llama (seed {seed})"
    return use_paged_attention(model.to(device))


_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 2.0, "down_proj": 0.7}


def load_model(path_or_id: str, *, dtype: str = "float32", device: str = "cpu") -> Any:
    """A causal LM from a folder or the hub. Raises ``ConfigError`` if it cannot be loaded or is not supported."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}.")
    try:
        kv_shape(AutoConfig.from_pretrained(path_or_id))
        model = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=_DTYPES[dtype])
    except ConfigError:
        raise
    except (OSError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(f"The model {path_or_id!r} cannot be loaded: {reason}") from exc
    return use_paged_attention(model.to(device))


def use_paged_attention(model: Any) -> Any:
    """Makes a transformers causal LM attend over the engine's KV pool. It no longer runs outside the engine."""
    kv_shape(model.config)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()
