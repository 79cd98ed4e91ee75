# SPDX-License-Identifier: Apache-2.0
"""List SGLang's settings that do not change the bytes of a page, with the reason. All other settings count if they
differ from their default.

``tests/engines/sglang/test_facts.py`` reads SGLang's classes, and fails for a name that nobody has judged or that no
longer exists. If two kernels compute the same in a different order, bytes differ by rounding, as they do from batch to
batch. Such a choice counts only if it may also choose a precision or a layout.
"""

from __future__ import annotations

from typing import Final

from kvoffload.engines.facts import Table

FIELDS: Final[Table] = {
    "ServerArgs": {
        "It counts by a rule of its own: model_facts": "context_length weight_version",
        "SGLang's storage configuration names ranks, and counts": """
            tp_size pp_size dcp_size dp_size attn_dp_size attn_cp_size""",
        "It says how clients reach the server, and what they may ask": """
            enable_response_store tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
            detokenizer_worker_num skip_tokenizer_init host port fastapi_root_path enable_http_worker_reuseport
            smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args
            skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
            http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
            enable_ssl_refresh api_key admin_api_key served_model_name file_storage_path enable_cache_report
            return_input_ids return_output_ids stream_interval batch_notify_size
            stream_response_default_include_usage incremental_streaming_output enable_dynamic_batch_tokenizer
            dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
            disable_tokenizer_batch_decode asr_max_buffer_seconds asr_max_concurrent_sessions smg_http_sidecar_port
            allow_auto_truncate""",
        "It makes tokens of a request, and pages have the tokens in their keys": """
            chat_template trust_request_chat_template hf_chat_template_name completion_template reasoning_parser
            default_chat_template_kwargs strip_thinking_cache enable_strict_thinking tool_call_parser tool_server""",
        "It chooses tokens after the last layer, and pages have the tokens in their keys": """
            random_seed mlx_enable_sampling sampling_backend grammar_backend sampling_defaults
            preferred_sampling_params enable_fp32_lm_head enable_dp_lm_head enable_tp_lm_head_all_to_all
            enable_custom_logit_processor enable_watermark watermark_config watermark_key watermark_key_b
            watermark_context_window watermark_mixing_probability watermark_max_probability
            watermark_default_enabled watermark_enforce_all sampling_mask_max_tokens disable_outlines_disk_cache
            constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
            constrained_json_max_whitespace_cnt speculative_num_draft_tokens speculative_domino_candidate_pool_size
            speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
            speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
            speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification
            speculative_adaptive speculative_adaptive_config speculative_ngram_min_bfs_breadth
            speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
            speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
            speculative_ngram_external_corpus_max_tokens""",
        "It reports what is computed": """
            enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states
            aux_hidden_state_capture return_aux_hidden_state_layer_ids enable_return_routed_experts
            enable_return_indexer_topk log_level log_level_http log_requests log_requests_level log_requests_format
            log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
            enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
            tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
            bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
            generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
            enable_request_time_stats_logging kv_events_config load_publish_endpoint enable_forward_pass_metrics
            forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules
            otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir stat_loggers
            kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers msprobe_dump_config
            expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
            expert_balancedness_report_mode spec_trace_dir enable_layerwise_nvtx_marker enable_profile_cuda_graph
            debug_cuda_graph enable_torch_compile_debug_mode""",
        "It places processes and memory, or watches over them": """
            base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray
            custom_sigquit_handler numa_node gc_threshold nccl_port dist_timeout dist_init_addr gated_launch_port
            nnodes node_rank enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
            cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode
            ple_offload_embedding ple_offload_backend kt_cpuinfer kt_threadpool_count mem_fraction_static
            max_total_tokens max_mamba_cache_size mamba_full_memory_ratio swa_full_tokens_ratio
            _swa_full_tokens_ratio_explicitly_set int8_mamba_ckpt_size dwdp_size enable_p2p_check
            ep_join_rank_offset elastic_ep_initial_size max_ep_size ep_join_mode elastic_ep_scale_timeout""",
        "It sends KV that was computed elsewhere, or the load between servers": """
            decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
            disaggregation_decode_allocation_policy disaggregation_transfer_backend
            disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device
            disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
            disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
            disaggregation_decode_polling_interval enable_pd_role_switch optimistic_prefill_attempts
            encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
            enable_adaptive_dispatch_to_encoder disaggregation_decode_host_receive_threshold load_balance_method""",
        "It decides when tokens are computed, and with which others": """
            enable_pdmux pdmux_config_path sm_group_num max_running_requests max_queued_requests
            chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking
            max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling
            disable_priority_preemption default_priority_value abort_on_priority_when_disabled
            schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy
            schedule_conservativeness disable_chunked_prefix_cache disable_overlap_schedule
            num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk enable_prefill_delayer
            prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
            prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
            prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay
            pp_max_micro_batch_size pp_async_batch_depth enable_two_batch_overlap enable_single_batch_overlap
            tbo_token_distribution_threshold""",
        "The same kernels run, from a captured graph or not": """
            cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
            cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
            cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
            disable_cuda_graph_padding enable_cudagraph_gc torch_compile_max_bs disable_flashinfer_autotune
            flashinfer_autotune_skip_ops""",
        "Ranks add up the same numbers, over another way or in another order": """
            enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
            pre_warm_nccl enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
            flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
            disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
            enable_fused_moe_sum_all_reduce deepep_config mooncake_ib_device moe_dp_size dcp_comm_backend
            dcp_replicate_q_proj enable_dp_attention enable_dp_attention_local_control_broadcast
            enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size
            enable_dense_mlp_attn_tp enable_layernorm_sp enable_megamoe_for_layernorm_sp disable_attn_tp_gather
            ep_size moe_dense_tp_size""",
        "It decides which rank has a copy of an expert": """
            ep_num_redundant_experts init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
            eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold enable_elastic_expert_backup""",
        "It decides which pages are kept, and when they are written and read": """
            radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config
            disable_radix_cache enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size
            hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_storage_backend
            hicache_storage_prefetch_policy hicache_storage_backend_extra_config
            hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
            mamba_max_states_per_path""",
        "It bounds or fetches media, whose hashes are in the keys": """
            enable_broadcast_mm_inputs_process mm_processor_worker_num mm_io_worker_num allowed_media_domains
            media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request mm_feature_transport""",
        "Adapters are told apart by their files, whatever room they have": """
            enable_lora enable_lora_overlap_loading max_lora_rank max_loaded_loras max_loras_per_batch
            lora_eviction_policy max_lora_chunk_size lora_drain_wait_threshold""",
        "The weights are the same, however they are read": """
            modelopt_checkpoint_save_path modelopt_export_path startup_weight_load_mode weight_loader_disable_mmap
            weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
            weight_loader_drop_cache_after_load remote_instance_weight_loader_send_weights_group_ports
            remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine
            engine_info_bootstrap_port download_dir model_checksum delete_ckpt_after_loading weight_cache_socket
            weight_cache_timeout _speculative_draft_quantization_explicitly_set""",
    },
}
"""``ServerArgs`` as SGLang has resolved them."""

