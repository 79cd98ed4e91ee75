# SPDX-License-Identifier: Apache-2.0
"""The fields of vLLM's configuration (0.32 and 0.33) and its variables that change the bytes of a block.

``fields.py`` and ``environment.py`` list the harmless ones, and all others count. So these lists only help the tests to
tell a name that someone has judged from a new one.
"""

from __future__ import annotations

from kvoffload.engines.vllm.fields import FIELDS

COUNTED_FIELDS = {
    "VllmConfig": """
        model_config cache_config parallel_config device_config load_config attention_config mamba_config
        kernel_config diffusion_config compilation_config ec_transfer_config ec_manager_config additional_config""",
    "ModelConfig": """
        runner convert dtype hf_config hf_text_config code_revision quantization quantization_config
        disable_sliding_window model_class_overrides model_impl multimodal_config""",
    "QuantizationConfigArgs": "linear moe ignore targets",
    "QuantSpec": "weight activation",
    "MultiModalConfig": """
        language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_hasher_algorithm
        mm_encoder_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method
        allow_missing_mm_embeddings""",
    "CacheConfig": """
        kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype use_replayssm replayssm_buffer_len
        use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay""",
    "ParallelConfig": "worker_cls worker_extension_cls all2all_backend",
    "KernelConfig": "moe_backend linear_backend linear_backend_per_quant monokernel",
    "DeviceConfig": "device_type",
    "LoadConfig": "load_format model_loader_extra_config ignore_patterns",
    "AttentionConfig": """
        backend backend_per_kind disable_flashinfer_q_quantization use_prefill_query_quantization flash_attn_version
        use_trtllm_attention mla_prefill_backend trtllm_ragged_backend minimax_m3_msa_decode_backend
        sparse_mla_force_mqa indexer_kv_dtype hisparse_config use_non_causal indexer_sparse_logits
        minimax_m3_indexer_cp""",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "MambaConfig": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "CompilationConfig": "inductor_passes pass_config",
    "PassConfig": "fuse_rope_kvcache fuse_qk_norm_rope_kvcache",
    "ECTransferConfig": "ec_connector ec_connector_module_path",
    "EncoderCacheManagerConfig": "encoder_cache_manager_cls",
    "LoRAConfig": """
        lora_dtype target_modules default_mm_loras enable_tower_connector_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras""",
    "SpeculativeConfig": """
        method kv_cache_dtype draft_model_config draft_load_config attention_backend parallel_drafting
        index_share_for_mtp_iteration use_heterogeneous_vocab disable_lookahead_block_hashes moe_backend""",
    "KVCacheSpec": "block_size dcp_sharded is_draft",
    "AttentionSpec": """
        num_kv_heads head_size dtype head_size_v kv_quant_mode num_head_slots state_content_bytes tokens_per_state""",
    "FullAttentionSpec": "sliding_window attention_chunk_size non_causal",
    "MLAAttentionSpec": """
        cache_dtype_str alignment model_version cache_role is_index_group_leader storage_block_size
        non_causal_multi_token_decode topk_buffer_width""",
    "RSWASpec": "rswa_window",
    "ChunkedLocalAttentionSpec": "attention_chunk_size",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "cache_dtype_str alignment model_version bounded_replay",
    "SinkFullAttentionSpec": "sink_len",
    "MambaSpec": "shapes dtypes mamba_type mamba_cache_mode num_heads tokens_per_state tp_replicated",
    "HiSparseHotSpec": "page_size blocks_per_request",
    "HiSparseResidentSpec": "page_size",
}
"""Names of fields, by class."""

COUNTED_VARIABLES = """
VLLM_FLOAT32_MATMUL_PRECISION VLLM_BATCH_INVARIANT VLLM_USE_MODELSCOPE VLLM_CPU_INT4_W4A8 VLLM_VIDEO_LOADER_BACKEND
VLLM_MEDIA_CONNECTOR VLLM_TEST_FORCE_LOAD_FORMAT VLLM_PLUGINS VLLM_DISABLED_KERNELS VLLM_USE_HW_AGNOSTIC
VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_USE_AITER
VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_SITUV2
VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MHA
VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_FP8BMM
VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS
VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_AITER_TRITON_GEMM
VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_MODEL_REDIRECT_PATH
VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM
VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0
VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_B12X_MOE_FP4_FORCE_A16
VLLM_USE_FLASHINFER_MOE_INT4 VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_MOE_ROUTING_SIMULATION_STRATEGY
VLLM_SSM_CONV_STATE_LAYOUT VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION
VLLM_XPU_INC_WNA16_BACKEND VLLM_USE_RUST_FRONTEND VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE
"""

COUNTS = "changes bytes"


def judged(kind: str) -> dict[str, str]:
    """Return the names of the judged fields of a class, by the reason."""
    return {COUNTS: COUNTED_FIELDS.get(kind, "")} | FIELDS.get(kind, {})
