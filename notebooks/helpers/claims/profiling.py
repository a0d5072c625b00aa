"""A profile of ten steps of the package, and the recipe for a GPU from its documentation."""

import json
import re
import tempfile
from pathlib import Path
from statistics import median

from nanovllm import LLM, SamplingParams
from stages.bench.counting import silent_stderr
from stages.bench.models import STORYTELLER
from stages.bench.texts import markdown_table

RECIPE = Path(__file__).parents[3] / "nanovllm" / "docs" / "tracing.md"
PARTS = ("schedule", "launch", "sample", "update")


def profile(batch: int = 8, steps: int = 10) -> tuple[list[tuple[str, float]], list[tuple[str, int, float]]]:
    """Return the median microseconds of each part of a step, and (operation, calls, us) per step, costliest first."""
    with tempfile.TemporaryDirectory() as folder, silent_stderr():
        options = {"kv_cache_tokens": 4096, "attention_backend": "torch", "offload_policy": "load"}
        llm = LLM(STORYTELLER, profiler_config={"profiler": "torch", "torch_profiler_dir": folder}, **options)
        params = SamplingParams(temperature=0.0, max_tokens=steps + 2, ignore_eos=True)
        for number in range(batch):
            llm.llm_engine.add_request(str(number), [3 + number] * 100, params)
        for _ in range(2):  # the prompts, and a step to warm up
            llm.llm_engine.step()
        llm.start_profile()
        for _ in range(steps):
            llm.llm_engine.step()
        llm.stop_profile()
        events = json.loads(next(Path(folder).iterdir()).read_text())["traceEvents"]
    ranges = [(event["name"], event["dur"]) for event in events if event.get("cat") == "user_annotation"]
    parts = [(name, median(us for other, us in ranges if other == name)) for name in PARTS]
    operations: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            operations.setdefault(event["name"], []).append(event["dur"])
    rows = [(name, round(len(us) / steps), sum(us) / steps) for name, us in operations.items()]
    return parts, sorted(rows, key=lambda row: -row[2])


def table(parts: list[tuple[str, float]], operations: list[tuple[str, int, float]], shown: int = 6) -> str:
    """Return both as Markdown. An operation's time includes the operations that it calls."""
    rows = [(f"`{name}`", "", f"{us:,.0f}") for name, us in parts]
    rows += [(name, str(calls), f"{us:,.0f}") for name, calls, us in operations[:shown]]
    return markdown_table(["part, or operation", "calls per step", "us per step"], rows)


def recipe() -> str:
    """Return the commands for nsys and ncu from the package's documentation."""
    [block] = re.findall(r"^```sh gpu\n(nsys .*?)^```$", RECIPE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return block
