"""Load or recompute (claim 16), and other memories: pinned, pageable, a disk (17)."""

from notebooks.helpers.claims.findings import Finding, committed, finding, under
from notebooks.helpers.s7 import GPU, SLOW_LINK, Machine
from stages.bench.locality import BLOCK_OF_70B

TOKEN_OF_70B = BLOCK_OF_70B // 16  # bytes
CLAIMED = Machine("70B, as claimed", 4096 * TOKEN_OF_70B / 0.0468, 4096 / 1.024, TOKEN_OF_70B)


def set_up_for_even(num_tokens: int) -> float:
    """Return the seconds of set-up per transfer at which the text's two ways would take equally long.

    Each of a block's 80 layers is a transfer, out and in.
    """
    compute = num_tokens / CLAIMED.tokens_per_second
    move = 2 * num_tokens * TOKEN_OF_70B / CLAIMED.bytes_per_second
    return (compute - move) / (2 * 80 * num_tokens / 16)


def finding_16() -> Finding:
    here = {n: committed(f"offload.first_token.{n}").text("{:.1f}") for n in (16, 256, 1024)}
    return finding(
        16,
        holds_as_worded=SLOW_LINK.ratio < 1 < GPU.ratio and round(CLAIMED.ratio) == 22,
        claimed=CLAIMED.ratio,
        here=", ".join(f"{text} times at {n:,} tokens" for n, text in here.items()),
        set_up=1e6 * set_up_for_even(256),
        prefill=GPU.tokens_per_second,
        fast=GPU.ratio,
        slow=SLOW_LINK.ratio,
    )


def finding_17() -> Finding:
    times = {name: committed(f"claims.disk.{name}_ms") for name in ("write", "cold_read", "warm_read")}
    pinned = committed("claims.copies.pageable_over_pinned").text()
    return finding(
        17,
        holds_as_worded=times["cold_read"].value < 1000 * 16 / CLAIMED.tokens_per_second,
        **{name: t.text("{:.1f}") for name, t in times.items()},
        pinned=f"{pinned} times" if under("claims.copies") else "not measured, for lack of a GPU",
        claimed=BLOCK_OF_70B / 0.73e-3 / 1e9,
        here=BLOCK_OF_70B / (times["cold_read"].value / 1000) / 1e9,
        recomputed=16 / CLAIMED.tokens_per_second * 1000,
    )
