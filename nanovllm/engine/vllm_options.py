"""vLLM's options that have no meaning here: which ones scripts may still pass, and at which values."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True)
class CompatibilityOptions:
    """Options that scripts written for vLLM pass, and that change no result here."""

    # Any value: how vLLM computes, loads and logs.
    async_scheduling: bool | None = None
    attention_config: Any = None
    code_revision: str | None = None
    compilation_config: Any = None
    disable_cascade_attn: bool | None = None
    disable_custom_all_reduce: bool = False
    disable_log_requests: bool = False
    disable_log_stats: bool = False
    disable_sliding_window: bool = False
    distributed_executor_backend: Any = None
    enable_chunked_prefill: bool | None = None
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
    # These values alone: any other asks for something that nanovllm does not do.
    convert: str = field(default="auto", metadata={"accepted": ("auto", "none")})
    cpu_offload_gb: float = field(default=0, metadata={"accepted": (0,)})
    data_parallel_size: int = field(default=1, metadata={"accepted": (1,)})
    enable_lora: bool = field(default=False, metadata={"accepted": (False,)})
    enable_sleep_mode: bool = field(default=False, metadata={"accepted": (False,)})
    hf_overrides: Any = field(default=None, metadata={"accepted": (None,)})
    kv_cache_dtype: str = field(default="auto", metadata={"accepted": ("auto",)})
    kv_offloading_backend: str = field(default="native", metadata={"accepted": ("native",)})
    logits_processors: Any = field(default=None, metadata={"accepted": (None,)})
    pipeline_parallel_size: int = field(default=1, metadata={"accepted": (1,)})
    quantization: str | None = field(default=None, metadata={"accepted": (None,)})
    runner: str = field(default="auto", metadata={"accepted": ("auto", "generate")})
    scheduling_policy: str = field(default="fcfs", metadata={"accepted": ("fcfs",)})
    speculative_config: Any = field(default=None, metadata={"accepted": (None,)})
    task: str | None = field(default=None, metadata={"accepted": (None, "auto", "generate")})
    tensor_parallel_size: int = field(default=1, metadata={"accepted": (1,)})
    tokenizer_mode: str = field(default="auto", metadata={"accepted": ("auto", "hf", "slow")})

    def check_compatibility(self) -> None:
        """Raise ValueError for the first option with an unsupported value. None and empty values mean the default."""
        for option in fields(self):
            value, accepted = getattr(self, option.name), option.metadata.get("accepted")
            if accepted and value not in (*accepted, None, {}, []):
                expected = " or ".join(map(repr, accepted))
                raise ValueError(f"{option.name} must be {expected}, got {value!r}: nanovllm supports nothing else")
