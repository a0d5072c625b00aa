"""The books: a free list, a bitmap, torch's allocator (claims 5, 21), steps that take nothing (11), moving (22)."""

import itertools
import statistics

from nanovllm.bench.harness import microseconds
from notebooks.helpers.allocations import Allocations
from notebooks.helpers.claims.table import POINTER, SLABS, Finding, committed, in_words, under
from stages.bench.engines import part, without_model
from stages.bench.models import STORYTELLER
from stages.s2_block_manager.block_pool import BlockPool


class BitmapPool:
    """A pool with the same verbs on one number: bit b is 1 if block b is free.

    It takes the lowest free blocks, so it does not know the order in which they were given back. A block costs a bit,
    and finding one reads all words of bits.
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
                raise ValueError(f"block {block} is given back twice")
            self._free |= 1 << block

    def __str__(self) -> str:
        """1 is free; block 0 on the left."""
        return format(self._free, f"0{self.num_blocks}b")[::-1]


def side_by_side() -> list[tuple[str, str, str]]:
    """Eight blocks: what each of the two has after each call."""
    listed, mapped, rows = BlockPool(8), BitmapPool(8), list[tuple[str, str, str]]()

    def note(what: str) -> None:
        rows.append((what, "".join(f"[{block}]" for block in reversed(listed.free)), str(mapped)))

    note("all free")
    taken = [pool.get_new_blocks(4) for pool in (listed, mapped)]
    note("take 4")
    for pool, blocks in zip((listed, mapped), taken, strict=True):
        pool.free_blocks([blocks[2], blocks[0]])
    note("give back the third and the first of them")
    for pool in (listed, mapped):
        pool.get_new_blocks(1)
    note("take 1")
    return rows


def of_your_machine(num_blocks: int, times: int) -> dict[str, float]:
    """Microseconds to take 8 blocks and give them back, now."""
    pools = {"free list": BlockPool(num_blocks), "bitmap": BitmapPool(num_blocks)}
    return {
        name: microseconds(lambda pool=pool: pool.free_blocks(pool.get_new_blocks(8)), times)
        for name, pool in pools.items()
    }


# ---- findings


def finding_5() -> Finding:
    one, tensor = committed("claims.books.take_one_and_return"), committed("claims.books.framework_tensor")
    written, served = committed("claims.order.written"), committed("claims.order.served")
    is_cuda = under("claims.books.framework") == "cuda"
    ratio = (
        f"{tensor.value / one.value:.1f} times a free list's take and return" if tensor.value else "not measured yet"
    )
    return Finding(
        5,
        "a free list in Python does 833,000 operations/s, 7x the framework's caching allocator, 267x the device's "
        "malloc; "
        "to reuse the block freed last is kinder to caches",
        (SLABS,),
        "take and return of a block, timed in turns; blocks written in both orders, and served by stage 2's LLM in "
        "both",
        f"a take and a return {one.text('{:.2f}')} us, so {2 / one.value:.2f} million operations/s; a tensor of a "
        "block "
        f"from torch's {'caching' if is_cuda else 'CPU'} allocator {ratio}; freed first takes {written.text()} times "
        f"as long where blocks are only written, {served.text()} times in the LLM",
        "the free list is as quick as claimed; "
        + ("" if is_cuda else "the two ratios are a GPU's: make gpu PART=5; ")
        + "the order matters to writes: "
        + in_words(written, "no", "the same", "yes")
        + ", to the LLM: "
        + in_words(served, "no", "the same", "a little"),
    )


def finding_21() -> Finding:
    one, append, prompt = (
        committed(f"claims.books.{name}") for name in ("take_one_and_return", "append_slot", "allocate_200_and_free")
    )
    step = committed("decode.cases.storyteller_float32_8_128.s2_ms")
    share = 8 * append.value / (1000 * step.value)
    return Finding(
        21,
        "operations of the block manager take 1-10 us and never matter beside the step",
        (POINTER,),
        "stage 2's BlockManager, timed in turns, beside a decode step of 8 sequences of 128 tokens",
        f"append {append.text('{:.2f}')} us, take and return {one.text('{:.2f}')} us, allocate and free 200 tokens "
        f"{prompt.text('{:.1f}')} us; 8 appends are {share:.3%} of a step of {step.text('{:.1f}')} ms",
        "holds for a step; a prompt of many blocks takes longer than 10 us, and matters as little"
        if prompt.value > 10
        else "holds",
    )


def finding_11(num_tokens: int = 64) -> Finding:
    engine = without_model("s4", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=8192)
    params = part("s4", "sampling").SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number in range(16):
        engine.add_request(str(number), [3] * (20 + 7 * number), params)
    held, tables = list[int](), list[list[int]]()
    while engine.has_unfinished_requests():
        engine.step()
        held.append(engine.kv_cache_manager.num_blocks - engine.kv_cache_manager.num_free_blocks)
        tables.append([len(seq.block_table) for seq in engine.scheduler.running])
    decode = [pair for pair in itertools.pairwise(tables) if len(pair[0]) == len(pair[1]) == 16]
    alone = statistics.mean(a == b for before, after in decode for a, b in zip(before, after, strict=True))
    nobody = statistics.mean(before == after for before, after in decode)
    tensors = tensors_of_a_step()
    return Finding(
        11,
        "15 of 16 decode steps allocate nothing; nothing is allocated on the device while serving",
        (POINTER,),
        "16 sequences of different lengths decode in stage 4; tensors that torch makes in one step of stage 4, counted",
        f"a sequence takes no block in {alone:.1%} of its steps, nobody of 16 does in {nobody:.0%}; torch makes "
        f"{tensors} "
        "tensors in a step",
        "holds for one sequence, not for a step of 16; holds for the pool, not for everything else",
    )


def tensors_of_a_step() -> int:
    """Return the number of tensors that torch allocates in a decode step of one sequence of stage 4."""
    stage4 = part("s4", "llm")
    llm = stage4.LLM(STORYTELLER, dtype="float32", kv_cache_tokens=512)
    params = part("s4", "sampling").SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.llm_engine.add_request("0", [1] * 20, params)
    llm.llm_engine.step()
    with Allocations() as made:
        llm.llm_engine.step()
    return len(made.sizes)


def finding_22() -> Finding:
    blocks, pieces, never, copies = (
        committed(f"claims.moving.{name}") for name in ("blocks", "pieces", "pieces_never_moved", "copies")
    )
    moves, steps = under("claims.moving.moves") or 0, under("claims.moving.steps") or 1
    num_bytes = under("claims.moving.bytes_a_step") or 0
    times = (pieces.value + copies.value) / blocks.value
    return Finding(
        22,
        "defragmenting by moving memory costs far more than blocks ever do",
        (SLABS,),
        "one traffic replayed, all of the Python of both sides timed: stage 2's blocks; stage 1's pieces, moved "
        "together "
        "whenever enough is free and scattered; the copies of what is moved, of real tensors",
        f"Python a step: blocks {blocks.text('{:.0f}')} us, pieces {pieces.text('{:.0f}')} us "
        f"({never.text('{:.0f}')} if "
        f"they never move); copies {copies.text('{:.1f}')} us a step, {num_bytes / 1e3:.0f} KB: {moves} moves in "
        f"{steps} "
        "steps",
        f"{times:.1f} times blocks, all told: "
        + (
            "holds"
            if times > 3
            else "does not hold for this traffic. Moves are rare, and both are little beside a step"
        )
        + ". Blocks win because nobody has to know lengths, and by sharing",
    )
