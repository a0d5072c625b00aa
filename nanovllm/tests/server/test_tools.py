"""Tool calls in chats and responses, whole and streamed, in the formats of each family; and forced calls."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ..testing.assistants import Assistant, assistant
from ..testing.served import unset

pytest.importorskip("llguidance")

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["wood", "house"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": each} for each in (ADD, LOOK)]
RESPONSE_TOOLS: Any = [{"type": "function", **each} for each in (ADD, LOOK)]
ARGUMENTS = '{"a": 1, "b": 22}'
PLACE = '{"place": "wood"}'
FORCED = f'[{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "look", "arguments": {PLACE}}}]'

HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
LLAMA = '{{"name": "{}", "parameters": {}}}'
BOTH = [("add", ARGUMENTS), ("look", PLACE)]
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "hermes": (
        "qwen2",
        "qwen25",
        (),
        {
            "ONE": HERMES.format("add", ARGUMENTS),
            "TWO": "Let me see.\n" + "\n".join(HERMES.format(*each) for each in BOTH),
            "BROKEN": '<tool_call>\n{"name": "add", "arguments": {"a": oops}}\n</tool_call>',
            "EITHER": [HERMES.format("add", ARGUMENTS), "No need."],
        },
    ),
    "llama": (
        "llama3",
        "llama3",
        (),
        {
            "ONE": "<|python_tag|>" + LLAMA.format("add", ARGUMENTS),
            "TWO": "; ".join(LLAMA.format(*each) for each in BOTH),
            "BROKEN": '{"name": "add", "parameters": {"a": oops}}',
            "EITHER": [LLAMA.format("add", ARGUMENTS), "No need."],
        },
    ),
    "mistral": (
        "tekken",
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "ONE": f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]',
            "TWO": "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in BOTH),
            "BROKEN": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": oops}}]',
            "EITHER": [f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]', "No need."],
        },
    ),
}
SHARED = {
    "TEXT": "It is 23.",
    "the result is 23": "So it is 23.",
    "FORCED": FORCED,
    "NAMED": ARGUMENTS,
    "REFUSE": "No, I will not.",
}


@pytest.fixture(
    scope="module", params=["hermes", *(pytest.param(each, marks=pytest.mark.full) for each in ("llama", "mistral"))]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assistant]:
    """Serve a family's format."""
    form, template, special, script = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    with assistant(folder, script | SHARED, form, template, *special) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assistant]:
    """Serve a model whose template knows no tools."""
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    with assistant(tmp_path_factory.mktemp("plain"), SHARED, "qwen2", template) as running:
        yield running


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def streamed(chunks: Any) -> tuple[dict[str, Any], dict[int, dict[str, str]], list[str]]:
    """Return the texts of a stream, its calls by index, and the finish_reasons, as a client adds them up."""
    texts: dict[str, Any] = {"content": ""}
    calls: dict[int, dict[str, str]] = {}
    reasons = []
    for chunk in chunks:
        assert not unset(chunk)
        for choice in chunk.choices:
            texts["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index not in calls:
                    assert call.id and call.type == "function" and call.function.name, "a call begins with its name"
                    calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
                else:
                    assert call.id is None and call.function.name is None
                calls[call.index]["arguments"] += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return texts, calls, reasons


# Calls that the model chooses


def test_call_is_a_part_of_the_message(family):
    completion = family.chat("ONE", tools=TOOLS)
    [choice] = completion.choices
    assert calls_of(choice.message) == [("add", {"a": 1, "b": 22})] and choice.finish_reason == "tool_calls"
    assert choice.message.content is None and choice.message.tool_calls[0].type == "function"
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS, "as the model wrote them"
    assert not unset(completion) and completion.usage.completion_tokens > 10


def test_streamed_call_equals_the_whole_one(family):
    texts, calls, reasons = streamed(family.chat("ONE", tools=TOOLS, stream=True))
    assert [(each["name"], each["arguments"]) for each in calls.values()] == [("add", ARGUMENTS)]
    assert texts["content"] == "" and reasons == ["tool_calls"]


def test_arguments_arrive_in_several_chunks(family):
    chunks = [chunk.choices[0].delta for chunk in family.chat("ONE", tools=TOOLS, stream=True)]
    assert sum(bool(delta.tool_calls) for delta in chunks) > 3


def test_several_calls_have_their_own_ids(family):
    whole = family.answer("TWO", tools=TOOLS).message
    assert calls_of(whole) == [("add", {"a": 1, "b": 22}), ("look", {"place": "wood"})]
    ids = [call.id for call in whole.tool_calls]
    assert len({*ids}) == 2
    texts, calls, _ = streamed(family.chat("TWO", tools=TOOLS, stream=True))
    assert [each["name"] for each in calls.values()] == ["add", "look"] and [*calls] == [0, 1]
    assert (texts["content"] or None) == whole.content


def test_parallel_tool_calls_can_be_turned_off(family):
    message = family.answer("TWO", tools=TOOLS, parallel_tool_calls=False).message
    assert calls_of(message) == [("add", {"a": 1, "b": 22})]


def test_text_stays_text_with_tools(family):
    choice = family.answer("TEXT", tools=TOOLS)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is 23.", None, "stop")
    texts, calls, reasons = streamed(family.chat("TEXT", tools=TOOLS, stream=True))
    assert (texts["content"], calls, reasons) == ("It is 23.", {}, ["stop"])


def test_each_choice_has_its_own_message(family):
    first, second = family.chat("EITHER", tools=TOOLS, n=2).choices
    assert calls_of(first.message) == [("add", {"a": 1, "b": 22})] and second.message.content == "No need."
    assert [first.finish_reason, second.finish_reason] == ["tool_calls", "stop"]
    reasons = streamed(family.chat("EITHER", tools=TOOLS, n=2, stream=True))[2]
    assert sorted(reasons) == ["stop", "tool_calls"]


def test_tool_choice_none_makes_no_call(family):
    choice = family.answer("ONE", tools=TOOLS, tool_choice="none")
    assert choice.message.tool_calls is None and "22" in choice.message.content and choice.finish_reason == "stop"


def test_broken_call_comes_back_as_text(family):
    choice = family.answer("BROKEN", tools=TOOLS)
    assert choice.message.tool_calls is None and "oops" in choice.message.content and choice.finish_reason == "stop"


def test_call_of_a_strict_function_follows_its_schema(family):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": schema}}
    message = family.answer("BROKEN", tools=[tool], max_tokens=100).message
    assert calls_of(message)[0] == ("add", {"a": "x"})


def test_call_that_is_cut_equals_the_streamed_one(family):
    for max_tokens in (12, 30):
        whole = family.answer("TWO", tools=TOOLS, max_tokens=max_tokens)
        texts, calls, reasons = streamed(family.chat("TWO", tools=TOOLS, max_tokens=max_tokens, stream=True))
        sent = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
        assert [(each["name"], each["arguments"]) for each in calls.values()] == sent
        assert texts["content"] == (whole.message.content or "") and reasons == [whole.finish_reason] == ["length"]


def test_no_special_token_reaches_the_client(family):
    for marker in ("ONE", "TWO", "TEXT"):
        completion = family.chat(marker, tools=TOOLS).to_json()
        assert not any(tag in completion for tag in ("[TOOL_CALLS]", "[ARGS]", "<|", "tool_call>", "</s>"))


@pytest.mark.parametrize("marker", ["ONE", "NAMED"])
def test_calls_and_results_go_back_into_the_template(family, marker):
    choice: Any = {"type": "function", "function": {"name": "add"}} if marker == "NAMED" else "auto"
    first = family.answer(marker, tools=TOOLS, tool_choice=choice).message
    [call] = first.tool_calls
    messages = [
        {"role": "user", "content": "ONE"},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "the result is 23"},
    ]
    assert family.answer("", messages=messages, tools=TOOLS).message.content == "So it is 23."
    prompt = family.prompt_of(messages, tools=TOOLS)
    assert '{"a": 1, "b": 22}' in prompt, "arguments reach the template as an object, not as a string in a string"


