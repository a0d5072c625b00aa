"""Profiling: the parts of a step as named ranges in a profiler's timeline.

    schedule    choose the sequences of the step, and copy shared blocks
    launch      run the model
      sample    choose a token for each sequence; on a GPU, this waits for the model
    update      append the tokens, and free the blocks of finished sequences

Ranges exist only while a profile is recorded. A process records one profile at a time, because PyTorch and CUDA cannot
record two.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

OpenRange = Callable[[str], AbstractContextManager[Any]]
NO_RANGE = nullcontext()

_recording: ExitStack | None = None  # the profile that is being recorded
_open_range: OpenRange | None = None  # opens a named range in that profile


def step_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that appears as the range `name` in the profile, or does nothing without a profile."""
    return NO_RANGE if _open_range is None else _open_range(name)


def start_profile(config: dict[str, Any], worker_name: str | None = None) -> None:
    """Start recording a profile. `config` has the entries of vLLM's profiler_config.

    {"profiler": "torch", "torch_profiler_dir": FOLDER}    stop_profile() writes a trace that ui.perfetto.dev opens
    {"profiler": "cuda"}                                   nsys and ncu record until stop_profile()

    The trace's file name starts with `worker_name`. Raise ValueError if a profile is already being recorded, or if the
    profiler is "cuda" and there is no GPU.
    """
    global _recording, _open_range
    if _recording is not None:
        raise ValueError("a profile is being recorded: call stop_profile() first")
    is_cuda = config["profiler"] == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise ValueError("profiler 'cuda' needs a GPU: use 'torch'")
    with ExitStack() as stack:
        if is_cuda:
            stack.enter_context(torch.cuda.profiler.profile())
        else:
            write_trace = torch.profiler.tensorboard_trace_handler(config["torch_profiler_dir"], worker_name)
            stack.enter_context(torch.profiler.profile(on_trace_ready=write_trace))
        _recording = stack.pop_all()
        _open_range = torch.cuda.nvtx.range if is_cuda else torch.profiler.record_function


def stop_profile() -> None:
    """Stop recording, and write the trace of profiler "torch". Raise ValueError if no profile is being recorded."""
    global _recording, _open_range
    if _recording is None:
        raise ValueError("no profile is being recorded: call start_profile() first")
    recording, _recording, _open_range = _recording, None, None
    recording.close()
