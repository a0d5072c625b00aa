"""A paged kernel apart: a step of three stories, what attention was asked for, which program reads which block.

Triton's kernels run where there is a GPU, else in Triton's interpreter, and only where it is installed. Their text is
read from their files, so that it can be shown everywhere.
"""

import ast
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.backends import gpu
from nanovllm.backends.gpu.backend import TritonBackend
from nanovllm.backends.gpu.ops import PLAIN, DecodeWorkspace, tile_size
from nanovllm.backends.gpu.plain import gather
from nanovllm.backends.torch.attention import AttentionMetadata
from nanovllm.backends.torch.model_runner import ModelRunner
from nanovllm.backends.torch.online_softmax import Part, attend_part
from nanovllm.engine.block_manager import cdiv
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, INK, LIGHT, PALE, PAPER, USED

FOLDER = Path(gpu.__file__).parent
PROMPTS = "Once upon a time", "A fox saw", "The little girl"
NOTHING = torch.empty(0, dtype=torch.int64)


class Asked(NamedTuple):
    """One layer's call of paged_decode, and the result of the plain version."""

    q: Tensor  # [rows, num_heads, head_dim]
    blocks: Tensor  # the pool
    layer: int
    block_tables: Tensor  # int32 [rows, max_blocks]
    context_lens: Tensor  # int32 [rows]
    room: DecodeWorkspace
    out: Tensor  # [rows, num_heads, head_dim]


def tell_stories(folder: Path, num_tokens: int) -> LLM:
    """An engine in the middle of three stories. Each begins a third later than the one before, so their blocks mix."""
    room = {"kv_cache_tokens": 2048, "max_num_seqs": 8, "enable_prefix_caching": False}
    llm = LLM(model=str(folder), device="cpu", dtype="float32", attention_backend="torch", **room)
    for step in range(num_tokens):
        if step % cdiv(num_tokens, len(PROMPTS)) == 0:
            number = step // cdiv(num_tokens, len(PROMPTS))
            params = SamplingParams(temperature=0.8, seed=number, max_tokens=2 * num_tokens, ignore_eos=True)
            llm.llm_engine.add_request(str(number), PROMPTS[number], params)
        llm.llm_engine.step()
    while any(seq.num_computed_tokens % llm.llm_engine.kv_cache.block_size == 0 for seq in seqs_of(llm)):
        llm.llm_engine.step()  # each has room for its next token
    return llm


def seqs_of(llm: LLM) -> list[Any]:
    return list(llm.llm_engine.scheduler.running)


@contextmanager
def runner_of(llm: LLM, ops: Any, capture: Any = None, max_rows: int = 4) -> Iterator[ModelRunner]:
    """The engine's runner with a GPU's backend, and these functions for kernels."""
    engine = llm.llm_engine
    runner, plain = engine.executor, engine.executor.backend
    parts = runner.model, engine.kv_cache, engine.max_model_len, ops, capture, max_rows
    runner.backend = TritonBackend(*parts, progress=False)
    try:
        yield runner
    finally:
        runner.backend.close()
        runner.backend = plain


def asked_of(llm: LLM) -> tuple[list[Asked], list[int]]:
    """A decode step with the twins: what each layer asked for, and the step's tokens."""
    asked: list[Asked] = []

    def note(*given: Any) -> None:
        PLAIN.paged_decode(*given)
        asked.append(Asked(*given))

    with runner_of(llm, PLAIN._replace(paged_decode=note)) as runner:
        asked.clear()  # a step of padding has tried the functions
        tokens = runner.run([(seq, 1) for seq in seqs_of(llm)])
    return asked, [token.token_id for token in tokens]


# ---- the same, computed by a sister


