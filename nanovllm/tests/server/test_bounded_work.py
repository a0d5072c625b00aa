"""The work of a token is bounded by the text so far, and the work of admission by the body, whatever a client sends.

Work is counted: bytecodes of Python, and elements of tensors. A new field of a body or of the parameters needs an entry
in a table here.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...beam_search import BeamSearchParams
from ...llm_engine import LLMEngine
from ...options.engine_args import EngineArgs
from ...requests import structured_outputs
from ...requests.pooling_params import PoolingParams
from ...requests.sampling_params import (
    UNSUPPORTED,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from ...server.bodies import InvalidRequest, ParsedRequest
from ...server.chat import ChatCompletionRequest
from ...server.completions import CompletionRequest
from ...server.embeddings import EmbeddingRequest
from ...server.engine_process import Add
from ...server.generation import Work as Request
from ...server.info import DetokenizeRequest, TokenizeRequest
from ...server.limits import check_size
from ...server.options import ServerOptions
from ...server.responses import ResponsesRequest
from ...server.served_model import TokenizedPrompt
from ..testing.inside import LONG, inside, until

PACKAGE = f"{Path(__file__).parents[2]}"
HUGE = 2**63
VOCAB = 320  # tokens of the checkpoint
NUM_TOKENS = 2  # whose work is counted
MOST_BYTECODES = 20_000  # for a token, beside those of a plain one
MOST_ELEMENTS = 100 * VOCAB  # likewise


class TooMuchError(BaseException):
    """The work is far beyond its limit. It passes through `except Exception`."""


class Work(NamedTuple):
    """What was counted."""

    bytecodes: int
    elements: int


class Elements(TorchDispatchMode):
    """A count of the elements that torch's operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def work_of(function: Callable[[], object], most: int = 3_000_000) -> Work:
    """Return the work of the package in a call. Raise TooMuchError beyond `most` bytecodes: it may never end."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None  # torch imports modules when it first needs them
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if count > most:
            raise TooMuchError(f"more than {most} bytecodes")
        return trace

    with Elements() as elements:
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)
    return Work(count, elements.count)


# A token


def forms(**options: Any) -> list[dict[str, Any]]:
    """Return parameters with a structured output that goes on, and these options."""
    return [{"structured_outputs": StructuredOutputsParams(**{"regex": "(a|b|c|d|e|f| )*"} | options)}]


def repetitions(*sizes: int) -> dict[str, Any]:
    return {"repetition_detection": RepetitionDetectionParams(*sizes)}


IDS = [*range(VOCAB)] * 200
NO_EFFECT: list[dict[str, Any]] = []  # of its own: the table has another field's entry for it, or it has two values
TOKENS: dict[str, list[dict[str, Any]]] = {
    "n": [{"n": 4}, {"n": 4, "logprobs": 20}],
    "temperature": [{"temperature": 1e300, "top_p": 1e-300, "top_k": HUGE, "min_p": 1.0, "seed": HUGE - 1}],
    "frequency_penalty": [{"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1e9}],
    "top_k": [{"top_k": HUGE, "temperature": 1.0}, {"top_k": HUGE, "top_p": 0.5, "temperature": 1e9}],
    **dict.fromkeys(("presence_penalty", "repetition_penalty", "top_p", "min_p", "seed"), NO_EFFECT),
    "stop": [{"stop": "e" * 4096}, {"stop": [chr(97 + i % 26) * 128 for i in range(32)]}, {"stop": ["e" * 128] * 32}],
    "stop_token_ids": [{"stop_token_ids": [319] * 60_000}],
    "max_tokens": [{"max_tokens": HUGE}],
    "min_tokens": [{"min_tokens": 50, "max_tokens": 55, "stop_token_ids": [319] * 60_000}],
    "logprobs": [{"logprobs": 20}],
    "prompt_logprobs": [{"prompt_logprobs": 20}],
    "logprob_token_ids": [{"logprob_token_ids": [*range(128)]}],
    "detokenize": [{"detokenize": False}],
    "skip_special_tokens": [{"skip_special_tokens": False, "skip_reading_prefix_cache": True}],
    "include_stop_str_in_output": [{"include_stop_str_in_output": True, "stop": ["e" * 128] * 32}],
    "output_kind": [{"output_kind": kind} for kind in RequestOutputKind],
    "stream_interval": [{"stream_interval": HUGE}],
    "structured_outputs": forms(),
    "logit_bias": [{"logit_bias": dict.fromkeys(range(VOCAB), 1.0)}],
    "allowed_token_ids": [{"allowed_token_ids": IDS}],
    "bad_words": [{"bad_words": [f"{'e' * i}{'a' * 400}" for i in range(1, 129)]}, {"bad_words": ["e" * 500] * 128}],
    "repetition_detection": [repetitions(HUGE, 0, 2), repetitions(HUGE, HUGE, 2), repetitions(HUGE, 0, HUGE)],
    **dict.fromkeys(("ignore_eos", "spaces_between_special_tokens", "flat_logprobs", "skip_clone"), NO_EFFECT),
    "skip_reading_prefix_cache": NO_EFFECT,
}
FORMS: dict[str, list[dict[str, Any]]] = {
    "regex": forms(regex="(a{1,900}|b{1,900}| )*"),
    "json": forms(regex=None, json={"type": "array", "items": {"enum": [f"{i}" * 9 for i in range(900)]}}),
    "choice": forms(regex=None, choice=[f"{i}" * 30 for i in range(900)]),
    "grammar": forms(regex=None, grammar="start: " + " | ".join(f'"{i}{"x" * 30}"' for i in range(900))),
    "json_object": forms(regex=None, json_object=True),
    "reasoning_end_str": forms(reasoning_end_str="e" * 60_000) + forms(reasoning_end_str="x" * 60_000),
    "reasoning_start_str": forms(reasoning_start_str="e" * 60_000, reasoning_end_str="x"),
    "tool_call_start_str": forms(tool_call_start_str="e" * 60_000),
    "whitespace_pattern": forms(regex=None, json_object=True, whitespace_pattern=" {0,900}"),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties", "structural_tag"), NO_EFFECT),
}
OTHERS = {  # checked numbers and flags, none of which a step reads more than once
    PoolingParams: {"use_activation", "dimensions", "task"},
    RepetitionDetectionParams: {"max_pattern_size", "min_pattern_size", "min_count"},
    BeamSearchParams: {  # beam_width is at most max_num_seqs, and the others are one number for a beam
        *("beam_width", "max_tokens", "ignore_eos", "length_penalty", "early_stopping", "temperature"),
        *("include_stop_str_in_output", "structured_outputs", "skip_special_tokens", "watermarking"),
    },
}


@pytest.fixture(scope="module")
def engine(checkpoint) -> Iterator[LLMEngine]:
    return LLMEngine.from_engine_args(
        EngineArgs(model=str(checkpoint), offload_policy="load", attention_backend="torch", max_num_seqs=8)
    )


def work_of_tokens(engine: LLMEngine, **options: Any) -> Work:
    """Return the work of a few tokens of each sample, after the first ones."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | options)
    engine.add_request("one", [5, 6, 7], params)

    def steps() -> None:
        for _ in range(NUM_TOKENS):
            engine.step()

    try:
        work_of(steps)  # of the prompt, and of each sample's first tokens
        return work_of(steps)
    finally:
        engine.abort_request("one")


