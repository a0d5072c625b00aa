"""Helpers of the package's notebook for GPU kernels, without a GPU: a kernel's source, its splits, a step's launches.

A launch is an operation of PyTorch that makes or changes numbers, a kernel, or a graph. A view launches nothing, and
neither does allocating memory. Some operations launch two kernels, so the count of plain operations is a lower bound.
"""

import ast
import bisect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams
from nanovllm.backends import gpu
from nanovllm.backends.gpu.backend import TritonBackend
from nanovllm.backends.gpu.graphs import buckets
from nanovllm.backends.gpu.ops import PLAIN, Ops
from nanovllm.backends.gpu.plain import DecodeMetadata, gather
from nanovllm.backends.gpu.tiles import DecodeWorkspace, paces
from nanovllm.backends.torch.model_runner import ModelRunner
from nanovllm.backends.torch.online_softmax import Part, attend_part
from nanovllm.engine.block_manager import cdiv
from notebooks.helpers import pictures
from notebooks.helpers.allocations import storages
from notebooks.helpers.pictures import ACCENT, INK, LIGHT, PALE, PAPER, USED

FOLDER = Path(gpu.__file__).parent
PROMPTS = "Once upon a time", "A fox saw", "The little girl"


# ---- a decode step of three stories


def three_stories(folder: Path, num_tokens: int) -> LLM:
    """Return an engine that decodes three stories. They start one after the other, so their blocks mix."""
    room = {"kv_cache_tokens": 2048, "max_num_seqs": 8, "enable_prefix_caching": False}
    llm = LLM(model=str(folder), device="cpu", dtype="float32", attention_backend="torch", **room)
    for step in range(num_tokens):
        number, rest = divmod(step, cdiv(num_tokens, len(PROMPTS)))
        if rest == 0:
            params = SamplingParams(temperature=0.8, seed=number, max_tokens=2 * num_tokens, ignore_eos=True)
            llm.llm_engine.add_request(str(number), PROMPTS[number], params)
        llm.llm_engine.step()
    while any(seq.num_computed_tokens % llm.llm_engine.kv_cache.block_size == 0 for seq, _ in decode_batch(llm)):
        llm.llm_engine.step()  # until each has a slot for its next token
    return llm


def decode_batch(llm: LLM) -> list[tuple[Any, int]]:
    """Return a batch of one token for each running sequence."""
    return [(seq, 1) for seq in llm.llm_engine.scheduler.running]


@contextmanager
def gpu_runner(llm: LLM, ops: Ops, capture: Any = None, max_rows: int = 4) -> Iterator[ModelRunner]:
    """Give the engine's runner a GPU's backend inside the context, with these functions as kernels."""
    engine = llm.llm_engine
    runner, plain = engine.executor, engine.executor.backend
    parts = runner.model, engine.kv_cache, engine.max_model_len, ops, capture, max_rows
    runner.backend = TritonBackend(*parts, progress=False)
    try:
        yield runner
    finally:
        runner.backend.close()
        runner.backend = plain


# ---- attention in splits


class DecodeCall(NamedTuple):
    """A layer's call of paged_decode, and its result."""

    q: Tensor  # [rows, num_heads, head_dim]
    blocks: Tensor  # the pool
    layer: int
    block_tables: Tensor  # int32 [rows, max_blocks]
    context_lens: Tensor  # int32 [rows]
    workspace: DecodeWorkspace
    out: Tensor  # [rows, num_heads, head_dim]

    @property
    def tile(self) -> int:
        """Return the number of keys that a program reads at a time."""
        return paces(self.blocks.shape[5], self.blocks.element_size())[0].tile


def record_calls(llm: LLM) -> tuple[list[DecodeCall], list[int]]:
    """Run a decode step with the plain twins of the kernels. Return each layer's call and the step's tokens."""
    calls: list[DecodeCall] = []

    def record(q: Tensor, blocks: Tensor, layer: int, decodes: DecodeMetadata, out: Tensor) -> None:
        PLAIN.paged_decode(q, blocks, layer, decodes, out)
        tables, lens, workspace, rows, indices = decodes
        by_row = rows.argsort()  # programs take the longest contexts first
        calls.append(DecodeCall(q, blocks, layer, tables[indices[by_row]], lens[by_row], workspace, out))

    with gpu_runner(llm, PLAIN._replace(paged_decode=record)) as runner:
        calls.clear()  # the backend has tried its functions on a step of padding
        tokens = runner.run(decode_batch(llm))
    return calls, tokens.token_ids


