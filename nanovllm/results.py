"""What came of a request, as a line of JSON."""

import json
from typing import Any

from .outputs import CompletionOutput, RequestOutput
from .requests_file import Request
from .sampling import Logprob


def result_line(request: Request, output: RequestOutput) -> str:
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
    return json.dumps(there(fields)) + "\n"


def completion(output: CompletionOutput) -> dict[str, Any]:
    return there(vars(output) | {"logprobs": logprobs(output.logprobs)})


def logprobs(places: list[dict[int, Logprob] | None] | None) -> list[dict[int, dict[str, Any]] | None] | None:
    """For each place its tokens, with names for their two numbers; null for the prompt's first, which has none."""
    if places is None:
        return None
    return [None if place is None else {id: logprob._asdict() for id, logprob in place.items()} for place in places]


def there(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
