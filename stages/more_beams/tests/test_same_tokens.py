"""A request gets the same tokens alone or beside others, in any chunks, under any preemption. A real model, float32."""

import random

import pytest
import torch

from ..config import EngineConfig
from ..engine import LLMEngine
from ..llm import LLM
from ..sampling import SamplingParams
from .helpers import greedy_without_cache
from .scripted import run, step, tokens_of

PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15)), [1, 44]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]


def real_engine(checkpoint, num_blocks: int, **options) -> LLMEngine:
    size = {"block_size": 4, "kv_cache_tokens": num_blocks * 4, "watermark": 0.0, "max_model_len": 64}
    return LLMEngine(EngineConfig(str(checkpoint), **size | options))


def answers(engine: LLMEngine, params: list[SamplingParams]) -> list[list[int]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params[i])
    outputs = run(engine)
    return [tokens_of(outputs[str(i)]) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("num_blocks, budget", [(9, 1), (9, 512), (14, 3), (14, 7), (50, 512)])
def test_tokens_do_not_depend_on_chunks_or_preemption(checkpoint, expected, num_blocks, budget):
    engine = real_engine(checkpoint, num_blocks, max_num_batched_tokens=budget)
    assert answers(engine, [GREEDY] * 5) == expected, "a request has other tokens than without a cache"
    counted = engine.scheduler.num_preemptions
    assert (counted > 0) == (num_blocks < 50 and budget > 1), f"with {num_blocks} blocks, num_preemptions is {counted}"


@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_other_requests_or_order_of_arrival(checkpoint, expected, seed):
    rng = random.Random(seed)
    engine, finished = real_engine(checkpoint, rng.randint(9, 20), max_num_batched_tokens=rng.choice([3, 5, 16])), {}
    for i in rng.sample(range(5), 5):
        engine.add_request(f"stranger {i}", [20 + i] * rng.randint(1, 20), GREEDY)
        engine.add_request(str(i), PROMPTS[i], GREEDY)
        for _ in range(rng.randint(0, 8)):
            finished |= step(engine)
        engine.abort_request(f"stranger {rng.randrange(5)}")
    finished |= run(engine)
    assert [tokens_of(finished[str(i)]) for i in range(5)] == expected


def test_seeded_samples_do_not_depend_on_preemption(checkpoint):
    params = [SamplingParams(seed=i, temperature=1.5, top_p=0.9, max_tokens=24, ignore_eos=True) for i in range(5)]
    engine = real_engine(checkpoint, 9, max_num_batched_tokens=5)
    llm = LLM(checkpoint)
    alone = [llm.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert answers(engine, params) == [tokens_of(output) for output in alone]
    assert engine.scheduler.num_preemptions > 3


def test_a_stop_string_is_found_across_a_preemption(checkpoint):
    """Each request's stop string is in the middle of the text that it gets alone."""
    prompts = ["the fox", "the rabbit", "and the", "once"]
    llm = LLM(checkpoint)
    texts = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=text[9:11]) for text in texts]
    alone = [llm.generate(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=32, watermark=0.0, max_num_batched_tokens=6, max_model_len=64)
    outputs = llm.generate(prompts, params)
    assert llm.llm_engine.scheduler.num_preemptions > 0
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in alone]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_under_preemption_are_the_same_on_a_gpu(checkpoint, expected):
    engine = real_engine(checkpoint, 9, device="cuda", dtype="float32", max_num_batched_tokens=5)
    assert answers(engine, [GREEDY] * 5) == expected
