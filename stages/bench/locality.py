"""The cost of data placement: reads by piece size, scattered blocks, pinned copies, a disk, and a roofline."""

import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.bench.floor import Bandwidth
from nanovllm.bench.harness import Scores, figures, ratios, repeated, seconds_of, take_turns, timed, with_spreads
from stages.bench.decode_step import AttentionAlone, Case, DecodeStep
from stages.bench.models import STORYTELLER, storyteller_of
from stages.bench.texts import cpp_engine

PIECES = (64, 512, 4096, 32_768, 262_144)  # bytes
BLOCK_OF_70B = 16 * 2 * 80 * 8 * 128 * 2  # bytes: 16 tokens, 80 layers, keys and values of 8 heads of 128, fp16
TimedCalls = dict[Hashable, Callable[[], float]]


def step_of(batch: int, context: int, block_size: int = 16) -> DecodeStep:
    """Return a step of stage 3 on the storyteller in float32."""
    return DecodeStep("s3", STORYTELLER, Case("storyteller", "float32", batch, context), block_size)


# ---- reads


def reads(rounds: int = 7, num_bytes: int = 2**28, most: int = 2**16) -> Scores:
    """Return the time to read pieces in random order, relative to reading them in sequence, by piece size.

    The memory is larger than any cache. A read adds the piece to a sum, so only the sum is written. Both orders read
    the same number of pieces, at most `most`.
    """
    memory, calls = torch.ones(num_bytes // 4), TimedCalls()
    for piece in PIECES:
        count = min(most, num_bytes // piece)
        rows, generator = memory.view(-1, piece // 4), torch.Generator().manual_seed(piece)
        start = torch.zeros(1, dtype=torch.int64)
        random_rows = torch.randperm(len(rows), generator=generator)[:count]  # [count]
        for name, at in (("random", random_rows), ("in_a_row", torch.arange(count))):
            calls[piece, name] = timed(partial(read, rows, at, start))
    pairs: Any = {f"{piece}": ((piece, "random"), (piece, "in_a_row")) for piece in PIECES}
    return ratios(take_turns(calls, rounds), pairs)


def read(rows: torch.Tensor, at: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return the sum of some rows.

    rows [num_rows, numbers], at [count], start [1] -> [1, numbers]
    """
    return torch.nn.functional.embedding_bag(at, rows, start, mode="sum")


def scattered(rounds: int = 11, sizes: tuple[int, ...] = (1, 4, 16, 64, 256), context: int = 960) -> Scores:
    """Return the time of stage 3's attention over scattered blocks, relative to blocks in a row, by block size.

    Also compare blocks of each size in a row with blocks of 16. There are 8 sequences of `context` tokens, in float32.
    """
    calls = TimedCalls()
    for size in sizes:
        step = step_of(8, context, size)
        calls[size, "in a row"] = timed(AttentionAlone(step))
        calls[size, "scattered"] = timed(AttentionAlone(step.scattered()))
    pairs: Any = {str(size): ((size, "scattered"), (size, "in a row")) for size in sizes}
    pairs |= {f"{size}_over_16": ((size, "in a row"), (16, "in a row")) for size in sizes if size != 16}
    return ratios(take_turns(calls, rounds), pairs)


# ---- pages of memory

PAGES = ("2 MB", "4 KB")


def pages(num_bytes: int, kind: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return zeros in private memory, in pages of this size as far as the system grants them.

    A large page needs one entry of the TLB where 512 small ones need one each. A shared mapping never gets one.
    """
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE if kind == "2 MB" else mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(area, dtype=np.float32)
    memory.fill(0)
    return memory


def huge_kb(memory: np.ndarray[Any, Any]) -> int:
    """Return how many KB of a mapping are in large pages."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="utf-8"))
    for text in maps[1:]:
        start, end = (int(part, 16) for part in text.split(maxsplit=1)[0].split("-"))
        if start <= memory.ctypes.data < end:
            return int(re.findall(r"^AnonHugePages: *(\d+)", text, re.MULTILINE)[0])
    return 0


def has_kernels() -> bool:
    """Return whether a loop can be compiled, and pages chosen: both need Linux, and the first numba."""
    return sys.platform == "linux" and find_spec("numba") is not None


def layer(rounds: int = 155, num_tokens: int = 2048, heads: int = 32, sizes: tuple[int, ...] = (1, 16, 256)) -> Scores:
    """Return the milliseconds in which the fourth text's kernel reads one layer of 7B, by block size and page size.

    Keys and values are floats [slot, head, 128]. Heads are outside, tokens inside, and each token looks up its block.
    The least of many rounds is what the machine can do.
    """
    if not has_kernels():
        return {}
    import numba

    attend = numba.njit(fastmath=True)(cpp_engine.attend)
    calls, generator, shape = TimedCalls(), torch.Generator().manual_seed(0), (num_tokens, heads, 128)
    query, out, huge = np.ones(shape[1:], np.float32), np.zeros(shape[1:], np.float32), dict[str, int]()
    for kind in PAGES:
        keys, values = (pages(int(np.prod(shape)) * 4, kind).reshape(shape) for _ in "kv")
        huge[f"{kind}_huge_kb"] = huge_kb(keys)
        for size in (num_tokens, *(size for size in sizes if num_tokens % size == 0)):
            table = torch.randperm(num_tokens // size, generator=generator).numpy()
            calls[f"{kind}_{'in_order' if size == num_tokens else size}"] = timed(
                partial(attend, query, keys, values, table, size, out, num_tokens)
            )
    turns = take_turns(calls, rounds)
    return figures({f"{key}_ms": [1000 * turn[key] for turn in turns] for key in calls}) | huge


def chain(rounds: int = 9, num_bytes: int = 2**28, count: int = 2**16) -> Scores:
    """Return the nanoseconds of a read of 64 bytes whose address is the result of the read before it, by page size."""
    if not has_kernels():
        return {}
    import numba

    calls, length, compiled = TimedCalls(), num_bytes // 64, numba.njit(follow)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0)).numpy()
    for kind in PAGES:
        links = pages(num_bytes, kind).view(np.int64).reshape(length, 8)
        links[order, 0] = np.roll(order, -1)
        calls[kind] = timed(partial(compiled, links, count))
    turns = take_turns(calls, rounds)
    return figures({f"{kind}_ns": [1e9 * turn[kind] / count for turn in turns] for kind in PAGES})


def follow(links: np.ndarray[Any, Any], count: int) -> int:
    """Follow `count` links from row 0, and return the row at the end. links [rows, 8]; column 0 is the next row."""
    at = 0
    for _ in range(count):
        at = links[at, 0]
    return at


# ---- limits of the machine, and how near steps come


def roofline(rounds: int = 7, size: int = 1024) -> Scores:
    """Return the speeds of a large multiplication and of memory, and the milliseconds of steps."""
    a, reading, calls = torch.ones(size, size), Bandwidth(), dict[str, Callable[[], object]]()
    for tokens in (32, 128, 512):
        calls[f"prefill_{tokens}_ms"] = step_of(1, tokens).computing(tokens)
    for batch, context in ((1, 128), (8, 128), (32, 128), (32, 960)):
        calls[f"decode_{batch}_{context}_ms"] = step_of(batch, context)
    limits = {"read": timed(reading), "multiply": timed(lambda: a @ a)}
    turns = take_turns({name: timed(call) for name, call in calls.items()} | limits, rounds)
    series = {name: [1000 * turn[name] for turn in turns] for name in calls}
    series["bytes_per_second"] = [reading.num_bytes / turn["read"] for turn in turns]
    series["operations_per_second"] = [2 * size**3 / turn["multiply"] for turn in turns]
    return figures(series)


def attention(rounds: int = 9, contexts: tuple[int, ...] = (960, 4096)) -> Scores:
    """Return how fast attention alone reads keys and values of 8 sequences, from slices (s1) and from blocks (s3)."""
    folder, reading = storyteller_of(max(contexts) + 64), Bandwidth()
    calls, sizes = TimedCalls({"read": timed(reading)}), {"read": reading.num_bytes}
    for context in contexts:
        for name in ("s1", "s3"):
            step, key = DecodeStep(name, folder, Case("storyteller", "float32", 8, context)), f"{name}_{context}"
            calls[key], sizes[key] = timed(AttentionAlone(step)), step.num_kv_bytes
    turns = take_turns(calls, rounds)
    speeds = {f"{key}_bytes_per_second": [size / turn[key] for turn in turns] for key, size in sizes.items()}
    pairs: Any = {f"s3_over_s1_{context}": (f"s1_{context}", f"s3_{context}") for context in contexts}
    return figures(speeds) | ratios(turns, pairs)


# ---- other memories


def copies(rounds: int = 5, num_bytes: int = 2**28, device: torch.device | None = None) -> Scores:
    """Return the speeds of copies from and to a CUDA device, and how much faster pinned memory is; nothing without one.

    A `device` other than CUDA copies pageable memory alone, to try it out.
    """
    is_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    if device is None and not is_cuda:
        return {}
    remote = torch.empty(num_bytes, dtype=torch.uint8, device=device or "cuda")
    calls = TimedCalls()
    for kind in ("pageable", "pinned") if is_cuda else ("pageable",):
        host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        for name, target, source in ((f"to_device_{kind}", remote, host), (f"to_host_{kind}", host, remote)):
            copy = partial(target.copy_, source, non_blocking=True)
            calls[name] = timed(copy, torch.cuda.synchronize) if is_cuda else timed(copy)
    turns = take_turns(calls, rounds)
    pairs: Any = {"pageable_over_pinned": ("to_device_pageable", "to_device_pinned")} if is_cuda else {}
    speeds = {f"{name}_bytes_per_second": [num_bytes / turn[name] for turn in turns] for name in calls}
    return ratios(turns, pairs) | figures(speeds)


def disk(rounds: int = 5, num_blocks: int = 32, folder: Path | None = None, num_bytes: int = BLOCK_OF_70B) -> Scores:
    """Return the milliseconds of a block: written and synced, read from the disk, read from the system's cache.

    Before the first read the system is asked to forget the file. If it cannot, because the file system is in memory,
    `cold_read` is as quick as `warm_read`. The default is a block of 70B.
    """
    block, turns = os.urandom(num_bytes), []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "blocks"

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                repeated(lambda: file.write(block), num_blocks)()
                os.fsync(file.fileno())

        def read_all() -> None:
            with path.open("rb", buffering=0) as file:
                repeated(lambda: file.read(num_bytes), num_blocks)()

        for _ in range(rounds):
            turn = {"write_ms": seconds_of(write)}
            with suppress(AttributeError), path.open("rb") as file:  # not every system has it
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            turns.append(turn | {"cold_read_ms": seconds_of(read_all), "warm_read_ms": seconds_of(read_all)})
    return with_spreads(turns, 1000 / num_blocks)
