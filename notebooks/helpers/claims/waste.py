"""The last block: what it leaves empty (claims 3 and 7), and what a block weighs (4)."""

import random
import statistics

import torch

from notebooks.helpers.claims.reservations import CONFIG
from notebooks.helpers.claims.table import BLOG, LAYOUT, POINTER, SLABS, Finding
from stages.bench import replay, workloads
from stages.s2_block_manager.kv_cache import KVCache
from stages.s2_block_manager.llama import ModelConfig

CLAIMED = {8: 0.03, 16: 0.06, 32: 0.12, 64: 0.24}
AT_WORST = {8: 0.4375, 16: 0.4688, 32: 0.4844, 64: 0.4922}
SHAPES = {  # vocabulary, hidden, MLP, layers, heads, KV heads, head size; what the text says of a block, in MB
    "Llama-2-7B": (ModelConfig(32_000, 4096, 11_008, 32, 32, 32, 128), 8.39),
    "Llama-2-13B": (ModelConfig(32_000, 5120, 13_824, 40, 40, 40, 128), 13.11),
    "Llama-2-70B": (ModelConfig(32_000, 8192, 28_672, 80, 64, 8, 128), 5.24),
    "Mixtral-8x7B": (ModelConfig(32_000, 4096, 14_336, 32, 32, 8, 128), 2.10),
    "Llama-3.1-405B": (ModelConfig(128_256, 16_384, 53_248, 126, 128, 8, 128), 8.26),
}


def block_bytes(shape: ModelConfig, block_size: int = 16, dtype: torch.dtype = torch.float16) -> int:
    """What stage 2's own pool of one block takes. (Device "meta" holds no memory.)"""
    return KVCache(shape, 1, block_size, dtype, torch.device("meta")).blocks.nbytes


def length_for(share: float, block_size: int) -> float:
    """The text length at which blocks of that size leave this share empty: (B - 1) / 2 slots on average.

    >>> round(length_for(0.06, 16))
    118
    """
    return (block_size - 1) / 2 * (1 - share) / share


def finding_3(num_requests: int = 400) -> Finding:
    ends = [request.num_tokens for request in workloads.traffic(num_requests, seed=1)]
    report = replay.in_blocks(CONFIG, ends, 16)
    used, slots = report.used / report.held, report.wasted / num_requests
    of_48_gb = 76 * 7.5 / 16 * block_bytes(SHAPES["Llama-2-70B"][0]) / 48e9
    holds = abs(used - 0.96) < 0.02 and slots <= 8
    return Finding(
        3,
        "blocks: about 96% used, at most half a block a sequence empty on average; 0.39% of 48 GB for 76 sequences of "
        "Llama-70B",
        (BLOG, SLABS),
        f"{num_requests} texts of the usual traffic (mean {statistics.mean(ends):.0f} tokens) in stage 2's pool; "
        "arithmetic",
        f"{used:.1%} of what is held, {slots:.1f} of 16 slots empty a sequence; {of_48_gb:.2%} of 48 GB, of texts of "
        f"{length_for(0.0039, 16):,.0f} tokens",
        ("holds" if holds else "does not hold") + "; 0.39% is right where the pool is full of such long texts",
    )


def finding_4() -> Finding:
    weights = {name: block_bytes(shape) / 1e6 for name, (shape, _) in SHAPES.items()}
    right = sum(abs(weights[name] - told) < 0.006 for name, (_, told) in SHAPES.items())
    return Finding(
        4,
        "a block of 16 tokens in fp16: 8.39 MB (7B), 13.11 MB (13B), 5.24 MB (70B), 2.10 MB (8 KV heads, 32 layers), "
        "8.26 MB (405B)",
        (POINTER,),
        "the bytes of stage 2's own pool of one block, for the shapes of the five models' config.json",
        ", ".join(f"{name} {mb:.2f} MB" for name, mb in weights.items()),
        f"{right} of {len(SHAPES)} hold: layers times KV heads decide, not parameters",
    )


def finding_7() -> Finding:
    lengths = [length_for(share, block) for block, share in CLAIMED.items()]
    rng = random.Random(0)
    drawn = [rng.randint(1, 2 * round(statistics.mean(lengths)) - 1) for _ in range(400)]
    reports = {block: replay.in_blocks(CONFIG, drawn, block) for block in CLAIMED}
    one_block = {block: replay.in_blocks(CONFIG, range(1, block + 1), block) for block in CLAIMED}
    mean = {block: report.wasted / report.held for block, report in one_block.items()}
    worst = {block: replay.in_blocks(CONFIG, [1], block).wasted / block for block in CLAIMED}
    is_mean = all(abs(mean[block] - AT_WORST[block]) < 0.001 for block in AT_WORST)
    return Finding(
        7,
        "blocks of 8 / 16 / 32 / 64 tokens waste 3 / 6 / 12 / 24%; at worst 43.75 / 46.88 / 48.44 / 49.22%",
        (LAYOUT, POINTER),
        "the length at which each share is right, worked out and counted; texts of 1 to B tokens, and of one token",
        f"right for texts of {min(lengths):.0f} to {max(lengths):.0f} tokens (counted: "
        f"{' / '.join(f'{r.wasted / r.held:.0%}' for r in reports.values())}); texts of 1 to B tokens waste "
        f"{' / '.join(f'{x:.2%}' for x in mean.values())} on average, one token "
        f"{' / '.join(f'{x:.1%}' for x in worst.values())}",
        f"the first row is right near {statistics.mean(lengths):.0f} tokens and nowhere else; the second is "
        + ("the mean of the last block, not the worst" if is_mean else "neither mean nor worst"),
    )
