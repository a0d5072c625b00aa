"""Stage 2: what blocks save, what promising them leaves on the table, and what gathering them costs."""

import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages import s2_block_manager as s2
from stages.bench.counting import storages
from stages.bench.engines import silent
from stages.bench.harness import Spread, take_turns, timed
from stages.bench.predict.common import Answer, Shown, with_answers
from stages.bench.replay import Compacting, Moment, admitted, arrivals, in_blocks, replay
from stages.bench.results import decode_case
from stages.bench.workloads import Traffic, mixed_workload, traffic
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.kv_cache import KVCache
from stages.s2_block_manager.llama import ModelConfig

POOL, LONGEST, BLOCK_SIZE = 8192, 1024, 16
LONG = 1000  # the longest context of one sequence in the decode table
BLOCK_SIZES = (1, 16, 256)
START = 300  # the first step of the traffic that counts: by then the pool has filled up


def answers(model: Path) -> dict[str, Any]:
    config = ModelConfig.from_folder(model)
    seats, traffic_numbers, held = seats_in_a_batch(config), at_once(config), blocks_held(model)
    empty, copy, cost = mean_empty(config), copy_milliseconds(config), gather_cost(model)
    numbers: dict[str, Any] = {
        "seats": seats,
        "at_once": traffic_numbers,
        "held": {"first_step": held[0], "second_step": held[1]},
        "empty": {str(size): slots for size, slots in empty.items()},
        "copy_ms": {name: number for size, ms in copy.items() for name, number in ms.named(str(size)).items()},
        "gather": cost,
    }
    show = Shown("predict.s2", numbers)
    return with_answers(numbers, [about_promises(show), about_a_block(show), about_sizes(show), about_copies(show)])


def about_promises(show: Shown) -> Answer:
    return Answer(
        "Stage 1 can reserve prompt + `max_tokens` slots in one piece; stage 2 promises blocks for as many. Does the "
        "same pool then take more sequences?",
        f"Hardly. Of the 32 requests below, {show('seats.blocks')} start at once in place of {show('seats.slots')}: a "
        f"promise is rounded up to whole blocks. Where others come and go it is {show('at_once.blocks', '.1f')} on "
        f"average in place of {show('at_once.slots', '.1f')}, because there are no holes. But only "
        f"{show('at_once.held', '.0%')} of the pool is held, while {show('at_once.promised', '.0%')} is promised: "
        "until stage 4, promises cap the batch.",
    )


def about_a_block(show: Shown) -> Answer:
    return Answer(
        "Blocks of 16. A prompt has 16 tokens: how many blocks does its sequence hold after its first step, which "
        "samples token 17? After the second?",
        f"{show('held.first_step')} and {show('held.second_step')}. Token 17 is appended at the end of the first step, "
        "but its keys and values are computed in the second, and only that one takes a block for them.",
    )


def about_sizes(show: Shown) -> Answer:
    empty = [show(f"empty.{size}", ".1f") for size in BLOCK_SIZES]
    copy = [show(f"copy_ms.{size}", ".2f") for size in BLOCK_SIZES]
    return Answer(
        "Does a block size of 1 waste nothing? And is it the fastest?",
        f"Over lengths of 1 to 512 tokens a sequence leaves {empty[0]} slots empty on average with blocks of 1, "
        f"{empty[1]} with blocks of 16, {empty[2]} with blocks of 256. To copy {LONG:,} tokens out of them takes "
        f"{copy[0]}, {copy[1]} and {copy[2]} ms; with blocks of 1 that is an entry of the block table and a copy for "
        "each token.",
    )


def about_copies(show: Shown) -> Answer:
    return Answer(
        f"Every step first copies the keys and values of each sequence into one piece. At {LONG:,} tokens, how many "
        "bytes does a step copy, to write 8,192 new ones? How many times as long as in stage 1 does it take?",
        f"{show('gather.copied_bytes', ',')} bytes, and {show('gather.at_longest', '.2f')} times as long "
        f"({show('gather.at_128', '.2f')} times at 128 tokens). For 8 sequences of 512 tokens it is "
        f"{show('gather.of_8', '.2f')} times.",
    )


def seats_in_a_batch(config: ModelConfig) -> dict[str, int]:
    """How many of the scoreboard's requests start together, each with room for prompt + max_tokens."""
    workload = mixed_workload(config.vocab_size)
    requests = [Traffic(len(r.prompt_token_ids), r.num_output_tokens, r.num_output_tokens) for r in workload]
    pieces = [seq for seq, _ in arrivals("s1", config, requests, LONGEST)]
    tables = [seq for seq, _ in arrivals("s2", config, requests, LONGEST)]
    return {
        "slots": admitted(in_slots(), pieces, SlotManager.can_allocate),
        "blocks": admitted(in_tables(), tables, BlockManager.can_promise),
    }