WEIGHTS_FROM_ELSEWHERE: Final = (
    "model_loader_extra_config",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "remote_instance_weight_loader_seed_instance_ip",
    "modelexpress_config",
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "checkpoint_engine_wait_weights_before_ready",
    "weight_cache_mode",
    "elastic_ep_backend",
    "kt_weight_path",
    "ple_offload_dir",
    "uno_lora_path",
    "speculative_token_map",
)
"""Fields of ``ServerArgs`` that may load weights from other sources than the model's files, unless they have their
default value."""

POOL_IS_HARMLESS: Final = {
    name: reason
    for reason, names in {
        "How many pages there are, and which are free": """
            size page_num device_capacity_tokens free_slots release_slots num_release_slots slot_used mem_state
            indexer_page_num _destroyed fd""",
        "Where pages are, and by which kernel SGLang copies them": """
            device pin_memory pool_label can_use_jit can_use_write_back_jit _conv_can_use_jit _temporal_can_use_jit
            staging_page_capacity staging_token_capacity _strided_device_row_bytes _device_to_host_layer""",
        "What was logged once": "_draft_kv_skip_warned _draft_indexer_skip_warned",
    }.items()
    for name in names.split()
}
"""Attributes of SGLang's host pools. All others that are numbers, texts, types, or lists of these, count."""

