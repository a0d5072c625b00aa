"""The requests of a storm, and a judge of their outputs: each must equal the output of the request alone."""

import asyncio
import json
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import torch

from ....llm import LLM
from ....options.engine_args import EngineArgs
from ....requests.prompts import TokensPrompt
from ....requests.sampling_params import SamplingParams
from ...testing.served import STORYTELLER
from .wire import StreamRequest, StreamResult, send_and_read

ANIMALS = ("fox", "bear", "rabbit", "mouse", "bird", "dog", "cat", "frog", "duck", "bee")
BEGINNINGS = ("Once upon a time there was a {0} {1}", "The {0} {1} went to", '"Help!" said the {0} {1}.', "{1}")
KINDS = ("little", "old", "sad", "big", "brave", "silly")
MARGIN = 1e-3  # of the logits' standard deviation: two tokens with closer logits are a tie
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
    """A judge of results. They may differ from the expected ones only at a near tie."""

    url: str
    num_tokens: int = 0  # of all results
    num_ties: int = 0

    async def judge(self, request: StreamRequest, result: StreamResult, expected: StreamResult) -> None:
        """Raise AssertionError for a result that is incomplete or wrong."""
        assert result.is_whole, f"{request.body}: {result.error or 'the stream ended early'}"
        self.num_tokens += request.value["max_tokens"] * request.value["n"]
        outputs = result.outputs
        if outputs == expected.outputs:
            return
        assert outputs.keys() == expected.outputs.keys(), f"{request.body}: {outputs}, expected {expected.outputs}"
        self.num_ties += 1
        if not request.value["temperature"]:
            await asyncio.to_thread(self._check_tie, request, result, expected)

    def check_count(self) -> None:
        """Raise AssertionError for too many ties."""
        most = max(1, self.num_tokens // TOKENS_PER_TIE)
        assert self.num_ties <= most, f"{self.num_ties} results differ, of about {self.num_tokens} tokens"

    def _check_tie(self, request: StreamRequest, result: StreamResult, expected: StreamResult) -> None:
        """Find the first token that differs. The two best tokens there must be nearly equal."""
        body = {name: request.value[name] for name in ("prompt", "messages") if name in request.value}
        prompt = httpx.post(self.url + "/tokenize", json=body).json()["tokens"]
        params = SamplingParams(temperature=0, max_tokens=request.value["max_tokens"], logprobs=-1)
        [plain] = self._plain.generate(TokensPrompt(prompt_token_ids=prompt), params)[0].outputs
        for index, (text, _) in result.outputs.items():
            for other in (text, expected.outputs[index][0]):
                if other != plain.text:
                    margin = margin_at(plain, first_difference(self._plain, plain.token_ids, other))
                    assert margin < MARGIN, f"{request.body}: {other!r}, plain {plain.text!r}, margin {margin:.2g}"

    @cached_property
    def _plain(self) -> LLM:
        args = EngineArgs(model=str(STORYTELLER), attention_backend="torch", offload_policy="load")
        return LLM.from_engine_args(args)


def first_difference(llm: LLM, token_ids: list[int], text: str) -> int:
    """Return the first token after which the decoded text differs from `text`, or the last token."""
    tokenizer = llm.get_tokenizer()
    for i in range(len(token_ids)):
        if not text.startswith(tokenizer.decode(token_ids[: i + 1])):
            return i
    return len(token_ids) - 1


def margin_at(output: Any, place: int) -> float:
    """Return the gap between the two best tokens at a place, in standard deviations of the logits."""
    logprobs = torch.tensor([each.logprob for each in output.logprobs[place].values()])  # [vocab_size]
    best, second = logprobs.topk(2).values.tolist()
    return (best - second) / float(logprobs.std())
