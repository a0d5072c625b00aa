"""ProgressBar: samples that have ended, and tokens per second, as vLLM's generate() shows them."""

import time
from collections.abc import Callable
from typing import Any, Self

from tqdm import tqdm

from .outputs import RequestOutput


class ProgressBar:
    """A bar that moves when a request ends.

    It is no Observer: a bar may be a caller's own and raise, which is harmless only between two steps.
    """

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

    def add(self, output: RequestOutput) -> None:
        """Count a request that has ended: all of its samples."""
        num_samples = len(output.outputs)
        self._num_prompt_tokens += num_samples * len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
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
