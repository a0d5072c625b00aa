"""Requests with the largest numbers, lists and strings that a body may have: a neighbor's tokens keep coming."""

import asyncio
import json
import time
from typing import Any

from ...testing.raw_http import exchange
from ...testing.served import Served
from .bad_bodies import whole
from .processes import wait_until_idle
from .wire import StreamRequest, send_and_read

MAX_GAP = 3.0  # seconds that a neighbor may wait for its next tokens
SECONDS = 120.0  # for a response
NEIGHBOR = StreamRequest("/v1/completions", '{"prompt": "Once", "max_tokens": 900, "stream": true, "ignore_eos": true}')
HUGE = 2**63
IDS = [*range(4096)] * 16
TEXT = "ab " * 1_000_000
PROMPT = "Once upon a time"
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(1024)]
CALLS = [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": f"{i}"} for i in range(8000)]
SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
CHAT = [{"role": "user", "content": "Hi"}]
EXTREMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("/v1/completions", {"prompt": PROMPT, "max_tokens": 64, "ignore_eos": True} | body)
        for name, body in {
            "repetition_detection": {"repetition_detection": {"max_pattern_size": HUGE - 1, "min_count": 2}},
            "repetition_detection of one letter": {
                "repetition_detection": {"max_pattern_size": HUGE - 1, "min_pattern_size": 4000, "min_count": 2},
                "logit_bias": {"300": 100},
                "max_tokens": 900,
            },
            "long stop strings": {"stop": ["a" * 120_000] * 32},
            "stop strings": {"stop": ["e" * 128] * 32, "include_stop_str_in_output": True},
            "stop_token_ids and min_tokens": {"stop_token_ids": IDS, "min_tokens": 60},
            "logit_bias": {"logit_bias": {str(i): 1 for i in range(4096)}},
            "allowed_token_ids": {"allowed_token_ids": IDS},
            "bad_words": {"bad_words": ["ab " * 170] * 128},
            "logprob_token_ids": {"logprob_token_ids": [*range(128)], "logprobs": 1},
            "n and logprobs": {"n": 1000, "logprobs": 20, "max_tokens": 4},
            "n and a schema": {"n": 1000, "max_tokens": 4, "structured_outputs": {"json": SCHEMA}},
            "prompts and ids": {"prompt": [PROMPT] * 2048, "stop_token_ids": IDS, "max_tokens": 1},
            "prompts and a few ids": {"prompt": [PROMPT] * 64, "stop_token_ids": IDS[:40_000], "max_tokens": 1},
            "prompts and usage": {
                **{"prompt": [[5]] * 2048, "max_tokens": 4, "stream": True},
                "stream_options": {"continuous_usage_stats": True},
            },
            "prompts and a salt": {"prompt": [PROMPT] * 2048, "cache_salt": "x" * 1_000_000},
            "a schema": {"structured_outputs": {"json": SCHEMA}},
            "a regex": {"structured_outputs": {"regex": "(a|b)*a(a|b){200}"}},
            "a choice": {"structured_outputs": {"choice": [f"{i}" * 9 for i in range(1200)]}},
            "reasoning_end_str": {"structured_outputs": {"regex": "a*", "reasoning_end_str": "e" * 60_000}},
            "prompt_logprobs": {"prompt": PROMPT * 200, "prompt_logprobs": 20, "max_tokens": 1},
            "a long prompt": {"prompt": TEXT},
            "a truncated prompt": {"prompt": TEXT, "truncate_prompt_tokens": 5},
            "numbers": dict.fromkeys(("top_k", "max_tokens", "stream_interval"), HUGE - 1) | {"top_p": 1e-300},
            "an unknown field": {"x" * 1_000_000: TEXT},
        }.items()
    },
    "tools": ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "max_tokens": 8}),
    "allowed tools": (
        "/v1/chat/completions",
        {
            **{"messages": CHAT, "tools": TOOLS, "max_tokens": 8},
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS * 12}},
        },
    ),
    "messages": ("/v1/chat/completions", {"messages": CHAT * 8192, "max_tokens": 8}),
    "calls": ("/v1/responses", {"input": CALLS, "max_output_tokens": 8}),
    "embeddings": ("/v1/embeddings", {"input": [PROMPT] * 2048}),
    "tokenize": ("/tokenize", {"prompt": TEXT}),
    "detokenize": ("/detokenize", {"tokens": IDS * 10}),
}


class Neighbor:
    """A client that requests one stream after another. A new stream may have to wait in the queue: that is no gap."""

    def __init__(self) -> None:
        self.gap = 0.0  # seconds, the longest one within a stream
        self.error: str | None = None

    async def read(self, url: str) -> None:
        """Read streams until one of them breaks."""
        while self.error is None:
            times: list[float] = []

            def measure(piece: bytes, times: list[float] = times) -> None:
                times.append(time.monotonic())
                self.gap = max(self.gap, times[-1] - times[-2] if len(times) > 1 else 0.0)

            self.error = (await send_and_read(url, NEIGHBOR, measure)).error


async def storm(served: Served) -> dict[str, float]:
    """Send each request next to a client that streams. Return its longest gap beside each, in seconds."""
    gaps: dict[str, float] = {}
    faults: list[str] = []
    for name, (path, body) in EXTREMES.items():
        neighbor = Neighbor()
        streams = asyncio.create_task(neighbor.read(served.url))
        await asyncio.sleep(1.0)
        bad = whole(name, json.dumps(body).encode(), path, connection="close")
        raw = await exchange(served.url, *bad.parts, seconds=SECONDS)
        assert raw.status in (200, 400), f"{name}: status {raw.status}"
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)
        await asyncio.to_thread(wait_until_idle, served)
        gaps[name] = neighbor.gap
        if neighbor.error or neighbor.gap > MAX_GAP:
            faults.append(f"{name}: {neighbor.gap:.2f} seconds, {neighbor.error or 'no error'}")
    assert not faults, "\n".join([f"{len(faults)} faults:", *faults])
    return gaps
