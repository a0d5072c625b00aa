"""*Memory Pool Management*: its slabs, its paged cache, its shared blocks, its benchmark, and its defragmentation."""

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch

from stages.bench.engines import silent
from stages.bench.texts import Cases, attempt, sequence
from stages.s2_block_manager.block_manager import BlockManager
from stages.s5_cow_sampling.block_manager import BlockManager as SharingManager

KB, MB, GB = 2**10, 2**20, 2**30
BLOCK = 16
PLAN = ((256 * KB, 0.10), (2 * MB, 0.70), (32 * MB, 0.15), (256 * MB, 0.05))  # block size, share of an 80 GB device


class Slab:
    """The text's SlabAllocator: a stack of ids, the highest on top, and the set of those that are held."""

    def __init__(self, num_bytes: int, block_bytes: int, base: int = 0) -> None:
        self.block_bytes, self.base, self.num_blocks = block_bytes, base, num_bytes // block_bytes
        self.free_ids, self.held = list(range(self.num_blocks)), set[int]()

    def allocate(self) -> tuple[int, int]:
        """Return an address and an id."""
        if not self.free_ids:
            raise MemoryError(f"{self.num_blocks} blocks are held, 0 are free")
        block = self.free_ids.pop()
        self.held.add(block)
        return self.base + block * self.block_bytes, block

    def release(self, block: int) -> None:
        if block not in self.held:
            raise ValueError(f"block {block} is not held")
        self.held.remove(block)
        self.free_ids.append(block)


class Slabs:
    """The text's MultiSlabAllocator. A full class borrows from the next larger one."""

    def __init__(self, num_bytes: int = 80 * GB, plan: tuple[tuple[int, float], ...] = PLAN) -> None:
        self.num_bytes, base, self.slabs = num_bytes, 0, dict[int, Slab]()
        for size, share in sorted(plan):
            self.slabs[size] = Slab(int(num_bytes * share), size, base)
            base += int(num_bytes * share)

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
    return Slab(int(80 * GB - weights_gb * GB - 80 * GB * 0.05), 5 * MB).num_blocks


