"""Requests as clients send them: fields of other servers, vLLM's extra fields, and the lines in the log."""

import asyncio
import json
import logging

import pytest

from ...checkpoints.tokenizer import load_tokenizer
from ...log import logger
from ...options.engine_args import EngineArgs
from ...server.limits import MAX_IGNORED
from ...server.options import ServerOptions
from ...server.run import run_server, uvicorn_config
from ..testing.inside import LONG, SHORT, error_of, inside, slow, until
from ..testing.tokenizers import write_form

pytestmark = pytest.mark.anyio

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31, 5, 6, 7, 12, 44, 50, 51, 52, 53, 54]
CHAT = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
TOKENS = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def values(response) -> list[dict]:
    """Return the data of each event of a stream, without [DONE]."""
    *data, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(each) for each in data]


def lines_of(caplog, word: str) -> list[str]:
    """Return the server's lines that contain the word."""
    lines = [record.getMessage() for record in caplog.records if record.name == logger.name]
    return [line for line in lines if word in line]


# Unknown fields


async def test_each_unknown_field_is_logged_once(checkpoint, caplog):
    async with inside(checkpoint) as server:
        for extra in ({"mirostat": 2, "user": "a"}, {"mirostat": 3}, {"top_n": None, "suffix": ""}, {}):
            assert (await server.post(**SHORT, **extra)).status_code == 200
        assert (await server.post("/tokenize", prompt="a", mirostat=1)).status_code == 200
    assert {line.split('"')[1] for line in lines_of(caplog, "ignoring")} == {"mirostat", "user"}
    assert len(lines_of(caplog, "ignoring")) == 2


async def test_log_has_a_limited_number_of_short_unknown_names(checkpoint, caplog):
    async with inside(checkpoint) as server:
        for start in (0, 40):
            extra = {f"{i:03}\n{'x' * 1000}": i for i in range(start, start + 40)}
            assert (await server.post(**SHORT, **extra)).status_code == 200
    lines = lines_of(caplog, "ignoring")
    assert len(lines) == MAX_IGNORED and all(len(line) < 200 and "\n" not in line for line in lines)


# return_token_ids


async def test_completions_return_the_tokens_of_prompts_and_outputs(checkpoint):
    async with inside(checkpoint) as server:
        body = {"prompt": [PROMPT, PROMPT[:5]], "n": 2, **TOKENS}
        choices = (await server.post(**body)).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT] * 2 + [PROMPT[:5]] * 2
        assert all(len(choice["token_ids"]) == 3 for choice in choices)
        echoed = (await server.post(**body, echo=True)).json()["choices"]
        assert [each["token_ids"] for each in echoed] == [each["token_ids"] for each in choices]
        plain = (await server.post(**{**body, "return_token_ids": False})).json()["choices"]
        assert all(not each.keys() & {"token_ids", "prompt_token_ids"} for each in plain)


async def test_stream_of_a_completion_returns_each_token_once(checkpoint):
    async with inside(checkpoint) as server:
        whole = (await server.post(prompt=PROMPT, **TOKENS)).json()["choices"][0]
        for echo in (False, True):
            chunks = values(await server.post(prompt=PROMPT, **TOKENS, echo=echo, stream=True))
            choices = [chunk["choices"][0] for chunk in chunks]
            assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
            assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT] + [None] * (len(choices) - 1)


async def test_stream_interval_is_the_number_of_tokens_in_an_event(checkpoint):
    async with inside(checkpoint, slow) as server:
        chunks = values(await server.post(prompt=PROMPT, **TOKENS | {"max_tokens": 9}, stream=True, stream_interval=4))
        assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 4, 4]


