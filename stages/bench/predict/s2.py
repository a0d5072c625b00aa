"""Stage 2: the memory that blocks save and promises waste, and the cost of gathering."""

import statistics
from pathlib import Path

import torch

from nanovllm.bench.harness import Scores, Spread
from nanovllm.bench.workload import mixed_tasks
from stages import s2_block_manager as s2
from stages.bench.engines import silent
from stages.bench.predict.s1 import LONGEST, POOL, START, crowded_moments, in_slots, moments_of
from stages.bench.replay import Compacting, admitted, arrivals, in_blocks
from stages.bench.results import decode_case
from stages.bench.workloads import Traffic
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.kv_cache import KVCache
from stages.s2_block_manager.llama import ModelConfig

BLOCK_SIZE, BLOCK_SIZES = 16, (1, 16, 256)
LONG = 1000  # the longest context of one sequence in the decode table


def measure(model: Path) -> Scores:
    """Return seats, the pool under traffic, empty slots, the pieces of a long text, and the cost of gathering."""
    config, lengths = ModelConfig.from_folder(model), range(1, 513)
    first, second = blocks_held(model)
    return {
        "seats": seats_in_a_batch(config),
        "at_once": at_once(model),
        "held": {"first_step": first, "second_step": second},
        "empty": {str(size): in_blocks(config, lengths, size).wasted / len(lengths) for size in BLOCK_SIZES},
        "pieces": {str(size): -(-LONG // size) for size in BLOCK_SIZES},
        "gather": gather_cost(config),
    }


def in_tables() -> BlockManager:
    """Return a pool of blocks, as large as in_slots()."""
    return BlockManager(POOL // BLOCK_SIZE, BLOCK_SIZE, silent("s2"))


def seats_in_a_batch(config: ModelConfig) -> dict[str, int]:
    """Return how many of the scoreboard's requests start together, each with room for prompt + max_tokens."""
    tasks = mixed_tasks(config.vocab_size)
    requests = [Traffic(len(task.prompt), task.num_output_tokens, task.num_output_tokens) for task in tasks]
    pieces, tables = ([seq for seq, _ in arrivals(name, config, requests, LONGEST)] for name in ("s1", "s2"))
    slots = admitted(in_slots(), pieces, SlotManager.can_allocate)
    return {"slots": slots, "blocks": admitted(in_tables(), tables, BlockManager.can_promise)}


def at_once(model: Path) -> dict[str, float]:
    """Return the mean number of running sequences under traffic, and the shares of the pool promised, held and empty.

    Part 1 of the notebook has the same traffic and pool. `moving` is the mean number of sequences if pieces are
    compacted whenever enough slots are free. `copied_over_moved` divides the slots that gathering copies by those that
    compacting copies.
    """
    compacting, mean = Compacting(), statistics.mean
    tables = moments_of("s2", in_tables(), model, BlockManager.can_promise)
    runs = {"slots": crowded_moments(model), "blocks": tables[START:], "moving": crowded_moments(model, compacting)}
    pieces, blocks = ([moment.report for moment in runs[name]] for name in ("slots", "blocks"))
    return {
        **{name: mean(moment.num_running for moment in moments) for name, moments in runs.items()},
        **{part: mean(getattr(report, part) / POOL for report in blocks) for part in ("promised", "held")},
        "empty": mean(report.wasted / report.held for report in blocks),
        "empty_in_slots": mean(report.wasted / report.held for report in pieces),
        "copied_over_moved": sum(moment.report.held for moment in tables) / sum(compacting.moved),
    }


def blocks_held(model: Path) -> list[int]:
    """Return how many blocks a prompt of BLOCK_SIZE tokens holds after its first and its second step."""
    llm = s2.LLM(model, dtype="float32", block_size=BLOCK_SIZE, kv_cache_tokens=LONGEST)
    stream = llm.stream([[3] * BLOCK_SIZE], s2.SamplingParams(max_tokens=3, ignore_eos=True))
    return [llm.kv_cache_manager.report().held // BLOCK_SIZE for _ in zip(range(2), stream, strict=False)]


def gather_cost(config: ModelConfig) -> Scores:
    """Return the time of a decode step relative to stage 1, and the bytes that it copies at LONG tokens.

    The cases come from the decode table: one long sequence, and eight sequences.
    """
    cache = KVCache(config, 1, BLOCK_SIZE, torch.float32, torch.get_default_device())
    num_slots = -(-LONG // BLOCK_SIZE) * BLOCK_SIZE  # of whole blocks
    result: Scores = {"longest": LONG, "copied_bytes": num_slots * cache.bytes_per_token}
    for name, (batch, context) in {"at_longest": (1, LONG), "of_8": (8, 512)}.items():
        case = decode_case(batch, context)
        least, largest = case["s2_over_s1_spread"]
        result |= Spread(1 / case["s2_over_s1"], 1 / largest, 1 / least).named(name)
    return result
