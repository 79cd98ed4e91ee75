# SPDX-License-Identifier: Apache-2.0
"""Find the parts of a process's environment that change the bytes of a block: variables, the plug-ins that vLLM loads,
and the kernels that it finds."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path

from kvoffload.engines.facts import UnclearError
from kvoffload.engines.variables import SERVICES, counted

HARMLESS: Mapping[str, str] = {
    "how vLLM was built and installed": (
        "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED "
        "VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT "
        "VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE VERBOSE VLLM_SKIP_VERSION_SUFFIX "
        "VLLM_NCCL_INCLUDE_PATH"
    ),
    "another kernel or order for the same computation": (
        "VLLM_TRITON_USE_TD VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BREAKABLE_CUDAGRAPH "
        "VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK VLLM_FORCE_AOT_LOAD VLLM_USE_MEGA_AOT_ARTIFACT "
        "VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_CI_ENV VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_XLA_USE_SPMD VLLM_USE_TRITON_AWQ "
        "VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL "
        "VLLM_DISABLE_PYNCCL VLLM_USE_OINK_OPS VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_AITER_MOE_DISPATCH_POLICY "
        "VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MLA_ASM_PADDING "
        "VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING "
        "VLLM_USE_LAYERNAME VLLM_MARLIN_USE_ATOMIC_ADD VLLM_HUMMING_MOE_GEMM_TYPE "
        "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_DCP_Q_REPLICATE VLLM_USE_FUSED_MOE_GROUPED_TOPK "
        "VLLM_MOE_SKIP_PADDING VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_GEMM_RS VLLM_ENABLE_GEMM_RS "
        "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_XPU_ENABLE_XPU_GRAPH "
        "VLLM_REPLICATE_EMBED VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FLASHINFER_ALLREDUCE_BACKEND "
        "VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC "
        "VLLM_TUNED_CONFIG_FOLDER VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
        "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DBO_COMM_SMS "
        "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_USE_NCCL_SYMM_MEM "
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
        "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_LORA_DISABLE_PDL VLLM_XPU_FORCE_N_CONTIG_WEIGHT "
        "VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_DIRECT_DCP_KV_GATHER "
        "VLLM_LORA_ENABLE_DUAL_STREAM VLLM_ENABLE_HPC_OPS VLLM_CUSTOM_ALLREDUCE_ALGO VLLM_SKIP_P2P_CHECK "
        "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_STEP5_SHARD_SP_SHARED_EXPERT"
    ),
    "which tokens are computed together, and when": (
        "VLLM_XPU_PP_MICROBATCH VLLM_USE_V2_MODEL_RUNNER VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN "
        "VLLM_RANDOMIZE_DP_DUMMY_INPUTS"
    ),
    "the division of pages counts": "VLLM_PP_LAYER_PARTITION",
    "its result is in the spec of each layer": ("VLLM_MLA_DISABLE VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"),
    "counts as layout and limit (identity.py)": "VLLM_KV_CACHE_LAYOUT VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "adapters are told apart by their files, or by path if a user promises that none is replaced": (
        "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    ),
    "the use of hidden states, after the KV": (
        "VLLM_USE_FLASHINFER_SAMPLER VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS "
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB "
        "VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS "
        "VLLM_XPU_USE_SAMPLER_KERNEL"
    ),
    "the choice of tokens, which are in the key": (
        "VLLM_USE_FASTOKENS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
        "VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
        "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "VLLM_CHAT_TEMPLATE_FUEL VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT"
    ),
    "the choice of media, whose hash is in the key": (
        "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE "
        "VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES "
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT "
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES "
        "VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_IMAGE_PIXELS "
        "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB"
    ),
    "the place or amount of memory or files": (
        "VLLM_CONFIG_ROOT VLLM_CACHE_ROOT CUDA_HOME VLLM_NCCL_SO_PATH LD_LIBRARY_PATH VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE "
        "VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_SIM_MULTI_NUMA "
        "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH VLLM_SPARSE_INDEXER_MAX_LOGITS_MB "
        "VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_DISABLE_COMPILE_CACHE "
        "VLLM_CUDART_SO_PATH VLLM_DEEP_GEMM_WARMUP VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
        "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_HAS_FLASHINFER_CUBIN "
        "VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_STARTUP_PLAN VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME "
        "VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY "
        "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_WSL2_ENABLE_PIN_MEMORY "
        "VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS "
        "VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_PLE_CPU_OFFLOAD"
    ),
    "metrics, logs, profiles": (
        "VLLM_GPU_SYNC_CHECK VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_PATTERN_MATCH_DEBUG VLLM_DEBUG_DUMP_PATH "
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK "
        "VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM "
        "VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL VLLM_TRACE_FUNCTION "
        "VLLM_XLA_CHECK_RECOMPILATION VLLM_LOG_BATCHSIZE_INTERVAL VLLM_MOONCAKE_STORE_TIER_LOG "
        "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES "
        "VLLM_GC_DEBUG VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO "
        "VLLM_REQUEST_BODY_LOG_LEVEL"
    ),
    "names, access and processes": (
        "VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_ENGINE_READY_TIMEOUT_S "
        "VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE "
        "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND "
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_WORKER_MULTIPROC_METHOD VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_MAX_COMPLETION_PROMPTS VLLM_ENABLE_V1_MULTIPROCESSING VLLM_USE_RUST_BENCH "
        "VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_RAY_PER_WORKER_GPUS "
        "VLLM_RAY_BUNDLE_INDICES VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT "
        "VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_TPU_USING_PATHWAYS VLLM_MSGPACK_ZERO_COPY_THRESHOLD "
        "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_NIXL_SIDE_CHANNEL_HOST "
        "VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_MAX_PEERS "
        "VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
        "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_LOAD_RECV_THREADS "
        "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME "
        "VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
        "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS "
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX "
        "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_SKIP_MODEL_NAME_VALIDATION "
        "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_USE_SPINLOOP_EXT "
        "VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_DIST_IDENT "
        "VLLM_MORIIO_TRANSFER_TIMEOUT_S VLLM_SNAPSHOT_TIMEOUT_S"
    ),
}
"""Reasons, each with variables from vLLM's ``envs.py`` (0.32 and 0.33) and variables that vLLM itself sets. All other
variables count as soon as they are set. Variables that vLLM sets in only some of its processes must be listed."""

_SET_BY_VLLM = ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4")
"""Variables of libraries that vLLM sets from ``VLLM_ROCM_USE_AITER_MOE_SITUV2``, which counts, in some processes."""

_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points whose code runs in the engine's processes."""


