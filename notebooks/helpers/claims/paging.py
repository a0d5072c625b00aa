"""The cost and the gain of paging (claim 10), latency by batch (27), and a GPU's counters (28)."""

from notebooks.helpers.claims.blocks import MODELS, block_bytes
from notebooks.helpers.claims.findings import Finding, committed, finding, in_words, not_measured, on_gpu

MEMORY = "of the memory's bandwidth"  # a column of that table
MEMORY = "of the memory's bandwidth"  # a column of that table
DECODE = "decode.cases.storyteller_float32"
CLAIMED = {8: 1198, 32: 3891, 64: 5234}  # tokens per second in blocks, by batch
A100, INT4_70B = 2.04e12, 35e9  # bytes per second, and of the weights


def finding_10() -> Finding:
    at_8, lost = map(committed, (f"{DECODE}_8_128.s3_over_s1", "claims.attention.s3_over_s1_4096"))
    paged, pieces = (committed(f"{DECODE}_{key}_ms").value for key in ("32_128.s3", "8_128.s1"))
    speeds = {
        name: committed(f"claims.attention.{key}_bytes_per_second").text("{:.1f}", 1e-9)
        for name, key in (("blocks", "s3_4096"), ("slices", "s1_4096"), ("read", "read"))
    }
    token = block_bytes(MODELS["Llama-2-70B"][0], 1)
    return finding(
        10,
        holds_as_worded=all(CLAIMED[batch] > batch * A100 / INT4_70B for batch in CLAIMED),
        **speeds,
        at_8=at_8.text(),
        lost=lost.text(),
        gain=(32 / paged) / (8 / pieces),
        costs=in_words(at_8, "costs speed", "costs nothing that the rounds can tell", "gains speed"),
        bandwidth=in_words(lost, "is lost", "is the same within the rounds", "is gained"),
        allowed=", ".join(f"{batch * A100 / INT4_70B:,.0f}" for batch in CLAIMED),
        fit=", ".join(f"{32 * length * token / 1e9:.1f} GB at {length:,} tokens" for length in (2048, 4096)),
        gpu=steps_on_gpu(),
        kernel=kernel_on_gpu(),
    )


def steps_on_gpu() -> str:
    """Return the tokens per second of stages 1 and 3 on the newest GPU, by batch."""
    table = on_gpu(2, "A decode step")
    if table is None:
        return not_measured(2)
    rows = {name: row for name, row in table.rows.items() if name.startswith("1B, context 1024, ")} or table.rows
    cells = [f"{n}: {r['s1 tokens/s']:,.0f} in one piece, {r['s3 tokens/s']:,.0f} in blocks" for n, r in rows.items()]
    return f"{table.machine}: {'; '.join(cells)}"


def kernel_on_gpu() -> str:
    """Return how the kernel over blocks compares with one over a contiguous cache on the newest GPU."""
    table = on_gpu(8, "paged")
    if table is None:
        return not_measured(8)
    rows = [f"{name} {', '.join(f'{key} {value}' for key, value in row.items())}" for name, row in table.rows.items()]
    return f"{table.machine}: {'; '.join(rows[:4])}"


def finding_27() -> Finding:
    step = 8 / CLAIMED[8]
    one, by_batch = on_gpu(7, "published"), on_gpu(7, "latency by batch")
    cells = "not measured"
    if by_batch:
        cells = f"{by_batch.machine}, by batch: " + "; ".join(f"{name} {row}" for name, row in by_batch.rows.items())
    if one and "between tokens ms" in one.rows:
        times = one.rows["between tokens ms"]["nanovllm"]
        cells += f". At one load, {one.machine}: {times} ms between tokens (p50 / p90 / p99)"
    return finding(27, step=1000 * step, steps=0.094 / step, gpu=cells)


def finding_28(context: int = 8192) -> Finding:
    """Count how often a decode step reads a byte of its keys: once for each group of query heads."""
    shape = MODELS["Llama-2-70B"][0]
    keys = context * block_bytes(shape, 1) // 80
    gpu, group = not_measured(5), shape.num_attention_heads // shape.num_key_value_heads
    if table := on_gpu(5, "Claim 28"):
        [row, *_] = table.rows.values()
        gpu = f"{table.machine}: L2 hits {row['L2 hits']:.0f}%, {row[MEMORY]:.0f}% of the memory's bandwidth"
    return finding(28, keys=8 * keys / 1e6, group=group, gpu=gpu)
