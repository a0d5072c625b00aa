"""Streams: their pieces join to the whole response."""

import asyncio
import json
import random
import socket
from typing import Any

import pytest

from ...server.run import listening_socket
from ...server.streaming import error_event
from ..testing.served import answer, stream

PROMPT = "Once upon a time"


def pieces(chunks, index=0):
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def test_stream_joins_to_the_whole_completion(served):
    body = {"prompt": [PROMPT, "The fox"], "n": 2, "temperature": 0, "max_tokens": 6, "logprobs": 1}
    whole = served.completion(**body)["choices"]
    *chunks, done = stream(served, "/v1/completions", **body)
    assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole:
        parts = pieces(chunks, choice["index"])
        assert "".join(each["text"] for each in parts) == choice["text"]
        assert [each["finish_reason"] for each in parts] == [None] * (len(parts) - 1) + ["length"]
        for name in ("tokens", "text_offset"):
            assert [one for each in parts for one in each["logprobs"][name]] == choice["logprobs"][name]
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_stream_begins_with_the_role(served):
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 5}
    *chunks, _ = stream(served, "/v1/chat/completions", **body)
    first, *others = pieces(chunks)
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    [whole] = served.chat("Hi", max_tokens=5)["choices"]
    assert "".join(each["delta"]["content"] for each in others) == whole["message"]["content"]
    assert others[-1]["finish_reason"] == "length"


def test_choices_of_a_chat_are_streamed_separately(served):
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 5}
    *chunks, _ = stream(served, "/v1/chat/completions", **body)
    whole = served.chat("Hi", **{name: body[name] for name in ("n", "seed", "temperature", "max_tokens")})["choices"]
    assert (
        all(len(chunk["choices"]) == 1 for chunk in chunks) and len({each["message"]["content"] for each in whole}) > 1
    )
    for choice in whole:
        first, *others = pieces(chunks, choice["index"])
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"]["content"] for each in others) == choice["message"]["content"]
        assert [each["finish_reason"] for each in others] == [None] * (len(others) - 1) + ["length"]


def test_stop_string_across_pieces_is_never_sent(served):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    text = served.completion(**body)["choices"][0]["text"]
    for stop, is_kept in ((text[3:9], False), (text[8:25], True), ([text[20:26], "zzz"], False)):
        request = body | {"stop": stop, "include_stop_str_in_output": is_kept}
        [whole] = served.completion(**request)["choices"]
        *chunks, _ = stream(served, "/v1/completions", **request)
        sent = pieces(chunks)
        assert "".join(each["text"] for each in sent) == whole["text"] == text[: len(whole["text"])]
        assert (sent[-1]["finish_reason"], sent[-1]["stop_reason"]) == ("stop", whole["stop_reason"])
        assert whole["text"].endswith(whole["stop_reason"]) == is_kept


def test_usage_comes_last_or_with_each_piece(served):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 3}
    *chunks, last, done = stream(served, "/v1/completions", **body, stream_options={"include_usage": True})
    assert done == "[DONE]" and all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    *chunks, _ = stream(served, "/v1/completions", **body, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 3


def test_late_error_is_an_event_with_an_error_body():
    event = json.loads(error_event(ValueError("the pool is too small")).removeprefix(b"data: "))
    assert event["error"]["message"] == "the pool is too small" and event["error"]["type"] == "invalid_request_error"


def test_echo_comes_first(served):
    *chunks, _ = stream(served, "/v1/completions", prompt=PROMPT, echo=True, max_tokens=2)
    assert pieces(chunks)[0]["text"].startswith(PROMPT)
    assert sum(PROMPT in each["text"] for each in pieces(chunks)) == 1


# Random requests

SOMETIMES: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.8],
    "top_k": [20],
    "min_p": [0.05],
    "presence_penalty": [1.0],
    "repetition_penalty": [1.1],
    "stop": [[" the", "e w"], "a", ["and", "."], [", "]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[270, 300, 414], [261]],
    "logit_bias": [{"261": 3}],
    "bad_words": [[" the"]],
    "skip_special_tokens": [False],
    "structured_outputs": [{"choice": ["né 🦊狐", "foxé"]}, {"regex": "[a-zé🦊]{3,8}"}, {"json_object": True}],
}
PROMPTS = ["Once upon", ["A fox", "né 🦊"], [300, 400], [[300], [400, 261]]]


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body = {name: rng.choice(values) for name, values in SOMETIMES.items() if rng.random() < 0.3}
    body |= {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 1, 2, 3]), "seed": rng.randrange(100)}
    has_logprobs, count = rng.random() < 0.5, rng.randrange(3)
    if rng.random() < 0.4:
        body["messages"] = [{"role": "user", "content": rng.choice(["Hi", "Tell me of é🦊"])}]
        return "/v1/chat/completions", body | ({"logprobs": True, "top_logprobs": count} if has_logprobs else {})
    body |= {"prompt": rng.choice(PROMPTS), "echo": rng.random() < 0.3}
    return "/v1/completions", body | ({"logprobs": count} if has_logprobs else {})


def check_random_stream(served, seed: int) -> None:
    url, body = random_body(random.Random(seed))
    whole = answer(served.post(url, **body))
    *chunks, last, done = stream(served, url, **body, stream_options={"include_usage": True})
    assert done == "[DONE]" and last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    for choice in whole["choices"]:
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert [each["finish_reason"] for each in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].get("stop_reason") == choice["stop_reason"]
        assert joined(parts) == joined([choice]), (seed, url, body)


def joined(parts: list[dict[str, Any]]) -> tuple[str, list[Any], str]:
    """Return the text, the tokens with their offsets, and the finish reason."""
    contents = [each.get("delta") or each.get("message") or {"content": each.get("text")} for each in parts]
    logprobs = [each["logprobs"] for each in parts if each["logprobs"]]
    tokens = [one["token"] for each in logprobs for one in each.get("content", [])]
    places = [
        pair for each in logprobs if "tokens" in each for pair in zip(each["tokens"], each["text_offset"], strict=True)
    ]
    return "".join(each["content"] for each in contents), tokens + places, parts[-1]["finish_reason"]


@pytest.mark.parametrize("seed", range(4))
def test_random_stream_joins_to_the_whole_response(served, seed):
    check_random_stream(served, seed)


@pytest.mark.nightly
def test_many_random_streams_join_to_the_whole_responses(served):
    for seed in range(4, 300):
        check_random_stream(served, seed)


@pytest.mark.anyio
async def test_small_pieces_are_sent_at_once():
    """With Nagle's algorithm, a piece waits until the client acknowledges the one before it."""
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    with listening_socket("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=listener):
            _, client = await asyncio.open_connection(*listener.getsockname())
            server = await accepted.get()
            assert server.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()
            server.close()