def test_logprobs_are_those_of_all_tokens(family):
    """Each request has a salt of its own: after a prefix hit, rounding would be different."""

    def chat(salt: str, **fields: Any) -> Any:
        return family.chat("ONE", tools=TOOLS, logprobs=True, extra_body={"cache_salt": salt}, **fields)

    completion = chat("whole")
    assert len(completion.choices[0].logprobs.content) == completion.usage.completion_tokens
    choices = [chunk.choices[0] for chunk in chat("streamed", stream=True)]
    places = [place for choice in choices if choice.logprobs for place in choice.logprobs.content]
    assert places == completion.choices[0].logprobs.content


# Forced calls


def test_required_call_needs_no_format_of_the_family(family, plain):
    for each in (family, plain):
        choice = each.answer("FORCED", tools=TOOLS, tool_choice="required")
        assert calls_of(choice.message) == [("add", {"a": 1, "b": 22}), ("look", {"place": "wood"})]
        assert choice.message.content is None and choice.finish_reason == "tool_calls"


def test_streamed_required_call(plain):
    texts, calls, reasons = streamed(plain.chat("FORCED", tools=TOOLS, tool_choice="required", stream=True))
    assert [(each["name"], each["arguments"]) for each in calls.values()] == [("add", ARGUMENTS), ("look", PLACE)]
    assert (texts["content"], reasons) == ("", ["tool_calls"])


