"""Log-probabilities in responses, in the formats for chats, completions and prompts."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..requests.tokens import Logprob

Position = dict[int, Logprob]  # by token id: the most likely tokens at one position, and the actual token
MIN_LOGPROB = -9999.0  # OpenAI's value for an impossible token, because JSON has no infinity


def chat_logprobs(token_ids: Sequence[int], positions: Sequence[Position], count: int) -> list[dict[str, Any]]:
    """Return an entry for each token, with the `count` most likely tokens at its position; -1 lists all of them."""
    limit = count if count >= 0 else None
    return [
        entry_of(position[token]) | {"top_logprobs": [*map(entry_of, itertools.islice(position.values(), limit))]}
        for token, position in zip(token_ids, positions, strict=True)
    ]


def entry_of(logprob: Logprob) -> dict[str, Any]:
    """Return the entry for one token in a chat's log-probabilities."""
    text = text_of(logprob)
    return {"token": text, "logprob": json_number(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(token_ids: Sequence[int], positions: Sequence[Position], start: int = 0) -> dict[str, Any]:
    """Return the texts, log-probabilities, most likely tokens and offsets at each position. Offsets begin at `start`.

    The first token of a prompt has no log-probability: it is NaN in `positions`, and null in JSON.
    """
    actual = [position[token] for token, position in zip(token_ids, positions, strict=True)]
    tokens = [text_of(each) for each in actual]
    logprobs = [json_number(each) for each in actual]
    top_logprobs = [
        None if logprob is None else {text_of(each): json_number(each) for each in position.values()}
        for logprob, position in zip(logprobs, positions, strict=True)
    ]
    offsets = list(itertools.accumulate(map(len, tokens), initial=start))[:-1]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}


def prompt_logprobs(positions: Sequence[Position | None] | None) -> dict[str, Any]:
    """Return the field prompt_logprobs in vLLM's format, by token id, or no field if it wasn't requested."""
    if positions is None:
        return {}
    entries = [
        {str(token): each._asdict() | {"logprob": json_number(each)} for token, each in (position or {}).items()}
        for position in positions
    ]
    return {"prompt_logprobs": [each or None for each in entries]}


def echoed_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position | None], text: str, first_text: str
) -> list[Position]:
    """Return the log-probabilities of an echoed prompt. The first token has NaN, and its text is `first_text`.

    Some tokenizers put a space before every text. The prompt's `text` doesn't have that space, so remove it from the
    first token that has text.
    """
    first_position: Position = {token_ids[0]: Logprob(math.nan, 0, first_text)}
    result = [first_position, *(position or {} for position in positions[1:])]
    texts = [text_of(position[token]) for token, position in zip(token_ids, result, strict=True)]
    if "".join(texts) == f" {text}":
        i = next(i for i, each in enumerate(texts) if each)
        result[i] = result[i] | {token_ids[i]: result[i][token_ids[i]]._replace(decoded_token=texts[i][1:])}
    return result


def text_of(logprob: Logprob) -> str:
    """Return the token's text, or "" if there is no tokenizer."""
    return logprob.decoded_token or ""


def json_number(logprob: Logprob) -> float | None:
    """Return a log-probability as a number that JSON can hold, or None for NaN.

    >>> json_number(Logprob(-math.inf, 7)), json_number(Logprob(-0.5, 1)), json_number(Logprob(math.nan, 0))
    (-9999.0, -0.5, None)
    """
    return None if math.isnan(logprob.logprob) else max(MIN_LOGPROB, logprob.logprob)
