"""The offload of "vLLM v1 Block Manager", and where its copies begin, with its logic as it is."""

import torch

from notebooks.helpers.claims.told import Case, attempt


class Offload:
    """Ids of host blocks go on where the device's end; both free lists are popped from the end. A copy has only begun
    when offload() returns: copies_end() is the moment at which a GPU would have done it.
    """

    def __init__(self, num_gpu: int, num_cpu: int, row_by_id: bool = False, holds_until_copied: bool = False) -> None:
        self.num_gpu, self.row_by_id, self.holds_until_copied = num_gpu, row_by_id, holds_until_copied
        self.gpu, self.cpu = torch.zeros(num_gpu), torch.zeros(num_cpu)  # a number stands for a block
        self.gpu_free = list(range(num_gpu))
        self.cpu_free = list(range(num_gpu, num_gpu + num_cpu))
        self.pending: list[tuple[torch.Tensor, int]] = []  # (row of the host, block of the device)

    def row(self, cpu_bid: int) -> int:
        if self.row_by_id:  # the mend: a row of the host never changes
            return cpu_bid - self.num_gpu
        return cpu_bid - len(self.gpu_free)  # the fault: it changes with every block that is taken or given back

    def offload(self, gpu_bid: int) -> int:
        cpu_bid = self.cpu_free.pop()
        self.pending.append((self.cpu[self.row(cpu_bid)], gpu_bid))
        if not self.holds_until_copied:  # the fault: the copy has only begun
            self.gpu_free.append(gpu_bid)
        return cpu_bid

    def copies_end(self) -> None:
        for row, gpu_bid in self.pending:
            row.copy_(self.gpu[gpu_bid])
            if self.holds_until_copied:
                self.gpu_free.append(gpu_bid)
        self.pending.clear()


def stored(**mends: bool) -> float:
    """Block 7.0 is offloaded, another takes a block and writes -1.0 to it, the copies end: what the host then has."""
    pools = Offload(8, 4, **mends)
    block = pools.gpu_free.pop()
    pools.gpu[block] = 7.0
    number = pools.offload(block)
    pools.gpu[pools.gpu_free.pop()] = -1.0
    pools.copies_end()
    return pools.cpu[pools.row(number)].item()


def of_offload(num_gpu: int = 8, num_cpu: int = 4) -> list[Case]:
    """The first offload of the text as it is; then with one mend after the other."""
    told = Offload(num_gpu, num_cpu)
    crash = attempt(lambda: told.offload(told.gpu_free.pop()))
    return [
        Case(
            f"The first offload: {num_gpu} blocks on the device, {num_cpu} on the host",
            f"{crash}. The first id of the host is {num_gpu + num_cpu - 1}, and at most {num_gpu - 1} is taken from it",
            "a host block has a number of its own, which is its row",
        ),
        Case(
            "A row for each host block; another takes a device block before the copies end: what is stored of 7?",
            f"{stored(row_by_id=True):g}: the block was given back while its copy was on its way",
            f"{stored(row_by_id=True, holds_until_copied=True):g}: whoever is copied is held; stage 7 stores on the "
            "stream "
            "that computes, so a store comes before the next write",
        ),
    ]


# ---- "vLLM v1 Block Manager": bytes of copies


def offsets(num_blocks: int = 8, layers: int = 4) -> list[tuple[str, int, int, bool]]:
    """For the copy of block 2, in both layouts: pieces, bytes of a piece, and whether the first piece begins at
    `block * bytes of a block`, where a list of pending copies has it begin.
    """
    block_size, heads, dim, found = 16, 8, 128, []
    by_block = torch.empty(num_blocks, layers, 2, block_size, heads, dim, dtype=torch.float16, device="meta")
    by_layer = torch.empty(layers, 2, num_blocks, block_size, heads, dim, dtype=torch.float16, device="meta")
    of_block = by_block[0].nbytes
    for name, part_of in (("[block, layer, ...]", by_block[2]), ("[layer, k or v, block, ...]", by_layer[:, :, 2])):
        pieces = 1 if part_of.is_contiguous() else layers * 2
        starts_there = part_of.storage_offset() * 2 == 2 * of_block
        found.append((name, pieces, of_block // pieces, starts_there))
    return found


def token_bytes_of_a_layer(heads: int = 8, dim: int = 128, itemsize: int = 2) -> int:
    """Keys and values. The table of copies takes 64 KB for it, and 960 KB for 15 slots of 80 layers.

    >>> token_bytes_of_a_layer(), round(15 * 80 * token_bytes_of_a_layer() / 1e6, 1)
    (4096, 4.9)
    """
    return 2 * heads * dim * itemsize
