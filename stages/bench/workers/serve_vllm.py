"""vLLM: its engine in this process, stepped in the same way as LLM.generate does."""

import os
import time
from collections.abc import Callable
from typing import Any

Output = tuple[list[list[int]], list[list[float]]]  # the tokens of each request, and when each one arrived
Serve = Callable[[list[list[int]], list[int]], Output]
ROOM = 2  # times the bytes that the sequences need, because not all blocks are full


def load(settings: Any) -> tuple[str, Serve]:
    """Return vLLM's version, and a function that serves requests."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's steps are calls in this process
        "VLLM_CPU_KVCACHE_SPACE": str(1 + ROOM * settings.kv_cache_bytes // 2**30),  # in GiB
    }
    import vllm
    from vllm.sampling_params import RequestOutputKind

    given = {name: getattr(settings, name) for name in ("model", "dtype", "max_model_len", "max_num_seqs")}
    no_cache = {"enable_prefix_caching": False}  # a round must not reuse what an earlier one computed
    llm = vllm.LLM(**given, **no_cache, skip_tokenizer_init=True)
    options = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}

    def serve(prompts: list[list[int]], lengths: list[int]) -> Output:
        engine, tokens, times = llm.llm_engine, [list[int]() for _ in prompts], [list[float]() for _ in prompts]
        started = time.perf_counter()
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            params = vllm.SamplingParams(temperature=0.0, max_tokens=length, **options)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                number, new = int(output.request_id.split("-")[0]), output.outputs[0].token_ids
                tokens[number] += new
                times[number] += [now] * len(new)
        return tokens, times

    return vllm.__version__, serve
