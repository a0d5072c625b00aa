"""transformers: generate() on one static batch, padded on the left; on a GPU with its static cache, compiled."""

import time
from collections.abc import Callable
from typing import Any

Made = tuple[list[list[int]], list[list[float]]]  # of each request its tokens, and when each came
Serve = Callable[[list[list[int]], list[int]], Made]


def load(settings: Any) -> tuple[str, Serve]:
    import torch
    import transformers

    torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = load_model(transformers, settings)
    device = model.device
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # no end of a text
    options = {"cache_implementation": "static"} if device.type == "cuda" else {}  # which it compiles for

    @torch.inference_mode()
    def serve(prompts: list[list[int]], lengths: list[int]) -> Made:
        """Each row gets as many tokens as the longest output has; only the tokens that were asked for count."""
        width, times = max(map(len, prompts)), list[float]()
        started = time.perf_counter()

        def note_time(input_ids: Any, scores: Any, **_: Any) -> Any:
            if not times and device.type == "cuda":
                torch.cuda.synchronize(device)  # the prompts are computed: what comes now is decoding
            times.append(time.perf_counter() - started)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=device)  # no row ends here

        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]).to(device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(device)
        told = {"attention_mask": mask, "stopping_criteria": transformers.StoppingCriteriaList([note_time])}
        made = model.generate(padded, max_new_tokens=max(lengths), **told, **options)  # [num_prompts, width + longest]
        rows = made[:, width:].tolist()  # waits for a GPU
        times[-1] = time.perf_counter() - started
        return [row[:n] for row, n in zip(rows, lengths, strict=True)], [times[:n] for n in lengths]

    return transformers.__version__, serve


def load_model(transformers: Any, settings: Any) -> Any:
    import torch

    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    loader = transformers.AutoModelForCausalLM
    if settings.load_format != "dummy":
        return loader.from_pretrained(settings.model, dtype=dtype).to(device).eval()
    with device:  # random weights are made there
        return loader.from_config(transformers.AutoConfig.from_pretrained(settings.model), dtype=dtype).eval()
