"""The engine with two tiers: the same tokens whatever is evicted, and hardly any computed twice.

The model is scripted (scripted.py), and loads take as long as a test wants (tiers.py). Blocks have 4 slots. Two
requests of 12 tokens with 12 output tokens grow to 6 blocks each. By default there are 8, so the second one is
preempted.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ... import build
from ...beam_search import BeamSearch, BeamSearchParams
from ...engine.kv_cache import BlockCopy, KVCache
from ...engine.sequence import Sequence
from ...llm import LLM
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ...requests.tokens import SampledToken
from ...tiers import setup
from ...tiers.cost_model import CostModel
from ...tiers.host_tier import HostTier
from ..testing.engines import (
    Batch,
    ScriptedExecutor,
    answer_alone,
    answers,
    assert_empty,
    chooser,
    params,
    reasons,
    run_to_the_end,
    step,
)
from ..testing.sequences import on_evict, preempt
from ..testing.tiers import CopyFailed, SlowHostTier

FIRST, SECOND = list(range(10, 22)), list(range(50, 62))


class RunFailed(Exception):
    pass


class Lost:
    """An Observer that counts computed tokens of preempted sequences that were in no full block."""

    def __init__(self, block_size: int) -> None:
        self.num_tokens, self._block_size = 0, block_size
        self._computed: dict[Sequence, int] = {}

    def on_admit(self, seq: Sequence, hits: list[int | None]) -> None:
        self._computed[seq] = seq.num_computed_tokens

    def on_fork(self, parent: Sequence, child: Sequence) -> None:
        self._computed[child] = child.num_computed_tokens

    def on_step(self, batch: Batch, updated: list[Sequence]) -> None:
        self._computed |= {seq: seq.num_computed_tokens for seq, _ in batch}

    def on_preempt(self, seq: Sequence, makes_room_for: Sequence | None) -> None:
        self.num_tokens += self._computed.pop(seq) % self._block_size


class CarefulExecutor(ScriptedExecutor):
    """An executor that notices blocks that it may not read or write, and can fail."""

    engine: LLMEngine

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache)
        self.fails: Callable[[], bool] = lambda: False  # before each step of more than one sequence

    def run(self, batch: Batch) -> list[SampledToken | None]:
        if len(batch) > 1 and self.fails():
            raise RunFailed
        manager, size = self.engine.kv_cache_manager, self.engine.config.block_size
        for seq, num_tokens in batch:
            assert manager.is_ready(seq), "it runs although a block has not arrived"
            end = seq.num_computed_tokens + num_tokens
            for block in seq.block_table[seq.num_computed_tokens // size : -(-end // size)]:
                assert manager.pool.ref_counts[block] == 1, "it writes to a shared block"
                assert block not in manager.pool.hashes, "it writes to a cached block"
        return super().run(batch)


class TieredEngine(LLMEngine):
    """An engine with the types of the parts that these tests use."""

    host_tier: SlowHostTier
    executor: CarefulExecutor
    lost: Lost


def engine_of(checkpoint, num_blocks: int = 8, block_size: int = 4, tier: type = SlowHostTier, **knobs) -> TieredEngine:
    """Return an engine whose loads can be slow, and whose copies and model can fail."""
    options: dict[str, Any] = {"watermark": 0.0, "offload_policy": "load", "kv_offloading_tokens": 1000} | knobs
    size: dict[str, Any] = {"block_size": block_size, "kv_cache_tokens": num_blocks * block_size}
    lost = Lost(block_size)
    config = EngineConfig(str(checkpoint), skip_tokenizer_init=True, **size, **options)
    with patch.object(setup, "HostTier", tier):
        engine = TieredEngine(config, observers=[lost], choose_executor=chooser(CarefulExecutor))
    engine.executor.engine, engine.lost = engine, lost
    return engine


def two(checkpoint, max_tokens: int = 12, n: int = 1, **knobs) -> TieredEngine:
    engine = engine_of(checkpoint, **knobs)
    sampling = params(max_tokens, n=n, temperature=1.0, seed=3)
    engine.add_request("a", FIRST, sampling)
    engine.add_request("b", SECOND, sampling)
    return engine


def assert_answered_alone(ended: dict[str, RequestOutput], max_tokens: int = 12) -> None:
    for output in ended.values():
        n = len(output.outputs)
        assert reasons(output) == ["length"] * n, output.error
        assert answers(output) == [answer_alone(output.prompt_token_ids, max_tokens, 3, i) for i in range(n)]


def needed(ended: dict[str, RequestOutput]) -> int:
    """Return the tokens to compute: each prompt once, its last token per sample, and all output but the last token."""
    return sum(len(o.prompt_token_ids) - 1 + sum(map(len, answers(o))) for o in ended.values())


def leave_the_device(engine: LLMEngine, *seqs: Sequence) -> None:
    """Preempt these sequences, and let others use all free blocks."""
    for seq in reversed(seqs):
        preempt(engine.scheduler, seq)
    pool = engine.kv_cache_manager.pool
    blocks = pool.get_new_blocks(len(pool.free))
    engine.kv_cache.blocks[blocks] = -5
    pool.free_blocks(blocks)


# The same tokens, hardly one computed twice


@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("policy", ["load", "recompute"])
def test_every_request_gets_its_own_answer_whatever_the_policy(checkpoint, policy, n, is_caching):
    engine = two(checkpoint, n=n, num_blocks=4 + 4 * n, offload_policy=policy, enable_prefix_caching=is_caching)
    assert_answered_alone(run_to_the_end(engine))
    assert engine.scheduler.num_preemptions > 0
    assert (engine.host_tier.num_blocks_stored > 0) == (policy == "load" and is_caching)


def test_host_of_one_block_has_a_policy_too(checkpoint, monkeypatch):
    measured = CostModel(load_bytes_per_second=1e9, store_bytes_per_second=1e9, tokens_per_second=1.0)
    monkeypatch.setattr(build, "measure", lambda *engine: measured)
    policies = [
        engine_of(checkpoint, offload_policy="auto", kv_offloading_tokens=size).tiers.hit_policy for size in (3, 4)
    ]
    assert policies[0] is None and policies[1] is not None


def test_no_folder_is_opened_if_no_sequence_is_longer_than_a_block(checkpoint, tmp_path):
    """A hit takes a full block and one more token."""
    tiers = [
        engine_of(checkpoint, max_model_len=length, kv_disk_dir=str(tmp_path / str(length))).disk_tier
        for length in (4, 5)
    ]
    assert tiers[0] is None and tiers[1] is not None


@pytest.mark.parametrize("budget", [4, 7, 512])
@pytest.mark.parametrize(("n", "num_blocks"), [(1, 8), (2, 11), (3, 13)])
def test_preempted_sequence_recomputes_only_tokens_outside_full_blocks(checkpoint, n, num_blocks, budget):
    engine = two(checkpoint, n=n, num_blocks=num_blocks, max_num_batched_tokens=budget)
    ended = run_to_the_end(engine)
    assert_answered_alone(ended)
    assert engine.scheduler.num_preemptions > 0 and engine.host_tier.num_blocks_loaded > 0
    assert engine.executor.num_tokens == needed(ended) + engine.lost.num_tokens


def test_recompute_policy_computes_evicted_tokens_twice(checkpoint):
    engine = two(checkpoint, offload_policy="recompute")
    ended = run_to_the_end(engine)
    assert engine.executor.num_tokens > needed(ended) + engine.lost.num_tokens
    assert engine.host_tier.num_blocks == engine.host_tier.num_blocks_stored == 0


# Loads that take time


def slow_b(checkpoint, **knobs) -> TieredEngine:
    """Return an engine where a runs, b has been evicted, and no load arrives."""
    engine = two(checkpoint, num_blocks=16, **knobs)
    for _ in range(2):
        step(engine)
    leave_the_device(engine, *(seq for seq in engine.scheduler.running if seq.request_id == "b"))
    engine.host_tier.arrives = lambda: False
    return engine


def test_others_run_during_a_load_and_the_sequence_runs_after_it(checkpoint):
    engine = slow_b(checkpoint)
    for _ in range(3):
        assert list(step(engine)) == ["a"]
        assert [seq.request_id for seq in engine.scheduler.running] == ["a", "b"]
    engine.host_tier.arrives = lambda: True
    assert list(step(engine)) == ["a", "b"]
    assert not engine.host_tier.loads, "the host's blocks are free again"
    assert_answered_alone(run_to_the_end(engine))


def test_sequence_that_hits_a_loading_block_waits_too(checkpoint):
    engine = slow_b(checkpoint)
    step(engine)
    engine.add_request("c", [*SECOND, 5, 6], params(12, temperature=1.0, seed=3))
    for _ in range(2):
        assert list(step(engine)) == ["a"]
    assert [seq.request_id for seq in engine.scheduler.running] == ["a", "b", "c"]
    _, b, c = engine.scheduler.running
    assert b.block_table[:3] == c.block_table[:3] and engine.host_tier.num_blocks_loaded == 3
    engine.host_tier.arrives = lambda: True
    assert list(step(engine)) == ["a", "b", "c"]
    assert_answered_alone(run_to_the_end(engine))


def test_step_waits_only_if_nothing_can_run(checkpoint):
    engine = slow_b(checkpoint)
    engine.abort_request("a")
    assert step(engine) == {} and not engine.host_tier.loads, "it waited"
    assert list(step(engine)) == ["b"]
    assert_answered_alone(run_to_the_end(engine))


def test_samples_of_a_cached_prompt_run_at_once_during_another_load(checkpoint):
    """Request c hits all of its prompt but the last token, which each sample computes, so nothing waits for b."""
    engine = slow_b(checkpoint)
    engine.abort_request("a")
    engine.add_request("c", FIRST[:9], params(12, n=2, temperature=1.0, seed=3))
    outputs = step(engine)
    assert list(outputs) == ["c"] and engine.executor.steps[-1] == [("c", 1), ("c", 1)]
    assert engine.host_tier.loads, "b is still loading"
    assert_answered_alone(run_to_the_end(engine))


@pytest.mark.parametrize("n", [1, 3])
def test_aborting_a_loading_sequence_does_not_wait_and_leaks_nothing(checkpoint, n):
    engine = slow_b(checkpoint, n=n)
    step(engine)
    assert engine.host_tier.loads
    output = engine.abort_request("b")
    assert output is not None and reasons(output) == ["abort"] * n
    assert engine.host_tier.loads and engine.host_tier.arriving(), "the load continues, to blocks that it holds"
    engine.kv_cache_manager.check_integrity()
    assert_answered_alone(run_to_the_end(engine))
    engine.add_request("b", SECOND, params(12, temperature=1.0, seed=3))
    assert_answered_alone(run_to_the_end(engine))


def test_sequence_preempted_during_its_load_returns(checkpoint):
    engine = slow_b(checkpoint)
    step(engine)
    leave_the_device(engine, engine.scheduler.running[-1])
    assert engine.host_tier.loads, "nothing waited"
    ended = run_to_the_end(engine)
    assert_answered_alone(ended)
    assert engine.executor.num_tokens == needed(ended) + engine.lost.num_tokens


def test_single_sequence_waits_for_blocks_held_by_a_load(checkpoint):
    """Loads arrive only when something waits. The pool has 9 blocks: a needs 8, and a load for preempted b holds 3."""
    engine = two(checkpoint, max_tokens=20, num_blocks=9)
    for _ in range(2):
        step(engine)
    leave_the_device(engine, engine.scheduler.running[-1])
    engine.host_tier.arrives = lambda: False
    step(engine)
    assert engine.host_tier.loads
    preempt(engine.scheduler, engine.scheduler.running[-1])
    assert_answered_alone(run_to_the_end(engine), max_tokens=20)


def test_beam_search_waits_for_the_start_of_its_prompt(checkpoint):
    config = EngineConfig(str(checkpoint), block_size=4, kv_cache_tokens=44, offload_policy="load")
    with patch.object(setup, "HostTier", SlowHostTier):
        engine = LLMEngine(config)  # with a real model; loads arrive only when something waits
    engine.host_tier.arrives = lambda: False
    search = BeamSearch(engine, BeamSearchParams(beam_width=2, max_tokens=3))
    first = search.run("a", FIRST)
    assert engine.host_tier.num_blocks_loaded == 0
    engine.add_request("b", FIRST, params(2))
    run_to_the_end(engine)
    leave_the_device(engine)
    assert answers(search.run("c", FIRST)) == answers(first)
    assert engine.host_tier.num_blocks_loaded > 0
    assert_empty(engine)


def test_beam_search_waits_for_blocks_that_an_abandoned_load_holds(checkpoint):
    """The pool has 5 blocks: the prompt needs 4, and the load of a request that was aborted holds 2."""
    config = EngineConfig(str(checkpoint), block_size=4, kv_cache_tokens=20, offload_policy="load")
    with patch.object(setup, "HostTier", SlowHostTier):
        engine = LLMEngine(config)
    engine.add_request("a", FIRST, params(2))
    run_to_the_end(engine)
    leave_the_device(engine)
    engine.host_tier.arrives = lambda: False
    engine.add_request("b", FIRST, params(2))
    engine.add_request("c", [1, 2, 3, 4], params(2))
    engine.step()
    for name in "bc":
        engine.abort_request(name)
    assert engine.host_tier.loads
    output = BeamSearch(engine, BeamSearchParams(beam_width=2, max_tokens=3)).run("d", [*SECOND, 1])
    assert output.error is None
    assert_empty(engine)


@pytest.mark.parametrize("n", [1, 2])
def test_real_model_gives_the_same_answers_from_a_small_pool(checkpoint, n):
    prompts = [[3 + (7 * i + j) % 300 for j in range(12)] for i in range(4)]
    sampling = SamplingParams(n=n, seed=5, max_tokens=14, ignore_eos=True)
    knobs = {"block_size": 4, "offload_policy": "load", "kv_offloading_tokens": 400, "watermark": 0.0}
    small, large = (LLM(checkpoint, kv_cache_tokens=tokens, **knobs) for tokens in (48, 800))
    token_ids, expected = (llm.generate(prompts, sampling) for llm in (small, large))
    assert [answers(output) for output in token_ids] == [answers(output) for output in expected]
    assert small.llm_engine.scheduler.num_preemptions > 0 and small.llm_engine.host_tier.num_blocks_loaded > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [1, 3])
def test_answers_are_the_same_on_a_gpu(checkpoint, n):
    """The copies are real."""
    engine = engine_of(checkpoint, num_blocks=13, tier=HostTier, device="cuda", dtype="float32")
    for name, prompt in (("a", FIRST), ("b", SECOND), ("c", FIRST[::-1])):
        engine.add_request(name, prompt, params(12, n=n, temperature=1.0, seed=3))
    ended = run_to_the_end(engine)
    assert_answered_alone(ended)
    assert engine.host_tier.num_blocks_loaded > 0
    assert engine.executor.num_tokens == needed(ended) + engine.lost.num_tokens


# Copies that raise


@pytest.mark.parametrize("verb", ["store", "load"])
def test_failed_copy_is_an_error_of_the_step_and_the_next_one_continues(checkpoint, verb):
    engine = two(checkpoint)
    copy = getattr(engine.host_tier, verb)
    calls: list[str] = []

    def fail_once(*what):
        calls.append(verb)
        if len(calls) == 1:
            raise CopyFailed(verb)
        return copy(*what)

    if verb == "store":
        on_evict(engine.kv_cache_manager.pool, fail_once)
    else:
        engine.host_tier.load = fail_once
    ended: dict[str, RequestOutput] = {}
    while not calls and engine.has_unfinished_requests():
        try:
            ended |= {name: output for name, output in step(engine).items() if output.finished}
        except CopyFailed:
            assert not engine.scheduler.running and engine.scheduler.waiting
            engine.kv_cache_manager.check_integrity()
    ended |= run_to_the_end(engine)
    assert_answered_alone(ended)
    assert ended.keys() == {"a", "b"} and len(calls) > 1


# Random histories


class History:
    """Requests that start alike, aborts, slow loads, failing copies and steps, on tiers of any size."""

    def __init__(self, checkpoint, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        size = rng.choice([1, 2, 4, 4, 8])
        self.engine = engine_of(
            checkpoint,
            num_blocks=rng.randrange(6, 60) // size + 2,
            kv_offloading_tokens=size * rng.choice([0, 1, 4, 40, 40]),
            block_size=size,
            max_num_seqs=rng.choice([1, 2, 4, 32]),
            max_num_batched_tokens=rng.choice([1, 3, 8, 64]),
            watermark=rng.choice([0.0, 0.0, 0.05, 0.3]),
            enable_prefix_caching=rng.random() < 0.85,
        )
        late, failing, raising = rng.choice([0.0, 0.9, 0.99]), rng.choice([0.0, 0.1]), rng.choice([0.0, 0.1])
        self.engine.host_tier.arrives = lambda: rng.random() >= late
        self.engine.host_tier.fails = lambda: rng.random() < failing
        self.engine.executor.fails = lambda: rng.random() < raising
        copy_blocks = self.engine.kv_cache.copy_blocks

        def copy_or_fail(copies: list[BlockCopy]) -> None:
            if copies and rng.random() < failing:
                raise CopyFailed("a copy on the device")
            copy_blocks(copies)

        self.engine.kv_cache.copy_blocks = copy_or_fail  # type: ignore[method-assign]
        self.texts = [[rng.randrange(320) for _ in range(25)] for _ in range(2)]
        self.sent: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.num_seen: Counter[str] = Counter()

    def arrive(self, number: int) -> None:
        rng = self.rng
        prompt = rng.choice(self.texts)[: rng.randrange(25)] + [rng.randrange(320) for _ in range(rng.randrange(1, 8))]
        sampling = params(rng.randrange(1, 20), n=rng.choice([1, 1, 2, 3, 5]), temperature=1.0, seed=rng.randrange(9))
        try:
            self.engine.add_request(str(number), prompt, sampling)
            self.sent[str(number)] = prompt, sampling
        except ValueError as error:
            assert "the prompt must fit the pool" in str(error)

    def abort(self) -> None:
        output = self.engine.abort_request(str(self.rng.randrange(len(self.sent) + 1)))
        self.engine.kv_cache_manager.check_integrity()
        if output:
            self.end(output)

    def step(self) -> None:
        try:
            outputs = step(self.engine)
        except CopyFailed:
            assert not self.engine.scheduler.running, "nothing may run on blocks that were not copied"
            self.engine.kv_cache_manager.check_integrity()
            self.num_seen["failed"] += 1
            return
        self.num_seen["slow"] += bool(self.engine.host_tier.loads)
        for output in outputs.values():
            if output.finished:
                self.end(output)

    def end(self, output: RequestOutput) -> None:
        prompt, sampling = self.sent[output.request_id]
        assert output.request_id not in self.ended and len(output.outputs) == sampling.n
        self.ended[output.request_id] = output
        for i, (token_ids, reason) in enumerate(zip(answers(output), reasons(output), strict=True)):
            assert token_ids == answer_alone(prompt, len(token_ids), sampling.seed, i)
            if reason == "length":
                assert len(token_ids) == sampling.max_tokens
            elif reason == "error":
                size, num_blocks = self.engine.config.block_size, self.engine.kv_cache.num_blocks
                assert -(-(len(prompt) + len(token_ids)) // size) > num_blocks, output.error
            else:
                assert reason == "abort"

    def run(self, num_requests: int) -> None:
        number = 0
        while number < num_requests or self.engine.has_unfinished_requests():
            if number < num_requests and self.rng.random() < 0.3:
                self.arrive(number)
                number += 1
            if self.rng.random() < 0.03:
                self.abort()
            self.step()
            self.num_seen["steps"] += 1
            assert self.num_seen["steps"] < 20_000, "it does not end"
        assert_empty(self.engine)
        assert self.ended.keys() == self.sent.keys()
        host = self.engine.host_tier
        self.num_seen += Counter(stored=host.num_blocks_stored, loaded=host.num_blocks_loaded)
        self.num_seen["preempted"] += self.engine.scheduler.num_preemptions


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_random_histories_give_every_request_its_own_answer(checkpoint, seed):
    seen: Counter[str] = Counter()
    for i in range(20):
        history = History(checkpoint, 1000 * seed + i)
        history.run(history.rng.randrange(1, 20))
        seen += history.num_seen
    assert min(seen[kind] for kind in ("failed", "slow", "stored", "loaded", "preempted")) > 10, f"too little: {seen}"
