"""Helpers of stage 5's notebook: the blocks that each step holds and copies, and a beam search step by step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Patch, Rectangle

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PALE, PAPER, USED
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


# ---- beams


class Beam(NamedTuple):
    """A beam at one step."""

    token_ids: tuple[int, ...]
    table: tuple[int, ...]


class BeamStep(NamedTuple):
    beams: list[Beam]
    ref_counts: dict[int, int]  # of the blocks that the beams hold
    copied_to: set[int]  # blocks

    def parents(self, before: "BeamStep") -> list[int]:
        """Return for each beam the row of its parent in the step before."""
        rows = {beam.token_ids: row for row, beam in enumerate(before.beams)}
        return [rows[beam.token_ids[:-1]] for beam in self.beams]


def watch_beams(llm: Any, prompt: str | list[int], width: int, max_tokens: int) -> list[BeamStep]:
    """Run a beam search, and return its beams at each step after the prompt."""
    params = s5.BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    with watched(llm.llm_engine) as steps:
        [output] = llm.beam_search([prompt], params)
    assert output.error is None, output.error
    return steps


@contextmanager
def watched(engine: Any) -> Iterator[list[BeamStep]]:
    """Record the beams of each step that the engine runs inside the context."""
    steps, copied = list[BeamStep](), set[int]()
    copy, compute = engine.kv_cache.copy_blocks, engine.model_runner.compute_logits

    def noted_copy(copies: Any) -> None:
        copied.update(copy.target for copy in copies)
        copy(copies)

    def noted_compute(batch: Any) -> Any:
        if all(seq.num_uncomputed_tokens == count for seq, count in batch):
            rows = [Beam(tuple(seq.token_ids), tuple(seq.block_table)) for seq, _ in batch]
            blocks = {block for row in rows for block in row.table}
            counts = {block: sum(block in row.table for row in rows) for block in sorted(blocks)}
            steps.append(BeamStep(rows, counts, copied & blocks))
            copied.clear()
        return compute(batch)

    engine.kv_cache.copy_blocks, engine.model_runner.compute_logits = noted_copy, noted_compute
    yield steps
    del engine.kv_cache.copy_blocks, engine.model_runner.compute_logits


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

SHADES = {1: PAPER, 2: PALE, 3: "#8fa9bb"}  # of a block, by its reference count; above: USED
WORD = 3.0  # room for a beam's last token, in cells


def beam_steps(steps: Sequence[BeamStep], first: int, title: str, tokenizer: Any) -> Figure:
    """Draw a panel for each step, from step `first` on, with a row for each beam: its blocks in order, then its token.

    A block has its number and its reference count, and an orange edge if it was copied for this step. An arrow leads
    from a beam to each of its children; a beam without children has a cross.
    """
    rows = max(len(step.beams) for step in steps)
    end = max(len(beam.table) for step in steps for beam in step.beams) + WORD
    fig, axes = pictures.figure(title, 1.3 + 0.46 * rows, columns=len(steps))
    for number, (ax, step) in enumerate(zip(axes, steps, strict=True)):
        for row, beam in enumerate(step.beams):
            for column, block in enumerate(beam.table):
                cell(ax, column, -row, block, step.ref_counts[block], block in step.copied_to)
            ax.text(len(beam.table) + 0.15, -row, tokenizer.decode(list(beam.token_ids[-1:])), va="center", fontsize=8)
        ax.set(xlim=(-1.0, end), ylim=(-rows + 0.4, 0.6), xticks=[], yticks=[])
        ax.set_title(f"step {first + number}", x=1 / (end + 1))
        pictures.bare(ax)
        parents = step.parents(steps[number - 1]) if number else []
        for row, parent in enumerate(parents):
            arrow(axes[number - 1], (end, -parent), ax, (-0.02, -row))
        for row in set(range(len(steps[number - 1].beams) if number else 0)) - set(parents):
            axes[number - 1].text(end, -row, "×", ha="center", va="center", color=INK, fontsize=11)
    keys = [*((f"held by {count}", color, GREY, 0.7) for count, color in SHADES.items())]
    keys += [("copied for this step", PAPER, ACCENT, 2.0)]
    patches = [Patch(facecolor=fill, edgecolor=edge, linewidth=width, label=text) for text, fill, edge, width in keys]
    fig.legend(handles=patches, loc="outside lower left", ncols=len(patches), **pictures.KEY)
    return fig


def arrow(start: Axes, at: tuple[float, float], end: Axes, to: tuple[float, float]) -> None:
    """Draw an arrow from one panel to the next."""
    look = {"arrowstyle": "-|>", "mutation_scale": 9, "color": INK, "linewidth": 1.0}
    line = ConnectionPatch(at, to, start.transData, end.transData, **look)
    line.set_in_layout(False)
    end.figure.add_artist(line)


def cell(ax: Axes, column: int, row: int, block: int, count: int, is_copy: bool) -> None:
    """Draw a block of a table."""
    fill = SHADES.get(count, USED)
    edge, width = (ACCENT, 2.0) if is_copy else (GREY, 0.7)
    ax.add_patch(Rectangle((column + 0.05, row - 0.4), 0.9, 0.8, facecolor=fill, edgecolor=edge, linewidth=width))
    ink = PAPER if fill == USED else INK
    ax.text(column + 0.5, row + 0.14, str(block), ha="center", va="center", color=ink, fontsize=8.5)
    ax.text(column + 0.5, row - 0.22, f"×{count}", ha="center", va="center", color=ink, fontsize=6.5)


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
