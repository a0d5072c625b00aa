"""What is told of the tokens of an output."""

import itertools
from collections.abc import Sequence
from typing import Any

from ...api import Logprob

Place = dict[int, Logprob]  # the likeliest tokens there, and the one that was taken
LEAST = -9999.0  # OpenAI's word for a token that cannot come: JSON has no infinity


def completion_logprobs(token_ids: Sequence[int], places: Sequence[Place | None], start: int = 0) -> dict[str, Any]:
    """Of each token its text, its log-probability, the likeliest in its place, and where in the text it begins.

    `start` is where the first begins. A prompt's first token has no place: nothing is told of it.
    """
    own = [place[token] if place else None for token, place in zip(token_ids, places, strict=True)]
    tokens = [text_of(each) if each else "" for each in own]
    likeliest = [{text_of(each): number(each) for each in place.values()} if place else None for place in places]
    offsets = list(itertools.accumulate(map(len, tokens), initial=start))[:-1]
    logprobs = [number(each) if each else None for each in own]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}


def chat_logprobs(token_ids: Sequence[int], places: Sequence[Place], count: int) -> list[dict[str, Any]]:
    """Of each token, and of the `count` likeliest in its place."""
    told = []
    for token, place in zip(token_ids, places, strict=True):
        likeliest = [entry(each) for each in list(place.values())[:count]]
        told.append(entry(place[token]) | {"top_logprobs": likeliest})
    return told


def entry(logprob: Logprob) -> dict[str, Any]:
    text = text_of(logprob)
    return {"token": text, "logprob": number(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def text_of(logprob: Logprob) -> str:
    """Empty without a tokenizer."""
    return logprob.decoded_token or ""


def number(logprob: Logprob) -> float:
    """
    >>> number(Logprob(-float("inf"), 7)), number(Logprob(-0.5, 1))
    (-9999.0, -0.5)
    """
    return max(LEAST, logprob.logprob)
