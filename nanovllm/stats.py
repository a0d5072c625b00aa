"""Statistics: EngineStats, the state and counters of one engine, and the same numbers as metrics with vLLM's names.

The states of a sequence:

    add_request --> WAITING ---- admitted: it has all its blocks ----> RUNNING --> ENDED
                       ^  |                                            ^     |     stop, length, error
                       |  '--> LOADING: some blocks come from the host-'     |
                       |       or the disk, while other sequences run        |
                       '------ PREEMPTED: it gave up its blocks, and <-------'
                               waits first in line

    An abort ends a sequence in any state. WAITING and RUNNING are the scheduler's two queues: a LOADING sequence is in
    `running` but not in the batch, and a PREEMPTED one is in `waiting` and has been admitted before.

The parts of the engine keep most of the counts. A Tally, which is an Observer, keeps the rest. It costs nothing in a
step in which no sequence arrives, ends or runs out of blocks.
"""

from dataclasses import dataclass

from .engine.core import EngineCore
from .metrics import Counter, Gauge, Metric, Vector
from .tally import Tally, prompt_tokens_of
from .tiers.setup import TierParts

HELP = {  # by metric
    "vllm:num_requests_running": "Samples that hold blocks, including those waiting for blocks to be loaded.",
    "vllm:num_requests_waiting": "Samples waiting for room in the batch or for free blocks.",
    "vllm:kv_cache_usage_perc": "Share of the pool's blocks that samples hold, from 0 to 1.",
    "vllm:num_preemptions": "Preempted samples.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache when a sample is first admitted.",
    "vllm:prefix_cache_hits": "Tokens found in the prefix cache on the device.",
    "vllm:external_prefix_cache_queries": "Tokens not cached on the device, looked up on the host and the disk.",
    "vllm:external_prefix_cache_hits": "Tokens found in the prefix cache on the host or the disk.",
    "vllm:kv_offload_load_bytes": "Bytes of blocks loaded from the host.",
    "vllm:kv_offload_store_bytes": "Bytes of blocks stored on the host.",
    "nanovllm:kv_disk_load_bytes": "Bytes of blocks loaded from kv_disk_dir.",
    "nanovllm:kv_disk_store_bytes": "Bytes of blocks stored in kv_disk_dir.",
    "nanovllm:kv_disk_dropped_blocks": "Blocks not stored in kv_disk_dir because the disk was too slow.",
    "nanovllm:kv_disk_lost_blocks": "Blocks of kv_disk_dir that were damaged or missing when they were read.",
    "nanovllm:kv_disk_evicted_blocks": "Blocks that this engine has removed from kv_disk_dir to limit its size.",
    "nanovllm:kv_declined_blocks": "Blocks found on the host or the disk, but recomputed because that is faster.",
    "nanovllm:kv_speed_corrections": "Loads and prefills that were more than twice as fast or as slow as expected.",
    "vllm:prompt_tokens": "Prompt tokens, computed or cached.",
    "vllm:prompt_tokens_cached": "Prompt tokens that were cached, on the device, the host or the disk.",
    "vllm:generation_tokens": "Generated tokens.",
    "vllm:request_success": "Finished samples, by finish reason.",
    "vllm:admission_rejections": "Requests rejected with status 429, by the limit that was reached.",
    "vllm:iteration_tokens_total": "Tokens per step of the model.",
    "vllm:time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": "Time between two tokens of a sample.",
    "vllm:request_time_per_output_token_seconds": "Mean time per output token of each finished sample.",
    "vllm:e2e_request_latency_seconds": "Time from a request's arrival to the end of a sample.",
    "vllm:request_queue_time_seconds": "Time from a request's arrival until it is admitted and has its blocks.",
    "vllm:request_prefill_time_seconds": "Time of each finished sample from its admission to its first token.",
    "vllm:request_decode_time_seconds": "Time of each finished sample from its first token to its end.",
    "vllm:request_inference_time_seconds": "Time of each finished sample from its admission to its end.",
    "vllm:request_prompt_tokens": "Prompt tokens of each finished sample.",
    "vllm:request_generation_tokens": "Generated tokens of each finished sample.",
    "vllm:request_max_num_generation_tokens": "Generated tokens of the longest sample of each finished request.",
    "vllm:request_params_max_tokens": "The max_tokens of each finished sample.",
    "vllm:request_params_n": "The parameter n of each request.",
    "vllm:spec_decode_num_drafts": "Drafts that were checked.",
    "vllm:spec_decode_num_draft_tokens": "Tokens of drafts that were checked.",
    "vllm:spec_decode_num_accepted_tokens": "Tokens of drafts that were accepted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Accepted tokens by their position in the draft.",
    "vllm:cache_config_info": "The options of the KV cache, as labels. The value is always 1.",
}


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine: the first two groups describe the present, the others count since the start."""

    running: int  # sequences: a request has one for each of its n samples
    loading: int  # running sequences waiting for blocks from the host or the disk
    waiting: int
    preempted: int  # waiting sequences that have run before

    num_blocks: int
    blocks_running: int  # held by sequences
    blocks_idle: int  # cached, but held by no sequence
    blocks_free: int  # neither held nor cached
    blocks_watermark: int  # kept free or idle when a sequence is admitted while others run
    num_host_blocks: int
    blocks_on_host: int  # cached on the host

    out_of_blocks: int  # times that a sequence needed more blocks than were free; while it waits, once per step
    preemptions: int
    blocks_copied: int  # before a sequence wrote to a block that others shared
    blocks_stored: int  # on the host
    blocks_loaded: int  # from the host
    disk_blocks_stored: int
    disk_blocks_loaded: int
    disk_blocks_dropped: int  # the disk was too slow
    disk_blocks_lost: int  # damaged or missing when they were read
    disk_blocks_evicted: int  # by this engine
    blocks_declined: int  # found on the host or the disk, but recomputed because that is faster
    speeds_corrected: int  # times that a load or a prefill was far from its estimated speed
    prefix_queries: int  # tokens looked up in the prefix cache, at each admission of a sequence
    prefix_hits: int  # looked-up tokens that were cached

    prompt_tokens: int  # computed or cached
    cached_tokens: int  # prompt tokens that were loaded or shared instead of computed
    generation_tokens: int
    drafts: int  # drafts that were checked, see requests/speculation.py
    draft_tokens: int
    accepted_tokens: int  # tokens of drafts that became output

    def __str__(self) -> str:
        hit_rate = f"{self.prefix_hits / self.prefix_queries:.0%}" if self.prefix_queries else "none"
        return (
            f"running {self.running} ({self.loading} loading), waiting {self.waiting} ({self.preempted} preempted)"
            f" | blocks: {self.blocks_running} running, {self.blocks_idle} idle, {self.blocks_free} free"
            f" of {self.num_blocks}, watermark {self.blocks_watermark}, {self.blocks_on_host} on the host"
            f" | {self.preemptions} preemptions, {self.out_of_blocks} times out of blocks, {self.blocks_copied} copied,"
            f" {self.blocks_stored} stored, {self.blocks_loaded} loaded{self._disk}"
            + (f" | {self.blocks_declined} computed instead of loaded" if self.blocks_declined else "")
            + f" | prefix hits: {hit_rate} | tokens: {self.prompt_tokens} prompt, {self.generation_tokens} generated"
            + (f" | {self.accepted_tokens} of {self.draft_tokens} drafted tokens accepted" if self.drafts else "")
        )

    @property
    def _disk(self) -> str:
        stored, loaded, lost = self.disk_blocks_stored, self.disk_blocks_loaded, self.disk_blocks_lost
        return f" | disk: {stored} stored, {loaded} loaded, {lost} lost" if stored or loaded or lost else ""


def collect(engine: EngineCore, tally: Tally, tiers: TierParts) -> EngineStats:
    """Read the statistics from the parts of the engine. Any thread may call this, since lists are copied first.

    Outside the engine's thread, a sequence that ends during the call may be counted twice or not at all.
    """
    manager, scheduler = engine.kv_cache_manager, engine.scheduler
    host, disk, policy = tiers.host, tiers.disk, tiers.hit_policy
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    ref_counts, cached_blocks = list(manager.pool.ref_counts), list(manager.pool.hashes)
    blocks_running = manager.num_blocks - ref_counts.count(0)
    blocks_idle = sum(ref_counts[block] == 0 for block in cached_blocks)
    live = [seq for samples in list(engine.requests.values()) for seq in samples if not seq.finished]
    prompt_counts = [prompt_tokens_of(seq) for seq in live]
    return EngineStats(
        running=len(running) + sum(len(seq.to_fork) for seq in running),
        loading=sum(not manager.is_ready(seq) for seq in running),
        waiting=len(waiting) + sum(len(seq.to_fork) for seq in waiting),
        preempted=sum(seq.num_preemptions > 0 for seq in waiting),
        num_blocks=manager.num_blocks,
        blocks_running=blocks_running,
        blocks_idle=blocks_idle,
        blocks_free=manager.num_blocks - blocks_running - blocks_idle,
        blocks_watermark=scheduler.watermark_blocks,
        num_host_blocks=host.num_blocks,
        blocks_on_host=len(host.pool.cached),
        out_of_blocks=tally.num_out_of_blocks + scheduler.num_failed,
        preemptions=scheduler.num_preemptions,
        blocks_copied=engine.kv_cache.num_blocks_copied,
        blocks_stored=host.num_blocks_stored,
        blocks_loaded=host.num_blocks_loaded,
        disk_blocks_stored=disk.num_blocks_stored if disk else 0,
        disk_blocks_loaded=disk.num_blocks_loaded if disk else 0,
        disk_blocks_dropped=disk.num_blocks_dropped if disk else 0,
        disk_blocks_lost=disk.num_blocks_lost if disk else 0,
        disk_blocks_evicted=disk.num_blocks_evicted if disk else 0,
        blocks_declined=policy.num_declined_blocks if policy else 0,
        speeds_corrected=policy.num_corrections if policy else 0,
        prefix_queries=manager.prefix_cache_stats.queries,
        prefix_hits=manager.prefix_cache_stats.hits,
        prompt_tokens=tally.prompt_tokens + sum(tokens for tokens, _ in prompt_counts),
        cached_tokens=tally.cached_tokens + sum(cached for _, cached in prompt_counts),
        generation_tokens=tally.generation_tokens + sum(seq.num_output_tokens for seq in live),
        drafts=tally.num_drafts,
        draft_tokens=tally.num_draft_tokens,
        accepted_tokens=sum(tally.accepted_by_position),
    )


def get_metrics(engine: EngineCore, tally: Tally, tiers: TierParts, model_name: str) -> list[Metric]:
    """Return the statistics as metrics with vLLM's names. vLLM calls host and disk blocks "external"."""
    stats, block_bytes = collect(engine, tally, tiers), engine.kv_cache.blocks[0].nbytes
    labels = {"model_name": model_name, "engine": "0"}
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.blocks_running / stats.num_blocks,
    }
    counters = {
        "prefix_cache_queries": tally.device_lookups.queries,
        "prefix_cache_hits": tally.device_lookups.hits,
        "external_prefix_cache_queries": tally.host_lookups.queries,
        "external_prefix_cache_hits": tally.host_lookups.hits,
        "kv_offload_load_bytes": stats.blocks_loaded * block_bytes,
        "kv_offload_store_bytes": stats.blocks_stored * block_bytes,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_cached": stats.cached_tokens,
        "generation_tokens": stats.generation_tokens,
    }
    if tally.accepted_by_position:  # with speculation
        counters["spec_decode_num_drafts"] = stats.drafts
        counters["spec_decode_num_draft_tokens"] = stats.draft_tokens
        counters["spec_decode_num_accepted_tokens"] = stats.accepted_tokens
    metrics: list[Metric] = [Gauge(f"vllm:{name}", labels.copy(), float(value)) for name, value in gauges.items()]
    metrics += [Counter(f"vllm:{name}", labels.copy(), value) for name, value in counters.items()]
    if by_position := tally.accepted_by_position:
        metrics.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels.copy(), by_position.copy()))
    if tiers.disk:  # vLLM has no such metrics
        disk_counts = {
            "load_bytes": stats.disk_blocks_loaded * block_bytes,
            "store_bytes": stats.disk_blocks_stored * block_bytes,
            "dropped_blocks": stats.disk_blocks_dropped,
            "lost_blocks": stats.disk_blocks_lost,
            "evicted_blocks": stats.disk_blocks_evicted,
        }
        metrics += [Counter(f"nanovllm:kv_disk_{name}", labels.copy(), value) for name, value in disk_counts.items()]
    if tiers.hit_policy:
        policy_counts = {"declined_blocks": stats.blocks_declined, "speed_corrections": stats.speeds_corrected}
        metrics += [Counter(f"nanovllm:kv_{name}", labels.copy(), value) for name, value in policy_counts.items()]
    for reason in ("stop", "length", "abort", "error", "repetition"):
        reason_labels = labels | {"finished_reason": reason}
        metrics.append(Counter("vllm:request_success", reason_labels, tally.ended[reason]))
    options: dict[str, object] = {
        "block_size": engine.config.block_size,
        "cache_dtype": engine.kv_cache.stored_as,
        "enable_prefix_caching": engine.config.enable_prefix_caching,
        "gpu_memory_utilization": engine.config.gpu_memory_utilization,
        "num_cpu_blocks": stats.num_host_blocks,
        "num_gpu_blocks": stats.num_blocks,  # vLLM uses this name on a CPU, too
    }
    option_labels = {name: str(value) for name, value in options.items()}
    metrics.append(Gauge("vllm:cache_config_info", labels | option_labels, 1.0))
    live = [seq for samples in list(engine.requests.values()) for seq in samples if not seq.finished]
    return metrics + tally.histograms(live, labels)