async def test_chats_return_the_tokens_of_the_rendered_prompt(checkpoint):
    async with inside(checkpoint) as server:
        path = "/v1/chat/completions"
        prompt = (await server.post("/tokenize", messages=CHAT["messages"])).json()["tokens"]
        body = {**CHAT, "return_token_ids": True}
        whole = (await server.post(path, **body)).json()
        assert whole["prompt_token_ids"] == prompt and len(whole["choices"][0]["token_ids"]) == 3
        first, *chunks = values(await server.post(path, **body, stream=True))
        assert first["prompt_token_ids"] == prompt and all("prompt_token_ids" not in chunk for chunk in chunks)
        ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert ids == whole["choices"][0]["token_ids"]
        assert "prompt_token_ids" not in (await server.post(path, **CHAT)).json()


# truncate_prompt_tokens


async def test_prompt_is_truncated(checkpoint):
    cases = [
        ({"truncate_prompt_tokens": 4}, PROMPT[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, PROMPT[:4]),
        ({"truncate_prompt_tokens": 61}, PROMPT),
        ({"truncate_prompt_tokens": -1}, PROMPT),
        ({"truncate_prompt_tokens": -1, "max_tokens": 50}, PROMPT[-14:]),  # of the model's 64 positions
    ]
    async with inside(checkpoint) as server:
        for fields, kept in cases:
            response = (await server.post(**{"prompt": PROMPT, **TOKENS, "echo": True, **fields})).json()
            [choice], usage = response["choices"], response["usage"]
            assert choice["prompt_token_ids"] == kept and usage["prompt_tokens"] == len(kept)
            echoed = (await server.post("/detokenize", tokens=kept)).json()["prompt"]
            assert choice["text"].startswith(echoed) or not echoed


async def test_long_prompts_and_chats_are_truncated(checkpoint):
    async with inside(checkpoint) as server:
        text = "the fox " * 20_000
        fields = {"truncate_prompt_tokens": -1, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        assert len((await server.post(prompt=text, **fields)).json()["choices"][0]["prompt_token_ids"]) == 60
        chat = {"messages": [{"role": "user", "content": text}], **fields}
        whole = (await server.post("/v1/chat/completions", **chat)).json()
        assert len(whole["prompt_token_ids"]) == 60 and len(whole["choices"][0]["token_ids"]) == 4
        del chat["max_tokens"]
        assert (await server.post("/v1/chat/completions", **chat)).json()["usage"]["total_tokens"] == 64


async def test_truncation_must_leave_room_for_the_output(checkpoint):
    async with inside(checkpoint) as server:
        for value, fields in ((62, {}), (-1, {"max_tokens": 64})):
            body = {"prompt": PROMPT, **TOKENS, "truncate_prompt_tokens": value, **fields}
            error = error_of(await server.post(**body), 400)
            assert error["param"] == "truncate_prompt_tokens" and str(value) in error["message"]
        assert error_of(await server.post(prompt=PROMPT, truncate_prompt_tokens=0), 400)["message"].startswith("the pr")
        assert error_of(await server.post(prompt=PROMPT, truncate_prompt_tokens=-2), 400)["param"]


# request_id and cache_salt


async def test_request_id_is_the_end_of_the_response_id(checkpoint):
    async with inside(checkpoint, slow) as server:
        same = {**LONG, "max_tokens": 5, "request_id": "mine"}
        responses = await asyncio.gather(server.post(**same), server.post(**same))
        assert [response.json()["id"] for response in responses] == ["cmpl-mine"] * 2
        chat = await server.post("/v1/chat/completions", **CHAT, request_id="b", stream=True)
        assert {chunk["id"] for chunk in values(chat)} == {"chatcmpl-b"}
        assert error_of(await server.post(**SHORT, request_id="two words"), 400)["param"] == "request_id"


async def test_prompt_hits_blocks_of_its_own_salt_only(checkpoint):
    async with inside(checkpoint) as server:
        cached = []
        for salt in (None, "a", "b", "a", None):
            response = await server.post(prompt=PROMPT, max_tokens=1, cache_salt=salt)
            cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 0, 16, 16]
        response = await server.post("/v1/responses", input="the fox", max_output_tokens=1, cache_salt="a")
        assert response.status_code == 200
        assert error_of(await server.post(**SHORT, cache_salt=""), 400)["param"] == "cache_salt"


async def test_page_never_shows_a_salt(checkpoint):
    async with inside(checkpoint, show_text=True) as server, server.client.stream("GET", "/events") as page:
        text, parts = "", page.aiter_text()
        while "snapshot" not in text:
            text += await anext(parts)
        assert (await server.post(prompt=PROMPT, max_tokens=2, cache_salt="pepper")).status_code == 200
        while '"end"' not in text:
            text += await anext(parts)
        assert "pepper" not in text and "admit" in text


# Options of the engine that the front needs, too


async def test_server_has_the_defaults_that_its_options_recommend(checkpoint, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 7}')
    override = {"override_generation_config": {"top_k": 3}}
    async with inside(checkpoint, generation_config=str(tmp_path), **override) as server:
        assert server.front.state.model.recommended == {"temperature": 0.0, "top_k": 3}
        one, two = [(await server.post(prompt=PROMPT, max_tokens=9, ignore_eos=True)).json() for _ in range(2)]
        assert one["choices"] == two["choices"]


async def test_server_tokenizes_with_the_named_tokenizer(checkpoint, tmp_path):
    write_form(tmp_path, "llama3")
    async with inside(checkpoint, tokenizer=str(tmp_path)) as server:
        expected = load_tokenizer(tmp_path).encode("the fox")
        assert (await server.post("/tokenize", prompt="the fox")).json()["tokens"] == expected


# The log


async def test_each_request_is_a_line(checkpoint, caplog):
    caplog.set_level(logging.DEBUG, logger.name)
    async with inside(checkpoint, disable_access_log_for_endpoints="/health,/metrics") as server:
        for path in ("/health", "/metrics", "/version?key=secret", "/no%0Asuch"):
            await server.client.get(path)
        await server.post(**SHORT, stream=True)
        await server.post(**SHORT, n=0)
    lines = lines_of(caplog, " s")
    requests = [line.split()[3:6] for line in lines if " 127.0.0.1:" in line]
    assert requests == [
        ["GET", "/version", "200"],
        ["GET", "/no%0Asuch", "404"],
        ["POST", "/v1/completions", "200"],
        ["POST", "/v1/completions", "400"],
    ]
    assert not any("secret" in line for line in lines)
    [detail] = lines_of(caplog, "request cmpl-")
    assert detail.endswith(": 2 tokens in 1 prompts, n 1, max_tokens 2"), "a refused request has none"


async def test_request_whose_client_hangs_up_is_a_line(checkpoint, caplog):
    caplog.set_level(logging.INFO, logger.name)
    async with inside(checkpoint, slow) as server:
        request = asyncio.create_task(server.post(**LONG))
        await until(lambda: server.num_started == 1)
        request.cancel()
        await until(lambda: server.is_empty and lines_of(caplog, "/v1/completions 499") != [])


@pytest.mark.parametrize(("level", "is_off"), [(logging.INFO, True), (logging.WARNING, False)])
async def test_access_log_can_be_turned_off(checkpoint, caplog, level, is_off):
    caplog.set_level(level, logger.name)
    async with inside(checkpoint, disable_uvicorn_access_log=is_off) as server:
        assert (await server.post(**SHORT)).status_code == 200
    assert lines_of(caplog, "POST") == [] and len(lines_of(caplog, "serving")) == is_off


def test_log_levels_are_those_of_the_options(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger.name)  # restored at the end
    options = ServerOptions(log_level="warning", uvicorn_log_level="info", chat_template=str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="chat template"):
        run_server("model", EngineArgs(), options)
    assert logger.level == logging.WARNING
    assert uvicorn_config(lambda *_: None, options).log_level == "info"
