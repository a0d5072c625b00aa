"""n samples of a prompt in an engine: the same tokens as n runs, for the price of one prompt.

Most of the model is scripted: its answers depend on every slot that a sequence reads. Sample i of a seeded request says
`said_alone(..., i)`, and half of the time what its siblings say.
"""

import random
import weakref
from collections import Counter

import pytest

from ..config import EngineConfig
from ..engine import LLMEngine
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .helpers import greedy_without_cache, next_logits
from .scripted import (
    ScriptedEngine,
    answers,
    assert_empty,
    assert_whole,
    params,
    reasons,
    run_to_the_end,
    said_alone,
    scripted_engine,
    step,
)


def seeded(max_tokens: int, n: int, seed: int = 3, **options) -> SamplingParams:
    return params(max_tokens, n=n, temperature=1.0, seed=seed, **options)


def said_by(prompt: list[int], num_tokens: int, n: int, seed: int = 3) -> list[list[int]]:
    return [said_alone(prompt, num_tokens, seed, i) for i in range(n)]


def serve(engine: LLMEngine, prompt: list[int], sampling: SamplingParams) -> RequestOutput:
    engine.add_request("a", prompt, sampling)
    return run_to_the_end(engine)["a"]


def with_tokens(engine: LLMEngine, request_id: str, *outputs: list[int]) -> None:
    """As if the samples had got these already, and had been preempted."""
    for seq, output in zip(engine._requests[request_id], outputs, strict=True):
        seq.token_ids += output


# One prompt, many samples


def test_samples_are_in_the_order_of_their_index_and_each_says_its_own(checkpoint):
    output = serve(scripted_engine(checkpoint, num_blocks=40), [1] * 6, seeded(10, n=4))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert answers(output) == said_by([1] * 6, 10, n=4)
    assert len({tuple(said) for said in answers(output)}) == 4


def test_greedy_samples_are_all_the_same(checkpoint):
    output = serve(scripted_engine(checkpoint, num_blocks=40), [1] * 6, params(10, n=3))
    assert answers(output) == [said_alone([1] * 6, 10)] * 3


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("n", [2, 5])
def test_the_prompt_goes_through_the_model_once(checkpoint, num_prompt_tokens, n):
    engine = scripted_engine(checkpoint, num_blocks=40)
    serve(engine, [1] * num_prompt_tokens, seeded(7, n))
    assert engine.model_runner.num_tokens == num_prompt_tokens + 6 * n


@pytest.mark.parametrize("num_prompt_tokens, num_copies", [(5, 3), (7, 3), (8, 0), (9, 3), (12, 0)])
def test_a_block_is_copied_for_each_sample_but_one_if_the_prompt_ends_inside_it(
    checkpoint, num_prompt_tokens, num_copies
):
    engine = scripted_engine(checkpoint, num_blocks=40)
    serve(engine, [1] * num_prompt_tokens, seeded(9, n=4))
    assert engine.kv_cache.num_blocks_copied == num_copies


def test_the_blocks_of_the_prompt_are_held_once(checkpoint):
    """18 tokens are 5 blocks; of 3 samples each writes to a copy of the last."""
    engine = scripted_engine(checkpoint, num_blocks=40)
    engine.add_request("a", [1] * 18, seeded(3, n=3))
    held = []
    while engine.has_unfinished_requests():
        step(engine)
        held.append(engine.kv_cache_manager.num_blocks - engine.kv_cache_manager.num_free_blocks)
    assert held == [5, 7, 0]
    assert engine.peak.used == 16 + 3 * 4 and engine.peak.held == 7 * 4


def test_the_copies_of_a_step_are_one_batch_before_its_writes(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=40)
    calls: list[str] = []
    copy_blocks, run = engine.kv_cache.copy_blocks, engine.model_runner.run
    engine.kv_cache.copy_blocks = lambda copies: (calls.append(f"{len(copies)} copies"), copy_blocks(copies))
    engine.model_runner.run = lambda batch: (calls.append("run"), run(batch))[1]
    for name, n in (("a", 3), ("b", 2)):
        engine.add_request(name, [1] * 6, seeded(3, n))
    run_to_the_end(engine)
    assert calls == ["0 copies", "run", "3 copies", "run", "0 copies", "run"]


