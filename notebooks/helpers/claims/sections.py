"""All findings, by section of claims.ipynb."""

from collections.abc import Callable

from notebooks.helpers import size
from notebooks.helpers.claims import (
    attention,
    block_pools,
    blocks,
    caching,
    contiguous,
    host_memory,
    paging,
    preemption,
    sharing,
    slabs,
)
from notebooks.helpers.claims.findings import Finding

SECTIONS: dict[str, tuple[Callable[[], Finding], ...]] = {
    "one piece": (
        lambda: contiguous.finding_1(contiguous.shares_by_policy(size(1500, 400))),
        lambda: contiguous.finding_2(size(20, 2)),
        contiguous.finding_23,
    ),
    "blocks": (
        blocks.finding_3,
        blocks.finding_4,
        blocks.finding_7,
        lambda: contiguous.finding_20(*contiguous.in_flight(size(1200, 400))),
        blocks.finding_25,
        blocks.finding_26,
        blocks.finding_30,
    ),
    "slabs": (lambda: slabs.finding_6(size(5, 1)), caching.finding_24),
    "bookkeeping": (
        block_pools.finding_5,
        block_pools.finding_21,
        lambda: block_pools.finding_31(block_pools.recently_written()),
        block_pools.finding_11,
        block_pools.finding_22,
    ),
    "attention": (attention.finding_9, paging.finding_10, attention.finding_18, attention.finding_34),
    "steps": (paging.finding_28, lambda: attention.roofline()[1], attention.finding_33, paging.finding_27),
    "preemption": (preemption.finding_8, preemption.finding_32),
    "sharing": (sharing.finding_12, sharing.finding_13, sharing.finding_14, sharing.finding_15),
    "tiers": (host_memory.finding_16, host_memory.finding_17, host_memory.finding_29),
}


def findings(*names: str) -> list[Finding]:
    """Return the findings of these sections, by default of all."""
    return [find() for name in names or SECTIONS for find in SECTIONS[name]]
