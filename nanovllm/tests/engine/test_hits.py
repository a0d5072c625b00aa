"""Cache hits in an engine: what is computed and what is not. They never change an answer."""

import random
from functools import partial

import pytest

from ...llm import LLM
from ...llm_engine import LLMEngine
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ...requests.tokens import SampledToken
from ..testing.engines import (
    Batch,
    answer_alone,
    answers,
    executor_of,
    params,
    reasons,
    run_to_the_end,
    scripted_engine,
    step,
)
from ..testing.sequences import preempt

PROMPT = [3 + 7 * i % 300 for i in range(20)]  # five blocks


def serve(engine: LLMEngine, prompt: list[int], max_tokens: int = 3, **options) -> RequestOutput:
    """Serve one request alone, to its end."""
    engine.add_request("a", prompt, params(max_tokens, **options))
    return run_to_the_end(engine)["a"]


def serve_counted(engine: LLMEngine, prompt: list[int], max_tokens: int = 3, **options) -> tuple[int, int]:
    """Serve one request alone. Check the answer, and return how many tokens were hit and computed."""
    hits, computed = engine.kv_cache_manager.prefix_cache_stats.hits, executor_of(engine).num_tokens
    assert answers(serve(engine, prompt, max_tokens, **options)) == [answer_alone(prompt, max_tokens)]
    return engine.kv_cache_manager.prefix_cache_stats.hits - hits, executor_of(engine).num_tokens - computed


def test_fully_cached_prompt_computes_its_last_token(checkpoint):
    engine = scripted_engine(checkpoint, 16)
    assert serve_counted(engine, PROMPT) == (0, 20 + 2)
    assert serve_counted(engine, PROMPT[:17]) == (16, 1 + 2), "its last token, and two sampled ones"
    assert serve_counted(engine, PROMPT[:16]) == (12, 4 + 2)


def test_queried_and_hit_tokens_are_counted(checkpoint):
    engine = scripted_engine(checkpoint, 16)
    serve(engine, PROMPT), serve(engine, [*PROMPT[:10], 99])
    stats = engine.kv_cache_manager.prefix_cache_stats
    assert (stats.queries, stats.hits) == (20 + 11, 8)


def test_prompt_hits_blocks_of_its_own_salt_only(checkpoint):
    engine = scripted_engine(checkpoint, 64)
    salts, hits = ["a", None, "b", "a", "b", None], []
    for salt in salts:
        prompt = {"prompt_token_ids": PROMPT, "cache_salt": salt}
        engine.add_request("0", prompt, params(3, n=2))
        output = run_to_the_end(engine)["0"]
        assert answers(output) == [answer_alone(PROMPT, 3)] * 2
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 0, 16, 16, 16]


def test_same_prompt_twice_in_one_step_is_computed_twice_and_hit_by_the_next_request(checkpoint):
    engine = scripted_engine(checkpoint, 32)
    for name in "ab":
        engine.add_request(name, PROMPT, params(4))
    outputs = run_to_the_end(engine)
    assert engine.kv_cache_manager.prefix_cache_stats.hits == 0
    assert [answers(outputs[name]) for name in "ab"] == [[answer_alone(PROMPT, 4)]] * 2
    assert serve_counted(engine, PROMPT)[0] == 16


def test_duplicate_block_is_neither_announced_nor_withdrawn(checkpoint):
    """What observers hear is the index, also when the duplicate is evicted and the block that it repeats is not."""
    engine = scripted_engine(checkpoint, 14, kv_offloading_tokens=0)
    announced: set[bytes] = set()

    class Index:
        def on_cache(self, block: int, block_hash: bytes) -> None:
            assert block_hash not in announced, "announced twice"
            announced.add(block_hash)

        def on_evict(self, block: int, block_hash: bytes, why: str) -> None:
            announced.remove(block_hash)

    engine.observers.append(Index())
    for name in "ab":
        engine.add_request(name, PROMPT, params(4))
    run_to_the_end(engine)
    hashes = set(announced)
    assert len(hashes) == 5, "the prompt, once"
    engine.add_request("c", [7] * 36, params(1))  # takes the 9 blocks that are not in the index
    run_to_the_end(engine)
    assert hashes < announced == {*engine.kv_cache_manager.pool.cached}
    assert serve_counted(engine, PROMPT)[0] == 16


def test_waiting_request_hits_as_much_of_a_prompt_as_is_computed_on_its_admission(checkpoint):
    engine = scripted_engine(checkpoint, 32, max_num_batched_tokens=9)
    engine.add_request("a", PROMPT, params(1)), step(engine)  # 9 tokens of a: two full blocks
    engine.add_request("b", [*PROMPT[:16], 5], params(1)), step(engine)
    assert engine.executor.steps[-1] == [("a", 9)], "no budget is left for b"
    step(engine)
    assert engine.executor.steps[-1] == [("a", 2), ("b", 1)]


# Interrupted prompts


