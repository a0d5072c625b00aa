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


def test_each_choice_has_its_own_pieces(served):
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


def test_a_stop_string_across_pieces_is_never_sent(served):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    text = served.completion(**body)["choices"][0]["text"]
    for stop in (text[3:9], text[8:25], [text[20:26], "zzz"]):
        for is_kept in (False, True):
            asked = body | {"stop": stop, "include_stop_str_in_output": is_kept}
            [whole] = served.completion(**asked)["choices"]
            *chunks, _ = stream(served, "/v1/completions", **asked)
            sent = pieces(chunks)
            assert "".join(each["text"] for each in sent) == whole["text"] == text[: len(whole["text"])]
            assert (sent[-1]["finish_reason"], sent[-1]["stop_reason"]) == ("stop", whole["stop_reason"])
            assert whole["text"].endswith(whole["stop_reason"]) == is_kept


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
