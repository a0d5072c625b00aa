"""async_scheduling: each step is launched before the tokens of the one before it are read.

test_overlap_timing.py measures what that gains.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from ...engine.executor import Pending, Scheduled
from ...engine.sequence import Sequence
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import RequestOutputKind, SamplingParams
from ...requests.tokens import SampledToken, StepOutput
from ..testing.engines import (
    answer,
    answer_alone,
    answers,
    assert_empty,
    chooser,
    params,
    reason,
    reasons,
    run_to_the_end,
    scripted_engine,
    step,
)

NUM_ROWS = 256


class RecordedStep(NamedTuple):
    calls: list[str]
    number: int
    sampled: StepOutput

    def tokens(self) -> StepOutput:
        self.calls.append(f"read {self.number}")
        return self.sampled


class RecordingExecutor:
    """An executor without a model: each position has its token. It records when steps are launched and read."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_steps = self.num_tokens = 0

    def launch(self, batch: list[Scheduled], num_decodes: int = 0) -> Pending:
        self.num_steps += 1
        self.calls.append(f"launch {self.num_steps}")
        sampled = [self._next(seq) if seq.num_uncomputed_tokens == count else None for seq, count in batch]
        return RecordedStep(self.calls, self.num_steps, StepOutput.of(sampled))

    def _next(self, seq: Sequence) -> SampledToken:
        return SampledToken(260 + seq.num_tokens_with_placeholders % 60, -1.0)  # pieces of words

    def next_logits(self, batch: list[Scheduled]) -> Tensor:
        raise ValueError("this executor has no logits")


def recorded_engine(checkpoint: Path, executor: RecordingExecutor, **options: Any) -> LLMEngine:
    settings: dict[str, Any] = {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 8192, "offload_policy": "recompute"}
    config = EngineConfig(str(checkpoint), kv_cache_tokens=NUM_ROWS * 256, **settings | options)
    return LLMEngine(config, choose_executor=chooser(lambda kv_cache: executor))


# Order


def test_each_step_is_launched_before_the_one_before_it_is_read(checkpoint):
    engine = recorded_engine(checkpoint, executor := RecordingExecutor(), async_scheduling=True)
    engine.add_request("a", [3, 4, 5], params(4))
    assert step(engine) == {}, "nothing has been read yet"
    assert answer(run_to_the_end(engine)["a"]) == [263, 264, 265, 266]
    expected = ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "read 4"]
    assert executor.calls == expected


def test_device_has_the_next_step_while_the_host_works_on_the_outputs_of_many_rows(checkpoint):
    engine = recorded_engine(checkpoint, executor := RecordingExecutor(), async_scheduling=True)
    for i in range(NUM_ROWS):
        engine.add_request(str(i), [3 + i, 4, 5], params(20, output_kind=RequestOutputKind.DELTA))
    numbers = [len(engine.step()) for _ in range(10)]
    assert numbers == [0] + [NUM_ROWS] * 9
    assert executor.calls == ["launch 1", *(call for i in range(1, 10) for call in (f"launch {i + 1}", f"read {i}"))]


def test_steps_are_read_at_once_by_default_on_a_cpu(checkpoint):
    engine = recorded_engine(checkpoint, executor := RecordingExecutor())
    engine.add_request("a", [3, 4, 5], params(2))
    run_to_the_end(engine)
    assert executor.calls == ["launch 1", "read 1", "launch 2", "read 2"]


@pytest.mark.parametrize("needs", [{"repetition_penalty": 1.5}, {"min_tokens": 2}, {"logit_bias": {9: 5.0}}])
def test_step_whose_logits_depend_on_its_output_is_read_at_once(checkpoint, needs):
    engine = recorded_engine(checkpoint, executor := RecordingExecutor(), async_scheduling=True)
    engine.add_request("a", [3, 4, 5], params(2, **needs))
    run_to_the_end(engine)
    assert executor.calls == ["launch 1", "read 1", "launch 2", "read 2"]


# Sequences that end, are aborted or lack blocks while a step is in flight


def test_stop_token_that_is_read_late_wastes_one_row(checkpoint):
    engine, alone = scripted_engine(checkpoint, 16, async_scheduling=True), answer_alone([5, 6], 9)
    engine.add_request("a", [5, 6], params(9, stop_token_ids=[alone[3]]))
    ended = run_to_the_end(engine)
    assert (answer(ended["a"]), reason(ended["a"])) == (alone[:4], "stop")
    assert engine.executor.num_steps == 5, "the fifth was launched before the fourth was read"


def test_last_token_of_max_tokens_wastes_no_row(checkpoint):
    engine = scripted_engine(checkpoint, 16, async_scheduling=True)
    engine.add_request("a", [5, 6], params(4))
    run_to_the_end(engine)
    assert engine.executor.num_steps == 4


def test_sequence_that_lacks_a_block_may_still_stop_with_the_token_in_flight(checkpoint):
    """The pool has 8 slots. The ninth token would need a block, but the eighth, which has a slot, ends the output."""
    alone = answer_alone([5, 6], 7)
    for is_async in (False, True):
        engine = scripted_engine(checkpoint, num_blocks=2, async_scheduling=is_async)
        engine.add_request("a", [5, 6], params(20, stop_token_ids=[alone[6]]))
        assert reason(run_to_the_end(engine)["a"]) == "stop"


