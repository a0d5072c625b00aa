"""n samples of a prompt in an engine: the same tokens as in n runs, for the price of one prompt.

The model is mostly scripted, and its answers depend on every slot that a sequence reads. Sample i of a seeded request
answers `answer_alone(..., i)`.
"""

import random
import weakref

import pytest

from ...llm import LLM
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ..testing.engines import (
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
from ..testing.reference import greedy_without_cache
from ..testing.sequences import preempt


def seeded(max_tokens: int, n: int, seed: int = 3, **options) -> SamplingParams:
    return params(max_tokens, n=n, temperature=1.0, seed=seed, **options)


def answers_of(prompt: list[int], num_tokens: int, n: int, seed: int = 3) -> list[list[int]]:
    return [answer_alone(prompt, num_tokens, seed, i) for i in range(n)]


def serve(engine: LLMEngine, prompt: list[int], sampling: SamplingParams) -> RequestOutput:
    engine.add_request("a", prompt, sampling)
    return run_to_the_end(engine)["a"]


def with_tokens(engine: LLMEngine, request_id: str, *outputs: list[int]) -> None:
    """Give the request's samples these tokens, as if they had been preempted."""
    for seq, output in zip(engine.requests[request_id], outputs, strict=True):
        seq.token_ids += output


# One prompt, many samples


def test_samples_are_ordered_by_index_and_each_has_its_own_answer(checkpoint):
    output = serve(scripted_engine(checkpoint, num_blocks=40), [1] * 6, seeded(10, n=4))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert answers(output) == answers_of([1] * 6, 10, n=4)
    assert len({tuple(tokens) for tokens in answers(output)}) == 4


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("n", [2, 5])
def test_prompt_goes_through_the_model_once(checkpoint, num_prompt_tokens, n):
    """Only its last token is computed by each sample."""
    engine = scripted_engine(checkpoint, num_blocks=40)
    serve(engine, [1] * num_prompt_tokens, seeded(7, n))
    assert engine.executor.num_tokens == num_prompt_tokens - 1 + 7 * n


@pytest.mark.parametrize("num_prompt_tokens, num_copies", [(1, 0), (2, 3), (5, 0), (7, 3), (8, 3), (9, 0), (12, 3)])
def test_shared_block_is_copied_for_each_sample_but_one_unless_the_last_token_starts_it(
    checkpoint, num_prompt_tokens, num_copies
):
    engine = scripted_engine(checkpoint, num_blocks=40)
    serve(engine, [1] * num_prompt_tokens, seeded(9, n=4))
    assert engine.kv_cache.num_blocks_copied == num_copies


def test_copies_of_a_step_are_one_batch_before_its_writes(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=40)
    calls: list[str] = []
    copy_blocks, run = engine.kv_cache.copy_blocks, engine.executor.run
    engine.kv_cache.copy_blocks = lambda copies: (calls.append(f"{len(copies)} copies"), copy_blocks(copies))
    engine.executor.run = lambda batch: (calls.append("run"), run(batch))[1]
    for name, n in (("a", 3), ("b", 2)):
        engine.add_request(name, [1] * 6, seeded(3, n))
    run_to_the_end(engine)
    assert calls == ["run", "3 copies", "run", "run", "run"]


def test_request_is_returned_once_per_step_with_all_its_samples(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=40)
    engine.add_request("a", [1] * 6, seeded(3, n=3)), engine.add_request("b", [2], params(2))
    assert [output.request_id for output in engine.step()] == ["b"], "a has samples to fork"
    for num_tokens in (1, 2, 3):
        outputs = engine.step()
        assert [output.request_id for output in outputs] == ["a", "b"][: 1 + (num_tokens < 2)]
        assert answers(outputs[0]) == answers_of([1] * 6, num_tokens, n=3)
        assert outputs[0].finished == (num_tokens == 3)


def test_request_ends_with_its_last_sample(checkpoint):
    """Each sample stops at a token of its own, and then reports its end and frees its blocks at once."""
    tokens = answers_of([1] * 6, 12, n=3)
    stops = [next(t for t in tokens[i][k:] if sum(t in other for other in tokens) == 1) for i, k in ((0, 5), (1, 2))]
    ends = [tokens[0].index(stops[0]) + 1, tokens[1].index(stops[1]) + 1, 12]
    assert ends[1] < ends[0] < 12, "choose another prompt"
    engine = scripted_engine(checkpoint, num_blocks=40)
    engine.add_request("a", [1] * 6, seeded(12, n=3, stop_token_ids=stops))
    samples = engine.requests["a"]
    step(engine)
    for num_tokens in range(1, 13):
        output = step(engine)["a"]
        assert [len(answer) for answer in answers(output)] == [min(num_tokens, end) for end in ends]
        assert reasons(output) == [None if num_tokens < end else "length" if end == 12 else "stop" for end in ends]
        assert output.finished == (num_tokens == 12) == (output.metrics.finished_time is not None)
        assert len(engine.scheduler.running) == sum(num_tokens < end for end in ends)
    times = [seq.metrics.finished_time for seq in samples]
    assert output.metrics.finished_time == times[2] > times[0] > times[1]
    assert_empty(engine)


@pytest.mark.parametrize("n, num_prompts", [(3, 1), (4, 2), (7, 3)])
def test_more_samples_than_seats_compute_the_prompt_once_for_each_group(checkpoint, n, num_prompts):
    engine = scripted_engine(checkpoint, num_blocks=40, max_num_seqs=3, enable_prefix_caching=False)
    assert answers(serve(engine, [1] * 6, seeded(5, n))) == answers_of([1] * 6, 5, n)
    assert engine.executor.num_tokens == 5 * num_prompts + 5 * n


@pytest.mark.parametrize("budget", [1, 3, 512])
@pytest.mark.parametrize("num_blocks", [4, 12, 60])
def test_samples_do_not_depend_on_chunks_or_preemption(checkpoint, num_blocks, budget):
    """Requests of 1 to 4 samples run in pools down to the size of one sample."""
    engine = scripted_engine(checkpoint, num_blocks, max_num_batched_tokens=budget)
    prompts_and_n = {str(i): ([i + 1] * num_tokens, 1 + i % 4) for i, num_tokens in enumerate([3, 6, 8, 1, 9, 4, 2, 5])}
    for name, (prompt, n) in prompts_and_n.items():
        engine.add_request(name, prompt, seeded(6, n))
    ended = run_to_the_end(engine)
    for name, (prompt, n) in prompts_and_n.items():
        assert answers(ended[name]) == answers_of(prompt, 6, n) and reasons(ended[name]) == ["length"] * n
    assert engine.scheduler.num_preemptions > 0 or num_blocks == 60 or budget <= 3
    assert engine.kv_cache.num_blocks_copied > 0


# Preemption, and pools that are too small


def test_each_sample_that_outgrows_the_pool_fails_and_the_others_continue(checkpoint):
    """Sample 1 ends with its first token. The others get 6 each, as if alone, and b gets all of its tokens."""
    tokens = answers_of([1] * 7, 9, n=3)
    assert not {tokens[1][0]} & {*tokens[0], *tokens[2]}, "choose another seed"
    engine = scripted_engine(checkpoint, num_blocks=3)
    engine.add_request("a", [1] * 7, seeded(40, n=3, stop_token_ids=[tokens[1][0]]))
    engine.add_request("b", [2] * 3, params(9))
    ended = run_to_the_end(engine)
    assert ended["a"].error == "13 tokens need 4 blocks, the pool has 3"
    assert reasons(ended["a"]) == ["error", "stop", "error"]
    assert answers(ended["a"]) == [tokens[0][:6], tokens[1][:1], tokens[2][:6]]
    assert answers(ended["b"]) == [answer_alone([2] * 3, 9)] and ended["b"].error is None


# Abort


STATES = ["waiting", "mid-prefill", "running", "preempted before the fork", "one is preempted", "one has ended"]


def engine_with_b(checkpoint, state: str) -> LLMEngine:
    """Return an engine with b, of 3 samples, in this state. a is ahead of it, and c, of 2 samples, is behind it."""
    is_early = state in ("mid-prefill", "preempted before the fork")
    seats = 3 if state == "waiting" else 9
    engine = scripted_engine(checkpoint, 40, max_num_batched_tokens=6 if is_early else 32, max_num_seqs=seats)
    tokens = answers_of([2] * 6, 2, n=3)
    assert tokens[0][1] not in (tokens[1][1], tokens[2][1]), "choose another prompt"
    stops = [tokens[0][1]] if state == "one has ended" else []
    engine.add_request("a", [1] * 4, params(20))
    engine.add_request("b", [2] * 6, seeded(20, n=3, stop_token_ids=stops))
    engine.add_request("c", [3] * 3, seeded(4, n=2))
    step(engine)
    if state not in ("waiting", "mid-prefill", "preempted before the fork"):
        step(engine), step(engine)
    first, _, last = samples = engine.requests["b"]
    scheduler = engine.scheduler
    if state == "preempted before the fork":
        preempt(scheduler, first)
    if state == "one is preempted":
        while last in scheduler.running:
            preempt(scheduler, scheduler.running[-1])
    assert_whole(engine)
    num_running = sum(seq in scheduler.running for seq in samples)
    assert {
        "waiting": first in scheduler.waiting and first.num_tokens == 6,
        "mid-prefill": (num_running, first.num_computed_tokens, len(first.to_fork)) == (1, 2, 2),
        "running": num_running == 3 and first.num_tokens == 8,
        "preempted before the fork": first in scheduler.waiting and len(first.to_fork) == 2,
        "one is preempted": num_running == 2 and last in scheduler.waiting and last.num_tokens == 8,
        "one has ended": num_running == 2 and first.finished,
    }[state]
    return engine


@pytest.mark.parametrize("state", STATES)
def test_abort_ends_all_samples_and_frees_everything_at_once(checkpoint, state):
    engine = engine_with_b(checkpoint, state)
    samples, manager = engine.requests["b"], engine.kv_cache_manager
    others = {block for seq in engine.scheduler.running if seq not in samples for block in seq.block_table}
    tokens = [seq.token_ids[6:] for seq in samples]
    output = engine.abort_request("b")
    assert output.finished and output.error is None and answers(output) == tokens
    assert reasons(output) == ["stop" if state == "one has ended" else "abort", "abort", "abort"]
    assert manager.num_free_blocks == 40 - len(others)
    assert "b" not in engine.requests and engine.abort_request("b") is None
    assert_whole(engine)


@pytest.mark.parametrize("way", ["ended", "aborted", "aborted before the fork", "failed"])
def test_nothing_remains_of_any_sample(checkpoint, way):
    engine = scripted_engine(checkpoint, num_blocks=6)
    engine.add_request("a", [1] * 6, seeded(40 if way == "failed" else 3, n=3))
    seqs = [weakref.ref(seq) for seq in engine.requests["a"]]
    step(engine)
    if way == "aborted":
        step(engine)
    if "aborted" in way:
        engine.abort_request("a")
    run_to_the_end(engine)
    assert [seq() for seq in seqs] == [None] * 3


# A step that fails


def poisoned(engine: LLMEngine, *names: tuple[str, int]) -> None:
    """Make the model raise for batches with one of these: a request, and one of its samples."""
    executor = executor_of(engine)
    run = executor.run

    def runs(batch: Batch) -> list:
        if any((seq.request_id, seq.sample_index) in names for seq, _ in batch):
            raise RuntimeError("poison")
        return run(batch)

    executor.run = runs  # type: ignore[method-assign]


def test_failing_prompt_ends_all_samples_that_wait_for_it(checkpoint):
    """The fourth sample gets no seat next to the others, computes the prompt by itself, and continues."""
    engine = scripted_engine(checkpoint, num_blocks=40, max_num_seqs=3)
    poisoned(engine, ("a", 0))
    engine.add_request("a", [1] * 6, seeded(5, n=4)), engine.add_request("b", [2] * 3, params(5))
    seqs = [weakref.ref(seq) for seq in engine.requests["a"]]
    ended = run_to_the_end(engine)
    assert reasons(ended["a"]) == ["error"] * 3 + ["length"] and ended["a"].error == "RuntimeError: poison"
    assert answers(ended["a"]) == [[], [], [], answers_of([1] * 6, 5, n=4)[3]]
    assert answers(ended["b"]) == [answer_alone([2] * 3, 5)]
    del ended
    assert [seq() for seq in seqs] == [None] * 4


def test_failed_batch_runs_one_by_one_with_its_copies_in_place(checkpoint):
    """The model runs out of memory with more than one sequence."""
    engine = scripted_engine(checkpoint, num_blocks=20)
    run = engine.executor.run

    def runs(batch: Batch) -> list:
        if len(batch) > 1:
            raise RuntimeError("out of memory")
        return run(batch)

    engine.executor.run = runs
    for i in range(4):
        engine.add_request(str(i), [i + 1] * (5 + i), seeded(5, n=1 + i % 3))
    ended = run_to_the_end(engine)
    assert [answers(ended[str(i)]) for i in range(4)] == [
        answers_of([i + 1] * (5 + i), 5, n=1 + i % 3) for i in range(4)
    ]
    assert engine.scheduler.num_preemptions == 0 and engine.kv_cache.num_blocks_copied > 0


@pytest.mark.parametrize("part", ["copies", "admission"])
def test_failed_step_preempts_all_sequences_and_loses_no_copy(checkpoint, part, monkeypatch):
    """It raises in the step in which a forks: its samples have new blocks, and nothing is copied yet."""
    engine = scripted_engine(checkpoint, num_blocks=20)
    engine.add_request("a", [1] * 6, seeded(4, n=3)), step(engine)
    engine.add_request("b", [2] * 5, seeded(4, n=2))

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(
            *((engine.kv_cache, "copy_blocks") if part == "copies" else (engine.scheduler, "_may_admit")), fails
        )
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    assert not engine.scheduler.running and engine.kv_cache_manager.num_free_blocks == 20
    assert_whole(engine)
    ended = run_to_the_end(engine)
    assert answers(ended["a"]) == answers_of([1] * 6, 4, n=3) and answers(ended["b"]) == answers_of([2] * 5, 4, n=2)


def test_copies_for_an_aborted_request_do_not_affect_others(checkpoint):
    """Request c gets the blocks that a's copies were made to, and starts with a prompt that fills them."""
    engine = scripted_engine(checkpoint, num_blocks=8)
    engine.add_request("a", [1] * 6, seeded(4, n=3)), step(engine)
    engine.add_request("b", [2], params(60)), with_tokens(engine, "b", [2] * 40)
    assert list(step(engine)) == ["b", "a"]
    engine.abort_request("a")
    engine.add_request("c", [3] * 26, seeded(3, n=2))
    assert answers(run_to_the_end(engine)["c"]) == answers_of([3] * 26, 3, n=2)


# With a real model


PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15))]


