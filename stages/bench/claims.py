"""What five texts claim of this subject and only a clock can tell. What can be counted, notebooks/claims.ipynb counts.

A figure is the median of some rounds; beside it stands its spread, the least and the largest: `fork` and `fork_spread`.
What is compared takes turns. Locality, disk and roofline are in locality.py. Under a minute on two cores.
"""

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from stages.bench import locality, replay
from stages.bench.engines import new_sequence, part, silent, stage, without_model
from stages.bench.harness import ratio, seconds_of, take_turns, timed
from stages.bench.locality import figure
from stages.bench.models import STORYTELLER, bytes_per_token
from stages.bench.workloads import Traffic, traffic
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.block_pool import BlockPool

BLOCK, POOL, LONGEST = 16, 4096, 1024


def measure(args: Namespace | None = None) -> dict[str, Any]:
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "books": books,
        "order": order,
        "fork": fork,
        "moving": moving,
        "copies": locality.copies,
        "reads": locality.reads,
        "scattered": locality.scattered,
        "roofline": locality.roofline,
        "attention": locality.attention,
        "disk": locality.disk,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steadier times
    try:
        return {"claims": {"threads": 1, **{name: measured() for name, measured in parts.items()}}}
    finally:
        torch.set_num_threads(threads)


def microseconds(calls: Mapping[str, Callable[[], object]], times: int, rounds: int) -> dict[str, Any]:
    """The time of one of many calls in a row, of each call, with its spread over the rounds."""

    def many(call: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            for _ in range(times):
                call()
            return 0.0

        return lambda: 1e6 * seconds_of(run) / times

    turns = take_turns({name: many(call) for name, call in calls.items()}, rounds)
    return {key: value for name in calls for key, value in figure(name, [turn[name] for turn in turns]).items()}


# ---- the books


def books(rounds: int = 9, times: int = 1000) -> dict[str, Any]:
    """Return the microseconds of the bookkeeping, and of a tensor as large as a block, made by torch."""
    config = part("s2", "llama").ModelConfig.from_folder(STORYTELLER)
    pool, manager = BlockPool(POOL), block_manager(POOL)
    sequences = [seq for seq, _ in replay.arrivals("s2", config, [request_of(40), request_of(200)], longest=LONGEST)]
    manager.allocate(sequences[0])
    numbers = BLOCK * bytes_per_token(config, torch.float32) // 4
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def allocate_and_free() -> None:
        manager.allocate(sequences[1])
        manager.free(sequences[1])

    calls = {
        "take_one_and_return": lambda: pool.free_blocks(pool.get_new_blocks(1)),
        "take_8_and_return": lambda: pool.free_blocks(pool.get_new_blocks(8)),
        "framework_tensor": lambda: torch.empty(numbers, device=device),
        "append_slot": lambda: manager.append_slot(sequences[0]),
        "allocate_200_and_free": allocate_and_free,
    }
    return {"framework": device.type, **microseconds(calls, times, rounds)}


def block_manager(num_blocks: int) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, silent("s2"))


def request_of(num_prompt_tokens: int) -> Any:
    """A request of so many tokens and one more."""
    return traffic(1, seed=0)[0]._replace(num_prompt_tokens=num_prompt_tokens, max_tokens=1, num_output_tokens=1)


class FirstInFirstOut(BlockPool):
    """A pool that hands out the block that has been free for longest."""

    free: Any  # a deque, whose left end is the front of the queue

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.free = deque(range(num_blocks))

    def get_new_blocks(self, count: int) -> list[int]:
        return [self.free.popleft() for _ in range(count)]

    def free_blocks(self, blocks: list[int]) -> None:
        self.free.extend(blocks)


def write_in_turn(pool: BlockPool, memory: torch.Tensor, times: int = 100, count: int = 8) -> None:
    """Take some blocks, write all of each, and give them back; and so on. memory [num_blocks, numbers of a block]"""
    for _ in range(times):
        blocks = pool.get_new_blocks(count)
        for block in blocks:
            memory[block].fill_(1)
        pool.free_blocks(blocks)


