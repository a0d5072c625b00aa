"""What came of a request, as a line of JSON that every reader of JSON takes."""

import json
import math
from collections.abc import Sequence
from typing import Any

from ..engine.outputs import CompletionOutput, Logprob, RequestOutput
from .openai_results import openai_result
from .request import Request


def result_line(request: Request, output: RequestOutput, model: str) -> str:
    """In the form of the request. `model` is the name that OpenAI's form tells."""
    fields = openai_result(request, output, model) if request.url else own_result(request, output)
    return json.dumps(finite(fields), allow_nan=False) + "\n"


def own_result(request: Request, output: RequestOutput) -> dict[str, Any]:
    """What there is not (an error, a first token, logprobs that nobody asked for) is left out."""
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
    return there(fields)


def completion(output: CompletionOutput) -> dict[str, Any]:
    fields = vars(output)
    return there(fields | {"logprobs": logprobs(fields["logprobs"])})


def logprobs(places: Sequence[dict[int, Logprob] | None] | None) -> list[dict[int, dict[str, Any]] | None] | None:
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
