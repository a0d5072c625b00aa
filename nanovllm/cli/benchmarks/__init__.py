"""The benchmarks of nanovllm bench.

workload.py     prompts of random tokens, or those of a file
timing.py       serves requests, and notes when each token came
peer.py         transformers on the same weights
floor.py        what the machine needs at least: to read the weights and the keys and values
turns.py        rounds in which what is compared takes turns
throughput.py latency.py prefix.py offload.py    one benchmark each
peers.py        another benchmark: vLLM, llama.cpp and transformers beside this engine
answers.py peer_process.py agreement.py contexts.py    its parts
workers/        what runs in the peers' processes
serve.py        a server under load, ours or any other that speaks OpenAI's interface
serve_load.py serve_requests.py http_stream.py    its parts
through_http.py own_server.py    what HTTP costs: this engine through a server of its own, and without
published.py published_load.py    nano-vllm's published workload, beside transformers' generate_batch()
paged.py paged_calls.py    attention of a decode step on a paged cache, and on a contiguous one
shapes.py       folders of published shapes, for random weights
report.py       a table, and JSON
"""

from importlib import import_module
from typing import Any

from .report import table, write_json

__all__ = ["measure", "table", "write_json"]


def measure(name: str, engine: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """All numbers of the benchmark `name`. Raises ValueError for settings that the model or the pool cannot take."""
    return import_module(f".{name}", __package__).measure(engine, **settings)
