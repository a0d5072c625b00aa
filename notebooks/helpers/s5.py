"""What stage 5's notebook needs: what a step holds and copies, a beam search that is watched, pictures of both."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PALE, PAPER, USED
from stages import s5_cow_sampling as s5
from stages.bench.engines import by_sample, without_model
from stages.bench.workloads import even_prompt

# ---- samples


class Ask(NamedTuple):
    """A request: so many samples of a prompt of so many tokens."""

    num_prompt_tokens: int
    num_output_tokens: int
    n: int = 1


class Moment(NamedTuple):
    """A step of an engine, when the model runs."""

    blocks: int  # held
    tables: int  # entries of all block tables: what would be held if nothing were shared
    copied: int  # blocks copied for this step


def serve(options: dict[str, Any], *asks: Ask) -> list[Moment]:
    """All are there at once; a new engine without a model serves them. `options` are EngineConfig's."""
    engine = without_model("s5", by_sample, **options)
    for number, ask in enumerate(asks):
        params = s5.SamplingParams(n=ask.n, max_tokens=ask.num_output_tokens, ignore_eos=True)
        engine.add_request(str(number), even_prompt(ask.num_prompt_tokens), params)
    manager, moments, run = engine.kv_cache_manager, list[Moment](), engine.model_runner.run

    def noted(batch: Any) -> Any:
        blocks = manager.num_blocks - manager.num_free_blocks
        tables = sum(len(seq.block_table) for seq in engine.scheduler.running)
        before = sum(moment.copied for moment in moments)
        moments.append(Moment(blocks, tables, engine.kv_cache.num_blocks_copied - before))
        return run(batch)

    engine.model_runner.run = noted
    while engine.has_unfinished_requests():
        engine.step()
    return moments


def blocks_at_most(moments: Sequence[Moment]) -> int:
    return max(moment.blocks for moment in moments)


def saving(options: dict[str, Any], num_prompt_tokens: int, num_own_tokens: int, n: int) -> float:
    """What saved() says, counted. A step has room for all prompts: so none has ended when the last one comes."""
    options = options | {"max_num_batched_tokens": n * num_prompt_tokens}
    num_output_tokens = num_own_tokens + 1  # the last is never computed
    together = serve(options, Ask(num_prompt_tokens, num_output_tokens, n))
    apart = serve(options, *[Ask(num_prompt_tokens, num_output_tokens)] * n)
    return 1 - blocks_at_most(together) / blocks_at_most(apart)


