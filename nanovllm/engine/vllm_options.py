"""Options of vLLM 0.32's EngineArgs that nanovllm does not have, by topic, each with its default there.

A name is taken at its default, and at any value that would change nothing here. Else it is refused in words: what
nanovllm does not do must not look as if it were done. nanovllm/tests/data/vllm_0_32 holds the names and defaults.
"""

from dataclasses import field, make_dataclass
from typing import Any

# None stands for an empty configuration too: of these {} and set() are taken as well.
TOPICS: dict[str, dict[str, Any]] = {
    "it runs on one device": {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1, "data_parallel_size": 1, "data_parallel_rank": None,
        "data_parallel_start_rank": None, "data_parallel_size_local": None, "data_parallel_address": None,
        "data_parallel_rpc_port": None, "data_parallel_hybrid_lb": False, "data_parallel_external_lb": False,
        "data_parallel_multi_port_external_lb": False, "data_parallel_backend": "mp", "master_addr": "127.0.0.1",
        "master_port": 29501, "nnodes": 1, "node_rank": 0, "distributed_executor_backend": None,
        "distributed_timeout_seconds": None, "cpu_distributed_timeout_seconds": None, "device_ids": None,
        "dcp_comm_backend": None, "dcp_q_replicate": None, "dcp_kv_cache_interleave_size": 1,
        "cp_kv_cache_interleave_size": None, "enable_hc_sp": False, "enable_batch_sharded_sampling": None,
        "enable_dbo": False, "ubatch_size": 0, "dbo_decode_token_threshold": 32, "dbo_prefill_token_threshold": 512,
        "dp_sync_interval": 16, "disable_nccl_for_dp_synchronization": None, "enable_nccl_comm_suspend": False,
        "numa_bind": False, "numa_bind_nodes": None, "numa_bind_cpus": None, "ray_workers_use_nsight": False,
        "worker_cls": "auto", "worker_extension_cls": "", "_api_process_count": 1, "_api_process_rank": 0,
        "fault_tolerance_config": None, "enable_fault_tolerance": False, "enable_shm_tensor_arena": False,
        "disable_custom_all_reduce": False,
    },
    "it has no experts": {
        "enable_expert_parallel": False, "enable_ep_weight_filter": False, "moe_backend": "auto",
        "all2all_backend": "allgather_reducescatter", "enable_elastic_ep": False, "elastic_ep_max_dp_size": None,
        "eplb_config": None, "enable_eplb": False, "expert_placement_strategy": "linear",
        "enable_return_routed_experts": False,
    },
    "its weights and caches are not quantized": {
        "quantization": None, "quantization_config": None, "allow_deprecated_quantization": False,
        "kv_cache_dtype": "auto", "kv_cache_dtype_skip_layers": None,
    },
    "its weights stay on the device": {
        "offload_backend": "auto", "cpu_offload_gb": 0, "cpu_offload_params": None, "offload_group_size": 0,
        "offload_num_in_group": 1, "offload_prefetch_step": 1, "offload_params": None, "enable_sleep_mode": False,
        "sleep_mode_offload_cudagraph": False, "sleep_preserve_parameter_names": None,
        "enable_cumem_allocator": False, "weight_transfer_config": None,
    },
    "it reads text only": {
        "language_model_only": False, "limit_mm_per_prompt": None, "enable_mm_embeds": False,
        "interleave_mm_strings": False, "media_io_kwargs": None, "mm_processor_kwargs": None,
        "mm_processor_cache_gb": 4, "mm_processor_cache_type": "lru", "mm_hasher_algorithm": "blake3",
        "mm_shm_cache_max_object_size_mb": 128, "mm_encoder_only": False, "mm_encoder_tp_mode": "weights",
        "mm_encoder_attn_backend": None, "mm_encoder_attn_dtype": None, "mm_encoder_fp8_scale_path": None,
        "mm_encoder_fp8_scale_save_path": None, "mm_encoder_fp8_scale_save_margin": 1.5, "io_processor_plugin": None,
        "renderer_num_workers": 1, "skip_mm_profiling": False, "video_pruning_rate": None,
        "video_pruning_method": "evs", "mm_tensor_ipc": "direct_rpc", "mm_processor_device": "auto",
        "mm_ipc_gpu_memory_gb": 0, "mm_device_do_normalize": True, "disable_chunked_mm_input": False,
        "enable_mm_processor_stats": False, "allowed_local_media_path": "", "allowed_media_domains": None,
        "enable_prompt_embeds": False, "ec_transfer_config": None, "ec_manager_config": None,
    },
    "it has no adapters": {
        "enable_lora": False, "max_loras": 1, "max_lora_rank": 16, "default_mm_loras": None,
        "fully_sharded_loras": False, "max_cpu_loras": None, "lora_dtype": "auto", "lora_target_modules": None,
        "enable_tower_connector_lora": False, "specialize_active_lora": False, "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False, "max_lora_cls_labels": None,
    },
    "it computes each token by itself": {
        "speculative_config": None, "spec_method": None, "spec_model": None, "spec_tokens": None,
        "diffusion_config": None,
    },
    "it generates text, by the models that its README lists, as their folders say": {
        "runner": "auto", "convert": "auto", "pooler_config": None, "hf_config_path": None, "config_format": "auto",
        "hf_overrides": None, "model_class_overrides": None, "model_impl": "auto", "model_weights": "",
        "model_loader_extra_config": None, "ignore_patterns": None, "tokenizer_mode": "auto",
        "disable_sliding_window": False, "mamba_config": None, "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto", "mamba_block_size": None, "mamba_cache_mode": "none",
        "enable_mamba_shared_prefix_checkpoint": False, "replayssm_buffer_len": 16, "use_replayssm": False,
        "mamba_backend": None, "mamba_ssu_algorithm": None, "enable_mamba_cache_stochastic_rounding": False,
        "mamba_cache_philox_rounds": 0, "engram_config": None, "gdn_prefill_backend": None,
        "kda_prefill_backend": None, "kda_decode_backend": None, "swa_bounded_replay": True,
        "kv_sharing_fast_prefill": False, "sparse_indexer_topk_backend": "auto", "tokens_only": False,
    },
    "first come, first served": {
        "scheduling_policy": "fcfs", "scheduler_cls": None, "max_num_scheduled_tokens": None,
        "max_num_active_seqs": None, "max_num_queued_reqs": None, "max_num_queued_tokens": None,
        "prefill_schedule_interval": 1, "stream_interval": 1,
    },
    "its sampler is its own": {
        "logits_processors": None, "logprobs_mode": "raw_logprobs", "use_fp64_gumbel": False,
        "return_sampling_mask": False, "structured_outputs_config": None, "watermark_config": None,
        "reasoning_parser": "", "reasoning_parser_plugin": None, "reasoning_config": None,
        "enable_trace_replay": False, "aux_output_config": None,
    },
    "its blocks stay on this machine": {
        "kv_transfer_config": None, "kv_events_config": None, "prefix_match_unit": None,
        "prefix_cache_retention_interval": 0,
    },
    "it exports no traces": {
        "otlp_traces_endpoint": None, "collect_detailed_traces": None, "per_request_spec_decode_metrics": "none",
        "kv_cache_metrics": False, "kv_cache_metrics_sample": 0.01, "custom_histogram_buckets": None,
        "cudagraph_metrics": False, "enable_layerwise_nvtx_tracing": False, "enable_mfu_metrics": False,
        "enable_logging_iteration_details": False, "profiler_config": None, "additional_config": None,
    },
}  # fmt: skip

