"""Which forms of kernels an engine's requests launch that were not launched when it started, without a GPU.

    python -m nanovllm.tests.gpu.launch_forms checkpoint bfloat16 8

Each new form means that a request waits for the compiler. A line for each: the kernel, and its form. The kernels are
noted in place of a run; their twins compute, so that the requests are served.
"""

import sys
from itertools import count
from typing import Any

from triton.runtime.jit import JITFunction

from ...backends.gpu.backend import TritonBackend
from ...backends.gpu.ops import PLAIN, Ops, triton_ops
from ...engine.sampling_params import SamplingParams
from ...llm import LLM
from ..helpers import model_runner
from .compile_kernels import form_of

PROMPTS: list[Any] = [[5, 6, 7] * 4, [5], [8, 9], [4] * 20, [7] * 3]
WAYS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {7: 5.0}},
    {"temperature": 0.8, "top_k": 5, "seed": 1},
    {"logprobs": 2, "n": 3},
]


class Noted:
    def __init__(self) -> None:
        self.forms: dict[str, None] = {}  # in the order of their first launch

    def ops(self) -> Ops:
        return Ops(*(self._both(launch, compute) for launch, compute in zip(triton_ops(), PLAIN, strict=True)))

    def _both(self, launch: Any, compute: Any) -> Any:
        def run(*arguments: Any) -> None:
            launch(*arguments)
            compute(*arguments)

        return run

    def note(self, kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        self.forms[f"{kernel.__name__} {form_of(kernel, arguments, named)}"] = None


def again(step: Any, shares_memory: bool = True) -> Any:
    """In place of a graph."""
    step()
    return step


SECONDS = count(0, -1)


def ever_less(step: Any) -> float:
    """In place of a timer: what is timed last was the fastest, which is the kernel."""
    step()
    return float(next(SECONDS))


def main(checkpoint: str, dtype: str, max_rows: str) -> None:
    options: dict[str, Any] = {
        "kv_cache_tokens": 512,
        "block_size": 4,
        "max_num_batched_tokens": 8,
        "max_num_seqs": int(max_rows),
    }
    noted = Noted()
    JITFunction.run = lambda kernel, *arguments, **named: noted.note(kernel, *arguments, **named)
    for has_graphs in (True, False):
        llm = LLM(checkpoint, dtype=dtype, attention_backend="torch", **options)
        engine, runner = llm.llm_engine, model_runner(llm.llm_engine)
        parts = runner.model, engine.kv_cache, engine.max_model_len
        capture = again if has_graphs else None
        noted.forms.clear()
        runner.backend = TritonBackend(*parts, noted.ops(), capture, int(max_rows), ever_less, progress=False)
        at_start = dict(noted.forms)
        for way in WAYS:
            defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
            llm.generate(PROMPTS, SamplingParams(**defaults | way))
        assert at_start and runner.num_steps > 0
        for form in noted.forms:
            if form not in at_start:
                print(form)


if __name__ == "__main__":
    main(*sys.argv[1:])
