"""Log-probabilities of sampled tokens and of prompts, always computed from the raw logits."""

import math
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from .. import LLM, BeamSearchParams, Logprob, RequestOutput, SamplingParams
from ..backends.torch import model_runner, sampler
from ..backends.torch.sampler import top_logprobs
from ..checkpoints.model_config import read_model_config
from ..checkpoints.weights import load_model
from ..llama import LlamaForCausalLM
from .testing.engines import OPTIONS

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31, 5, 12, 33, 7, 21, 18, 6, 27, 11, 30]  # 5 blocks of 4
LOGITS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log() + 3  # raw: the exponentials do not add up to 1
LIKELIEST = [(0, 0.4, 1), (1, 0.3, 2), (2, 0.15, 3), (3, 0.1, 4), (4, 0.05, 5)]


@pytest.fixture
def make(checkpoint):
    """Return a function that builds an LLM with blocks of 4."""
    return partial(LLM, checkpoint, **({"block_size": 4} | OPTIONS))


@pytest.fixture(scope="module")
def model(checkpoint) -> LlamaForCausalLM:
    return load_model(checkpoint, read_model_config(checkpoint), torch.float32, torch.device("cpu"))


def greedy(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


def drawn(n: int, **params) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=8, temperature=1.0, seed=8, ignore_eos=True, **params)


# Rows of logits


def as_tuples(row: dict[int, Logprob]) -> list[tuple[int, float, int]]:
    """Return (token, probability, rank) in the order of the row."""
    return [(token_id, round(math.exp(logprob), 4), rank) for token_id, (logprob, rank, _) in row.items()]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 1000])
def test_top_logprobs_returns_the_likeliest_tokens(count):
    [row] = top_logprobs(LOGITS.unsqueeze(0), [0], count)
    assert as_tuples(row) == LIKELIEST[:count]


@pytest.mark.parametrize("token_id", range(5))
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_token_itself_comes_last_if_it_is_not_among_the_likeliest(token_id, count):
    [row] = top_logprobs(LOGITS.unsqueeze(0), [token_id], count)
    assert as_tuples(row) == LIKELIEST[:count] + ([LIKELIEST[token_id]] if token_id >= count else [])


def test_equally_likely_tokens_have_the_same_rank():
    [row] = top_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], num_logprobs=0)
    assert row == {2: Logprob(pytest.approx(2 - math.log(math.e + 2 * math.e**2 + 1)), rank=1)}


def test_each_row_includes_its_own_token():
    rows = top_logprobs(torch.stack([LOGITS, LOGITS.flip(0)]), [0, 3], num_logprobs=1)
    assert [as_tuples(row) for row in rows] == [[(0, 0.4, 1)], [(4, 0.4, 1), (3, 0.3, 2)]]


def test_rows_are_handled_in_parts_and_equal_tokens_are_in_order_of_id(monkeypatch):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).round()
    whole = top_logprobs(logits, list(range(7)), num_logprobs=4)
    monkeypatch.setattr(sampler, "MAX_IN_CACHE", 100)
    assert top_logprobs(logits, list(range(7)), num_logprobs=4) == whole
    ordered = logits.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert [list(row)[:4] for row in whole] == ordered.tolist()


# Invalid parameters


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("wrong", [-2, 1.5, False, "2", [1]])
def test_invalid_numbers_of_logprobs_are_rejected(name, wrong):
    with pytest.raises(ValueError, match=rf"^{name} must be .*{re.escape(repr(wrong))}$"):
        SamplingParams(**{name: wrong})


def test_outputs_have_no_logprobs_by_default(make):
    [output] = make().generate(PROMPT, SamplingParams(max_tokens=2, n=2))
    assert output.prompt_logprobs is None and [each.logprobs for each in output.outputs] == [None, None]


