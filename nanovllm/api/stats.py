"""EngineStats: the state of the pool and the queues, and what has happened, from the engine's parts when it is asked.

A request's states, and what is counted where:

    add_request -> WAITING --- admitted: it has all its blocks ---> RUNNING -----------> ENDED
                      ^                                              |  ^                stop, length, error
                      |              some come from the host: LOADING +  |
                      |              others run meanwhile          '-----+
                      +-- PREEMPTED: its blocks were taken for others, and it waits in front of all --'

    An abort ends it in any state. WAITING and RUNNING are the scheduler's two queues: what is LOADING is in `running`
    and not in the batch, and what was PREEMPTED is in `waiting` and has been admitted before.

Nothing runs for it in a step in which nobody comes, goes or lacks blocks. core counts most already; a sequence that
ends, and a request for blocks that is refused, are counted where they happen.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .tally import prompt_tokens_of

if TYPE_CHECKING:
    from .llm_engine import LLMEngine


class BlockCounts(NamedTuple):
    running: int  # sequences hold them
    idle: int  # nobody holds them, and their text can be hit
    free: int  # they hold nothing of use
    on_host: int  # texts that the host keeps


@dataclass(frozen=True)
class EngineStats:
    """The first two groups are of now, the others since the start."""

    running: int  # sequences: a request has one for each of its n samples
    loading: int  # running sequences with blocks on the way from the host
    waiting: int
    preempted: int  # waiting sequences that have run before

    num_blocks: int
    blocks_running: int
    blocks_idle: int
    blocks_free: int
    blocks_watermark: int  # that admitting a sequence beside others leaves free or idle
    num_host_blocks: int
    blocks_on_host: int

    out_of_blocks: int  # how often a sequence asked for blocks, and too few were free: one that waits asks in each step
    preemptions: int
    blocks_copied: int
    blocks_stored: int
    blocks_loaded: int
    prefix_queries: int  # tokens of sequences that were admitted
    prefix_hits: int  # and how many of them were cached

    prompt_tokens: int  # of prompts that were computed or cached
    cached_tokens: int  # of these, cached
    generation_tokens: int

    def __str__(self) -> str:
        share = f"{self.prefix_hits / self.prefix_queries:.0%}" if self.prefix_queries else "none"
        return (
            f"running {self.running} ({self.loading} loading), waiting {self.waiting} ({self.preempted} preempted)"
            f" | blocks: {self.blocks_running} running, {self.blocks_idle} idle, {self.blocks_free} free"
            f" of {self.num_blocks}, watermark {self.blocks_watermark}, {self.blocks_on_host} on the host"
            f" | {self.preemptions} preemptions, {self.out_of_blocks} times out of blocks, {self.blocks_copied} copied,"
            f" {self.blocks_stored} stored, {self.blocks_loaded} loaded"
            f" | prefix hits: {share} | tokens: {self.prompt_tokens} prompt, {self.generation_tokens} generated"
        )


def collect(engine: "LLMEngine") -> EngineStats:
    """Read it from the engine's parts. Any thread may ask: lists are copied whole before they are looked at."""
    manager, scheduler, tally = engine.kv_cache_manager, engine.scheduler, engine.tally
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    blocks, prefix = manager.block_counts(), manager.prefix_cache_stats
    live = [seq for samples in list(engine.requests.values()) for seq in samples if not seq.finished]
    prompts = [prompt_tokens_of(seq) for seq in live]
    return EngineStats(
        running=len(running) + sum(len(seq.to_fork) for seq in running),
        loading=sum(not manager.is_ready(seq) for seq in running),
        waiting=len(waiting) + sum(len(seq.to_fork) for seq in waiting),
        preempted=sum(getattr(seq, "num_cached_tokens", None) is not None for seq in waiting),
        num_blocks=manager.num_blocks,
        blocks_running=blocks.running,
        blocks_idle=blocks.idle,
        blocks_free=blocks.free,
        blocks_watermark=scheduler.watermark_blocks,
        num_host_blocks=engine.host_kv_cache.num_blocks,
        blocks_on_host=blocks.on_host,
        out_of_blocks=scheduler.num_out_of_blocks + manager.num_refused,
        preemptions=scheduler.num_preemptions,
        blocks_copied=engine.kv_cache.num_blocks_copied,
        blocks_stored=engine.host_kv_cache.num_blocks_stored,
        blocks_loaded=engine.host_kv_cache.num_blocks_loaded,
        prefix_queries=manager.past_prefix_cache_stats.queries + prefix.queries,
        prefix_hits=manager.past_prefix_cache_stats.hits + prefix.hits,
        prompt_tokens=tally.prompt_tokens + sum(tokens for tokens, _ in prompts),
        cached_tokens=tally.cached_tokens + sum(cached for _, cached in prompts),
        generation_tokens=tally.generation_tokens + sum(seq.num_tokens - seq.num_prompt_tokens for seq in live),
    )
