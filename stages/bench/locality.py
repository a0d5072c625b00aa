"""Where bytes lie, and what that costs: reads by piece size, scattered blocks, pinned copies, a disk, a roofline."""

import os
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stages.bench.decode_step import AttentionAlone, Case, DecodeStep, Reading
from stages.bench.harness import Spread, ratio, take_turns, timed
from stages.bench.models import STORYTELLER, storyteller_of

PIECES = (64, 512, 4096, 32_768, 262_144)  # bytes
BLOCK_OF_70B = 16 * 2 * 80 * 8 * 128 * 2  # bytes: 16 tokens, 80 layers, keys and values of 8 heads of 128, fp16


def figure(name: str, values: list[float]) -> dict[str, Any]:
    """The median of some rounds, and their spread beside it.

    >>> figure("copy", [3.0, 1.0, 2.0])
    {'copy': 2.0, 'copy_spread': [1.0, 3.0]}
    """
    return {name: median(values), f"{name}_spread": [min(values), max(values)]}


def ratios(spreads: Mapping[str, Spread]) -> dict[str, Any]:
    """
    >>> ratios({"written": Spread(2.0, 1.0, 3.0)})
    {'written': 2.0, 'written_spread': [1.0, 3.0]}
    """
    return {
        key: value
        for name, spread in spreads.items()
        for key, value in {name: spread.ratio, f"{name}_spread": [spread.least, spread.largest]}.items()
    }


# ---- reads