def test_a_request_is_told_once_a_step_with_all_its_samples(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=40)
    engine.add_request("a", [1] * 6, seeded(3, n=3)), engine.add_request("b", [2], params(2))
    for num_tokens in (1, 2, 3):
        outputs = engine.step()
        assert [output.request_id for output in outputs] == ["a", "b"][: 1 + (num_tokens < 3)]
        assert answers(outputs[0]) == said_by([1] * 6, num_tokens, n=3)
        assert outputs[0].finished == (num_tokens == 3)


def test_a_request_ends_with_its_last_sample(checkpoint):
    """Each stops at a token of its own; who has ended says so at once, and its blocks are free."""
    said = said_by([1] * 6, 12, n=3)
    stops = [next(t for t in said[i][k:] if sum(t in other for other in said) == 1) for i, k in ((0, 5), (1, 2))]
    ends = [said[0].index(stops[0]) + 1, said[1].index(stops[1]) + 1, 12]
    assert ends[1] < ends[0] < 12, "choose another prompt"
    engine = scripted_engine(checkpoint, num_blocks=40)
    engine.add_request("a", [1] * 6, seeded(12, n=3, stop_token_ids=stops))
    group = engine._requests["a"]
    for num_tokens in range(1, 13):
        output = step(engine)["a"]
        assert [len(answer) for answer in answers(output)] == [min(num_tokens, end) for end in ends]
        assert reasons(output) == [None if num_tokens < end else "length" if end == 12 else "stop" for end in ends]
        assert output.finished == (num_tokens == 12) == (output.metrics.finished_time is not None)
        assert len(engine.kv_cache_manager.report().tables) == sum(num_tokens < end for end in ends)
    times = [seq.metrics.finished_time for seq in group]
    assert output.metrics.finished_time == times[2] > times[0] > times[1]
    assert_empty(engine)


def test_more_samples_than_may_run_are_refused_with_both_numbers_and_leave_nothing(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=40, max_num_seqs=3)
    for n in (4, 10**12):  # refused before a sequence is made for each
        with pytest.raises(ValueError, match=f"n is {n}, max_num_seqs is 3"):
            engine.add_request("a", [1] * 6, params(3, n=n))
    assert_empty(engine)
    assert answers(serve(engine, [1] * 6, params(3, n=3))) == [said_alone([1] * 6, 3)] * 3


def test_in_a_batch_the_refused_is_an_error_in_its_place(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256, max_num_seqs=2)
    outputs = llm.generate([[1], [2]], [params(3, n=3), params(3, n=2)])
    assert outputs[0].error == "n is 3, max_num_seqs is 2" and reasons(outputs[1]) == ["length"] * 2


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 512])
@pytest.mark.parametrize("num_blocks", [9, 12, 60])
def test_samples_do_not_depend_on_chunks_or_preemption(checkpoint, num_blocks, budget):
    """Requests of 1 to 4 samples; the smallest pool has room for one of them at a time."""
    engine = scripted_engine(checkpoint, num_blocks, max_num_batched_tokens=budget)
    asked = {str(i): ([i + 1] * num_tokens, 1 + i % 4) for i, num_tokens in enumerate([3, 6, 8, 1, 9, 4, 2, 5])}
    for name, (prompt, n) in asked.items():
        engine.add_request(name, prompt, seeded(6, n))
    ended = run_to_the_end(engine)
    for name, (prompt, n) in asked.items():
        assert answers(ended[name]) == said_by(prompt, 6, n) and reasons(ended[name]) == ["length"] * n
    assert engine.scheduler.num_preemptions > 0 or num_blocks == 60 or budget <= 3


# Preemption


def test_a_group_that_comes_back_computes_what_its_samples_share_once(checkpoint):
    """What each has of its own are its tokens from the first on in which it differs from sample 0."""
    engine = scripted_engine(checkpoint, num_blocks=40)
    engine.add_request("a", [1] * 6, seeded(12, n=3))
    for _ in range(8):
        step(engine)
    group = engine._requests["a"]
    alike = [next(i for i in range(14) if seq.token_ids[i] != group[0].token_ids[i]) for seq in group[1:]]
    assert min(alike) > 6, "they begin with the same draw, too: choose another seed"
    engine.scheduler._preempt(group)
    before = engine.model_runner.num_tokens
    for _ in range(2):
        step(engine)
    assert engine.model_runner.num_tokens - before == (14 + 1) + sum(14 - num_tokens for num_tokens in alike)
    assert answers(run_to_the_end(engine)["a"]) == said_by([1] * 6, 12, n=3)


