"""Load or compute again (claim 16), and other memories: pinned, pageable, a disk (17)."""

from notebooks.helpers.claims.table import BLOG, POINTER, Finding, committed, under
from notebooks.helpers.s7 import Machine
from stages.bench.locality import BLOCK_OF_70B

OF_70B = BLOCK_OF_70B // 16  # bytes a token
TOLD = Machine("70B, as told", 4096 * OF_70B / 0.0468, 4096 / 1.024, OF_70B)
GPU = Machine("H200, 8B", 64e9, 0.5 * 790e12 / (2 * 8.0e9), 2 * 32 * 8 * 128 * 2)  # worked out, not measured
SLOW = Machine("H200, 8B, link of 2 GB/s", 2e9, GPU.tokens_per_second, GPU.bytes_per_token)


def set_up_for_even(num_tokens: int) -> float:
    """Seconds of set-up for each transfer that would make the text's two ways equally long at so many tokens, if each
    of a block's 80 layers is a transfer, out and in.
    """
    compute = num_tokens / TOLD.tokens_per_second
    move = 2 * num_tokens * OF_70B / TOLD.bytes_per_second
    return (compute - move) / (2 * 80 * num_tokens / 16)


def finding_16() -> Finding:
    here = {n: committed(f"offload.first_token.{n}").text("{:.1f}") for n in (16, 256, 1024)}
    measured = ", ".join(f"{text} times at {n:,} tokens" for n, text in here.items())
    return Finding(
        16,
        "swapping 4,096 tokens takes 46.8 ms, computing them again 1,024 ms: swap wins 22x; below about 256 tokens "
        "recompute can be cheaper (the set-up of a DMA); a table of the same text says that swap always wins",
        (POINTER, BLOG),
        "their own times, both ways; the first token of a prompt whose beginning is on the host, loaded or computed "
        "again; "
        "two machines worked out",
        f"a load is {TOLD.ratio:.0f} times as fast by their own times, with its store {TOLD.ratio / 2:.0f} times; here "
        f"{measured}; a set-up would have to take {1e6 * set_up_for_even(256):.0f} us a transfer to make it even at "
        "256 tokens, with a transfer for each layer of a block, out and in; an H200 with a link of 64 GB/s "
        f"{GPU.ratio:.1f} times, with 2 GB/s {SLOW.ratio:.1f} times",
        "the host wins where the link is fast: by 22 in their numbers, by 11 if the store is counted too, which is "
        "paid whether or not the block comes back; a set-up does not turn it around, a slow link does: refuted that "
        "it always wins. On a GPU: make gpu PART=5",
    )


def finding_17() -> Finding:
    write, cold, warm = (committed(f"claims.disk.{name}_ms") for name in ("write", "cold_read", "warm_read"))
    pinned = committed("claims.copies.pageable_over_pinned")
    on_gpu = f"{pinned.text()} times" if under("claims.copies") else "not measured: there was no GPU"
    return Finding(
        17,
        "pinned memory copies 2-5x faster than pageable; a disk takes 0.73 ms for a block of 5.24 MB",
        (POINTER,),
        "32 blocks of 5.24 MB written and synced, read after the system forgot them, read again; copies to a GPU",
        f"a block: written {write.text('{:.1f}')} ms, read {cold.text('{:.1f}')} ms, from the system's cache "
        f"{warm.text('{:.1f}')} ms; pinned: {on_gpu}",
        f"0.73 ms is {BLOCK_OF_70B / 0.73e-3 / 1e9:.1f} GB/s, a fast disk alone in its machine; this one reads "
        f"{BLOCK_OF_70B / (cold.value / 1000) / 1e9:.1f} GB/s, and still a block computed again costs more "
        f"({16 / TOLD.tokens_per_second * 1000:.0f} ms by the text's prefill). Pinned: make gpu PART=3",
    )