def test_named_call_has_only_arguments_to_write(plain):
    choice_of_tool = {"type": "function", "function": {"name": "add"}}
    choice = plain.answer("NAMED", tools=TOOLS, tool_choice=choice_of_tool)
    assert calls_of(choice.message) == [("add", {"a": 1, "b": 22})] and choice.finish_reason == "tool_calls"
    calls = streamed(plain.chat("NAMED", tools=TOOLS, tool_choice=choice_of_tool, stream=True))[1]
    assert [(each["name"], each["arguments"]) for each in calls.values()] == [("add", ARGUMENTS)]


def test_model_that_refuses_is_forced_to_call(plain):
    only_look: Any = TOOLS[1:]
    message = plain.answer("REFUSE", tools=only_look, tool_choice="required", parallel_tool_calls=False).message
    [(name, arguments)] = calls_of(message)
    assert name == "look" and arguments["place"] in ("wood", "house")


def test_unsupported_keyword_matters_only_to_a_strict_function(plain):
    """Libraries write keywords for validators, such as uniqueItems, which no grammar can enforce."""
    items = {"type": "array", "items": {"enum": [1]}, "maxItems": 1, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": items}, "required": ["a"], "additionalProperties": False}
    function = {"name": "sum", "parameters": schema}
    choice: Any = {"type": "function", "function": {"name": "sum"}}
    message = plain.answer("REFUSE", tools=[{"type": "function", "function": function}], tool_choice=choice).message
    [(name, arguments)] = calls_of(message)
    assert name == "sum" and arguments["a"] in ([], [1])
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        plain.chat("REFUSE", tools=[{"type": "function", "function": function | {"strict": True}}], tool_choice=choice)


def test_allowed_tools_limit_a_required_call(plain):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    message = plain.answer("REFUSE", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).message
    assert [name for name, _ in calls_of(message)] == ["look"]


def test_template_without_tools_gives_text(plain):
    choice = plain.answer("TEXT", tools=TOOLS, tool_choice="auto")
    assert (choice.message.content, choice.finish_reason) == ("It is 23.", "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
        {"tools": TOOLS, "tool_choice": "always"},
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
    ],
    ids=str,
)
def test_impossible_choice_is_refused(plain, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        plain.chat("ONE", **fields)
    assert caught.value.param == "tool_choice"


NAMED_ADD: Any = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("marker", "choice", "lengths"),
    [("NAMED", NAMED_ADD, (1, 4, 7)), ("FORCED", "required", (1, 20, 34))],
    ids=["named", "required"],
)
def test_forced_call_that_is_cut_is_a_call_with_partial_arguments(plain, marker, choice, lengths):
    """This is the form of OpenAI's API, whole and streamed."""
    fields, seen = {"tools": TOOLS, "tool_choice": choice}, set()
    for max_tokens in lengths:
        [answer] = plain.chat(marker, max_tokens=max_tokens, **fields).choices
        assert answer.finish_reason == "length" and answer.message.content is None
        sent = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
        texts, calls, reasons = streamed(plain.chat(marker, max_tokens=max_tokens, stream=True, **fields))
        assert [(each["name"], each["arguments"]) for each in calls.values()] == sent
        assert (texts["content"], reasons) == ("", ["length"])
        assert all(ARGUMENTS.startswith(arguments) for name, arguments in sent if name == "add")
        seen |= {*sent}
    assert any(name == "add" and arguments not in ("", ARGUMENTS) for name, arguments in seen)