class Poisoned:
    """A model that writes nonsense for these requests and raises, in any batch and alone."""

    def __init__(self, engine: LLMEngine, *names: str) -> None:
        self.engine, self.names, self.from_token = engine, names, 0
        self._run = executor_of(engine).run
        executor_of(engine).run = self.run  # type: ignore[method-assign]

    def run(self, batch: Batch) -> list[SampledToken | None]:
        for seq, _ in batch:
            if seq.request_id in self.names and seq.num_computed_tokens >= self.from_token:
                self.engine.kv_cache.blocks[seq.block_table[seq.num_computed_tokens // 4 :]] = 299
                raise RuntimeError("poison")
        return self._run(batch)


@pytest.mark.parametrize("others", [0, 2])
def test_nothing_of_a_failed_step_is_hit(checkpoint, others):
    """Two chunks of the prompt were computed; the third one failed, alone or in a batch."""
    engine = scripted_engine(checkpoint, 32, max_num_batched_tokens=6 + others)
    poisoned = Poisoned(engine, "a")
    poisoned.from_token = 12
    for i in range(others):
        engine.add_request(str(i), [200 + i] * 2, params(9)), step(engine)
    engine.add_request("a", PROMPT, params(3))
    ended = run_to_the_end(engine)
    assert ended["a"].error == "RuntimeError: poison" and answers(ended["a"]) == [[]]
    assert [answers(ended[str(i)]) for i in range(others)] == [[answer_alone([200 + i] * 2, 9)] for i in range(others)]
    poisoned.names = ()
    assert serve_counted(engine, PROMPT) == (12, 8 + 2)


# Preemption


@pytest.mark.parametrize("num_steps, again", [(1, 1), (4, 4), (5, 1), (6, 2)])
def test_preempted_sequence_recomputes_only_tokens_outside_full_blocks(checkpoint, num_steps, again):
    """After n steps, it has 20 + n tokens, the last of which is not computed. Nothing was evicted."""
    engine = scripted_engine(checkpoint, 16)
    engine.add_request("a", PROMPT, params(9))
    for _ in range(num_steps):
        step(engine)
    preempt(engine.scheduler, engine.scheduler.running[0])
    step(engine)
    assert engine.executor.steps[-1] == [("a", again)]
    assert answers(run_to_the_end(engine)["a"]) == [answer_alone(PROMPT, 9)]
    assert engine.kv_cache_manager.prefix_cache_stats.queries == 20 + (20 + num_steps), "on each admission"
    computed_twice = engine.executor.num_tokens - (20 + 8)
    assert computed_twice == again - 1 < engine.config.block_size


def test_preempted_samples_find_the_prompt_and_their_own_blocks(checkpoint):
    """Stage 5 computes 2 x 28 tokens here, all that the two samples have."""
    engine = scripted_engine(checkpoint, 40)
    engine.add_request("a", PROMPT[:18], params(12, n=3, temperature=1.0, seed=3))
    for _ in range(11):
        step(engine)
    samples = engine.requests["a"]
    assert [seq.num_tokens for seq in samples] == [28] * 3
    for seq in reversed(samples[1:]):
        preempt(engine.scheduler, seq)
    step(engine)
    assert engine.executor.steps[-1] == [("a", 1), ("a", 4), ("a", 4)], "24 of 28 tokens are hits"
    tables = [seq.block_table for seq in samples if not seq.finished]
    assert len({tuple(table[:4]) for table in tables}) == 1, "the prompt is in the pool once"
    assert answers(run_to_the_end(engine)["a"]) == [answer_alone(PROMPT[:18], 12, 3, i) for i in range(3)]


# On, off and reset


def test_caching_is_on_by_default(checkpoint):
    assert LLM(checkpoint).config.enable_prefix_caching is True


# With a real model


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_the_same_as_without_a_cache(checkpoint, seed):
    """Prompts share beginnings of many lengths, with chunks, preemption and several samples, greedy and random."""
    rng = random.Random(seed)
    options = {"block_size": rng.choice([1, 2, 4]), "max_num_batched_tokens": rng.choice([3, 16, 64]), "watermark": 0.0}
    prompts = [PROMPT[: rng.randrange(1, 16)] + [rng.randrange(5, 8)] * rng.randrange(5) for _ in range(8)]
    num_computed = [
        SamplingParams(
            n=rng.choice([1, 1, 2]), temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=8, ignore_eos=True
        )
        for i in range(8)
    ]
    llm = partial(LLM, checkpoint, kv_cache_tokens=64, **options)
    on, off = llm(), llm(enable_prefix_caching=False)
    expected = [answers(output) for output in off.generate(prompts, num_computed)]
    for _ in range(2):
        outputs = on.generate(prompts, num_computed)
        assert [answers(output) for output in outputs] == expected
        assert {reason for output in outputs for reason in reasons(output)} == {"length"}
        on.llm_engine.kv_cache_manager.check_integrity()
    assert on.llm_engine.executor.num_tokens < 2 * off.llm_engine.executor.num_tokens
