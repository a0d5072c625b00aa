"""The cost and the gain of paging (claim 10), latency by batch (27), and a GPU's counters (28)."""

from notebooks.helpers.claims.blocks import SHAPE_70B, block_bytes
from notebooks.helpers.claims.findings import Finding, Rows, committed, finding, in_words, of_gpu, on_gpu

MEMORY = "of the memory's bandwidth"  # a column of that table
CLAIMED = {8: 1198, 32: 3891, 64: 5234}  # tokens per second in blocks, by batch
A100, INT4_70B = 2.04e12, 35e9  # bytes per second, and of the weights


def finding_10() -> Finding:
    decode, token = "decode.cases.storyteller_float32", block_bytes(SHAPE_70B, 1)
    at_8, lost = map(committed, (f"{decode}_8_128.s3_over_s1", "claims.attention.s3_over_s1_4096"))
    paged, pieces = (committed(f"{decode}_{key}_ms").value for key in ("32_128.s3", "8_128.s1"))
    return finding(
        10,
        holds_as_worded=all(CLAIMED[batch] > batch * A100 / INT4_70B for batch in CLAIMED),
        gain=(32 / paged) / (8 / pieces),
        costs=in_words(at_8, "costs speed", "costs nothing that the rounds can tell", "gains speed"),
        bandwidth=in_words(lost, "is lost", "is the same within the rounds", "is gained"),
        allowed=", ".join(f"{batch * A100 / INT4_70B:,.0f}" for batch in CLAIMED),
        fit=", ".join(f"{32 * length * token / 1e9:.1f} GB at {length:,} tokens" for length in (2048, 4096)),
        gpu=of_gpu(2, "A decode step", speeds_by_batch),
        kernel=of_gpu(8, "paged", kernels),
    )


def speeds_by_batch(machine: str, rows: Rows) -> str:
    """Return the tokens per second of stages 1 and 3."""
    rows = {name: row for name, row in rows.items() if name.startswith("1B, context 1024, ")} or rows
    cells = [f"{n}: {r['s1 tokens/s']:,.0f} in one piece, {r['s3 tokens/s']:,.0f} in blocks" for n, r in rows.items()]
    return f"{machine}: {'; '.join(cells)}"


def kernels(machine: str, rows: Rows) -> str:
    """Return how the kernel over blocks compares with one over a contiguous cache."""
    cells = [f"{name} {', '.join(f'{key} {value}' for key, value in row.items())}" for name, row in rows.items()]
    return f"{machine}: {'; '.join(cells[:4])}"


def finding_27() -> Finding:
    step, by_batch, one = 8 / CLAIMED[8], on_gpu(7, "latency by batch"), on_gpu(7, "published")
    cells = "not measured"
    if by_batch:
        cells = f"{by_batch.machine}, by batch: " + "; ".join(f"{name} {row}" for name, row in by_batch.rows.items())
    if one and "between tokens ms" in one.rows:
        times = one.rows["between tokens ms"]["nanovllm"]
        cells += f". At one load, {one.machine}: {times} ms between tokens (p50 / p90 / p99)"
    return finding(27, step=1000 * step, steps=0.094 / step, gpu=cells)


def finding_28(context: int = 8192) -> Finding:
    """Count how often a decode step reads a byte of its keys: once for each group of query heads."""
    keys = context * block_bytes(SHAPE_70B, 1) // 80

    def counters(machine: str, rows: Rows) -> str:
        [row, *_] = rows.values()
        return f"{machine}: L2 hits {row['L2 hits']:.0f}%, {row[MEMORY]:.0f}% of the memory's bandwidth"

    group = SHAPE_70B.num_attention_heads // SHAPE_70B.num_key_value_heads
    return finding(28, keys=8 * keys / 1e6, group=group, gpu=of_gpu(5, "Claim 28", counters))
