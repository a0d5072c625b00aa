"""*vLLM v1 Block Manager*: its SelfAttnBlockSpaceManager, fork and copy-on-write."""

import torch

from stages.bench.engines import silent
from stages.bench.texts import Cases, sequence
from stages.s5_cow_sampling.block_manager import BlockManager

BLOCK, NUM_BLOCKS, WATERMARK = 16, 8206, 0.01


class Manager:
    """The text's manager: a stack of ids, the highest on top, and each block's count and filled slots."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.free_ids, self.counts, self.filled = list(range(num_blocks)), [0] * num_blocks, [0] * num_blocks
        self.tables, self.copies = dict[int, list[int]](), list[tuple[int, int]]()
        self.num_reserved = int(num_blocks * WATERMARK)

    def can_allocate(self, num_tokens: int) -> bool:
        return len(self.free_ids) - -(-num_tokens // BLOCK) >= self.num_reserved

    def allocate(self, seq: int, num_tokens: int) -> None:
        needed = -(-num_tokens // BLOCK)
        if len(self.free_ids) < needed:
            raise MemoryError(f"{needed} blocks are needed, {len(self.free_ids)} are free")
        table = [self.free_ids.pop() for _ in range(needed)]
        for block in table:
            self.counts[block], self.filled[block] = 1, BLOCK
        self.filled[table[-1]] = num_tokens - BLOCK * (needed - 1)
        self.tables[seq] = table

    def append(self, seq: int) -> int | None:
        """Count a token in the last block, whoever shares it, or take a new one and return it."""
        last = self.tables[seq][-1]
        if self.filled[last] < BLOCK:
            self.filled[last] += 1
            return None
        if not self.free_ids:
            raise MemoryError("no block is free")
        new = self.free_ids.pop()
        self.counts[new], self.filled[new] = 1, 1
        self.tables[seq].append(new)
        return new

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = list(self.tables[parent])
        for block in self.tables[child]:
            self.counts[block] += 1

    def free(self, seq: int) -> None:
        for block in self.tables.pop(seq):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.filled[block] = 0
                self.free_ids.append(block)

    def copy_if_shared(self, seq: int, index: int) -> int:
        old = self.tables[seq][index]
        if self.counts[old] == 1:
            return old
        new = self.free_ids.pop()
        self.copies.append((old, new))
        self.counts[new], self.filled[new] = 1, self.filled[old]
        self.tables[seq][index] = new
        self.counts[old] -= 1
        return new


def copied(cache: torch.Tensor, block_bytes: int) -> int:
    """Copy block 0 of four to block 1, as execute_pending_copies does. Return how many of its numbers arrive."""
    source = cache.view(-1)[: cache.numel() // 4].fill_(1)
    cache[block_bytes : 2 * block_bytes].copy_(cache[:block_bytes][: len(cache[block_bytes : 2 * block_bytes])])
    return int(cache.view(-1)[len(source) : 2 * len(source)].sum())


def pressure(num_cached: int) -> float:
    """Return the text's memory pressure in its healthy state, with cached blocks counted as free."""
    return 1 - (424 + 82 + num_cached) / NUM_BLOCKS


def forked() -> tuple[str, str]:
    """Fork a sequence of 20 tokens, and append to both. Return the last block's filled slots."""
    text, ours = Manager(64), BlockManager(64, BLOCK, silent("s5"))
    a, b = (sequence("s5", name, [1] * 20) for name in "ab")
    text.allocate(0, 20)
    text.fork(0, 1)
    ours.allocate(a)
    a.num_computed_tokens = 20
    ours.fork(a, b)
    for number, seq in enumerate((a, b)):
        text.append(number)
        seq.token_ids.append(1)
        ours.append_slot(seq)
    shared = {text.tables[0][-1], text.tables[1][-1]}, {a.block_table[-1], b.block_table[-1]}
    filled = " and ".join(f"{seq.num_tokens - BLOCK}" for seq in (a, b))
    return f"{text.filled[min(shared[0])]}, in {len(shared[0])} block", f"{filled}, in {len(shared[1])} blocks"


def cases() -> Cases:
    text, beams = Manager(), Manager(64)
    text.allocate(0, BLOCK)
    taken = sum(text.append(0) is not None for _ in range(1600))
    beams.allocate(0, 40)
    for child in (1, 2, 3):
        beams.fork(0, child)
    for beam in range(4):
        beams.copy_if_shared(beam, 2)
    arrived = {
        "8 (flat bytes)": copied(torch.zeros(4 * 8, dtype=torch.uint8), 8),
        "8 (blocks of bytes)": copied(torch.zeros(4, 8, dtype=torch.uint8), 8),
        "4 (flat fp16)": copied(torch.zeros(4 * 4, dtype=torch.float16), 8),
    }
    return {
        "appended": (f"{taken}",),
        "forked": forked(),
        "watermark": (f"{Manager().num_reserved}",),
        "beams": (f"{len(beams.copies)}",),
        "sliced": (", ".join(f"{count} of {layout}" for layout, count in arrived.items()),),
        "pressure": (f"{pressure(0):.3f}, or {pressure(1500):.3f} if cached blocks count as free",),
    }
