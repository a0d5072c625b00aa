"""A list, a queue and a bitmap of free blocks (claims 5, 21, 31), steps that allocate nothing (11), moving (22)."""

import itertools
import random
import statistics

import torch

from notebooks.helpers.allocations import Allocations
from notebooks.helpers.claims.findings import (
    Finding,
    Timing,
    committed,
    finding,
    in_words,
    not_measured,
    on_gpu,
    spread,
    under,
)
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
        shares[name] = statistics.mean(hits)
    return shares


# ---- findings


def finding_5() -> Finding:
    loop, (allocations, frees) = committed("claims.own.loop"), memory_pool.benchmark()
    done = allocations + frees
    order = {name: committed(f"claims.order.{name}") for name in ("written", "served")}
    gpu, ratios = not_measured(5), "both ratios are a GPU's"
    if table := on_gpu(5, "Claim 5"):
        speeds = {name: spread(row, "operations/s") for name, row in table.rows.items()}
        shown = ", ".join(f"{name} {speed.text('{:,.0f}')}" for name, speed in speeds.items())
        gpu = f"on {table.machine}, operations per second: {shown}"
        if {"slab", "caching", "device's own"} <= speeds.keys():
            times = [speeds["slab"].value / speeds[name].value for name in ("caching", "device's own")]
            ratios = f"it is {times[0]:.1f} and {times[1]:.0f} times as fast as the others on {table.machine}"
    return finding(
        5,
        done=done,
        printed=10_000 / done,
        loop=loop.text("{:.2f}"),
        true=f"{1e6 / loop.value:,.0f}",
        shown=f"{10_000 / done * 1e6 / loop.value:,.0f}",
        faster=in_words(loop._replace(value=loop.value * 0.833, least=loop.least * 0.833, largest=loop.largest * 0.833),
                        "faster than", "as fast as", "slower than"),
        written=order["written"].text(),
        served=order["served"].text(),
        gpu=gpu,
        ratios=ratios,
        to_writes=in_words(order["written"], "does not matter", "does not matter", "matters"),
        to_llm=in_words(order["served"], "not", "not", "a little"),
    )  # fmt: skip


def finding_31(recent: dict[str, float]) -> Finding:
    listed, bitmap = (committed(f"claims.books.{name}_and_return") for name in ("take_one", "bitmap_take"))
    return finding(
        31,
        recent=", ".join(f"{name} {share:.0%}" for name, share in recent.items()),
        listed=listed.text(),
        bitmap=bitmap.text(),
        kind="as kind" if recent["bitmap"] > 0.8 * recent["free list"] else "not as kind",
        slower=bitmap.value / listed.value,
    )


def finding_21() -> Finding:
    def timing(name: str) -> Timing:
        return committed(f"claims.own.{name}")

    step, append = committed("decode.cases.storyteller_float32_8_128.s2_ms"), timing("append")
    share, longest = 8 * append.value / (1000 * step.value), timing("allocate_256").value
    ours = committed("claims.books.append_slot")
    return finding(
        21,
        share < 0.01,
        can_allocate=timing("can_allocate").text(),
        append=append.text(),
        allocate=", ".join(timing(f"allocate_{n}").text("{:.1f}") for n in (13, 63, 256)),
        fork=", ".join(timing(f"fork_{n}").text("{:.1f}") for n in (13, 63, 256)),
        ours=ours.text(),
        share=share,
        step=step.text("{:.1f}"),
        beyond="long sequences take longer than 10 us" if longest > 20 else "none takes longer than 10 us",
    )


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
    alone = statistics.mean(a == b for before, after in decode for a, b in zip(before, after, strict=True))
    none = statistics.mean(before == after for before, after in decode)
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
    copied = memory_pool.defragment(pieces)[1] // 4  # MB
    timed, moving = committed("claims.defragment.ms"), under("claims.defragment") or {"copies": 0, "mb": 0}
    gpu = not_measured(0)
    if table := on_gpu(0, "The device"):
        speed = table.rows["device"]["copy GB/s, read and written"]
        gpu = f"{2 * copied * memory_pool.MB / 1e6 / speed:.0f} ms at the {speed:,.0f} GB/s of {table.machine}"
    return finding(
        22,
        holds_as_worded=copied > 1000,
        pieces=len(pieces),
        regions=len(pool.free),
        gb=copied / 1024,
        gpu=gpu,
        copies=moving["copies"],
        mb=moving["mb"],
        ms=timed.text("{:.0f}"),
    )
