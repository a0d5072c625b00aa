"""What the clients of a storm ask for, and what each gets when nobody else is there."""

import asyncio
import json
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import torch

from ....engine.config import EngineArgs
from ....engine.prompts import TokensPrompt
from ....engine.sampling_params import SamplingParams
from ....llm import LLM
from ..served import STORYTELLER
from .wire import Answer, Ask, ask_for

ANIMALS = ("fox", "bear", "rabbit", "mouse", "bird", "dog", "cat", "frog", "duck", "bee")
BEGINNINGS = ("Once upon a time there was a {0} {1}", "The {0} {1} went to", '"Help!" said the {0} {1}.', "{1}")
KINDS = ("little", "old", "sad", "big", "brave", "silly")
MARGIN = 1e-3  # of the logits' standard deviation: two tokens whose logits are nearer may change places
EACH_DIFFERENCE = 1000  # tokens: so many must be equal for one that is not


def random_asks(rng: random.Random, count: int, most_tokens: int) -> list[Ask]:
    """Texts and chats, greedy or with a seed, of one choice or two."""
    return [random_ask(rng, number, most_tokens) for number in range(count)]


def random_ask(rng: random.Random, number: int, most_tokens: int) -> Ask:
    text = rng.choice(BEGINNINGS).format(rng.choice(KINDS), rng.choice(ANIMALS))
    body: dict[str, Any] = {"stream": True, "max_tokens": rng.randint(1, most_tokens), "seed": number}
    body["temperature"] = rng.choice((0, 0, 0.8))
    body["n"] = rng.choice((1, 1, 1, 2))
    if rng.random() < 0.3:
        return Ask("/v1/chat/completions", json.dumps(body | {"messages": [{"role": "user", "content": text}]}))
    return Ask("/v1/completions", json.dumps(body | {"prompt": text}))


async def answers_alone(url: str, asks: list[Ask]) -> list[Answer]:
    """One after the other."""
    answers = [await ask_for(url, ask) for ask in asks]
    assert all(answer.is_whole for answer in answers), [answer.error for answer in answers if answer.error]
    return answers


@dataclass
class Judge:
    """Says whether an answer is the one that its request gets alone, or differs at a near tie."""

    url: str
    num_tokens: int = 0  # of all answers that were judged
    num_ties: int = 0

    async def judge(self, ask: Ask, found: Answer, alone: Answer) -> None:
        """Raises AssertionError."""
        assert found.is_whole, f"{ask.body}: {found.error or 'the stream has ended before its time'}"
        self.num_tokens += ask.value["max_tokens"] * ask.value["n"]
        if found.said == alone.said:
            return
        assert found.said.keys() == alone.said.keys(), f"{ask.body}: {found.said}, alone {alone.said}"
        self.num_ties += 1
        if not ask.value["temperature"]:
            await asyncio.to_thread(self._check_tie, ask, found, alone)

    def check_count(self) -> None:
        most = max(1, self.num_tokens // EACH_DIFFERENCE)
        assert self.num_ties <= most, f"{self.num_ties} answers differ, of about {self.num_tokens} tokens"

    def _check_tie(self, ask: Ask, found: Answer, alone: Answer) -> None:
        """Walk along a text until the tokens are another's: two tokens must have been as good as equal there."""
        given = {name: ask.value[name] for name in ("prompt", "messages") if name in ask.value}
        prompt = httpx.post(self.url + "/tokenize", json=given).json()["tokens"]
        params = SamplingParams(temperature=0, max_tokens=ask.value["max_tokens"], logprobs=-1)
        [plain] = self._plain.generate(TokensPrompt(prompt_token_ids=prompt), params)[0].outputs
        for index, (text, _) in found.said.items():
            for other in (text, alone.said[index][0]):
                if other != plain.text:
                    margin = margin_at(plain, first_difference(self._plain, plain.token_ids, other))
                    assert margin < MARGIN, f"{ask.body}: {other!r}, plain {plain.text!r}, margin {margin:.2g}"

    @cached_property
    def _plain(self) -> LLM:
        args = EngineArgs(model=str(STORYTELLER), attention_backend="torch", offload_policy="load")
        return LLM.from_engine_args(args)


def first_difference(llm: LLM, token_ids: list[int], text: str) -> int:
    """The first token whose text does not begin `text`; the last one if all do."""
    tokenizer = llm.get_tokenizer()
    for i in range(len(token_ids)):
        if not text.startswith(tokenizer.decode(token_ids[: i + 1])):
            return i
    return len(token_ids) - 1


def margin_at(output: Any, place: int) -> float:
    """Between the two best of a token, in standard deviations of its logits."""
    logprobs = torch.tensor([each.logprob for each in output.logprobs[place].values()])  # [vocab_size]
    best, second = logprobs.topk(2).values.tolist()
    return (best - second) / float(logprobs.std())
