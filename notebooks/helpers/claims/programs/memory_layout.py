"""*PagedAttention: memory layout*: reference counts of a fork."""

from notebooks.helpers.claims.programs import Case, sequence
from stages.bench.engines import silent
from stages.s5_cow_sampling.block_manager import BlockManager


class Forks:
    """The text's pool with reference counts."""

    def __init__(self, num_blocks: int) -> None:
        self.free, self.ref_counts = list(range(num_blocks)), [0] * num_blocks
        self.tables: dict[str, list[int]] = {}

    def allocate(self, name: str) -> None:
        self.tables[name] = [self.free.pop()]  # its count stays 0

    def fork(self, parent: str, child: str) -> None:
        self.tables[child] = list(self.tables[parent])
        for block in self.tables[child]:
            self.ref_counts[block] += 1

    def must_copy(self, name: str) -> bool:
        return self.ref_counts[self.tables[name][-1]] > 1


def cases() -> list[Case]:
    text = Forks(4)
    text.allocate("parent")
    text.fork("parent", "child")
    manager, seqs = BlockManager(4, 16, silent("s5")), [sequence("s5", name, [1] * 5) for name in ("parent", "child")]
    manager.allocate(seqs[0])
    seqs[0].num_computed_tokens = 5
    for seq in seqs:
        seq.token_ids.append(1)
    manager.fork(*seqs)
    ours = [manager.append_slot(seq) is not None for seq in seqs]
    return [
        Case(
            "A parent and its fork share a block. The parent writes to it, then the child. Does each copy it first?",
            f"parent {text.must_copy('parent')}, child {text.must_copy('child')}: both write to the same slot",
            f"parent {ours[0]}, child {ours[1]}",
        )
    ]
