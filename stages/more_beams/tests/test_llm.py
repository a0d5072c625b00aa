"""LLM: prompts in, outputs out. The oracle is the same model without a cache."""

import pytest
import torch

from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .helpers import greedy_without_cache, write_checkpoint

PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15)), [1, 44]]


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_all_free(llm: LLM) -> None:
    llm.kv_cache_manager.check_integrity()
    assert llm.kv_cache_manager.report().held == 0 and not llm.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """Return the 24 most likely tokens after each of PROMPTS."""
    return [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("block_size, tile_size", [(1, 4096), (4, 16)])
def test_tokens_are_the_same_as_without_a_cache(checkpoint, expected, block_size, tile_size):
    llm = LLM(checkpoint, block_size=block_size, tile_size=tile_size, kv_cache_tokens=400)
    llm.kv_cache.blocks.fill_(float("nan"))  # what was in the pool before is never read
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected
    assert tokens(llm.generate(PROMPTS[::-1], greedy(24))) == expected[::-1], "in blocks that others have used"
    assert_all_free(llm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_on_a_gpu_are_the_same_as_on_the_cpu(checkpoint, expected):
    assert tokens(LLM(checkpoint, device="cuda", dtype="float32").generate(PROMPTS, greedy(24))) == expected


def test_each_prompt_has_its_own_parameters_and_its_output_is_in_its_place(checkpoint, expected):
    lengths = [3, 24, 1, 10, 2]
    outputs = LLM(checkpoint, max_num_seqs=2).generate(PROMPTS, [greedy(n) for n in lengths])
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert tokens(outputs) == [token_ids[:n] for token_ids, n in zip(expected, lengths, strict=True)]
    with pytest.raises(ValueError, match="2 prompts but 3 sampling_params"):
        LLM(checkpoint).stream(PROMPTS[:2], [greedy(1)] * 3)


def test_a_text_gets_bos_and_token_ids_do_not(checkpoint, tokenizer):
    ids = tokenizer.encode("the fox", add_bos=False)
    outputs = LLM(checkpoint).generate(["the fox", ids], greedy(4))
    assert [output.prompt_token_ids for output in outputs] == [[1, *ids], ids]


@pytest.mark.parametrize("prompt", ["the fox", [1, 5, 9]], ids=["text", "ids"])
def test_one_prompt_is_a_list_of_one(checkpoint, prompt):
    llm = LLM(checkpoint)
    assert tokens(llm.generate(prompt, greedy(4))) == tokens(llm.generate([prompt], greedy(4)))
    assert llm.generate([]) == []


def test_a_folder_without_a_tokenizer_serves_token_ids(tmp_path, expected):
    outputs = LLM(write_checkpoint(tmp_path)).generate(["the fox", PROMPTS[0]], greedy(24))
    assert "no tokenizer.model" in outputs[0].error and tokens(outputs)[1] == expected[0]


def test_an_output_ends_at_max_model_len(checkpoint, expected):
    [output] = LLM(checkpoint, max_model_len=16).generate([PROMPTS[0]], greedy(1000))
    assert output.outputs[0].token_ids == expected[0][:13] and output.outputs[0].finish_reason == "length"


def test_a_stream_yields_each_request_after_each_of_its_tokens(checkpoint, expected):
    streamed: dict[str, list[RequestOutput]] = {}
    for output in LLM(checkpoint).stream(PROMPTS, greedy(24)):
        streamed.setdefault(output.request_id, []).append(output)
    for outputs, token_ids in zip(streamed.values(), expected, strict=True):
        assert tokens(outputs) == [token_ids[:n] for n in range(1, 25)]
        assert [output.finished for output in outputs] == [False] * 23 + [True]


@pytest.mark.parametrize("num_taken", [1, 2, 5, 8])
def test_a_closed_stream_frees_everything(checkpoint, expected, num_taken):
    llm = LLM(checkpoint, kv_cache_tokens=128, max_num_seqs=2)
    stream = llm.stream(PROMPTS, [greedy(n) for n in (1, 3, 2, 4, 2)])
    for _ in range(num_taken):
        next(stream)
    stream.close()
    assert_all_free(llm)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected


def test_a_step_that_raises_frees_everything(checkpoint, expected, monkeypatch):
    llm = LLM(checkpoint, kv_cache_tokens=128)
    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(llm.model_runner, "run", None)
        llm.generate(PROMPTS, greedy(24))
    assert_all_free(llm)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected


def test_steps_and_computed_tokens_are_counted_from_the_first_request(checkpoint):
    """The newest token of a sequence is computed in the next step, so the last one of each output never is."""
    llm = LLM(checkpoint)
    llm.generate([[1, 5], [1, 6, 7]], greedy(3))
    assert (llm.model_runner.num_steps, llm.model_runner.num_tokens) == (3, 5 + 2 * 2)
