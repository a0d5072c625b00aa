"""Log-probabilities: of each token the likeliest in its place, from the raw logits; of a prompt what is computed."""

import math
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
from .helpers import OPTIONS

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31, 5, 12, 33, 7, 21, 18, 6, 27, 11, 30]  # 5 blocks of 4
LOGITS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log() + 3  # raw: they do not add up to 1
LIKELIEST = [(0, 0.4, 1), (1, 0.3, 2), (2, 0.15, 3), (3, 0.1, 4), (4, 0.05, 5)]


@pytest.fixture
def make(checkpoint):
    """make(...) is an LLM with blocks of 4."""
    return partial(LLM, checkpoint, **({"block_size": 4} | OPTIONS))


@pytest.fixture(scope="module")
def model(checkpoint) -> LlamaForCausalLM:
    return load_model(checkpoint, read_model_config(checkpoint), torch.float32, torch.device("cpu"))


def greedy(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


def drawn(n: int, **params) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=8, temperature=1.0, seed=8, ignore_eos=True, **params)


# Of rows of logits


def told(row: dict[int, Logprob]) -> list[tuple[int, float, int]]:
    """(token, probability, rank) in the order in which they are told."""
    return [(token_id, round(math.exp(logprob), 4), rank) for token_id, (logprob, rank, _) in row.items()]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 1000])
def test_as_many_of_the_likeliest_are_told_as_were_asked_for_or_as_there_are(count):
    [row] = top_logprobs(LOGITS.unsqueeze(0), [0], count)
    assert told(row) == LIKELIEST[:count]


@pytest.mark.parametrize("token_id", range(5))
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_token_itself_is_told_last_with_its_rank_if_it_is_not_among_the_likeliest(token_id, count):
    [row] = top_logprobs(LOGITS.unsqueeze(0), [token_id], count)
    assert told(row) == LIKELIEST[:count] + ([LIKELIEST[token_id]] if token_id >= count else [])


def test_of_equals_one_has_as_many_before_it_as_are_likelier():
    [row] = top_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], num_logprobs=0)
    assert row == {2: Logprob(pytest.approx(2 - math.log(math.e + 2 * math.e**2 + 1)), rank=1)}


def test_each_row_is_told_of_its_own_token():
    rows = top_logprobs(torch.stack([LOGITS, LOGITS.flip(0)]), [0, 3], num_logprobs=1)
    assert [told(row) for row in rows] == [[(0, 0.4, 1)], [(4, 0.4, 1), (3, 0.3, 2)]]


def test_many_rows_are_looked_at_a_few_at_a_time_and_of_equals_the_first_comes_first(monkeypatch):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).round()
    whole = top_logprobs(logits, list(range(7)), num_logprobs=4)
    monkeypatch.setattr(sampler, "MAX_IN_CACHE", 100)
    assert top_logprobs(logits, list(range(7)), num_logprobs=4) == whole
    ordered = logits.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert [list(row)[:4] for row in whole] == ordered.tolist()


# Parameters that cannot be


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("wrong", [-2, 1.5, False, "2", [1]])
def test_a_number_that_cannot_be_is_named(name, wrong):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: wrong})
    assert str(caught.value) == f"{name} must be a whole number, 0 or above, or -1 for all, not {wrong!r}"


def test_there_are_none_unless_they_are_requested(make):
    [output] = make().generate(PROMPT, SamplingParams(max_tokens=2, n=2))
    assert output.prompt_logprobs is None and [each.logprobs for each in output.outputs] == [None, None]


# Of the tokens of an output


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_token_of_each_sample_has_its_own(make, count):
    [output] = make().generate([PROMPT], drawn(2, logprobs=count))
    for completion in output.outputs:
        assert len(completion.logprobs) == len(completion.token_ids) == 8
        for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
            assert [entry.rank for entry in row.values()][:count] == [*range(1, count + 1)]
            assert [*row][-1] == token_id or row[token_id].rank <= count
        own = [row[token_id].logprob for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-5)


def test_they_change_no_token_and_others_get_none(make):
    wanted = [drawn(2), drawn(2, logprobs=2), drawn(1, logprobs=5), drawn(1)]
    prompts = [PROMPT[:i] for i in (3, 9, 14, 20)]
    plain, outputs = make().generate(prompts, drawn(2)), make().generate(prompts, wanted)
    for output, expected, params in zip(outputs, plain, wanted, strict=True):
        assert len(output.outputs) == params.n
        for completion, other in zip(output.outputs, expected.outputs, strict=False):
            assert completion.token_ids == other.token_ids
            assert (completion.logprobs is None) == (params.logprobs is None)


