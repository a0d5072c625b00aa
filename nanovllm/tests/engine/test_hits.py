"""Cache hits in an engine: what is computed and what is not. They never change an answer."""

import random
from functools import partial

import pytest

from ...backends.torch.sampler import SampledToken
from ...engine.beam_search import BeamSearchParams
from ...engine.llm_engine import LLMEngine
from ...engine.outputs import RequestOutput
from ...engine.sampling_params import SamplingParams
from ...llm import LLM
from .scripted import (
    Batch,
    answer_alone,
    answers,
    assert_empty,
    assert_whole,
    executor_of,
    params,
    reasons,
    run_to_the_end,
    scripted_engine,
    step,
)

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


def test_same_prompt_twice_in_one_step_is_computed_twice_and_hit_by_the_next_request(checkpoint):
    engine = scripted_engine(checkpoint, 32)
    for name in "ab":
        engine.add_request(name, PROMPT, params(4))
    outputs = run_to_the_end(engine)
    assert engine.kv_cache_manager.prefix_cache_stats.hits == 0
    assert [answers(outputs[name]) for name in "ab"] == [[answer_alone(PROMPT, 4)]] * 2
    assert serve_counted(engine, PROMPT)[0] == 16


def test_request_one_step_later_holds_the_same_blocks(checkpoint):
    engine = scripted_engine(checkpoint, 32)
    engine.add_request("a", PROMPT, params(4)), step(engine)
    engine.add_request("b", PROMPT, params(4)), step(engine)
    assert engine.executor.steps[-1] == [("a", 1), ("b", 4)]
    held = [seq.block_table for seq in engine.scheduler.running]
    assert held[0][:4] == held[1][:4] and held[0][4] != held[1][4]
    assert answers(run_to_the_end(engine)["b"]) == [answer_alone(PROMPT, 4)]


def test_waiting_request_hits_as_much_of_a_prompt_as_is_computed_on_its_admission(checkpoint):
    engine = scripted_engine(checkpoint, 32, max_num_batched_tokens=9)
    engine.add_request("a", PROMPT, params(1)), step(engine)  # 9 tokens of a: two full blocks
    engine.add_request("b", [*PROMPT[:16], 5], params(1)), step(engine)
    assert engine.executor.steps[-1] == [("a", 9)], "no budget is left for b"
    step(engine)
    assert engine.executor.steps[-1] == [("a", 2), ("b", 1)]


def test_hits_cost_no_budget(checkpoint):
    """In a step of 8 tokens, 18 tokens with 16 hits need one step and leave room for 6 tokens of another prompt."""
    engine = scripted_engine(checkpoint, 32, max_num_batched_tokens=8)
    serve(engine, PROMPT)
    engine.add_request("a", PROMPT[:18], params(2)), engine.add_request("b", [77] * 9, params(2))
    step(engine)
    assert engine.executor.steps[-1] == [("a", 2), ("b", 6)]
    run_to_the_end(engine)


def test_prompt_finds_room_when_every_free_block_is_cached(checkpoint):
    engine = scripted_engine(checkpoint, 6)
    for first in range(50, 60):
        assert answers(serve(engine, [first] * 20)) == [answer_alone([first] * 20, 3)]
    assert len(engine.kv_cache_manager.pool.cached) == 5


# Interrupted prompts


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_only_the_computed_part_of_an_aborted_prompt_is_hit(checkpoint, end):
    engine = scripted_engine(checkpoint, 16, max_num_batched_tokens=6)
    engine.add_request("a", PROMPT, params(1)), step(engine)  # 6 of its 20 tokens; it holds blocks for all
    if end == "abort":
        engine.abort_request("a")
        assert serve_counted(engine, PROMPT, 1) == (4, 16)
    else:
        engine.scheduler._preempt(engine.scheduler.running[0], None)
        assert_whole(engine)
        assert answers(run_to_the_end(engine)["a"]) == [answer_alone(PROMPT, 1)]
        assert engine.executor.num_tokens == 6 + 16


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


@pytest.mark.parametrize("part", ["copies", "scheduling"])
def test_failed_step_keeps_what_was_computed_before_it(checkpoint, part, monkeypatch):
    """The step in which the samples fork raises. All of them return and hit the four blocks of the prompt."""
    engine = scripted_engine(checkpoint, 32)
    seeded = params(4, n=3, temperature=1.0, seed=3)
    engine.add_request("a", PROMPT[:18], seeded), step(engine)

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        broken = (engine.kv_cache, "copy_blocks") if part == "copies" else (engine.kv_cache_manager, "append_slot")
        patch.setattr(*broken, fails)
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    assert_whole(engine)
    assert answers(run_to_the_end(engine)["a"]) == [answer_alone(PROMPT[:18], 4, 3, i) for i in range(3)]
    assert engine.executor.num_tokens == 17 + 3 * 2 + 3 * 3, "each one hits 16 tokens and computes two"


