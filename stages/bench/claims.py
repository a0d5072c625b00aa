"""The claims table: claims of five texts that must be timed. notebooks/claims.ipynb counts the others.

A figure is the median of some rounds, and has a spread. Calls that are compared take turns. Locality, disk and
roofline are in locality.py. Under a minute on two cores.
"""

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from nanovllm.bench.harness import Scores, ratios, repeated, take_turns, timed, with_spreads
from stages.bench import locality, replay
from stages.bench.engines import new_sequence, part, silent, stage, without_model
from stages.bench.models import STORYTELLER, bytes_per_token
from stages.bench.workloads import Traffic, traffic
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.block_pool import BlockPool

BLOCK, POOL, LONGEST = 16, 4096, 1024


def measure(args: Namespace | None = None) -> dict[str, Any]:
    """Measure all parts on one thread, which makes times steadier."""
    parts: list[Callable[[], Scores]] = [books, order, fork, moving]
    parts += [locality.copies, locality.reads, locality.scattered, locality.roofline, locality.attention, locality.disk]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"claims": {"threads": 1, **{measured.__name__: measured() for measured in parts}}}
    finally:
        torch.set_num_threads(threads)


def microseconds(calls: Mapping[str, Callable[[], object]], times: int, rounds: int) -> Scores:
    """Return the time of one of many calls in a row, for each call, with its spread over the rounds."""
    turns = take_turns({name: timed(repeated(call, times)) for name, call in calls.items()}, rounds)
    return with_spreads(turns, 1e6 / times)


# ---- bookkeeping


def books(rounds: int = 9, times: int = 1000) -> dict[str, Any]:
    """Return the microseconds of the bookkeeping, and of a tensor as large as a block: torch's, and a GPU's own."""
    config = part("s2", "llama").ModelConfig.from_folder(STORYTELLER)
    pool, manager = BlockPool(POOL), block_manager(POOL)
    requests = [Traffic(num_tokens, 1, 1) for num_tokens in (40, 200)]
    short, long = (seq for seq, _ in replay.arrivals("s2", config, requests, longest=LONGEST))
    manager.allocate(short)
    numbers = BLOCK * bytes_per_token(config, torch.float32) // 4
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def allocate_and_free() -> None:
        manager.allocate(long)
        manager.free(long)

    def tensor_of_device() -> None:
        torch.empty(numbers, device=device)
        torch.cuda.empty_cache()

    calls: dict[str, Callable[[], object]] = {
        "take_one_and_return": lambda: pool.free_blocks(pool.get_new_blocks(1)),
        "take_8_and_return": lambda: pool.free_blocks(pool.get_new_blocks(8)),
        "framework_tensor": lambda: torch.empty(numbers, device=device),
        "append_slot": lambda: manager.append_slot(short),
        "allocate_200_and_free": allocate_and_free,
    }
    if device.type == "cuda":
        calls["device_tensor"] = tensor_of_device
    return {"framework": device.type, **microseconds(calls, times, rounds)}


def block_manager(num_blocks: int) -> BlockManager:
    """Return a manager without an engine."""
    return BlockManager(num_blocks, BLOCK, silent("s2"))


class FirstInFirstOut(BlockPool):
    """A pool that returns the block that has been free for longest."""

    free: Any  # a deque, whose left end is the front of the queue

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.free = deque(range(num_blocks))

    def get_new_blocks(self, count: int) -> list[int]:
        return [self.free.popleft() for _ in range(count)]

    def free_blocks(self, blocks: list[int]) -> None:
        self.free.extend(blocks)


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
    pairs: dict[str, tuple[Hashable, Hashable]] = {
        name: ((name, "first"), (name, "last")) for name in ("written", "served")
    }
    return ratios(take_turns(calls, rounds), pairs)


def fork(rounds: int = 9) -> Scores:
    """Return the microseconds of a fork of 200 tokens that is freed again, and of copies of blocks.

    A block of the 70B model is in fp16.
    """
    engine = without_model("s5", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=8192)
    params, cache = stage("s5").SamplingParams(), part("s5", "kv_cache")
    parent, child = (new_sequence("s5", engine.input_processor, name, [1] * 200, params) for name in "ab")
    engine.kv_cache_manager.allocate(parent)
    parent.num_computed_tokens = 199
    manager, pool = engine.kv_cache_manager, engine.kv_cache
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


# ---- moving


def moving(rounds: int = 5, num_steps: int = 1500) -> dict[str, Any]:
    """Replay one traffic in blocks, and in pieces that are moved together whenever enough slots are free but scattered.

    Return the microseconds per step for all Python code, and for copying the moved slots of real tensors.
    """
    config = part("s2", "llama").ModelConfig.from_folder(STORYTELLER)
    requests = traffic(num_steps, seed=1)

    def run(name: str, admits: Callable[[Any, Any], bool]) -> None:
        """Replay the traffic in blocks of stage 2, or in pieces of stage 1."""
        slots = block_manager(POOL // BLOCK) if name == "s2" else SlotManager(POOL, "request", LONGEST, silent("s1"))
        replay.replay(slots, replay.arrivals(name, config, requests, LONGEST), num_steps, admits, reports=False)

    compacting = replay.Compacting()
    run("s1", compacting)
    moved = compacting.moved
    kv = torch.zeros(POOL, bytes_per_token(config, torch.float32) // 4)

    def copies() -> None:
        for slots in moved:
            kv[:slots].copy_(kv[slots : 2 * slots])

    calls = {
        "blocks": timed(lambda: run("s2", BlockManager.can_promise)),
        "pieces": timed(lambda: run("s1", replay.Compacting())),
        "pieces_never_moved": timed(lambda: run("s1", SlotManager.can_allocate)),
        "copies": timed(copies),
    }
    result = with_spreads(take_turns(calls, rounds), 1e6 / num_steps)
    times = {"moves": len(moved), "slots_a_move": median(moved), "steps": num_steps}
    return result | times | {"bytes_a_step": sum(moved) * kv[0].nbytes / num_steps}
