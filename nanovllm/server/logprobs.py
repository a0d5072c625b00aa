"""Log-probabilities in responses: the forms of chats, of completions and of prompts."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..requests.tokens import Logprob

Place = dict[int, Logprob]  # the most likely tokens at a position, and the sampled one
LEAST = -9999.0  # OpenAI's value for a token that is impossible: JSON has no infinity


def chat_logprobs(token_ids: Sequence[int], places: Sequence[Place], count: int) -> list[dict[str, Any]]:
    """Return an entry for each token, with the `count` most likely tokens at its position; -1 lists all of them."""
    most = count if count >= 0 else None
    return [
        entry(place[token]) | {"top_logprobs": [entry(each) for each in itertools.islice(place.values(), most)]}
        for token, place in zip(token_ids, places, strict=True)
    ]


def entry(logprob: Logprob) -> dict[str, Any]:
    """Return one token's entry in a chat's log-probabilities."""
    text = text_of(logprob)
    return {"token": text, "logprob": number(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(token_ids: Sequence[int], places: Sequence[Place], start: int = 0) -> dict[str, Any]:
    """Return each token's text, its offset from `start` on, its log-probability, and the most likely tokens.

    The first token of a prompt has a text only: its log-probability is NaN here, and null in JSON.
    """
    own = [place[token] for token, place in zip(token_ids, places, strict=True)]
    tokens = [text_of(each) for each in own]
    logprobs = [number(each) for each in own]
    top_logprobs = [
        None if logprob is None else {text_of(each): number(each) for each in place.values()}
        for logprob, place in zip(logprobs, places, strict=True)
    ]
    offsets = list(itertools.accumulate(map(len, tokens), initial=start))[:-1]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}


def prompt_logprobs(places: Sequence[Place | None] | None) -> dict[str, Any]:
    """Return the field prompt_logprobs in vLLM's form, by token id, or nothing if it wasn't requested."""
    if places is None:
        return {}
    entries = [
        {str(token): each._asdict() | {"logprob": number(each)} for token, each in (place or {}).items()}
        for place in places
    ]
    return {"prompt_logprobs": [each or None for each in entries]}


def echoed(token_ids: Sequence[int], places: Sequence[Place | None], text: str, first: str) -> list[Place]:
    """Return the log-probabilities of an echoed prompt. The first token has none, only its text, `first`.

    Some tokenizers put a space before every text. It is removed from the first token, as it is from the text.
    """
    start: Place = {token_ids[0]: Logprob(math.nan, 0, first)}
    result = [start, *(place or {} for place in places[1:])]
    own = [text_of(place[token]) for token, place in zip(token_ids, result, strict=True)]
    if "".join(own) == f" {text}":
        i = next(i for i, each in enumerate(own) if each)
        result[i] = result[i] | {token_ids[i]: result[i][token_ids[i]]._replace(decoded_token=own[i][1:])}
    return result


def text_of(logprob: Logprob) -> str:
    """Return the token's text, which is empty without a tokenizer."""
    return logprob.decoded_token or ""


def number(logprob: Logprob) -> float | None:
    """Return a log-probability that JSON can hold.

    >>> number(Logprob(-math.inf, 7)), number(Logprob(-0.5, 1)), number(Logprob(math.nan, 0))
    (-9999.0, -0.5, None)
    """
    return None if math.isnan(logprob.logprob) else max(LEAST, logprob.logprob)