def at_once(config: ModelConfig) -> dict[str, float]:
    """Sequences that run at once, the mean, in made-up traffic as in part 1 of the notebook (whose pool is half as
    large); what of the pool is promised and held, and what of that is empty. `moving`: with pieces that are moved
    together whenever enough is free; `copied_over_moved`: the slots that gathering copies, over those that this moves.
    """
    compacting = Compacting()
    pieces = replayed("s1", in_slots(), config, SlotManager.can_allocate)[START:]
    tables = replayed("s2", in_tables(), config, BlockManager.can_promise)
    packed = replayed("s1", in_slots(), config, compacting)[START:]
    copied_over_moved = sum(moment.report.held for moment in tables) / sum(compacting.moved)
    reports, tables = [moment.report for moment in tables[START:]], tables[START:]
    return {
        "slots": statistics.mean(moment.num_running for moment in pieces),
        "blocks": statistics.mean(moment.num_running for moment in tables),
        "promised": statistics.mean(report.promised / POOL for report in reports),
        "held": statistics.mean(report.held / POOL for report in reports),
        "empty": statistics.mean(report.wasted / report.held for report in reports),
        "empty_in_slots": statistics.mean(moment.report.wasted / moment.report.held for moment in pieces),
        "moving": statistics.mean(moment.num_running for moment in packed),
        "copied_over_moved": copied_over_moved,
    }


def in_slots() -> SlotManager:
    return SlotManager(POOL, "request", LONGEST, silent("s1"))


def in_tables() -> BlockManager:
    return BlockManager(POOL // BLOCK_SIZE, BLOCK_SIZE, silent("s2"))


def replayed(name: str, manager: Any, config: ModelConfig, admits: Callable[[Any, Any], bool]) -> list[Moment]:
    """Return the moments of a manager of stage `name` under the traffic, step after step."""
    return replay(manager, arrivals(name, config, traffic(1500, seed=1), LONGEST), 1500, admits)


def blocks_held(model: Path) -> list[int]:
    """How many blocks the sequence of a prompt of BLOCK_SIZE tokens holds after its first step, and its second."""
    llm = s2.LLM(model, dtype="float32", block_size=BLOCK_SIZE, kv_cache_tokens=LONGEST)
    stream = llm.stream([[3] * BLOCK_SIZE], s2.SamplingParams(max_tokens=3, ignore_eos=True))
    return [llm.kv_cache_manager.report().held // BLOCK_SIZE for _ in zip(range(2), stream, strict=False)]


def mean_empty(config: ModelConfig) -> dict[int, float]:
    """For each block size the slots that a sequence holds and does not use, the mean over lengths of 1 to 512."""
    lengths = range(1, 513)
    return {size: in_blocks(config, lengths, size).wasted / len(lengths) for size in BLOCK_SIZES}


def copy_milliseconds(config: ModelConfig, num_tokens: int = LONG) -> dict[int, Spread]:
    """What it takes to gather the keys and values of one sequence, all layers, from blocks in any order."""
    calls = {}
    for size in BLOCK_SIZES:
        cache = KVCache(config, POOL // size, size, torch.float32, torch.get_default_device())
        order = random.Random(0).sample(range(POOL // size), -(-num_tokens // size))
        layers = range(config.num_hidden_layers)
        calls[size] = partial(read_layers, cache, torch.tensor(order), num_tokens, layers)
    rounds = take_turns({size: timed(call) for size, call in calls.items()}, num_rounds=75)
    return {size: Spread.of([1000 * each[size] for each in rounds]) for size in BLOCK_SIZES}


def read_layers(cache: KVCache, block_table: torch.Tensor, num_tokens: int, layers: range) -> None:
    for layer in layers:
        cache.read(layer, block_table, num_tokens)


def gather_cost(model: Path) -> dict[str, Any]:
    """How many times as long as in stage 1 a decode step of stage 2 is, and the bytes that one copies at LONG tokens.

    The steps are the decode table's: of one sequence, of one long one, and of eight.
    """
    blocks = s2.LLM(model, dtype="float32", kv_cache_tokens=POOL, block_size=BLOCK_SIZE)
    found: dict[str, Any] = {"longest": LONG, "copied_bytes": copied_bytes(blocks, LONG)}
    for name, (batch, context) in {"at_128": (1, 128), "at_longest": (1, LONG), "of_8": (8, 512)}.items():
        case = decode_case(batch, context)
        least, largest = case["s2_over_s1_spread"]
        found |= Spread(1 / case["s2_over_s1"], 1 / largest, 1 / least).named(name)
    return found


def copied_bytes(llm: Any, num_tokens: int) -> int:
    """What a step copies out of the pool for a sequence of `num_tokens` tokens."""
    read, copied = llm.kv_cache.read, list[int]()

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pair = read(*args)
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages(pair)}
        assert llm.kv_cache.blocks.data_ptr() not in sizes, "no copy"
        copied.append(sum(sizes.values()))
        return pair

    llm.kv_cache.read = counted
    try:
        llm.generate([[3] * num_tokens], s2.SamplingParams(max_tokens=1))
    finally:
        llm.kv_cache.read = read
    return sum(copied)
