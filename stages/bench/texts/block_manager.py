"""*vLLM v1 Block Manager*: its SelfAttnBlockSpaceManager, fork and copy-on-write."""

import torch

from stages.bench.texts import in_stages
from stages.bench.texts.pools import Stack

BLOCK, NUM_BLOCKS, WATERMARK = 16, 8206, 0.01


class Manager(Stack):
    """The text's manager, which also counts the filled slots of each block."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(num_blocks)
        self.filled, self.num_reserved = [0] * num_blocks, int(num_blocks * WATERMARK)
        self.tables, self.num_copies = dict[int, list[int]](), 0

    def can_allocate(self, num_tokens: int) -> bool:
        return len(self.free_ids) - -(-num_tokens // BLOCK) >= self.num_reserved

    def allocate(self, seq: int, num_tokens: int) -> None:
        self.tables[seq] = table = self.take(-(-num_tokens // BLOCK))
        for block in table:
            self.filled[block] = BLOCK
        self.filled[table[-1]] = num_tokens - BLOCK * (len(table) - 1)

    def append(self, seq: int) -> None:
        """Count a token in the last block, whoever shares it, or take a new one."""
        if self.filled[self.tables[seq][-1]] == BLOCK:
            self.tables[seq] += self.take()
            self.filled[self.tables[seq][-1]] = 0
        self.filled[self.tables[seq][-1]] += 1

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = self.share(self.tables[parent])

    def free(self, seq: int) -> None:
        self.release(self.tables.pop(seq))

    def copy_if_shared(self, seq: int, index: int) -> None:
        old = self.tables[seq][index]
        if self.counts[old] > 1:
            [new] = self.take()
            self.filled[new], self.tables[seq][index] = self.filled[old], new
            self.counts[old], self.num_copies = self.counts[old] - 1, self.num_copies + 1


def pressure_of(num_cached: int) -> float:
    """Return the text's memory pressure in its healthy state, with cached blocks counted as free."""
    return 1 - (424 + 82 + num_cached) / NUM_BLOCKS


def copied(cache: torch.Tensor) -> int:
    """Copy block 0 of four, 8 bytes, to block 1, as execute_pending_copies does. Return how many numbers arrive."""
    numbers = cache.view(4, -1)
    numbers[0] = 1
    cache[8:16].copy_(cache[:8][: len(cache[8:16])])
    return int(numbers[1].sum())


# ---- cases


def appended() -> int:
    text = Manager()
    text.allocate(0, BLOCK)
    for _ in range(1600):
        text.append(0)
    return len(text.tables[0]) - 1


def forked() -> tuple[str, str]:
    text, ours = Manager(64), in_stages.forked_and_appended(20, num_forks=1)
    text.allocate(0, 20)
    text.fork(0, 1)
    for seq in (0, 1):
        text.append(seq)
    last, own = {table[-1] for table in text.tables.values()}, {seq.block_table[-1] for seq in ours}
    filled = " and ".join(f"{seq.num_tokens - BLOCK}" for seq in ours)
    return f"{text.filled[min(last)]}, in {len(last)} block", f"{filled}, in {len(own)} blocks"


def watermark() -> int:
    return Manager().num_reserved


def beams() -> int:
    text = Manager(64)
    text.allocate(0, 40)
    for child in (1, 2, 3):
        text.fork(0, child)
    for beam in range(4):
        text.copy_if_shared(beam, 2)
    return text.num_copies


def sliced() -> str:
    flat, blocks = copied(torch.zeros(32, dtype=torch.uint8)), copied(torch.zeros(4, 8, dtype=torch.uint8))
    fp16 = copied(torch.zeros(16, dtype=torch.float16))
    return f"{flat} of 8 (flat bytes), {blocks} of 8 (blocks of bytes), {fp16} of 4 (flat fp16)"


def pressure() -> str:
    return f"{pressure_of(0):.3f}, or {pressure_of(1500):.3f} if cached blocks count as free"
