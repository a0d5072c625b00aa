"""The host's work in a step: the processor time of the engine's thread, on a device that takes no time.

The device's inputs are filled as in the GPU backend, and its tokens are there as soon as a step is launched. What is
left is scheduling, inputs, reading, appending and outputs.
"""

import time
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any

import torch

from ..backends.gpu.inputs import StepInputs
from ..backends.gpu.sampler import Sampling
from ..backends.torch.backend import flatten
from ..backends.torch.model_runner import SampledStep, complete_items
from ..engine.executor import Executor, Kernels, Scheduled
from ..engine.interrupts import interrupts_held_back
from ..engine.kv_cache import KVCache
from ..llm_engine import LLMEngine
from ..options.engine_args import EngineArgs
from ..requests.prompts import TokensPrompt
from ..requests.sampling_params import RequestOutputKind, SamplingParams
from .bench_options import Host, whole_numbers
from .engine import IDS
from .harness import Spread, take_turns
from .report import Report, machine_of, report_of

MAX_LEN, TURNOVER = 512, 32  # tokens of a request, and of an output if requests come and go
KINDS = {"final": RequestOutputKind.FINAL_ONLY, "deltas": RequestOutputKind.DELTA}
WARM_UP_STEPS = 40
PROMPT_LENGTHS = range(16, 32)  # so that about as many rows need a block in each step


class InstantDevice:
    """An Executor whose device takes no time, and samples the same token for each row."""

    def __init__(self, kv_cache: KVCache, num_rows: int, token_id: int = 300) -> None:
        self.num_steps = self.num_tokens = 0
        self._block_size, self._device = kv_cache.block_size, torch.device("cpu")
        self._inputs = StepInputs(num_rows, MAX_LEN // kv_cache.block_size, kv_cache.block_size, self._device)
        self._results = torch.tensor([[float(token_id), -1.0]] * num_rows)

    def launch(self, batch: list[Scheduled], num_decodes: int = 0) -> SampledStep:
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + sum([count for _, count in batch])
        if num_decodes == len(batch):
            self._inputs.fill(batch)
        else:
            flatten(batch, self._block_size, self._device)
        complete = complete_items(batch, num_decodes)
        for row, item in enumerate(complete):
            batch[item][0].placeholder_id = ~row
        return SampledStep(len(batch), complete, Sampling(self._results[: len(complete)]).read)

    def next_logits(self, batch: list[Scheduled]) -> torch.Tensor:
        """Raise ValueError."""
        raise ValueError("a device that takes no time has no logits")


class Load:
    """An engine on an InstantDevice. All of its seats are taken."""

    def __init__(self, engine: dict[str, Any], num_seqs: int, kind: str, comes_and_goes: bool) -> None:
        self._kind, self._length = KINDS[kind], TURNOVER if comes_and_goes else MAX_LEN - PROMPT_LENGTHS[-1]
        room = {"max_num_seqs": num_seqs, "max_num_batched_tokens": 8192, "kv_cache_tokens": num_seqs * MAX_LEN}
        fixed = {
            "max_model_len": MAX_LEN,
            "offload_policy": "recompute",
            "kv_offloading_tokens": 0,
            "async_scheduling": True,
        }
        config = EngineArgs(**engine | room | fixed).engine_config()

        def choose(kv_cache: KVCache) -> tuple[Executor, Kernels]:
            return InstantDevice(kv_cache, num_seqs), Kernels("the device takes no time")

        self.engine = LLMEngine(config, choose_executor=choose)
        for number in range(num_seqs):
            self._add(1 + number % TURNOVER if comes_and_goes else self._length)
        for _ in range(WARM_UP_STEPS):
            self.step()

    def _add(self, length: int) -> None:
        number = int(request_id := next(IDS))
        token_id = 3 + number % (self.engine.model_config.vocab_size - 3)  # so that few prompts begin the same way
        prompt = [token_id] * PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params_of(length, self._kind))

    def step(self) -> float:
        """Make a step, and add a request for each one that has ended. Return the milliseconds of this thread."""
        started = time.thread_time()
        for output in self.engine.step():
            if output.finished:
                self._add(self._length)
        return 1000 * (time.thread_time() - started)

    def milliseconds(self, num_steps: int) -> float:
        """Return the median of some steps."""
        with interrupts_held_back():  # as in LLM.generate() and the server's engine
            return median(self.step() for _ in range(num_steps))


@cache
def params_of(length: int, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, output_kind=kind)


def host(engine: dict[str, Any], options: Host) -> Report:
    """Measure steps of several sizes, with and without texts, for requests that stay and for some that come and go."""
    calls: dict[tuple[str, str], Callable[[], float]] = {}
    sizes = whole_numbers("--num-seqs", options.num_seqs)
    for num_seqs, kind, comes_and_goes in product(sizes, KINDS, (False, True)):
        load = Load(engine, num_seqs, kind, comes_and_goes)
        column = f"{kind}, coming and going" if comes_and_goes else kind
        calls[column, f"{num_seqs} rows: ms"] = partial(load.milliseconds, options.num_steps)
    turns, measured = take_turns(calls, options.rounds, title="host"), dict[str, dict[str, Any]]()
    for column, row in calls:
        measured.setdefault(column, {})[row] = Spread.of([turn[column, row] for turn in turns])._asdict()
    notes = [f"processor time of the engine's thread; outputs of {TURNOVER} tokens where requests come and go"]
    return report_of("host", options, machine_of(torch.device("cpu")), measured, notes)
