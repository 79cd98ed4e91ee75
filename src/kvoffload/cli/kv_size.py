# SPDX-License-Identifier: Apache-2.0
"""The size of the KV and states that a model keeps for a prefix, computed from its dimensions or its
``config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.errors import ConfigError, reason_of

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ModelKV:
    """Sizes of the KV and states that a model keeps for a prefix."""

    bytes_per_token: int
    """Bytes per token of keys and values, of all layers and ranks together."""
    state_bytes: int = 0
    """Bytes of the recurrent states of all layers; 0 without any."""
    state_groups: int = 0
    """Layers with a state for each layer with keys and values, rounded up. An engine makes this many groups of them,
    and each group's state uses its own slot."""

    def state_slots(self, block_bytes: int) -> int:
        """Return the number of slots for a state, if a slot contains a block of ``block_bytes`` of keys and values."""
        return max(self.state_groups, -(-self.state_bytes // block_bytes))


def model_kv(model: str | Path, dtype: str | None = None) -> ModelKV:
    """Return the sizes for the model of a Hugging Face ``config.json``, given as the file, its folder, or a name on the
    Hub. ``dtype`` overrides the config's own, for a quantised KV cache. It supports latent attention
    (``kv_lora_rank``), and the states of Mamba2, gated linear attention and short convolutions, in vLLM's default
    layout. Assumes that every layer without a state keeps all tokens, so it overstates models with sliding windows.
    Raises ``ConfigError`` for a config that cannot be read or is incomplete."""
    path = _config_file(str(model))
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"The model's configuration {path} cannot be read: {reason_of(exc)}. Give its config.json, the folder of "
            "this file, or the model's name on the Hub."
        ) from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model's configuration, because it contains no JSON object.")
    text_config = config.get("text_config")  # multimodal models keep the language model's part there
    if isinstance(text_config, dict):
        config = config | text_config
    model_dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    dtype = dtype or model_dtype
    layers = _layers(path, config)
    if layers.attention == 0:
        raise ConfigError(
            f"The model of {path} has no attention, so its cache does not grow with the tokens; give a size per "
            "token with --kv-bytes-per-token."
        )
    if config.get("kv_lora_rank"):
        latent = _number(path, config, "kv_lora_rank") + _number(path, config, "qk_rope_head_dim")
        return ModelKV(layers.attention * latent * _dtype_bytes(dtype))
    heads = _number(path, config, "num_attention_heads", "n_head")
    kv_heads = _kv_heads(path, config, heads)
    if config.get("head_dim"):
        head_dim = _number(path, config, "head_dim")
    else:
        head_dim = _number(path, config, "hidden_size", "n_embd") // heads
    per_token = 2 * layers.attention * kv_heads * head_dim * _dtype_bytes(dtype)
    if not layers.state:
        return ModelKV(per_token)
    state_bytes = layers.state * _layer_state_bytes(path, config, _dtype_bytes(model_dtype))
    return ModelKV(per_token, state_bytes, -(-layers.state // layers.attention))


def _kv_heads(path: Path, config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):  # Falcon, GPT-BigCode
        return 1
    given = [name for name in ("num_key_value_heads", "num_kv_heads") if config.get(name)]
    return _number(path, config, *given) if given else heads


class _Layers(NamedTuple):
    attention: int
    """Layers with keys and values. They are the only ones whose size grows with the tokens."""
    state: int
    """Layers with a recurrent state. A layer may have both."""


_RECURRENT = {"mamba", "linear_attention", "conv"}
"""Names in configs of layers that keep a state instead of keys and values."""


def _layers(path: Path, config: Mapping[str, Any]) -> _Layers:
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        both = sum(kind in ("hybrid", "hybrid_sliding") for kind in kinds)
        states = sum(kind in _RECURRENT for kind in kinds)
        others = sum(kind in ("mlp", "moe") for kind in kinds)
        return _Layers(len(kinds) - states - others, states + both)
    if isinstance(config.get("hybrid_override_pattern"), str):  # Nemotron-H: M a state, * attention, others neither
        return _Layers(config["hybrid_override_pattern"].count("*"), config["hybrid_override_pattern"].count("M"))
    total = _number(path, config, "num_hidden_layers", "n_layer")
    if config.get("model_type") == "falcon_h1":
        return _Layers(total, total)
    indices = config.get("full_attn_idxs") or config.get("attn_layer_indices")  # LFM2 or Bamba
    if isinstance(indices, list):
        attention = len(indices)
    elif config.get("full_attention_interval"):
        attention = total // _number(path, config, "full_attention_interval")
    elif config.get("attn_layer_period"):  # Jamba
        period, offset = _number(path, config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        attention = sum(layer % period == offset for layer in range(total))
    else:
        return _Layers(total, 0)
    return _Layers(attention, total - attention)


def _layer_state_bytes(path: Path, config: Mapping[str, Any], model_bytes: int) -> int:
    """Return the bytes of one layer's state. The convolution's part uses the model's dtype, and so does the recurrent
    part unless the config sets another."""
    own_dtype = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")
    recurrent_bytes = _dtype_bytes(own_dtype) if own_dtype else model_bytes

    def number(*names: str) -> int:
        return _number(path, config, *names)

    if "conv_L_cache" in config:  # LFM2: only columns of a short convolution
        return (number("conv_L_cache") - 1) * number("conv_dim", "hidden_size") * model_bytes
    if "linear_key_head_dim" in config:
        keys = number("linear_num_key_heads") * number("linear_key_head_dim")
        values = number("linear_num_value_heads") * number("linear_value_head_dim")
        columns = (number("linear_conv_kernel_dim") - 1) * (2 * keys + values)
        return columns * model_bytes + values * number("linear_key_head_dim") * recurrent_bytes
    state = number("mamba_d_state", "ssm_state_size", "state_size")
    kernel = number("mamba_d_conv", "conv_kernel", "conv_kernel_size")
    if config.get("mamba_n_heads") or config.get("mamba_num_heads"):
        heads = number("mamba_n_heads", "mamba_num_heads")
        head_dim = config.get("mamba_d_head") or config.get("mamba_head_dim")
        if not isinstance(head_dim, int):  # "auto"
            inner = config.get("mamba_d_ssm") or number("mamba_expand") * number("hidden_size")
            head_dim = inner // heads
        inner = heads * head_dim
        channels = inner + 2 * number("mamba_n_groups", "n_groups") * state
    else:  # Mamba 1, as in Jamba
        inner = channels = number("mamba_expand") * number("hidden_size")
    return (kernel - 1) * channels * model_bytes + inner * state * recurrent_bytes


def _number(path: Path, config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ConfigError(f"{path} lacks {names[0]}; give the KV size with --kv-bytes-per-token instead.")


def _dtype_bytes(dtype: object) -> int:
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ConfigError(f"Unknown dtype {dtype!r}; choose one of {', '.join(_DTYPE_BYTES)}.")
    return _DTYPE_BYTES[dtype]


def _config_file(model: str) -> Path:
    """Return the file at a path, or the config.json of a name such as ``Qwen/Qwen3-8B`` from the Hub's cache or the
    Hub."""
    if Path(model).exists() or model.endswith(".json") or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return Path(model)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as exc:
        raise ConfigError(
            f"There is no file {model}, and kvoffload needs the package huggingface_hub to find a model of this "
            "name on the Hub; install it, or give the model's config.json."
        ) from exc
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"There is no file {model}, and the config.json of a model of this name cannot be loaded from the Hub; "
            "check the name and the connection, or give the file."
        ) from exc
