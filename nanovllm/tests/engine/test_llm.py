"""LLM: prompts in, outputs out, whatever the pool. The oracle is the same model without a cache."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ...engine.outputs import RequestOutput
from ...engine.sampling_params import SamplingParams
from ...engine.sequence import Sequence
from ...llm import LLM
from ..helpers import model_runner
from .helpers import CONFIG, greedy_without_cache, next_logits, write_checkpoint
from .scripted import assert_empty, run_to_the_end

PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15)), [1, 44]]


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_all_free(llm: LLM) -> None:
    """Assert that no sequence and no block remains."""
    assert_empty(llm.llm_engine)


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """Return 24 tokens for each of PROMPTS."""
    return [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]


# The same tokens


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("num_slots", [64, 1000])
def test_tokens_match_a_model_without_a_cache(checkpoint, expected, block_size, num_slots):
    llm = LLM(checkpoint, block_size=block_size, kv_cache_tokens=num_slots)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected
    assert_all_free(llm)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_the_blocks_does_not_matter(checkpoint, expected, seed, monkeypatch):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=160)
    blocks = llm.llm_engine.kv_cache_manager.pool.get_new_blocks(40)
    manager = llm.llm_engine.kv_cache_manager
    manager.pool.free_blocks(random.Random(seed).sample(blocks, 40))
    tables, free = [], manager.free
    monkeypatch.setattr(manager, "free", lambda seq: (tables.append(seq.block_table), free(seq)))
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected
    assert len(tables) == 5 and not any(table == sorted(table) for table in tables), "all five are shuffled"
    assert_all_free(llm)


def test_unwritten_slots_are_never_seen(checkpoint, expected, monkeypatch):
    """Before each step, fill all free slots with NaN, and the rest of each partly full last block with 1e30."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=160)
    run, pool = llm.llm_engine.executor.run, llm.llm_engine.kv_cache.blocks

    def poisoned(batch):
        clean = pool.clone()
        pool.fill_(float("nan"))
        for seq, _ in batch:
            pool[seq.block_table[: -(-seq.num_computed_tokens // 4)]] = 1e30
            for position in range(seq.num_computed_tokens):
                block, offset = seq.block_table[position // 4], position % 4
                pool[block, :, :, offset] = clean[block, :, :, offset]
        return run(batch)

    monkeypatch.setattr(llm.llm_engine.executor, "run", poisoned)
    lengths = [3, 24, 1, 10, 2]
    outputs = llm.generate(PROMPTS, [greedy(n) for n in lengths])
    assert tokens(outputs) == [full[:n] for full, n in zip(expected, lengths, strict=True)]


def test_request_that_overflows_does_not_spoil_others(checkpoint, expected):
    """Its keys and values are NaN, and later requests get its blocks."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=24)
    weight = llm.llm_engine.executor.model.model.embed_tokens.weight
    before = weight[100].clone()
    weight.data[100] = float("inf")
    llm.generate([[100] * 20], greedy(2))
    assert llm.llm_engine.kv_cache.blocks[:5].isnan().any(dim=(1, 2, 3, 4, 5)).all()
    weight.data[100] = before
    assert tokens(llm.generate(PROMPTS[0], greedy(8))) == [expected[0][:8]]


def test_requests_of_a_batch_may_end_at_different_times(checkpoint, expected):
    lengths = [3, 24, 1, 10, 2]
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=100)
    outputs = llm.generate(PROMPTS, [greedy(n) for n in lengths])
    assert tokens(outputs) == [full[:n] for full, n in zip(expected, lengths, strict=True)]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_second_generate_is_independent_of_the_first(checkpoint, expected):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=128)
    llm.generate([[7] * 60, [8] * 60], greedy(3))
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected
    assert tokens(llm.generate(PROMPTS[::-1], greedy(24))) == expected[::-1]


def test_logprobs_add_up_to_those_of_the_raw_logits(checkpoint, model):
    (output,) = LLM(checkpoint).generate([[1, 5]], SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=6))
    token_ids, total = [1, 5], 0.0
    for token in output.outputs[0].token_ids:
        total += float(next_logits(model, token_ids).log_softmax(dim=-1)[token])
        token_ids.append(token)
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(checkpoint, dtype):
    outputs = LLM(checkpoint, dtype=dtype).generate(PROMPTS, greedy(8))
    assert [len(ids) for ids in tokens(outputs)] == [8] * len(PROMPTS)


# Prompts


def test_text_gets_bos_and_token_ids_are_unchanged(checkpoint, tokenizer):
    llm = LLM(checkpoint)
    ids = tokenizer.encode("the fox", add_bos=False)
    outputs = llm.generate(["the fox", ids], greedy(4))
    assert outputs[0].prompt_token_ids == [1, *ids] and outputs[1].prompt_token_ids == ids
    assert (outputs[0].prompt, outputs[1].prompt) == ("the fox", None)


@pytest.mark.parametrize("one", ["the fox", [1, 5, 9]], ids=["text", "ids"])
def test_single_prompt_is_a_list_of_one(checkpoint, one):
    llm = LLM(checkpoint)
    assert tokens(llm.generate(one, greedy(4))) == tokens(llm.generate([one], greedy(4)))


def test_tuples_work_like_lists(checkpoint, expected):
    llm = LLM(checkpoint)
    assert tokens(llm.generate(tuple(PROMPTS[0]), greedy(24))) == expected[:1]
    outputs = llm.generate((PROMPTS[0], tuple(PROMPTS[1])), (greedy(24), greedy(3)))
    assert tokens(outputs) == [expected[0], expected[1][:3]]


def test_no_prompts_return_no_outputs(checkpoint):
    assert LLM(checkpoint).generate([]) == []


def test_each_prompt_can_have_its_own_params(checkpoint):
    outputs = LLM(checkpoint).generate(PROMPTS[:3], [greedy(n) for n in (1, 2, 3)])
    assert [len(ids) for ids in tokens(outputs)] == [1, 2, 3]


def test_wrong_number_of_params_is_an_error(checkpoint):
    with pytest.raises(ValueError, match=r"sampling_params .* 2 prompts, got 3"):
        LLM(checkpoint).stream(PROMPTS[:2], [greedy(1)] * 3)  # before the first item is requested


@pytest.mark.parametrize("prompts", [None, 7, iter(["a"])], ids=lambda p: type(p).__name__)
def test_prompts_of_a_wrong_type_are_an_error(checkpoint, prompts):
    error = f"prompts must be text, token ids or a list of prompts, got {type(prompts).__name__}"
    with pytest.raises(ValueError, match=error):
        LLM(checkpoint).stream(prompts)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, [{"temperature": 0.0}]], ids=str)
def test_params_in_a_dict_are_an_error(checkpoint, params):
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams or a list of them, got dict"):
        LLM(checkpoint).stream(PROMPTS[0], params)


# Prompts that cannot be served


@pytest.mark.parametrize(
    "prompt, error",
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ("fo\ud800x", r"the prompt is not valid Unicode: '\ud800' at index 2"),
        ([7] * 64, "at most 63 tokens, since max_model_len is 64, got 64"),
        ([7] * 500, "got 500"),
        ([1, 320], "from 0 to 319, got 320"),
        ([-1, 1], "from 0 to 319, got -1"),
        ({"prompt_token_ids": [1, 320]}, "from 0 to 319, got 320"),
    ],
    ids=str,
)
def test_prompt_that_cannot_be_served_is_an_error_in_its_place(checkpoint, expected, prompt, error):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=64)
    outputs = llm.generate([PROMPTS[0], prompt, PROMPTS[1]], greedy(24))
    assert error in outputs[1].error
    assert outputs[1].finished and outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == [] and outputs[1].outputs[0].text == ""
    ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
    assert outputs[1].prompt_token_ids == (ids if isinstance(ids, list) else []), "unchanged from the caller"
    assert tokens(outputs[::2]) == expected[:2] and outputs[0].error is outputs[2].error is None
    assert_all_free(llm)


def test_text_with_tokens_outside_the_models_vocabulary_is_an_error(tmp_path, tokenizer_model):
    """The tokenizer has 320 tokens, the model 300."""
    llm = LLM(write_checkpoint(tmp_path, CONFIG | {"vocab_size": 300}, tokenizer_model=tokenizer_model))
    outputs = llm.generate(["\n", "py"], greedy(2))
    assert outputs[0].error is None
    assert "from 0 to 299, got " in outputs[1].error


def test_checkpoint_without_a_tokenizer_serves_only_token_ids(tmp_path, expected):
    llm = LLM(write_checkpoint(tmp_path))
    outputs = llm.generate(["the fox", PROMPTS[0]], greedy(24))
    assert "the checkpoint has no tokenizer" in outputs[0].error
    assert tokens(outputs)[1] == expected[0] and outputs[1].outputs[0].text == ""


# Limits


def test_longest_prompt_gets_one_token(checkpoint, model):
    prompt = [1 + i % 300 for i in range(63)]
    (output,) = LLM(checkpoint, block_size=4, kv_cache_tokens=64).generate([prompt], greedy(10))
    assert output.outputs[0].token_ids == greedy_without_cache(model, prompt, 1)
    assert output.outputs[0].finish_reason == "length"


def test_output_ends_at_max_model_len(checkpoint, expected):
    (output,) = LLM(checkpoint, max_model_len=16).generate([PROMPTS[0]], greedy(1000))
    assert output.outputs[0].token_ids == expected[0][:13]
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("block_size, num_blocks", [(1, 11), (4, 3), (5, 2), (16, 1)])
def test_request_gets_the_tokens_that_fit_the_pool_and_then_an_error(checkpoint, expected, block_size, num_blocks):
    """The last token needs no slot, so prompt and output have one token more than the pool has slots."""
    num_slots = block_size * num_blocks
    llm = LLM(checkpoint, block_size=block_size, kv_cache_tokens=num_slots)
    assert tokens(llm.generate([PROMPTS[0]], greedy(num_slots - 2))) == [expected[0][: num_slots - 2]]
    (output,) = llm.generate([PROMPTS[0]], greedy(num_slots - 1))
    assert output.error == f"{num_slots + 1} tokens need {num_blocks + 1} blocks, the pool has {num_blocks}"
    assert output.outputs[0].finish_reason == "error" and output.finished
    assert tokens([output]) == [expected[0][: num_slots - 2]], "it keeps its tokens"
    assert_all_free(llm)


def test_prompt_too_large_for_the_pool_is_an_error_in_its_place(checkpoint, expected):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=32)
    outputs = llm.generate([PROMPTS[0], [7] * 33, PROMPTS[2]], greedy(24))
    assert outputs[1].error == "the prompt must fit the pool of 8 blocks, got one that needs 9"
    assert tokens(outputs) == [expected[0], [], expected[2]]
    assert_all_free(llm)


def test_request_that_outgrows_the_pool_does_not_delay_others(checkpoint, expected):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=32)
    outputs = llm.generate(PROMPTS[:3], [greedy(24), greedy(40), greedy(24)])
    assert outputs[1].error == "33 tokens need 9 blocks, the pool has 8"
    assert outputs[1].outputs[0].token_ids[:24] == expected[1] and len(outputs[1].outputs[0].token_ids) == 32
    assert tokens(outputs[::2]) == expected[:3:2]
    assert_all_free(llm)


# Scheduling


def first_steps(llm: LLM, lengths: list[int], prompt_lengths: list[int] | None = None) -> list[int]:
    """Return the step of each prompt's first token in a new engine. By default, prompts have 2 tokens."""
    prompts = [[1 + i] * n for i, n in enumerate(prompt_lengths or [2] * len(lengths))]
    first: dict[int, int] = {}
    for output in llm.stream(prompts, [greedy(n) for n in lengths]):
        first.setdefault(int(output.request_id), model_runner(llm.llm_engine).num_steps - 1)
    assert_all_free(llm)
    return [first[i] for i in range(len(lengths))]


def test_free_seat_is_taken_in_the_next_step(checkpoint):
    """Static batches would start these requests in steps 0, 0, 12, 12 and 16."""
    llm = LLM(checkpoint, block_size=4, max_num_seqs=2, kv_cache_tokens=1000)
    assert first_steps(llm, [12, 2, 3, 4, 12]) == [0, 0, 2, 5, 9]


def test_freed_block_is_taken_in_the_next_step(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=16)
    assert first_steps(llm, [3, 1, 3, 3, 3]) == [0, 0, 0, 0, 1]


def test_no_blocks_are_promised(checkpoint):
    """8 requests of 2 tokens start at once in 8 blocks, although each will grow to 2. Stage 3 would start 4."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=32)
    assert first_steps(llm, [6] * 8) == [0] * 8
    assert llm.llm_engine.scheduler.num_preemptions == 4


def test_later_requests_do_not_overtake_the_first_that_does_not_fit(checkpoint):
    """The pool has 6 blocks: the first request holds 2 or 3, and the second needs 5. The third needs one, but waits."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=24)
    assert first_steps(llm, [3, 2, 1], prompt_lengths=[8, 20, 1]) == [0, 3, 3]


def test_long_prompt_delays_no_other_request(checkpoint):
    """40 tokens run in chunks of up to 8 next to another request, which gets a token in every step."""
    llm = LLM(checkpoint, block_size=4, max_num_batched_tokens=8)
    steps: dict[str, list[int]] = {"0": [], "1": []}
    for output in llm.stream([[1, 2], [3] * 40], [greedy(12), greedy(3)]):
        steps[output.request_id].append(llm.llm_engine.executor.num_steps)
    assert steps == {"0": list(range(1, 13)), "1": [6, 7, 8]}


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
def test_all_requests_end_in_a_small_pool(checkpoint, block_size):
    """Serve random requests of 2 to 24 tokens in a pool of 48 slots."""
    rng = random.Random(block_size)
    sizes = [(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(30)]
    llm = LLM(checkpoint, block_size=block_size, kv_cache_tokens=48, max_num_batched_tokens=rng.randint(4, 30))
    outputs = llm.generate([[1] * prompt for prompt, _ in sizes], [greedy(n) for _, n in sizes])
    assert [len(ids) for ids in tokens(outputs)] == [n for _, n in sizes]
    assert llm.llm_engine.executor.num_steps < sum(n for _, n in sizes) / 2, "few requests ran together"
    assert_all_free(llm)


def test_outputs_are_in_the_order_of_the_prompts(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=48)
    prompts = [[1, 5 + i] for i in range(12)]
    for _ in range(2):
        outputs = llm.generate(prompts, [greedy(1 + (7 * i) % 11) for i in range(12)])
        assert [output.prompt_token_ids for output in outputs] == prompts


# Streaming


def test_stream_shows_every_request_after_each_token(checkpoint, expected):
    seen: dict[str, list[RequestOutput]] = {}
    for output in LLM(checkpoint).stream(PROMPTS, greedy(24)):
        seen.setdefault(output.request_id, []).append(output)
    for outputs, full in zip(seen.values(), expected, strict=True):
        assert tokens(outputs) == [full[:n] for n in range(1, 25)]
        assert [output.finished for output in outputs] == [False] * 23 + [True]


def test_output_does_not_change_later(checkpoint):
    outputs = list(LLM(checkpoint).stream([PROMPTS[0]], greedy(5)))
    assert [len(ids) for ids in tokens(outputs)] == [1, 2, 3, 4, 5]


def test_times_are_in_order_and_the_first_token_comes_once(checkpoint):
    first_times: dict[str, set[float]] = {}
    for output in LLM(checkpoint, max_num_seqs=2).stream(PROMPTS, greedy(3)):
        times = output.metrics
        assert times.arrival_time < times.first_token_time
        assert (times.finished_time is not None) == output.finished
        assert times.finished_time is None or times.first_token_time < times.finished_time
        first_times.setdefault(output.request_id, set()).add(times.first_token_time)
    assert [len(times) for times in first_times.values()] == [1] * 5


@pytest.mark.parametrize("num_taken", range(12))
def test_closing_a_stream_frees_everything(checkpoint, expected, num_taken):
    """At most 2 requests run. Close before the start, between and within steps, with or without an ended request."""
    llm = LLM(checkpoint, block_size=4, max_num_seqs=2, kv_cache_tokens=128)
    stream = llm.stream(PROMPTS, [greedy(n) for n in (1, 3, 2, 4, 2)])
    for _ in range(num_taken):
        next(stream)
    stream.close()
    assert_all_free(llm)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected


# One stream at a time


def test_stream_is_open_until_it_is_exhausted(checkpoint):
    llm = LLM(checkpoint, kv_cache_tokens=64, block_size=4)
    first = llm.stream([PROMPTS[0]], greedy(1))
    assert next(first).finished
    second = llm.stream([PROMPTS[1]], greedy(2))
    with pytest.raises(ValueError, match=r"open stream\(\)"):
        next(second)
    assert list(first) == []
    assert len(list(llm.stream([PROMPTS[1]], greedy(2)))) == 2


def test_second_stream_is_refused_and_the_first_continues(checkpoint, expected):
    """The pool has room for both."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=1000)
    first, second = llm.stream([PROMPTS[0]], greedy(24)), llm.stream([PROMPTS[1]], greedy(24))
    next(first)
    before = llm.llm_engine.kv_cache_manager.report()
    with pytest.raises(ValueError, match="unfinished requests"):
        next(second)
    with pytest.raises(ValueError, match="unfinished requests"):
        llm.generate([PROMPTS[1]], greedy(24))
    assert llm.llm_engine.kv_cache_manager.report() == before
    assert tokens(list(first))[-1] == expected[0]
    assert_all_free(llm)


@pytest.mark.parametrize("end", ["drained", "closed", "dropped", "never begun"])
def test_next_stream_may_begin_after_one_has_ended(checkpoint, expected, end):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=64)
    stream: Iterator[RequestOutput] | None = llm.stream([PROMPTS[0]], greedy(24))
    if end != "never begun":
        next(stream)
    if end == "drained":
        list(stream)
    elif end == "closed":
        stream.close()
    elif end == "dropped":
        stream = None
    assert tokens(llm.generate([PROMPTS[1]], greedy(24))) == expected[1:2]
    assert_all_free(llm)


# Requests that are added to the engine directly


def test_stream_does_not_begin_while_the_engine_has_other_requests(checkpoint, expected):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=64)
    llm.llm_engine.add_request("mine", PROMPTS[1], greedy(24))
    for _ in range(2):
        with pytest.raises(ValueError, match="unfinished requests"):
            llm.generate([PROMPTS[0]], greedy(12))
        llm.llm_engine.step()
    ended = run_to_the_end(llm.llm_engine)
    assert tokens([ended["mine"]]) == expected[1:2]
    assert tokens(llm.generate([PROMPTS[0]], greedy(12))) == [expected[0][:12]]
    assert_all_free(llm)


@pytest.mark.parametrize("num_taken", range(1, 5))
def test_stream_ends_although_its_requests_were_aborted_on_the_engine(checkpoint, expected, num_taken):
    """It yields the outputs so far, continues without the aborted request, and ends."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=100)
    stream = llm.stream(PROMPTS[:3], greedy(24))
    taken = [next(stream) for _ in range(num_taken)]
    assert llm.llm_engine.abort_request("1").outputs[0].finish_reason == "abort"
    taken += stream
    num_reported = {i: [output for output in taken if output.request_id == str(i)] for i in range(3)}
    assert tokens(num_reported[0]) == [expected[0][:n] for n in range(1, 25)]
    assert tokens(num_reported[2]) == [expected[2][:n] for n in range(1, 25)]
    assert not any(output.finished for output in num_reported[1])
    assert_all_free(llm)


def test_stream_ends_although_someone_else_ran_the_last_step(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=100)
    stream = llm.stream(PROMPTS[:1], greedy(3))
    next(stream)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert list(stream) == []
    assert_all_free(llm)


# A step that raises


def test_step_that_raises_once_runs_again_one_by_one(checkpoint, expected, monkeypatch):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=160)
    run, sizes = llm.llm_engine.executor.run, []

    def fails_once(batch):
        sizes.append(len(batch))
        if len(sizes) == 3:
            raise RuntimeError("out of memory")
        return run(batch)

    monkeypatch.setattr(llm.llm_engine.executor, "run", fails_once)
    outputs = llm.generate(PROMPTS, greedy(24))
    assert tokens(outputs) == expected and all(output.error is None for output in outputs)
    assert sizes[:9] == [5, 5, 5, 1, 1, 1, 1, 1, 5]
    assert_all_free(llm)


def test_model_that_always_raises_ends_all_requests_with_errors(checkpoint, expected, monkeypatch):
    llm = LLM(checkpoint, block_size=4, max_num_seqs=2, kv_cache_tokens=160)

    def fails(batch):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(llm.llm_engine.executor, "run", fails)
        outputs = llm.generate(PROMPTS, greedy(24))
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [output.error for output in outputs] == ["RuntimeError: out of memory"] * 5
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert_all_free(llm)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected


@pytest.mark.parametrize("place", range(3))
def test_request_that_the_sampler_rejects_does_not_end_the_others(checkpoint, expected, place, monkeypatch):
    """Otherwise it would raise in every step, forever."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=160)
    process = llm.llm_engine.input_processor.process

    def poisoned(request_id, *request):
        samples = process(request_id, *request)
        if request_id == str(place):
            samples[0].params.temperature = "hot"  # bypasses the checks of SamplingParams
        return samples

    monkeypatch.setattr(llm.llm_engine.input_processor, "process", poisoned)
    outputs = llm.generate(PROMPTS[:3], greedy(24))
    assert outputs[place].error.startswith("TypeError") and outputs[place].outputs[0].finish_reason == "error"
    others = [i for i in range(3) if i != place]
    assert tokens([outputs[i] for i in others]) == [expected[i] for i in others]
    assert_all_free(llm)


def test_step_that_fails_after_a_request_has_ended_frees_its_blocks(checkpoint, monkeypatch):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=128)
    append_token = Sequence.append_token

    def fails_for_the_second(seq, token):
        append_token(seq, token)
        if seq.request_id == "1":
            raise KeyboardInterrupt

    monkeypatch.setattr(Sequence, "append_token", fails_for_the_second)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:2], greedy(1))
    assert_all_free(llm)


# The peak


def test_peak_is_the_moment_of_most_use(checkpoint):
    """After n steps, each of two prompts of 2 tokens has n + 1 in the pool: the very last token is never computed."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=40)
    llm.generate([[1, 5], [1, 6]], [greedy(4), greedy(6)])
    assert llm.peak.pieces == ((0, 4, 4), (4, 4, 4), (8, 4, 1), (12, 4, 1)), "start, size, used"
    assert (llm.peak.promised, llm.peak.held, llm.peak.wasted) == (16, 16, 6)
    assert llm.peak.strip(width=20) == "#####-#-............"


def test_peak_covers_the_past_and_the_present(checkpoint):
    """After a long request, a short one keeps the peak, and a longer one replaces it while it runs."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=128)
    assert llm.peak.held == llm.peak.used == 0
    llm.generate([[1] * 20], greedy(4))
    assert (llm.peak.held, llm.peak.used) == (24, 23)
    llm.generate([[1] * 5], greedy(4))
    assert (llm.peak.held, llm.peak.used) == (24, 23)
    stream = llm.stream([[2] * 13, [3] * 15], greedy(4))
    next(stream)
    assert (llm.peak.held, llm.peak.used) == (32, 28)
    stream.close()


def test_no_report_is_built_in_a_step(checkpoint, monkeypatch):
    """Reports name each holder, so only an arrival or a departure may build one."""
    llm = LLM(checkpoint, block_size=4, max_num_seqs=3, kv_cache_tokens=1000)
    report, counts = llm.llm_engine.kv_cache_manager.report, []
    monkeypatch.setattr(llm.llm_engine.kv_cache_manager, "report", lambda: counts.append(1) or report())
    llm.generate(PROMPTS, greedy(40))
    assert llm.llm_engine.executor.num_steps == 80 and sum(counts) <= 3 * len(PROMPTS)


def test_outputs_of_a_request_share_a_copy_of_the_prompt(checkpoint):
    prompt = [1, 5, 9]
    outputs = list(LLM(checkpoint).stream([prompt], greedy(5)))
    assert {id(output.prompt_token_ids) for output in outputs} == {id(outputs[0].prompt_token_ids)}
    assert outputs[0].prompt_token_ids == prompt and outputs[0].prompt_token_ids is not prompt


def test_model_can_be_a_string_or_a_path(checkpoint):
    by_text, by_path = LLM(str(checkpoint)), LLM(Path(checkpoint))
    assert tokens(by_text.generate([[1]], greedy(3))) == tokens(by_path.generate([[1]], greedy(3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_are_the_same_on_a_gpu(checkpoint, expected):
    llm = LLM(checkpoint, device="cuda", dtype="float32", block_size=4, kv_cache_tokens=160)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected
