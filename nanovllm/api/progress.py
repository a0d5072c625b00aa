"""The progress bar of generate(): requests that have ended, and tokens a second, as in vLLM."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from .outputs import RequestOutput

NoteEnd = Callable[[RequestOutput], None]


@contextmanager
def progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[NoteEnd]:
    """Yield a function that is told of each output that has ended. `total`: samples of all requests.

    True shows the bar in a terminal only, so that no file is filled with it. A callable makes the bar: it is called
    as tqdm is.
    """
    if not use_tqdm:
        yield lambda output: None
        return
    start, num_tokens = time.perf_counter(), [0, 0]  # of prompts, and generated
    options: dict[str, Any] = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
    options["postfix"] = speed(num_tokens, 1.0)
    bar = use_tqdm(**options) if callable(use_tqdm) else tqdm(**options, disable=None)

    def note_end(output: RequestOutput) -> None:
        num_tokens[0] += len(output.prompt_token_ids) * len(output.outputs)
        num_tokens[1] += sum(len(completion.token_ids) for completion in output.outputs)
        bar.postfix = speed(num_tokens, time.perf_counter() - start)
        bar.update(len(output.outputs))

    try:
        yield note_end
    finally:
        bar.close()


def speed(num_tokens: list[int], seconds: float) -> str:
    prompt, generated = (count / seconds for count in num_tokens)
    return f"est. speed input: {prompt:.2f} toks/s, output: {generated:.2f} toks/s"
