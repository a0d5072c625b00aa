"""Load or recompute (claim 16), other memories (17), and the tiers of memory (29)."""

from typing import NamedTuple

from matplotlib.figure import Figure

from notebooks.helpers import pictures
from notebooks.helpers.claims.findings import Finding, GpuTable, committed, finding, not_measured, on_gpu, spread
from stages.bench.locality import BLOCK_OF_70B

NUM_BLOCKS, COMPUTED = 256, 4096 / 4000  # of 4,096 tokens; the text's seconds to recompute them
LOADED = NUM_BLOCKS * 0.183e-3  # the text's seconds to load them


class Tier(NamedTuple):
    """A place for blocks: the text's bytes per second, and its milliseconds for a block of 5.24 MB, if any."""

    bytes_per_second: float
    claimed_ms: float | None

    @property
    def ms(self) -> float:
        return BLOCK_OF_70B / self.bytes_per_second * 1000


TIERS = {
    "device memory": Tier(3.35e12, None),
    "NVLink": Tier(450e9, 0.011),
    "network": Tier(50e9, None),
    "PCIe 5": Tier(28e9, 0.183),
    "PCIe 4": Tier(BLOCK_OF_70B / 0.244e-3, 0.244),  # the text gives no speed
    "NVMe": Tier(7e9, 0.731),
}


def draw_tiers() -> Figure:
    """Draw the time of a block of 70B on its way to each tier."""
    fig, (ax,) = pictures.figure("A block of 5.24 MB on its way to each tier, at the text's speeds", height=2.4)
    pictures.costs(ax, {name: 1000 * tier.ms for name, tier in TIERS.items()})
    return fig


def set_up_for_even(num_tokens: int) -> float:
    """Return the seconds of set-up per copy at which the text's two ways would take equally long.

    Each of a block's 80 layers is a copy.
    """
    return (num_tokens / 4096 * (COMPUTED - LOADED)) / (80 * num_tokens / 16)


def link() -> tuple[GpuTable, dict[str, object]] | None:
    """Return the newest pinned and pageable copies on a GPU, of the largest size."""
    table = on_gpu(3, "A copy in one piece") or on_gpu(0, "Pinned memory")
    return (table, list(table.rows.values())[-1]) if table else None


def finding_16() -> Finding:
    here = {n: committed(f"offload.first_token.{n}").text("{:.1f}") for n in (16, 256, 1024)}
    on_link, swaps = not_measured(0), not_measured(5)
    if found := link():
        table, row = found
        speeds = [row[f"{way}_pinned_bytes_per_second"] for way in ("to_device", "to_host")]
        load, store = (NUM_BLOCKS * BLOCK_OF_70B / speed for speed in speeds)
        on_link = (
            f"{table.machine} copies {speeds[0] / 1e9:.1f} GB/s, which makes {1000 * load:.1f} ms and "
            f"{COMPUTED / load:.0f} times, {COMPUTED / (load + store):.0f} with the store"
        )
    if table := on_gpu(5, "Claim 16"):
        ratios = [f"{ratio_of(row)} times at {name}" for name, row in table.rows.items()]
        swaps = f"On {table.machine}, a loaded prefix brings a 1B model's first token earlier: {', '.join(ratios)}"
    return finding(
        16,
        holds_as_worded=round(COMPUTED / LOADED) == 22,
        claimed=COMPUTED / LOADED,
        link=on_link,
        swaps=swaps,
        here=", ".join(f"{text} times at {n:,} tokens" for n, text in here.items()),
        set_up=1e6 * set_up_for_even(256),
        at_32=1000 * NUM_BLOCKS * BLOCK_OF_70B / 32e9,
    )


def ratio_of(row: dict[str, float]) -> str:
    return f"{row['ratio']:.1f} ({row['least']:.1f} to {row['largest']:.1f})"


def finding_17() -> Finding:
    times = {name: committed(f"claims.disk.{name}_ms") for name in ("write", "cold_read", "warm_read")}
    pinned, verdict = not_measured(3), "the ratio is a GPU's"
    if found := link():
        table, row = found
        to_host = row["to_host_pinned_bytes_per_second"] / row["to_host_pageable_bytes_per_second"]
        ratio = spread(row, "pageable_over_pinned")
        speed = row["to_device_pinned_bytes_per_second"] / 1e9
        pinned = f"{ratio.text()} times to {table.machine} and {to_host:.2f} times back, at {speed:.1f} GB/s"
        within = all(2 <= each <= 5 for each in (ratio.value, to_host))
        verdict = f"2-5 times {'holds' if within else 'is near'} on {table.machine}"
    return finding(
        17,
        **{name: t.text("{:.1f}") for name, t in times.items()},
        pinned=pinned,
        pinned_verdict=verdict,
        claimed=BLOCK_OF_70B / 0.73e-3 / 1e9,
        here=BLOCK_OF_70B / (times["cold_read"].value / 1000) / 1e9,
        recomputed=16 / 4000 * 1000,
    )


def finding_29() -> Finding:
    exact = {name: tier for name, tier in TIERS.items() if tier.claimed_ms and name != "PCIe 4"}
    return finding(
        29,
        holds_as_worded=all(0.01 < tier.ms / tier.claimed_ms - 1 < 0.07 for tier in exact.values()),
        times=", ".join(f"{name} {tier.ms:.4f} ms" for name, tier in exact.items()),
        pcie_4=TIERS["PCIe 4"].bytes_per_second / 1e9,
        network=TIERS["network"].ms,
        pcie_5=", ".join(f"{BLOCK_OF_70B / speed / 1e6:.3f} ms at {speed}" for speed in (28, 32, 50)),
    )
