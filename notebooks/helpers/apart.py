"""Kernels taken apart: Python runs their own code, with numpy for the few things that Numba has no Python form of.

A kernel is a Python function. What it calls with sixteen numbers at a time are intrinsics, which only a compiler knows;
here each of them has a stand-in that does the same, and notes what was read.
"""

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu import attention, dot

WIDTH = 16


class Memory:
    """A pointer: `memory[i]` is `i` elements behind it. `notes` gets the name at each read of a vector."""

    def __init__(self, numbers: np.ndarray, name: str = "", notes: list[str] | None = None, start: int = 0) -> None:
        self.numbers, self.name, self.notes, self.start = numbers, name, notes, start

    def at(self, i: int) -> "Memory":
        return Memory(self.numbers, self.name, self.notes, self.start + i)

    def read(self, i: int) -> Any:
        return self.numbers[self.start + i]

    def write(self, i: int, number: Any) -> None:
        self.numbers[self.start + i] = number

    def load(self, i: int) -> np.ndarray:
        if self.notes is not None:
            self.notes.append(self.name)
        return self.numbers[self.start + i : self.start + i + WIDTH].copy()

    def store(self, i: int, numbers: np.ndarray) -> None:
        self.numbers[self.start + i : self.start + i + WIDTH] = numbers


def run_by_python(kernel: Any, stand_ins: dict[str, Any]) -> Callable:
    """The kernel's own code; what it calls by these names is something else."""
    function = kernel.py_func
    return FunctionType(function.__code__, {**function.__globals__, **stand_ins}, function.__name__)


VECTORS: dict[str, Any] = {
    "at": Memory.at, "read": Memory.read, "write": Memory.write, "get": Memory.read, "put": Memory.write,
    "load": Memory.load, "store": Memory.store,
    "zeros": lambda: np.zeros(WIDTH, np.float32),
    "splat": lambda number: np.full(WIDTH, number, np.float32),
    "fma": lambda a, b, c: a * b + c,
    "add": np.add, "multiply": np.multiply, "maximum": np.maximum, "exp_of": np.exp,
    "sum_of": lambda numbers: numbers.sum(),
}  # fmt: skip


# ---- dot


def numbers_of(lanes: list[Any]) -> np.ndarray:
    """A vector: what comes first is in lane 0."""
    return np.array(lanes + [0] * (WIDTH - len(lanes)), np.float32)


def add_products(sums: list, a: Memory, rows_a: tuple, b: Memory, rows_b: tuple, i: int) -> list[np.ndarray]:
    """The next sixteen numbers of each row: all of them are loaded, then each of a meets each of b."""
    left, right = [a.load(row + i) for row in rows_a], [b.load(row + i) for row in rows_b]
    if a.notes is not None:
        a.notes += ["fma"] * len(sums)
    return [total + x * y for total, (x, y) in zip(sums, itertools.product(left, right), strict=True)]


DOTS: dict[str, Any] = {
    "add": np.add,
    "no_sums": lambda rows_a, rows_b: [np.zeros(WIDTH, np.float32)] * (len(rows_a) * len(rows_b)),
    "step_of": lambda a, b: WIDTH,
    "add_products": add_products,
    "sums_of": lambda sums: numbers_of([numbers.sum() for numbers in sums]),
    "products_at": lambda a, rows_a, b, rows_b, i: numbers_of(
        [a.read(x + i) * b.read(y + i) for x, y in itertools.product(rows_a, rows_b)]
    ),
    "starts_of": lambda rows, size: tuple(row * size for row in rows),
    "write_rows": lambda memory, places, numbers: [memory.write(place, numbers[i]) for i, place in enumerate(places)],
}  # fmt: skip
DOTS["dots"] = run_by_python(dot.dots, DOTS)
DOTS["write_dots"] = run_by_python(dot.write_dots, DOTS)


