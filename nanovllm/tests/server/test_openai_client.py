"""The official client, unchanged."""

import json

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .openai_types import unset

MESSAGES = [{"role": "user", "content": "Tell me of a fox."}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["storyteller", "fox"]
    for model in models:
        assert client.models.retrieve(model.id) == model and not unset(model)


def test_a_completion_and_its_stream(client):
    asked = {"model": "storyteller", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_chat_and_its_stream(client):
    asked = {"model": "storyteller", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 6, "seed": 1}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant" and len(whole.choices[0].logprobs.content) == 6
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"


def test_answers_are_as_the_clients_types_require(client):
    asked = {"model": "storyteller", "max_tokens": 2, "seed": 3, "n": 2, "user": "me"}
    kept = {"metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "modalities": ["text"]}
    chat = asked | kept | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "reasoning_effort": "low"}
    whole = [client.completions.create(**asked, prompt="a", logprobs=1), client.chat.completions.create(**chat)]
    for kind, answer in zip((Completion, ChatCompletion), whole, strict=True):
        kind.model_validate(answer.to_dict(), strict=True)
        assert not unset(answer) and answer.usage.prompt_tokens_details.cached_tokens is not None
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
        assert not unset(chunk)


def test_the_clients_own_reader_of_streams(client):
    asked = {
        "model": "storyteller",
        "messages": MESSAGES,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": ["a fox"]}},
    }
    with client.chat.completions.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(texts) == "a fox" == stream.get_final_completion().choices[0].message.content


def test_structured_outputs(client):
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "wolf"]}}, "required": ["name"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    asked = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 90, "temperature": 0, "frequency_penalty": 2}
    answer = client.chat.completions.create(**asked, response_format=form)
    assert json.loads(answer.choices[0].message.content)["name"] in ("fox", "wolf")
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(model="storyteller", prompt="Is it so?", extra_body=extra)
    assert answer.choices[0].text in ("yes", "no")


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.completions.create(model="storyteller", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="storyteller", input="a")