@pytest.fixture(scope="module")
def plain(engine) -> Work:
    return work_of_tokens(engine)


def test_each_field_of_the_parameters_has_an_entry():
    assert TOKENS.keys() | {*UNSUPPORTED} == {field.name for field in fields(SamplingParams)}
    assert FORMS.keys() == {field.name for field in fields(StructuredOutputsParams)}
    for kind, names in OTHERS.items():
        assert names == {field.name for field in fields(kind)}, kind


@pytest.mark.parametrize(
    "options", [pytest.param(each, id=name) for name, all in (TOKENS | FORMS).items() for each in all]
)
def test_work_for_a_token_does_not_grow_with_what_a_client_sends(engine, plain, options):
    work, num_rows = work_of_tokens(engine, **options), options.get("n", 1)
    assert work.bytecodes <= num_rows * (plain.bytecodes + NUM_TOKENS * MOST_BYTECODES)
    assert work.elements <= num_rows * (plain.elements + NUM_TOKENS * MOST_ELEMENTS)


def test_samples_share_the_work_for_their_grammar(engine, monkeypatch):
    made, make = [], structured_outputs.grammar_text
    monkeypatch.setattr(structured_outputs, "grammar_text", lambda *args: (made.append(args), make(*args))[1])
    engine.add_request("one", [5], SamplingParams(n=64, max_tokens=4, **forms()[0]))
    engine.abort_request("one")
    assert len(made) == 1


# Admission

Grow = Callable[[int], Any]  # a value of this size


def numbers(size: int) -> list[int]:
    return [5] * size


def text(size: int) -> str:
    return "ab " * size


def words(size: int) -> list[str]:
    return [text(size // 16)] * 16


def schema(size: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(size)}}


def functions(size: int) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"f{i}", "function": {"name": f"f{i}"}} for i in range(size)]


def calls(size: int) -> list[dict[str, Any]]:
    return [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": f"{i}"} for i in range(size)]


def messages(size: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}] * size


def mapping(size: int) -> dict[str, str]:
    return {f"{i}": "a" for i in range(size)}


def constant(value: Any) -> Grow:
    return lambda size: value