def saved(num_prompt_tokens: int, num_own_tokens: int, n: int, block_size: int) -> float:
    """The share of the blocks that n samples of a prompt save, each with so many tokens of its own.

    Each computes the prompt's last token itself: only full blocks before it stay shared.

    >>> saved(4, 4, 2, block_size=4), saved(5, 0, 2, block_size=4), saved(9, 0, 4, block_size=4)
    (0.0, 0.25, 0.5)
    """
    each = -(-(num_prompt_tokens + num_own_tokens) // block_size)
    shared = (num_prompt_tokens - 1) // block_size
    return (n - 1) * shared / (n * each)


# ---- beams


class Beam(NamedTuple):
    """A row of a picture: a beam at one step."""

    token_ids: tuple[int, ...]
    table: tuple[int, ...]


class BeamStep(NamedTuple):
    beams: list[Beam]
    ref_counts: dict[int, int]  # of the blocks that the beams hold
    copied_to: set[int]  # blocks

    def parents(self, before: "BeamStep") -> list[int]:
        """For each beam the row of the step before that it goes on from."""
        rows = {beam.token_ids: row for row, beam in enumerate(before.beams)}
        return [rows[beam.token_ids[:-1]] for beam in self.beams]


def watch_beams(llm: Any, prompt: str | list[int], width: int, max_tokens: int) -> list[BeamStep]:
    """Search with beams, and note who holds what each time that the model runs; steps of the prompt are left out."""
    params = s5.BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    with watched(llm.llm_engine) as steps:
        [output] = llm.beam_search([prompt], params)
    assert output.error is None, output.error
    return steps


@contextmanager
def watched(engine: Any) -> Iterator[list[BeamStep]]:
    """Stands before an engine's copies and steps; what it notes is empty at first."""
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
    """`child` shares all that `parent` has computed, and lets go."""
    manager.fork(parent, child)
    manager.free(child)


def copy_and_wait(cache: Any, copies: list[Any]) -> None:
    """A GPU has done it when this returns."""
    cache.copy_blocks(copies)
    if cache.blocks.is_cuda:
        torch.cuda.synchronize()


# ---- pictures

SHADES = {1: PAPER, 2: PALE, 3: "#8fa9bb"}  # of a block, by how many hold it; more: USED


def beam_steps(steps: Sequence[BeamStep], first: int, finding: str, tokenizer: Any) -> Figure:
    """A panel a step, a row a beam: its blocks in order, each with its number and how many hold it, the more the
    darker, and the beam's last token. A block that was copied for this step has an orange edge. An arrow leads from a
    beam to each that goes on from it, a cross stands where none does. `first` is the number of the first step.
    """
    rows = max(len(step.beams) for step in steps)
    longest = max(len(beam.table) for step in steps for beam in step.beams)
    fig, axes = pictures.figure(finding, 1.3 + 0.46 * rows, columns=len(steps))
    ends: list[float] = []
    for number, (ax, step) in enumerate(zip(axes, steps, strict=True)):
        for row, beam in enumerate(step.beams):
            for column, block in enumerate(beam.table):
                cell(ax, column, -row, block, step.ref_counts[block], block in step.copied_to)
            text = tokenizer.decode(list(beam.token_ids[-1:]))
            ax.text(len(beam.table) + 0.15, -row, text, va="center", fontsize=8)
        ax.set(
            xlim=(-0.35, longest + 2.3), ylim=(-rows + 0.4, 0.6), xticks=[], yticks=[], title=f"step {first + number}"
        )
        ax.set_xlabel("\n")  # room for the key
        pictures.bare(ax)
        parents = step.parents(steps[number - 1]) if number else []
        for row, parent in enumerate(parents):
            arrow(axes[number - 1], (ends[parent], -parent), ax, (-0.02, -row))
        for row in set(range(len(ends))) - set(parents):
            axes[number - 1].text(ends[row] + 0.4, -row, "×", ha="center", va="center", color=INK, fontsize=11)
        ends = [len(beam.table) + 1.9 for beam in step.beams]
    key(axes[0])
    return fig


def arrow(start: Axes, at: tuple[float, float], end: Axes, to: tuple[float, float]) -> None:
    """From one panel to the next."""
    line = ConnectionPatch(
        at, to, start.transData, end.transData, arrowstyle="-|>", mutation_scale=9, color=INK, linewidth=1.0
    )
    line.set_in_layout(False)
    end.figure.add_artist(line)


def cell(ax: Axes, column: int, row: int, block: int, count: int, is_copy: bool) -> None:
    """A block of a table."""
    fill = SHADES.get(count, USED)
    edge, width = (ACCENT, 2.0) if is_copy else (GREY, 0.7)
    ax.add_patch(Rectangle((column + 0.05, row - 0.4), 0.9, 0.8, facecolor=fill, edgecolor=edge, linewidth=width))
    ink = PAPER if fill == USED else INK
    ax.text(column + 0.5, row + 0.14, str(block), ha="center", va="center", color=ink, fontsize=8.5)
    ax.text(column + 0.5, row - 0.22, f"×{count}", ha="center", va="center", color=ink, fontsize=6.5)


def key(ax: Axes) -> None:
    """What the shades mean, below a panel; wider than it may be."""
    marks = [*((f"×{count}: held by {count}", color, GREY) for count, color in SHADES.items())]
    for i, (text, fill, edge) in enumerate([*marks, ("copied for this step", PAPER, ACCENT)]):
        left = 0.02 + 0.95 * i
        width = 1.5 if edge == ACCENT else 0.7
        patch = Rectangle((left, -0.2), 0.12, 0.11, facecolor=fill, edgecolor=edge, linewidth=width)
        ax.add_artist(patch).set(transform=ax.transAxes, clip_on=False, in_layout=False)
        ax.text(left + 0.17, -0.2, text, transform=ax.transAxes, va="bottom").set_in_layout(False)


def held_over_time(ax: Axes, runs: Mapping[str, Sequence[Moment]], label_at: Sequence[int]) -> None:
    """Blocks held in each step, a line for each of two runs, whose names end above and below a step of `label_at`; and
    a mark with a number where blocks were copied.
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


def shared_and_not(ax: Axes, x: Sequence[float], blocks: Mapping[str, Sequence[float]], xlabel: str) -> None:
    """Blocks by something, under several names; the first is the one that costs too much, the last the least that
    can be.
    """
    looks = ((ACCENT, "-"), (USED, "o-"), (GREY, "--"))
    series = [
        pictures.Line(x, values, name, color, style=style)
        for (name, values), (color, style) in zip(blocks.items(), looks, strict=False)
    ]
    pictures.lines(ax, series, xlabel, "blocks")
    ax.set(ylim=(0, None))
