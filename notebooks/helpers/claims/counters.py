"""Counters of an engine's pool: who runs and waits, what is free, idle and held, and how often what happened."""

import itertools
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, INK, PALE, PAPER, USED
from stages.bench.engines import without_model
from stages.bench.models import STORYTELLER
from stages.bench.racing import sampling_params
from stages.bench.workloads import growing_tasks


class State(NamedTuple):
    """After a step."""

    running: int
    waiting: int
    held: int  # blocks
    idle: int  # free, with a text that may be hit
    free: int  # free, without
    preemptions: int  # since the start, and so are those below
    hits: int  # tokens
    stored: int  # blocks that went to the host
    loaded: int
    copied: int


def of(engine: Any) -> State:
    """Return the state of an engine of stage 7."""
    manager, tier = engine.kv_cache_manager, engine.host_tier
    idle = sum(block in manager.pool.hashes for block in manager.pool.free)
    return State(
        len(engine.scheduler.running),
        len(engine.scheduler.waiting),
        manager.num_blocks - manager.num_free_blocks,
        idle,
        manager.num_free_blocks - idle,
        engine.scheduler.num_preemptions,
        manager.prefix_cache_stats.hits,
        tier.num_blocks_stored,
        tier.num_blocks_loaded,
        engine.kv_cache.num_blocks_copied,
    )


def watch(num_requests: int = 16) -> tuple[list[State], int]:
    """Stage 7 without a model in a third of the pool that all need, and its watermark in blocks."""
    requests = growing_tasks(4096, num_requests, prompt=64, output=96, spread=32)
    pool = sum(request.num_tokens for request in requests) // 3
    engine = without_model(
        "s7", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=pool, kv_offloading_tokens=4 * pool
    )
    for number, request in enumerate(requests):
        engine.add_request(str(number), request.prompt, sampling_params("s7", request))
    states = []
    while engine.has_unfinished_requests():
        engine.step()
        states.append(of(engine))
    return states, int(engine.config.watermark * engine.kv_cache_manager.num_blocks)


def draw(states: list[State], watermark: int) -> Figure:
    last = states[-1]
    finding = f"{last.preemptions} preemptions; {last.stored} blocks go to the host, {last.loaded} come back"
    fig, (above, below) = pictures.figure(finding, height=3.6, rows=2, sharex=True, height_ratios=(2, 1))
    x, bottom = range(len(states)), [0.0] * len(states)
    for name, color in (("held", USED), ("idle", PALE), ("free", PAPER)):
        top = [b + getattr(state, name) for b, state in zip(bottom, states, strict=True)]
        above.fill_between(x, bottom, top, step="post", color=color, linewidth=0)
        bottom = top
    total = bottom[0]
    above.axhline(total - watermark, color=ACCENT, linewidth=1, linestyle="--")
    pictures.label(above, f"watermark: {watermark}", (len(states), total - watermark), (-4, -10), ACCENT, ha="right")
    above.set(ylim=(0, total), ylabel="blocks", xlim=(0, len(states)))
    pictures.legend(above, {"held": USED, "idle: cached, free": PALE, "free": PAPER})
    below.step(x, [state.running for state in states], where="post", color=USED, linewidth=1.4)
    below.step(x, [state.waiting for state in states], where="post", color=INK, linewidth=1.1, linestyle="--")
    below.set(ylabel="requests", xlabel="step", ylim=(0, None))
    pictures.legend(below, {"running": USED, "waiting, dashed": INK})
    return fig


def table(states: list[State]) -> str:
    last = states[-1]
    out_of_blocks = sum(b.preemptions > a.preemptions for a, b in itertools.pairwise(states))
    return (
        "| counter | in this run | where it stands |\n|---|---|---|\n"
        f"| steps in which blocks ran out | {out_of_blocks} | scheduler.num_preemptions, before and after |\n"
        f"| preemptions | {last.preemptions} | scheduler.num_preemptions |\n"
        f"| tokens found in the cache | {last.hits:,} | kv_cache_manager.prefix_cache_stats.hits |\n"
        f"| blocks stored, loaded | {last.stored}, {last.loaded} | host_tier.num_blocks_stored, "
        "num_blocks_loaded |\n"
        f"| blocks copied to be written | {last.copied} | kv_cache.num_blocks_copied |\n"
    )