def drawn(n: int, seed: int, **options) -> SamplingParams:
    return SamplingParams(n=n, seed=seed, temperature=1.2, top_p=0.9, max_tokens=16, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def alone(checkpoint) -> list[RequestOutput]:
    """Return 3 samples of each of PROMPTS, one prompt at a time, in a pool with room for all."""
    llm = LLM(checkpoint, block_size=4)
    return [llm.generate([prompt], drawn(3, seed=i))[0] for i, prompt in enumerate(PROMPTS)]


def test_sample_does_not_depend_on_how_many_there_are(checkpoint, alone):
    for n in (2, 5):
        outputs = LLM(checkpoint).generate(PROMPTS, [drawn(n, seed=i) for i in range(4)])
        for output, expected in zip(outputs, alone, strict=True):
            assert answers(output)[:3] == answers(expected)[:n]


def test_samples_without_a_seed_differ(checkpoint):
    llm = LLM(checkpoint)
    prompts_and_n = SamplingParams(n=3, max_tokens=16, ignore_eos=True)
    tokens = [tuple(answer) for _ in range(2) for answer in answers(llm.generate([[1, 5]], prompts_and_n)[0])]
    assert len(set(tokens)) == 6


def test_greedy_samples_match_a_model_without_a_cache(checkpoint, model):
    for prompt in PROMPTS:
        (output,) = LLM(checkpoint, block_size=4).generate([prompt], params(24, n=3))
        assert answers(output) == [greedy_without_cache(model, prompt, 24)] * 3


@pytest.mark.parametrize("num_blocks, budget", [(16, 512), (30, 7), (20, 3)])
def test_samples_are_the_same_in_a_batch_and_with_preemption(checkpoint, alone, num_blocks, budget):
    config = EngineConfig(
        str(checkpoint), block_size=4, kv_cache_tokens=num_blocks * 4, max_num_batched_tokens=budget, watermark=0.0
    )
    engine = LLMEngine(config)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, drawn(3, seed=i))
    ended = run_to_the_end(engine)
    assert (engine.scheduler.num_preemptions > 0) == (budget > 3)
    for i, expected in enumerate(alone):
        assert answers(ended[str(i)]) == answers(expected)
        for completion, other in zip(ended[str(i)].outputs, expected.outputs, strict=True):
            assert completion.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("seed", range(2))
def test_requests_with_one_and_many_samples_run_together(checkpoint, alone, seed):
    rng = random.Random(seed)
    engine = LLMEngine(EngineConfig(str(checkpoint), block_size=4, kv_cache_tokens=80, max_num_batched_tokens=9))
    ended: dict[str, RequestOutput] = {}
    for i in rng.sample(range(4), 4):
        n = rng.randint(1, 3)
        engine.add_request(f"stranger {i}", [20 + i] * rng.randint(1, 12), drawn(rng.randint(1, 3), seed=9))
        engine.add_request(f"{i} {n}", PROMPTS[i], drawn(n, seed=i))
        for _ in range(rng.randint(0, 6)):
            ended |= {name: output for name, output in step(engine).items() if output.finished}
        engine.abort_request(f"stranger {rng.randrange(4)}")
    ended |= run_to_the_end(engine)
    prompts_and_n = [name.split() for name in ended if not name.startswith("stranger")]
    assert len(prompts_and_n) == 4
    for i, n in prompts_and_n:
        assert answers(ended[f"{i} {n}"]) == answers(alone[int(i)])[: int(n)]
