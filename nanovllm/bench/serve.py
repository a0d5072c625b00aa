"""A server under load: requests as people send them, to any server that speaks OpenAI's interface."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from .. import __version__
from .harness import percentiles
from .load import CHAT, COMPLETIONS, DEFAULT_MAX_MODEL_LEN, Outcome, connect
from .options import ServerLoad
from .report import Report
from .workload import arrivals, chats

NOTE = "times in ms: p50 / p90 / p99 (ttft: first piece; itl: between two; tpot: a request's mean; e2el: its end)"


def serve_load(options: ServerLoad) -> Report:
    """Send the requests, and return the report. Raise ValueError if the server answers none."""
    if (options.input_len is None) != (options.output_len is None):
        raise ValueError("input_len and output_len must both be given, or neither for lengths like those of chats")
    return asyncio.run(measure(options))


async def measure(options: ServerLoad) -> Report:
    """Send the requests, and return the report."""
    lengths = (options.input_len, options.output_len) if options.input_len and options.output_len else None
    path = CHAT if options.endpoint == "chat" else COMPLETIONS
    times = list(arrivals(options.num_prompts, options.request_rate, options.seed))
    async with connect(options.base_url, options.api_key) as client:
        name, longest = await client.first_model()
        longest = min(longest, DEFAULT_MAX_MODEL_LEN) * 4 // 5  # a word may be two tokens
        model, extra = options.model or name, {"ignore_eos": True} if options.ignore_eos else {}
        bodies: list[dict[str, Any]] = []
        for prompt, num_tokens in chats(options.num_prompts, lengths, longest, options.seed):
            text = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
            bodies.append({"model": model, **text, "max_tokens": num_tokens, "temperature": 0, **extra})
        streamed = await client.stream_all(path, bodies, times, options.max_concurrency)
    measured = numbers(streamed.outcomes, streamed.seconds)
    measured["client_share_of_a_core"] = streamed.client / streamed.seconds
    if streamed.front is not None and measured["total_output_tokens"]:
        measured["front_ms_a_token"] = 1000 * streamed.front / measured["total_output_tokens"]
    errors = [each.error for each in streamed.outcomes if each.error]
    return {
        "bench": "serve",
        "settings": {
            "num_prompts": options.num_prompts,
            "request_rate": "all at once" if options.request_rate == math.inf else options.request_rate,
            "max_concurrency": options.max_concurrency or "no limit",
            "endpoint": options.endpoint,
            "lengths": f"{lengths[0]} + {lengths[1]}" if lengths else "as of chats",
        },
        "machine": {"nanovllm": __version__, "server": client.server, "model": model},
        "measured": {"server": measured},
        "says": [NOTE, *([f"{len(errors)} requests failed, the first: {errors[0]}"] if errors else [])],
    }


def numbers(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return numbers by the names of vLLM's benchmark. A gap is between two pieces, which may be several tokens."""
    complete = [each for each in outcomes if each.error is None]
    if not complete:
        raise ValueError(f"no request was answered: {outcomes[0].error}")
    tokens = sum(each.num_tokens or len(each.pieces) for each in complete)
    prompts = sum(each.num_prompt_tokens for each in complete)
    started = [each for each in complete if each.pieces]
    means = [(each.pieces[-1] - each.pieces[0]) / (each.num_tokens - 1) for each in started if each.num_tokens > 1]
    return {
        "completed": len(complete),
        "failed": len(outcomes) - len(complete),
        "duration": seconds,
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "request_throughput": len(complete) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (prompts + tokens) / seconds,
        "ttft_ms": percentiles([each.pieces[0] for each in started]),
        "itl_ms": percentiles([gap for each in started for gap in each.gaps]),
        "tpot_ms": percentiles(means),
        "e2el_ms": percentiles([each.seconds for each in complete]),
    }
