# SPDX-License-Identifier: Apache-2.0
"""List every name that the adapter uses from vLLM, and check that a vLLM provides it, by reading vLLM's sources without
importing them.

The names that the adapter imports follow from its own files. This module lists all other names; add to it if you use
more. ``test_interface.py`` runs the check for the vLLM of the lane, and ``scripts/try-vllm`` for a new one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.engines.vllm.sources import Method, Sources, imports_of_vllm, methods_of

_ADAPTER = Path(__file__).parents[3] / "src" / "kvoffload" / "engines" / "vllm"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_HASHES = "vllm.v1.core.kv_cache_utils"
_SPECS = "vllm.v1.kv_cache_interface"

SINCE = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.unregister_kv_caches": (0, 33),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.restore_kv_caches": (0, 33),
    "vllm.config.vllm.VllmConfig.num_hash_lookahead_tokens": (0, 33),
}
"""Names that older versions lack. ``versions.py`` handles these versions."""

_ATTRIBUTES = {
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource"): "HOST DISK EXTERNAL_UNSPECIFIED",
    ("vllm.v1.core.sched.output", "SchedulerOutput"): (
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens preempted_req_ids kv_connector_block_state "
        "kv_cache_block_copies scheduled_encoder_inputs"
    ),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"): "boundary_state_offloads",
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlockCopy"): "dst_block_id",
    ("vllm.v1.kv_cache_interface", "MambaSpec"): "shapes dtypes mamba_cache_mode",
    ("vllm.v1.core.sched.output", "NewRequestData"): "req_id block_ids num_computed_tokens",
    ("vllm.v1.core.sched.output", "CachedRequestData"): "req_ids resumed_req_ids new_block_ids num_computed_tokens",
    ("vllm.v1.request", "Request"): (
        "request_id block_hashes num_tokens num_prompt_tokens kv_transfer_params all_token_ids lora_request "
        "skip_reading_prefix_cache mm_features prompt_embeds prompt_is_token_ids resumable kv_hints trace_headers "
        "session_id"
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): "get_block_ids",
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"): "block_pool",
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
    ): "kv_cache_manager update_from_output reset_prefix_cache requests failed_recving_kv_req_ids _inflight_prefills",
    ("vllm.v1.outputs", "ModelRunnerOutput"): "kv_connector_output",
    ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiKVConnectorWorkerMetadata"): "metadata",
    ("vllm.v1.core.block_pool", "BlockPool"): (
        "null_block blocks touch free_blocks reset_prefix_cache cached_block_hash_to_block get_num_free_blocks "
        "num_gpu_blocks evict_blocks"
    ),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"): "block_id ref_cnt",
    ("vllm.v1.outputs", "KVConnectorOutput"): "kv_connector_worker_meta invalid_block_ids",
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): (
        "num_blocks kv_cache_tensors kv_cache_groups hash_block_size kv_cache_layout prefix_cacheable_group_ids "
        "needs_kv_cache_zeroing kv_tp_replicas"
    ),
    ("vllm.v1.kv_cache_interface", "KVCacheTensor"): "size layers",
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): "layer_names kv_cache_spec is_eagle_group",
    ("vllm.v1.kv_cache_interface", "KVCacheSpec"): "block_size dcp_sharded",
    ("vllm.v1.kv_cache_interface", "AttentionSpec"): "num_kv_heads kv_quant_mode num_head_slots",
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs"): "kv_cache_specs",
    ("vllm.v1.kv_cache_interface", "SlidingWindowSpec"): "sliding_window extra_retained_tokens",
    ("vllm.v1.kv_cache_interface", "RSWASpec"): "rswa_window",
    ("vllm.v1.kv_cache_interface", "ChunkedLocalAttentionSpec"): "attention_chunk_size",
    ("vllm.v1.kv_cache_interface", "KVCacheSpecKind"): (
        "FULL_ATTENTION MLA_ATTENTION SLIDING_WINDOW SLIDING_WINDOW_MLA CHUNKED_LOCAL_ATTENTION MAMBA"
    ),
    ("vllm.config.kv_transfer", "KVTransferConfig"): (
        "kv_connector_extra_config kv_load_failure_policy kv_role engine_id has_connector"
    ),
    ("vllm.config.kv_events", "KVEventsConfig"): "enable_kv_cache_events",
    ("vllm.config.parallel", "ParallelConfig"): (
        "nnodes_within_dp data_parallel_size data_parallel_size_local world_size distributed_executor_backend "
        "pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size tensor_parallel_size rank "
        "cp_kv_cache_interleave_size enable_fault_tolerance"
    ),
    ("vllm.config.cache", "CacheConfig"): "prefix_caching_hash_algo enable_prefix_caching cache_dtype use_replayssm",
    ("vllm.config.model", "ModelConfig"): (
        "model model_weights revision dtype seed trust_remote_code hf_config hf_overrides hf_text_config "
        "multimodal_config override_generation_config try_get_generation_config use_mla is_hybrid "
        "get_total_num_kv_heads quantization max_model_len "
        "get_total_num_hidden_layers original_max_model_len get_and_verify_max_len registry architecture "
        "enable_sleep_mode sleep_mode_backend is_diffusion pooler_config is_prefix_caching_supported"
    ),
    ("vllm.config.speculative", "SpeculativeConfig"): (
        "method draft_model_config draft_load_config parallel_drafting use_eagle_block_drop use_multi_module_mtp"
    ),
    ("vllm.config.vllm", "VllmConfig"): (
        "kv_transfer_config parallel_config cache_config model_config kv_events_config speculative_config lora_config "
        "attention_config load_config weight_transfer_config use_v2_model_runner num_hash_lookahead_tokens "
        "observability_config ec_transfer_config ec_manager_config device_config instance_id scheduler_config "
        "aux_output_config"
    ),
    ("vllm.config.ec_manager_config", "EncoderCacheManagerConfig"): "encoder_cache_manager_cls",
    ("vllm.config.scheduler", "SchedulerConfig"): "async_scheduling enable_chunked_prefill",
    ("vllm.config.aux_output", "AuxOutputConfig"): "enabled",
    ("vllm.config.observability", "ObservabilityConfig"): "otlp_traces_endpoint",
    ("vllm.platforms.interface", "Platform"): "device_name fp8_dtype get_device_capability",
    ("vllm.model_executor.models.registry", "_ModelRegistry"): "models",
    ("vllm.model_executor.models.registry", "_RegisteredModel"): "model_cls",
    ("vllm.model_executor.models.registry", "_LazyRegisteredModel"): "module_name class_name",
    ("vllm.config.attention", "AttentionConfig"): "hisparse_config",
    ("vllm.config.device", "DeviceConfig"): "device_type",
    ("vllm.config.load", "LoadConfig"): "load_format download_dir",
    ("vllm.config.multimodal", "MultiModalConfig"): (
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_processor_cache_gb mm_processor_cache_type"
    ),
    ("vllm.engine.arg_utils", "EngineArgs"): "create_engine_config kv_transfer_config kv_offloading_size",
    ("vllm.distributed.kv_events", "BlockStored"): (
        "block_hashes parent_block_hash token_ids block_size lora_id lora_name medium group_idx kv_cache_spec_kind "
        "kv_cache_spec_sliding_window extra_keys locality ownership session_id"
    ),
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec"): "identifier mm_position data modality",
    ("vllm.multimodal.inputs", "MultiModalFieldElem"): "data",
    ("vllm.multimodal.inputs", "PlaceholderRange"): "offset length is_embed get_num_embeds",
    ("vllm.lora.request", "LoRARequest"): (
        "adapter_id name lora_name lora_path lora_int_id load_inplace is_3d_lora_weight"
    ),
    ("vllm.config.lora", "LoRAConfig"): "enable_tower_connector_lora",
    ("vllm.lora.worker_manager", "WorkerLoRAManager"): "_adapter_manager",
    ("vllm.distributed.kv_events", "BlockRemoved"): "block_hashes medium group_idx locality ownership",
    (_BASE, "KVConnectorBase_V1"): "_get_connector_metadata",
    (_BASE, "KVConnectorTransferResults"): "finished_recving failed_recving",
    (_BASE, "KVConnectorRole"): "SCHEDULER WORKER",
    (_METRICS, "KVConnectorStats"): "data to_dict",
    (_METRICS, "KVConnectorPromMetrics"): "_gauge_cls _counter_cls _histogram_cls per_engine_labelvalues",
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"): (
        "register_connector get_connector_class get_connector_class_by_name"
    ),
}
"""Attributes that the adapter reads, passes or assigns by name, by module and class."""

_CALLS = {
    ("vllm.distributed.kv_transfer.kv_transfer_state", "", "get_kv_transfer_group"): "",
    ("vllm.distributed.kv_transfer.kv_transfer_state", "", "has_kv_transfer_group"): "",
    ("vllm.distributed.utils", "", "get_pp_indices"): "num_hidden_layers pp_rank pp_size",
    ("vllm.v1.attention.backends.cpu_attn", "", "_get_attn_isa"): "dtype block_size head_size kv_cache_dtype",
    (_HASHES, "", "generate_block_hash_extra_keys"): "request start_token_idx end_token_idx start_mm_idx",
    (_HASHES, "", "maybe_convert_block_hash"): "hash_bytes",
    (_HASHES, "", "to_event_extra_keys"): "extra_keys",
    (_SPECS, "", "get_kv_cache_spec_kind"): "kv_cache_spec",
    (_SPECS, "", "get_kv_cache_spec_sliding_window"): "kv_cache_spec",
    (_BASE, "KVConnectorBase_V1", "__init__"): "vllm_config role kv_cache_config",
    (_BASE, "KVConnectorBase_V1", "bind_connector_metadata"): "connector_metadata",
    (_METRICS, "KVConnectorPromMetrics", "__init__"): "vllm_config metric_types labelnames per_engine_labelvalues",
    (_FACTORY, "KVConnectorFactory", "register_connector"): "name module_path class_name",
    (_FACTORY, "KVConnectorFactory", "get_connector_class"): "kv_transfer_config",
    ("vllm.config.kv_transfer", "KVTransferConfig", "has_connector"): "connector_name",
    ("vllm.config.model", "ModelConfig", "get_total_num_kv_heads"): "",
    ("vllm.config.model", "ModelConfig", "get_total_num_hidden_layers"): "",
    ("vllm.config.model", "ModelConfig", "get_and_verify_max_len"): "max_model_len",
    ("vllm.config.model", "ModelConfig", "try_get_generation_config"): "",
    ("vllm.v1.core.block_pool", "BlockPool", "touch"): "blocks",
    ("vllm.v1.core.block_pool", "BlockPool", "get_num_free_blocks"): "",
    ("vllm.v1.executor.abstract", "Executor", "get_class"): "vllm_config",
    ("vllm.v1.executor.abstract", "Executor", "collective_rpc"): "method timeout args kwargs",
    ("vllm.v1.core.block_pool", "BlockPool", "free_blocks"): "ordered_blocks",
    ("vllm.lora.worker_manager", "WorkerLoRAManager", "_load_adapter"): "lora_request",
    ("vllm.lora.model_manager", "LoRAModelManager", "activate_adapter"): "lora_id",
    ("vllm.v1.core.block_pool", "BlockPool", "reset_prefix_cache"): "",
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", "get_block_ids"): "",
}
"""Functions that the adapter calls, by module and class, with the parameters that it passes. All other parameters must
have defaults."""

_MADE = (
    ("vllm.distributed.kv_events", "BlockStored"),
    ("vllm.distributed.kv_events", "BlockRemoved"),
    (_BASE, "KVConnectorTransferResults"),
)
"""Classes that the adapter instantiates with attributes of ``_ATTRIBUTES``. All other attributes must have defaults."""

_OVERRIDES = (
    ("connector.py", "KVOffloadConnector", ((_BASE, "KVConnectorBase_V1"), (_BASE, "SupportsHMA")), "scheduler worker"),
    ("connector.py", "StepReport", ((_BASE, "KVConnectorWorkerMetadata"),), ""),
    ("stats.py", "OffloadStats", ((_METRICS, "KVConnectorStats"),), "counters gauges report"),
    ("stats.py", "OffloadPromMetrics", ((_METRICS, "KVConnectorPromMetrics"),), "begin _labelled _observe"),
)
"""kvoffload's classes that replace classes of vLLM: file, name, bases, and methods that vLLM does not call."""

