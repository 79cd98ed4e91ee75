# SPDX-License-Identifier: Apache-2.0
"""Collect all facts besides a block's key that change its bytes: the options and variables that ``fields.py`` and
``environment.py`` do not list as harmless, the model's class, and the spec of each layer. The name of the weights is
part of the key (``weights.py``)."""

from __future__ import annotations

import inspect
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.facts import UnclearError, facts_of, rope_types_in
from kvoffload.engines.vllm.environment import environment, kernels, plugins
from kvoffload.engines.vllm.fields import FIELDS
from kvoffload.engines.vllm.slices import offloaded_groups, spec_of_layer, stage_sizes
from kvoffload.engines.vllm.versions import installed_version
from kvoffload.engines.vllm.weights import drafter_with_kv
from kvoffload.engines.weights import fingerprint, outliving_tier

_LIMITLESS_ROPE = (
    *("default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "mllama4"),
    "proportional",
)
"""Rope types that compute a position in the same way for any ``max_model_len``. LongRoPE does not. Neither does
``dynamic``, in models that use the limit as their largest position."""

_ORIGINAL = "original_max_position_embeddings"

_UNQUANTIZED = ("auto", "float16", "bfloat16", "float32")
"""Values of ``cache_dtype``. If a checkpoint changes ``auto`` to another value, its weights are quantized."""

_TRANSFORMERS = ".transformers"
"""Part of the names of vLLM's modules whose models run code of transformers."""

_LIMITED_MODELS = ("llama4", "llama4_text", "mllama4")
"""Model types that read ``max_model_len`` themselves: Llama 4 scales its queries above 32768. ``test_fields`` lists all
modules of vLLM's models that read it."""


def identity_of(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, is_rank_free: bool) -> dict[str, str]:
    """Return all facts besides a block's key that change its bytes. They are the same in every process of equal
    engines.

    Raises ``UnclearError`` if blocks could outlive this process and an option or the platform cannot be read.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "engine": "vllm",
        # The next version of vLLM may order a model's KV differently, or compute more precise numbers.
        "version": installed_version(),
        "model": _paths(vllm_config) if config.weights_version is not None else "",
        "dtype": str(model.dtype).removeprefix("torch."),
        # A worker in this process may have rewritten it; the specs of layers contain the result.
        "kv_dtype": "fp8" if cache.cache_dtype == "fp8_ds_mla" else str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "block_size": str(config.block_size),
        "pages": "of all heads" if is_rank_free else _division(vllm_config),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        **_facts(vllm_config, kv_cache_config, config, is_rank_free),
    }


def _paths(vllm_config: Any) -> str:
    """Return the paths of the models, because a user may give two models the same version. Hashes of their files need
    no path."""
    drafter = drafter_with_kv(vllm_config)
    models = [vllm_config.model_config, *([] if drafter is None else [drafter.draft_model_config])]
    return json.dumps([[str(model.model), model.revision] for model in models])


def _facts(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, is_rank_free: bool) -> dict[str, str]:
    """Return the facts from options, environment, classes of models, and layers."""
    model, drafter = vllm_config.model_config, drafter_with_kv(vllm_config)
    facts = {"limit": _limit(model)} | environment()
    try:
        is_quantized = _is_quantized(vllm_config)
        facts |= {"plugins": plugins(), "class": _class_of(model), "platform": platform(is_quantized)}
        if drafter is not None:
            draft = drafter.draft_model_config
            facts["speculative_config.class"] = _class_of(draft)
            # The target's limit also counts, because vLLM bounds the drafter's limit by it.
            facts["speculative_config.limit"] = (limit := _limit(draft)) and f"{limit} of {_longest(model)}"
        if vllm_config.device_config.device_type != "cpu" and is_quantized:
            facts["kernels"] = kernels()
        if model.multimodal_config is not None and config.media_never_change:
            facts["media are prepared by"] = _transformers()
        for prefix, part in _parts(vllm_config, config):
            facts |= facts_of(part, FIELDS, prefix)
        facts |= _layers(vllm_config, kv_cache_config, is_rank_free)
        if vllm_config.device_config.device_type == "cpu" and outliving_tier(config) is not None:
            facts["build for this CPU"] = cpu_build()
    except UnclearError:
        if outliving_tier(config) is not None:
            raise
        facts["unclear"] = secrets.token_hex(16)
    return facts


def _class_of(model: Any) -> str:
    """Return the name of the class that computes ``model``, because a plug-in may have registered its own class for an
    architecture."""
    try:
        registered = model.registry.models[model.architecture]
        kind = getattr(registered, "model_cls", None)
        if kind is not None:
            module, name = kind.__module__, kind.__qualname__
        else:
            module, name = registered.module_name, registered.class_name
    except (AttributeError, KeyError) as exc:
        raise UnclearError(f"class of {model.model!r} is not known ({exc!r})") from exc
    return f"{module}:{name} {_transformers()}" if _TRANSFORMERS in module else f"{module}:{name}"


def _is_quantized(vllm_config: Any) -> bool:
    """Return whether the weights (and therefore activations) or the KV (and with some attention backends also queries)
    are quantized."""
    drafter, dtype = drafter_with_kv(vllm_config), vllm_config.cache_config.cache_dtype
    models = [vllm_config.model_config, *([] if drafter is None else [drafter.draft_model_config])]
    return dtype not in _UNQUANTIZED or any(model.quantization is not None for model in models)


def rope_follows_batch(model: Any) -> bool:
    """Return whether the longest request of a batch may determine the rotary frequencies of all its requests. Code of
    transformers does this beyond the length that a model was trained for (``dynamic_rope_update``); vLLM's own models
    do not."""
    config = model.hf_config.to_dict()
    try:
        if rope_types_in(config) <= set(_LIMITLESS_ROPE) or _TRANSFORMERS not in _class_of(model):
            return False
    except UnclearError:
        pass
    found = (model.hf_text_config.to_dict().get("max_position_embeddings"), *_values_of(config, _ORIGINAL))
    lengths = [length for length in found if isinstance(length, int)]
    return not lengths or bool(model.max_model_len > min(lengths))


def _transformers() -> str:
    return f"transformers {metadata.version('transformers')}"


def _parts(vllm_config: Any, config: OffloadingConfig) -> Iterator[tuple[str, Any]]:
    """Yield the parts of vLLM's configuration that ``FIELDS`` covers, each with the prefix of its fields' names."""
    yield "", vllm_config
    if vllm_config.lora_config is not None and config.adapters_never_change:
        yield "lora_config.", vllm_config.lora_config
    drafter = drafter_with_kv(vllm_config)
    if drafter is not None:
        yield "speculative_config.", drafter


def _layers(vllm_config: Any, kv_cache_config: Any, is_rank_free: bool) -> dict[str, str]:
    """Return the spec of each layer, by group, and the layers in the order of their memory. On CPUs, also return how
    this host's attention packs keys.

    The scheduler sees only the first spec of a group. But layers with different pages have their own tensor records,
    and layers differ only because of options, which count.
    """
    facts = {"tensors": json.dumps([list(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors])}
    for index, group in enumerate(offloaded_groups(kv_cache_config)):
        spec = spec_of_layer(group)
        of_spec = facts_of(spec, FIELDS)
        if is_rank_free:  # then all ranks together have the number in the model's configuration
            of_spec = {name: text for name, text in of_spec.items() if name not in ("num_kv_heads", "num_head_slots")}
        facts[f"group {index}"] = json.dumps([type(spec).__name__, of_spec, list(group.layer_names)])
        if vllm_config.device_config.device_type == "cpu" and hasattr(spec, "head_size"):
            facts[f"group {index} on this CPU"] = cpu_packing(vllm_config, spec)
    return facts


def platform(is_quantized: bool) -> str:
    """Return the vendor of the GPU, and its generation if that changes bytes.

    vLLM's configuration also calls AMD's GPUs ``cuda``. On AMD's GPUs, the generation determines how keys are packed.
    On NVIDIA's, it determines the precision of activations with quantized weights, and of queries with quantized KV.
    ``fp8`` is a different format on some GPUs. Without quantization, the generation changes only rounding.
    """
    try:
        from vllm.platforms import current_platform as device

        generation = device.get_device_capability()
        if generation is None and device.device_name in ("cuda", "rocm"):
            raise LookupError("it does not tell its generation")
        if device.device_name == "cuda" and not is_quantized:
            return "cuda"
        return f"{device.device_name} {generation and tuple(generation)} {device.fp8_dtype()}"
    except Exception as exc:  # other people's platforms may lack methods of vLLM's own
        raise UnclearError(f"platform is not known ({exc!r})") from exc


def cpu_packing(vllm_config: Any, spec: Any) -> str:
    """Return the instruction set that vLLM's attention chooses on this host. Some instruction sets pack keys in their
    own order."""
    values = {
        "dtype": vllm_config.model_config.dtype,
        "block_size": spec.block_size,
        "head_size": spec.head_size,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
    }
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(**{name: values[name] for name in inspect.signature(_get_attn_isa).parameters}))
    except Exception as exc:  # a private function of vLLM, which may change in any version
        raise UnclearError(f"way to pack keys on this CPU is not known ({exc!r})") from exc


def cpu_build() -> str:
    """Return a text that identifies the build of vLLM's compiled attention and the part of it that this host runs. With
    one name of an instruction set, keys may be packed in two orders, as on ARM with and without instructions for
    bfloat16."""
    try:
        import torch
        import vllm

        found = [torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported()]  # as vLLM does
        return f"{fingerprint(Path(vllm.__file__).parent, ('_C*.so',))} {found}"
    except Exception as exc:  # torch's functions are private
        raise UnclearError(f"build for this CPU is not known ({exc!r})") from exc


def _division(vllm_config: Any) -> str:
    """Return how ranks divide a block, in addition to the number of its slices."""
    parallel, sizes = vllm_config.parallel_config, stage_sizes(vllm_config)
    context = f"{parallel.decode_context_parallel_size}:{parallel.cp_kv_cache_interleave_size}"
    return f"of stages {sizes if len(sizes) > 1 else ''}, context {context}"


def _limit(model: Any) -> str:
    """Return the length of the longest request, if KV may depend on it. This is the configured value, because vLLM
    later fits it to memory."""
    config = model.hf_config.to_dict()
    types = set(_values_of(config, "model_type"))
    if types.isdisjoint(_LIMITED_MODELS) and rope_types_in(config) <= set(_LIMITLESS_ROPE):
        return ""
    limit = _longest(model)
    if not types.isdisjoint(_LIMITED_MODELS):
        sampling = {**model.try_get_generation_config(), **model.override_generation_config}
        limit += f", tuned: {sampling.get('attn_temperature_tuning')}"
    return limit


def _longest(model: Any) -> str:
    """Return ``--max-model-len``, or the value that vLLM derives from the model's files instead."""
    asked = model.original_max_model_len
    if asked is not None and asked > 0:
        return str(asked)
    return f"of the model: {model.get_and_verify_max_len(asked)}"


def _values_of(config: Any, name: str) -> Iterator[Any]:
    """Yield all values of ``name`` in a model's configuration and its parts."""
    if isinstance(config, Mapping):
        if name in config:
            yield config[name]
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _values_of(part, name)
