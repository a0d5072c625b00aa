"""transformers: generate() on one static batch, and the continuous batching behind generate_batch()."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

Output = tuple[list[list[int]], list[list[float]]]  # the tokens of each request, and when each one arrived
Serve = Callable[[list[list[int]], list[int]], Output]
NO_TOKEN = -1  # as EOS, so that no token ends a text
SECONDS_TO_STOP = 60
PAGE_SIZE = 256  # transformers' own choice


def load_model(settings: Any) -> tuple[Any, Any]:
    """Return the library and the model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    loader = transformers.AutoModelForCausalLM
    if settings.load_format != "dummy":
        return transformers, loader.from_pretrained(settings.model, dtype=dtype).to(device).eval()
    with device:  # create the random weights there
        config = transformers.AutoConfig.from_pretrained(settings.model)
        return transformers, loader.from_config(config, dtype=dtype).eval()


def load(settings: Any) -> tuple[str, Serve]:
    """Return generate() on one left-padded batch. On a GPU, it is compiled and uses the static cache."""
    transformers, model = load_model(settings)
    import torch

    device = model.device
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # no EOS, no penalties
    options = {"cache_implementation": "static"} if device.type == "cuda" else {}  # makes generate() compile

    @torch.inference_mode()
    def serve(prompts: list[list[int]], lengths: list[int]) -> Output:
        """Generate as many tokens in each row as the longest output needs, and cut each row to its own length."""
        width, times = max(map(len, prompts)), list[float]()
        started = time.perf_counter()

        def note_time(input_ids: Any, scores: Any, **_: Any) -> Any:
            if not times and device.type == "cuda":
                torch.cuda.synchronize(device)  # the prompts are computed: decoding begins
            times.append(time.perf_counter() - started)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=device)  # no row ends here

        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        padded = torch.tensor([left + prompt for left, prompt in zip(padding, prompts, strict=True)], device=device)
        mask = torch.tensor([left + [1] * (width - len(left)) for left in padding], device=device)
        criteria = transformers.StoppingCriteriaList([note_time])
        given = {"attention_mask": mask, "max_new_tokens": max(lengths), "stopping_criteria": criteria}
        made = model.generate(padded, **given, **options)  # [num_prompts, width + longest]
        rows = made[:, width:].tolist()  # waits for a GPU
        times[-1] = time.perf_counter() - started
        return [row[:n] for row, n in zip(rows, lengths, strict=True)], [times[:n] for n in lengths]

    return transformers.__version__, serve


# ---- generate_batch()


def load_batch(settings: Any) -> tuple[str, Serve]:
    """Return continuous batching. On a GPU, transformers sizes its own pool and batch, and chooses its CUDA graphs."""
    transformers, model = load_model(settings)
    from transformers.generation.continuous_batching.utils import WorkloadHints

    generation, config = configs(transformers, settings, model)
    attention = choose_attention(model, generation, config)

    def serve(prompts: list[list[int]], lengths: list[int]) -> Output:
        """Serve requests, each with its own length. Startup and warm-up are not timed."""
        hints = WorkloadHints(max(map(len, prompts)), max(lengths), len(prompts))
        options = {"generation_config": generation, "continuous_batching_config": config, "workload_hints": hints}
        with model.continuous_batching_context_manager(**options, block=True, timeout=SECONDS_TO_STOP) as manager:
            started = time.perf_counter()
            add = partial(manager.add_request, record_timestamps=True)
            ids = [add(prompt, max_new_tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
            done = results(manager, len(ids), settings.max_seconds)
        tokens = [done[id].generated_tokens if id in done else [] for id in ids]
        return tokens, [times_of(done[id], started) if id in done else [] for id in ids]

    return f"{transformers.__version__} ({attention})", serve


def configs(transformers: Any, settings: Any, model: Any) -> tuple[Any, Any]:
    """Return the configurations of generation and of batching."""
    generation = transformers.GenerationConfig(pad_token_id=0, eos_token_id=NO_TOKEN, do_sample=False)
    if settings.temperature > 0:
        generation.do_sample, generation.temperature = True, settings.temperature  # without top_k and top_p
    config = transformers.ContinuousBatchingConfig()
    if model.device.type == "cpu":  # transformers would take most of the machine's memory
        shape = model.config
        head_dim = shape.to_dict().get("head_dim") or shape.hidden_size // shape.num_attention_heads
        token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * model.dtype.itemsize
        config.num_blocks = max(1, settings.kv_cache_bytes // (PAGE_SIZE * token))
        config.max_batch_tokens = 512
    return generation, config


def choose_attention(model: Any, generation: Any, config: Any) -> str:
    """Let transformers use flash attention if it can be loaded. Return the name of the attention that it uses."""
    try:
        model.init_continuous_batching(generation, config)
    except Exception:  # flash attention may have to be downloaded, without a network
        config.auto_switch_to_flash = False
        model.init_continuous_batching(generation, config)
    return str(model.config._attn_implementation)


def results(manager: Any, count: int, max_seconds: float | None) -> dict[str, Any]:
    """Return the results by request, incomplete ones if time runs out. Raise RuntimeError if batching fails."""
    deadline = time.perf_counter() + (float("inf") if max_seconds is None else max_seconds)
    done: dict[str, Any] = {}
    is_late = False
    while len(done) < count:
        if not is_late and time.perf_counter() > deadline:
            is_late = True
            manager.stop(block=True, timeout=SECONDS_TO_STOP, hard_stop=True)  # running requests fail with their tokens
        result = manager.get_result(timeout=1)
        if result is None and is_late:
            break  # the remaining requests never started
        if result is None and not manager.is_running():
            raise RuntimeError(f"continuous batching ended after {len(done)} of {count} requests")
        if result is not None and result.error is not None and not is_late:
            raise RuntimeError(f"continuous batching: {result.error}")
        if result is not None and result.is_finished():
            done[result.request_id] = result
    return done


def times_of(result: Any, started: float) -> list[float]:
    """Return the time of each token. An eviction loses the times before it; the first known one replaces them."""
    times = [when - started for when in result.timestamps][: len(result.generated_tokens)]
    return [times[0]] * (len(result.generated_tokens) - len(times)) + times if times else []
