"""A few requests on an idle engine, again and again."""

from typing import Any

from ..compiling import compiled_llm
from .throughput import compare
from .workload import random_tasks


def measure(
    engine: dict[str, Any], rounds: int, peer: bool, batch_size: int, input_len: int, output_len: int
) -> dict[str, Any]:
    llm = compiled_llm(engine)
    tasks = random_tasks(llm, batch_size, input_len, output_len)
    settings = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len}
    return compare("latency", llm, tasks, rounds, peer, settings)
