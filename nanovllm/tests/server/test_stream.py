"""Streams: whole answers, in pieces."""

import json

import httpx

from .served import events, stream

PROMPT = "Once upon a time"


def pieces(chunks, index=0):
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def test_a_stream_is_the_whole_answer_in_pieces(served):
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


def test_a_chat_begins_with_the_one_who_speaks(served):
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 5}
    *chunks, _ = stream(served, "/v1/chat/completions", **body)
    first, *others = pieces(chunks)
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    [whole] = served.chat("Hi", max_tokens=5)["choices"]
    assert "".join(each["delta"]["content"] for each in others) == whole["message"]["content"]
    assert others[-1]["finish_reason"] == "length"


def test_the_usage_comes_last_or_with_each_piece(served):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 3}
    *chunks, last, done = stream(served, "/v1/completions", **body, stream_options={"include_usage": True})
    assert done == "[DONE]" and all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    *chunks, _ = stream(served, "/v1/completions", **body, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 3


def test_an_echo_comes_first(served):
    *chunks, _ = stream(served, "/v1/completions", prompt=PROMPT, echo=True, max_tokens=2)
    assert pieces(chunks)[0]["text"].startswith(PROMPT)
    assert sum(PROMPT in each["text"] for each in pieces(chunks)) == 1


def test_events_are_lines_of_utf8(served):
    with httpx.stream("POST", f"{served.url}/v1/completions", json={"prompt": PROMPT, "stream": True}) as response:
        assert [json.dumps(each) for each in events(response)]