def test_aborted_request_leaves_no_step_behind(checkpoint):
    engine = scripted_engine(checkpoint, 16, async_scheduling=True)
    engine.add_request("a", [5, 6], params(9))
    step(engine)
    step(engine)
    output = engine.abort_request("a")
    assert output is not None and answer(output) == answer_alone([5, 6], 1)
    assert_empty(engine)
    engine.add_request("b", [5, 6], params(3))
    assert answer(run_to_the_end(engine)["b"]) == answer_alone([5, 6], 3)


def test_reset_prefix_cache_computes_the_step_in_flight_again(checkpoint):
    engine = scripted_engine(checkpoint, 16, async_scheduling=True)
    engine.add_request("a", [5, 6], params(9))
    step(engine)
    step(engine)
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert answer(run_to_the_end(engine)["a"]) == answer_alone([5, 6], 9)


@pytest.mark.parametrize("num_tokens", [7, 8, 9, 12, 13])
def test_prompt_that_is_cached_up_to_its_last_token_runs_beside_the_one_that_computed_it(checkpoint, num_tokens):
    """Requests b to d repeat a's prompt, its prompt with one token of its output, and with all that is known of it.

    They arrive while a step of a is in flight, so its newest tokens are in no block that may be hit.
    """
    prompt, served = [*range(1, num_tokens + 1)], []
    for is_async in (True, False):
        engine = scripted_engine(checkpoint, 40, async_scheduling=is_async)
        engine.add_request("a", prompt, params(12))
        for _ in range(5):
            step(engine)
        for name, num_more in {"b": 0, "c": 1, "d": 4 - is_async}.items():
            engine.add_request(name, prompt + answer_alone(prompt, num_more), params(5))
        ended = run_to_the_end(engine)
        for output in ended.values():
            assert answer(output) == answer_alone(output.prompt_token_ids, len(answer(output)))
        served.append([len(answer(ended[name])) for name in "abcd"])
        assert ended["b"].num_cached_tokens == (num_tokens - 1) // 4 * 4
    assert served == [[12, 5, 5, 5]] * 2


# The same outputs


def random_params(rng: random.Random) -> SamplingParams:
    """Return parameters of all kinds: those that need each token on the host, and those that do not."""
    drawn: dict[str, Any] = {
        "temperature": rng.choice([0.0, 1.0]),
        "n": rng.choice([1, 1, 3]),
        "seed": rng.randrange(9),
    }
    if rng.random() < 0.3:
        options = [{"repetition_penalty": 1.3}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"min_tokens": 3}]
        drawn |= rng.choice(options)
    if rng.random() < 0.4:
        drawn |= rng.choice([{"stop": ["e", "th"]}, {"stop_token_ids": rng.sample(range(320), 40)}, {"top_k": 5}])
    return params(rng.randint(3, 30), **drawn)


Ended = dict[str, tuple[list[list[int]], list[str], list[str | None]]]


def play(checkpoint: Path, seed: int, is_async: bool) -> tuple[Ended, int]:
    """Return the tokens, the text and the end of each request, and the number of preemptions."""
    rng = random.Random(seed)
    options: dict[str, Any] = {"kv_cache_tokens": 4 * rng.choice([14, 20]), "kv_offloading_tokens": 64}
    options |= {"block_size": 4, "max_num_batched_tokens": rng.choice([5, 64]), "watermark": 0.0}
    options |= {"attention_backend": "torch", "offload_policy": "load", "async_scheduling": is_async}
    config = EngineConfig(str(checkpoint), **options)
    engine = LLMEngine(config)
    start = [rng.randrange(259, 320) for _ in range(12)]
    ended: Ended = {}
    for number in range(40):
        if rng.random() < 0.5:
            prompt = start[: rng.randrange(13)] + [rng.randrange(259, 320) for _ in range(rng.randint(1, 8))]
            engine.add_request(str(number), prompt, random_params(rng))
        ended |= finished(step(engine))
        if rng.random() < 0.1:
            engine.abort_request(str(rng.randrange(number + 1)))
    ended |= finished({name: output for name, output in run_to_the_end(engine).items()})
    return ended, engine.scheduler.num_preemptions


def finished(outputs: dict[str, RequestOutput]) -> Ended:
    done = {name: output for name, output in outputs.items() if output.finished}
    return {name: (answers(each), [one.text for one in each.outputs], reasons(each)) for name, each in done.items()}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_random_histories_give_the_same_outputs_as_without_overlap(checkpoint, seed):
    """Requests of all kinds share prefixes in a pool that is too small. Aborted ones are not compared."""
    expected, num_preemptions = play(checkpoint, seed, is_async=False)
    overlapped, _ = play(checkpoint, seed, is_async=True)
    both = expected.keys() & overlapped.keys()  # an abort may find a request that has ended, in one of the two
    assert {name: overlapped[name] for name in both} == {name: expected[name] for name in both}
    assert len(both) > 6 and len(both) >= len(expected) - 2, "this history tests too little"
    assert num_preemptions > 0
