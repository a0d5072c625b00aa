"""transformers: continuous batching, what its generate_batch() does, with a length of its own for each request."""

import time
from collections.abc import Callable
from typing import Any

Made = tuple[list[list[int]], list[list[float]]]  # of each request its tokens, and when each came
Serve = Callable[[list[list[int]], list[int]], Made]
NO_TOKEN = -1  # as the end of a text


def load(settings: Any) -> tuple[str, Serve]:
    """On a GPU the pool, the batch and the CUDA graphs are what transformers chooses by itself."""
    import torch
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, settings.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
    model = model.to(settings.device).eval()
    greedy = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=NO_TOKEN)
    config = None
    if torch.device(settings.device).type == "cpu":  # there it would take most of the machine's memory
        num_blocks = max(1, settings.kv_cache_bytes // (256 * bytes_per_token(model.config, dtype.itemsize)))
        config = transformers.ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=512)

    @torch.inference_mode()
    def serve(prompts: list[list[int]], lengths: list[int]) -> Made:
        """To warm up, which it does before its first request, is not counted."""
        hints = WorkloadHints(max(map(len, prompts)), max(lengths), len(prompts))
        options = {"generation_config": greedy, "continuous_batching_config": config, "workload_hints": hints}
        with model.continuous_batching_context_manager(**options, block=True, timeout=5) as manager:
            started = time.perf_counter()
            ids = [
                manager.add_request(prompt, max_new_tokens=length, record_timestamps=True, eos_token_id=NO_TOKEN)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            found = results(manager, len(ids))
        tokens = [list(found[id].generated_tokens) for id in ids]
        return tokens, [[when - started for when in found[id].timestamps] for id in ids]

    return transformers.__version__, serve


def results(manager: Any, count: int) -> dict[str, Any]:
    """Raises RuntimeError if it fails, or ends before all is there."""
    found: dict[str, Any] = {}
    while len(found) < count:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"continuous batching ended after {len(found)} of {count} requests")
        if result is not None and result.error is not None:
            raise RuntimeError(f"continuous batching: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = result
    return found


def bytes_per_token(config: Any, itemsize: int) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize
