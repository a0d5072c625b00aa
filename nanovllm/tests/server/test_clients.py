"""OpenAI's Python client, and curl as the README uses it."""

import json
import shutil
import subprocess

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from ..testing.served import unset

MESSAGES = [{"role": "user", "content": "Tell me of a fox."}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_client_lists_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["storyteller", "fox"]
    for model in models:
        assert client.models.retrieve(model.id) == model and not unset(model)


def test_client_completes_and_streams(client):
    options = {"model": "storyteller", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_client_chats_and_streams(client):
    options = {"model": "storyteller", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 6, "seed": 1}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant" and len(whole.choices[0].logprobs.content) == 6
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"


def test_responses_have_all_fields_that_the_client_requires(client):
    options = {"model": "storyteller", "max_tokens": 2, "seed": 3, "n": 2, "user": "me"}
    kept = {"metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "modalities": ["text"]}
    chat = options | kept | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "reasoning_effort": "low"}
    whole = [client.completions.create(**options, prompt="a", logprobs=1), client.chat.completions.create(**chat)]
    for kind, answer in zip((Completion, ChatCompletion), whole, strict=True):
        kind.model_validate(answer.to_dict(), strict=True)
        assert not unset(answer) and answer.usage.prompt_tokens_details.cached_tokens is not None
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
        assert not unset(chunk)


def test_client_parses_a_chat_stream(client):
    options = {
        "model": "storyteller",
        "messages": MESSAGES,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": ["a fox"]}},
    }
    with client.chat.completions.stream(**options) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(texts) == "a fox" == stream.get_final_completion().choices[0].message.content


def test_client_uses_structured_outputs(client):
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "wolf"]}}, "required": ["name"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    options = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 90, "temperature": 0, "frequency_penalty": 2}
    answer = client.chat.completions.create(**options, response_format=form)
    assert json.loads(answer.choices[0].message.content)["name"] in ("fox", "wolf")
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(model="storyteller", prompt="Is it so?", extra_body=extra)
    assert answer.choices[0].text in ("yes", "no")


def test_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.completions.create(model="storyteller", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model="storyteller", input="a")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")
def test_curl_completes_and_streams(served):
    request = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    post = f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d"
    whole = json.loads(curl(*post, json.dumps(request)))
    *chunks, done = curl("-N", *post, json.dumps(request | {"stream": True})).split("\n\n")[:-1]
    assert done == "data: [DONE]"
    texts = [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["text"]
    assert curl("-o", "-", "-w", "%{http_code}", f"{served.url}/health") == "200", "an empty response"


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