# Tokens of an output


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_token_of_each_sample_has_logprobs(make, count):
    [output] = make().generate([PROMPT], drawn(2, logprobs=count))
    for completion in output.outputs:
        assert len(completion.logprobs) == len(completion.token_ids) == 8
        for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
            assert [entry.rank for entry in row.values()][:count] == [*range(1, count + 1)]
            assert [*row][-1] == token_id or row[token_id].rank <= count
        own = [row[token_id].logprob for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-5)


def test_logprobs_do_not_change_tokens_and_other_requests_get_none(make):
    all_params = [drawn(2), drawn(2, logprobs=2), drawn(1, logprobs=5), drawn(1)]
    prompts = [PROMPT[:i] for i in (3, 9, 14, 20)]
    plain, outputs = make().generate(prompts, drawn(2)), make().generate(prompts, all_params)
    for output, expected, params in zip(outputs, plain, all_params, strict=True):
        assert len(output.outputs) == params.n
        for completion, other in zip(output.outputs, expected.outputs, strict=False):
            assert completion.token_ids == other.token_ids
            assert (completion.logprobs is None) == (params.logprobs is None)


@pytest.mark.parametrize("params", [{"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_logprobs_of_drawn_tokens_come_from_raw_logits(make, model, params):
    [output] = make().generate(PROMPT, SamplingParams(max_tokens=1, logprobs=320, ignore_eos=True, **params))
    logprobs = next_logits(model, PROMPT).log_softmax(-1)  # [vocab_size]
    [row] = output.outputs[0].logprobs
    assert all(each.logprob == pytest.approx(logprobs[token_id].item(), abs=1e-4) for token_id, each in row.items())


def test_a_stream_accumulates_logprobs(make):
    outputs = list(make().stream([PROMPT], drawn(2, logprobs=1)))
    assert [[len(each.logprobs) for each in output.outputs] for output in outputs] == [[i] * 2 for i in range(1, 9)]


def test_an_aborted_request_keeps_its_logprobs(make):
    engine = make().llm_engine
    engine.add_request("a", PROMPT, drawn(2, logprobs=1, prompt_logprobs=1))
    output = engine.abort_request("a")
    assert [each.logprobs for each in output.outputs] == [[], []] and output.prompt_logprobs == [None]


def test_failed_requests_and_beams_have_no_logprobs(make):
    llm = make()
    [failed] = llm.generate([[9999]], drawn(1, logprobs=1))
    [beams] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=3))
    for output in (failed, beams, RequestOutput.failed("0", [9999], "no such token")):
        assert isinstance(output, RequestOutput) and output.prompt_logprobs is None
        assert all(each.logprobs is None for each in output.outputs)


def test_closing_a_stream_aborts_its_requests(make):
    llm = make()
    stream = llm.stream([PROMPT], greedy(20))
    next(stream)
    stream.close()
    assert not llm.llm_engine.has_unfinished_requests()


# Tokens of a prompt


@torch.inference_mode()
def next_logits(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """Return the logits [vocab_size] of the next token, computed without a cache."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)  # [num_tokens, num_heads, head_dim]

    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return model.compute_logits(hidden[-1:])[0]


@pytest.mark.parametrize("most_logits", [1 << 24, 700, 1])
def test_prompt_logprobs_equal_those_computed_without_a_cache(make, model, monkeypatch, most_logits):
    monkeypatch.setattr(model_runner, "MAX_PROMPT_LOGITS", most_logits)
    [output] = make(max_num_batched_tokens=5).generate(PROMPT[:13], greedy(2, prompt_logprobs=2))
    assert len(output.prompt_logprobs) == 13 and output.prompt_logprobs[0] is None
    for position in range(1, 13):
        logprobs = next_logits(model, PROMPT[:position]).log_softmax(-1)  # [vocab_size]
        row = output.prompt_logprobs[position]
        assert PROMPT[position] in row and list(row)[:2] == logprobs.topk(2).indices.tolist()
        for token_id, each in row.items():
            assert each.logprob == pytest.approx(logprobs[token_id].item(), abs=1e-4)
            assert each.rank == 1 + int((logprobs > logprobs[token_id]).sum())


def test_prompt_logprobs_have_the_texts_that_make_up_the_prompt(make):
    [output] = make().generate(["the fox and the rabbit"], greedy(1, prompt_logprobs=0))
    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert "".join(row[token_id].decoded_token for token_id, row in rows) == " the fox and the rabbit"


def test_prompt_logprobs_skip_the_prefix_cache_but_fill_it(make):
    llm = make()
    first, second = (llm.generate(PROMPT, greedy(1, prompt_logprobs=0))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert llm.llm_engine.executor.num_tokens == 40
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate(PROMPT, greedy(1))[0].num_cached_tokens == 16


def test_logprobs_are_computed_in_float32_for_any_dtype(make):
    """Then the probabilities of all tokens add up to 1."""
    [output] = make(dtype="bfloat16").generate(PROMPT, greedy(1, prompt_logprobs=320, logprobs=320))
    for row in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert len(row) == 320 and sum(math.exp(each.logprob) for each in row.values()) == pytest.approx(1, abs=1e-5)


def test_only_requests_that_ask_for_prompt_logprobs_get_them(make):
    params = greedy(3, prompt_logprobs=1)
    outputs = make().generate([PROMPT, PROMPT, PROMPT[:1]], [params, greedy(3), params])
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, False]
    assert outputs[2].prompt_logprobs == [None]


@pytest.mark.parametrize("n", [1, 3])
def test_a_preempted_prompt_gets_each_logprob_once_and_may_then_use_the_cache(make, n):
    params = greedy(6, n=n, prompt_logprobs=1, logprobs=0)
    [expected] = make(max_num_batched_tokens=6).generate(PROMPT, params)
    engine, outputs = make(max_num_batched_tokens=6).llm_engine, []
    engine.add_request("a", PROMPT, params)
    for number in range(60):
        if number in (2, 8):
            engine.scheduler.preempt_all()
        outputs += engine.step()
        engine.kv_cache_manager.check_integrity()
        if not engine.has_unfinished_requests():
            break
    last = outputs[-1]
    assert last.finished
    for each, other in zip(last.outputs, expected.outputs, strict=True):
        assert each.token_ids == other.token_ids and len(each.logprobs) == 6
    for row, other in zip(last.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert row.keys() == other.keys()
        assert all(row[i].logprob == pytest.approx(other[i].logprob, abs=1e-4) for i in row)
    assert engine.kv_cache_manager.prefix_cache_stats.hits > 0, "the second preemption must lead to hits"


def test_a_step_that_raises_after_adding_logprobs_adds_none_twice(make, monkeypatch):
    """The engine runs its sequences again, one by one."""
    llm, runs = make(), []
    [expected] = make().generate(PROMPT, greedy(2, prompt_logprobs=0))
    run = llm.llm_engine.executor.run

    def fail_after_run(batch):
        tokens = run(batch)
        runs.append(len(batch))
        if len(batch) > 1:
            raise RuntimeError("failed")
        return tokens

    monkeypatch.setattr(llm.llm_engine.executor, "run", fail_after_run)
    outputs = llm.generate([PROMPT, PROMPT[::-1]], greedy(2, prompt_logprobs=0))
    assert max(runs) == 2 and [output.error for output in outputs] == [None, None]
    assert [len(output.prompt_logprobs) for output in outputs] == [20, 20]
    assert [list(row) for row in outputs[0].prompt_logprobs[1:]] == [list(row) for row in expected.prompt_logprobs[1:]]


def test_prompt_logits_are_computed_only_on_request(make, monkeypatch):
    llm, rows = make(), []
    compute = llm.llm_engine.executor.model.compute_logits

    def watched(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(llm.llm_engine.executor.model, "compute_logits", watched)
    llm.generate(PROMPT, greedy(1))
    llm.generate(PROMPT, greedy(1, prompt_logprobs=0, logprobs=1))
    assert sorted(rows) == [1, 1, 19], "logits of the sampled token must not be computed twice"
