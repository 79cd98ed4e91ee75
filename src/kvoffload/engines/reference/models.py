# SPDX-License-Identifier: Apache-2.0
"""Build the models to serve: a random Llama or Falcon-H1, or any supported model from a folder or the hub."""

from __future__ import annotations

from typing import Any

import torch

from kvoffload.engines.reference.attention import ATTENTION_NAME
from kvoffload.engines.reference.layout import kv_shape
from kvoffload.engines.reference.states import use_paged_states
from kvoffload.errors import ConfigError

KINDS = {"attention": "Llama", "hybrid": "Falcon-H1"}
"""The architectures of random models. transformers' classes have these names, without the dash."""


def build_random_model(
    kind: str = "attention",
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
    """Return a float32 model of one of ``KINDS`` with random weights that depend only on the arguments. Needs no
    network.

    The weights are scaled so that the next token depends on the whole context and not only on the last token. Attention
    is sharper than with the usual initialisation, and its output is larger next to the embeddings. So a single wrong
    block changes the tokens, while rounding (other batches, other chunks) stays far below the differences between
    logits.

    In a ``hybrid`` model, each layer combines attention with a recurrent state (Mamba2), which remembers between ten
    and a few hundred tokens. With heads of 64, a state is about as large as the keys and values of 16 tokens. A wrong
    state changes the tokens, like a wrong block of keys and values.
    """
    import transformers

    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} must be one of {', '.join(KINDS)}.")
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ConfigError(
            f"hidden={hidden} must be an even multiple of heads={heads}, and heads a multiple of kv_heads={kv_heads}."
        )
    name = KINDS[kind].replace("-", "")
    states = {
        "mamba_d_ssm": hidden // 2,
        "mamba_n_heads": heads,
        "mamba_d_head": hidden // 2 // heads,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{name}Config")(
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
        **(states if kind == "hybrid" else {}),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for part, parameter in model.named_parameters():
            if parameter.ndim == 2:
                # Each matrix preserves the magnitude of its input, times the gain of its role.
                gain = next((gain for role, gain in _GAINS.items() if role in part), 1.0)
                parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5)
            elif part.endswith("conv1d.weight"):
                parameter.normal_(0.0, parameter.shape[2] ** -0.5)
            elif part.endswith("dt_bias"):
                parameter.copy_(torch.linspace(-4.0, -2.0, len(parameter)))  # steps of 0.02 to 0.13 at rest
            elif part.endswith("A_log"):
                parameter.zero_()
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
    model.name_or_path = f"random {KINDS[kind]} (seed {seed})"
    return use_paged_attention(model.to(device))


_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 2.0, "down_proj": 0.7, "mamba.out_proj": 4.0}


def load_model(path_or_id: str, *, device: str = "cpu") -> Any:
    """Load a float32 causal LM from a folder or the hub. Raises ``ConfigError`` if it cannot be loaded or is not
    supported."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        kv_shape(AutoConfig.from_pretrained(path_or_id))
        model = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=torch.float32)
    except ConfigError:
        raise
    except (OSError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(
            f"The model {path_or_id!r} cannot be loaded: {reason.rstrip('.')}. Give a folder with config.json "
            "and weights, or a name on the Hub."
        ) from exc
    return use_paged_attention(model.to(device))


def use_paged_attention(model: Any) -> Any:
    """Make a transformers causal LM attend over the engine's KV pool, and return it. Afterwards, it runs only inside
    the engine."""
    shape = kv_shape(model.config)
    model.set_attn_implementation(ATTENTION_NAME)
    if shape.states is not None:
        use_paged_states(model, shape.states.mixers)
    return model.eval()
