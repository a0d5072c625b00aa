"""A free list, a queue and a bitmap of free blocks (claims 5 and 21), steps that allocate nothing (11), moving (22)."""

import itertools
import random
import statistics

from notebooks.helpers.allocations import Allocations
from notebooks.helpers.claims.findings import Finding, committed, finding, in_words, under
from stages.bench.claims import FirstInFirstOut
from stages.bench.engines import part, without_model
from stages.bench.models import STORYTELLER
from stages.s2_block_manager.block_pool import BlockPool


class BitmapPool:
    """A pool on one number: bit b is 1 if block b is free. It takes the lowest free blocks.

    A block costs one bit. The pool does not know in which order blocks were freed, and finding one reads all bits.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self._free = num_blocks, (1 << num_blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return self._free.bit_count()

    def get_new_blocks(self, count: int) -> list[int]:
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks are needed, {self.num_free_blocks} are free")
        blocks = []
        for _ in range(count):
            lowest = self._free & -self._free
            self._free ^= lowest
            blocks.append(lowest.bit_length() - 1)
        return blocks

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._free >> block & 1:
                raise ValueError(f"block {block} is freed twice")
            self._free |= 1 << block

    def __str__(self) -> str:
        """Return the bits, with block 0 on the left."""
        return format(self._free, f"0{self.num_blocks}b")[::-1]


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


def finding_5(recent: dict[str, float]) -> Finding:
    one, tensor = committed("claims.books.take_one_and_return"), committed("claims.books.framework_tensor")
    written, served = committed("claims.order.written"), committed("claims.order.served")
    is_cuda = under("claims.books.framework") == "cuda"
    return finding(
        5,
        holds_as_worded=2 / one.value > 0.833,
        one=one.text(),
        millions=2 / one.value,
        allocator="caching" if is_cuda else "CPU",
        tensor=tensor.value / one.value,
        written=written.text(),
        served=served.text(),
        recent=", ".join(f"{name} {share:.0%}" for name, share in recent.items()),
        ratios="" if is_cuda else " (both ratios are a GPU's: make gpu PART=5)",
        to_writes=in_words(written, "does not matter", "does not matter", "matters"),
        to_llm=in_words(served, "not", "not", "a little"),
        bitmap="as kind" if recent["bitmap"] > 0.8 * recent["free list"] else "not as kind",
    )


def finding_21() -> Finding:
    names = {"one": "take_one_and_return", "append": "append_slot", "prompt": "allocate_200_and_free"}
    times = {name: committed(f"claims.books.{key}") for name, key in names.items()}
    step = committed("decode.cases.storyteller_float32_8_128.s2_ms")
    share, texts = 8 * times["append"].value / (1000 * step.value), {name: t.text() for name, t in times.items()}
    beyond = "takes longer than 10 us, and matters as little" if times["prompt"].value > 10 else "takes no longer"
    return finding(21, share < 0.01, **texts, share=share, step=step.text("{:.1f}"), beyond=beyond)


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
    names = ("blocks", "pieces", "pieces_never_moved", "copies")
    times = {name: committed(f"claims.moving.{name}") for name in names}
    ratio = (times["pieces"].value + times["copies"].value) / times["blocks"].value
    moving = under("claims.moving") or {"moves": 0, "steps": 0, "bytes_a_step": 0}
    kb, texts = moving["bytes_a_step"] / 1e3, {name: t.text("{:.1f}") for name, t in times.items()}
    holds = "holds" if ratio > 3 else "does not hold for this workload"
    return finding(22, **texts, kb=kb, moves=moving["moves"], steps=moving["steps"], ratio=ratio, holds=holds)
