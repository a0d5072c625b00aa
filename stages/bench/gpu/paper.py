"""What a GPU should reach, on paper: `python -m stages.bench.gpu.paper` writes the table in GPU.md.

The floor is the time to read the weights in each step, and the keys and values of all contexts, at the datasheet's
speed. What is expected on top: memory is slower than its datasheet, a graph's kernels have gaps between them, and
prompts need multiplications. The host's work is not on paper, because it should be hidden behind the device's.
"""

import re
from pathlib import Path
from typing import NamedTuple

from nanovllm.bench.workload import published_tasks
from nanovllm.checkpoints.sizes import SHAPES, Fit, kv_bytes_per_token, parameters

PAGE = Path(__file__).resolve().parents[2] / "GPU.md"
BLOCK = re.compile(r"(?<=<!-- paper -->\n).*?(?=<!-- /paper -->)", re.DOTALL)
DATASHEET, COPY = 4.8e12, 4.3e12  # bytes per second: an H200's memory, and a copy on the device, read and written
MATMUL = 790e12  # operations per second in bfloat16
GAP = 2e-6  # seconds from one kernel of a graph to the next: assumed
PER_LAYER, PER_STEP = (
    9,
    8,
)  # kernels: four matmuls with the activation, two norms, rotation, attention in two; and the rest
PER_LAYER_OF_ONE = 7  # gemv computes the norms, too
CONTEXT = 192  # tokens, halfway through the jobs of part 6


class Work(NamedTuple):
    """Decode steps of a model in bfloat16, and the prompts before them."""

    shape: str
    num_steps: int
    num_tokens: int  # that the steps generate
    num_slots: int  # whose keys and values all steps read
    num_prompt_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes that the steps read."""
        shape = SHAPES[self.shape]
        fit = Fit(shape, itemsize=2, room=0, block_size=16, max_model_len=1)
        return self.num_steps * fit.step_bytes(0, 0) + self.num_slots * kv_bytes_per_token(shape, 2)

    @property
    def extra_seconds(self) -> dict[str, float]:
        """What is expected on top of the floor."""
        shape = SHAPES[self.shape]
        per_layer = PER_LAYER_OF_ONE if self.num_tokens == self.num_steps else PER_LAYER
        weights = sum(parameters(shape).values()) - parameters(shape)["embedding"]
        return {
            "memory below its datasheet": self.num_bytes / COPY - self.num_bytes / DATASHEET,
            "gaps between kernels": self.num_steps * (shape.num_hidden_layers * per_layer + PER_STEP) * GAP,
            "prompts": 2 * weights * self.num_prompt_tokens / MATMUL,
        }


def works() -> dict[str, Work]:
    """Return a step of each job of part 6, and the workload of part 7.

    >>> work = works()["256 requests, Qwen3 0.6B (part 7)"]
    >>> work.num_prompt_tokens, work.num_tokens
    (142827, 133966)
    """
    tasks = published_tasks(SHAPES["qwen3-0.6b"].vocab_size, 256, 100, 1024, 0.6)
    outputs = [task.num_output_tokens for task in tasks]
    slots = sum(len(task.prompt) + i for task in tasks for i in range(1, task.num_output_tokens))
    return {
        "1 sequence, 7B (part 6)": Work("llama-2-7b", 1, 1, CONTEXT),
        "1 sequence, 1.1B (part 6)": Work("tinyllama-1.1b", 1, 1, CONTEXT),
        "64 sequences, 1.1B (part 6)": Work("tinyllama-1.1b", 1, 64, 64 * CONTEXT),
        "256 requests, Qwen3 0.6B (part 7)": Work(
            "qwen3-0.6b", max(outputs), sum(outputs), slots, sum(len(task.prompt) for task in tasks)
        ),
    }


def table() -> str:
    """Return the block of the page."""
    lines = ["| | floor, ms a step | expected | of the floor | tokens/s | weakest point |", "|---|---|---|---|---|---|"]
    for name, work in works().items():
        floor, extra = work.num_bytes / DATASHEET, work.extra_seconds
        seconds, weakest = floor + sum(extra.values()), max(extra, key=extra.__getitem__)
        numbers = [f"{1000 * each / work.num_steps:.2f}" for each in (floor, seconds)]
        numbers += [f"{floor / seconds:.0%}", f"{work.num_tokens / seconds:,.0f}"]
        lines.append(f"| {' | '.join([name, *numbers, f'{weakest}, {extra[weakest] / seconds:.0%}'])} |")
    speeds = f"{DATASHEET / 1e12:g} TB/s (datasheet), {COPY / 1e12:g} TB/s for a copy on the device (see part 0)"
    rest = f"{MATMUL / 1e12:g} TFLOP/s for matmuls (see part 4), and {1e6 * GAP:g} µs between two kernels (assumed)"
    return "\n".join([*lines, "", f"Inputs: {speeds},", f"{rest}.", ""])


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