def test_forced_call_that_is_cut_makes_an_incomplete_response(plain):
    fields = {"tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 5}
    response = plain.response("NAMED", **fields)
    *_, last = plain.response("NAMED", stream=True, **fields)
    assert last.type == "response.incomplete"
    for each in (response, last.response):
        assert (each.status, each.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        [call] = each.output
        assert (call.type, call.name, call.status) == ("function_call", "add", "incomplete")
        assert ARGUMENTS.startswith(call.arguments) and 0 < len(call.arguments) < len(ARGUMENTS)
    assert response.output[0].arguments == last.response.output[0].arguments


def test_forced_call_that_a_stop_string_cuts_is_a_call(plain):
    fields = {"tools": TOOLS, "tool_choice": NAMED_ADD, "stop": ['"b"']}
    message = plain.answer("NAMED", **fields).message
    assert message.content is None and message.tool_calls[0].function.arguments == '{"a": 1, '
    assert streamed(plain.chat("NAMED", stream=True, **fields))[1][0]["arguments"] == '{"a": 1, '


# Responses


def test_response_has_items_for_text_and_calls(family):
    response = family.response("TWO", tools=RESPONSE_TOOLS)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("add", {"a": 1, "b": 22}),
        ("look", {"place": "wood"}),
    ]
    assert not unset(response) and response.status == "completed"
    assert response.output_text == (family.answer("TWO", tools=TOOLS).message.content or "")


def test_events_of_a_call(family):
    events = list(family.response("ONE", tools=RESPONSE_TOOLS, stream=True))
    for event in events:
        assert not unset(event), event
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:3] == ["created", "in_progress", "output_item.added"]
    assert names[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == ARGUMENTS == events[-3].arguments and len(deltas) > 3
    [item] = events[-1].response.output
    assert (item.name, item.arguments, item.status) == ("add", ARGUMENTS, "completed")
    assert events[2].item.id == item.id == events[-3].item_id and events[2].item.arguments == ""


def test_logprobs_of_a_response_are_those_of_all_tokens(family):
    """The last token has no text of its own."""
    fields = {"tools": RESPONSE_TOOLS, "top_logprobs": 1}
    *_, last = family.response("TEXT", stream=True, **fields)
    for response in (family.response("TEXT", **fields), last.response):
        [part] = response.output[0].content
        assert len(part.logprobs) == response.usage.output_tokens
    assert response.output_text == "It is 23."


def test_client_reads_the_stream_of_a_call(family):
    fields: Any = {"model": "scripted", "input": "TWO", "tools": RESPONSE_TOOLS, "max_output_tokens": 300}
    with family.client.responses.stream(temperature=0, **fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert [item.name for item in final.output if item.type == "function_call"] == ["add", "look"]


def test_output_and_results_can_be_sent_back_as_input(family):
    first = family.response("ONE", tools=RESPONSE_TOOLS)
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "the result is 23"}
    question = {"role": "user", "content": "ONE"}
    assert family.response([question, *first.output, result], tools=RESPONSE_TOOLS).output_text == "So it is 23."


def test_response_can_be_forced_to_call(plain):
    choice: Any = {"type": "function", "name": "add"}
    [call] = plain.response("NAMED", tools=RESPONSE_TOOLS, tool_choice=choice).output
    assert (call.type, call.name, call.arguments) == ("function_call", "add", ARGUMENTS)
    first, second = plain.response("FORCED", tools=RESPONSE_TOOLS, tool_choice="required").output
    assert [first.name, second.name] == ["add", "look"]