PRIVATE = {
    "_get_connector_metadata": "returns the metadata that vLLM bound to this step; vLLM's own connectors read it so",
    "_cache_hit_source": "names the source of hits if vLLM asks for no sources; a class attribute that connectors set",
    "_counter_cls": "series known to vLLM's multi-process mode and to Ray must use vLLM's own classes",
    "_gauge_cls": "the same",
    "_histogram_cls": "the same",
    "_get_attn_isa": "tells which instructions pack keys on this CPU; without it, kvoffload rejects persistent tiers",
    "_load_adapter": "tells which adapter's files a worker read; without it, persistent tiers do not serve adapters",
    "_adapter_manager": "tells which of vLLM's managers has read them",
    "_inflight_prefills": "reserves blocks for requests; after an undone load, the next one would never fit",
    "_LOAD_FORMAT_TO_MODEL_LOADER": "tells whether a plug-in loads the weights, which then need a `weights_version`",
    "_ModelRegistry": "finds the class registered for an architecture, which a plug-in may have replaced",
    "_RegisteredModel": "one of its entries",
    "_LazyRegisteredModel": "one of its entries",
}
"""Private names of vLLM, each with the reason why the adapter uses it."""


def missing(sources: Sources, release: tuple[int, int]) -> list[str]:
    """Return the names that ``sources``, of vLLM ``release``, lack or define differently, sorted. They are dotted
    names; for calls and overridden methods, the list includes the parameters that the adapter expects. It takes half a
    second."""
    checks = (_missing_imports, _missing_attributes, _other_calls, _new_fields, _other_hooks)
    found = {name for check in checks for name in check(sources)}
    return sorted(name for name in found if release >= SINCE.get(name, release))