@pytest.mark.parametrize("params", [{"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_they_are_of_the_raw_logits_whatever_is_drawn_from(make, model, params):
    [output] = make().generate(PROMPT, SamplingParams(max_tokens=1, logprobs=320, ignore_eos=True, **params))
    logprobs = next_logits(model, PROMPT).log_softmax(-1)  # [vocab_size]
    [row] = output.outputs[0].logprobs
    assert all(each.logprob == pytest.approx(logprobs[token_id].item(), abs=1e-4) for token_id, each in row.items())


def test_a_request_that_is_streamed_keeps_what_it_has_got(make):
    outputs = list(make().stream([PROMPT], drawn(2, logprobs=1)))
    assert [[len(each.logprobs) for each in output.outputs] for output in outputs] == [[i] * 2 for i in range(1, 9)]


def test_an_aborted_request_has_those_that_it_has_got(make):
    engine = make().llm_engine
    engine.add_request("a", PROMPT, drawn(2, logprobs=1, prompt_logprobs=1))
    output = engine.abort_request("a")
    assert [each.logprobs for each in output.outputs] == [[], []] and output.prompt_logprobs == [None]


def test_what_is_refused_and_what_beams_give_are_outputs_like_the_others(make):
    llm = make()
    [refused] = llm.generate([[9999]], drawn(1, logprobs=1))
    [beams] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=3))
    for output in (refused, beams, RequestOutput.failed("0", [9999], "no such token")):
        assert isinstance(output, RequestOutput) and output.prompt_logprobs is None
        assert all(each.logprobs is None for each in output.outputs)


def test_closing_a_stream_aborts_what_has_not_ended(make):
    llm = make()
    stream = llm.stream([PROMPT], greedy(20))
    next(stream)
    stream.close()
    assert not llm.llm_engine.has_unfinished_requests()


# Of the tokens of a prompt


@torch.inference_mode()
def next_logits(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """Of the token after these, everything computed anew: [vocab_size]"""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim], k, v [num_tokens, num_kv_heads, head_dim]"""
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)  # [num_tokens, num_heads, head_dim]

    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return model.compute_logits(hidden[-1:])[0]


@pytest.mark.parametrize("most_logits", [1 << 24, 700, 1])
def test_those_of_a_prompt_are_those_without_a_cache(make, model, monkeypatch, most_logits):
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


def test_whoever_wants_them_reads_no_cache_and_fills_it(make):
    llm = make()
    first, second = (llm.generate(PROMPT, greedy(1, prompt_logprobs=0))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert llm.llm_engine.executor.num_tokens == 40
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate(PROMPT, greedy(1))[0].num_cached_tokens == 16


def test_they_are_of_float32_logits_whatever_the_model_computes_in(make):
    """So the probabilities of all tokens add up to 1."""
    [output] = make(dtype="bfloat16").generate(PROMPT, greedy(1, prompt_logprobs=320, logprobs=320))
    for row in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert len(row) == 320 and sum(math.exp(each.logprob) for each in row.values()) == pytest.approx(1, abs=1e-5)


def test_nobody_else_gets_any(make):
    wants = greedy(3, prompt_logprobs=1)
    outputs = make().generate([PROMPT, PROMPT, PROMPT[:1]], [wants, greedy(3), wants])
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, False]
    assert outputs[2].prompt_logprobs == [None]


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_is_preempted_gets_each_once_and_may_hit_when_it_has_all(make, n):
    wants = greedy(6, n=n, prompt_logprobs=1, logprobs=0)
    [expected] = make(max_num_batched_tokens=6).generate(PROMPT, wants)
    engine, outputs = make(max_num_batched_tokens=6).llm_engine, []
    engine.add_request("a", PROMPT, wants)
    for number in range(60):
        if number in (2, 8):
            engine.scheduler.preempt_all()
        outputs += engine.step()
        engine.kv_cache_manager.check_integrity()
        if not engine.has_unfinished_requests():
            break
    last = outputs[-1]
    assert last.finished
    for each, wanted in zip(last.outputs, expected.outputs, strict=True):
        assert each.token_ids == wanted.token_ids and len(each.logprobs) == 6
    for row, wanted in zip(last.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert row.keys() == wanted.keys()
        assert all(row[i].logprob == pytest.approx(wanted[i].logprob, abs=1e-4) for i in row)
    assert engine.kv_cache_manager.prefix_cache_stats.hits > 0, "the second time it came back"


def test_a_step_that_raises_after_it_has_told_tells_nothing_twice(make, monkeypatch):
    """The engine runs its sequences again one by one."""
    llm, runs = make(), []
    [expected] = make().generate(PROMPT, greedy(2, prompt_logprobs=0))
    run = llm.llm_engine.executor.run

    def poisoned(batch):
        tokens = run(batch)
        runs.append(len(batch))
        if len(batch) > 1:
            raise RuntimeError("poisoned")
        return tokens

    monkeypatch.setattr(llm.llm_engine.executor, "run", poisoned)
    outputs = llm.generate([PROMPT, PROMPT[::-1]], greedy(2, prompt_logprobs=0))
    assert max(runs) == 2 and [output.error for output in outputs] == [None, None]
    assert [len(output.prompt_logprobs) for output in outputs] == [20, 20]
    assert [list(row) for row in outputs[0].prompt_logprobs[1:]] == [list(row) for row in expected.prompt_logprobs[1:]]


def test_logits_of_a_prompt_are_computed_for_those_who_ask_only(make, monkeypatch):
    llm, rows = make(), []
    compute = llm.llm_engine.executor.model.compute_logits

    def watched(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(llm.llm_engine.executor.model, "compute_logits", watched)
    llm.generate(PROMPT, greedy(1))
    llm.generate(PROMPT, greedy(1, prompt_logprobs=0, logprobs=1))
    assert sorted(rows) == [1, 1, 19], "and those of the sampled token are not computed twice"