def trace_products(weight: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """dot_rows() of dot.py for a row of a weight, [size], and x, [rows, size]: what it gives, [rows], what it did.

    What it did: "weight" and "x" for the vectors that it read, "fma" for sixteen products and sums.
    """
    notes: list[str] = []
    out = np.zeros(len(x), np.float32)
    row, rows = Memory(weight, "weight", notes), Memory(x.reshape(-1), "x", notes)
    run_by_python(dot.dot_rows, DOTS)(row, rows, len(weight), len(x), Memory(out), 1)
    return out, notes


# ---- attention


class Part(NamedTuple):
    """The state of attend() after some parts of the keys."""

    num_keys: int
    peaks: np.ndarray  # [rows]
    sums: np.ndarray  # [rows]
    out: np.ndarray  # [rows, head_dim], not yet divided


def rows_of(numbers: np.ndarray, combine: Callable, rows: tuple) -> np.ndarray:
    """A vector has the rows' numbers in turn; each lane gets what its row's lanes give together."""
    return np.tile(combine(numbers.reshape(-1, len(rows)), axis=0), WIDTH // len(rows))


def add_values(
    values: Memory, places: Memory, count: int, weights: Memory, out: Memory, starts: tuple, scale: tuple, size: int
) -> None:
    rows = len(starts)
    found = np.stack([values.numbers[values.start + places.read(t) :][:size] for t in range(count)])  # [count, size]
    shares = weights.numbers[: count * rows].reshape(count, rows)
    for r, start in enumerate(starts):
        out.numbers[start : start + size] = out.numbers[start : start + size] * scale[r][0] + shares[:, r] @ found


def limits(rows: tuple, group: int, before: int, count: int) -> np.ndarray:
    lanes = [min(before + rows[i % len(rows)] // group, count) - i // len(rows) for i in range(WIDTH)]
    return np.array(lanes, np.float32)


BLOCKS: dict[str, Any] = VECTORS | DOTS | {
    "prefetch_all": lambda *given: None,  # it only hurries what is read soon
    "add_values": add_values, "limits": limits,
    "spread": lambda memory, places: np.array(
        [memory.read(places[i % len(places)]) for i in range(WIDTH)], np.float32
    ),
    "places_of": lambda places, t, rows: tuple(places.read(t + i) for i in range(WIDTH // len(rows))),
    "where_below": lambda a, b, numbers, others: np.where(a < b, numbers, others),
    "largest_of_rows": lambda numbers, rows: rows_of(numbers, np.max, rows),
    "sums_of_rows": lambda numbers, rows: rows_of(numbers, np.sum, rows),
    "lanes_of_rows": lambda numbers, rows: tuple(np.full(WIDTH, numbers[i]) for i in range(len(rows))),
}  # fmt: skip


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor) -> list[Part]:
    """attend() of attention.py, one query, two heads that share a KV head: what it knows after each part.

    q [2, head_dim], scaled; k, v [num_keys, head_dim]
    """
    num_keys, size = k.shape
    shape = attention.Pool(num_layers=1, block_size=WIDTH, num_kv_heads=1, head_dim=size)
    pool = torch.stack((k.view(-1, WIDTH, size), v.view(-1, WIDTH, size)), 1)  # [blocks, 2, block_size, size]
    out, peaks, sums = (np.zeros(count, np.float32) for count in (2 * size, 2, 2))
    scores, places = np.zeros(4 * attention.TILE, np.float32), np.zeros(attention.PLACES, np.int64)
    parts: list[Part] = []
    rows = run_by_python(attention.attend_rows, BLOCKS)

    def attend_rows(*given: Any) -> None:
        rows(*given)
        seen = sum(part.num_keys for part in parts[-1:]) + given[7]
        parts.append(Part(seen, peaks.copy(), sums.copy(), out.reshape(2, size).copy()))

    slot = run_by_python(attention.slot, {})
    find_places = run_by_python(attention.find_places, BLOCKS | {"slot": slot})
    attend = run_by_python(attention.attend, BLOCKS | {"attend_rows": attend_rows, "find_places": find_places})
    table = Memory(np.arange(num_keys // WIDTH))
    memory = [Memory(numbers) for numbers in (q.reshape(-1).numpy(), pool.reshape(-1).numpy())]
    room = [Memory(numbers) for numbers in (scores, places, out, peaks, sums)]
    attend(memory[0], 2, 2, num_keys - 1, memory[1], shape, 0, 0, table, 0, num_keys, *room)
    return parts
