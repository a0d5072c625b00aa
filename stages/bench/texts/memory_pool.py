"""*Memory Pool Management*: its slabs, its paged cache, its shared blocks, its benchmark, and its defragmentation."""

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch

from stages.bench.texts import attempt, in_stages, sequence
from stages.bench.texts.pools import Stack

KB, MB, GB = 2**10, 2**20, 2**30
BLOCK = 16
PLAN = ((256 * KB, 0.10), (2 * MB, 0.70), (32 * MB, 0.15), (256 * MB, 0.05))  # block size, share of an 80 GB device


class Slab:
    """The text's SlabAllocator: a stack of ids, the highest on top, and the set of those that are held."""

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        self.block_bytes, self.num_blocks = block_bytes, num_bytes // block_bytes
        self.free_ids, self.held = list(range(self.num_blocks)), set[int]()

    def allocate(self) -> tuple[int, int]:
        """Return an address and an id."""
        block = self.free_ids.pop()
        self.held.add(block)
        return block * self.block_bytes, block

    def release(self, block: int) -> None:
        if block not in self.held:
            raise ValueError(f"block {block} is not held")
        self.held.remove(block)
        self.free_ids.append(block)


class Slabs:
    """The text's MultiSlabAllocator. A full class borrows from the next larger one."""

    def __init__(self, num_bytes: int = 80 * GB, plan: tuple[tuple[int, float], ...] = PLAN) -> None:
        self.num_bytes = num_bytes
        self.slabs = {size: Slab(int(num_bytes * share), size) for size, share in sorted(plan)}

    def allocate(self, num_bytes: int) -> tuple[int, int]:
        """Return the id and the size of a block."""
        for size, slab in self.slabs.items():
            if size >= num_bytes and slab.free_ids:
                return slab.allocate()[1], size
        raise MemoryError(f"no block for {num_bytes:,} bytes")

    def release(self, block: int, size: int) -> None:
        self.slabs[size].release(block)


def num_kv_blocks(weights_gb: int) -> int:
    """Return the blocks of 5 MB that the text's VLLMMemoryManager has on 80 GB, with 5% for activations."""
    return int(80 * GB - weights_gb * GB - 80 * GB * 0.05) // (5 * MB)


