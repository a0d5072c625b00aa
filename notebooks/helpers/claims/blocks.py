"""The last block and what it leaves empty (claims 3 and 7), the bytes of a block (4)."""

import random
import statistics

import torch

from notebooks.helpers.claims.contiguous import CONFIG
from notebooks.helpers.claims.findings import Finding, committed, finding, in_words
from stages.bench import replay, workloads
from stages.s2_block_manager.kv_cache import KVCache
from stages.s2_block_manager.llama import ModelConfig

CLAIMED = {8: 0.03, 16: 0.06, 32: 0.12, 64: 0.24}
AT_WORST = (0.4375, 0.4688, 0.4844, 0.4922)
MODELS = {  # vocabulary, hidden, MLP, layers, heads, KV heads, head size; the text's MB of a block
    "Llama-2-7B": (ModelConfig(32_000, 4096, 11_008, 32, 32, 32, 128), 8.39),
    "Llama-2-13B": (ModelConfig(32_000, 5120, 13_824, 40, 40, 40, 128), 13.11),
    "Llama-2-70B": (ModelConfig(32_000, 8192, 28_672, 80, 64, 8, 128), 5.24),
    "Mixtral-8x7B": (ModelConfig(32_000, 4096, 14_336, 32, 32, 8, 128), 2.10),
    "Llama-3.1-405B": (ModelConfig(128_256, 16_384, 53_248, 126, 128, 8, 128), 8.26),
}


def block_bytes(shape: ModelConfig) -> int:
    """Return the bytes of a block of stage 2's pool, of 16 tokens in fp16. (Device "meta" allocates no memory.)"""
    return KVCache(shape, 1, 16, torch.float16, torch.device("meta")).blocks.nbytes


def length_for(share: float, block_size: int) -> float:
    """Return the length at which blocks of that size leave this share empty: (B - 1) / 2 slots on average.

    >>> round(length_for(0.06, 16))
    118
    """
    return (block_size - 1) / 2 * (1 - share) / share


def finding_3(num_requests: int = 400) -> Finding:
    report = replay.in_blocks(CONFIG, [request.num_tokens for request in workloads.traffic(num_requests, seed=1)], 16)
    used, empty = report.used / report.held, report.wasted / num_requests
    return finding(
        3,
        holds_as_worded=abs(empty - 7.5) < 1,
        used=used,
        empty=empty,
        worst=max(replay.in_blocks(CONFIG, [length], 16).wasted for length in range(1, 17)),
        of_48_gb=76 * 7.5 / 16 * block_bytes(MODELS["Llama-2-70B"][0]) / 48e9,
        length=length_for(0.0039, 16),
        holds="holds" if abs(used - 0.96) < 0.02 else "does not hold",
    )


def finding_4() -> Finding:
    sizes = {name: block_bytes(shape) / 1e6 for name, (shape, _) in MODELS.items()}
    right = [name for name, (_, claimed) in MODELS.items() if abs(sizes[name] - claimed) < 0.006]
    shown = ", ".join(f"{name} {mb:.2f} MB" for name, mb in sizes.items())
    return finding(4, sizes=shown, right=len(right), models=len(MODELS))


def finding_7() -> Finding:
    lengths = [length_for(share, block) for block, share in CLAIMED.items()]
    rng = random.Random(0)
    drawn = [rng.randint(1, 2 * round(statistics.mean(lengths)) - 1) for _ in range(400)]
    counted = [replay.in_blocks(CONFIG, drawn, block) for block in CLAIMED]
    last = [replay.in_blocks(CONFIG, range(1, block + 1), block) for block in CLAIMED]
    mean = [report.wasted / report.held for report in last]
    is_mean = all(abs(share - worst) < 0.001 for share, worst in zip(mean, AT_WORST, strict=True))
    speeds = {block: committed(f"claims.scattered.{block}_over_16") for block in (1, 64, 256)}
    return finding(
        7,
        least=min(lengths),
        largest=max(lengths),
        middle=statistics.mean(lengths),
        counted=", ".join(f"{report.wasted / report.held:.0%}" for report in counted),
        mean=", ".join(f"{share:.2%}" for share in mean),
        one_token=", ".join(f"{1 - 1 / block:.1%}" for block in CLAIMED),
        speeds=", ".join(f"{t.text()} times as long with blocks of {block}" for block, t in speeds.items()),
        is_mean="the mean of the last block, not the worst case" if is_mean else "neither the mean nor the worst case",
        of_64=in_words(speeds[64], "faster", "as fast", "slower"),
    )
