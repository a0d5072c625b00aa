"""SmolLM2 135M, a real model: compared with transformers, and used as people use it. Run by `make realmodel`.

The first run downloads it. The text in data/realmodel.txt was written for this test, so no model has seen it.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from .. import LLM, SamplingParams
from ..checkpoints.hub import find_checkpoint
from ..checkpoints.known import KNOWN, find_known
from ..engine.block_manager import BlockManager
from ..engine.observer import Observer
from ..requests.outputs import RequestOutput
from ..requests.structured_outputs import StructuredOutputsParams
from .testing.processes import REPOSITORY
from .testing.served import serving

TEXT = (Path(__file__).parent / "data/realmodel.txt").read_text()
SYSTEM = re.findall(r"^SYSTEM := (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[0]  # of make chat
QUESTION = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the capital of France?"}]
MIN_MARGIN = 0.5  # of two log-probabilities. Kernels round activations to 8 bits, which moves them by about 0.1
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def build(**options: Any) -> LLM:
    """Return an engine that takes the text in one step. It measures nothing when it starts, which would take long."""
    sizes = {"max_model_len": 8192, "kv_cache_tokens": 16384, "max_num_batched_tokens": 8192}
    return LLM("smollm2", **{**sizes, "offload_policy": "load", **options})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return build(attention_backend="numba")


@pytest.fixture(scope="module")
def token_ids(llm: LLM) -> list[int]:
    return llm.get_tokenizer().encode(TEXT)


@pytest.fixture(scope="module")
def expected(token_ids: list[int]) -> Tensor:
    """Return transformers' logits, with the file's weights dequantized to float32: [num_tokens, vocab_size]."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(find_known("smollm2", KNOWN["smollm2"]))
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])).eval().float()
    )
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(tensors, strict=False).missing_keys in ([], ["lm_head.weight"])  # which is tied
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def logits_of(llm: LLM, token_ids: list[int]) -> Tensor:
    """Return the engine's logits after each token of a prompt: [num_tokens, vocab_size]."""
    engine = llm.llm_engine
    executor: Any = engine.executor
    pool = engine.kv_cache
    manager = BlockManager(pool.num_blocks, pool.block_size, False, engine.tiers.tier, Observer())
    [seq] = engine.input_processor.process("", token_ids, SamplingParams(temperature=0))
    manager.allocate(seq, hits=[])
    computed = executor.compute([(seq, len(token_ids))])
    return executor.backend.compute_logits(computed.hidden).float()


def test_plain_operations_compute_transformers_logits(token_ids, expected):
    logits = logits_of(build(attention_backend="torch"), token_ids)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}], ids=["auto", "int8 KV"])
def test_kernels_are_close_to_transformers(token_ids, expected, options):
    logits = logits_of(build(attention_backend="numba", **options), token_ids)
    ours, theirs = logits.log_softmax(1), expected.log_softmax(1)
    divergence = (theirs.exp() * (theirs - ours)).sum(1).mean()
    targets = torch.tensor(token_ids[1:])[:, None]
    perplexities = [(-each[:-1].gather(1, targets)).mean().exp() for each in (ours, theirs)]
    assert divergence < 0.01 and abs(perplexities[0] / perplexities[1] - 1) < 0.01


def test_tokenizer_gives_llama_cpps_ids():
    llama_cpp = pytest.importorskip("llama_cpp")
    path = find_known("smollm2", KNOWN["smollm2"])
    other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = build(attention_backend="torch").get_tokenizer()
    odd = [
        "",
        " ",
        "\n\n\t",
        "e\u0301",
        "👩‍👩‍👧",
        "١٢٣",
        "don't  stop",
        "x" * 500,
        "\u200b",
        "日本語 text",
        "0123456789 1,000",
    ]
    for text in [*odd, *TEXT.split("\n")]:
        ids = other.tokenize(text.encode(), add_bos=False, special=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def next_turn(first: RequestOutput) -> list[dict[str, str]]:
    """Return the conversation with an answer and a second question."""
    answer = {"role": "assistant", "content": first.outputs[0].text}
    return [*QUESTION, answer, {"role": "user", "content": "What is the capital of Japan?"}]


def test_no_token_of_the_answers_is_a_near_tie():
    """So the other tests of answers may expect the same text from kernels."""
    llm, params = build(attention_backend="torch"), SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    [first] = llm.chat(QUESTION, params)
    [second] = llm.chat(next_turn(first), params)
    for output, city in ((first, "Paris"), (second, "Tokyo")):
        tops = [sorted((each.logprob for each in top.values()), reverse=True) for top in output.outputs[0].logprobs]
        assert city in output.outputs[0].text and min(top[0] - top[1] for top in tops) > MIN_MARGIN


def test_question_is_answered(llm):
    [output] = llm.chat(QUESTION, GREEDY)
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"


def test_recommended_sampling_answers_with_any_seed(llm):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p) == (0.2, 0.9)
    outputs = llm.chat([QUESTION] * 10, [replace(params, seed=seed, max_tokens=24) for seed in range(10)])
    assert all("Paris" in output.outputs[0].text for output in outputs)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_make_chat_answers(backend):
    command = ["make", "--no-print-directory", "chat", f"PY={sys.executable}", f"ARGS=--attention-backend {backend}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, input=QUESTION[-1]["content"], capture_output=True, text=True, check=True
    )
    assert "Paris" in done.stdout