class PagedCache(Stack):
    """The text's PagedKVCache."""

    def allocate_sequence(self, num_tokens: int) -> list[int]:
        return self.take(-(-num_tokens // BLOCK))  # an error loses those before it

    def extend_sequence(self, table: list[int], num_new: int) -> None:
        num_held = len(table) * BLOCK  # slots, not tokens: the last block always looks full
        room = -num_held % BLOCK  # so there never is any
        table += self.allocate_sequence(num_new - room)


class Shared(Stack):
    """The text's GPUSlabAllocator, without its tensor: a stack with 0 on top."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.free_ids.reverse()

    def copy_on_write(self, block: int) -> int:
        if self.counts[block] == 1:  # 0 is not 1: a free block gets a copy
            return block
        [new] = self.take()
        self.release([block])
        return new


class Sharing(NamedTuple):
    """The blocks of a shared prompt, and their counts."""

    held: int  # blocks
    without: int  # blocks that would be held without sharing
    counts: list[int]  # of a shared block: while both requests run, when one has ended, and when both have
    never_freed: int  # blocks


def share_a_prompt() -> Sharing:
    """Follow the example: a prompt of 32 blocks, request A with 10 more, and request B."""
    pool = Shared(9830)
    prompt = pool.take(32)
    a, b = pool.share(prompt) + pool.take(10), pool.share(prompt)
    held, counts = 9830 - len(pool.free_ids), [pool.counts[prompt[0]]]
    for blocks in (a, b):
        pool.release(blocks)
        counts.append(pool.counts[prompt[0]])
    return Sharing(held, len(a) + len(b), counts, 9830 - len(pool.free_ids))


# ---- benchmark_allocator


def benchmark_steps(num_operations: int = 10_000) -> Iterator[int | None]:
    """Yield what the text's loop does at each step: the index that it frees, or None to allocate. Nothing is random.

    The last entry fills the gap of a freed one.
    """
    num_held = 0
    for i in range(num_operations):
        if num_held > 100 and i % 3 == 0:
            yield i % num_held
            num_held -= 1
        else:
            yield None
            num_held += 1


def run_benchmark() -> tuple[int, int]:
    """Run the loop on the text's 2,048 blocks. Return its allocations and its frees, until one fails."""
    slab, held, allocations, frees = Slab(10 * GB, 5 * MB), list[int](), 0, 0
    for index in benchmark_steps():
        if index is not None:
            slab.release(held[index])
            held[index] = held[-1]
            held.pop()
            frees += 1
        elif slab.free_ids:
            held.append(slab.allocate()[1])
            allocations += 1
        else:  # the loop ends, and its time is divided by 10,000 all the same
            break
    return allocations, frees


# ---- defragment

Pieces = dict[int, tuple[int, int, torch.Tensor]]  # id: (offset, size, tensor)


def compact(pieces: Pieces) -> tuple[Pieces, int]:
    """Defragment as the text does. Return the pieces, and the bytes that were copied.

    A piece that shifts gets a copy in new memory. Its offset is a number that names no place in any memory.
    """
    new, offset, copied = Pieces(), 0, 0
    for key, (old, size, tensor) in sorted(pieces.items(), key=lambda item: item[1][0]):
        if offset != old:
            tensor, copied = tensor.clone(), copied + tensor.nbytes
        new[key] = offset, size, tensor
        offset += size
    return new, copied


# ---- cases


def too_large() -> tuple[int, int]:
    text = PagedCache(4)
    attempt(lambda: text.allocate_sequence(96))
    return len(text.free_ids), in_stages.free_after_refusal()


def growing() -> tuple[str, int]:
    text, ours, seq = PagedCache(64), in_stages.block_manager("s2", 64), sequence("s2", "growing", [1])
    singly, at_once = text.allocate_sequence(1), text.allocate_sequence(100)
    ours.allocate(seq)
    for _ in range(32):
        text.extend_sequence(singly, 1)
        in_stages.append(ours, seq)
    text.extend_sequence(at_once, 12)
    return f"{len(singly)}; and {len(at_once)} for 100 tokens and then 12 more", len(seq.block_table)


def example() -> str:
    held, alone, *_ = share_a_prompt()
    return f"{held} instead of {alone}, {1 - held / alone:.1%} fewer"


def last_owner() -> tuple[str, str]:
    (_, _, shared, stay), (manager, seqs) = share_a_prompt(), in_stages.forked(500, num_forks=2)
    block = seqs[0].block_table[0]
    counts = [manager.pool.ref_counts[block]]
    for seq in seqs:
        manager.free(seq)
        counts.append(manager.pool.ref_counts[block])
    left = manager.num_blocks - manager.num_free_blocks
    return f"{'->'.join(map(str, shared))}; {stay} blocks stay", f"{'->'.join(map(str, counts))}; {left} stay"


def free_copy() -> str:
    pool = Shared(4)
    [block] = pool.take()
    pool.release([block])
    same = pool.copy_on_write(block)
    return f"block {same}, {'still' if same in pool.free_ids else 'not'} on the free stack"


def benchmark() -> str:
    allocations, frees = run_benchmark()
    rate = 10_000 / (allocations + frees)
    return (
        f"{allocations + frees:,}: {allocations:,} allocations, {frees:,} frees; the rate is {rate:.2f} times too high"
    )


def defragment() -> str:
    pieces, copied = compact({1: (0, 4, torch.full((4,), 1.0)), 3: (8, 4, torch.full((4,), 3.0))})
    offset, _, threes = pieces[3]
    intact = "intact" if bool((threes == 3).all()) else "lost"
    return f"threes at {offset}, {intact}; {copied // 4} numbers copied to new memory"


def setting() -> str:
    return attempt(lambda: operator.attrgetter("set_allocator_settings")(torch.cuda.memory))
