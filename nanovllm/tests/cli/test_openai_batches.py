"""Lines of OpenAI's batches: their requests, errors and results."""

import io
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from ... import LLM, SamplingParams
from ...cli.batch_files import Defaults, Request, RequestsFile
from ...server.bodies import Chat
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS
from .test_batch import FOUR, parsed, write

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the fox"}]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def line(body: dict[str, Any], url: str = COMPLETIONS, **changes: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}} | changes


def read(value: Any, **defaults: Any) -> Request:
    stream = io.BytesIO(json.dumps(value).encode())
    (request,) = RequestsFile("f", stream, None, Defaults(defaults))
    return request


def params(value: Any, **defaults: Any) -> SamplingParams:
    return read(value, **defaults).params


# Requests


def test_completion_has_a_prompt_and_parameters():
    body = {"prompt": "the", "max_tokens": 3, "temperature": 0.5, "stop": "x", "logprobs": 2, "logit_bias": {"5": -1}}
    request = read(line({**body, "user": "me"}, custom_id="id"))
    assert (request.id, request.prompt, request.url) == ("id", "the", COMPLETIONS)
    expected = SamplingParams(
        max_tokens=3, temperature=0.5, stop=["x"], logprobs=2, logit_bias={5: -1}, seed=request.params.seed
    )
    assert request.params == expected


@pytest.mark.parametrize("prompt", [["the"], [[1, 2]], [1, 2], "the"])
def test_prompt_may_be_a_list_of_one(prompt):
    assert read(line({"prompt": prompt})).prompt in ("the", [1, 2])