def test_a_group_comes_back_to_the_blocks_that_it_shared(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=40)
    engine.add_request("a", [1] * 9, seeded(12, n=4))
    step(engine), step(engine)
    num_free = engine.kv_cache_manager.num_free_blocks
    engine.scheduler._preempt(engine._requests["a"])
    assert engine.kv_cache_manager.num_free_blocks == 40
    step(engine)
    assert engine.kv_cache_manager.num_free_blocks >= num_free
    tables = [seq.block_table[:2] for seq in engine._requests["a"]]
    assert tables == [tables[0]] * 4


@pytest.mark.parametrize(
    "outputs",
    [
        [[5, 6, 7], [5, 6, 7], [5, 6, 7]],
        [[5, 6, 7], [5, 6, 7], [5, 9, 7]],
        [[5, 6, 7, 8, 9], [5, 6], [5, 6, 7]],
        [[5], [5, 6, 7, 8, 9], [5, 6, 7, 8]],
        [[5], [6, 6, 6, 6, 6, 6], [7]],
        [[5, 6, 7], [5], [5, 6]],
    ],
    ids=str,
)
@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 6])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 512])
def test_whatever_samples_share_they_go_on_as_if_each_were_alone(checkpoint, outputs, num_prompt_tokens, budget):
    """Equal ones, ones that are the beginning of others, of their leader, or of which the leader is the beginning."""
    engine = scripted_engine(checkpoint, num_blocks=40, max_num_batched_tokens=budget)
    prompt = [1] * num_prompt_tokens
    engine.add_request("a", prompt, params(12, n=3))
    with_tokens(engine, "a", *outputs)
    expected = [output + said_alone(prompt + output, 12 - len(output)) for output in outputs]
    assert answers(run_to_the_end(engine)["a"]) == expected


def test_a_group_that_cannot_fit_any_more_ends_with_an_error_and_the_others_go_on(checkpoint):
    """3 samples of 6 tokens and more come to 7 of 6 blocks; b, preempted for their sake, gets all its tokens."""
    engine = scripted_engine(checkpoint, num_blocks=6)
    engine.add_request("a", [1] * 6, seeded(40, n=3)), engine.add_request("b", [2] * 3, params(9))
    ended = run_to_the_end(engine)
    assert ended["a"].error == "3 samples, 27 tokens in all, need 7 blocks, the pool has 6"
    assert reasons(ended["a"]) == ["error"] * 3 and answers(ended["a"]) == said_by([1] * 6, 3, n=3)
    assert answers(ended["b"]) == [said_alone([2] * 3, 9)] and ended["b"].error is None


def test_samples_that_have_ended_keep_their_end_when_the_others_fail(checkpoint):
    """With the first token of sample 1 for a stop token, if the others do not say it."""
    said = said_by([1] * 7, 9, n=2, seed=1)
    assert said[0][0] != said[1][0] and said[0][0] not in said[1], "choose another seed"
    engine = scripted_engine(checkpoint, num_blocks=3)
    output = serve(engine, [1] * 7, seeded(40, n=2, seed=1, stop_token_ids=[said[0][0]]))
    assert reasons(output) == ["stop", "error"] and output.error == "13 tokens need 4 blocks, the pool has 3"
    assert answers(output) == [said[0][:1], said[1][:6]]


# Abort


STATES = ["waiting", "mid-prefill", "running", "preempted", "coming back", "one has ended"]