ENVIRONMENT_IS_HARMLESS: Final = {
    name: reason
    for reason, names in {
        "It says where a process is": """
            SGLANG_RUN_ID SGLANG_DP_RANK SGLANG_IS_FIRST_RANK_ON_NODE SGLANG_BLOCK_NONZERO_RANK_CHILDREN
            SGLANG_HOST_IP SGLANG_PORT SGLANG_GRPC_PORT SGLANG_TCP_STORE_PORT SGLANG_BACKUP_PORT_BASE""",
        "It reports what is computed, or how long that takes": """
            SGLANG_LOGGING_CONFIG_PATH SGLANG_LOG_DECODE_GRAPH_KEY SGLANG_LOG_EXPERT_LOCATION_METADATA
            SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_GC SGLANG_LOG_LAZY_COMPACTION_STATS
            SGLANG_LOG_LAZY_COMPACTION_STATS_INTERVAL_SEC SGLANG_LOG_MS SGLANG_LOG_PICKLE_IPC_OBJECTS
            SGLANG_LOG_REQUEST_EXCEEDED_MS SGLANG_LOG_REQUEST_HEADERS SGLANG_LOG_SCHEDULER_STATUS_INTERVAL
            SGLANG_LOG_SCHEDULER_STATUS_TARGET SGLANG_JIT_LOG_LEVEL SGLANG_JIT_LOG_RESOURCE_USAGE
            SGLANG_EXPERT_LOCATION_UPDATER_LOG_INPUT SGLANG_EXPERT_LOCATION_UPDATER_LOG_METRICS
            SGLANG_PREFILL_DELAYER_DEBUG_LOG SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG SGLANG_ENABLE_METRICS_DEVICE_TIMER
            SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_TRACE_LEVEL SGLANG_TRACE_ASYNC
            SGLANG_TRACE_ASYNC_FLUSH_THRESHOLD SGLANG_PROFILE_V2 SGLANG_PROFILE_WITH_STACK
            SGLANG_PROFILE_RECORD_SHAPES SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS SGLANG_MEM_PROFILE_MAX_ENTRIES
            SGLANG_TORCH_PROFILER_DIR SGLANG_CUDA_COREDUMP_DIR SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR
            SGLANG_EPLB_HEATMAP_COLLECTION_INTERVAL SGLANG_RINGBUFFER_WARNING_INTERVAL SGLANG_DETECT_SLOW_RANK""",
        "It says how long a process waits for another one": """
            SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL
            SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL
            SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT
            SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT
            SGLANG_ENCODER_GRPC_TIMEOUT_SECS SGLANG_ENCODER_HTTP_TIMEOUT SGLANG_ENCODER_RECV_TIMEOUT
            SGLANG_ENCODER_REQ_TIMEOUT SGLANG_ENCODER_SEND_TIMEOUT SGLANG_FAILED_SESSION_IDLE_TIMEOUT_S
            SGLANG_FAILED_SESSION_PROBE_INTERVAL_S SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S
            SGLANG_GRAMMAR_POLL_INTERVAL SGLANG_HEALTH_CHECK_TIMEOUT SGLANG_MORI_TRANSFER_TIMEOUT_MS
            SGLANG_REQUEST_STATE_WAIT_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT SGLANG_REQ_WAITING_TIMEOUT
            SGLANG_TIMEOUT_KEEP_ALIVE SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT SGLANG_WAIT_PORT_TIMEOUT
            SGLANG_WAIT_WEIGHTS_READY_TIMEOUT SGLANG_WARMUP_TIMEOUT""",
        "It says how often answers are sent, or free memory is given back": """
            SGLANG_FORCE_STREAM_INTERVAL SGLANG_EMPTY_CACHE_INTERVAL
            SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC""",
        "It says how host memory for pages is had": """
            SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB""",
        "Compiled kernels lie there, or pages that another storage than kvoffload has": """
            SGLANG_JIT_CACHE_DIR SGLANG_DG_CACHE_DIR SGLANG_CUTE_AOT_CACHE_DIR
            SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR""",
    }.items()
    for name in names.split()
}
"""Variables ``SGLANG_...``. All others that are set count."""
