"""Load or recompute (claim 16), other memories (17), and the tiers of memory (29)."""

from matplotlib.figure import Figure

from notebooks.helpers import pictures
from notebooks.helpers.claims.findings import Finding, Rows, committed, finding, not_measured, of_gpu, on_gpu, spread
from stages.bench.locality import BLOCK_OF_70B

NUM_BLOCKS, COMPUTED = 256, 4096 / 4000  # of 4,096 tokens; the text's seconds to recompute them
LOADED = NUM_BLOCKS * 0.183e-3  # the text's seconds to load them
CLAIMED_MS = {"NVLink": 0.011, "PCIe 5": 0.183, "NVMe": 0.731}  # the text's, for a block of 5.24 MB
PCIE_4 = BLOCK_OF_70B / 0.244e-3  # the text gives this time, and no speed
SPEEDS = {"device memory": 3.35e12, "NVLink": 450e9, "network": 50e9, "PCIe 5": 28e9, "PCIe 4": PCIE_4, "NVMe": 7e9}
MS = {name: BLOCK_OF_70B / speed * 1000 for name, speed in SPEEDS.items()}  # of a block, at the text's bytes per second


def draw_tiers() -> Figure:
    """Draw the time of a block of 70B on its way to each tier."""
    fig, (ax,) = pictures.figure("A block of 5.24 MB on its way to each tier, at the text's speeds", height=2.4)
    pictures.costs(ax, {name: 1000 * ms for name, ms in MS.items()})
    return fig


def set_up_for_even(num_tokens: int) -> float:
    """Return the seconds of set-up per copy at which the text's two ways would take equally long.

    Each of a block's 80 layers is a copy.
    """
    return (num_tokens / 4096 * (COMPUTED - LOADED)) / (80 * num_tokens / 16)


def link() -> tuple[int, str]:
    """Return the part and the title of the copies on a GPU. Their last row is of the largest size."""
    return (3, "A copy in one piece") if on_gpu(3, "A copy in one piece") else (0, "Pinned memory")


def finding_16() -> Finding:
    def pinned(machine: str, rows: Rows) -> str:
        speeds = [[*rows.values()][-1][f"to_{way}_pinned_bytes_per_second"] for way in ("device", "host")]
        load, store = (NUM_BLOCKS * BLOCK_OF_70B / speed for speed in speeds)
        return (
            f"{machine} copies {speeds[0] / 1e9:.1f} GB/s, which makes {1000 * load:.1f} ms and "
            f"{COMPUTED / load:.0f} times, {COMPUTED / (load + store):.0f} with the store"
        )

    def prefixes(machine: str, rows: Rows) -> str:
        shown = ", ".join(f"{spread(row, 'ratio'):.1f} times at {name}" for name, row in rows.items())
        return f"On {machine}, a loaded prefix brings a 1B model's first token earlier: {shown}"

    return finding(
        16,
        holds_as_worded=round(COMPUTED / LOADED) == 22,
        claimed=COMPUTED / LOADED,
        link=of_gpu(*link(), pinned),
        swaps=of_gpu(5, "Claim 16", prefixes),
        set_up=1e6 * set_up_for_even(256),
        at_32=1000 * NUM_BLOCKS * BLOCK_OF_70B / 32e9,
    )


def finding_17() -> Finding:
    pinned, verdict = not_measured(3), "the ratio is a GPU's"
    if table := on_gpu(*link()):
        *_, row = table.rows.values()
        back = row["to_host_pinned_bytes_per_second"] / row["to_host_pageable_bytes_per_second"]
        ratio, speed = spread(row, "pageable_over_pinned"), row["to_device_pinned_bytes_per_second"] / 1e9
        pinned = f"{ratio} times to {table.machine} and {back:.2f} times back, at {speed:.1f} GB/s"
        within = all(2 <= each <= 5 for each in (ratio.value, back))
        verdict = f"2-5 times {'holds' if within else 'is near'} on {table.machine}"
    return finding(
        17,
        pinned=pinned,
        pinned_verdict=verdict,
        claimed=BLOCK_OF_70B / 0.73e-3 / 1e9,
        here=BLOCK_OF_70B / (committed("claims.disk.cold_read_ms").value / 1000) / 1e9,
        recomputed=16 / 4000 * 1000,
    )


def finding_29() -> Finding:
    ms = {name: MS[name] for name in CLAIMED_MS}
    return finding(
        29,
        holds_as_worded=all(0.01 < ms[name] / claimed - 1 < 0.07 for name, claimed in CLAIMED_MS.items()),
        times=", ".join(f"{name} {time:.4f} ms" for name, time in ms.items()),
        pcie_4=PCIE_4 / 1e9,
        network=MS["network"],
        pcie_5=", ".join(f"{BLOCK_OF_70B / speed / 1e6:.3f} ms at {speed}" for speed in (28, 32, 50)),
    )
