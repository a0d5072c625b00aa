"""Equal tokens, alone or in any batch, in any chunks, with any preemption: a real model in float32."""

import random

import pytest
import torch

from ...llm import LLM
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ..testing.engines import answer, params, reason, run_to_the_end, step
from ..testing.reference import greedy_without_cache

PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15)), [1, 44]]


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """Return 24 tokens for each of PROMPTS."""
    return [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]


def real_engine(checkpoint, num_blocks: int, **knobs) -> LLMEngine:
    options = {"block_size": 4, "kv_cache_tokens": num_blocks * 4, "watermark": 0.0} | knobs
    return LLMEngine(EngineConfig(str(checkpoint), **options))


@pytest.mark.parametrize(  # of the blocks, just one request fits, some fit, or all
    ("num_blocks", "budget"), [(9, 1), (9, 7), (14, 3), (14, 512), (50, 1), (50, 4)]
)
def test_tokens_do_not_depend_on_chunks_or_preemption(checkpoint, expected, num_blocks, budget):
    engine = real_engine(checkpoint, num_blocks, max_num_batched_tokens=budget)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params(24))
    ended = run_to_the_end(engine)
    assert [answer(ended[str(i)]) for i in range(5)] == expected
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks < 50 and budget > 1)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_the_batch_or_the_order_of_arrival(checkpoint, expected, seed):
    """Run some steps between arrivals. Other requests arrive and are aborted."""
    rng = random.Random(seed)
    engine = real_engine(checkpoint, rng.randint(9, 20), block_size=4, max_num_batched_tokens=rng.choice([3, 5, 16]))
    ended: dict[str, RequestOutput] = {}
    for i in rng.sample(range(5), 5):
        engine.add_request(f"stranger {i}", [20 + i] * rng.randint(1, 20), params(10))
        engine.add_request(str(i), PROMPTS[i], params(24))
        for _ in range(rng.randint(0, 8)):
            ended |= {name: output for name, output in step(engine).items() if output.finished}
        engine.abort_request(f"stranger {rng.randrange(5)}")
    ended |= run_to_the_end(engine)
    assert [answer(ended[str(i)]) for i in range(5)] == expected


def test_seeded_samples_do_not_depend_on_preemption(checkpoint):
    sampling = [SamplingParams(seed=i, temperature=1.5, top_p=0.9, max_tokens=24, ignore_eos=True) for i in range(5)]
    alone = [LLM(checkpoint).generate([prompt], each)[0] for prompt, each in zip(PROMPTS, sampling, strict=True)]
    engine = real_engine(checkpoint, 9, max_num_batched_tokens=5)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, sampling[i])
    ended = run_to_the_end(engine)
    assert engine.scheduler.num_preemptions > 3
    assert [answer(ended[str(i)]) for i in range(5)] == [answer(output) for output in alone]


def test_stop_strings_and_eos_do_not_depend_on_preemption(checkpoint, tmp_path):
    """Each stop string or stop token comes from the middle of a text."""
    alone = LLM(checkpoint).generate(["the fox", "the rabbit", "and the", "once"], params(24))
    texts = [output.outputs[0].text for output in alone]
    stopping = [params(24, stop=texts[0][9:12]), params(24, stop=texts[1][5:6])]
    stopping += [params(24, stop_token_ids=[answer(output)[10]]) for output in alone[2:]]
    prompts = [output.prompt for output in alone]
    stopped = [LLM(checkpoint).generate([prompt], each)[0] for prompt, each in zip(prompts, stopping, strict=True)]
    assert {reason(output) for output in stopped} == {"stop"}
    engine = real_engine(checkpoint, 8, max_num_batched_tokens=6)
    for i, (prompt, each) in enumerate(zip(prompts, stopping, strict=True)):
        engine.add_request(str(i), prompt, each)
    ended = run_to_the_end(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [ended[str(i)].outputs[0].text for i in range(4)] == [output.outputs[0].text for output in stopped]
    assert [(answer(ended[str(i)]), reason(ended[str(i)])) for i in range(4)] == [(answer(o), "stop") for o in stopped]


def test_logprobs_do_not_depend_on_preemption(checkpoint):
    alone = [LLM(checkpoint).generate([prompt], params(24))[0] for prompt in PROMPTS]
    engine = real_engine(checkpoint, 9)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params(24))
    ended = run_to_the_end(engine)
    for i, output in enumerate(alone):
        expected = output.outputs[0].cumulative_logprob
        assert ended[str(i)].outputs[0].cumulative_logprob == pytest.approx(expected, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_are_the_same_on_a_gpu_with_preemption(checkpoint, expected):
    engine = real_engine(checkpoint, 9, device="cuda", dtype="float32", max_num_batched_tokens=5)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params(24))
    ended = run_to_the_end(engine)
    assert [answer(ended[str(i)]) for i in range(5)] == expected
