# SPDX-License-Identifier: Apache-2.0
"""Everything besides its key that changes the bytes of a block: what ``fields.py`` and ``environment.py`` do not call
harmless, the model's class, and the spec of each layer. The name of the weights is in the key (``weights.py``)."""

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
from kvoffload.engines.facts import UnclearError, facts_of, rope_types_in, unknown_fields
from kvoffload.engines.vllm.environment import environment, kernels, plugins, unknown_variables
from kvoffload.engines.vllm.fields import FIELDS
from kvoffload.engines.vllm.slices import offloaded_groups, spec_of_layer, stage_sizes
from kvoffload.engines.vllm.versions import installed_version
from kvoffload.engines.vllm.weights import drafter_with_kv
from kvoffload.engines.weights import fingerprint, outliving_tier

_LIMITLESS_ROPE = (
    *("default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "mllama4"),
    "proportional",
)
"""Rope types that compute a position the same whatever ``max_model_len`` is. LongRoPE does not. ``dynamic`` does not
either, in models that take the limit for their largest position."""

_ORIGINAL = "original_max_position_embeddings"

_UNQUANTIZED = ("auto", "float16", "bfloat16", "float32")
"""Values of ``cache_dtype``. A checkpoint that makes others of ``auto`` has quantized weights."""

_TRANSFORMERS = ".transformers"
"""In the names of vLLM's modules whose models are computed by code of transformers."""

_LIMITED_MODELS = ("llama4", "llama4_text", "mllama4")
"""Model types that read ``max_model_len`` themselves: above 32768 Llama 4 scales its queries. ``test_fields`` knows all
modules of vLLM's models that read it."""


def identity_of(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, is_rank_free: bool) -> dict[str, str]:
    """Everything besides its key that changes the bytes of a block. The same in every process of equal engines.

    Raises ``UnclearError`` if blocks could outlive this process and an option or the platform cannot be read.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "engine": "vllm",
        # A model may have its KV in another order, or better numbers, in the next version.
        "version": installed_version(),
        "model": _paths(vllm_config) if config.weights_version is not None else "",
        "dtype": str(model.dtype).removeprefix("torch."),
        # A worker in this process has rewritten it; the specs of layers say what came of it.
        "kv_dtype": "fp8" if cache.cache_dtype == "fp8_ds_mla" else str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "block_size": str(config.block_size),
        "pages": "of all heads" if is_rank_free else _division(vllm_config),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        **_facts(vllm_config, kv_cache_config, config, is_rank_free),
    }


def _paths(vllm_config: Any) -> str:
    """Where the models are. A user may give two models the same version; hashes of their files need no path."""
    drafter = drafter_with_kv(vllm_config)
    models = [vllm_config.model_config, *([] if drafter is None else [drafter.draft_model_config])]
    return json.dumps([[str(model.model), model.revision] for model in models])


def unknown_options(vllm_config: Any, config: OffloadingConfig) -> list[str]:
    """Options of vLLM, and variables, that count because this version of kvoffload does not know them."""
    options = [name for prefix, part in _parts(vllm_config, config) for name in unknown_fields(part, FIELDS, prefix)]
    return options + unknown_variables()


def _facts(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig, is_rank_free: bool) -> dict[str, str]:
    """Options, environment, classes of models, and layers."""
    model, drafter = vllm_config.model_config, drafter_with_kv(vllm_config)
    facts = {"limit": _limit(model)} | environment()
    try:
        is_quantized = _is_quantized(vllm_config)
        facts |= {"plugins": plugins(), "class": _class_of(model), "platform": platform(is_quantized)}
        if drafter is not None:
            draft = drafter.draft_model_config
            facts["speculative_config.class"] = _class_of(draft)
            # Of the target's limit, too: vLLM bounds the drafter's by it.
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
    """The class that computes ``model``. A plug-in may have registered its own for an architecture."""
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
    """Weights, and then activations too; or KV, and then queries too, by some of the backends of attention."""
    drafter, dtype = drafter_with_kv(vllm_config), vllm_config.cache_config.cache_dtype
    models = [vllm_config.model_config, *([] if drafter is None else [drafter.draft_model_config])]
    return dtype not in _UNQUANTIZED or any(model.quantization is not None for model in models)


def rope_follows_batch(model: Any) -> bool:
    """Whether the longest request of a batch may choose the rotary frequencies of all. Code of transformers does so
    beyond the length that a model was trained for (``dynamic_rope_update``); vLLM's own models do not."""
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
    """The parts of vLLM's configuration that ``FIELDS`` is asked about, each with the start of its fields' names."""
    yield "", vllm_config
    if vllm_config.lora_config is not None and config.adapters_never_change:
        yield "lora_config.", vllm_config.lora_config
    drafter = drafter_with_kv(vllm_config)
    if drafter is not None:
        yield "speculative_config.", drafter


def _layers(vllm_config: Any, kv_cache_config: Any, is_rank_free: bool) -> dict[str, str]:
    """The spec of each layer, by group, and the layers in the order in which they lie. On CPUs, how this host's
    attention packs keys, too.

    The scheduler sees the first spec of a group alone. But layers with other pages have a tensor record of their own,
    and what makes layers differ are options, which count.
    """
    facts = {"tensors": json.dumps([list(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors])}
    for index, group in enumerate(offloaded_groups(kv_cache_config)):
        spec = spec_of_layer(group)
        of_spec = facts_of(spec, FIELDS)
        if is_rank_free:  # then all ranks together have what the model's configuration says
            of_spec = {name: text for name, text in of_spec.items() if name not in ("num_kv_heads", "num_head_slots")}
        facts[f"group {index}"] = json.dumps([type(spec).__name__, of_spec, list(group.layer_names)])
        if vllm_config.device_config.device_type == "cpu" and hasattr(spec, "head_size"):
            facts[f"group {index} on this CPU"] = cpu_packing(vllm_config, spec)
    return facts


def platform(is_quantized: bool) -> str:
    """The maker of the device, and its generation where that chooses bytes.

    vLLM's configuration calls AMD's GPUs ``cuda``, too. Their generation chooses how keys are packed. NVIDIA's chooses
    how precise the activations of quantized weights are, and the queries of quantized KV; and ``fp8`` means other
    numbers on some GPUs. Without quantization it changes rounding alone.
    """
    try:
        from vllm.platforms import current_platform as device

        generation = device.get_device_capability()
        if generation is None and device.device_name in ("cuda", "rocm"):
            raise LookupError("it does not tell its generation")
        if device.device_name == "cuda" and not is_quantized:
            return "cuda"
        return f"{device.device_name} {generation and tuple(generation)} {device.fp8_dtype()}"
    except Exception as exc:  # platforms of others may lack what vLLM's own have
        raise UnclearError(f"platform is not known ({exc!r})") from exc


def cpu_packing(vllm_config: Any, spec: Any) -> str:
    """The instructions that vLLM's attention chooses on this host. Some of them pack keys in an order of their own."""
    values = {
        "dtype": vllm_config.model_config.dtype,
        "block_size": spec.block_size,
        "head_size": spec.head_size,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
    }
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(**{name: values[name] for name in inspect.signature(_get_attn_isa).parameters}))
    except Exception as exc:  # a private function of vLLM, which may be anything in a newer one
        raise UnclearError(f"way to pack keys on this CPU is not known ({exc!r})") from exc


def cpu_build() -> str:
    """Tells builds of vLLM's compiled attention apart, and hosts that run other parts of one: under one name of
    instructions keys may be packed in two orders, as on ARM with and without those for bfloat16."""
    try:
        import torch
        import vllm

        found = [torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported()]  # as vLLM chooses one
        return f"{fingerprint(Path(vllm.__file__).parent, ('_C*.so',))} {found}"
    except Exception as exc:  # torch's functions are private
        raise UnclearError(f"build for this CPU is not known ({exc!r})") from exc


def _division(vllm_config: Any) -> str:
    """How ranks divide a block, beside the number of its slices."""
    parallel, sizes = vllm_config.parallel_config, stage_sizes(vllm_config)
    context = f"{parallel.decode_context_parallel_size}:{parallel.cp_kv_cache_interleave_size}"
    return f"of stages {sizes if len(sizes) > 1 else ''}, context {context}"


def _limit(model: Any) -> str:
    """The longest request, if KV may depend on it; as it was asked for, since vLLM fits it to memory later."""
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
    """``--max-model-len``, or what vLLM takes instead: from several files of the model."""
    asked = model.original_max_model_len
    if asked is not None and asked > 0:
        return str(asked)
    return f"of the model: {model.get_and_verify_max_len(asked)}"


def _values_of(config: Any, name: str) -> Iterator[Any]:
    """What a model's configuration has as ``name``, in all its parts."""
    if isinstance(config, Mapping):
        if name in config:
            yield config[name]
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _values_of(part, name)
