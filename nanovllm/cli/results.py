"""What came of a request, as a line of JSON; and a line is written as a whole or not at all."""

import json
import math
import os
from contextlib import suppress
from typing import IO, Any

from ..api import Logprob, RequestOutput
from ..core import CompletionOutput
from .requests_file import Request


def result_line(request: Request, output: RequestOutput) -> str:
    """A line that every reader of JSON takes.

    What there is not (an error, a first token, logprobs that nobody asked for) is left out.
    """
    start, metrics = output.metrics.arrival_time, output.metrics
    fields = {
        "id": request.id,
        "index": request.index,
        "prompt": request.prompt,
        "error": output.error,
        "outputs": [completion(each) for each in output.outputs],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": logprobs(output.prompt_logprobs),
        "ttft": None if metrics.first_token_time is None else metrics.first_token_time - start,  # seconds
        "seconds": metrics.finished_time - start,
    }
    return json.dumps(finite(there(fields)), allow_nan=False) + "\n"


def completion(output: CompletionOutput) -> dict[str, Any]:
    fields = vars(output)
    return there(fields | {"logprobs": logprobs(fields["logprobs"])})


def logprobs(places: list[dict[int, Logprob] | None] | None) -> list[dict[int, dict[str, Any]] | None] | None:
    """For each place its tokens, with names for their two numbers; null for the prompt's first, which has none."""
    if places is None:
        return None
    return [None if place is None else {id: logprob._asdict() for id, logprob in place.items()} for place in places]


def there(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def finite(value: Any) -> Any:
    """The value with null in place of each number that JSON does not have.

    >>> finite({"logprob": float("-inf"), "ranks": [1, float("nan")]})
    {'logprob': None, 'ranks': [1, None]}
    """
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(stream: IO[bytes], line: str) -> None:
    """Write a line. If the disk is full in the middle of it, the file ends with the line before; then OSError."""
    end = stream.seek(0, os.SEEK_END) if stream.seekable() else None  # before the first write, tell() is 0 after `>>`
    rest = memoryview(line.encode())
    try:
        while rest:
            rest = rest[stream.write(rest) :]
    except OSError:
        if end is not None:
            with suppress(OSError):  # /dev/full can be searched, and not be cut
                stream.truncate(end)
        raise
