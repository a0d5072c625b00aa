"""Embeddings: the same for a prompt alone, in company, in chunks, preempted, cached or loaded from the host."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ... import LLM, EmbeddingRequestOutput, PoolingParams, SamplingParams
from ...llama import LlamaForCausalLM
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...requests.outputs import RequestOutput
from ..testing.engines import answer, assert_empty, model_runner, params, run_to_the_end, step
from ..testing.reference import attend_without_cache

PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15)), [1, 44]]


@torch.inference_mode()
def embedding_of(model: LlamaForCausalLM, prompt: list[int]) -> Tensor:
    """Return the normalized hidden state of the last token, computed without a cache."""
    hidden = model(torch.tensor(prompt), torch.arange(len(prompt)), attend_without_cache)
    return normalize(hidden[-1], dim=-1)


def make_engine(checkpoint: Path, num_blocks: int = 50, **options: Any) -> LLMEngine:
    settings = {"kv_cache_tokens": num_blocks * 4, "block_size": 4, "watermark": 0.0, "offload_policy": "recompute"}
    return LLMEngine(EngineConfig(str(checkpoint), attention_backend="torch", **settings | options))


def assert_close(outputs: list[RequestOutput], expected: list[Tensor]) -> None:
    for output, embedding in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.tensor(output.embedding), embedding, rtol=0, atol=1e-5)


def embed(engine: LLMEngine, prompts: list[list[int]]) -> list[RequestOutput]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, PoolingParams())
    ended = run_to_the_end(engine)
    return [ended[str(i)] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM) -> list[Tensor]:
    return [embedding_of(model, prompt) for prompt in PROMPTS]


@pytest.mark.full
def test_embedding_equals_transformers_last_hidden_state(checkpoint, model):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, embed(make_engine(checkpoint), PROMPTS), strict=True):
        with torch.inference_mode():
            hidden = reference(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(output.embedding), normalize(hidden, dim=-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [1, 3, 512])
def test_embedding_does_not_depend_on_the_batch_or_its_chunks(checkpoint, expected, budget):
    assert_close(embed(make_engine(checkpoint, max_num_batched_tokens=budget), PROMPTS), expected)


def test_embeddings_and_text_share_a_batch(checkpoint, expected):
    alone = make_engine(checkpoint)
    for i, prompt in enumerate(PROMPTS):
        alone.add_request(str(i), prompt, params(12))
    texts = run_to_the_end(alone)
    engine = make_engine(checkpoint, max_num_batched_tokens=7)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"embed {i}", prompt, PoolingParams())
        engine.add_request(f"generate {i}", prompt, params(12))
    ended = run_to_the_end(engine)
    assert_close([ended[f"embed {i}"] for i in range(5)], expected)
    assert [answer(ended[f"generate {i}"]) for i in range(5)] == [answer(texts[str(i)]) for i in range(5)]


def test_preempted_prompt_gets_the_same_embedding(checkpoint, model):
    """Two sequences that decode take the blocks of a prompt that is computed two tokens at a time."""
    engine, prompt = make_engine(checkpoint, num_blocks=8, max_num_batched_tokens=4), list(range(20, 40))
    engine.add_request("a", [1, 2, 3], params(12)), engine.add_request("b", [4, 5, 6], params(12))
    step(engine), step(engine)
    engine.add_request("c", prompt, PoolingParams())
    [seq] = engine.requests["c"]
    ended = run_to_the_end(engine)
    assert seq.num_preemptions > 0
    assert_close([ended["c"]], [embedding_of(model, prompt)])


def test_cached_prompt_gets_the_same_embedding(checkpoint, model):
    engine, prompt = make_engine(checkpoint), list(range(20, 33))
    [first], [second] = embed(engine, [prompt]), embed(engine, [prompt])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)
    assert_close([first, second], [embedding_of(model, prompt)] * 2)
    engine.add_request("text", prompt, params(2))
    assert run_to_the_end(engine)["text"].num_cached_tokens == 12, "an embedding fills the cache for text, too"


def test_embedding_of_a_prompt_that_is_loaded_from_the_host(checkpoint, model):
    engine = make_engine(checkpoint, num_blocks=5, offload_policy="load", kv_offloading_tokens=80)
    prompt, other = list(range(20, 33)), list(range(50, 69))
    outputs = [embed(engine, [each])[0] for each in (prompt, other, prompt)]
    assert engine.host_tier.num_blocks_loaded > 0
    assert_close([outputs[0], outputs[2]], [embedding_of(model, prompt)] * 2)


def test_request_ends_and_frees_its_blocks_once_its_prompt_is_computed(checkpoint):
    engine = make_engine(checkpoint, max_num_batched_tokens=8)
    engine.add_request("a", list(range(20)), PoolingParams())
    assert [len(step(engine)) for _ in range(3)] == [0, 0, 1], "20 tokens take three steps of 8"
    assert_empty(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (20, 0)
    success = [each for each in engine.get_metrics() if each.name == "vllm:request_success" and each.value]
    assert [each.labels["finished_reason"] for each in success] == ["stop"]


def test_output_holds_the_embedding_and_no_text(checkpoint):
    [output] = embed(make_engine(checkpoint), [[1, 5, 9]])
    [completion] = output.outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [], "stop")
    assert completion.stop_reason is None and output.finished and output.error is None


def test_aborted_request_has_no_embedding(checkpoint):
    engine = make_engine(checkpoint, max_num_batched_tokens=4)
    engine.add_request("a", list(range(20)), PoolingParams())
    step(engine)
    output = engine.abort_request("a")
    assert (output.embedding, output.outputs[0].finish_reason) == (None, "abort")
    assert_empty(engine)


def test_prompt_may_fill_max_model_len(checkpoint, model):
    prompt = [7, 8] * 32
    assert_close(embed(make_engine(checkpoint), [prompt]), [embedding_of(model, prompt)])
    engine = make_engine(checkpoint)
    with pytest.raises(ValueError, match="at most 64 tokens, since max_model_len is 64, got 65"):
        engine.add_request("a", [*prompt, 9], PoolingParams())
    assert_empty(engine)


@pytest.mark.parametrize(
    ("prompt", "pooling_params", "message"),
    [
        ([], PoolingParams(), "the prompt is empty"),
        ([320], PoolingParams(), "from 0 to 319, got 320"),
        ([1], PoolingParams(dimensions=16), "dimensions must be 32, the model's hidden_size, got 16"),
    ],
)
def test_request_that_cannot_be_served_is_refused(checkpoint, prompt, pooling_params, message):
    engine = make_engine(checkpoint)
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, pooling_params)
    assert_empty(engine)


@pytest.mark.parametrize("options", [{"dimensions": "32"}, {"use_activation": 1}, {"task": "classify"}], ids=str)
def test_invalid_pooling_params_are_named(options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got {re.escape(repr(value))}"):
        PoolingParams(**options)


def test_embedding_that_is_not_finite_ends_only_its_own_request(checkpoint):
    engine = make_engine(checkpoint)
    with torch.no_grad():
        model_runner(engine).model.model.embed_tokens.weight[5] = torch.nan
    nan, fine = embed(engine, [[1, 5], [1, 6]])
    assert (nan.embedding, nan.outputs[0].finish_reason) == (None, "error") and "FloatingPointError" in nan.error
    assert fine.embedding is not None and fine.error is None


# LLM.embed


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, kv_cache_tokens=256, block_size=4, offload_policy="recompute", max_num_batched_tokens=8)


def test_llm_returns_embeddings_in_the_order_of_the_prompts(llm, model, expected):
    outputs = llm.embed([*PROMPTS, "The fox"], use_tqdm=False)
    assert all(isinstance(output, EmbeddingRequestOutput) and output.finished for output in outputs)
    assert [output.prompt_token_ids for output in outputs[:5]] == PROMPTS
    fox = llm.get_tokenizer().encode("The fox")
    for output, embedding in zip(outputs, [*expected, embedding_of(model, fox)], strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), embedding, rtol=0, atol=1e-5)


def test_use_activation_false_leaves_the_length_as_it_is(llm):
    plain, raw = PoolingParams(dimensions=32, task="embed"), PoolingParams(use_activation=False)
    outputs = llm.embed([[1, 5, 9]] * 2, pooling_params=[plain, raw], use_tqdm=False)
    one, other = (torch.tensor(output.outputs.embedding) for output in outputs)
    assert one.norm().item() == pytest.approx(1.0, abs=1e-6) and abs(other.norm().item() - 1.0) > 0.1
    torch.testing.assert_close(normalize(other, dim=-1), one)


def test_llm_computes_nothing_if_a_prompt_cannot_be_embedded(llm):
    before = llm.llm_engine.executor.num_steps
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.embed([[1, 5], []], use_tqdm=False)
    with pytest.raises(ValueError, match="pooling_params must be PoolingParams or a list of them, got SamplingParams"):
        llm.embed([[1, 5]], pooling_params=SamplingParams(), use_tqdm=False)
    assert llm.llm_engine.executor.num_steps == before
    assert_empty(llm.llm_engine)


def test_embeddings_take_no_seed_from_later_requests(checkpoint):
    options = {"kv_cache_tokens": 256, "offload_policy": "recompute"}
    plain, other = (LLM(checkpoint, **options) for _ in range(2))
    other.embed([[1, 5]], use_tqdm=False)
    sampled = [each.generate([[1, 9]], SamplingParams(max_tokens=8), use_tqdm=False)[0] for each in (plain, other)]
    assert answer(sampled[0]) == answer(sampled[1])