@torch.inference_mode()
def by_numba(llm: LLM, asked: Asked) -> Tensor:
    """The CPU's kernel. It writes the newest keys and values once more: they are in the pool already."""
    from nanovllm.backends.cpu.step_attention import StepAttention

    engine, heads = llm.llm_engine, asked.q.shape[1]
    size, rotary = engine.kv_cache.block_size, engine.executor.model.model.rotary_emb
    last, rows = asked.context_lens.long() - 1, torch.arange(len(asked.q))
    block = asked.block_tables.long()[rows, last // size]  # [rows]
    k, v = (asked.blocks[block, asked.layer, kv, last % size] for kv in (0, 1))
    starts, lens, tables = list(range(len(rows) + 1)), asked.context_lens.tolist(), asked.block_tables.long()
    step = AttentionMetadata(starts, lens, tables, block * size + last % size, NOTHING)
    attention = StepAttention(llm.llm_engine.kv_cache, heads, rotary.cos, rotary.sin, 0.0, workers=1)
    return attention.plan(step)(asked.layer, asked.q, k, v)


def where_triton_runs() -> str | None:
    """None: nowhere. The interpreter is chosen before triton is imported, by a variable of the environment."""
    if find_spec("triton") and torch.cuda.is_available():
        return "on the GPU"
    return "in Triton's interpreter" if find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1" else None


@torch.inference_mode()
def by_triton(asked: Asked) -> Tensor:
    from nanovllm.backends.gpu.attention_kernels import paged_decode

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, blocks, tables, lens = (x.to(device) for x in (asked.q, asked.blocks, asked.block_tables, asked.context_lens))
    room = DecodeWorkspace(len(q), q.shape[1], q.shape[2], asked.room.num_splits, device)
    paged_decode(q, blocks, asked.layer, tables, lens, room, out := torch.empty_like(q))
    return out.cpu()


def furthest(outs: Sequence[Tensor], asked: Sequence[Asked]) -> float:
    """Return the largest difference from the plain version."""
    return max(float((out - one.out).abs().max()) for out, one in zip(outs, asked, strict=True))


# ---- who reads what


def spans_of_splits(context_len: int, num_splits: int, tile: int) -> list[tuple[int, int]]:
    """The positions that each split reads, by the kernel's own lines. A split that has none is left out.

    >>> spans_of_splits(300, 4, 64), len(spans_of_splits(300, 128, 64))
    ([(0, 128), (128, 256), (256, 300)], 5)
    """
    kernel, wanted = function_in("attention_kernels.py", "attend_split"), {"split_len", "first", "last"}
    lines = [node for node in kernel.body if names_set(node) & wanted]
    code = compile(ast.Module(lines, []), "attention_kernels.py", "exec")
    given = {"tl": SimpleNamespace(cdiv=cdiv, minimum=min), "TILE": tile}
    found = []
    for split in range(num_splits):
        names = given | {"context_len": context_len, "num_splits": num_splits, "split": split}
        exec(code, names)
        found.append((names["first"], names["last"]))
    return [span for span in found if span[0] < span[1]]


def parts_of(asked: Asked, row: int) -> list[tuple[tuple[int, int], Part]]:
    """Attention of a row to what each split reads, by core's attend_part. Its lse: [1, num_kv_heads, group]"""
    context_len, num_kv_heads = int(asked.context_lens[row]), asked.blocks.shape[4]
    k, v = gather(asked.blocks, asked.layer, asked.block_tables[row], context_len)  # [context_len, num_kv_heads, ...]
    q = asked.q[row].unflatten(0, (num_kv_heads, -1))[None]  # [1, num_kv_heads, group, head_dim]
    spans = spans_of_splits(context_len, asked.room.num_splits, tile_of(asked.blocks))
    return [(span, attend_part(q, *(x[None, slice(*span)].transpose(1, 2) for x in (k, v)))) for span in spans]


def tile_of(blocks: Tensor) -> int:
    return tile_size(blocks.shape[5], blocks.element_size())


# ---- the text of a function


def function_in(file: str, name: str) -> ast.FunctionDef:
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def names_set(node: ast.stmt) -> set[str]:
    """By an assignment."""
    return {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}


def text_of(file: str, name: str, part: str = "all") -> str:
    """A function of a file in backends/gpu, as it stands there, without its docstring. part: "all", "body" or "loop",
    its first loop.

    >>> print(text_of("plain.py", "gather", "body").splitlines()[-1])
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


# ---- pictures


def draw_blocks(ax: Axes, table: Sequence[int], context_len: int, block_size: int) -> None:
    """A context's blocks, with their numbers in the pool. Pale: the rest of the last one."""
    starts = [i * block_size for i in range(len(table))]
    pictures.polygons(ax, [pictures.box(at, block_size, 0, 1) for at in starts], PALE, PAPER, 0.8)
    pictures.polygons(
        ax, [pictures.box(at, min(block_size, context_len - at), 0, 1) for at in starts], LIGHT, PAPER, 0.8
    )
    for at, block in zip(starts, table, strict=True):
        ax.text(at + block_size / 2, 0.47, str(block), ha="center", va="center", fontsize=7)
    labelled(ax, ["blocks"])
    ax.spines["bottom"].set_visible(False)
    ax.set(xlim=(0, len(table) * block_size), ylim=(0, 1))
    ax.tick_params(axis="x", length=0)


def draw_splits(ax: Axes, spans: Sequence[tuple[int, int]], tile: int) -> None:
    """A strip for each split: the tiles that it reads."""
    for parity, color in enumerate((USED, ACCENT)):
        boxes = [
            pictures.box(at, min(tile, last - at), len(spans) - split - 0.9, 0.8)
            for split, (first, last) in enumerate(spans)
            for at in range(first, last, tile)
            if split % 2 == parity
        ]
        pictures.polygons(ax, boxes, color, PAPER, 1.2)
    labelled(ax, [f"split {split}" for split in reversed(range(len(spans)))])
    ax.set(ylim=(0, len(spans)))


def labelled(ax: Axes, names: Sequence[str]) -> None:
    """Rows of height 1, the lowest first."""
    ax.set_yticks([row + 0.5 for row in range(len(names))], names)
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines["left"].set_visible(False)
