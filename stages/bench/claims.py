"""The claims table: claims of five texts that must be timed. notebooks/claims.ipynb counts the others.

A figure is the median of some rounds, and has a spread. Calls that are compared take turns. Locality, disk and
roofline are in locality.py, and the programs of the texts in texts/.
"""

from argparse import Namespace
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch

from nanovllm.bench.harness import Scores, ratios, repeated, take_turns, timed, with_spreads
from stages.bench import locality, results
from stages.bench.engines import part, stage, without_model
from stages.bench.models import STORYTELLER
from stages.bench.texts import block_manager, first_fit, in_stages, memory_pool, sequence
from stages.bench.texts.pools import BitmapPool, FirstInFirstOut
from stages.s2_block_manager.block_pool import BlockPool

BLOCK, POOL = 16, 4096


def measure(args: Namespace | None = None) -> dict[str, Any]:
    """Measure all parts on one thread, which makes times steadier."""
    parts: list[Callable[[], Scores]] = [books, own, order, fork, defragment, singly]
    parts += [locality.copies, locality.reads, locality.scattered, locality.roofline, locality.attention]
    parts += [locality.layer, locality.chain, locality.disk]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = {part.__name__: part() for part in parts}
        return {"claims": {"machine": results.host(), "threads": 1, **measured}}
    finally:
        torch.set_num_threads(threads)


def microseconds(calls: Mapping[str, Callable[[], object]], times: int, rounds: int) -> Scores:
    """Return the time of one of many calls in a row, for each call, with its spread over the rounds."""
    turns = take_turns({name: timed(repeated(call, times)) for name, call in calls.items()}, rounds)
    return with_spreads(turns, 1e6 / times)


# ---- bookkeeping


def books(rounds: int = 9, times: int = 1000) -> Scores:
    """Return the microseconds of our bookkeeping: a list and a bitmap of free blocks, and growth by a token."""
    pool, bits = BlockPool(block_manager.NUM_BLOCKS), BitmapPool(block_manager.NUM_BLOCKS)
    manager, seq = in_stages.block_manager("s2", POOL), sequence("s2", "0", [1] * 40)
    manager.allocate(seq)
    calls: dict[str, Callable[[], object]] = {
        "take_one_and_return": lambda: pool.free_blocks(pool.get_new_blocks(1)),
        "bitmap_take_and_return": lambda: bits.free_blocks(bits.get_new_blocks(1)),
        "append_slot": lambda: manager.append_slot(seq),
    }
    return microseconds(calls, times, rounds)


def own(rounds: int = 9, times: int = 200) -> Scores:
    """Return the microseconds of the texts' own programs.

    `loop` is the benchmark of memory_pool.py, per operation that ran.
    """
    slab, manager = memory_pool.Slab(2 * memory_pool.GB, memory_pool.MB), block_manager.Manager()
    calls: dict[str, Callable[[], object]] = {
        "slab": lambda: slab.release(slab.allocate()[1]),
        "can_allocate": lambda: manager.can_allocate(200),
        "append": partial(manager.append, -1),
    }
    manager.allocate(-1, 1)
    for num_operations in (1000, 5000):
        _, pool, _ = first_fit.simulate(0, num_operations)
        calls[f"first_fit_{len(pool.free)}"] = partial(take_and_return, pool)
    for blocks in (13, 63, 256):
        manager.allocate(blocks, blocks * BLOCK)
        calls[f"allocate_{blocks}"] = partial(allocate_and_free, manager, blocks)
        calls[f"fork_{blocks}"] = partial(fork_and_free, manager, parent=blocks)
    loop = take_turns({"loop": timed(memory_pool.run_benchmark)}, rounds)
    return microseconds(calls, times, rounds) | with_spreads(loop, 1e6 / sum(memory_pool.run_benchmark()))


def allocate_and_free(manager: block_manager.Manager, blocks: int) -> None:
    manager.allocate(0, blocks * BLOCK)
    manager.free(0)


def fork_and_free(manager: block_manager.Manager, parent: int) -> None:
    manager.fork(parent, 0)
    manager.free(0)


def take_and_return(pool: first_fit.FirstFit, size: int = 128) -> None:
    """Take a piece of the mean size from the text's pool, and return it."""
    pool.release(pool.allocate(size), size)


