"""The engine under test: functions to load it, and to serve one round of requests and time each token."""

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..llm import LLM
from ..requests.sampling_params import RequestOutputKind, SamplingParams
from .harness import percentiles
from .workload import Task

SECONDS_TO_COMPILE = 120  # the longest wait for kernels
IDS = map(str, itertools.count())  # of requests, never used twice


def load_llm(options: dict[str, Any]) -> LLM:
    """Return an LLM, after waiting for its kernels, if any, for at most SECONDS_TO_COMPILE."""
    llm = LLM(**options)
    llm.llm_engine.kernels.wait(SECONDS_TO_COMPILE)
    llm.llm_engine.kernels.switch_when_ready()
    return llm


def free_memory() -> None:
    """Give the memory of deleted engines back to the device, so that the next pool can use it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- A round


@dataclass
class Run:
    """A round of tasks: the tokens of each task, and when each token arrived, in seconds since the start."""

    tokens: list[list[int]]
    times: list[list[float]]
    idle_cpu_seconds: float = 0.0  # processor time that a peer used between the previous run and this one
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_blocks_loaded: int = 0  # from the host and the disk

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def seconds(self) -> float:
        return max(each[-1] for each in self.times if each)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def first_tokens(self) -> list[float]:
        """The time to first token of each task."""
        return [each[0] for each in self.times if each]

    @property
    def gaps(self) -> list[float]:
        """The inter-token latencies of all tasks.

        >>> Run([[5, 6, 7]], [[1.0, 3.0, 6.0]]).gaps
        [2.0, 3.0]
        """
        return [after - before for each in self.times for before, after in pairwise(each)]

    @property
    def decode_seconds(self) -> float:
        """The seconds from the moment when every task has its first token until the end of the run."""
        return self.seconds - max(self.first_tokens)

    @property
    def decoded_per_second(self) -> float:
        """The tokens per second from the moment when every task has its first token."""
        start = max(self.first_tokens)
        return sum(when > start for each in self.times for when in each) / self.decode_seconds

    @property
    def step_seconds(self) -> float:
        """The mean time of a decode step, if all tasks end together.

        >>> Run([[5, 6, 7], [8, 9, 4]], [[1.0, 1.5, 2.0], [1.0, 1.5, 2.0]]).step_seconds
        0.5
        """
        return self.decode_seconds / (max(map(len, self.tokens)) - 1)

    def fault(self, tasks: Sequence[Task], may_be_cut: bool = False) -> str | None:
        """Return why this run can't be of these tasks, or None. With `may_be_cut`, outputs may be shorter."""
        counts, expected = [len(each) for each in self.tokens], [task.num_output_tokens for task in tasks]
        if len(counts) != len(expected):
            return f"{len(counts)} outputs for {len(expected)} requests"
        for number, (count, limit) in enumerate(zip(counts, expected, strict=True)):
            if count > limit or (count < limit and not may_be_cut):
                return f"{count} tokens for request {number}, which needs {limit}"
        if [len(each) for each in self.times] != counts or any(each != sorted(each) for each in self.times):
            return "times that are not one per token, in order"
        return None


def serve(llm: LLM, tasks: Sequence[Task], *, is_cold: bool = True, detokenize: bool = True) -> Run:
    """Serve all tasks together, after emptying the prefix cache if `is_cold`. Raise ValueError if a request fails.

    With `detokenize`, outputs have text, as for users. Without it, outputs have only token ids, as peers return them.
    """
    engine, indices = llm.llm_engine, dict[str, int]()  # of tasks, by request id
    run = Run([[] for _ in tasks], [[] for _ in tasks])
    if is_cold and not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache cannot be emptied while a request runs")
    loaded, started = num_blocks_loaded(llm), time.perf_counter()
    for index, task in enumerate(tasks):
        engine.add_request(id := next(IDS), task.prompt, params_of(task, detokenize))
        indices[id] = index
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - started
        run.num_steps += 1
        for output in outputs:
            if output.error:
                raise ValueError(f"a request failed: {output.error}")
            tokens, times = run.tokens[indices[output.request_id]], run.times[indices[output.request_id]]
            if not tokens:
                run.num_cached_tokens += output.num_cached_tokens
            tokens += output.outputs[0].token_ids[len(tokens) if detokenize else 0 :]
            times += [now] * (len(tokens) - len(times))
    run.num_blocks_loaded = num_blocks_loaded(llm) - loaded
    assert not (fault := run.fault(tasks)), fault
    return run


def num_blocks_loaded(llm: LLM) -> int:
    """Return how many blocks the engine has loaded from the host and the disk."""
    stats = llm.stats()
    return stats.blocks_loaded + stats.disk_blocks_loaded


def params_of(task: Task, detokenize: bool) -> SamplingParams:
    """Return parameters that generate exactly the task's number of tokens."""
    options: dict[str, Any] = {} if detokenize else {"detokenize": False, "output_kind": RequestOutputKind.DELTA}
    return SamplingParams(temperature=task.temperature, max_tokens=task.num_output_tokens, ignore_eos=True, **options)


def summarize_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the speed at the median time of the rounds, and percentiles of the times in all rounds."""
    seconds, num_steps = statistics.median(run.seconds for run in runs), max(map(len, runs[0].tokens))
    return {
        "tokens_per_second": runs[0].num_tokens / seconds,
        "seconds": seconds,
        "steps": runs[0].num_steps or num_steps,
        "first_token_ms": percentiles([each for run in runs for each in run.first_tokens]),
        "between_tokens_ms": percentiles([each for run in runs for each in run.gaps]),
    }
