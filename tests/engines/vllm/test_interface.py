# SPDX-License-Identifier: Apache-2.0
"""What the adapter uses of vLLM is there, in the version the lane runs and in the next one: read, not imported.

The next version's sources come from its wheel, which is fetched without dependencies and kept beside the lane's
environment; where that is impossible the test is skipped and says so.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.engines.vllm.conftest import NEXT
from tests.engines.vllm.interface import Sources, imports_of_vllm, method_of

from kvoffload.engines.vllm.versions import NEWEST

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

SINCE = {
    "vllm.v1.core.kv_cache_utils.to_event_extra_keys": (0, 31),
    "vllm.v1.kv_cache_interface.KVCacheConfig.kv_tp_replicas": (0, 31),
    "vllm.v1.kv_cache_interface.KVCacheSpec.dcp_sharded": (0, 31),
    "vllm.v1.metrics.cache_hit_source.CacheHitSource": (0, 32),
    "vllm.v1.kv_cache_interface.KVCacheConfig.hash_block_size": (0, 32),
    "vllm.v1.request.Request.kv_hints": (0, 31),
    "vllm.config.vllm.VllmConfig.num_hash_lookahead_tokens": (0, 33),
}
"""What older versions lack. ``versions.py`` does without it there."""

NEW_METHODS = {"get_external_cache_hit_sources": (0, 32)}
"""What older versions do not call."""
ADAPTER = Path(__file__).parents[3] / "src" / "kvoffload" / "engines" / "vllm"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

ATTRIBUTES = {
    ("vllm.v1.core.sched.output", "SchedulerOutput"): (
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens preempted_req_ids kv_connector_block_state "
        "kv_cache_block_copies"
    ),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"): "boundary_state_offloads",
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlockCopy"): "dst_block_id",
    ("vllm.v1.kv_cache_interface", "MambaSpec"): "shapes dtypes mamba_cache_mode",
    ("vllm.v1.core.sched.output", "NewRequestData"): "req_id block_ids num_computed_tokens",
    ("vllm.v1.core.sched.output", "CachedRequestData"): "req_ids resumed_req_ids new_block_ids num_computed_tokens",
    ("vllm.v1.request", "Request"): (
        "request_id block_hashes num_tokens num_prompt_tokens kv_transfer_params all_token_ids lora_request "
        "skip_reading_prefix_cache mm_features prompt_embeds resumable kv_hints trace_headers"
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): "get_block_ids",
    ("vllm.v1.core.block_pool", "BlockPool"): "null_block blocks touch free_blocks reset_prefix_cache",
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"): "block_id ref_cnt",
    ("vllm.v1.outputs", "KVConnectorOutput"): "kv_connector_worker_meta",
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
    ("vllm.v1.kv_cache_interface", "KVCacheSpecKind"): (
        "FULL_ATTENTION MLA_ATTENTION SLIDING_WINDOW SLIDING_WINDOW_MLA MAMBA"
    ),
    ("vllm.config.kv_transfer", "KVTransferConfig"): (
        "kv_connector_extra_config kv_load_failure_policy kv_role engine_id has_connector"
    ),
    ("vllm.config.kv_events", "KVEventsConfig"): "enable_kv_cache_events",
    ("vllm.config.parallel", "ParallelConfig"): (
        "nnodes_within_dp data_parallel_size_local world_size distributed_executor_backend pipeline_parallel_size "
        "decode_context_parallel_size prefill_context_parallel_size tensor_parallel_size rank "
        "cp_kv_cache_interleave_size"
    ),
    ("vllm.config.cache", "CacheConfig"): "prefix_caching_hash_algo cache_dtype use_replayssm",
    ("vllm.config.model", "ModelConfig"): (
        "model model_weights revision dtype seed trust_remote_code hf_config hf_overrides hf_text_config "
        "multimodal_config override_generation_config try_get_generation_config use_mla is_hybrid "
        "get_total_num_kv_heads "
        "get_total_num_hidden_layers original_max_model_len get_and_verify_max_len registry architecture"
    ),
    ("vllm.config.speculative", "SpeculativeConfig"): (
        "method draft_model_config draft_load_config parallel_drafting use_eagle_block_drop use_multi_module_mtp"
    ),
    ("vllm.config.vllm", "VllmConfig"): (
        "kv_transfer_config parallel_config cache_config model_config kv_events_config speculative_config lora_config "
        "attention_config load_config weight_transfer_config use_v2_model_runner num_hash_lookahead_tokens "
        "observability_config"
    ),
    ("vllm.config.observability", "ObservabilityConfig"): "otlp_traces_endpoint",
    ("vllm.model_executor.models.registry", "_ModelRegistry"): "models",
    ("vllm.model_executor.models.registry", "_RegisteredModel"): "model_cls",
    ("vllm.model_executor.models.registry", "_LazyRegisteredModel"): "module_name class_name",
    ("vllm.config.attention", "AttentionConfig"): "hisparse_config",
    ("vllm.config.device", "DeviceConfig"): "device_type",
    ("vllm.config.load", "LoadConfig"): "load_format download_dir",
    ("vllm.config.multimodal", "MultiModalConfig"): (
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_hasher_algorithm"
    ),
    ("vllm.engine.arg_utils", "EngineArgs"): "create_engine_config kv_transfer_config kv_offloading_size",
    ("vllm.distributed.kv_events", "BlockStored"): (
        "block_hashes parent_block_hash token_ids block_size lora_id lora_name medium group_idx kv_cache_spec_kind "
        "kv_cache_spec_sliding_window extra_keys locality ownership"
    ),
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec"): "identifier mm_position",
    ("vllm.lora.request", "LoRARequest"): "adapter_id name lora_name",
    ("vllm.distributed.kv_events", "BlockRemoved"): "block_hashes medium group_idx locality ownership",
    (BASE, "KVConnectorTransferResults"): "finished_recving failed_recving",
    (METRICS, "KVConnectorStats"): "data to_dict",
    (METRICS, "KVConnectorPromMetrics"): "_gauge_cls _counter_cls per_engine_labelvalues",
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"): (
        "register_connector get_connector_class get_connector_class_by_name"
    ),
}
"""What the adapter reads or passes by name."""

OVERRIDES = [
    ("connector.py", "KVOffloadConnector", [(BASE, "KVConnectorBase_V1"), (BASE, "SupportsHMA")]),
    ("connector.py", "StepReport", [(BASE, "KVConnectorWorkerMetadata")]),
    ("stats.py", "OffloadStats", [(METRICS, "KVConnectorStats")]),
    ("stats.py", "OffloadPromMetrics", [(METRICS, "KVConnectorPromMetrics")]),
]


def test_the_next_version_is_the_newest_that_is_supported() -> None:
    assert NEXT.startswith(".".join(map(str, NEWEST)) + ".")


def test_every_name_and_attribute_is_there(sources: Sources, release: tuple[int, int]) -> None:
    imported = {pair for path in ADAPTER.glob("*.py") for pair in imports_of_vllm(path)}
    assert len(imported) > 8
    missing = {f"{module}.{name}" for module, name in imported if name not in sources.top_level_names(module)}
    missing |= {
        f"{module}.{name}.{attribute}"
        for (module, name), attributes in ATTRIBUTES.items()
        for attribute in attributes.split()
        if attribute not in sources.attributes(module, name)
    }
    assert missing == {name for name, since in SINCE.items() if release < since}


@pytest.mark.parametrize(("file", "name", "bases"), OVERRIDES, ids=[name for _, name, _ in OVERRIDES])
def test_overridden_methods_take_what_vllm_passes(
    sources: Sources, release: tuple[int, int], file: str, name: str, bases: list[tuple[str, str]]
) -> None:
    tree = ast.parse((ADAPTER / file).read_text())
    own_class = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    own = {node.name: method_of(node) for node in own_class.body if isinstance(node, ast.FunctionDef)}
    theirs = {method: shape for module, base in bases for method, shape in sources.methods(module, base).items()}

    for method, shape in theirs.items():
        if method in own:
            assert own[method].parameters == shape.parameters, f"{name}.{method}"
        else:
            assert not shape.is_abstract, f"vLLM wants {name} to have {method}"
    # Nothing of ours that vLLM is meant to call has lost its caller.
    ours = {"__init__", "begin", "scheduler", "worker", "counters", "gauges", "report", "_labelled"}
    newer = {method for method, since in NEW_METHODS.items() if release < since}
    assert set(own) - ours - newer <= set(theirs)
    assert newer.isdisjoint(theirs)


def test_a_reset_reaches_the_connector_by_the_names_in_the_docs(sources: Sources) -> None:
    """Over HTTP and in Python they differ. A wrong one over HTTP is ignored, and the answer is success all the same."""
    router = sources.module("vllm.entrypoints.serve.dev.cache.api_router")
    routes = {node.name: node for node in ast.walk(router) if isinstance(node, ast.AsyncFunctionDef)}
    arguments = routes["reset_prefix_cache"].args.args
    assert [each.arg for each in arguments][1:] == ["reset_running_requests", "reset_external"]
    python = sources.methods("vllm.entrypoints.llm", "LLM")["reset_prefix_cache"]
    assert python.parameters[-2:] == ("reset_running_requests", "reset_connector")
    told = (ADAPTER.parents[3] / "docs" / "vllm.md").read_text()
    assert "/reset_prefix_cache?reset_running_requests=true&reset_external=true" in told
    assert "reset_prefix_cache(reset_running_requests=True, reset_connector=True)" in told


def test_no_connector_of_vllm_asks_for_another_layout(sources: Sources) -> None:
    """``MultiConnector`` raises where two of its connectors ask for different ones."""
    asked: dict[str, set[object]] = {}
    folder = sources.root / "vllm/distributed/kv_transfer/kv_connector/v1"
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "get_required_kvcache_layout":
                returned = {each.value for each in ast.walk(node) if isinstance(each, ast.Return)}
                names = {each.value for each in returned if isinstance(each, ast.Constant)} - {None}
                asked[str(path.relative_to(folder))] = names
    assert {"LBHNC"} in asked.values()
    others = {file for file, names in asked.items() if not names <= {"LBHNC"}}
    # For HiSparse, and for hidden states as drafts. We refuse both.
    assert others <= {"hisparse/connector.py", "offloading_connector.py", "example_hidden_states_connector.py"}


def test_the_limit_as_it_was_asked_for_is_kept(sources: Sources) -> None:
    """vLLM assigns it after its fields are read, so it is none of them."""
    assert "self.original_max_model_len = self.max_model_len" in (sources.root / "vllm/config/model.py").read_text()


def test_the_kinds_of_groups_are_still_called_so(sources: Sources) -> None:
    kinds = sources.class_of("vllm.v1.kv_cache_interface", "KVCacheSpecKind")
    values = {
        node.value.value for node in kinds.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert {"full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba"} <= values
