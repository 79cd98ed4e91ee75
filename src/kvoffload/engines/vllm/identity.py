# SPDX-License-Identifier: Apache-2.0
"""Everything besides its key that changes the bytes of a block: what ``fields.py`` does not call harmless, the spec of
each layer, and the weights."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.facts import UnclearError, facts_of, unknown_fields
from kvoffload.engines.vllm.fields import FIELDS
from kvoffload.engines.vllm.slices import offloaded_groups
from kvoffload.engines.vllm.weights import drafter_with_kv, weights_of
from kvoffload.engines.weights import outliving_tier
from kvoffload.errors import ConfigError

__all__ = ["identity_of", "unknown_options"]

_LIMITLESS_ROPE = (
    *("default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "mllama4"),
    "proportional",
)
"""Rope types that compute a position the same whatever ``max_model_len`` is. LongRoPE does not. ``dynamic`` does not
either, in models that take the limit for their largest position."""

_LIMITED_MODELS = ("llama4", "llama4_text", "mllama4")
"""Model types that read ``max_model_len`` themselves: above 32768 Llama 4 scales its queries. ``test_fields`` knows all
modules of vLLM's models that read it."""


def identity_of(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, is_rank_free: bool) -> dict[str, str]:
    """Everything besides its key that changes the bytes of a block. The same in every process of equal engines.

    Raises ``ConfigError``, with what to do, if blocks could outlive this process and it cannot be told what they are.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "engine": "vllm",
        "model": str(model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        # A worker in this process has rewritten it; the specs of layers say what came of it.
        "kv_dtype": "fp8" if cache.cache_dtype == "fp8_ds_mla" else str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "block_size": str(config.block_size),
        "pages": "of all heads" if is_rank_free else _division(vllm_config.parallel_config),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "weights": weights_of(vllm_config, config),
        **_facts(vllm_config, kv_cache_config, config, is_rank_free),
    }


def unknown_options(vllm_config: Any, config: OffloadingConfig) -> list[str]:
    """Options of vLLM that count because this version of kvoffload does not know them."""
    return [name for prefix, part in _parts(vllm_config, config) for name in unknown_fields(part, FIELDS, prefix)]


def _facts(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, is_rank_free: bool) -> dict[str, str]:
    """Options and layers."""
    facts = {"limit": _limit(vllm_config.model_config)}
    drafter = drafter_with_kv(vllm_config)
    if drafter is not None:
        facts["speculative_config.limit"] = _limit(drafter.draft_model_config)
    try:
        for prefix, part in _parts(vllm_config, config):
            facts |= facts_of(part, FIELDS, prefix)
        facts |= _layers(kv_cache_config, is_rank_free)
    except UnclearError as exc:
        if (tier := outliving_tier(config)) is not None:
            raise ConfigError(
                f"vLLM's option {exc}, so the secondary tier {tier!r} could serve KV of other engines: leave out the "
                "option or the tier."
            ) from exc
        facts["unclear"] = secrets.token_hex(16)
    return facts


def _parts(vllm_config: Any, config: OffloadingConfig) -> Iterator[tuple[str, Any]]:
    """The parts of vLLM's configuration that ``FIELDS`` is asked about, each with the start of its fields' names."""
    yield "", vllm_config
    if vllm_config.lora_config is not None and config.adapters_never_change:
        yield "lora_config.", vllm_config.lora_config
    drafter = drafter_with_kv(vllm_config)
    if drafter is not None:
        yield "speculative_config.", drafter


def _layers(kv_cache_config: Any, is_rank_free: bool) -> dict[str, str]:
    """The spec of each layer, by group, and the layers in the order in which they lie.

    The scheduler sees the first spec of a group alone. But layers with other pages have a tensor record of their own,
    and what makes layers differ are options, which count.
    """
    facts = {"tensors": json.dumps([list(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors])}
    for index, group in enumerate(offloaded_groups(kv_cache_config)):
        spec = group.kv_cache_spec
        if hasattr(spec, "kv_cache_specs"):
            spec = next(iter(spec.kv_cache_specs.values()))
        of_spec = facts_of(spec, FIELDS)
        if is_rank_free:  # then all ranks together have what the model's configuration says
            of_spec = {name: text for name, text in of_spec.items() if name not in ("num_kv_heads", "num_head_slots")}
        facts[f"group {index}"] = json.dumps([type(spec).__name__, of_spec, list(group.layer_names)])
    return facts


def _division(parallel: Any) -> str:
    """How ranks divide a block, beside the number of its slices."""
    context = f"{parallel.decode_context_parallel_size}:{parallel.cp_kv_cache_interleave_size}"
    return f"of {parallel.pipeline_parallel_size} stages, context {context}"


def _limit(model: Any) -> str:
    """The longest request, if KV may depend on it; as it was asked for, since vLLM fits it to memory later."""
    config = model.hf_config.to_dict()
    types = set(_values_of(config, "model_type"))
    if types.isdisjoint(_LIMITED_MODELS) and set(_rope_types(config)) <= set(_LIMITLESS_ROPE):
        return ""
    asked = model.original_max_model_len
    limit = str(asked) if asked is not None and asked > 0 else "of the model"
    if not types.isdisjoint(_LIMITED_MODELS):
        sampling = {**model.try_get_generation_config(), **model.override_generation_config}
        limit += f", tuned: {sampling.get('attn_temperature_tuning')}"
    return limit


def _values_of(config: Any, name: str) -> Iterator[Any]:
    """What a model's configuration has as ``name``, in all its parts."""
    if isinstance(config, Mapping):
        if name in config:
            yield config[name]
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _values_of(part, name)


def _rope_types(config: Any) -> Iterator[str]:
    for name in ("rope_parameters", "rope_scaling"):
        for rope in _values_of(config, name):
            # Some models have parameters by type of layer.
            for each in (rope, *(rope.values() if isinstance(rope, Mapping) else ())):
                if isinstance(each, Mapping):
                    yield str(each.get("rope_type", each.get("type", "default")))
