"""A server under load: any that speaks OpenAI's interface."""

import asyncio
import math
import time
from typing import Any

from ... import __version__
from .http_stream import Target
from .serve_load import arrivals, asks
from .serve_requests import CHAT, COMPLETIONS, LONGEST, Form, Outcome, front_seconds, model_of, serve_all
from .timing import percentiles


def measure_server(
    base_url: str,
    model: str | None,
    api_key: str | None,
    endpoint: str,
    num_prompts: int,
    request_rate: float,
    max_concurrency: int | None,
    input_len: int | None,
    output_len: int | None,
    ignore_eos: bool,
    seed: int,
) -> dict[str, Any]:
    """All numbers. Raises ValueError for a server that cannot be asked, or that answers nothing."""
    if (input_len is None) != (output_len is None):
        raise ValueError("give both input_len and output_len, or neither: then lengths are as of chats")
    target = Target.of(base_url, api_key)
    lengths = None if input_len is None else (input_len, output_len)
    settings: dict[str, Any] = {"num_prompts": num_prompts, "request_rate": request_rate}
    settings |= {"max_concurrency": max_concurrency, "endpoint": endpoint}
    settings |= {"lengths": "as of chats" if lengths is None else f"{input_len} + {output_len}"}
    run = Run(target, model, CHAT if endpoint == "chat" else COMPLETIONS, {"ignore_eos": True} if ignore_eos else {})
    return asyncio.run(run.measure(lengths, settings, seed))


class Run:
    def __init__(self, target: Target, model: str | None, path: str, extra: dict[str, Any]) -> None:
        self.target, self.model, self.path, self.extra = target, model, path, extra

    async def measure(self, lengths: tuple[int, int] | None, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        name, longest = await model_of(self.target)
        form, count = Form(self.path, self.model or name, self.extra), settings["num_prompts"]
        longest = min(longest, LONGEST) * 4 // 5  # a word may be two tokens
        load = asks(count, lengths, longest, seed)
        times = list(arrivals(count, settings["request_rate"], seed))
        front, own = await front_seconds(self.target), time.process_time()
        outcomes, seconds = await serve_all(self.target, form, load, times, settings["max_concurrency"])
        own, later = time.process_time() - own, await front_seconds(self.target)
        found = numbers(outcomes, seconds)
        found["client_share_of_a_core"] = own / seconds
        if front is not None and later is not None and found["total_output_tokens"]:
            found["front_ms_a_token"] = 1000 * (later - front) / found["total_output_tokens"]
        return {
            "bench": "serve",
            "settings": {name: shown(value) for name, value in settings.items()},
            "machine": {
                "nanovllm": __version__,
                "server": f"{self.target.host}:{self.target.port}",
                "model": form.model,
            },
            "measured": {"server": found},
            "says": says(outcomes),
        }


def numbers(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Names are those of vLLM's benchmark. A gap is between two pieces, and a piece may have several tokens."""
    whole = [each for each in outcomes if each.error is None]
    if not whole:
        raise ValueError(f"no request was answered: {outcomes[0].error}")
    tokens = sum(each.num_tokens or len(each.pieces) for each in whole)
    begun = [each for each in whole if each.pieces]
    prompts = sum(each.num_prompt_tokens for each in whole)
    return {
        "completed": len(whole),
        "failed": len(outcomes) - len(whole),
        "duration": seconds,
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "request_throughput": len(whole) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (prompts + tokens) / seconds,
        "ttft_ms": percentiles([each.pieces[0] for each in begun]),
        "itl_ms": percentiles([gap for each in begun for gap in each.gaps]),
        "tpot_ms": percentiles([time_a_token(each) for each in begun if each.num_tokens > 1]),
        "e2el_ms": percentiles([each.seconds for each in whole]),
    }


def time_a_token(outcome: Outcome) -> float:
    return (outcome.pieces[-1] - outcome.pieces[0]) / (outcome.num_tokens - 1)


def says(outcomes: list[Outcome]) -> list[str]:
    told = ["times in ms: p50 / p90 / p99 (ttft: first piece; itl: between two; tpot: a request's mean; e2el: its end)"]
    errors = [each.error for each in outcomes if each.error]
    return told + ([f"{len(errors)} requests failed, the first: {errors[0]}"] if errors else [])


def shown(value: Any) -> Any:
    """JSON has no infinity.

    >>> shown(math.inf), shown(None), shown(3)
    ('all at once', 'no limit', 3)
    """
    return "all at once" if value == math.inf else "no limit" if value is None else value