def _missing_imports(sources: Sources) -> Iterator[str]:
    for module, name in {pair for path in _ADAPTER.glob("*.py") for pair in imports_of_vllm(path)}:
        if name not in sources.top_level_names(module):
            yield f"{module}.{name}"


def _missing_attributes(sources: Sources) -> Iterator[str]:
    for (module, name), attributes in _ATTRIBUTES.items():
        try:
            known = sources.attributes(module, name)
        except LookupError:
            known = set()
        yield from (f"{module}.{name}.{attribute}" for attribute in attributes.split() if attribute not in known)


def _other_calls(sources: Sources) -> Iterator[str]:
    for (module, owner, name), text in _CALLS.items():
        try:
            known = sources.methods(module, owner) if owner else sources.functions(module)
            takes: Method | None = known.get(name)
        except LookupError:
            takes = None
        passed = tuple(text.split())
        if takes is None or takes.parameters[: len(passed)] != passed or not takes.required <= set(passed):
            yield ".".join(filter(None, (module, owner, name))) + f"({', '.join(passed)})"


def _new_fields(sources: Sources) -> Iterator[str]:
    for module, name in _MADE:
        try:
            required = sources.required_fields(module, name)
        except LookupError:
            continue  # its attributes are reported as missing
        ours = _ATTRIBUTES[module, name].split()
        yield from (f"{module}.{name}.{field}, which is new" for field in required.difference(ours))


def _other_hooks(sources: Sources) -> Iterator[str]:
    for file, name, bases, own_names in _OVERRIDES:
        tree = ast.parse((_ADAPTER / file).read_text())
        own = methods_of(next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name))
        theirs: dict[str, tuple[str, Method]] = {}
        for module, base in bases:
            try:
                methods = sources.methods(module, base)
            except LookupError:
                yield f"{module}.{base}"
                continue
            theirs |= {method: (f"{module}.{base}.{method}", shape) for method, shape in methods.items()}
        for method, (dotted, shape) in theirs.items():
            if method in own and own[method].parameters != shape.parameters:
                yield f"{dotted}({', '.join(own[method].parameters)})"
            elif method not in own and shape.is_abstract:
                yield f"{dotted}, which is new"
        for method in set(own) - {"__init__", *own_names.split()} - set(theirs):
            module, base = bases[0]
            yield f"{module}.{base}.{method}"
