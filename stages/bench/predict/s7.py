"""Stage 7: load or recompute, from the offload table; a pool cut to a third; eight samples that leave the device."""

from pathlib import Path

from nanovllm.bench.harness import Scores
from nanovllm.bench.workload import Task
from stages.bench import offload
from stages.bench.engines import by_sample, without_model
from stages.bench.racing import sampling_params, serve
from stages.bench.workloads import even_prompt

BLOCK_SIZE = 16
SAMPLES, PROMPT, OUTPUT = 8, 200, 40
POOL = 1024


def measure(model: Path) -> Scores:
    """Return counts of a pool that is cut to a third, and of samples that leave the device."""
    cut = {policy: offload.count_without_model(policy) for policy in ("s6", "load", "recompute")}
    return {"cut": cut, "samples": samples_that_leave(model)}


def samples_that_leave(model: Path) -> dict[str, int]:
    """Serve a request of SAMPLES samples, fill the pool with another text, and serve the request again."""
    options = {"kv_cache_tokens": POOL, "block_size": BLOCK_SIZE, "kv_offloading_tokens": 4 * POOL}
    engine = without_model("s7", by_sample, model=str(model), offload_policy="load", **options)
    task = Task(even_prompt(PROMPT), OUTPUT, SAMPLES)
    engine.add_request("first", task.prompt, sampling_params("s7", task))
    entries = 0
    while engine.has_unfinished_requests():
        entries = max(entries, sum(len(seq.block_table) for seq in engine.scheduler.running))
        engine.step()
    serve("s7", engine, [Task([9] * (POOL - 1), 1)], "other")
    tier = engine.host_tier
    stored, before = tier.num_blocks_stored, tier.num_blocks_loaded
    serve("s7", engine, [task], "again")
    loaded = tier.num_blocks_loaded - before
    return {"entries": entries, "stored": stored, "shared": PROMPT // BLOCK_SIZE, "loaded": loaded}