def engine_with_b(checkpoint, state: str) -> ScriptedEngine:
    """b has 3 samples and is in that state; a runs before it and c, of 2 samples, comes behind it."""
    budget = 6 if state == "mid-prefill" else 32
    engine = scripted_engine(checkpoint, 40, max_num_batched_tokens=budget, max_num_seqs=3 if state == "waiting" else 9)
    said = said_by([2] * 6, 2, n=3)
    assert said[0][1] not in (said[1][1], said[2][1]), "choose another prompt"
    stops = [said[0][1]] if state == "one has ended" else []
    engine.add_request("a", [1] * 4, params(20))
    engine.add_request("b", [2] * 6, seeded(20, n=3, stop_token_ids=stops))
    engine.add_request("c", [3] * 3, seeded(4, n=2))
    step(engine)
    if state not in ("waiting", "mid-prefill"):
        step(engine), step(engine)
    group = engine._requests["b"]
    if state in ("preempted", "coming back"):
        while engine.scheduler.running[-1] is not group[-1]:
            engine.scheduler._preempt([seq for seq in engine.scheduler.running if seq.request_id == "c"])
        engine.scheduler._preempt(group)
    if state == "coming back":
        engine.scheduler._max_num_batched_tokens = 6
        step(engine)
    num_held = sum(bool(seq.block_table) for seq in group)
    waits = all(seq in engine.scheduler.waiting for seq in group)
    assert {
        "waiting": waits and group[0].num_tokens == 6,
        "mid-prefill": (num_held, group[0].num_computed_tokens, len(group[0].followers)) == (1, 2, 2),
        "running": num_held == 3 and group[0].num_tokens == 9,
        "preempted": waits and group[0].num_tokens == 9,
        "coming back": (num_held, group[0].num_computed_tokens, len(group[0].followers)) == (1, 5, 2),
        "one has ended": num_held == 2 and group[0].finished,
    }[state]
    return engine


@pytest.mark.parametrize("state", STATES)
def test_abort_ends_all_samples_and_frees_everything_at_once(checkpoint, state):
    engine = engine_with_b(checkpoint, state)
    group, manager = engine._requests["b"], engine.kv_cache_manager
    others = {block for seq in engine.scheduler.running if seq not in group for block in seq.block_table}
    said = [seq.token_ids[6:] for seq in group]
    output = engine.abort_request("b")
    assert output.finished and output.error is None and answers(output) == said
    assert reasons(output) == ["stop" if state == "one has ended" else "abort", "abort", "abort"]
    assert manager.num_free_blocks == 40 - len(others)
    assert not engine.has_request("b") and engine.abort_request("b") is None
    assert_whole(engine)


@pytest.mark.parametrize("state", STATES)
def test_after_an_abort_the_others_say_what_they_say_alone(checkpoint, state):
    engine = engine_with_b(checkpoint, state)
    engine.abort_request("b")
    ended = run_to_the_end(engine)
    assert answers(ended["a"]) == [said_alone([1] * 4, 20)]
    assert "c" not in ended or answers(ended["c"]) == said_by([3] * 3, 4, n=2)


def test_all_can_be_aborted_at_any_moment(checkpoint):
    for num_steps in range(30):
        engine = scripted_engine(checkpoint, num_blocks=11, max_num_batched_tokens=5, max_num_seqs=6)
        for i in range(5):
            engine.add_request(str(i), [i + 1] * (4 + i), seeded(6, n=1 + i % 3))
        for _ in range(num_steps):
            step(engine)
        for i in reversed(range(5)):
            engine.abort_request(str(i))
            assert_whole(engine)
        assert_empty(engine)


@pytest.mark.parametrize("way", ["ended", "aborted", "failed"])
def test_nothing_is_left_of_any_sample(checkpoint, way):
    engine = scripted_engine(checkpoint, num_blocks=6)
    engine.add_request("a", [1] * 6, seeded(40 if way == "failed" else 3, n=3))
    seqs = [weakref.ref(seq) for seq in engine._requests["a"]]
    step(engine), step(engine)
    if way == "aborted":
        engine.abort_request("a")
    run_to_the_end(engine)
    assert [seq() for seq in seqs] == [None] * 3


# A step that fails


def failing_every_second_time(engine: LLMEngine) -> Counter[str]:
    """The model raises, and computes nothing, in every second call."""
    run, calls = engine.model_runner.run, Counter[str]()

    def fails(batch):
        calls["all"] += 1
        if calls["all"] % 2:
            calls["failed"] += 1
            raise RuntimeError("out of memory")
        return run(batch)

    engine.model_runner.run = fails
    return calls


