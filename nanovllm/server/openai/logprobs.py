"""What is told of the tokens of an output."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ...engine.outputs import Logprob

Place = dict[int, Logprob]  # the likeliest tokens there, and the one that was taken
LEAST = -9999.0  # OpenAI's word for a token that cannot come: JSON has no infinity


def completion_logprobs(token_ids: Sequence[int], places: Sequence[Place], start: int = 0) -> dict[str, Any]:
    """Of each token its text, its log-probability, the likeliest in its place, and where in the text it begins.

    `start` is where the first begins. Of a prompt's first token there is nothing but its text.
    """
    own = [place[token] for token, place in zip(token_ids, places, strict=True)]
    tokens = [text_of(each) for each in own]
    offsets = list(itertools.accumulate(map(len, tokens), initial=start))[:-1]
    logprobs = [number(each) for each in own]
    likeliest = [
        None if logprob is None else {text_of(each): number(each) for each in place.values()}
        for logprob, place in zip(logprobs, places, strict=True)
    ]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}


def prompt_logprobs(places: Sequence[Place | None]) -> list[dict[str, Any] | None]:
    """As vLLM tells them: by token id, in each place of a prompt but the first."""
    told = [
        {str(token): each._asdict() | {"logprob": number(each)} for token, each in (place or {}).items()}
        for place in places
    ]
    return [place or None for place in told]


def echoed(token_ids: Sequence[int], places: Sequence[Place | None], text: str, first: str) -> list[Place]:
    """The places of a prompt's tokens. Nothing comes before the first: it has its text alone, and no probability.

    A tokenizer that puts a space before every text has it in no text: the first token is told without it.
    """
    start: Place = {token_ids[0]: Logprob(math.nan, 0, first)}
    told = [start, *(place or {} for place in places[1:])]
    own = [text_of(place[token]) for token, place in zip(token_ids, told, strict=True)]
    if "".join(own) == f" {text}":
        i = next(i for i, each in enumerate(own) if each)
        told[i] = told[i] | {token_ids[i]: told[i][token_ids[i]]._replace(decoded_token=own[i][1:])}
    return told


def chat_logprobs(token_ids: Sequence[int], places: Sequence[Place], count: int) -> list[dict[str, Any]]:
    """Of each token, and of the `count` likeliest in its place; -1: of all."""
    told = []
    for token, place in zip(token_ids, places, strict=True):
        likeliest = [entry(each) for each in itertools.islice(place.values(), count if count >= 0 else None)]
        told.append(entry(place[token]) | {"top_logprobs": likeliest})
    return told


def entry(logprob: Logprob) -> dict[str, Any]:
    text = text_of(logprob)
    return {"token": text, "logprob": number(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def text_of(logprob: Logprob) -> str:
    """Empty without a tokenizer."""
    return logprob.decoded_token or ""


def number(logprob: Logprob) -> float | None:
    """
    >>> number(Logprob(-math.inf, 7)), number(Logprob(-0.5, 1)), number(Logprob(math.nan, 0))
    (-9999.0, -0.5, None)
    """
    return None if math.isnan(logprob.logprob) else max(LEAST, logprob.logprob)
