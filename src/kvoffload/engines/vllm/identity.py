# SPDX-License-Identifier: Apache-2.0
"""Everything besides its key that changes the bytes of a block."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.vllm.slices import kind_of, offloaded_groups

__all__ = ["DRAFTERS_WITH_KV", "identity_of"]

DRAFTERS_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")
"""Speculative methods whose drafter keeps KV that was shown to be good after a load."""


def identity_of(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, is_rank_free: bool) -> dict[str, str]:
    """Everything besides its key that changes the bytes of a block. The same in every process of equal engines."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = [
        f"{kind_of(group.kv_cache_spec)}:{group.kv_cache_spec.block_size}:{len(group.layer_names)}"
        f"{_state_identity(group.kv_cache_spec)}"
        for group in offloaded_groups(kv_cache_config)
    ]
    drafter = _drafter_identity(vllm_config.speculative_config)
    return {
        "engine": "vllm",
        "model": str(model.model),
        "revision": str(model.revision),
        "architecture": _architecture(model),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "groups": ",".join(groups),
        "block_size": str(config.block_size),
        "pages": "of all heads" if is_rank_free else _division(vllm_config.parallel_config),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        **({"drafter": drafter} if drafter else {}),
    }


def _division(parallel: Any) -> str:
    """How ranks divide a block, beside the number of its slices."""
    context = f"{parallel.decode_context_parallel_size}:{parallel.cp_kv_cache_interleave_size}"
    return f"of {parallel.pipeline_parallel_size} stages, context {context}"


def _state_identity(spec: Any) -> str:
    """What a group's states consist of; empty for attention."""
    if kind_of(spec) != "mamba":
        return ""
    # Layers of one group may have states of several shapes.
    layers = spec.kv_cache_specs.values() if hasattr(spec, "kv_cache_specs") else [spec]
    states = {
        f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}": None
        for layer in layers
        for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
    }
    return ":" + "+".join(states)


def _architecture(model: Any) -> str:
    return hashlib.sha256(model.hf_config.to_json_string(use_diff=False).encode()).hexdigest()[:16]


def _drafter_identity(speculative: Any) -> str:
    """The drafter whose layers are in the blocks; empty if there is none."""
    if speculative is None or speculative.method not in DRAFTERS_WITH_KV:
        return ""
    draft = speculative.draft_model_config
    return f"{speculative.method}:{draft.model}:{draft.revision}:{draft.quantization}:{_architecture(draft)}"
