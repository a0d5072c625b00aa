"""A list, a queue and a bitmap of free blocks (claims 5, 21, 31), steps that allocate nothing (11), moving (22)."""

import itertools
import random
from statistics import mean

import torch

from notebooks.helpers.allocations import Allocations
from notebooks.helpers.claims.findings import Finding, Rows, Timing, committed, finding, in_words, of_gpu, spread
from stages.bench.engines import part, without_model
from stages.bench.models import STORYTELLER
from stages.bench.texts import first_fit, memory_pool
from stages.bench.texts.pools import BitmapPool, FirstInFirstOut
from stages.s2_block_manager.block_pool import BlockPool


def side_by_side() -> list[tuple[str, str, str]]:
    """Return each call, and the free blocks of a list and of a bitmap after it, for a pool of eight."""
    listed, mapped, rows = BlockPool(8), BitmapPool(8), list[tuple[str, str, str]]()

    def note(call: str) -> None:
        rows.append((call, "".join(f"[{block}]" for block in reversed(listed.free)), str(mapped)))

    note("all free")
    taken = [pool.get_new_blocks(4) for pool in (listed, mapped)]
    note("take 4")
    for pool, blocks in zip((listed, mapped), taken, strict=True):
        pool.free_blocks([blocks[2], blocks[0]])
    note("free the third and the first of them")
    for pool in (listed, mapped):
        pool.get_new_blocks(1)
    note("take 1")
    return rows


def recently_written(num_blocks: int = 4096, recent: int = 256, times: int = 4000) -> dict[str, float]:
    """Return the share of takes that get a block of the `recent` last writes, which a cache may still have.

    Sequences of 1 to 40 blocks come and go at random, and hold about half of the pool.
    """
    shares, pools = {}, {"free list": BlockPool, "bitmap": BitmapPool, "queue": FirstInFirstOut}
    for name, kind in pools.items():
        pool, rng, held = kind(num_blocks), random.Random(0), list[list[int]]()
        last_write, hits = dict[int, int](), list[bool]()
        for _ in range(times):
            held.append(pool.get_new_blocks(rng.randint(1, 40)))
            for block in held[-1]:
                hits.append(len(hits) - last_write.get(block, -num_blocks) <= recent)
                last_write[block] = len(hits)
            if len(held) > 100:
                pool.free_blocks(held.pop(rng.randrange(len(held))))
        shares[name] = mean(hits)
    return shares


# ---- findings


def finding_5() -> Finding:
    loop, done = committed("claims.own.loop"), sum(memory_pool.run_benchmark())
    written, served = (committed(f"claims.order.{name}") for name in ("written", "served"))

    def speeds(machine: str, rows: Rows) -> str:
        shown = ", ".join(f"{name} {spread(row, 'operations/s'):,.0f}" for name, row in rows.items())
        return f"on {machine}, operations per second: {shown}"

    def ratios(machine: str, rows: Rows) -> str:
        slab, caching, plain = (rows[name]["operations/s"] for name in ("slab", "caching", "device's own"))
        return f"it is {slab / caching:.1f} and {slab / plain:.0f} times as fast as the others on {machine}"

    return finding(
        5,
        done=done,
        printed=10_000 / done,
        true=f"{1e6 / loop.value:,.0f}",
        shown=f"{10_000 / done * 1e6 / loop.value:,.0f}",
        faster=in_words(Timing(*(0.833 * us for us in loop)), "faster than", "as fast as", "slower than"),
        gpu=of_gpu(5, "Claim 5", speeds),
        ratios=of_gpu(5, "Claim 5", ratios, missing="both ratios are a GPU's"),
        to_writes=in_words(written, "does not matter", "does not matter", "matters"),
        to_llm=in_words(served, "not", "not", "a little"),
    )


def finding_31() -> Finding:
    recent = recently_written()
    listed, bitmap = (committed(f"claims.books.{name}_and_return") for name in ("take_one", "bitmap_take"))
    return finding(
        31,
        recent=", ".join(f"{name} {share:.0%}" for name, share in recent.items()),
        kind="as kind" if recent["bitmap"] > 0.8 * recent["free list"] else "not as kind",
        slower=bitmap.value / listed.value,
    )


def finding_21() -> Finding:
    step, append = committed("decode.cases.storyteller_float32_8_128.s2_ms"), committed("claims.own.append")
    share, longest = 8 * append.value / (1000 * step.value), committed("claims.own.allocate_256").value
    beyond = "long sequences take longer than 10 us" if longest > 20 else "none takes longer than 10 us"
    return finding(21, share < 0.01, share=share, beyond=beyond)


def finding_11(num_tokens: int = 64) -> Finding:
    engine = without_model("s4", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=8192)
    params = part("s4", "sampling").SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number in range(16):
        engine.add_request(str(number), [3] * (20 + 7 * number), params)
    tables = list[list[int]]()
    while engine.has_unfinished_requests():
        engine.step()
        tables.append([len(seq.block_table) for seq in engine.scheduler.running])
    decode = [pair for pair in itertools.pairwise(tables) if len(pair[0]) == len(pair[1]) == 16]
    alone = mean(a == b for before, after in decode for a, b in zip(before, after, strict=True))
    none = mean(before == after for before, after in decode)
    engine = part("s4", "llm").LLM(STORYTELLER, dtype="float32", kv_cache_tokens=512).llm_engine
    engine.add_request("0", [1] * 20, params)
    engine.step()
    with Allocations() as made:
        engine.step()
    return finding(11, alone > 0.9 > none and len(made.sizes) > 0, alone=alone, none=none, tensors=len(made.sizes))


def finding_22() -> Finding:
    """Count what the text's function copies on its own pool after 1,000 operations, and read its committed time."""
    _, pool, held = first_fit.simulate(0, 1000)
    pieces = {i: (offset, size, torch.empty(size)) for i, (offset, size) in enumerate(sorted(held))}  # a number a MB
    copied = memory_pool.compact(pieces)[1] // 4  # MB

    def time(machine: str, rows: Rows) -> str:
        speed = rows["device"]["copy GB/s, read and written"]
        return f"{2 * copied * memory_pool.MB / 1e6 / speed:.0f} ms at the {speed:,.0f} GB/s of {machine}"

    gpu = of_gpu(0, "The device", time)
    return finding(22, copied > 1000, pieces=len(pieces), regions=len(pool.free), gb=copied / 1024, gpu=gpu)
