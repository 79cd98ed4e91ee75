# SPDX-License-Identifier: Apache-2.0
"""Derive the layout of the KV cache (groups, page sizes, identity) from a transformers configuration."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout
from kvoffload.engines.facts import UnclearError, rope_types_in, text_of
from kvoffload.errors import LayoutError

FAMILIES = ("falcon_h1", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""The ``model_type``s that the engine supports. A test checks each of them."""

_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Rope types for which transformers computes a position in the same way, whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class LayerPosition:
    """The place of a layer's keys and values: the KV group, and the index among the layers of that group."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """The recurrent states of a model, which are the same in each of its layers."""

    layers: int
    recurrent: tuple[int, ...]
    """The shape for one layer, in float32 whatever the model's dtype."""
    convolution: tuple[int, ...]
    """The shape for one layer: channels, columns."""
    mixers: str
    """Name of the submodules that keep them."""

    @property
    def recurrent_bytes(self) -> int:
        return self.layers * math.prod(self.recurrent) * int(torch.float32.itemsize)

    def convolution_bytes(self, dtype: torch.dtype) -> int:
        return self.layers * math.prod(self.convolution) * int(dtype.itemsize)

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of all layers together, rounded up to a whole number of float32."""
        return -(-(self.recurrent_bytes + self.convolution_bytes(dtype)) // 4) * 4


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of a model. Layers with the same window form a group. Full attention is the first group, and states,
    if there are any, are the last."""

    windows: tuple[int | None, ...]
    """For each group with keys and values: the sliding window in tokens, or ``None`` for full attention."""
    layer_positions: tuple[LayerPosition, ...]
    """One entry for each layer."""
    kv_heads: int
    head_dim: int
    states: StateShape | None = None

    def num_layers(self, group: int) -> int:
        return sum(position.group == group for position in self.layer_positions)


def kv_shape(config: Any) -> KVShape:
    """Return the shape for a transformers configuration. Raises ``LayoutError`` for families that this engine does not
    support."""
    if config.model_type not in FAMILIES:
        raise LayoutError(
            f"The reference engine does not support the family {config.model_type!r}; choose a model of "
            f"{', '.join(FAMILIES)}."
        )
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "use_bidirectional_attention", None):
        raise LayoutError(
            "The reference engine does not support soft-capped or bidirectional attention; choose another model."
        )
    if odd := rope_types_in(config.to_dict()).difference(_ROPES):
        raise LayoutError(
            f"The reference engine does not support rotary embeddings of the type {', '.join(sorted(odd))}, because "
            f"one long request may change those of its whole batch; choose a model with {', '.join(_ROPES)}."
        )
    by_layer = [_window(config, layer) for layer in range(config.num_hidden_layers)]
    windows = tuple(sorted(set(by_layer), key=lambda window: (window is not None, window)))
    seen = [0] * len(windows)
    layer_positions = []
    for window in by_layer:
        group = windows.index(window)
        layer_positions.append(LayerPosition(group, seen[group]))
        seen[group] += 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(windows, tuple(layer_positions), config.num_key_value_heads, head_dim, _states(config))


def _states(config: Any) -> StateShape | None:
    if config.model_type != "falcon_h1":
        return None
    width = config.mamba_d_ssm if config.mamba_d_ssm is not None else config.mamba_expand * config.hidden_size
    return StateShape(
        layers=config.num_hidden_layers,
        recurrent=(config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state),
        convolution=(int(width) + 2 * config.mamba_n_groups * config.mamba_d_state, config.mamba_d_conv),
        mixers="mamba",
    )


def _window(config: Any, layer: int) -> int | None:
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def engine_layout(
    shape: KVShape, block_tokens: int, dtype: torch.dtype, identity: dict[str, str], device_tokens: int | None = None
) -> EngineLayout:
    """Return the layout from which both sides of the connector are created. It has one worker and stable hashes."""
    token_bytes = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    groups = [
        KVGroupLayout(
            kind=GroupKind.FULL_ATTENTION if window is None else GroupKind.SLIDING_WINDOW,
            block_tokens=block_tokens,
            page_bytes=block_tokens * token_bytes * shape.num_layers(group),
            sliding_window_tokens=window,
        )
        for group, window in enumerate(shape.windows)
    ]
    order = "reference/1: block, k/v, layer, token, head"
    if shape.states is not None:
        groups.append(KVGroupLayout(GroupKind.SINGLE_STATE, block_tokens, shape.states.page_bytes(dtype)))
        order += "; states: recurrent, convolution, each by layer"
    return EngineLayout(
        groups=tuple(groups),
        hash_block_tokens=block_tokens,
        instance_id=f"reference-{uuid.uuid4().hex[:12]}",
        identity=identity | {"dtype": str(dtype), "layout": order},
        device_tokens=device_tokens,
    )


def fingerprint(config: Any, parameters: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return a hash that identifies a model by its whole configuration and samples of each weight and buffer, wherever
    it was loaded from.

    Raises ``LayoutError`` if the configuration contains a value whose text does not identify it in other processes.
    """
    try:
        text = text_of(config)
    except UnclearError as exc:
        raise LayoutError(f"The model's configuration {exc}: offloading needs plain values there.") from exc
    digest = hashlib.sha256(text.encode())
    for name, parameter in parameters:
        values = parameter.detach().flatten()
        values = values[:: max(1, len(values) // _SAMPLES)]
        digest.update(f"{name}\0{parameter.dtype}\0{tuple(parameter.shape)}\0".encode())
        digest.update(values.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


_SAMPLES = 4096
"""Number of values sampled from each weight, at equal distances. That is enough, because training changes whole
matrices."""
