"""/v1/chat/completions, /tokenize, /detokenize, and the endpoints about the server itself."""

import json

from ... import __version__
from ..testing.served import CLIENT, answer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def prompt_of(served, messages, **options):
    """Return the text that the chat template renders."""
    tokens = answer(served.post("/tokenize", messages=messages, **options))["tokens"]
    return answer(served.post("/detokenize", tokens=tokens))["prompt"]


def test_chat_continues_the_rendered_template(served):
    body = served.chat(n=2)
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    first, second = body["choices"]
    assert first["message"]["role"] == "assistant" and first["message"] == second["message"]
    prompt = "User: Tell me of a fox.\nAssistant:"
    ids = answer(served.post("/tokenize", prompt="<s>" + prompt, add_special_tokens=False))["tokens"]
    assert served.completion(ids)["choices"][0]["text"] == first["message"]["content"]
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_content_parts_and_the_developer_role(served):
    parts = [{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind."}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "Hi"}]
    assert prompt_of(served, messages) == "<s>System: Be short.\nBe kind.\nUser: Hi\nAssistant:"
    assert served.chat(messages=messages)["choices"][0]["message"]["content"]


def test_continue_final_message(served):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    assert prompt_of(served, messages, continue_final_message=True) == "<s>User: Hi\nAssistant: Once upon"
    body = served.chat(messages=messages, continue_final_message=True, max_tokens=3)
    assert body["choices"][0]["message"]["content"].startswith(" a time")


def test_special_token_in_a_message_is_a_special_token(served):
    def ids(content):
        return answer(served.post("/tokenize", messages=[{"role": "user", "content": content}]))["tokens"]

    eos = 2
    assert (ids("a fox").count(eos), ids("a</s> fox").count(eos)) == (0, 1)


def test_tool_calls_may_have_no_content(served):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a fox", "tool_call_id": "1"},
    ]
    assert served.chat(messages=messages, tools=[TOOL], tool_choice="auto")["choices"][0]["message"]["content"]


def test_max_completion_tokens_replaces_max_tokens(served):
    assert served.chat(max_completion_tokens=3, max_tokens=5)["usage"]["completion_tokens"] == 3


def test_chat_logprobs(served):
    content = served.chat(logprobs=True, top_logprobs=2, max_tokens=3)["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for place in content:
        assert place["top_logprobs"][0] == {name: place[name] for name in ("token", "logprob", "bytes")}, "greedy"
        assert len(place["top_logprobs"]) == 2 and bytes(place["bytes"]).decode() == place["token"]


def test_json_schema(served):
    schema = {"type": "object", "properties": {"legs": {"type": "integer", "maximum": 9}}, "required": ["legs"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    # the storyteller would write spaces forever without a penalty
    content = served.chat(response_format=form, max_tokens=90, frequency_penalty=2)["choices"][0]["message"]["content"]
    assert json.loads(content).keys() == {"legs"}


def test_tokenize_and_detokenize(served):
    result = answer(served.post("/tokenize", prompt="Once upon", return_token_strs=True))
    assert result["count"] == len(result["tokens"]) == len(result["token_strs"]) and result["max_model_len"] == 1024
    assert result["token_strs"][0] == "<s>"
    assert answer(served.post("/detokenize", tokens=result["tokens"][1:])) == {"prompt": "Once upon"}
    plain = answer(served.post("/tokenize", prompt="Once upon", add_special_tokens=False))
    assert plain["tokens"] == result["tokens"][1:]
    assert served.post("/detokenize", tokens=[10**9]).status_code == 400
    assert served.post("/tokenize", prompt="a", messages=[]).status_code == 400


def test_health_version_and_models(served):
    def get(path):
        return CLIENT.get(served.url + path)

    assert get("/health").status_code == get("/ping").status_code == 200
    assert get("/version").json() == {"version": __version__}
    model, _ = get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("storyteller", 1024)
    assert get("/v1/models/storyteller").json() == model and get("/v1/models/other").status_code == 404
    assert get("/v1/completions").status_code == 405