def test_next_turn_hits_the_cache(llm):
    [first] = llm.chat(QUESTION, GREEDY)
    [second] = llm.chat(next_turn(first), GREEDY)
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 16 * 16 and "Tokyo" in second.outputs[0].text


def test_schema_and_choice_are_followed(llm):
    schema = {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(json=schema))
    [output] = llm.chat(QUESTION, params)
    assert json.loads(output.outputs[0].text) == {"city": "Paris"}
    sentences = [f"The capital of France is {city}." for city in ("Rome", "Paris", "Berlin")]
    choice = StructuredOutputsParams(choice=sentences)
    [output] = llm.chat(QUESTION, SamplingParams(temperature=0, structured_outputs=choice))
    assert output.outputs[0].text == sentences[1]


def test_samples_of_a_prompt_share_its_blocks(llm):
    copied = llm.llm_engine.kv_cache.num_blocks_copied
    [output] = llm.chat(QUESTION[1:], SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=32))
    assert len({each.text for each in output.outputs}) > 1 and len(output.prompt_token_ids) % 16
    assert llm.llm_engine.kv_cache.num_blocks_copied - copied == 3, "all but one copy the block where the prompt ends"


def test_drafts_are_accepted_on_real_text_and_change_nothing(llm, token_ids):
    prompt = "Repeat this: " + TEXT[:600] + "\nHere it is again: " + TEXT[:60]
    params = SamplingParams(temperature=0, max_tokens=64)
    drafting = build(
        attention_backend="numba",
        speculative_config={"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4},
    )
    [plain], [drafted] = llm.generate(prompt, params), drafting.generate(prompt, params)
    stats = drafting.llm_engine.stats()
    assert stats.accepted_tokens > 16
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_preempted_requests_give_the_same_tokens(llm):
    small = build(attention_backend="numba", kv_cache_tokens=512, max_model_len=400, watermark=0.0)
    prompts = [TEXT[i * 500 : i * 500 + 700] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    texts = [output.outputs[0].text for output in small.generate(prompts, params)]
    assert small.llm_engine.stats().preemptions > 0
    assert texts == [llm.generate(prompt, params)[0].outputs[0].text for prompt in prompts]


def test_long_context_is_read(llm, token_ids):
    repeated = token_ids * 6
    [output] = llm.generate({"prompt_token_ids": repeated[:7800]}, SamplingParams(temperature=0, max_tokens=16))
    assert output.outputs[0].token_ids == repeated[7800:7816], "the text repeats, so the model continues it"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_can_be_quantized_again(quantization):
    [output] = build(attention_backend="numba", quantization=quantization).chat(QUESTION, GREEDY)
    assert "Paris" in output.outputs[0].text


def test_conversation_through_the_openai_client():
    folder = find_checkpoint("smollm2")
    with serving("--served-model-name", "smollm2", model=folder, backend="auto") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        chat: Any = [*QUESTION]
        first = client.chat.completions.create(model="smollm2", messages=chat, temperature=0, max_tokens=24)
        assert "Paris" in str(first.choices[0].message.content)
        tool: Any = {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]
                },
            },
        }  # fmt: skip
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            called = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "What is the weather in Rome?"}],
                tools=[tool],
                tool_choice=choice,
                temperature=0,
                max_tokens=64,
            )
            [call] = called.choices[0].message.tool_calls or []
            assert call.type == "function" and call.function.name == "weather" and "city" in call.function.arguments