FLAG, NUMBER = constant(True), constant(HUGE)
NAMES = {
    FLAG: """stream ignore_eos detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
        skip_reading_prefix_cache include_reasoning add_special_tokens return_token_ids echo add_generation_prompt
        continue_final_message parallel_tool_calls return_token_strs use_activation""",
    NUMBER: """presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed min_tokens n
        max_tokens prompt_logprobs stream_interval truncate_prompt_tokens best_of max_completion_tokens top_logprobs
        max_output_tokens dimensions""",
    numbers: "stop_token_ids logprob_token_ids allowed_token_ids tokens",
    text: "model request_id cache_salt instructions user prompt",
    words: "stop bad_words",
    messages: "messages documents",
    functions: "tools",
    mapping: "chat_template_kwargs metadata",
    constant(1): "logprobs",
    constant("low"): "reasoning_effort",
    constant("left"): "truncation_side",
    constant("base64"): "encoding_format",
    constant({"effort": "low"}): "reasoning",
    constant({"include_usage": True}): "stream_options",
    constant({"max_pattern_size": HUGE, "min_count": 2}): "repetition_detection",
    lambda size: {str(i): 1 for i in range(size)}: "logit_bias",
    lambda size: {"type": "json_schema", "json_schema": {"schema": schema(size)}}: "response_format",
    lambda size: {"json": schema(size)}: "structured_outputs",
    lambda size: {"format": {"type": "json_schema", "schema": schema(size)}}: "text",
    lambda size: ["reasoning.encrypted_content"] * size: "include",
    lambda size: {"type": "allowed_tools", "mode": "auto", "tools": functions(size)}: "tool_choice",
    calls: "input",
}
GROW: dict[str, Grow] = {name: grow for grow, names in NAMES.items() for name in names.split()}
BODIES: dict[type[Any], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": messages(1)},
    ResponsesRequest: {"input": "a"},
    EmbeddingRequest: {"input": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [5]},
}
FIELDS = [(kind, name) for kind in BODIES for name in kind.model_fields]
CASES = [(kind, name) for kind, name in FIELDS if GROW[name](1) != GROW[name](2)]  # a constant value cannot grow
TOGETHER = {"logprob_token_ids": {"logprobs": 1}, "tool_choice": {"tools": None}, "stream_options": {"stream": True}}


def work_of_admission(engine: LLMEngine, kind: type[Any], name: str, size: int) -> int | None:
    """Return the bytecodes from a body to its sequences, or None if the body is refused."""
    grow = {"input": text}.get(name, GROW[name]) if kind is EmbeddingRequest else GROW[name]
    beside = {other: functions(size) if value is None else value for other, value in TOGETHER.get(name, {}).items()}
    beside = {other: value for other, value in beside.items() if other in kind.model_fields}
    raw = json.dumps({**BODIES[kind], **beside, name: grow(size)}).encode()

    def admit() -> None:
        body = kind.parse(raw)
        if not hasattr(body, "parsed"):
            return
        parsed = body.parsed()
        params = SamplingParams(**parsed.sampling_params({}))
        params.structured_outputs = None  # llguidance builds its grammar, within limits of its own
        add = Add("a", [5, 6], params, None, parsed.pooling_params, parsed.cache_salt)
        check_size([add], ServerOptions(), engine.max_model_len)
        engine.input_processor.process("a", [5, 6], parsed.pooling_params or params, parsed.cache_salt)

    try:
        return work_of(admit).bytecodes
    except ValueError:
        return None


def test_each_field_of_a_body_has_an_entry():
    assert GROW.keys() == {name for _, name in FIELDS}


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_work_of_admission_is_linear_in_the_body(engine, kind, name):
    small, large = (work_of_admission(engine, kind, name, size) for size in (50, 200))
    assert large is None or small is None or large <= 5 * small, f"{small} bytecodes become {large}"


def test_parameters_are_not_repeated_for_thousands_of_prompts():
    params = SamplingParams(stop_token_ids=[*range(60_000)])
    with pytest.raises(InvalidRequest, match=r"bytes of parameters for each of 2,000 prompts, .* 8,388,608") as refused:
        check_size([Add(f"{i}", [5], params, None) for i in range(2000)], ServerOptions(), 64)
    assert refused.value.param == "prompt"
    check_size([Add("0", [5], params, None)], ServerOptions(), 64)


@pytest.mark.anyio
async def test_running_requests_get_tokens_while_a_large_body_is_added(checkpoint):
    events: list[str] = []

    def note(engine):
        add, step = engine.add_request, engine.step
        engine.add_request = lambda *args, **options: (events.append("add"), add(*args, **options))[1]
        engine.step = lambda: (events.append("step"), step())[1]

    async with inside(checkpoint, note) as server:
        running = asyncio.create_task(server.post(**LONG))
        await until(lambda: events.count("step") > 1)
        ids = [*range(VOCAB)] * 60
        large = {"prompt": [[5]] * 10, "max_tokens": 1, "allowed_token_ids": ids}
        assert (await server.post(**large)).status_code == (await running).status_code == 200
    between = [len(adds) for adds in "".join(each[0] for each in events).split("s")]
    assert sum(between) == 11 and max(between) <= 4, "of requests of 50 KB, between two steps"


def test_usage_of_a_stream_costs_the_same_however_many_prompts_there_are():

    def usage(count: int) -> int:
        body, prompts = ParsedRequest([], {}), [TokenizedPrompt([5])] * count
        request = Request(body, "m", prompts, SamplingParams(), "id", "id")
        request.usage()
        return work_of(request.usage).bytecodes

    assert usage(1000) <= 2 * usage(1)