def test_chat_has_messages_and_no_default_max_tokens():
    request = read(line({"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}, CHAT))
    assert request.prompt == Chat(HELLO, {"enable_thinking": False}) and request.params.max_tokens is None
    assert params(line({"messages": HELLO}, CHAT), max_tokens=7).max_tokens == 7, "from the command line"
    assert params(line({"messages": HELLO, "max_tokens": 5}, CHAT), max_tokens=7).max_tokens == 5
    assert params(line({"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 4}, CHAT)).max_tokens == 4


def test_defaults_come_from_the_command_and_then_from_the_checkpoint():
    def read_recommended(value: Any, **defaults: Any) -> SamplingParams:
        file = RequestsFile("f", io.BytesIO(json.dumps(value).encode()), None, Defaults(defaults))
        file.recommend({"temperature": 0.6, "top_k": 20})
        return next(iter(file)).params

    for body, url in (({"prompt": "the"}, COMPLETIONS), ({"messages": HELLO}, CHAT)):
        results = [read_recommended(line(body | more, url), top_k=9) for more in ({}, {"temperature": 0.1, "top_k": 3})]
        assert [(each.temperature, each.top_k) for each in results] == [(0.6, 9), (0.1, 3)]
    assert read_recommended({"prompt": "the"}).temperature == 1.0, "this engine's form ignores recommendations"


def test_checkpoint_recommends_sampling_for_openai_lines(run, tmp_path):
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 1}')
    lines = [line({"prompt": "the", "max_tokens": 8}), line({"prompt": "the", "max_tokens": 8}, custom_id="b")]
    _, out, _ = run("batch", str(write(tmp_path / "a.jsonl", *lines)), model=folder)
    first, second = [each["response"]["body"] for each in parsed(out)]
    assert first["choices"] == second["choices"] and first["usage"]["completion_tokens"] > 1


def test_chat_has_logprobs_and_top_logprobs():
    bodies = [{}, {"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]
    results = [params(line({"messages": HELLO, **each}, CHAT)).logprobs for each in bodies]
    assert results == [None, None, 0, 3]


def test_null_and_empty_values_are_ignored():
    nothing = {"stream": False, "echo": None, "suffix": "", "best_of": 2, "n": 2, "seed": None, "metadata": {"a": "b"}}
    assert params(line({"prompt": "the", **nothing})) == params(line({"prompt": "the", "n": 2}))
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert params(line({"messages": HELLO, **nothing}, CHAT)) == params(line({"messages": HELLO}, CHAT))


def test_unknown_fields_are_ignored():
    assert params(line({"prompt": "the", "tempreature": 1})) == params(line({"prompt": "the"}))
    assert params(line({"prompt": "the"}, comment="a")) == params(line({"prompt": "the"}))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (line({"prompt": "a"}, url="/v1/embeddings"), "url"),
        (line({"prompt": "a"}, method="GET"), "method"),
        (line({"prompt": "a"}, custom_id=7), "custom_id"),
        (line({}) | {"body": []}, "body"),
        ({"custom_id": "a", "url": COMPLETIONS}, "body"),
        ({"url": COMPLETIONS, "body": {"prompt": "a"}}, "custom_id"),
        (line({}), "prompt"),
        (line({"prompt": ["a", "b"]}), "prompt"),
        (line({"prompt": ["a", 1]}), "prompt"),
        (line({"prompt": 5}), "prompt"),
        (line({"prompt": "a", "max_tokens": "9"}), "max_tokens"),
        (line({"prompt": "a", "top_p": 2}), "top_p"),
        (line({"prompt": "a", "stream": True}), "stream"),
        (line({"prompt": "a", "echo": True}), "echo"),
        (line({"prompt": "a", "add_special_tokens": False}), "add_special_tokens"),
        (line({"prompt": "a", "best_of": 3}), "best_of"),
        (line({}, CHAT), "messages"),
        (line({"messages": []}, CHAT), "messages"),
        (line({"messages": ["a"]}, CHAT), "messages[0]"),
        (line({"messages": [{"content": "a"}]}, CHAT), "messages[0].role"),
        (line({"messages": [*HELLO, {"role": "user"}]}, CHAT), "messages[1].content"),
        (line({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, CHAT), "messages[0].content[0]"),
        (line({"messages": HELLO, "top_logprobs": 2}, CHAT), "top_logprobs"),
        (line({"messages": HELLO, "logprobs": 2}, CHAT), "logprobs"),
        (line({"messages": HELLO, "tool_choice": "required"}, CHAT), "tool_choice"),
        (line({"messages": HELLO, "response_format": {"type": "xml"}}, CHAT), "response_format.type"),
        (line({"messages": HELLO, "chat_template_kwargs": {"tools": []}}, CHAT), "chat_template_kwargs"),
    ],
    ids=str,
)
def test_invalid_field_is_named_in_one_line(value, field):
    with pytest.raises(ValueError) as caught:
        read(value)
    error = str(caught.value)
    assert error.startswith("f: request 0 (line 1): ") and re.search(rf"\b{re.escape(field)}(?!\w)", error), error
    assert "\n" not in error


# Results


@pytest.fixture
def serve(run, tmp_path):
    def command(*lines: dict[str, Any], flags: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
        status, out, err = run("batch", str(write(tmp_path / "a.jsonl", *lines)), *flags)
        return status, {result["custom_id"]: result for result in parsed(out)}, err

    return command


def test_completion_has_the_form_of_the_api(serve, checkpoint):
    _, results, _ = serve(line({"prompt": "the fox", **FOUR, "n": 2, "logprobs": 1}))
    result = results["a"]
    assert [*result] == ["id", "custom_id", "response", "error"] and result["error"] is None
    response = result["response"]
    assert [*response] == ["status_code", "request_id", "body"] and response["status_code"] == 200
    body = response["body"]
    assert [*body] == ["id", "object", "created", "model", "choices", "usage"]
    assert (body["object"], body["model"]) == ("text_completion", str(checkpoint))
    (expected,) = LLM(checkpoint, **OPTIONS).generate(["the fox"], SamplingParams(**FOUR), use_tqdm=False)
    for index, choice in enumerate(body["choices"]):
        assert (choice["index"], choice["text"]) == (index, expected.outputs[0].text)
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [4] * 4
        assert "".join(logprobs["tokens"]) == choice["text"] and logprobs["text_offset"][0] == 0
        assert logprobs["token_logprobs"][0] == logprobs["top_logprobs"][0][logprobs["tokens"][0]]
    prompt = body["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_chat_has_the_form_of_the_api(serve, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    request = line({"messages": HELLO, **FOUR, "logprobs": True, "top_logprobs": 2}, CHAT)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    same = line({"messages": parts, **FOUR}, CHAT, custom_id="b")
    status, results, _ = serve(request, same, flags=("--chat-template", str(tmp_path / "t.jinja")))
    body = results["a"]["response"]["body"]
    (choice,) = body["choices"]
    assert status == 0 and body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert choice["message"]["content"] == results["b"]["response"]["body"]["choices"][0]["message"]["content"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4 and all(len(each["top_logprobs"]) == 2 for each in content)
    first = content[0]
    assert first["top_logprobs"][0] == {name: first[name] for name in ("token", "logprob", "bytes")}, "greedy"
    assert bytes(first["bytes"]).decode() == first["token"]


def test_template_writes_bos(serve, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    flags = ("--chat-template", str(tmp_path / "t.jinja"))
    lines = line({"messages": HELLO, **FOUR}, CHAT), line({"prompt": "the fox"}, custom_id="b")
    _, results, _ = serve(*lines, flags=flags)
    chat, completion = (results[id]["response"]["body"]["usage"]["prompt_tokens"] for id in "ab")
    assert chat == completion - 1


def test_model_without_a_template_is_refused_before_its_weights_are_read(serve, checkpoint, monkeypatch):
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("weights were read"))
    message = f"{checkpoint} has no chat template: use --chat-template FILE or --chat-template plain"
    assert serve(line({"messages": HELLO}, CHAT)) == (2, {}, f"error: {message}\n")


def test_request_that_cannot_be_served_has_status_400_and_does_not_stop_the_others(serve, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% if messages[0].content == 'no' %}{{ raise_exception('never no') }}{% endif %}the")
    no = line({"messages": [{"role": "user", "content": "no"}]}, CHAT)
    lines = [no, line({"messages": HELLO, **FOUR}, CHAT, custom_id="b"), line({"prompt": "a" * 100}, custom_id="c")]
    status, results, err = serve(*lines, flags=("--chat-template", str(template)))
    assert status == 1 and err.startswith("3 requests, 2 failed")
    codes = {id: result["response"]["status_code"] for id, result in results.items()}
    assert codes == {"a": 400, "b": 200, "c": 400}
    error = {"message": "never no", "type": "invalid_request_error", "param": None, "code": None}
    assert results["a"]["response"]["body"] == {"error": error}


def test_request_that_fails_later_has_status_500(serve):
    flags = ("--kv-cache-tokens", "16", "--block-size", "4")
    status, results, _ = serve(line({"prompt": "the", "max_tokens": 40, "ignore_eos": True}), flags=flags)
    response = results["a"]["response"]
    assert (status, response["status_code"], response["body"]["error"]["type"]) == (1, 500, "server_error")


def test_form_is_read_without_a_web_server_and_without_torch():
    names = "{'starlette', 'uvicorn', 'h11', 'torch'}"
    code = f"import sys, nanovllm.cli.batch_files; print({names} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_file_may_mix_both_forms(run, tmp_path):
    file = write(tmp_path / "a.jsonl", line({"prompt": "the", **FOUR}), {"id": "b", "prompt": "the", **FOUR})
    results = parsed(run("batch", str(file))[1])
    assert sorted("custom_id" in result for result in results) == [False, True]
    file = write(file, line({"prompt": "the"}), {"id": "a", "prompt": "the"})
    assert "request 1 (line 2): id 'a'" in run("batch", str(file))[2]


def test_result_has_the_call_that_the_request_forces(run, tmp_path):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"at": {"enum": ["owl"]}}, "required": ["at"]}
    function = {"name": "look", "parameters": schema | {"additionalProperties": False}}
    choice = {"type": "function", "function": {"name": "look"}}
    body = {"messages": HELLO, "tools": [{"type": "function", "function": function}], "tool_choice": choice}
    file = write(
        tmp_path / "a.jsonl", line(body, CHAT), line({"messages": HELLO, "max_tokens": 2}, CHAT, custom_id="b")
    )
    (tmp_path / "template").write_text(TEMPLATE)
    status, out, _ = run("batch", str(file), "--chat-template", str(tmp_path / "template"))
    results = {each["custom_id"]: each["response"]["body"]["choices"][0] for each in parsed(out)}
    [call] = results["a"]["message"]["tool_calls"]
    assert status == 0 and results["a"]["finish_reason"] == "tool_calls" and results["a"]["message"]["content"] is None
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"at": "owl"}
    assert results["b"]["message"].keys() == {"role", "content", "refusal"}
