"""vLLM's options that have no effect here. Scripts and commands may still pass them, with certain values."""

from dataclasses import dataclass, field, fields
from typing import Any


def accept_only(*accepted: Any, flags: tuple[str, ...] = ()) -> Any:
    """Return a field that accepts only the given values, because others are unsupported. The first is the default.

    `flags` are vLLM's short forms for a command line.
    """
    return field(default=accepted[0], metadata={"accepted": accepted, "flags": flags})


@dataclass(kw_only=True)
class CompatibilityOptions:
    """Options that scripts written for vLLM pass, and that change no result here."""

    # Any value is accepted: these only change how vLLM computes, loads and logs.
    attention_config: Any = None
    code_revision: str | None = None
    compilation_config: Any = None
    disable_cascade_attn: bool | None = None
    disable_custom_all_reduce: bool = False
    disable_log_requests: bool = False
    disable_log_stats: bool = False
    disable_sliding_window: bool = False
    enable_chunked_prefill: bool | None = None
    enable_expert_parallel: bool = False  # the models here have no experts
    guided_decoding_backend: str | None = None
    limit_mm_per_prompt: Any = None
    max_logprobs: int = 20
    max_seq_len_to_capture: int | None = None
    mm_processor_kwargs: Any = None
    num_scheduler_steps: int | None = None
    prefix_caching_hash_algo: str = "sha256"
    structured_outputs_config: Any = None
    swap_space: float | None = None
    trust_remote_code: bool = False
    use_tqdm_on_load: bool = True
    use_v2_block_manager: bool | None = None
    # Only these values are accepted: nanovllm does not support others.
    convert: str = accept_only("auto", "none", "embed")
    cpu_offload_gb: float = accept_only(0)
    data_parallel_size: int = accept_only(1, flags=("-dp",))
    enable_lora: bool = accept_only(False)
    enable_sleep_mode: bool = accept_only(False)
    kv_offloading_backend: str = accept_only("native")
    logits_processors: object = accept_only(None)
    pipeline_parallel_size: int = accept_only(1, flags=("-pp",))
    runner: str = accept_only("auto", "generate", "pooling")
    scheduling_policy: str = accept_only("fcfs")
    task: str | None = accept_only(None, "auto", "generate", "embed")
    tokenizer_mode: str = accept_only("auto", "hf", "slow")


@dataclass(kw_only=True)
class ServeCompatibilityOptions:
    """More flags of `vllm serve` that change no response here."""

    # Any value is accepted.
    allowed_local_media_path: str | None = None
    cudagraph_capture_sizes: str | None = None
    disable_fastapi_docs: bool = False
    disable_frontend_multiprocessing: bool = False
    disable_hybrid_kv_cache_manager: bool | None = None
    enable_auto_tool_choice: bool = False  # always on
    enable_flashinfer_autotune: bool | None = None
    enable_log_requests: bool = False
    enable_prompt_tokens_details: bool = False  # responses always have them
    enable_request_id_headers: bool = False  # responses always have them
    enable_server_load_tracking: bool = False
    h11_max_header_count: int | None = None
    h11_max_incomplete_event_size: int | None = None
    language_model_only: bool = False
    max_cudagraph_capture_size: int | None = None
    max_log_len: int | None = None
    max_parallel_loading_workers: int | None = None
    mm_processor_cache_gb: float | None = None
    moe_backend: str | None = None
    optimization_level: str | None = field(default=None, metadata={"flags": ("-O",)})
    performance_mode: str | None = None
    safetensors_load_strategy: str | None = None
    skip_mm_profiling: bool = False
    # Only these values are accepted.
    allow_credentials: bool = accept_only(False)
    allowed_headers: str = accept_only('["*"]')
    allowed_methods: str = accept_only('["*"]')
    api_server_count: int = accept_only(1)
    chat_template_content_format: str = accept_only("auto")
    config_format: str = accept_only("auto", "hf")
    enable_force_include_usage: bool = accept_only(False)
    logprobs_mode: str = accept_only("raw_logprobs")
    model_impl: str = accept_only("auto")
    nnodes: int = accept_only(1)
    response_role: str = accept_only("assistant")
    return_tokens_as_token_ids: bool = accept_only(False)
    stream_interval: int = accept_only(1)
    trust_request_chat_template: bool = accept_only(False)

    def __post_init__(self) -> None:
        """Raise ValueError for the first option with an unsupported value."""
        check_compatibility(self)


def check_compatibility(options: CompatibilityOptions | ServeCompatibilityOptions) -> None:
    """Raise ValueError for the first option with an unsupported value. None and empty values mean the default."""
    for option in fields(options):
        value, accepted = getattr(options, option.name), option.metadata.get("accepted")
        if accepted and value not in (*accepted, None, {}, []):
            expected = " or ".join(map(repr, accepted))
            raise ValueError(f"{option.name} must be {expected}, got {value!r}: nanovllm supports nothing else")
