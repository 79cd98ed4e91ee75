# SPDX-License-Identifier: Apache-2.0
"""From a transformers configuration to the layout of the KV cache: groups, page sizes, identity."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout
from kvoffload.errors import LayoutError

__all__ = ["FAMILIES", "KVShape", "LayerPosition", "engine_layout", "fingerprint", "kv_shape"]

FAMILIES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""``model_type``s whose attention ``attention.py`` computes. A test checks each of them."""


@dataclass(frozen=True, slots=True)
class LayerPosition:
    """Where a layer's keys and values lie: the KV group, and the index among the layers of that group."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of a model. Layers with the same window form a group; full attention is the first."""

    windows: tuple[int | None, ...]
    """By group: the sliding window in tokens, or ``None`` for full attention."""
    layer_positions: tuple[LayerPosition, ...]
    """By layer."""
    kv_heads: int
    head_dim: int

    def num_layers(self, group: int) -> int:
        return sum(position.group == group for position in self.layer_positions)


def kv_shape(config: Any) -> KVShape:
    """Reads a transformers configuration. Raises ``LayoutError`` for families that this engine cannot compute."""
    if config.model_type not in FAMILIES:
        raise LayoutError(
            f"The reference engine runs {', '.join(FAMILIES)}; {config.model_type!r} is another family, "
            "so choose a model of one of these."
        )
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "use_bidirectional_attention", None):
        raise LayoutError("The reference engine computes neither soft-capped nor bidirectional attention.")
    by_layer = [_window(config, layer) for layer in range(config.num_hidden_layers)]
    windows = tuple(sorted(set(by_layer), key=lambda window: (window is not None, window)))
    seen = [0] * len(windows)
    layer_positions = []
    for window in by_layer:
        group = windows.index(window)
        layer_positions.append(LayerPosition(group, seen[group]))
        seen[group] += 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(windows, tuple(layer_positions), config.num_key_value_heads, head_dim)


def _window(config: Any, layer: int) -> int | None:
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def engine_layout(shape: KVShape, block_tokens: int, dtype: torch.dtype, identity: dict[str, str]) -> EngineLayout:
    """The layout from which both sides of the connector are made. One worker, stable hashes."""
    token_bytes = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    groups = tuple(
        KVGroupLayout(
            kind=GroupKind.FULL_ATTENTION if window is None else GroupKind.SLIDING_WINDOW,
            block_tokens=block_tokens,
            page_bytes=block_tokens * token_bytes * shape.num_layers(group),
            sliding_window_tokens=window,
        )
        for group, window in enumerate(shape.windows)
    )
    return EngineLayout(
        groups=groups,
        hash_block_tokens=block_tokens,
        instance_id=f"reference-{uuid.uuid4().hex[:12]}",
        identity=identity | {"dtype": str(dtype), "layout": "reference/1: block, k/v, layer, token, head"},
    )


def fingerprint(config: Any, parameters: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Identifies a model by its configuration and a sample of each weight, wherever it was loaded from."""
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
    for name, parameter in parameters:
        sample = parameter.detach().flatten()[:256].float().cpu().numpy().tobytes()
        digest.update(name.encode() + b"\0" + sample)
    return digest.hexdigest()