# Preemption


@pytest.mark.parametrize("num_steps, again", [(1, 1), (4, 4), (5, 1), (6, 2)])
def test_preempted_sequence_recomputes_only_tokens_outside_full_blocks(checkpoint, num_steps, again):
    """After n steps, it has 20 + n tokens, the last of which is not computed. Nothing was evicted."""
    engine = scripted_engine(checkpoint, 16)
    engine.add_request("a", PROMPT, params(9))
    for _ in range(num_steps):
        step(engine)
    engine.scheduler._preempt(engine.scheduler.running[0], None)
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
        engine.scheduler._preempt(seq, None)
    step(engine)
    assert engine.executor.steps[-1] == [("a", 1), ("a", 4), ("a", 4)], "24 of 28 tokens are hits"
    tables = [seq.block_table for seq in samples if not seq.finished]
    assert len({tuple(table[:4]) for table in tables}) == 1, "the prompt is in the pool once"
    assert answers(run_to_the_end(engine)["a"]) == [answer_alone(PROMPT[:18], 12, 3, i) for i in range(3)]


def test_preempted_sequence_is_evicted_only_as_far_as_others_need_room(checkpoint):
    """Request b is preempted for a, which takes one block, the end of b's text. Later b finds 12 of its 17 tokens."""
    engine = scripted_engine(checkpoint, 8, offload_policy="recompute")
    engine.add_request("a", PROMPT[:15], params(6)), engine.add_request("b", PROMPT[4:20], params(3))
    ended = run_to_the_end(engine)
    assert engine.scheduler.num_preemptions == 1
    assert [answers(ended["a"]), answers(ended["b"])] == [
        [answer_alone(PROMPT[:15], 6)],
        [answer_alone(PROMPT[4:20], 3)],
    ]
    assert [("b", 5)] in engine.executor.steps and engine.executor.num_tokens == 15 + 5 + 16 + 5 + 1


# Samples and beams


@pytest.mark.parametrize("num_tokens, computed", [(18, 1 + 3 * 3), (17, 3 * 3), (20, 3 + 3 * 3)])
def test_samples_of_a_prompt_hit_once(checkpoint, num_tokens, computed):
    """With all but the last token cached, they fork in the next step, and nothing runs in this one."""
    engine = scripted_engine(checkpoint, 32)
    serve(engine, PROMPT)
    before, queries = engine.executor.num_tokens, engine.kv_cache_manager.prefix_cache_stats.queries
    output = serve(engine, PROMPT[:num_tokens], n=3, temperature=1.0, seed=5)
    assert answers(output) == [answer_alone(PROMPT[:num_tokens], 3, 5, i) for i in range(3)]
    assert engine.executor.num_tokens - before == computed
    assert engine.kv_cache_manager.prefix_cache_stats.queries - queries == num_tokens


def test_each_sample_caches_its_text_for_the_next_turn(checkpoint):
    engine = scripted_engine(checkpoint, 32)
    output = serve(engine, PROMPT[:18], 7, n=3, temperature=1.0, seed=5)
    for tokens_of in answers(output):
        assert serve_counted(engine, [*PROMPT[:18], *tokens_of, 1], 1) == (24, 2)


def test_search_starts_from_the_cache_and_finds_the_same_beams(checkpoint):
    cold, warm = (LLM(checkpoint, block_size=4) for _ in range(2))
    search = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    warm.generate(PROMPT, params(1))
    [expected], [output] = cold.beam_search([PROMPT], search), warm.beam_search([PROMPT], search)
    assert answers(output) == answers(expected)
    assert warm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 16
    assert len(warm.llm_engine.kv_cache_manager.pool.cached) > 5, "beams fill the cache"
    assert_empty(warm.llm_engine)
    assert answers(warm.generate(PROMPT, params(3))[0]) == answers(cold.generate(PROMPT, params(3))[0])


# On, off and reset


def test_without_caching_nothing_is_hit_and_blocks_are_reused_last_in_first_out(checkpoint):
    engine = scripted_engine(checkpoint, 16, enable_prefix_caching=False)
    assert [serve_counted(engine, PROMPT) for _ in range(2)] == [(0, 22)] * 2
    assert list(engine.kv_cache_manager.pool.free) == list(range(16))


def test_caching_is_on_by_default(checkpoint):
    assert LLM(checkpoint).config.enable_prefix_caching is True


def test_reset_does_nothing_while_a_request_runs(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    stream = llm.stream([PROMPT], params(5))
    next(stream)
    assert llm.reset_prefix_cache() is False
    stream.close()
    assert llm.reset_prefix_cache() is True
    llm.generate(PROMPT, params(1))
    assert llm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 0


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
