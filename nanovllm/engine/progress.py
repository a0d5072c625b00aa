"""ProgressBar: samples that have ended, and tokens per second, as vLLM's generate() shows them."""

import time
from collections.abc import Callable
from typing import Any, Self

from tqdm import tqdm

from .outputs import RequestOutput
from .sequence import Sequence


class ProgressBar:
    """An Observer of the engine that moves a bar by one for each sample that ends."""

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        """Show a bar of `total` samples.

        True shows it in a terminal only, so that no file is filled with it; False shows none. A callable makes the bar:
        it is called like tqdm.
        """
        self._start = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0
        options: dict[str, Any] = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
        options["postfix"] = self._speed(1.0)
        self._bar: Any = None
        if use_tqdm:
            self._bar = use_tqdm(**options) if callable(use_tqdm) else tqdm(**options, disable=None)

    def on_finish(self, seq: Sequence) -> None:
        """Count a sample that has ended."""
        self._add(1, seq.num_prompt_tokens, seq.num_output_tokens)

    def on_refuse(self, request_id: str, error: str) -> None:
        """Count a request that the engine did not take."""
        self._add(1, 0, 0)

    def add(self, output: RequestOutput) -> None:
        """Count a request that a beam search has served."""
        num_samples, num_tokens = len(output.outputs), sum(len(sample.token_ids) for sample in output.outputs)
        self._add(num_samples, num_samples * len(output.prompt_token_ids), num_tokens)

    def _add(self, num_samples: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens
        if self._bar is not None:
            self._bar.postfix = self._speed(time.perf_counter() - self._start)
            self._bar.update(num_samples)

    def _speed(self, seconds: float) -> str:
        prompt, output = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        return f"est. speed input: {prompt:.2f} toks/s, output: {output:.2f} toks/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
