"""/v1/responses, with the official client: stateless texts, whole and as a stream."""

import json
from typing import cast

import openai
import pytest
from openai.types.responses import ResponseErrorEvent

from ...server.errors import RequestFailed
from ...server.openai.response_bodies import ResponseBody
from ...server.openai.response_objects import ResponseObjects
from ...server.openai.work import Work
from .openai_types import unset
from .served import stream

PROMPT = "Tell me of a fox."


@pytest.fixture(scope="module")
def responses(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def test_a_response_is_the_chats_answer(responses, served):
    asked = {"model": "storyteller", "temperature": 0, "max_output_tokens": 6}
    response = responses.create(input=PROMPT, instructions="Be kind.", **asked)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": PROMPT}]
    chat = served.chat(messages=messages, max_tokens=6)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 6)
    assert response.instructions == "Be kind." and response.id.startswith("resp_")
    parts = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
    ]
    assert responses.create(input=parts, **asked).output_text == response.output_text


def test_a_stream_of_events(responses):
    asked = {"model": "storyteller", "input": PROMPT, "temperature": 0, "max_output_tokens": 5}
    whole = responses.create(**asked).output_text
    events = list(responses.create(**asked, stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].response.output_text == events[-4].text == whole
    for event in events:
        assert not unset(event), "each field that the client's types require is there"


def test_the_clients_own_reader_of_streams(responses):
    extra = {"structured_outputs": {"choice": ["a 🦊 fox"]}}
    with responses.stream(model="storyteller", input=PROMPT, temperature=0, extra_body=extra) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "" not in texts and "".join(texts) == "a 🦊 fox" == final.output_text
    assert final.status == "completed" and not unset(final)


def test_an_answer_goes_back_as_a_part_of_the_next_question(responses, served):
    asked = {"model": "storyteller", "temperature": 0, "max_output_tokens": 4}
    first = responses.create(input=PROMPT, **asked)
    question = {"role": "user", "content": PROMPT}
    text = responses.create(input=[question, *first.output, question], **asked).output_text
    answer = {"role": "assistant", "content": first.output_text}
    chat = served.chat(messages=[question, answer, question], max_tokens=4)
    assert text == chat["choices"][0]["message"]["content"]


def test_a_form_and_log_probabilities(responses):
    schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    form = {"type": "json_schema", "name": "animal", "schema": schema | {"additionalProperties": False}}
    extra = {"frequency_penalty": 2}  # the story teller would write spaces for ever
    asked = {"model": "storyteller", "input": PROMPT, "temperature": 0, "max_output_tokens": 90}
    response = responses.create(**asked, text={"format": form}, top_logprobs=2, extra_body=extra)
    assert json.loads(response.output_text)["legs"] in (2, 4) and response.status == "completed"
    [part] = response.output[0].content
    assert len(part.logprobs) == response.usage.output_tokens and len(part.logprobs[0].top_logprobs) == 2


def test_a_conversation_with_a_call_and_what_came_of_it(responses):
    items = [
        {"role": "user", "content": "Look!"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a fox"},
    ]
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    assert responses.create(model="storyteller", input=items, tools=tools, max_output_tokens=3).output_text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "its body has no input"),
        ({"input": []}, "input is empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content has a part that is no"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens must be at least 1, not 0"),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format.type must be one of"),
        ({"input": "a", "text": {"verbosity": "low"}}, 'text.verbosity "low" is not served here'),
        ({"input": "a", "reasoning": {"depth": 1}}, "unknown field 'depth': reasoning may have"),
        ({"input": "a", "truncation": "auto"}, 'truncation "auto" is not served here'),
        ({"input": [{"role": "user", "content": "a"}] * 8193}, "input has 8,193 entries: at most 8,192 are taken"),
        ({"input": "a", "metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata has 17 entries: at most 16"),
        ({"input": "a", "metadata": 5}, "metadata must be an object of texts, not 5"),
        ({"input": "a " * 1500}, "the prompt has 1511 tokens; max_model_len 1024"),
        ({"input": [{"type": "reasoning"}]}, 'input[0]: an item of type "reasoning" is not served here'),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not served here, where no answer"),
        ({"input": "a", "background": True}, "background true is not served here"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, 'a tool of type "web_search" is not served here'),
        ({"input": "a", "tool_choice": "required"}, 'tool_choice "required" is not served here'),
        ({"input": "a", "max_tokens": 3}, "unknown field 'max_tokens': "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_response_cannot_have_is_told(served, body, says):
    response = served.post("/v1/responses", **body)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(says)


def test_what_changes_nothing_is_taken(responses):
    """As clients send it."""
    extra = {"priority": 0, "prompt_cache_options": {}}
    options = {"reasoning": {"effort": "low", "summary": "auto"}, "stream_options": {"include_obfuscation": False}}
    asked = {"metadata": {"a": "b"}, "store": True, "user": "u", "service_tier": "auto", "truncation": "disabled"}
    response = responses.create(
        model="storyteller", input="a", max_output_tokens=1, extra_body=extra, **options, **asked
    )
    assert response.metadata == {"a": "b"} and response.temperature is not None and not unset(response)


def test_an_error_behind_the_first_events_is_one_that_the_client_reads():
    objects = ResponseObjects(cast(Work, None), ResponseBody({}, {}))
    name, data = objects.as_event(RequestFailed("it broke off")).decode().strip().split("\n")
    event = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "), strict=True)
    assert (name, event.message, event.code) == ("event: error", "it broke off", "server_error")


def test_events_have_names_of_their_own(served):
    with pytest.raises(AssertionError, match=r"event: response\.created"):
        stream(served, "/v1/responses", input="a", max_output_tokens=1)