# They say how something is done that nanovllm does in its own way: with any value the results are the same.
WITHOUT_EFFECT: dict[str, Any] = {
    "trust_remote_code": False, "code_revision": None, "disable_log_stats": False,
    "aggregate_engine_logging": False, "compilation_config": None, "optimization_level": None,
    "performance_mode": "balanced", "attention_config": None,
    "kernel_config": None, "linear_backend": "auto", "ir_op_priority": None,
    "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None, "enable_flashinfer_autotune": None,
    "disable_cascade_attn": None, "disable_hybrid_kv_cache_manager": None, "enable_chunked_prefill": None,
    "long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False, "async_scheduling": None,
    "scheduler_reserve_full_isl": True, "prefix_caching_hash_algo": "sha256", "max_logprobs": 20,
    "max_parallel_loading_workers": None, "safetensors_load_strategy": None, "safetensors_prefetch_num_threads": None,
    "safetensors_prefetch_block_size": None, "pt_load_map_location": "cpu", "use_tqdm_on_load": True,
    "jit_monitor_mode": "warn", "jit_monitor_verbose": False, "logging_config": None, "log_level": None,
    "log_config_file": None, "show_hidden_metrics_for_version": None, "shutdown_timeout": 0,
    "fail_on_environ_validation": False,
}  # fmt: skip

HARMLESS: dict[str, tuple[Any, ...]] = {  # values beside the default that ask for what nanovllm does anyway
    "runner": ("generate",),
    "convert": ("none",),
    "tokenizer_mode": ("hf", "slow"),
    "config_format": ("hf",),
    "distributed_executor_backend": ("mp", "uni"),
    "disable_custom_all_reduce": (True,),
    "language_model_only": (True,),
}

TOPIC_OF = {name: topic for topic, names in TOPICS.items() for name in names}
DEFAULTS = {name: default for names in TOPICS.values() for name, default in names.items()}
INSTEAD = {"stream_interval": "SamplingParams.stream_interval says it of each request"}  # what nanovllm has
EMPTY: tuple[Any, ...] = (None, {}, [], (), set(), "")


def is_refused(name: str, value: Any) -> bool:
    """Return whether `value` asks for something that only vLLM has.

    >>> is_refused("quantization", None), is_refused("quantization", "awq"), is_refused("hf_overrides", {})
    (False, True, False)
    """
    if name not in DEFAULTS:
        return False
    default = DEFAULTS[name]
    return not any(is_same(value, each) for each in (default, *HARMLESS.get(name, ()), *(EMPTY if not default else ())))


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values are the same: 1 and True are not, 0 and 0.0 are."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def refusal(name: str, value: Any) -> str:
    """Return why `value` is refused."""
    why = INSTEAD.get(name, TOPIC_OF[name])
    return f"vLLM has {name}, nanovllm has not: {why}; leave it at {DEFAULTS[name]!r} ({value!r} was given)"


OnlyInVllm: Any = make_dataclass(
    "OnlyInVllm",
    [(name, Any, field(default=default, kw_only=True)) for name, default in (DEFAULTS | WITHOUT_EFFECT).items()],
)


def refuse(**given: Any) -> None:
    """Raise ValueError for the first argument of a call that asks for something that only vLLM has.

    0, None and empty values ask for nothing.

    >>> refuse(lora_request=None, priority=[0, 0], mm_processor_kwargs={})
    """
    for name, value in given.items():
        each = value if isinstance(value, list | tuple) else [value]
        if any(one not in (*EMPTY, 0, False) for one in each):
            raise ValueError(f"vLLM has {name}, nanovllm has not: leave it at its default ({value!r} was given)")
