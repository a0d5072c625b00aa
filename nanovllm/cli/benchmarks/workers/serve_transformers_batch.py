"""transformers: continuous batching, what its generate_batch() does, with a length of its own for each request."""

import os
import time
from collections.abc import Callable
from typing import Any

Made = tuple[list[list[int]], list[list[float]]]  # of each request its tokens, and when each came
Serve = Callable[[list[list[int]], list[int]], Made]
NO_TOKEN = -1  # as the end of a text
SECONDS_TO_STOP = 60
PAGE_SIZE = 256  # its own choice


def load(settings: Any) -> tuple[str, Serve]:
    """On a GPU the pool, the batch and the CUDA graphs are what transformers chooses by itself."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from serve_transformers import load_model  # type: ignore[import-not-found]  # of this folder
    from transformers.generation.continuous_batching.utils import WorkloadHints

    torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = load_model(transformers, settings)
    generation, config = configs(transformers, settings, model)
    attention = choose_attention(model, generation, config)

    def serve(prompts: list[list[int]], lengths: list[int]) -> Made:
        """To warm up, which it does before its first request, is not counted."""
        hints = WorkloadHints(max(map(len, prompts)), max(lengths), len(prompts))
        options = {"generation_config": generation, "continuous_batching_config": config, "workload_hints": hints}
        with model.continuous_batching_context_manager(**options, block=True, timeout=SECONDS_TO_STOP) as manager:
            started = time.perf_counter()
            ids = [
                manager.add_request(prompt, max_new_tokens=length, record_timestamps=True)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            found = results(manager, len(ids), settings.max_seconds)
        tokens = [found[id].generated_tokens if id in found else [] for id in ids]
        return tokens, [times_of(found[id], started) if id in found else [] for id in ids]

    return f"{transformers.__version__} ({attention})", serve


def configs(transformers: Any, settings: Any, model: Any) -> tuple[Any, Any]:
    """Of the generation, and of the batching."""
    generation = transformers.GenerationConfig(pad_token_id=0, eos_token_id=NO_TOKEN, do_sample=False)
    if settings.temperature > 0:
        generation.do_sample, generation.temperature = True, settings.temperature  # from all tokens: no top_k, no top_p
    config = transformers.ContinuousBatchingConfig()
    if model.device.type == "cpu":  # there it would take most of the machine's memory
        config.num_blocks = blocks_of(settings, model.config, model.dtype.itemsize)
        config.max_batch_tokens = 512
    return generation, config


def blocks_of(settings: Any, config: Any, itemsize: int) -> int:
    """How many the settings' bytes are."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize
    return max(1, settings.kv_cache_bytes // (PAGE_SIZE * token))


def choose_attention(model: Any, generation: Any, config: Any) -> str:
    """Flash attention where it can be had, which transformers itself takes then; the name of what it is."""
    try:
        model.init_continuous_batching(generation, config)
    except Exception:  # it is to come from a hub that is out of reach, say
        config.auto_switch_to_flash = False
        model.init_continuous_batching(generation, config)
    return model.config._attn_implementation


def results(manager: Any, count: int, max_seconds: float | None) -> dict[str, Any]:
    """When the time is over, what there is. Raises RuntimeError if it fails, or ends before all is there."""
    deadline = time.perf_counter() + (float("inf") if max_seconds is None else max_seconds)
    found: dict[str, Any] = {}
    is_late = False
    while len(found) < count:
        if not is_late and time.perf_counter() > deadline:
            is_late = True
            manager.stop(block=True, timeout=SECONDS_TO_STOP, hard_stop=True)  # the others fail, with what they have
        result = manager.get_result(timeout=1)
        if result is None and is_late:
            break  # requests that nobody had begun with
        if result is None and not manager.is_running():
            raise RuntimeError(f"continuous batching ended after {len(found)} of {count} requests")
        if result is not None and result.error is not None and not is_late:
            raise RuntimeError(f"continuous batching: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = result
    return found


def times_of(result: Any, started: float) -> list[float]:
    """Of each token. Those of a request that was evicted meanwhile are lost: they count as the first that is known."""
    times = [when - started for when in result.timestamps][: len(result.generated_tokens)]
    return [times[0]] * (len(result.generated_tokens) - len(times)) + times if times else []
