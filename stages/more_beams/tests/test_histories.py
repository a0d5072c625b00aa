"""Random histories: requests come, end and are aborted on engines of random size. Every step is checked."""

import random
from collections import Counter

import pytest

from ..engine import LLMEngine
from ..outputs import RequestOutput
from .scripted import BLOCK_SIZE, add, check, names, run, scripted_engine, step, steps_of, tokens_alone


@pytest.mark.parametrize("seed", range(2))
def test_any_history_leaves_everything_in_its_place(checkpoint, seed):
    rng, counts = random.Random(seed), Counter[str]()
    for _ in range(12):
        options = {"max_num_seqs": rng.choice([1, 2, 8]), "watermark": rng.choice([0.0, 0.0, 0.3])}
        options |= {"max_num_batched_tokens": rng.choice([1, 3, 7, 30])}
        engine = scripted_engine(checkpoint, rng.randint(4, 16), **options)
        counts.update(play(engine, rng))
        counts["preemptions"] += engine.scheduler.num_preemptions
    assert min(counts[kind] for kind in ("length", "abort", "error", "preemptions")) >= 5, f"too few: {counts}"


def play(engine: LLMEngine, rng: random.Random) -> list[str]:
    """Play a history to its end, check each output, and return the finish reasons."""
    prompts: dict[str, list[int]] = {}
    max_tokens: dict[str, int] = {}
    finished: dict[str, RequestOutput] = {}
    for i in range(120):
        draw = rng.random()
        if draw < 0.2:
            max_tokens[str(i)] = rng.choice([1, 5, rng.randint(1, 40)])
            num_tokens, n = rng.choice([1, 4, rng.randint(1, 23)]), rng.choice([1, 1, 2, rng.randint(3, 9)])
            prompts[str(i)] = add(engine, str(i), num_tokens, max_tokens[str(i)], n=n)
        elif draw < 0.25 and prompts:
            request_id = rng.choice(list(prompts))
            output = engine.abort_request(request_id)
            assert (output is None) == (request_id in finished)
            finished |= {request_id: output} if output else {}
            check(engine)
        elif engine.has_unfinished_requests():
            finished |= {name: output for name, output in play_step(engine).items() if output.finished}
    finished |= run(engine)
    assert finished.keys() == prompts.keys(), "a request was lost"
    for request_id, output in finished.items():
        for sample in output.outputs:
            prompt, num_said = prompts[request_id], len(sample.token_ids)
            expected = tokens_alone(prompt, num_said, sample_index=sample.index)
            assert sample.token_ids == expected, f"sample {sample.index} of {request_id} has other tokens than alone"
            if sample.finish_reason == "length":
                assert num_said == min(max_tokens[request_id], 64 - len(prompt))
            elif sample.finish_reason == "error":
                assert len(prompt) + num_said > engine.kv_cache.num_blocks * BLOCK_SIZE
    return [sample.finish_reason for output in finished.values() for sample in output.outputs]


def play_step(engine: LLMEngine) -> dict:
    scheduler, steps = engine.scheduler, steps_of(engine)
    oldest, waiting = [*scheduler.running, *scheduler.waiting][0], set(scheduler.waiting)
    num_steps, num_preemptions = len(steps), scheduler.num_preemptions
    outputs = step(engine)
    batch = steps[-1] if len(steps) > num_steps else []
    size, budget = sum(num_tokens for _, num_tokens in batch), engine.config.max_num_batched_tokens
    assert size <= budget, f"a step has {size} tokens, max_num_batched_tokens is {budget}"
    assert oldest.request_id in dict(batch) or oldest.error, f"{oldest.request_id} is the oldest, and does not run"
    admitted = names([seq for seq in scheduler.running if seq in waiting])
    assert scheduler.num_preemptions == num_preemptions or not admitted, f"a step preempts, and admits {admitted}"
    return outputs
