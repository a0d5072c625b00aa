"""Launches of a decode step, counted on a CPU: plain operations, kernels, one graph of them.

Counted is what would start something on a GPU: an operation of torch that makes or changes numbers, a kernel, a graph.
A view starts nothing, nor does memory that is only taken. Some operations start two kernels there, so the first number
is a lower bound.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM
from nanovllm.backends.gpu.backend import DEFAULT_SMS
from nanovllm.backends.gpu.graphs import buckets
from nanovllm.backends.gpu.inputs import StepInputs
from nanovllm.backends.gpu.ops import PLAIN, DecodeWorkspace, LikeliestWorkspace, Ops, choose_splits
from nanovllm.engine.block_manager import cdiv
from notebooks.helpers import paged, pictures
from notebooks.helpers.allocations import storages
from notebooks.helpers.pictures import ACCENT, INK, LIGHT, PALE, PAPER, USED

LIST, MOVE = "lift_fresh.default", "to.dtype_layout"  # a list becomes a tensor; a tensor goes to the device
NEVER = {"empty", "new_empty", "empty_like", "detach_"}
KINDS = {"linear": USED, "attention": ACCENT, "others": LIGHT}
GRAPH = "graph"
WAYS = PLAIN_WAY, KERNELS, GRAPHS = "plain operations", "kernels", "a graph of them"


class Launch(NamedTuple):
    name: str
    phase: str  # "inputs" before the model, then "model"
    is_copy: bool = False

    @property
    def kind(self) -> str:
        if "attention" in self.name or self.name in ("paged_decode", "merge_splits"):
            return "attention"
        return "linear" if self.name in ("linear", "mm") else "others"


class Launches(TorchDispatchMode):
    """Notes each launch inside of `with Launches() as seen:`, in `seen.found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launch] = []
        self.phase, self._is_inside = "inputs", False
        self._of_lists: list[Any] = []  # memory, kept: nothing else gets its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        what = str(func).removeprefix("aten.")
        name = what.split(".")[0]
        is_copy = self.phase == "inputs" and self._is_copy(what, args, out)
        if not self._is_inside and name not in NEVER and (is_copy or not is_view(func, (args, kwargs), out)):
            self.found.append(Launch(name, self.phase, is_copy))
        return out

    def _is_copy(self, what: str, given: Any, out: Any) -> bool:
        """Return True for a copy of a list or buffer to the device. A list made into a tensor first counts once."""
        if what == LIST:
            self._of_lists += storages(out)
        elif what == MOVE:
            known = {storage.data_ptr() for storage in self._of_lists}
            return not known & {storage.data_ptr() for storage in storages(given)}
        return what in (LIST, "copy_.default")

    def as_one(self, function: Callable[..., None], *names: str) -> Callable[..., None]:
        """`function` counts as these launches, whatever it does inside."""

        def call(*given: Any) -> None:
            if self._is_inside:
                return function(*given)
            self._is_inside = True
            try:
                function(*given)
            finally:
                self._is_inside = False
            self.found += [Launch(name, self.phase) for name in names]

        return call

    def ops(self) -> Ops:
        """The twins: each counts as its kernels. What programs leave to be merged takes a second one."""

        def decode(*given: Any) -> None:
            names = ("paged_decode", "merge_splits") if given[5].num_splits > 1 else ("paged_decode",)
            self.as_one(PLAIN.paged_decode, *names)(*given)

        ops = Ops(*(self.as_one(function, name) for name, function in PLAIN._asdict().items()))
        likeliest = self.as_one(PLAIN.find_likeliest, "find_peak", "join_peaks")
        return ops._replace(paged_decode=decode, find_likeliest=likeliest)

    def capture(self, step: Callable[[], None], shares_memory: bool = True) -> Callable[[], None]:
        """In place of CUDA graphs: to replay a step is to do it again, and counts as one launch."""
        return self.as_one(step, GRAPH)


def is_view(func: Any, given: Any, out: Any) -> bool:
    """Nothing new was made, and nothing was changed."""
    known = {storage.data_ptr() for storage in storages(given)}
    return not func._schema.is_mutable and all(storage.data_ptr() in known for storage in storages(out))


@torch.inference_mode()
def count_step(llm: LLM, way: str) -> list[Launch]:
    """Count the launches of a decode step, from its inputs to its logits, in one of WAYS."""
    seen, batch = Launches(), [(seq, 1) for seq in paged.seqs_of(llm)]
    if way == PLAIN_WAY:
        return launches_of(llm.llm_engine.executor, batch, seen)
    capture = seen.capture if way == GRAPHS else None
    with paged.runner_of(llm, seen.ops(), capture) as runner:
        return launches_of(runner, batch, seen)


def launches_of(runner: Any, batch: list, seen: Launches) -> list[Launch]:
    model, every = runner.model, list(range(len(batch)))
    runner.compute(batch)  # block tables that are new come with copies of their own
    hook = model.register_forward_pre_hook(lambda *_: setattr(seen, "phase", "model"))
    seen.found.clear()
    try:
        with seen:
            runner.compute_logits(runner.compute(batch), every)
    finally:
        hook.remove()
    return seen.found


def layer_of(launches: Sequence[Launch], layer: int) -> list[Launch]:
    """Return one layer's operations, from its first matmul to the next layer's: each has four.

    >>> names = ["mul", "linear", "add", "linear", "linear", "linear", "linear", "neg"]
    >>> [launch.name for launch in layer_of([Launch(name, "model") for name in names], 0)]
    ['linear', 'add', 'linear', 'linear', 'linear']
    """
    at = [i for i, launch in enumerate(launches) if launch.kind == "linear"]
    return list(launches[at[4 * layer] : at[4 * layer + 4]])


# ---- what stays in memory for graphs


def static_bytes(shape: Any, max_rows: int, max_model_len: int, block_size: int = 16) -> dict[str, int]:
    """Return the bytes that graphs of up to max_rows rows need next to weights and pool, in bfloat16.

    Counted on torch's meta device, which has sizes and no memory.
    """
    inputs = StepInputs(max_rows, cdiv(max_model_len, block_size), block_size, torch.device("meta"))
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    splits = {rows: choose_splits(rows, kv_heads, DEFAULT_SMS) for rows in buckets(max_rows)}
    rooms: list[Any] = [DecodeWorkspace(rows, heads, shape.head_dim, splits[rows], "meta") for rows in splits]
    rooms.append(LikeliestWorkspace(max_rows, shape.vocab_size, "meta"))
    return {
        "inputs of a step": nbytes(inputs.device.values()),
        "block tables": inputs.block_tables.nbytes,
        "parts of splits, to merge": sum(nbytes(vars(room).values()) for room in rooms),
        "hidden states and logits": max_rows * (2 * shape.hidden_size + 2 * shape.vocab_size + 3 * 4),
    }


def nbytes(values: Iterable[object]) -> int:
    """Return the bytes of the tensors among these values."""
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def most_padding(most: int) -> tuple[float, int]:
    """The largest share of a graph's rows that is padding, and for how many sequences.

    >>> most_padding(8)
    (0.375, 5)
    """
    sizes = buckets(most)
    return max((1 - count / sizes[bisect.bisect_left(sizes, count)], count) for count in range(1, most + 1))


# ---- pictures


def draw_launches(ax: Axes, launches: Sequence[Launch], title: str) -> None:
    """A box for each, with its name."""
    for kind, color in KINDS.items():
        boxes = [pictures.box(i + 0.06, 0.88, 0, 1) for i, launch in enumerate(launches) if launch.kind == kind]
        pictures.polygons(ax, boxes, color)
    for i, launch in enumerate(launches):
        name = launch.name.strip("_").replace("scaled_dot_product_flash_attention_for_cpu", "attention")
        color = INK if launch.kind == "others" else PAPER
        ax.text(i + 0.5, 0.5, name, ha="center", va="center", rotation=90, fontsize=6, color=color)
    ax.set(ylim=(-0.05, 1.05), yticks=[], xticks=[], title=title)
    ax.spines[:].set_visible(False)


def draw_buckets(ax: Axes, most: int) -> None:
    """Draw the rows of a graph against the sequences that decode. The pale area between the lines is padding."""
    sizes, batch = buckets(most), range(1, most + 1)
    rows = [min(size for size in sizes if size >= count) for count in batch]
    ax.fill_between(batch, batch, rows, step="pre", color=PALE)
    pictures.lines(ax, [pictures.Line(batch, [*batch], "sequences", USED)], "sequences that decode", "rows")
    ax.step(batch, rows, where="pre", color=ACCENT)
    pictures.label(ax, "rows of the graph", (1, 0.88 * most), (2, 0), ACCENT)


def draw_inputs(ax: Axes, inputs: Any, rows: int, num_seqs: int) -> None:
    """The numbers that the device has for a step: a row each, and what padding has."""
    fields, names = inputs.device, ("input_ids", "positions", "slot_mapping", "context_lens")
    columns = [*names, "block_tables"]
    for j, name in enumerate(columns):
        ax.text(j + 0.5, -0.35, name, ha="center", va="center", fontsize=7)
    for row in range(rows):
        table = inputs.block_tables[row].tolist()
        told = [str(fields[name][row].item()) for name in names] + [f"{table[0]} {table[1]} {table[2]} ..."]
        color = PALE if row >= num_seqs else USED
        pictures.polygons(ax, [pictures.box(j + 0.04, 0.92, row + 0.06, 0.88) for j in range(len(columns))], color)
        for j, text in enumerate(told):
            ink = INK if row >= num_seqs else PAPER
            ax.text(j + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7, color=ink)
    ax.set(xlim=(0, len(columns)), ylim=(rows, -0.7), xticks=[], yticks=[row + 0.5 for row in range(rows)])
    ax.set_yticklabels(["padding" if row >= num_seqs else f"row {row}" for row in range(rows)])
    ax.tick_params(length=0, labelcolor=INK)
    ax.spines[:].set_visible(False)
