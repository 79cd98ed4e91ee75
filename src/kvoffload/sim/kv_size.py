# SPDX-License-Identifier: Apache-2.0
"""The KV cache bytes of one token, from a model's sizes or its ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError

__all__ = ["kv_bytes_per_token", "model_kv_bytes_per_token"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> int:
    """Bytes of the keys and values of all layers for one token, all ranks together."""
    if min(layers, kv_heads, head_dim) < 1:
        raise ConfigError("Layers, KV heads and head size must be positive.")
    return 2 * layers * kv_heads * head_dim * _dtype_bytes(dtype)


def model_kv_bytes_per_token(path: str | Path, dtype: str | None = None) -> int:
    """The same for the model of a Hugging Face ``config.json``, given as the file or its folder.

    ``dtype`` overrides the config's own, for a quantised KV cache. Knows latent attention (``kv_lora_rank``). Layers
    with a recurrent state in place of attention do not count. Assumes that every other layer keeps all tokens, so it
    overstates models with sliding windows. Raises ``ConfigError`` for a config that cannot be read or says too little.
    """
    path = Path(path)
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} is not a readable model config: {exc}.") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model config: it has no JSON object.")
    config = config | config.get("text_config", {})  # multimodal models keep the language model's part there
    dtype = dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    layers = _attention_layers(path, config)
    if config.get("kv_lora_rank"):
        latent = _number(path, config, "kv_lora_rank") + _number(path, config, "qk_rope_head_dim")
        return layers * latent * _dtype_bytes(dtype)
    heads = _number(path, config, "num_attention_heads", "n_head")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or _number(path, config, "hidden_size", "n_embd") // heads
    return kv_bytes_per_token(layers, kv_heads, head_dim, dtype)


_RECURRENT = {"mamba", "linear_attention", "conv"}
"""What configs call layers that keep a state, not keys and values."""


def _attention_layers(path: Path, config: Mapping[str, Any]) -> int:
    """The layers with keys and values. They are the only ones whose size grows with the tokens."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        others = _RECURRENT | {"mlp", "moe"}
        layers = sum(kind not in others for kind in kinds)
    elif isinstance(config.get("hybrid_override_pattern"), str):  # Nemotron-H: M a state, * attention, - and E neither
        layers = config["hybrid_override_pattern"].count("*")
    elif isinstance(config.get("full_attn_idxs"), list):
        layers = len(config["full_attn_idxs"])
    elif config.get("full_attention_interval"):
        interval = _number(path, config, "full_attention_interval")
        layers = _number(path, config, "num_hidden_layers") // interval
    elif config.get("attn_layer_period"):  # Jamba
        period, offset = _number(path, config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        layers = sum(layer % period == offset for layer in range(_number(path, config, "num_hidden_layers")))
    else:
        layers = _number(path, config, "num_hidden_layers", "n_layer")
    if layers == 0:
        raise ConfigError(
            f"The model of {path} has no attention, so its cache does not grow with the tokens; a size per token by "
            "--kv-bytes-per-token is needed all the same."
        )
    return layers


def _number(path: Path, config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ConfigError(f"{path} does not say {names[0]}; give the KV size by --kv-bytes-per-token instead.")


def _dtype_bytes(dtype: str) -> int:
    if dtype not in _DTYPE_BYTES:
        raise ConfigError(f"Unknown dtype {dtype!r}; choose one of {', '.join(_DTYPE_BYTES)}.")
    return _DTYPE_BYTES[dtype]
