"""The requests of a storm, and a judge of their outputs: each must equal the output of the request alone."""

import json
import random
from dataclasses import dataclass
from typing import Any

from .wire import StreamRequest, StreamResult, send_and_read

ANIMALS = ("fox", "bear", "rabbit", "mouse", "bird", "dog", "cat", "frog", "duck", "bee")
BEGINNINGS = ("Once upon a time there was a {0} {1}", "The {0} {1} went to", '"Help!" said the {0} {1}.', "{1}")
KINDS = ("little", "old", "sad", "big", "brave", "silly")
TOKENS_PER_TIE = 1000  # at most one tie per this many tokens


def random_requests(rng: random.Random, count: int, max_tokens: int) -> list[StreamRequest]:
    """Return completions and chats, greedy or seeded, with one choice or two."""
    return [random_request(rng, number, max_tokens) for number in range(count)]


def random_request(rng: random.Random, number: int, max_tokens: int) -> StreamRequest:
    text = rng.choice(BEGINNINGS).format(rng.choice(KINDS), rng.choice(ANIMALS))
    body: dict[str, Any] = {"stream": True, "max_tokens": rng.randint(1, max_tokens), "seed": number}
    body["temperature"] = rng.choice((0, 0, 0.8))
    body["n"] = rng.choice((1, 1, 1, 2))
    if rng.random() < 0.3:
        return StreamRequest(
            "/v1/chat/completions", json.dumps(body | {"messages": [{"role": "user", "content": text}]})
        )
    return StreamRequest("/v1/completions", json.dumps(body | {"prompt": text}))


async def expected_results(url: str, requests: list[StreamRequest]) -> list[StreamResult]:
    """Return the result of each request alone."""
    results = [await send_and_read(url, request) for request in requests]
    assert all(each.is_whole for each in results), [each.error for each in results if each.error]
    return results


@dataclass
class Judge:
    """A judge of results. A few may differ from the expected ones, where two tokens are nearly tied."""

    num_tokens: int = 0  # of all results
    num_ties: int = 0

    def judge(self, request: StreamRequest, result: StreamResult, expected: StreamResult) -> None:
        """Raise AssertionError for a result that is incomplete or wrong."""
        assert result.is_whole, f"{request.body}: {result.error or 'the stream ended early'}"
        self.num_tokens += request.value["max_tokens"] * request.value["n"]
        outputs = result.outputs
        if outputs == expected.outputs:
            return
        assert outputs.keys() == expected.outputs.keys(), f"{request.body}: {outputs}, expected {expected.outputs}"
        self.num_ties += 1

    def check_count(self) -> None:
        """Raise AssertionError for too many ties."""
        most = max(1, self.num_tokens // TOKENS_PER_TIE)
        assert self.num_ties <= most, f"{self.num_ties} results differ, of about {self.num_tokens} tokens"
