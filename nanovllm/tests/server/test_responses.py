"""/v1/responses with OpenAI's client: stateless texts, whole and streamed."""

import json

import openai
import pytest
from openai.types.responses import ResponseErrorEvent

from ... import SamplingParams
from ...server.bodies import ParsedRequest
from ...server.errors import ApiError
from ...server.generation import Work
from ...server.responses import ResponseBuilder
from ..testing.served import stream, unset

PROMPT = "Tell me of a fox."


@pytest.fixture(scope="module")
def responses(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def test_response_equals_the_chat_completion(responses, served):
    options = {"model": "storyteller", "temperature": 0, "max_output_tokens": 6}
    response = responses.create(input=PROMPT, instructions="Be kind.", **options)
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
    assert responses.create(input=parts, **options).output_text == response.output_text


def test_stream_of_events(responses):
    options = {"model": "storyteller", "input": PROMPT, "temperature": 0, "max_output_tokens": 5}
    whole = responses.create(**options).output_text
    events = list(responses.create(**options, stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].response.output_text == events[-4].text == whole
    for event in events:
        assert not unset(event), "the event lacks a field that the client requires"


def test_client_parses_the_stream(responses):
    extra = {"structured_outputs": {"choice": ["a 🦊 fox"]}}
    with responses.stream(model="storyteller", input=PROMPT, temperature=0, extra_body=extra) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "" not in texts and "".join(texts) == "a 🦊 fox" == final.output_text
    assert final.status == "completed" and not unset(final)


def test_output_can_be_sent_back_as_input(responses, served):
    options = {"model": "storyteller", "temperature": 0, "max_output_tokens": 4}
    first = responses.create(input=PROMPT, **options)
    question = {"role": "user", "content": PROMPT}
    text = responses.create(input=[question, *first.output, question], **options).output_text
    answer = {"role": "assistant", "content": first.output_text}
    chat = served.chat(messages=[question, answer, question], max_tokens=4)
    assert text == chat["choices"][0]["message"]["content"]


def test_json_schema_and_logprobs(responses):
    schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    form = {"type": "json_schema", "name": "animal", "schema": schema | {"additionalProperties": False}}
    extra = {"frequency_penalty": 2}  # the storyteller would write spaces forever without a penalty
    options = {"model": "storyteller", "input": PROMPT, "temperature": 0, "max_output_tokens": 90}
    response = responses.create(**options, text={"format": form}, top_logprobs=2, extra_body=extra)
    assert json.loads(response.output_text)["legs"] in (2, 4) and response.status == "completed"
    [part] = response.output[0].content
    assert len(part.logprobs) == response.usage.output_tokens and len(part.logprobs[0].top_logprobs) == 2


def test_tool_calls_and_their_outputs(responses):
    items = [
        {"role": "user", "content": "Look!"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a fox"},
    ]
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    assert responses.create(model="storyteller", input=items, tools=tools, max_output_tokens=3).output_text


def test_fields_without_an_effect(responses):
    extra = {"priority": 0, "prompt_cache_options": {}}
    options = {"reasoning": {"effort": "low", "summary": "auto"}, "stream_options": {"include_obfuscation": False}}
    fields = {"metadata": {"a": "b"}, "store": True, "user": "u", "service_tier": "auto", "truncation": "disabled"}
    response = responses.create(
        model="storyteller", input="a", max_output_tokens=1, extra_body=extra, **options, **fields
    )
    assert response.metadata == {"a": "b"} and response.temperature is not None and not unset(response)


def test_client_reads_an_error_within_a_stream():
    work = Work(ParsedRequest([], {}), "m", [], SamplingParams(), "resp_1", "resp_1")
    name, data = ResponseBuilder(work, {}).error_event(ApiError("it broke off", 500)).decode().strip().split("\n")
    event = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "), strict=True)
    assert (name, event.message, event.code) == ("event: error", "it broke off", "server_error")


def test_events_have_names(served):
    with pytest.raises(AssertionError, match=r"event: response\.created"):
        stream(served, "/v1/responses", input="a", max_output_tokens=1)