_ASKED_FOR = re.compile(r"(?:_has_module|_has_module_spec|find_spec)\(\s*\"(\w+)")
_WHO_ASKS = ("import_utils.py", "flashinfer.py", "b12x.py", "hpc.py")
"""Files in one directory of vLLM that look for kernel libraries."""


def environment() -> dict[str, str]:
    """Return the variables that are set and count. Values are hashed, because stores write them to files that others
    may read."""
    harmless = {name for names in HARMLESS.values() for name in names.split()}
    own = [name for name in os.environ if name.startswith("VLLM_") and not SERVICES.fullmatch(name)]
    names = [*own, *(name for name in counted(os.environ) if name not in _SET_BY_VLLM)]
    digests = {
        name: hashlib.sha256(os.fsencode(os.environ[name])).hexdigest()[:32] for name in names if name not in harmless
    }
    return {"environment": json.dumps(digests, sort_keys=True)}


@functools.cache
def plugins() -> str:
    """Return the names, targets and versions of vLLM's plug-ins, except kvoffload's and vLLM's own. Raises
    ``UnclearError`` if one lacks a version."""
    found = []
    for group in _PLUGINS:
        for entry in entry_points(group=group):
            if entry.value.split(".")[0].split(":")[0] in ("kvoffload", "vllm"):
                continue
            version = entry.dist and entry.dist.version
            if not version:
                raise UnclearError(f"plug-in {entry.name!r} has no version")
            found.append([group, entry.name, entry.value, version])
    return json.dumps(sorted(found))


@functools.cache
def kernels() -> str:
    """Return the kernel libraries that vLLM looks for and finds, with their versions, and whether it may use
    FlashInfer, which needs a compiler or compiled kernels. If an option is ``auto``, the installed libraries determine
    the precision of activations in quantized layers. Raises ``UnclearError`` if vLLM does not show which libraries it
    looks for."""
    try:
        from vllm.utils.flashinfer import has_flashinfer

        files = [Path(str(sys.modules[has_flashinfer.__module__].__file__)).with_name(name) for name in _WHO_ASKS]
        names = {name for file in files if file.exists() for name in _ASKED_FOR.findall(file.read_text())} - {"vllm"}
        if not names:
            raise LookupError(f"{files[0]} names none")
        owners = packages_distributions()
        found = {
            # A partly removed distribution lacks a name.
            name: sorted(f"{owner} {version(owner)}" for owner in {*owners.get(name, ())} if owner)
            for name in names
            if importlib.util.find_spec(name) is not None
        }
        return json.dumps([found, bool(has_flashinfer())], sort_keys=True)
    except Exception as exc:  # libraries may be broken, and newer versions of vLLM look elsewhere
        raise UnclearError(f"choice of kernels is not known ({exc!r})") from exc
