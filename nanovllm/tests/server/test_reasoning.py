"""Reasoning apart from the answer, in chats and responses; with tools, and with structured outputs after it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..testing.assistants import TEMPLATES, Assistant, assistant
from ..testing.scripted_model import follow, write_scripted_checkpoint
from ..testing.served import unset
from .test_tools import ARGUMENTS, FORCED, HERMES, RESPONSE_TOOLS, TOOLS, calls_of, streamed

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl"]}},
    "required": ["animal"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
THOUGHT = "A {fox} or an owl?"
SCRIPT = {
    "THINK": f"<think>\n{THOUGHT}\n</think>\n\nThe fox.",
    "SHORT": "The fox.",
    "CALL": f"<think>\nHm.\n</think>\n\n{HERMES.format('add', ARGUMENTS)}",
    "FORCED": f"<think>\nHm.\n</think>{FORCED}",
    "NAMED": f"<think>\nHm.\n</think>{ARGUMENTS}",
    "FORM": f'<think>\n{THOUGHT}\n</think>{{"animal": "owl"}}',
    "WRONG": f"<think>\n{THOUGHT}\n</think>The fox.",
    "UNTHOUGHT": '{"animal": "owl"}',
    "AT ONCE": FORCED,
    "CALL THEN": f"<think>\nHm.\n</think>{HERMES.format('add', ARGUMENTS)}",
    "CALL NOW": HERMES.format("add", ARGUMENTS),
    "BOTH": ["<think>\nOne.\n</think>\n\nFirst.", "Second."],
}
OPENED = {  # the prompt has the opening tag
    "THINK": f"{THOUGHT}\n</think>\n\nThe fox.",
    "FORM": f'{THOUGHT}\n</think>{{"animal": "owl"}}',
    "SHORT": "Still thinking about the fox",
}
DISTILL = """\
{% for message in messages %}{{ message.role }}: {{ message.content.split('</think>')[-1] }}
{% endfor %}{% if add_generation_prompt %}assistant: <think>
{% endif %}"""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assistant]:
    """Serve a model that opens its thought itself. Its tags are special tokens, which clients never see."""
    with assistant(tmp_path_factory.mktemp("qwen"), SCRIPT, "qwen3", "qwen3", "<think>", "</think>") as running:
        yield running


@pytest.fixture(scope="module")
def distill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assistant]:
    """Serve a model whose template opens the thought. Its tags are ordinary text of several tokens."""
    with assistant(tmp_path_factory.mktemp("distill"), OPENED, "llama3", DISTILL) as running:
        yield running


@pytest.mark.parametrize("name", ["qwen", "distill"])
def test_reasoning_is_apart_from_the_answer(name, request):
    model = request.getfixturevalue(name)
    message = model.answer("THINK").message
    assert (message.reasoning_content, message.content) == (THOUGHT, "The fox.")
    assert message.reasoning == message.reasoning_content, "under both names that vLLM has used"


@pytest.mark.parametrize("name", ["qwen", "distill"])
def test_streamed_reasoning_comes_before_the_answer(name, request):
    deltas = [chunk.choices[0].delta for chunk in request.getfixturevalue(name).chat("THINK", stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    texts = [delta.content or "" for delta in deltas]
    assert ("".join(thoughts), "".join(texts)) == (THOUGHT, "The fox.")
    assert sum(map(bool, thoughts)) > 3 and not any(texts[: max(i for i, each in enumerate(thoughts) if each)])


def test_answer_without_a_thought(qwen):
    message = qwen.answer("SHORT").message
    assert message.content == "The fox." and not hasattr(message, "reasoning_content")


def test_unfinished_thought_is_reasoning(distill):
    choice = distill.answer("SHORT", max_tokens=5)
    assert choice.message.content is None and choice.message.reasoning and choice.finish_reason == "length"


def test_thinking_can_be_turned_off(qwen):
    assert qwen.answer("SHORT", extra_body=NO_THOUGHT).message.content == "The fox."
    structured = qwen.answer("WRONG", extra_body=NO_THOUGHT, response_format=FORM).message
    assert json.loads(structured.content)["animal"] in ("fox", "owl"), "the format begins at once"


def test_reasoning_can_be_left_out_of_the_response(qwen):
    completion = qwen.chat("THINK", extra_body={"include_reasoning": False})
    assert completion.choices[0].message.content == "The fox." and "owl" not in completion.to_json()
    chunks = [chunk.to_json() for chunk in qwen.chat("THINK", extra_body={"include_reasoning": False}, stream=True)]
    assert not any("owl" in chunk for chunk in chunks)
    [item] = qwen.response("THINK", extra_body={"include_reasoning": False}).output
    assert item.type == "message"


def test_each_choice_has_its_own_thought(qwen):
    first, second = qwen.chat("BOTH", n=2).choices
    assert (first.message.reasoning_content, first.message.content) == ("One.", "First.")
    assert second.message.content == "Second."


def test_reasoning_tokens_are_counted(qwen):
    completion = qwen.chat("THINK")
    details = completion.usage.completion_tokens_details
    assert 5 < details.reasoning_tokens < completion.usage.completion_tokens - 3
    assert qwen.chat("SHORT").usage.completion_tokens_details.reasoning_tokens == 0
    usage = list(qwen.chat("THINK", stream=True, stream_options={"include_usage": True}))[-1].usage
    assert usage.completion_tokens_details == details
    assert qwen.response("THINK").usage.output_tokens_details.reasoning_tokens == details.reasoning_tokens


def test_earlier_reasoning_reaches_the_template(qwen):
    messages = [
        {"role": "user", "content": "THINK"},
        {"role": "assistant", "reasoning_content": "I know the fox.", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "23"},
    ]
    assert "<think>\nI know the fox.\n</think>" in qwen.prompt_of(messages)


CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}


# With tools


def test_call_after_a_thought(qwen):
    choice = qwen.answer("CALL", tools=TOOLS)
    assert choice.message.reasoning_content == "Hm." and choice.message.content is None
    assert calls_of(choice.message) == [("add", {"a": 1, "b": 22})] and choice.finish_reason == "tool_calls"
    _, calls, reasons = streamed(qwen.chat("CALL", tools=TOOLS, stream=True))
    assert calls[0]["arguments"] == ARGUMENTS and reasons == ["tool_calls"]


def test_forced_call_after_a_thought(qwen):
    message = qwen.answer("FORCED", tools=TOOLS, tool_choice="required").message
    assert message.reasoning_content == "Hm." and [name for name, _ in calls_of(message)] == ["add", "look"]
    named: Any = {"type": "function", "function": {"name": "add"}}
    message = qwen.answer("NAMED", tools=TOOLS, tool_choice=named).message
    assert message.reasoning_content == "Hm." and calls_of(message) == [("add", {"a": 1, "b": 22})]


def test_forced_call_without_a_thought(qwen):
    message = qwen.answer("AT ONCE", tools=TOOLS, tool_choice="required").message
    assert [name for name, _ in calls_of(message)] == ["add", "look"], (
        "the model may skip the thought, but not the call"
    )


# With structured outputs


@pytest.mark.parametrize("name", ["qwen", "distill"])
def test_format_begins_after_the_thought(name, request):
    message = request.getfixturevalue(name).answer("FORM", response_format=FORM).message
    assert (message.reasoning_content, message.content) == (THOUGHT, '{"animal": "owl"}')


def test_answer_after_the_thought_must_follow_the_format(qwen):
    message = qwen.answer("WRONG", response_format=FORM, extra_body={"structured_outputs": None}).message
    assert message.reasoning_content == THOUGHT and json.loads(message.content)["animal"] in ("fox", "owl")


@pytest.mark.parametrize("seed", range(2))
def test_preempted_samples_keep_their_place_in_the_grammar(tmp_path, seed):
    """The pool holds two of four samples, so some are preempted within the thought and after it."""
    from ... import LLM, SamplingParams, StructuredOutputsParams

    model = write_scripted_checkpoint(tmp_path / "model", "qwen3", "<think>", "</think>", positions=512)
    llm = LLM(model, block_size=4, kv_cache_tokens=64, max_model_len=64, offload_policy="recompute")
    replies = [str(SCRIPT[name]) for name in ("FORM", "WRONG", "UNTHOUGHT", "FORM")]
    follow({"MARKER": replies}, llm.llm_engine)
    outputs = StructuredOutputsParams(
        json=SCHEMA, whitespace_pattern=" ?", reasoning_start_str="<think>", reasoning_end_str="</think>"
    )
    params = SamplingParams(
        n=4, temperature=0.5, seed=seed, max_tokens=100, structured_outputs=outputs, skip_special_tokens=False
    )
    [output] = llm.generate(["MARKER"], params, use_tqdm=False)
    assert llm.stats().preemptions > 0
    for reply, sample in zip(replies, output.outputs, strict=True):
        thought, tag, answer = sample.text.rpartition("</think>")
        assert json.loads(answer)["animal"] in ("fox", "owl") and bool(tag) == ("<think>" in reply)
        assert thought == "" or THOUGHT in thought


def test_model_may_call_a_tool_instead_of_the_format(qwen):
    for marker, field in (("CALL THEN", {}), ("CALL NOW", {"extra_body": NO_THOUGHT})):
        message = qwen.answer(marker, tools=TOOLS, response_format=FORM, **field).message
        assert calls_of(message) == [("add", {"a": 1, "b": 22})]
    assert qwen.answer("FORM", tools=TOOLS, response_format=FORM).message.content == '{"animal": "owl"}'
    content = qwen.answer("WRONG", tools=TOOLS[:1], response_format=FORM, tool_choice="none").message.content
    assert json.loads(content)["animal"] in ("fox", "owl")


# Responses


def test_response_has_an_item_for_the_thought(qwen):
    response = qwen.response("THINK")
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT) and thought.summary == []
    assert message.content[0].text == response.output_text == "The fox." and not unset(response)


def test_events_of_a_thought_and_a_call(qwen):
    events = list(qwen.response("CALL", tools=RESPONSE_TOOLS, stream=True))
    for i, event in enumerate(events):
        assert not unset(event) and event.sequence_number == i, event
    names = [event.type.removeprefix("response.") for event in events]
    first = ["created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"]
    assert names[: len(first)] == first
    texts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    [done] = [event for event in events if event.type == "response.reasoning_text.done"]
    assert "".join(texts) == done.text == "Hm."
    places = [event.output_index for event in events if hasattr(event, "output_index")]
    assert places == sorted(places) and {*places} == {0, 1}
    assert [item.type for item in events[-1].response.output] == ["reasoning", "function_call"]


def test_thought_and_call_can_be_sent_back_as_input(qwen):
    question = {"role": "user", "content": "CALL"}
    first = qwen.response([question], tools=RESPONSE_TOOLS)
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "SHORT"}
    assert qwen.response([question, *first.output, result], tools=RESPONSE_TOOLS).output_text == "The fox."


def test_parsers_can_be_turned_off(tmp_path):
    options = {"tool_call_parser": "none", "reasoning_parser": "none"}
    with assistant(tmp_path, SCRIPT, "qwen3", (TEMPLATES / "qwen3.jinja").read_text(), **options) as running:
        message = running.answer("CALL", tools=TOOLS).message
    assert message.tool_calls is None and message.content == SCRIPT["CALL"]
