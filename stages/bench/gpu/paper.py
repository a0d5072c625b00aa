"""What a GPU should reach, on paper, and what it did: `python -m stages.bench.gpu.paper` writes the table in GPU.md.

The floor is the time to read the weights in each step, and the keys and values of all contexts, at the datasheet's
speed. Expected is the time to read them as fast as a copy on the device does. h100/ has the results of `make gpu` on an
H100.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.checkpoints.sizes import SHAPES, Fit, kv_bytes_per_token
from stages.bench.gpu.common import file_of, read_results
from stages.bench.workloads import published_tasks

PAGE, RESULTS = Path(__file__).resolve().parents[2] / "GPU.md", Path(__file__).with_name("h100")
BLOCK = re.compile(r"(?<=<!-- paper -->\n).*?(?=<!-- /paper -->)", re.DOTALL)
DATASHEET = 3.35e12  # bytes per second, of an H100's memory
CONTEXT = 192  # tokens, halfway through the jobs of part 6


def tables(part: int) -> dict[str, Any]:
    """Return the measured tables of a part."""
    return dict(read_results(file_of(RESULTS, part))["tables"])


def measured(part: int, row: str, shape: str = "") -> float:
    """Return a number of the first table of a benchmark that has this row, for this shape."""
    number: float = next(rows for name, rows in tables(part).items() if shape in name and row in rows)[row]["nanovllm"]
    return number


class Work(NamedTuple):
    """Decode steps of a model in bfloat16, and the seconds that they took."""

    shape: str
    seconds: float
    num_steps: int
    num_tokens: int  # that the steps generate
    num_slots: int  # whose keys and values all steps read

    @property
    def num_bytes(self) -> int:
        """The bytes that the steps read."""
        shape = SHAPES[self.shape]
        fit = Fit(shape, itemsize=2, room=0, block_size=16, max_model_len=1)
        return self.num_steps * fit.step_bytes(0, 0) + self.num_slots * kv_bytes_per_token(shape, 2)


def works() -> dict[str, Work]:
    """Return a step of each job of part 6, and the workload of part 7."""
    works = {}
    for shape, name, count in ("llama-2-7b", "7B", 1), ("tinyllama-1.1b", "1.1B", 1), ("tinyllama-1.1b", "1.1B", 64):
        job = f"{count} sequence{'s' * (count > 1)}"
        seconds = measured(6, f"{job}: step ms", shape) / 1000
        works[f"{job}, {name} (part 6)"] = Work(shape, seconds, 1, count, count * CONTEXT)
    tasks = published_tasks(SHAPES["qwen3-0.6b"].vocab_size, 256, 100, 1024, 0.6)
    outputs = [task.num_output_tokens for task in tasks]
    slots = sum(len(task.prompt) + i for task in tasks for i in range(1, task.num_output_tokens))
    seconds = measured(7, "seconds")
    works["256 requests, Qwen3 0.6B (part 7)"] = Work("qwen3-0.6b", seconds, max(outputs), sum(outputs), slots)
    return works


def table() -> str:
    """Return the block of the page."""
    lines = ["| | floor, ms a step | expected | measured | of the floor | tokens/s |", "|---|---|---|---|---|---|"]
    copy_speed = 1e9 * tables(0)["The device"]["device"]["copy GB/s, read and written"]
    for name, work in works().items():
        floor, expected = work.num_bytes / DATASHEET, work.num_bytes / copy_speed
        numbers = [f"{1000 * each / work.num_steps:.2f}" for each in (floor, expected, work.seconds)]
        numbers += [f"{floor / work.seconds:.0%}", f"{work.num_tokens / work.seconds:,.0f}"]
        lines.append(f"| {' | '.join([name, *numbers])} |")
    speeds = f"{DATASHEET / 1e12:g} TB/s (datasheet), {copy_speed / 1e12:.2f} TB/s for a copy on the device (part 0)"
    return "\n".join([*lines, "", f"Inputs: {speeds}.", ""])


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
