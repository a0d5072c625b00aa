"""LLM: prompts in, outputs out, whatever the pool. The oracle is the same model without a cache."""

import pytest
import torch

from ...llm import LLM
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ..testing.checkpoints import CONFIG, write_checkpoint
from ..testing.engines import assert_empty, run_to_the_end
from ..testing.reference import greedy_without_cache, next_logits

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


@pytest.mark.parametrize(("block_size", "num_slots"), [(1, 64), (3, 1000), (4, 64), (16, 1000), (64, 64)])
def test_tokens_match_a_model_without_a_cache(checkpoint, expected, block_size, num_slots):
    llm = LLM(checkpoint, block_size=block_size, kv_cache_tokens=num_slots)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected
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
    outputs = llm.generate([PROMPTS[0], prompt, PROMPTS[1]], greedy(6))
    assert error in outputs[1].error
    assert outputs[1].finished and outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == [] and outputs[1].outputs[0].text == ""
    ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
    assert outputs[1].prompt_token_ids == (ids if isinstance(ids, list) else []), "unchanged from the caller"
    assert tokens(outputs[::2]) == [each[:6] for each in expected[:2]] and outputs[0].error is outputs[2].error is None
    assert_all_free(llm)


def test_text_with_tokens_outside_the_models_vocabulary_is_an_error(tmp_path, tokenizer_model):
    """The tokenizer has 320 tokens, the model 300."""
    llm = LLM(write_checkpoint(tmp_path, CONFIG | {"vocab_size": 300}, tokenizer_model=tokenizer_model))
    outputs = llm.generate(["\n", "py"], greedy(2))
    assert outputs[0].error is None
    assert "from 0 to 299, got " in outputs[1].error


def test_checkpoint_without_a_tokenizer_serves_only_token_ids(tmp_path, expected):
    llm = LLM(write_checkpoint(tmp_path, tokenizer_model=b""))
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


# Scheduling


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


@pytest.mark.parametrize("num_taken", [0, 1, 2, 5, 11])
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


# A step that raises


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


# The peak


def test_outputs_of_a_request_share_a_copy_of_the_prompt(checkpoint):
    prompt = [1, 5, 9]
    outputs = list(LLM(checkpoint).stream([prompt], greedy(5)))
    assert {id(output.prompt_token_ids) for output in outputs} == {id(outputs[0].prompt_token_ids)}
    assert outputs[0].prompt_token_ids == prompt and outputs[0].prompt_token_ids is not prompt


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_are_the_same_on_a_gpu(checkpoint, expected):
    llm = LLM(checkpoint, device="cuda", dtype="float32", block_size=4, kv_cache_tokens=160)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected
