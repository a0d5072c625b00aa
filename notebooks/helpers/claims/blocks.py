"""The last block and what it leaves empty (claims 3, 7), the bytes of blocks (4, 30), how many fit (25), L2 (26)."""

import random
from statistics import mean

import torch

from notebooks.helpers.claims.contiguous import CONFIG
from notebooks.helpers.claims.findings import CLAIMS, Finding, committed, finding, in_words
from stages.bench import replay, workloads
from stages.bench.models import num_parameters
from stages.bench.texts import memory_pool
from stages.s2_block_manager.kv_cache import KVCache
from stages.s2_block_manager.llama import ModelConfig

CLAIMED = {8: 0.03, 16: 0.06, 32: 0.12, 64: 0.24}  # empty slots in relation to filled ones
AT_WORST = (0.4375, 0.4688, 0.4844, 0.4922)
SHAPES = {name: ModelConfig(*model["shape"]) for name, model in CLAIMS["models"].items()}
SHAPE_70B = SHAPES["Llama-2-70B"]


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
        of_48_gb=76 * 8 / 16 * block_bytes(SHAPE_70B) / (48 * memory_pool.GB),
        at_2048=at_2048,
        holds="holds" if abs(used - 0.96) < 0.02 else "does not hold",
    )


def finding_4() -> Finding:
    sizes, exact = {name: block_bytes(shape) / 1e6 for name, shape in SHAPES.items()}, block_bytes(SHAPE_70B)
    right = sum(abs(sizes[name] - model["mb"]) < 0.006 for name, model in CLAIMS["models"].items())
    shown = ", ".join(f"{name} {mb:.2f} MB" for name, mb in sizes.items())
    return finding(4, sizes=shown, right=right, models=len(sizes), exact=exact, fit=int(43e9) // exact)


def over_filled(lengths: list[int], block_size: int) -> float:
    """Return the empty slots of all last blocks in relation to the filled slots."""
    report = replay.in_blocks(CONFIG, lengths, block_size)
    return report.wasted / report.used


def finding_7() -> Finding:
    implied = [block / 2 / share for block, share in CLAIMED.items()]  # tokens
    rng, counted = random.Random(0), []
    for length in (round(mean(implied)), 256):
        drawn = [rng.randint(1, 2 * length - 1) for _ in range(400)]
        shares = ", ".join(f"{over_filled(drawn, block):.1%}" for block in CLAIMED)
        counted.append(f"{shares} at {length} tokens on average")
    last = [replay.in_blocks(CONFIG, range(1, block + 1), block) for block in CLAIMED]
    empty = [report.wasted / report.held for report in last]
    return finding(
        7,
        holds_as_worded=all(abs(share - worst) < 0.001 for share, worst in zip(empty, AT_WORST, strict=True)),
        implied=", ".join(f"{length:.0f}" for length in implied),
        counted="; ".join(counted),
        mean=", ".join(f"{share:.2%}" for share in empty),
        one_token=", ".join(f"{1 - 1 / block:.1%}" for block in CLAIMED),
        of_64=in_words(committed("claims.scattered.64_over_16"), "faster", "as fast", "slower"),
    )


def finding_25() -> Finding:
    blocks, fewer = (memory_pool.num_kv_blocks(gb) for gb in (28, 35))
    return finding(
        25,
        holds_as_worded=blocks == 9830,
        weights=num_parameters(SHAPE_70B) / 2 / 1e9,
        blocks=blocks,
        tokens=16 * blocks,
        requests=16 * blocks // 2048,
        fewer=fewer,
        fewer_requests=16 * fewer // 2048,
    )


def finding_26() -> Finding:
    layer, l2 = block_bytes(SHAPE_70B) / 80, 50e6
    return finding(26, blocks=int(l2 / 2e6), of_5_mb=int(l2 / 5e6), layer=int(layer / 1024), layers=int(l2 / layer))


def finding_30() -> Finding:
    layer = {size: block_bytes(SHAPE_70B, size) // 80 // 1024 for size in (1, 8, 16, 32, 64)}
    claimed, slots = (64, 512, 1024, 2048, 4096), 15 * block_bytes(SHAPE_70B, 1)
    ratios = {claim / kb for claim, kb in zip(claimed, layer.values(), strict=True)}
    return finding(
        30,
        holds_as_worded=len(ratios) == 1,
        layer=", ".join(f"{kb} KB" for kb in layer.values()),
        times=ratios.pop(),
        small=slots / (960 * 1024),
        slots=slots / 1e6,
        share=slots / 80e9,
    )
