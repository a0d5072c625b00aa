"""The last block and what it leaves empty (claims 3, 7), the bytes of blocks (4, 30), how many fit (25), L2 (26)."""

import random
import statistics

import torch

from notebooks.helpers.claims.contiguous import CONFIG
from notebooks.helpers.claims.findings import Finding, committed, finding, in_words
from stages.bench import replay, workloads
from stages.bench.models import num_parameters
from stages.bench.texts import memory_pool
from stages.s2_block_manager.kv_cache import KVCache
from stages.s2_block_manager.llama import ModelConfig

CLAIMED = {8: 0.03, 16: 0.06, 32: 0.12, 64: 0.24}  # empty slots in relation to filled ones
AT_WORST = (0.4375, 0.4688, 0.4844, 0.4922)
MODELS = {  # vocabulary, hidden, MLP, layers, heads, KV heads, head size; the text's MB of a block
    "Llama-2-7B": (ModelConfig(32_000, 4096, 11_008, 32, 32, 32, 128), 8.39),
    "Llama-2-13B": (ModelConfig(32_000, 5120, 13_824, 40, 40, 40, 128), 13.11),
    "Llama-2-70B": (ModelConfig(32_000, 8192, 28_672, 80, 64, 8, 128), 5.24),
    "Mixtral-8x7B": (ModelConfig(32_000, 4096, 14_336, 32, 32, 8, 128), 2.10),
    "Llama-3.1-405B": (ModelConfig(128_256, 16_384, 53_248, 126, 128, 8, 128), 8.26),
}


def block_bytes(shape: ModelConfig, block_size: int = 16) -> int:
    """Return the bytes of a block of stage 2's pool, in fp16. (Device "meta" allocates no memory.)"""
    return KVCache(shape, 1, block_size, torch.float16, torch.device("meta")).blocks.nbytes


def finding_3(num_requests: int = 400) -> Finding:
    report = replay.in_blocks(CONFIG, [request.num_tokens for request in workloads.traffic(num_requests, seed=1)], 16)
    used, empty = report.used / report.held, report.wasted / num_requests
    at_2048 = replay.in_blocks(CONFIG, [2048], 16).wasted
    return finding(
        3,
        holds_as_worded=abs(empty - 7.5) < 1 and at_2048 == 0,
        used=used,
        empty=empty,
        worst=max(replay.in_blocks(CONFIG, [length], 16).wasted for length in range(1, 17)),
        of_48_gb=76 * 8 / 16 * block_bytes(MODELS["Llama-2-70B"][0]) / (48 * memory_pool.GB),
        at_2048=at_2048,
        holds="holds" if abs(used - 0.96) < 0.02 else "does not hold",
    )


def finding_4() -> Finding:
    sizes = {name: block_bytes(shape) / 1e6 for name, (shape, _) in MODELS.items()}
    right = [name for name, (_, claimed) in MODELS.items() if abs(sizes[name] - claimed) < 0.006]
    shown = ", ".join(f"{name} {mb:.2f} MB" for name, mb in sizes.items())
    exact = block_bytes(MODELS["Llama-2-70B"][0])
    return finding(4, sizes=shown, right=len(right), models=len(MODELS), exact=exact, fit=int(43e9) // exact)


def over_filled(lengths: list[int], block_size: int) -> float:
    """Return the empty slots of all last blocks in relation to the filled slots."""
    report = replay.in_blocks(CONFIG, lengths, block_size)
    return report.wasted / report.used


def finding_7() -> Finding:
    implied = {block: block / 2 / share for block, share in CLAIMED.items()}  # tokens
    rng = random.Random(0)
    counted = {
        mean: ", ".join(f"{over_filled(drawn, block):.1%}" for block in CLAIMED)
        for mean in (round(statistics.mean(implied.values())), 256)
        for drawn in [[rng.randint(1, 2 * mean - 1) for _ in range(400)]]
    }
    last = [replay.in_blocks(CONFIG, range(1, block + 1), block) for block in CLAIMED]
    mean = [report.wasted / report.held for report in last]
    speeds = {block: committed(f"claims.scattered.{block}_over_16") for block in (1, 64, 256)}
    return finding(
        7,
        holds_as_worded=all(abs(share - worst) < 0.001 for share, worst in zip(mean, AT_WORST, strict=True)),
        implied=", ".join(f"{length:.0f}" for length in implied.values()),
        counted="; ".join(f"{shares} at {length} tokens on average" for length, shares in counted.items()),
        mean=", ".join(f"{share:.2%}" for share in mean),
        one_token=", ".join(f"{1 - 1 / block:.1%}" for block in CLAIMED),
        speeds=", ".join(f"{t.text()} times as long with blocks of {block}" for block, t in speeds.items()),
        of_64=in_words(speeds[64], "faster", "as fast", "slower"),
    )


def finding_25() -> Finding:
    num_70b = num_parameters(MODELS["Llama-2-70B"][0])
    blocks = {gb: memory_pool.num_kv_blocks(gb) for gb in (28, 35)}
    return finding(
        25,
        holds_as_worded=blocks[28] == 9830,
        weights=num_70b / 2 / 1e9,
        blocks=blocks[28],
        tokens=16 * blocks[28],
        requests=16 * blocks[28] // 2048,
        fewer=blocks[35],
        fewer_requests=16 * blocks[35] // 2048,
    )


def finding_26() -> Finding:
    block, l2 = block_bytes(MODELS["Llama-2-70B"][0]), 50e6
    layers = {"layer": block // 80 // 1024, "layers": int(l2 / (block / 80))}
    return finding(26, blocks=int(l2 / 2e6), of_5_mb=int(l2 / 5e6), **layers)


def finding_30() -> Finding:
    shape, sizes = MODELS["Llama-2-70B"][0], (1, 8, 16, 32, 64)
    layer = {size: block_bytes(shape, size) // 80 // 1024 for size in sizes}
    claimed = (64, 512, 1024, 2048, 4096)
    ratios = {claim / kb for claim, kb in zip(claimed, layer.values(), strict=True)}
    return finding(
        30,
        holds_as_worded=len(ratios) == 1,
        layer=", ".join(f"{kb} KB" for kb in layer.values()),
        times=ratios.pop(),
        small=15 * block_bytes(shape, 1) / (960 * 1024),
        slots=15 * block_bytes(shape, 1) / 1e6,
        share=15 * block_bytes(shape, 1) / 80e9,
    )
