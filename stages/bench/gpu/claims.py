"""Part 5: what the texts say of allocating, of copying a block on the device, and of swapping.

Claim 5: a free list in Python does 833,000 operations a second, 7 times as many as the framework's caching allocator
and 267 times as many as the device's own; the block freed last is kinder to caches than the one freed first.
Claim 13: to copy a block takes 1.6 us on the device.
Claim 16: to swap 4,096 tokens takes 46.8 ms, to compute them again 1,024 ms; below about 256 tokens to compute them can
be cheaper.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stages.bench.engines import new_sequence, stage
from stages.bench.gpu.common import SHAPES, Report, Row, Setup, compare, synchronize, timed_on
from stages.bench.gpu.copies import Copies, wall
from stages.bench.harness import ratio, take_turns, with_spreads
from stages.bench.racing import sampling_params
from stages.bench.workloads import Request, even_prompt
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s2_block_manager.block_pool import BlockPool
from stages.s5_cow_sampling.kv_cache import BlockCopy, KVCache

BLOCK_SIZE = 16


def measure(setup: Setup, report: Report) -> None:
    report.table("Claim 5: take a piece and give it back, operations a second", [allocators(setup)])
    report.table("Claim 5: which free block is taken, ms for 64 writes", order_of_reuse(setup))
    report.table("Claim 13: copy blocks on the device, us", [block_copies(setup, *each) for each in shapes(setup)])
    if report.has_time("claim 16"):
        report.table("Claim 16: to the first token, loaded or computed again, ms", swap(setup, report))


# ---- claim 5


def allocators(setup: Setup) -> Row:
    """A block of the pool; a tensor from the framework's cache; a tensor when that cache is empty: the device's own."""
    pool, size, many = BlockPool(1024), setup.size(5_242_880, 4096), setup.size(1000, 20)
    few = max(many // 20, 1)

    def of_pool() -> None:
        for _ in range(many):
            pool.free_blocks(pool.get_new_blocks(1))

    def of_cache() -> None:
        for _ in range(many):
            torch.empty(size, dtype=torch.uint8, device=setup.device)

    def of_device() -> None:
        for _ in range(few):
            torch.empty(size, dtype=torch.uint8, device=setup.device)
            if setup.is_cuda:
                torch.cuda.empty_cache()

    calls: dict[str, Callable[[], object]] = {"free list": of_pool, "framework": of_cache}
    counts = {"free list": 2 * many, "framework": 2 * many, "device": 2 * few}  # taking and giving back
    if setup.is_cuda:
        calls["device"] = of_device
    times = take_turns({name: wall(setup, call) for name, call in calls.items()}, setup.size(9, 1))
    rates = [{name: counts[name] / seconds for name, seconds in each.items()} for each in times]
    found = with_spreads(rates) | ratio(rates, "free list", "framework").named("times the framework")
    return found | (ratio(rates, "free list", "device").named("times the device") if setup.is_cuda else {})


def order_of_reuse(setup: Setup) -> list[Row]:
    """Pieces of a pool are written and read: the same one again, as LIFO gives it, or each in turn, as FIFO does."""
    rows: list[Row] = []
    num_pieces = setup.size(256, 4)
    for size in setup.size((2**20, 2**23, 2**25), (2**10,)):
        pool = torch.zeros(num_pieces, size // 4, device=setup.device)

        def last_freed(pool: torch.Tensor = pool) -> None:
            for _ in range(64):
                pool[0].add_(1)

        def first_freed(pool: torch.Tensor = pool) -> None:
            for i in range(64):
                pool[i * 3 % num_pieces].add_(1)

        rows.append({"bytes": size, **compare(setup, {"freed last": last_freed, "freed first": first_freed})})
        del pool
    return rows


# ---- claim 13


def shapes(setup: Setup) -> list[tuple[str, Any]]:
    """Of the last one a block has the 5.24 MB that the text counts; no model of it is made."""
    of_70b = ModelConfig(
        vocab_size=16,
        hidden_size=8192,
        intermediate_size=16,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    )
    return setup.size([*((name, SHAPES[name]) for name in ("135M", "1B")), ("70B", of_70b)], [("tiny", SHAPES["tiny"])])


def block_copies(setup: Setup, name: str, shape: Any) -> Row:
    """As stage 5 copies them, 1, 7 or 64 in one batch; and one block with a plain copy, 100 in a row."""
    cache = KVCache(shape, setup.size(256, 8), BLOCK_SIZE, getattr(torch, setup.dtype), setup.device)
    cache.blocks.zero_()
    half, many = cache.num_blocks // 2, setup.size(100, 2)
    calls: dict[str, Callable[[], object]] = {}
    for count in setup.size((1, 7, 64), (1, 2)):
        copies = [BlockCopy(i, half + i) for i in range(count)]
        calls[f"batch of {count}"] = partial(cache.copy_blocks, copies)
    found = compare(setup, calls, scale=1e6)

    def plain() -> None:
        for _ in range(many):
            cache.blocks[half].copy_(cache.blocks[0], non_blocking=True)

    alone = with_spreads([{"plain copy": 1e6 * s / many} for s in repeated(setup, plain)])
    return {"model": name, "bytes a block": cache.blocks[0].nbytes, **found, **alone}


def repeated(setup: Setup, call: Callable[[], object]) -> list[float]:
    return [each[""] for each in take_turns({"": timed_on(setup.device, call)}, setup.size(15, 1))]


# ---- claim 16


def swap(setup: Setup, report: Report) -> list[Row]:
    """Keys and values of a text's first tokens: stored, loaded, and computed again in one step, by length."""
    lengths, model = setup.size((16, 64, 256, 1024, 4096), (16, 32)), setup.size("1B", "tiny")
    longest = lengths[-1]
    sizes = {"kv_cache_tokens": 2 * longest, "max_num_batched_tokens": longest, "kv_offloading_tokens": longest}
    llm = stage("s7").LLM(setup.folder(model), offload_policy="load", **sizes, **setup.options())
    engine = llm.llm_engine
    rows: list[Row] = []
    for length in lengths:
        if not report.has_time(length):
            break
        copies = Copies(engine.host_tier, length // BLOCK_SIZE)
        copies.store()
        calls: dict[str, Callable[[], object]] = {
            "store": copies.store,
            "load": copies.load,
            "compute": prefill(engine, length),
        }
        times = take_turns({name: wall(setup, call) for name, call in calls.items()}, setup.size(11, 1))
        there_and_back = [each | {"both": each["store"] + each["load"]} for each in times]
        found: dict[str, Any] = with_spreads([{name: 1000 * s for name, s in each.items()} for each in there_and_back])
        rows.append({"tokens": length, **found, **ratio(there_and_back, "compute", "both").named("compute over both")})
    synchronize(setup.device)
    return rows


def prefill(engine: Any, length: int) -> Callable[[], object]:
    """One step that computes `length` tokens."""
    prompt = [token % engine.model_config.vocab_size for token in even_prompt(length)]
    seq = new_sequence("s7", engine.input_processor, str(length), prompt, sampling_params("s7", Request([], 1)))
    seq.block_table = list(range(-(-length // BLOCK_SIZE)))
    return lambda: engine.model_runner.run([(seq, length)])
