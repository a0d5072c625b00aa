"""Helpers of stage 5's notebook: the blocks that each step holds and copies, and what forks and copies cost."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, INK, USED
from stages import s5_cow_sampling as s5
from stages.bench.engines import by_sample, without_model
from stages.bench.workloads import even_prompt

# ---- samples


class Ask(NamedTuple):
    """A request for `n` samples of one prompt."""

    num_prompt_tokens: int
    num_output_tokens: int
    n: int = 1


class Moment(NamedTuple):
    """The blocks of an engine when the model runs."""

    blocks: int  # held
    copied: int  # blocks copied for this step


def serve(options: dict[str, Any], *asks: Ask) -> list[Moment]:
    """Serve all requests at once with a new engine without a model. `options` are EngineConfig's."""
    engine = without_model("s5", by_sample, **options)
    for number, ask in enumerate(asks):
        params = s5.SamplingParams(n=ask.n, max_tokens=ask.num_output_tokens, ignore_eos=True)
        engine.add_request(str(number), even_prompt(ask.num_prompt_tokens), params)
    manager, moments, run = engine.kv_cache_manager, list[Moment](), engine.model_runner.run

    def noted(batch: Any) -> Any:
        blocks = manager.num_blocks - manager.num_free_blocks
        before = sum(moment.copied for moment in moments)
        moments.append(Moment(blocks, engine.kv_cache.num_blocks_copied - before))
        return run(batch)

    engine.model_runner.run = noted
    while engine.has_unfinished_requests():
        engine.step()
    return moments


def peak_blocks(moments: Sequence[Moment]) -> int:
    return max(moment.blocks for moment in moments)


# ---- costs


def fork_and_free(manager: Any, parent: Any, child: Any) -> None:
    """Share the blocks of `parent` with `child`, and free them again."""
    manager.fork(parent, child)
    manager.free(child)


def copy_and_wait(cache: Any, copies: list[Any]) -> None:
    """Copy blocks, and wait for the GPU if there is one."""
    cache.copy_blocks(copies)
    if cache.blocks.is_cuda:
        torch.cuda.synchronize()


# ---- pictures


def held_over_time(ax: Axes, runs: Mapping[str, Sequence[Moment]], label_at: Sequence[int]) -> None:
    """Draw the blocks that two runs hold in each step, with a mark and a number where blocks were copied.

    The name of a run ends at its step of `label_at`, above the line of the first run and below that of the second.
    """
    looks = ((USED, "-", (0, 4)), (INK, "--", (0, -12)))
    for (name, moments), at, (color, style, shift) in zip(runs.items(), label_at, looks, strict=False):
        blocks = [moment.blocks for moment in moments]
        ax.step(range(len(blocks)), blocks, style, where="post", color=color, linewidth=1.6)
        pictures.label(ax, name, (at, blocks[at]), shift, color, ha="right")
        copies = {i: moment.copied for i, moment in enumerate(moments) if moment.copied}
        for step, count in copies.items():
            ax.plot(step, blocks[step], "o", color=ACCENT, markersize=6)
            pictures.label(ax, f"{count} copies", (step, blocks[step]), (-2, 8), ACCENT, ha="left")
    ax.set(xlabel="step", ylabel="blocks held", ylim=(0, None))