def test_a_step_that_fails_loses_no_copy(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=9, max_num_batched_tokens=7)
    calls, ended = failing_every_second_time(engine), dict[str, RequestOutput]()
    for i in range(6):
        engine.add_request(str(i), [i + 1] * (5 + i), seeded(5, n=1 + i % 3))
    while engine.has_unfinished_requests():
        try:
            ended |= {output.request_id: output for output in engine.step() if output.finished}
        except RuntimeError as error:
            assert str(error) == "out of memory"
        assert_whole(engine)
    assert_empty(engine)
    assert calls["failed"] > 10 and engine.scheduler.num_preemptions > 0
    assert [answers(ended[str(i)]) for i in range(6)] == [said_by([i + 1] * (5 + i), 5, n=1 + i % 3) for i in range(6)]


def test_a_step_that_only_tells_an_error_loses_no_copy(checkpoint):
    """The samples of a are to be copied in the step in which b is found to have outgrown the pool."""
    engine = scripted_engine(checkpoint, num_blocks=8)
    engine.add_request("a", [1] * 6, seeded(4, n=3)), step(engine)
    engine.add_request("b", [2], params(60)), with_tokens(engine, "b", [2] * 40)
    assert list(step(engine)) == ["b"]
    assert answers(run_to_the_end(engine)["a"]) == said_by([1] * 6, 4, n=3)
    assert engine.kv_cache.num_blocks_copied == 2


def test_copies_that_wait_for_a_step_harm_nobody_if_their_request_is_aborted(checkpoint):
    """c gets the blocks that were to be the copies of a's, and begins with a prompt that fills them."""
    engine = scripted_engine(checkpoint, num_blocks=8)
    engine.add_request("a", [1] * 6, seeded(4, n=3)), step(engine)
    engine.add_request("b", [2], params(60)), with_tokens(engine, "b", [2] * 40)
    assert list(step(engine)) == ["b"]
    engine.abort_request("a")
    engine.add_request("c", [3] * 26, seeded(3, n=2))
    assert answers(run_to_the_end(engine)["c"]) == said_by([3] * 26, 3, n=2)


# With a real model


PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15))]


def drawn(n: int, seed: int, **options) -> SamplingParams:
    return SamplingParams(n=n, seed=seed, temperature=1.2, top_p=0.9, max_tokens=16, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def alone(checkpoint) -> list[RequestOutput]:
    """3 samples of each of PROMPTS, one prompt at a time, in a pool with room for all."""
    llm = LLM(checkpoint, block_size=4)
    return [llm.generate([prompt], drawn(3, seed=i, logprobs=2))[0] for i, prompt in enumerate(PROMPTS)]


def test_sample_0_says_what_it_says_without_siblings(checkpoint, alone):
    outputs = LLM(checkpoint).generate(PROMPTS, [drawn(1, seed=i) for i in range(4)])
    assert [answers(output)[0] for output in outputs] == [answers(output)[0] for output in alone]


def test_a_sample_does_not_depend_on_how_many_there_are(checkpoint, alone):
    for n in (2, 5):
        outputs = LLM(checkpoint).generate(PROMPTS, [drawn(n, seed=i) for i in range(4)])
        for output, expected in zip(outputs, alone, strict=True):
            assert answers(output)[:3] == answers(expected)[:n]


def test_samples_differ_and_seeds_differ(alone):
    said = [tuple(answer) for output in alone for answer in answers(output)]
    assert len(set(said)) == len(said) == 12


def test_samples_without_a_seed_differ(checkpoint):
    llm = LLM(checkpoint)
    asked = SamplingParams(n=3, max_tokens=16, ignore_eos=True)
    said = [tuple(answer) for _ in range(2) for answer in answers(llm.generate([[1, 5]], asked)[0])]
    assert len(set(said)) == 6


def test_greedy_samples_are_those_without_a_cache(checkpoint, model):
    for prompt in PROMPTS:
        (output,) = LLM(checkpoint, block_size=4).generate([prompt], params(24, n=3))
        assert answers(output) == [greedy_without_cache(model, prompt, 24)] * 3


@pytest.mark.parametrize("num_blocks, budget", [(16, 512), (16, 5), (20, 3), (30, 7), (16, 1)])
def test_samples_and_log_probabilities_are_the_same_in_company_and_under_preemption(
    checkpoint, alone, num_blocks, budget
):
    config = EngineConfig(
        str(checkpoint), block_size=4, kv_cache_tokens=num_blocks * 4, max_num_batched_tokens=budget, watermark=0.0
    )
    engine = LLMEngine(config)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, drawn(3, seed=i, logprobs=2))
    ended = run_to_the_end(engine)
    assert (engine.scheduler.num_preemptions > 0) == (budget > 3)
    for i, expected in enumerate(alone):
        assert answers(ended[str(i)]) == answers(expected)
        for completion, other in zip(ended[str(i)].outputs, expected.outputs, strict=True):
            assert completion.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
            assert len(completion.logprobs) == 16, "one for each token, preempted or not"


