"""Each field of OpenAI's and vLLM's bodies is known: served, or taken where it asks for nothing, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from ... import SamplingParams
from ...server.openai.bodies import Body, Unsaid, read_body
from ...server.openai.chats import chat_of
from ...server.openai.fields import CHAT, COMPLETIONS
from ...server.openai.response_bodies import read_response_body

FILE = Path(__file__).parents[1] / "data" / "vllm_0_32" / "bodies.json"
VLLMS = {name: dict(rows) for name, rows in json.loads(FILE.read_text()).items() if name != "vllm"}
MESSAGES = [{"role": "user", "content": "Hi"}]
NONSENSE = {"such": "nonsense"}
TAKES_NONSENSE = {"chat_template_kwargs"}  # whatever a template may read
TOOL = {"type": "function", "function": {"name": "look"}}


def read(url: str, body: dict[str, Any]) -> Body:
    if url == "/v1/responses":
        return read_body(CHAT, read_response_body(body).chat, Unsaid())
    return read_body(url, body, Unsaid())


KINDS = [
    (COMPLETIONS, {"prompt": "a"}, CompletionParams, "CompletionRequest"),
    (CHAT, {"messages": MESSAGES}, ChatParams, "ChatCompletionRequest"),
    ("/v1/responses", {"input": "a"}, ResponseParams, "ResponsesRequest"),
]


@pytest.mark.parametrize(("url", "least", "openais", "vllms"), KINDS, ids=[kind[0] for kind in KINDS])
def test_no_field_of_a_body_is_unknown(url, least, openais, vllms):
    for name in {*openais.__annotations__, *VLLMS[vllms]} - least.keys():
        error = ""
        try:
            body = read(url, least | {name: NONSENSE})
        except ValueError as why:
            error = str(why)
        assert not error.startswith(f"unknown field {name!r}")
        assert name in error or name in TAKES_NONSENSE or told(body) == told(read(url, least)), (name, error)


@pytest.mark.parametrize(("url", "least", "openais", "vllms"), KINDS, ids=[kind[0] for kind in KINDS])
def test_each_of_vllms_defaults_is_taken_and_asks_for_nothing(url, least, openais, vllms):
    plain = {name: value for name, value in VLLMS[vllms].items() if not isinstance(value, dict)}
    assert len(plain) > 40
    for name, value in plain.items():
        if name not in least:
            assert told(read(url, least | {name: value})) == told(read(url, least)), name


def told(body: Body) -> dict[str, Any]:
    return {**vars(body), "params": SamplingParams(**body.params)}


def test_what_a_chat_template_is_told():
    body = {"messages": MESSAGES, "tools": [TOOL], "documents": [{"title": "a", "text": "b"}]}
    assert chat_of(body).options == {"tools": [TOOL], "documents": [{"title": "a", "text": "b"}]}
    assert chat_of({"messages": MESSAGES, "tools": []}).options == {}
    effort = {"messages": MESSAGES, "reasoning_effort": "none"}
    assert chat_of(effort).options == {"reasoning_effort": "none", "enable_thinking": False}
    thinking = {"chat_template_kwargs": {"enable_thinking": True, "style": "old"}}
    assert chat_of(effort | thinking).options == {"reasoning_effort": "none", "enable_thinking": True, "style": "old"}
    assert chat_of({"messages": MESSAGES, "continue_final_message": True}).options["add_generation_prompt"] is False