def spans_of_splits(context_len: int, num_splits: int, tile: int) -> list[tuple[int, int]]:
    """Return the positions that each split reads, computed by the kernel's own lines. Empty splits are left out.

    >>> spans_of_splits(300, 4, 64), len(spans_of_splits(300, 128, 64))
    ([(0, 128), (128, 256), (256, 300)], 5)
    """
    lines = [node for node in function_in("attention_kernels.py", "attend_split").body if assigns_span(node)]
    code = compile(ast.Module(lines, []), "attention_kernels.py", "exec")
    names = {"tl": SimpleNamespace(cdiv=cdiv, minimum=min), "TILE": tile, "num_splits": num_splits}
    spans = []
    for split in range(num_splits):
        exec(code, names := names | {"context_len": context_len, "split": split})
        spans.append((names["first"], names["end"]))
    return [span for span in spans if span[0] < span[1]]


def assigns_span(node: ast.stmt) -> bool:
    names = {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
    return bool(names & {"split_len", "first", "end"})


def attend_splits(call: DecodeCall, row: int) -> list[tuple[tuple[int, int], Part]]:
    """Return the positions of each split of a row, and attention to them. Each lse is [1, num_kv_heads, group]."""
    context_len, num_kv_heads = int(call.context_lens[row]), call.blocks.shape[4]
    table, head_dim = call.block_tables[row], call.q.shape[2]
    k, v = gather(call.blocks, call.layer, table, context_len, head_dim)  # [context_len, num_kv_heads, head_dim] each
    q = call.q[row].unflatten(0, (num_kv_heads, -1))[None]  # [1, num_kv_heads, group, head_dim]
    spans = spans_of_splits(context_len, call.workspace.num_splits, call.tile)
    return [(span, attend_part(q, *(x[None, slice(*span)].transpose(1, 2) for x in (k, v)))) for span in spans]


def function_in(file: str, name: str) -> ast.FunctionDef:
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def source_of(file: str, name: str, part: str = "all") -> str:
    """Return the source of a function in backends/gpu without its docstring.

    `part` is "all", "body" or "loop", the first loop.

    >>> print(source_of("plain.py", "gather", "body").splitlines()[-1])
    return k, v
    """
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    node: Any = function_in(file, name)
    body = node.body[1:] if ast.get_docstring(node) else node.body
    first, last = body[0].lineno, node.end_lineno
    if part == "loop":
        loop = next(each for each in body if isinstance(each, ast.For))
        first, last = loop.lineno, loop.end_lineno
    head = lines[node.lineno - 1 : node.body[0].lineno - 1] if part == "all" else []
    return textwrap.dedent("\n".join(head + lines[first - 1 : last]))


def draw_blocks(ax: Axes, table: Sequence[int], context_len: int, block_size: int) -> None:
    """Draw the blocks of a context with their numbers in the pool. The rest of the last block is pale."""
    starts = [i * block_size for i in range(len(table))]
    filled = [pictures.box(at, min(block_size, context_len - at), 0, 1) for at in starts]
    pictures.polygons(ax, [pictures.box(at, block_size, 0, 1) for at in starts], PALE, PAPER, 0.8)
    pictures.polygons(ax, filled, LIGHT, PAPER, 0.8)
    for at, block in zip(starts, table, strict=True):
        ax.text(at + block_size / 2, 0.47, str(block), ha="center", va="center", fontsize=7)
    name_rows(ax, ["blocks"])
    ax.spines["bottom"].set_visible(False)
    ax.set(xlim=(0, len(table) * block_size), ylim=(0, 1))
    ax.tick_params(axis="x", length=0)


def draw_splits(ax: Axes, spans: Sequence[tuple[int, int]], tile: int) -> None:
    """Draw the tiles that each split reads, a row for each split."""
    for parity, color in enumerate((USED, ACCENT)):
        boxes = [
            pictures.box(at, min(tile, last - at), len(spans) - split - 0.9, 0.8)
            for split, (first, last) in enumerate(spans)
            for at in range(first, last, tile)
            if split % 2 == parity
        ]
        pictures.polygons(ax, boxes, color, PAPER, 1.2)
    name_rows(ax, [f"split {split}" for split in reversed(range(len(spans)))])
    ax.set(ylim=(0, len(spans)))


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Name rows of height 1 from the bottom up."""
    ax.set_yticks([row + 0.5 for row in range(len(names))], names)
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines["left"].set_visible(False)


# ---- launches


LIST, MOVE = "lift_fresh.default", "to.dtype_layout"  # a list becomes a tensor; a tensor goes to the device
NEVER = {"empty", "new_empty", "empty_like", "detach_"}
KINDS = {"linear": USED, "attention": ACCENT, "others": LIGHT}
GRAPH = "graph"
WAYS = PLAIN_WAY, KERNELS, GRAPHS = "plain operations", "kernels", "a graph of kernels"


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
    """A list of the launches inside `with Launches() as launches:`, in `launches.seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Launch] = []
        self.phase, self._is_inside = "inputs", False
        self._of_lists: list[Any] = []  # memory, kept so that its addresses are not used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operation = str(func).removeprefix("aten.")
        name = operation.split(".")[0]
        is_copy = self.phase == "inputs" and self._is_copy(operation, args, out)
        if not self._is_inside and name not in NEVER and (is_copy or not is_view(func, (args, kwargs), out)):
            self.seen.append(Launch(name, self.phase, is_copy))
        return out

    def _is_copy(self, operation: str, args: Any, out: Any) -> bool:
        """Return True for a copy of a list or buffer to the device. A list made into a tensor first counts once."""
        if operation == LIST:
            self._of_lists += storages(out)
        elif operation == MOVE:
            known = {storage.data_ptr() for storage in self._of_lists}
            return not known & {storage.data_ptr() for storage in storages(args)}
        return operation in (LIST, "copy_.default")

    def as_one(self, function: Callable[..., None], *names: str) -> Callable[..., None]:
        """Return `function`, counted as launches of these names alone."""

        def call(*args: Any) -> None:
            if self._is_inside:
                return function(*args)
            self._is_inside = True
            try:
                function(*args)
            finally:
                self._is_inside = False
            self.seen += [Launch(name, self.phase) for name in names]

        return call

    def ops(self) -> Ops:
        """Return the plain twins, each counted as its kernels. Merging splits takes a second one."""

        def decode(*args: Any) -> None:
            names = ("paged_decode", "merge_splits") if args[3].workspace.num_splits > 1 else ("paged_decode",)
            self.as_one(PLAIN.paged_decode, *names)(*args)

        ops = Ops(*(self.as_one(function, name) for name, function in PLAIN._asdict().items()))
        sample_rows = self.as_one(PLAIN.sample_rows, "reduce_chunks", "sample_row")
        return ops._replace(paged_decode=decode, sample_rows=sample_rows)

    def capture(self, step: Callable[[], None], shares_memory: bool = True) -> Callable[[], None]:
        """Stand in for capturing a CUDA graph: a replay runs the step again, and counts as one launch."""
        return self.as_one(step, GRAPH)


def is_view(func: Any, args: Any, out: Any) -> bool:
    """Return True if the operation neither makes nor changes numbers."""
    known = {storage.data_ptr() for storage in storages(args)}
    return not func._schema.is_mutable and all(storage.data_ptr() in known for storage in storages(out))


@torch.inference_mode()
def count_step(llm: LLM, way: str) -> list[Launch]:
    """Return the launches of a decode step, from its inputs to its logits, in one of WAYS."""
    launches, batch = Launches(), decode_batch(llm)
    if way == PLAIN_WAY:
        return launches_of(llm.llm_engine.executor, batch, launches)
    with gpu_runner(llm, launches.ops(), launches.capture if way == GRAPHS else None) as runner:
        seen = launches_of(runner, batch, launches)
    if way == GRAPHS:  # lists become numbers in the host's buffer, and one copy brings all of them to the device
        seen = [launch for launch in seen if launch.name != LIST.split(".")[0]]
    return seen


def launches_of(runner: Any, batch: list, launches: Launches) -> list[Launch]:
    model, every = runner.model, list(range(len(batch)))
    runner.compute(batch)  # once before, because new block tables need copies of their own
    hook = model.model.register_forward_pre_hook(lambda *_: setattr(launches, "phase", "model"))
    launches.seen.clear()
    try:
        with launches:
            runner.compute_logits(runner.compute(batch), every)
    finally:
        hook.remove()
    return launches.seen


def layer_of(launches: Sequence[Launch], layer: int) -> list[Launch]:
    """Return one layer's launches, from its first linear layer to the next layer's. Each has four.

    >>> names = ["mul", "linear", "add", "linear", "linear", "linear", "linear", "neg"]
    >>> [launch.name for launch in layer_of([Launch(name, "model") for name in names], 0)]
    ['linear', 'add', 'linear', 'linear', 'linear']
    """
    at = [i for i, launch in enumerate(launches) if launch.kind == "linear"]
    return list(launches[at[4 * layer] : at[4 * layer + 4]])


def most_padding(max_rows: int) -> tuple[float, int]:
    """Return the largest share of a graph's rows that is padding, and its number of sequences.

    >>> most_padding(8)
    (0.375, 5)
    """
    sizes = buckets(max_rows)
    return max((1 - count / sizes[bisect.bisect_left(sizes, count)], count) for count in range(1, max_rows + 1))


def draw_launches(ax: Axes, launches: Sequence[Launch], title: str) -> None:
    """Draw a box with its name for each launch."""
    for kind, color in KINDS.items():
        boxes = [pictures.box(i + 0.06, 0.88, 0, 1) for i, launch in enumerate(launches) if launch.kind == kind]
        pictures.polygons(ax, boxes, color)
    for i, launch in enumerate(launches):
        name = launch.name.strip("_").replace("scaled_dot_product_flash_attention_for_cpu", "attention")
        color = INK if launch.kind == "others" else PAPER
        ax.text(i + 0.5, 0.5, name, ha="center", va="center", rotation=90, fontsize=6, color=color)
    ax.set(ylim=(-0.05, 1.05), yticks=[], xticks=[], title=title)
    ax.spines[:].set_visible(False)