def test_slots_that_are_not_written_are_never_seen(checkpoint, alone):
    """Before each step: NaN everywhere, but for 1e30 behind what is written in a last block that is begun."""
    engine = LLMEngine(EngineConfig(str(checkpoint), block_size=4, kv_cache_tokens=80, watermark=0.0))
    run, pool = engine.model_runner.run, engine.kv_cache.blocks

    def poisoned(batch):
        clean = pool.clone()
        pool.fill_(float("nan"))
        holders = [seq for seq in engine.scheduler.running if seq.block_table]
        for seq in holders:
            pool[seq.block_table[: -(-seq.num_computed_tokens // 4)]] = 1e30
        for seq in holders:
            for position in range(seq.num_computed_tokens):
                block, offset = seq.block_table[position // 4], position % 4
                pool[block, :, :, offset] = clean[block, :, :, offset]
        return run(batch)

    engine.model_runner.run = poisoned
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, drawn(3, seed=i))
    ended = run_to_the_end(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [answers(ended[str(i)]) for i in range(4)] == [answers(output) for output in alone]


# Log-probabilities


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_log_probabilities_are_those_of_the_raw_logits_without_a_cache(checkpoint, model, count):
    """1000 are more than there are: all 320 are told."""
    (output,) = LLM(checkpoint, block_size=4).generate([PROMPTS[0]], drawn(2, seed=8, logprobs=count))
    for completion in output.outputs:
        token_ids, total = list(PROMPTS[0]), 0.0
        for token_id, told in zip(completion.token_ids, completion.logprobs, strict=True):
            expected = next_logits(model, token_ids).log_softmax(dim=-1)
            top = expected.topk(min(count, 320)).indices.tolist()
            assert list(told) == top + [token_id] * (token_id not in top)
            for other, (logprob, rank) in told.items():
                assert logprob == pytest.approx(float(expected[other]), abs=1e-4)
                assert rank == int((expected > expected[other]).sum()) + 1
            total += told[token_id].logprob
            token_ids.append(token_id)
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_without_being_asked_nothing_is_told(alone, checkpoint):
    (output,) = LLM(checkpoint).generate([PROMPTS[0]], drawn(2, seed=0))
    assert [completion.logprobs for completion in output.outputs] == [None, None]
    assert answers(output) == answers(alone[0])[:2], "asking changes no token"


def test_who_asked_and_got_no_token_is_told_of_none(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=9)
    engine.add_request("a", [1], params(3, n=2, logprobs=1))
    assert [completion.logprobs for completion in engine.abort_request("a").outputs] == [[], []]


def test_log_probabilities_once_told_do_not_change(checkpoint):
    stream = LLM(checkpoint).stream([PROMPTS[0]], drawn(2, seed=0, logprobs=1))
    told = [(output, [len(completion.logprobs) for completion in output.outputs]) for output in stream]
    assert [lengths for _, lengths in told] == [[i + 1] * 2 for i in range(16)]
    assert [[len(each.logprobs) for each in output.outputs] for output, _ in told] == [[i + 1] * 2 for i in range(16)]


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_one_and_of_many_samples_run_side_by_side(checkpoint, alone, seed):
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
    asked = [name.split() for name in ended if not name.startswith("stranger")]
    assert len(asked) == 4
    for i, n in asked:
        assert answers(ended[f"{i} {n}"]) == answers(alone[int(i)])[: int(n)]
