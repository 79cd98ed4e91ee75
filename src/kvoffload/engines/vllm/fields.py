# SPDX-License-Identifier: Apache-2.0
"""The fields of vLLM's configuration (0.32 and 0.33) that do not change the bytes of a block, with the reasons.

All other fields count as soon as they differ from their default. ``test_fields`` reads the dataclasses of the installed
vLLM, and fails for a field that nobody has judged. *Bytes* means the meaning of KV: a field that changes only rounding
(kernels, batches, compiled graphs, the number of ranks) does not count, because engines of other sizes share blocks.
"""

from __future__ import annotations

from kvoffload.engines.facts import Table

_ROUNDING = "another kernel or order for the same computation"
_SCHEDULING = "which tokens are computed together, and when"
_MEMORY = "the place or amount of memory or files"
_SAMPLING = "the use of hidden states, after the KV"
_TOKENS = "the choice of tokens, which are in the key"
_RANKS = "the division of pages counts (identity.py)"
_SPECS = "its result is in the spec of each layer, which counts"
_KEYS = "the input of block hashes, which the layout describes"
_WATCHING = "metrics, logs, profiles"
_SERVING = "names, access and processes"
_DERIVED = "derived from fields that count"

FIELDS: Table = {
    "VllmConfig": {
        "counts in the keys of adapters (adapters.py), or in the namespace (identity.py)": "lora_config",
        "counts where the drafter has KV (identity.py)": "speculative_config",
        "rejected, or the weights have a name (weights.py)": "weight_transfer_config",
        _SCHEDULING: "scheduler_config",
        _MEMORY: "offload_config engram_config",
        _SAMPLING: "structured_outputs_config watermark_config reasoning_config aux_output_config",
        _DERIVED: "quant_config optimization_level performance_mode",
        _WATCHING: "observability_config logging_config profiler_config kv_events_config watchdog_config",
        _SERVING: "kv_transfer_config instance_id shutdown_timeout",
    },
    "ModelConfig": {
        "counts beside a weights_version; else the content of the files does (identity.py)": "model model_weights "
        "revision",
        "counts where positions depend on it (identity.py)": "max_model_len",
        "counts with random weights (identity.py)": "seed",
        "its result is hf_config": "hf_config_path hf_overrides config_format trust_remote_code",
        _DERIVED: "is_submodel_config spec_target_max_model_len allow_deprecated_quantization "
        "word_embeddings_untied_by_checkpoint",
        _TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin",
        "hashed into the key": "enable_prompt_embeds",
        _SAMPLING: "enable_return_routed_experts return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
        "enable_trace_replay logits_processors pooler_config",
        "sampling, and the part that Llama 4 reads (identity.py)": "generation_config override_generation_config",
        _ROUNDING: "enforce_eager disable_cascade_attn",
        _MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_nccl_comm_suspend enable_cumem_allocator renderer_num_workers",
        _SERVING: "allowed_local_media_path allowed_media_domains served_model_name hf_token",
    },
    "MultiModalConfig": {
        "hashed into the key": "enable_mm_embeds",
        _TOKENS: "interleave_mm_strings",
        _ROUNDING: "mm_encoder_attn_backend mm_encoder_tp_mode",
        _MEMORY: "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
        _WATCHING: "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
    },
    "CacheConfig": {
        "counts by the name that is the same in all processes (identity.py)": "cache_dtype",
        "counts as hash_algorithm and layout (identity.py)": "prefix_caching_hash_algo kv_cache_layout",
        _SPECS: "block_size user_specified_block_size _block_size_resolved sliding_window is_attention_free "
        "mamba_page_size_padded skip_page_size_padded mamba_block_size user_specified_mamba_block_size "
        "mamba_cache_mode effective_attention_block_size",
        _KEYS: "prefix_match_unit hash_block_size cache_hit_alignment_tokens enable_prefix_caching",
        "the choice of states to keep": "prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint "
        "enable_mamba_fine_grained_prefix_cache",
        _MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_size_tokens "
        "kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
        "simple_cpu_offload_num_blocks",
    },
    "ParallelConfig": {
        _RANKS: "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size world_size rank "
        "decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "_allow_auto_resolve_cp_interleave_size",
        _ROUNDING: "dcp_comm_backend dcp_q_replicate enable_expert_parallel enable_ep_weight_filter enable_eplb "
        "eplb_config expert_placement_strategy disable_custom_all_reduce enable_hc_sp enable_dbo "
        "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
        _SAMPLING: "enable_batch_sharded_sampling",
        _DERIVED: "is_moe_model",
        _MEMORY: "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids max_parallel_loading_workers "
        "enable_shm_tensor_arena",
        _SERVING: "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb enable_elastic_ep "
        "elastic_ep_max_dp_size disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env "
        "placement_group distributed_executor_backend sd_worker_cls master_addr master_port node_rank nnodes "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds _data_parallel_master_port_list "
        "_coord_store_port data_parallel_index _api_process_count _api_process_rank enable_fault_tolerance "
        "fault_tolerance_config",
    },
    "KernelConfig": {
        _ROUNDING: "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
        "enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend",
    },
    "DeviceConfig": {_MEMORY: "device"},
    "LoadConfig": {
        _MEMORY: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
    },
    "AttentionConfig": {
        _ROUNDING: "flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph "
        "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size "
        "tokenspeed_mla_min_split_kv indexer_tp_shard_min_rows",
        _MEMORY: "sparse_mla_prefill_workspace_factor",
    },
    "MambaConfig": {
        _ROUNDING: "ssu_algorithm",
    },
    "CompilationConfig": {
        _ROUNDING: "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder "
        "cudagraph_mm_encoder encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_max_frames_per_batch compile_sizes compile_ranges_endpoints inductor_compile_config "
        "cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs "
        "cudagraph_specialize_lora use_inductor_graph_partition max_cudagraph_capture_size "
        "dynamic_shapes_config fast_moe_cold_start cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
        "decoder_replay_trim_threshold",
        _MEMORY: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir",
        "results of compilation": "enabled_custom_ops disabled_custom_ops traced_files compilation_time "
        "encoder_compilation_time static_forward_context static_all_moe_layers",
    },
    "PassConfig": {
        _ROUNDING: "fuse_norm_quant fuse_act_quant fuse_attn_quant fuse_allreduce_rms "
        "enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla eliminate_noops fuse_act_padding "
        "fuse_mla_dual_rms_norm rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb",
    },
    "ECTransferConfig": {
        _SERVING: "engine_id ec_buffer_device ec_buffer_size ec_role ec_rank ec_parallel_size ec_ip ec_port "
        "ec_connector_extra_config mm_encoder_output_widths",
    },
    "EncoderCacheManagerConfig": {_MEMORY: "manager_config"},
    "LoRAConfig": {
        _MEMORY: "max_lora_rank max_loras fully_sharded_loras max_cpu_loras max_lora_cls_labels",
        _ROUNDING: "specialize_active_lora",
    },
    "SpeculativeConfig": {
        "its result is draft_model_config": "model quantization revision code_revision max_model_len "
        "target_model_config target_parallel_config",
        _RANKS: "draft_tensor_parallel_size tensor_parallel_size draft_parallel_config",
        _KEYS: "disable_eagle_block_drop",
        _ROUNDING: "enforce_eager disable_padded_drafter_batch use_local_argmax_reduction",
        "the choice and acceptance of drafts": "num_speculative_tokens prompt_lookup_max prompt_lookup_min "
        "num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method "
        "dspark_draft_topk draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold "
        "fly_entropy_top_k",
    },
    # The KV cache's spec of a layer.
    "KVCacheSpec": {
        "the worker's views end before padding": "block_stride_alignment page_size_padded",
    },
    "AttentionSpec": {
        _RANKS: "max_tp_shards",
    },
    "SlidingWindowSpec": {"how long blocks are kept": "extra_retained_tokens"},
    "MambaSpec": {
        "how many states are kept": "num_speculative_blocks num_prefill_checkpoint_blocks prefill_checkpoint_alignment",
    },
    "UniformTypeKVCacheSpecs": {"the scheduler sees its first spec alone (identity.py)": "kv_cache_specs"},
}