def order(rounds: int = 9, num_blocks: int = 2048) -> dict[str, Any]:
    """How many times as long it takes to reuse the block freed first, against the one freed last: where blocks are only
    written, and in stage 2's LLM.
    """
    pools: dict[str, type[BlockPool]] = {"last": BlockPool, "first": FirstInFirstOut}
    memory = torch.zeros(num_blocks, BLOCK * 2048)  # a block of the storyteller in float32
    params = stage("s2").SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    calls: dict[Hashable, Callable[[], float]] = {}
    for name, kind in pools.items():
        llm = stage("s2").LLM(STORYTELLER, dtype="float32", kv_cache_tokens=num_blocks * BLOCK, max_num_seqs=8)
        llm.kv_cache_manager.pool = kind(num_blocks)
        pool = kind(num_blocks)
        calls["written", name] = timed(partial(write_in_turn, pool, memory))
        calls["served", name] = timed(partial(llm.generate, [[5] * 40] * 8, params))
    turns = take_turns(calls, rounds)
    return locality.ratios({name: ratio(turns, (name, "first"), (name, "last")) for name in ("written", "served")})


def fork(rounds: int = 9) -> dict[str, Any]:
    """Microseconds of a fork of 200 tokens, given back again, and of copies of blocks; a block of 70B is in fp16."""
    engine = without_model("s5", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=8192)
    params = stage("s5").SamplingParams()
    parent, child = (new_sequence("s5", engine.input_processor, name, [1] * 200, params) for name in "ab")
    engine.kv_cache_manager.allocate(parent)
    parent.num_computed_tokens = 199
    copy, manager, pool = part("s5", "kv_cache").BlockCopy, engine.kv_cache_manager, engine.kv_cache
    large = part("s5", "kv_cache").KVCache(shape_of_70b(), 4, BLOCK, torch.float16, pool.blocks.device)
    large.blocks.zero_()
    seven = [copy(2 * i, 2 * i + 1) for i in range(200, 207)]  # blocks that nobody holds
    calls = {
        "fork_200_and_free": lambda: (manager.fork(parent, child), manager.free(child)),
        "copy_one": lambda: pool.copy_blocks(seven[:1]),
        "copy_seven": lambda: pool.copy_blocks(seven),
        "copy_one_of_70b": lambda: large.copy_blocks([copy(0, 1)]),
    }
    return microseconds(calls, times=50, rounds=rounds)


def shape_of_70b() -> Any:
    """80 layers of 8 KV heads of 128; what a block does not depend on is small."""
    return part("s5", "llama").ModelConfig(64, 8, 8, 80, 64, 8, 128)


# ---- moving


def moving(rounds: int = 5, num_steps: int = 1500) -> dict[str, Any]:
    """The whole replay of one traffic, in microseconds a step: blocks; one piece each, moved together when the free
    slots are enough and scattered. All of the Python of both; and the copies of what is moved, of real tensors.
    """
    config = part("s2", "llama").ModelConfig.from_folder(STORYTELLER)
    replays = replays_of(config, traffic(num_steps, seed=1), num_steps)
    moved = replays["pieces"]()
    kv = torch.zeros(POOL, bytes_per_token(config, torch.float32) // 4)

    def copies() -> None:
        for slots in moved:
            kv[:slots].copy_(kv[slots : 2 * slots])

    calls = {**replays, "copies": copies}
    turns = take_turns({name: timed(call) for name, call in calls.items()}, rounds)
    a_step = {name: figure(name, [1e6 * turn[name] / num_steps for turn in turns]) for name in calls}
    found = {key: value for figures in a_step.values() for key, value in figures.items()}
    times = {"moves": len(moved), "slots_a_move": median(moved), "steps": num_steps}
    return found | times | {"bytes_a_step": sum(moved) * kv[0].nbytes / num_steps}


def replays_of(config: Any, requests: list[Traffic], num_steps: int) -> dict[str, Callable[[], list[int]]]:
    """Replays of one traffic. Each returns the slots of its moves."""

    def in_blocks() -> list[int]:
        run("s2", block_manager(POOL // BLOCK), BlockManager.can_promise)
        return []

    def in_pieces() -> list[int]:
        compacting = replay.Compacting()
        run("s1", SlotManager(POOL, "request", LONGEST, silent("s1")), compacting)
        return compacting.moved

    def never_moved() -> list[int]:
        run("s1", SlotManager(POOL, "request", LONGEST, silent("s1")), SlotManager.can_allocate)
        return []

    def run(name: str, manager: Any, admits: Callable[[Any, Any], bool]) -> None:
        replay.replay(manager, replay.arrivals(name, config, requests, LONGEST), num_steps, admits, reports=False)

    return {"blocks": in_blocks, "pieces": in_pieces, "pieces_never_moved": never_moved}
