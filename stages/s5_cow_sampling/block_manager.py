"""BlockManager: who holds which blocks of the pool. A sequence holds as many as its tokens fill, wherever they lie.

    block size 4     tokens of A       tokens of B       block tables
                     0  1  2  3  4     0  1  2           A: [3, 0]   token 4 is in block 0, offset 0
                                                         B: [1]      token 2 is in block 1, offset 2
    blocks           0: A4 .. .. ..    1: B0 B1 B2 ..    2: free     3: A0 A1 A2 A3

The idea is an operating system's: fixed pages and a table for each process, so that no slot is lost between blocks, and
at most block_size - 1 in a sequence's last one (Kwon et al. 2023, arXiv:2309.06180).
"""

from .block_pool import BlockPool
from .kv_cache import BlockCopy, PoolReport
from .sequence import Sequence


class BlockManager:
    """A block table for each sequence: allocate() takes blocks for the tokens there are, append_slot() for one more."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._pool = BlockPool(num_blocks)
        self._holders: dict[Sequence, None] = {}  # in order of admission
        self._peak = self.report()

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    def can_allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """Whether allocate() would succeed and leave `spare` blocks free."""
        return cdiv(seq.num_tokens, self.block_size) + spare <= self.num_free_blocks

    def allocate(self, seq: Sequence) -> None:
        """Take blocks for all tokens that `seq` has now. It is a holder then, and was none before: that is asserted.

        Raises NoFreeBlocks, and changes nothing, if too few are free.
        """
        assert seq not in self._holders, f"request {seq.request_id} holds blocks already"
        seq.block_table = self._pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size))
        self._holders[seq] = None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` begins with what `parent` has computed: it holds those blocks too, and nothing is copied.

        It is a holder then, and was none before: asserted, "request 7 holds blocks already".
        """
        assert child not in self._holders, f"request {child.request_id} holds blocks already"
        child.block_table = parent.block_table[: cdiv(parent.num_computed_tokens, self.block_size)]
        child.num_computed_tokens = parent.num_computed_tokens
        self._pool.touch(child.block_table)
        self._holders[child] = None

    def can_append(self, seq: Sequence) -> bool:
        """Whether append_slot() would succeed."""
        return not (self._needs_block(seq) or self._is_shared(seq)) or self.num_free_blocks > 0

    def append_slot(self, seq: Sequence) -> BlockCopy | None:
        """Make sure of a slot for the last token of `seq` in a block that it alone holds.

        It takes a block if all of its blocks are full, and returns None. It takes one too if others hold its last
        block, and returns the copy to make before anything is written. Raises NoFreeBlocks, and changes nothing, if
        none is free.
        """
        assert seq in self._holders, f"request {seq.request_id} was never allocated"
        if self._needs_block(seq):
            seq.block_table += self._pool.get_new_blocks(1)
        elif self._is_shared(seq):
            [target] = self._pool.get_new_blocks(1)
            source = seq.block_table[-1]
            self._pool.free_blocks([source])  # the last holder will find it alone, and writes in place
            seq.block_table[-1] = target
            return BlockCopy(source, target)
        return None

    def free(self, seq: Sequence) -> None:
        """Give all blocks of `seq` back: it is no holder then, and a block that others hold stays theirs.

        The peak is noted before. Raises ValueError, and changes nothing, if it is none ("request 7 holds no blocks"),
        or if its table names a block that is not held.
        """
        if seq not in self._holders:
            raise ValueError(f"request {seq.request_id} holds no blocks")
        self._peak = self.peak
        self._pool.free_blocks(seq.block_table)
        del self._holders[seq]
        seq.block_table = []

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held. Less is held only after a free(): it is enough to look before each."""
        is_less = (self.num_blocks - self.num_free_blocks) * self.block_size < self._peak.held
        return self._peak if is_less else max(self._peak, self.report(), key=lambda each: (each.held, each.used))

    def report(self) -> PoolReport:
        """What of the pool is promised, held and used now."""
        seqs = self._holders
        return PoolReport(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            promised=self.block_size * sum(cdiv(seq.max_num_tokens, self.block_size) for seq in seqs),
            tables=tuple((tuple(seq.block_table), seq.num_computed_tokens) for seq in seqs),
        )

    def check_integrity(self) -> None:
        """Each block is free or in as many tables as its count says, and no table is longer than its tokens need."""
        self._pool.check_integrity([block for seq in self._holders for block in seq.block_table])
        for seq in self._holders:
            assert len(seq.block_table) <= cdiv(seq.num_tokens, self.block_size), f"{seq.num_tokens}: {seq.block_table}"
            assert seq.num_computed_tokens <= len(seq.block_table) * self.block_size

    def _is_shared(self, seq: Sequence) -> bool:
        """Whether others hold its last block too."""
        return self._pool.ref_counts[seq.block_table[-1]] > 1

    def _needs_block(self, seq: Sequence) -> bool:
        """Whether its last token has no slot in the blocks that it holds."""
        return seq.num_tokens > len(seq.block_table) * self.block_size


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> [cdiv(num_tokens, 4) for num_tokens in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-a // b)