def write_in_turn(pool: BlockPool, memory: torch.Tensor, times: int = 100, count: int = 8) -> None:
    """Take some blocks, write each one completely, free them, and repeat.

    memory [num_blocks, numbers of a block]
    """
    for _ in range(times):
        blocks = pool.get_new_blocks(count)
        for block in blocks:
            memory[block].fill_(1)
        pool.free_blocks(blocks)


def order(rounds: int = 9, num_blocks: int = 2048) -> Scores:
    """Return the time to reuse the block freed first, relative to the block freed last.

    `written`: blocks are only written. `served`: in stage 2's LLM.
    """
    memory = torch.zeros(num_blocks, BLOCK * 2048)  # a block of the storyteller in float32
    params = stage("s2").SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    calls: dict[Hashable, Callable[[], float]] = {}
    for name, kind in (("last", BlockPool), ("first", FirstInFirstOut)):
        llm = stage("s2").LLM(STORYTELLER, dtype="float32", kv_cache_tokens=num_blocks * BLOCK, max_num_seqs=8)
        llm.kv_cache_manager.pool = kind(num_blocks)
        calls["written", name] = timed(partial(write_in_turn, kind(num_blocks), memory))
        calls["served", name] = timed(partial(llm.generate, [[5] * 40] * 8, params))
    pairs: Any = {name: ((name, "first"), (name, "last")) for name in ("written", "served")}
    return ratios(take_turns(calls, rounds), pairs)


def fork(rounds: int = 9) -> Scores:
    """Return the microseconds of a fork of 200 tokens that is freed again, and of copies of blocks.

    A block of the 70B model is in fp16.
    """
    manager, (parent, child) = in_stages.forked(200, num_forks=1)
    manager.free(child)
    pool = without_model("s5", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=8192).kv_cache
    cache = part("s5", "kv_cache")
    large = cache.KVCache(shape_of_70b(), 4, BLOCK, torch.float16, pool.blocks.device)
    large.blocks.zero_()
    seven = [cache.BlockCopy(2 * i, 2 * i + 1) for i in range(200, 207)]  # of free blocks
    calls = {
        "fork_200_and_free": lambda: (manager.fork(parent, child), manager.free(child)),
        "copy_one": lambda: pool.copy_blocks(seven[:1]),
        "copy_seven": lambda: pool.copy_blocks(seven),
        "copy_one_of_70b": lambda: large.copy_blocks([cache.BlockCopy(0, 1)]),
    }
    return microseconds(calls, times=50, rounds=rounds)


def shape_of_70b() -> Any:
    """Return 80 layers of 8 KV heads of 128; everything that a block does not depend on is small."""
    return part("s5", "llama").ModelConfig(64, 8, 8, 80, 64, 8, 128)


# ---- the texts' slow ways


def defragment(rounds: int = 5, count: int = 64) -> Scores:
    """Return the milliseconds to defragment pieces of 1 to 8 MB behind a hole, and how many are copied."""
    pieces, offset = memory_pool.Pieces(), 0
    for i in range(count):
        size = (1 + i % 8) * memory_pool.MB
        pieces[i] = offset, size, torch.ones(size, dtype=torch.uint8)
        offset += size
    del pieces[0]
    turns = take_turns({"ms": timed(lambda: memory_pool.compact(pieces))}, rounds)
    return with_spreads(turns, 1000) | {"copies": len(pieces), "mb": memory_pool.compact(pieces)[1] / memory_pool.MB}


def singly(rounds: int = 5, num_tokens: int = 256) -> Scores:
    """Return the time to prefill a prompt token by token, as process() does, relative to stage 4's prefill at once."""
    params = stage("s4").SamplingParams(temperature=0, max_tokens=1)
    calls: dict[Hashable, Callable[[], float]] = {}
    for name, budget in (("singly", 1), ("at_once", num_tokens)):
        llm = stage("s4").LLM(STORYTELLER, dtype="float32", max_num_batched_tokens=budget, max_num_seqs=1)
        calls[name] = timed(partial(llm.generate, [[5] * num_tokens], params))
    return ratios(take_turns(calls, rounds), {"singly_over_at_once": ("singly", "at_once")})
