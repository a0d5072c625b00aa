"""Outputs with random parameters equal a plain reference: preemption, forks, caching and offload change nothing."""

import random
from collections import Counter
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch

from .. import EngineConfig, LLMEngine, RepetitionDetectionParams, RequestOutput, RequestOutputKind, SamplingParams
from ..checkpoints.model_config import read_model_config
from ..checkpoints.weights import load_model
from ..llama import LlamaForCausalLM
from .testing.reference import Expected, expected_output

MAX_MODEL_LEN, VOCAB = 40, 320
WORDS = ["fox", "the little", "rabbit", "e", "and", "s"]


@pytest.fixture(scope="module")
def model(checkpoint) -> LlamaForCausalLM:
    return load_model(checkpoint, read_model_config(checkpoint), torch.float32, torch.device("cpu"))


def random_params(rng: random.Random) -> SamplingParams:
    """Return random parameters. At least half of the time a field has its default."""

    def some(values, default=None):
        return rng.choice(values) if rng.random() < 0.4 else default

    likely = [rng.randrange(VOCAB) for _ in range(30)]
    stop, token_ids = some([["e", "a"], ["th", "o"], ["in", "n", "i"], "s"]), some([[4, 9], [300]])
    max_tokens = some([1, 4, None], 12)
    return SamplingParams(
        n=some([2, 3], 1),
        presence_penalty=some([-2.0, 0.5, 2.0], 0.0),
        frequency_penalty=some([-1.0, 0.7, 2.0], 0.0),
        repetition_penalty=some([0.6, 1.3, 2.0], 1.0),
        temperature=some([0.0, 0.3, 2.0], 0.8),
        top_p=some([0.2, 0.7, 0.95], 1.0),
        top_k=some([1, 3, 20], -1),
        min_p=some([0.01, 0.1, 0.6], 0.0),
        seed=rng.randrange(1 << 40),
        stop=stop,
        stop_token_ids=some([likely, [7, 8, 9]]),
        ignore_eos=some([True], False),
        max_tokens=max_tokens,
        min_tokens=some([1, 3, 8], 0) if max_tokens is None or max_tokens > 8 else 0,
        logprobs=some([0, 2, -1]) if token_ids is None else None,
        prompt_logprobs=some([0, 1]),
        logprob_token_ids=token_ids,
        detokenize=some([False], True) if stop is None else True,
        include_stop_str_in_output=some([True], False),
        output_kind=rng.choice([*RequestOutputKind]),
        stream_interval=some([2, 5]),
        logit_bias=some([{5: 4.0, 9: -3.0}, {token_id: 5.0 for token_id in likely}]),
        allowed_token_ids=some([[*range(3, 60)], likely]),
        bad_words=some([WORDS[:2], WORDS]),
        skip_reading_prefix_cache=some([True]),
        repetition_detection=some([RepetitionDetectionParams(4, 0, 2)]),
    )


def serve(engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]], rng: random.Random):
    """Return all outputs of each request, in order. Requests arrive at random times, and are preempted at random."""
    outputs: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(requests))}
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        while waiting and rng.random() < 0.5:
            i, (prompt, params) = waiting.pop(0)
            engine.add_request(str(i), prompt, params)
        if rng.random() < 0.05:
            engine.scheduler.preempt_all()
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.kv_cache_manager.check_integrity()
    return outputs


def joined(outputs: list[RequestOutput], index: int) -> dict:
    """Return the deltas of a sample as one output."""
    parts = [each for output in outputs for each in output.outputs if each.index == index]
    whole = vars(parts[-1]) | {"text": "".join(part.text for part in parts)}
    for name in ("token_ids", "logprobs"):
        whole[name] = [each for part in parts for each in getattr(part, name) or ()]
    return whole


LEFT_NOTHING = "ValueError: no token is left to sample from"


def check(outputs: list[RequestOutput], params: SamplingParams, references: list[Expected]) -> None:
    kind, last = params.output_kind, outputs[-1]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    is_error = any(expected.finish_reason == "error" for expected in references)
    assert bool(last.error) == is_error and (last.error or LEFT_NOTHING).startswith(LEFT_NOTHING)
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
    for index, expected in enumerate(references):
        actual = joined(outputs, index) if kind is RequestOutputKind.DELTA else vars(last.outputs[index])
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert actual[name] == getattr(expected, name), (name, index, params)
        own = [row[token_id].item() for row, token_id in zip(expected.logprobs, expected.token_ids, strict=True)]
        assert actual["cumulative_logprob"] == pytest.approx(sum(own), abs=1e-3)
        if params.num_logprobs is not None:
            assert len(actual["logprobs"]) == len(expected.token_ids)
            for place, row in zip(actual["logprobs"], expected.logprobs, strict=True):
                assert all(each.logprob == pytest.approx(row[i].item(), abs=1e-3) for i, each in place.items())


def run(checkpoint: Path, model: LlamaForCausalLM, seed: int, seen: Counter) -> None:
    """Serve random requests, and count in `seen` how they ended and what happened to them."""
    rng = random.Random(seed)
    pool: dict[str, Any] = {
        "block_size": 4,
        "kv_cache_tokens": 64,
        "kv_offloading_tokens": 64,
        "offload_policy": "load",
    }
    chunk = rng.choice([5, 16])
    limits: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 6, "max_num_batched_tokens": chunk}
    engine = LLMEngine(EngineConfig(str(checkpoint), **pool, **limits))
    beginning = [rng.randrange(3, VOCAB) for _ in range(16)]
    prompts = [beginning[: rng.randrange(16)] + rng.choices(range(3, VOCAB), k=rng.randrange(1, 9)) for _ in range(8)]
    requests = [(prompt, random_params(rng)) for prompt in prompts]
    outputs = serve(engine, requests, rng)
    for (prompt, params), actual in zip(requests, outputs.values(), strict=True):
        room = MAX_MODEL_LEN - len(prompt)
        references = [expected_output(model, engine.tokenizer, room, prompt, params, i) for i in range(params.n)]
        check(actual, params, references)
        seen.update((each.finish_reason, type(each.stop_reason)) for each in references)
    seen["preempted"] += engine.scheduler.num_preemptions
    seen["hit"] += engine.kv_cache_manager.prefix_cache_stats.hits
    seen["loaded"] += engine.host_tier.num_blocks_loaded


FULL, NIGHTLY = pytest.mark.full, pytest.mark.nightly


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 14), marks=FULL), pytest.param(range(14, 200), marks=NIGHTLY)], ids=len
)
def test_outputs_equal_a_plain_reference(checkpoint, model, seeds):
    seen: Counter = Counter()
    for seed in seeds:
        run(checkpoint, model, seed, seen)
    ends = [("stop", str), ("stop", int), ("length", NoneType), ("repetition", str)]
    assert all(seen[each] > 0 for each in ["preempted", "hit", "loaded", *ends]), seen
