"""Asks a server for streams, and notes when each piece came."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .http_stream import DONE, Broken, Target, asked
from .serve_load import Ask

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST = 2048  # tokens of a prompt and its output, where a server does not say
FRONT_SECONDS = re.compile(rb"^process_cpu_seconds_total (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Form:
    """How a request is put."""

    path: str
    model: str
    extra: dict[str, Any]

    def body(self, ask: Ask) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": ask.prompt}]}
        asked_for = chat if self.path == CHAT else {"prompt": ask.prompt}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked_for, "max_tokens": ask.num_tokens, "temperature": 0} | usage | self.extra


@dataclass
class Outcome:
    """Times are in seconds; those of pieces from when the request was sent."""

    pieces: list[float] = field(default_factory=list)  # when each piece of text came
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        """
        >>> Outcome([1.0, 3.0, 6.0]).gaps
        [2.0, 3.0]
        """
        return [later - earlier for earlier, later in pairwise(self.pieces)]


async def ask_for(target: Target, form: Form, ask: Ask) -> Outcome:
    """An answer is whole with a finish_reason and [DONE], else it is an error."""
    outcome, start = Outcome(), time.perf_counter()
    try:
        async with asked(target, "POST", form.path, form.body(ask)) as answer:
            if answer.status != 200:
                raise Broken(f"status {answer.status}: {short(await answer.body())}")
            is_finished = is_done = False
            async for event in answer.events():
                now = time.perf_counter() - start
                if event == DONE:
                    is_done = True
                    break
                is_finished |= note(outcome, event, now)
            if not (is_done and is_finished):
                raise Broken("the stream ends before it is whole")
    except (OSError, Broken, ValueError) as error:
        outcome.error = f"{error}" if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
    outcome.seconds = time.perf_counter() - start
    return outcome


def note(outcome: Outcome, event: dict[str, Any], now: float) -> bool:
    """Returns whether the event says how the answer has ended. Raises Broken for one that says an error."""
    if "error" in event:
        raise Broken(f"an error event: {short(event)}")
    if usage := event.get("usage"):
        outcome.num_prompt_tokens, outcome.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    ended = False
    for choice in event.get("choices") or []:
        is_last = choice.get("finish_reason") is not None
        if has_text(choice) or not (is_last or "role" in (choice.get("delta") or {})):
            outcome.pieces.append(now)
        ended |= is_last
    return ended


def has_text(choice: dict[str, Any]) -> bool:
    """A token may have none: its character is not whole yet, or there is no tokenizer.

    >>> has_text({"delta": {"content": "a"}}), has_text({"text": ""})
    (True, False)
    """
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def short(told: Any) -> str:
    text = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
    return text if len(text) <= 200 else text[:200] + "..."


async def serve_all(
    target: Target, form: Form, asks: Sequence[Ask], times: Sequence[float], most: int | None
) -> tuple[list[Outcome], float]:
    """Send each at its time, at most `most` together. Returns what came of them, and the seconds of it all."""
    gate = asyncio.Semaphore(most) if most else nullcontext()
    start = time.perf_counter()

    async def one(ask: Ask, when: float) -> Outcome:
        await asyncio.sleep(start + when - time.perf_counter())
        async with gate:
            return await ask_for(target, form, ask)

    outcomes = await asyncio.gather(*(one(ask, when) for ask, when in zip(asks, times, strict=True)))
    return outcomes, time.perf_counter() - start


async def model_of(target: Target) -> tuple[str, int]:
    """The server's first model, and the most tokens of a sequence. Raises ValueError if it does not say."""
    try:
        async with asked(target, "GET", "/v1/models") as answer:
            body = await answer.body()
            if answer.status != 200:
                raise Broken(f"status {answer.status}: {short(body)}")
            [first, *_] = json.loads(body)["data"]
            return first["id"], first.get("max_model_len") or LONGEST
    except (OSError, Broken, ValueError, KeyError, TypeError) as error:
        where = f"{target.host}:{target.port}"
        raise ValueError(f"the server at {where} does not say which models it has: {error}") from None


async def front_seconds(target: Target) -> float | None:
    """The processor time of the server's front so far, where it tells that."""
    try:
        async with asked(target, "GET", "/metrics") as answer:
            found = FRONT_SECONDS.search(await answer.body()) if answer.status == 200 else None
            return float(found[1]) if found else None
    except (OSError, Broken, ValueError):
        return None
