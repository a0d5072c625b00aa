"""This engine in a process of its own, with its weights in another format."""

from collections.abc import Callable
from typing import Any

Output = tuple[list[list[int]], list[list[float]]]  # the tokens of each request, and when each one arrived
Serve = Callable[[list[list[int]], list[int]], Output]


def load(settings: Any) -> tuple[str, Serve]:
    """Return the package's version, and a function that serves requests."""
    import torch

    import nanovllm
    from nanovllm.bench.engine import load_llm
    from nanovllm.bench.engine import serve as serve_tasks
    from nanovllm.bench.workload import Task

    torch.set_num_threads(settings.threads)
    names = ("model", "dtype", "device", "max_model_len", "max_num_seqs", "load_format", "quantization")
    options = {name: getattr(settings, name) for name in names}
    slots = settings.max_num_seqs * settings.max_model_len
    llm = load_llm(options | {"kv_cache_tokens": slots, "skip_tokenizer_init": True})

    def serve(prompts: list[list[int]], lengths: list[int]) -> Output:
        run = serve_tasks(llm, [Task(*each) for each in zip(prompts, lengths, strict=True)], detokenize=False)
        return run.tokens, run.times

    return nanovllm.__version__, serve