class PagedCache:
    """The text's PagedKVCache."""

    def __init__(self, num_blocks: int) -> None:
        self.slab = Slab(num_blocks, 1)

    def allocate_sequence(self, num_tokens: int) -> list[int]:
        return [self.slab.allocate()[1] for _ in range(-(-num_tokens // BLOCK))]  # an error loses those before it

    def extend_sequence(self, table: list[int], num_new: int) -> None:
        num_held = len(table) * BLOCK  # slots, not tokens: the last block always looks full
        room = -num_held % BLOCK  # so there never is any
        table += self.allocate_sequence(num_new - room)


class Shared:
    """The text's GPUSlabAllocator, without its tensor: a stack with 0 on top, and reference counts."""

    def __init__(self, num_blocks: int) -> None:
        self.free_ids, self.counts = list(range(num_blocks))[::-1], [0] * num_blocks

    def allocate(self, count: int) -> list[int]:
        blocks = [self.free_ids.pop() for _ in range(count)]
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self.counts[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.counts[block] <= 0:
                raise ValueError(f"block {block} is not held")
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free_ids.append(block)

    def copy_on_write(self, block: int) -> int:
        if self.counts[block] == 1:  # 0 is not 1: a free block gets a copy
            return block
        [new] = self.allocate(1)
        self.release([block])
        return new


class Sharing(NamedTuple):
    """What the text's example of a shared prompt holds."""

    held: int
    alone: int
    counts: tuple[int, int, int]  # of a shared block: both requests run, one has ended, both have ended
    left: int  # blocks that are never freed

    @property
    def saved(self) -> float:
        return 1 - self.held / self.alone


def share_a_prompt() -> Sharing:
    """Follow the example: a prompt of 32 blocks, request A with 10 more, and request B."""
    pool = Shared(9830)
    prompt = pool.allocate(32)
    a = pool.share(prompt) + pool.allocate(10)
    b = pool.share(prompt)
    held, counts = 9830 - len(pool.free_ids), [pool.counts[prompt[0]]]
    for blocks in (a, b):
        pool.release(blocks)
        counts.append(pool.counts[prompt[0]])
    return Sharing(held, len(a) + len(b), (counts[0], counts[1], counts[2]), 9830 - len(pool.free_ids))


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


def benchmark(num_operations: int = 10_000) -> tuple[int, int]:
    """Run the loop on the text's 2,048 blocks. Return its allocations and its frees, until one fails."""
    slab, held, allocations, frees = Slab(10 * GB, 5 * MB), list[int](), 0, 0
    for index in benchmark_steps(num_operations):
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


def defragment(pieces: Pieces) -> tuple[Pieces, int]:
    """Compact as the text does. Return the pieces, and the bytes that were copied.

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


def cases() -> Cases:
    sharing, (allocations, frees) = share_a_prompt(), benchmark()
    pieces = {1: (0, 4, torch.full((4,), 1.0)), 3: (8, 4, torch.full((4,), 3.0))}
    (offset, _, threes), copied = defragment(pieces)[0][3], defragment(pieces)[1] // 4
    intact, pool = "intact" if bool((threes == 3).all()) else "lost", Shared(4)
    [block] = pool.allocate(1)
    pool.release([block])
    same, done = pool.copy_on_write(block), allocations + frees
    return {
        "too_large": too_large(),
        "growing": growing(),
        "example": (f"{sharing.held} instead of {sharing.alone}, {sharing.saved:.1%} fewer",),
        "last_owner": (f"{'->'.join(map(str, sharing.counts))}; {sharing.left} blocks stay", last_owner()),
        "free_copy": (f"block {same}, {'still' if same in pool.free_ids else 'not'} on the free stack",),
        "benchmark": (
            f"{done:,}: {allocations:,} allocations, {frees:,} frees; the rate is {10_000 / done:.2f} times too high",
        ),
        "defragment": (f"threes at {offset}, {intact}; {copied} numbers copied to new memory",),
        "setting": (attempt(lambda: operator.attrgetter("set_allocator_settings")(torch.cuda.memory)),),
    }


def too_large() -> tuple[str, str]:
    """Ask for more blocks than there are. Return the free blocks after the error."""
    text, ours = PagedCache(4), BlockManager(4, BLOCK, silent("s2"))
    attempt(lambda: text.allocate_sequence(96))
    attempt(lambda: ours.allocate(sequence("s2", "large", [1] * 96)))
    return f"{len(text.slab.free_ids)}", f"{len(ours.pool.free)}"


def growing() -> tuple[str, str]:
    """Extend a sequence one token at a time, and another one by 12 tokens. Return their blocks."""
    text, ours, seq = PagedCache(64), BlockManager(64, BLOCK, silent("s2")), sequence("s2", "growing", [1])
    singly, at_once = text.allocate_sequence(1), text.allocate_sequence(100)
    ours.allocate(seq)
    for _ in range(32):
        text.extend_sequence(singly, 1)
        seq.token_ids.append(0)
        ours.append_slot(seq)
    text.extend_sequence(at_once, 12)
    return f"{len(singly)}; and {len(at_once)} for 100 tokens and then 12 more", f"{len(seq.block_table)}"


def last_owner() -> str:
    """Let stage 5 share a prompt, and free all owners. Return a shared block's counts, and what stays."""
    manager, seqs = SharingManager(64, BLOCK, silent("s5")), [sequence("s5", name, [1] * 500) for name in "abc"]
    manager.allocate(seqs[0])
    seqs[0].num_computed_tokens, block = 500, seqs[0].block_table[0]
    for seq in seqs[1:]:
        manager.fork(seqs[0], seq)
    counts = [manager.pool.ref_counts[block]]
    for seq in seqs:
        manager.free(seq)
        counts.append(manager.pool.ref_counts[block])
    return f"{'->'.join(map(str, counts))}; {64 - manager.num_free_blocks} stay"