def reads(rounds: int = 7, num_bytes: int = 2**28, most: int = 2**16) -> dict[str, Any]:
    """How many times as long it takes to read pieces in random order, against in a row, by the bytes of a piece.

    The memory is larger than any cache. A read adds the piece to a sum, so nothing but the sum is written. Of small
    pieces `most` are read, wherever they lie; the same number in both orders.
    """
    memory, calls = torch.ones(num_bytes // 4), dict[Hashable, Callable[[], float]]()
    for piece in PIECES:
        rows, generator = memory.view(-1, piece // 4), torch.Generator().manual_seed(piece)
        count = min(most, len(rows))
        start = torch.zeros(1, dtype=torch.int64)
        random_rows = torch.randperm(len(rows), generator=generator)[:count]  # [count]
        for name, at in (("random", random_rows), ("in_a_row", torch.arange(count))):
            calls[piece, name] = timed(partial(read, rows, at, start))
    turns = take_turns(calls, rounds)
    found: dict[str, Any] = ratios({f"{p}": ratio(turns, (p, "random"), (p, "in_a_row")) for p in PIECES})
    for piece in PIECES:
        count = min(most, num_bytes // piece)
        speeds = [count * piece / turn[piece, "random"] for turn in turns]
        found |= figure(f"{piece}_bytes_per_second", speeds)
    return found


def read(rows: torch.Tensor, at: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The sum of the rows `at` these places. rows [num_rows, numbers], at [count], start [1] -> [1, numbers]"""
    return torch.nn.functional.embedding_bag(at, rows, start, mode="sum")


def scattered(rounds: int = 11, sizes: tuple[int, ...] = (1, 4, 16, 64, 256), context: int = 960) -> dict[str, Any]:
    """How many times as long stage 3's attention takes when blocks lie at random, by block size; and blocks of that
    size in a row against blocks of 16. 8 sequences of `context` tokens, float32.
    """
    steps: dict[Hashable, Any] = {}
    for size in sizes:
        step = DecodeStep("s3", STORYTELLER, Case("storyteller", "float32", 8, context), block_size=size)
        steps[size, "in a row"], steps[size, "scattered"] = step, step.scattered()
    alone = {key: timed(AttentionAlone(step)) for key, step in steps.items()}
    turns = take_turns(alone, rounds)
    found = {str(size): ratio(turns, (size, "scattered"), (size, "in a row")) for size in sizes}
    found |= {f"{size}_over_16": ratio(turns, (size, "in a row"), (16, "in a row")) for size in sizes if size != 16}
    return ratios(found)


# ---- what a machine allows, and what steps reach


def roofline(rounds: int = 7, size: int = 1024) -> dict[str, Any]:
    """The speed of large matrices and of memory; and the milliseconds of steps of the storyteller, float32."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    reading, calls = Reading(), dict[str, Callable[[], object]]()
    for tokens in (32, 128, 512):
        step = DecodeStep("s3", STORYTELLER, Case("storyteller", "float32", 1, tokens))
        step.seqs[0].num_computed_tokens = 0
        calls[f"prefill_{tokens}"] = partial(step.runner.run, [(step.seqs[0], tokens)])
    for batch, context in ((1, 128), (8, 128), (32, 128), (32, 960)):
        calls[f"decode_{batch}_{context}"] = DecodeStep(
            "s3", STORYTELLER, Case("storyteller", "float32", batch, context)
        )
    turns = take_turns(
        {name: timed(call) for name, call in calls.items()}
        | {"read": timed(reading), "multiply": timed(lambda: a @ b)},
        rounds,
    )
    found = {k: v for name in calls for k, v in figure(f"{name}_ms", [1000 * turn[name] for turn in turns]).items()}
    found |= figure("bytes_per_second", [reading.num_bytes / turn["read"] for turn in turns])
    return found | figure("operations_per_second", [2 * size**3 / turn["multiply"] for turn in turns])


def attention(rounds: int = 9, contexts: tuple[int, ...] = (960, 4096)) -> dict[str, Any]:
    """How fast attention alone reads keys and values of 8 sequences, from slices (s1) and from blocks (s3)."""
    folder, found = storyteller_of(max(contexts) + 64), dict[str, Any]()
    reading, calls, sizes = Reading(), dict[Hashable, Callable[[], float]](), dict[Hashable, int]()
    for context in contexts:
        for name in ("s1", "s3"):
            step = DecodeStep(name, folder, Case("storyteller", "float32", 8, context))
            calls[name, context], sizes[name, context] = timed(AttentionAlone(step)), step.num_kv_bytes
    turns = take_turns({**calls, "read": timed(reading)}, rounds)
    found |= figure("read_bytes_per_second", [reading.num_bytes / turn["read"] for turn in turns])
    for context in contexts:
        found |= ratios({f"s3_over_s1_{context}": ratio(turns, ("s1", context), ("s3", context))})
        for name in ("s1", "s3"):
            speeds = [sizes[name, context] / turn[name, context] for turn in turns]
            found |= figure(f"{name}_{context}_bytes_per_second", speeds)
    return found


# ---- other memories


def copies(rounds: int = 5) -> dict[str, Any]:
    """Bytes a second to a CUDA device, from pinned and from pageable memory; nothing where there is no CUDA device."""
    if not torch.cuda.is_available():
        return {}
    device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    memories = {
        name: torch.ones(2**28, dtype=torch.uint8, pin_memory=name == "pinned") for name in ("pinned", "pageable")
    }

    def copy(host: torch.Tensor) -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    turns = take_turns({name: timed(partial(copy, host)) for name, host in memories.items()}, rounds)
    return ratios({"pageable_over_pinned": ratio(turns, "pageable", "pinned")})


def disk(rounds: int = 5, num_blocks: int = 32, folder: Path | None = None) -> dict[str, Any]:
    """Milliseconds for a block of 70B, 5.24 MB: written and synced, read from the disk, read from the system's cache.

    Before a read the system is asked to forget the file. Where it cannot (a file system in memory), `cold_read` is as
    quick as `warm_read`.
    """
    block, found = os.urandom(BLOCK_OF_70B), dict[str, list[float]](write=[], cold_read=[], warm_read=[])
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "blocks"
        for _ in range(rounds):
            begun = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                for _ in range(num_blocks):
                    file.write(block)
                os.fsync(file.fileno())
            found["write"].append(time.perf_counter() - begun)
            forget(path)
            for name in ("cold_read", "warm_read"):
                begun = time.perf_counter()
                with path.open("rb", buffering=0) as file:
                    while file.read(BLOCK_OF_70B):
                        pass
                found[name].append(time.perf_counter() - begun)
    in_ms = {name: [1000 * seconds / num_blocks for seconds in values] for name, values in found.items()}
    return {key: value for name, values in in_ms.items() for key, value in figure(f"{name}_ms", values).items()}


def forget(path: Path) -> None:
    """Ask the system to drop a file from its cache, where it can be asked."""
    with suppress(AttributeError), path.open("rb") as file:  # not every system has it
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
