"""A decode step over time: torch's operations under the profiler, and the phases of a step that is one call."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from torch.profiler import ProfilerActivity, profile

from nanovllm.bench import harness
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, PAPER, USED
from notebooks.helpers.ways import PACKED, PLAIN, DecodeStep, one_thread
from stages.bench.counting import silent_stderr


class Span(NamedTuple):
    name: str
    start: float  # microseconds from the step's begin
    end: float


KINDS = {"linear": USED, "attention": ACCENT, "others": GREY}


def kind_of(name: str) -> str:
    if "linear" in name or "mm" in name:
        return "linear"
    return "attention" if "attention" in name else "others"


def plain_timeline(step: DecodeStep) -> list[Span]:
    """Torch's operations of one plain step, none inside another, on one core. The profiler adds to each."""
    batch = [(step.seqs[0], 1)]
    with one_thread(), step._ways[PLAIN]() as run:
        run(batch)
        with silent_stderr(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            run(batch)
    events = [event for event in profiler.events() if event.cpu_parent is None and event.name.startswith("aten::")]
    events.sort(key=lambda event: event.time_range.start)
    first = events[0].time_range.start
    return [Span(event.name, event.time_range.start - first, event.time_range.end - first) for event in events]


PHASES = ("qkv", "attention", "output", "gate and up", "down")
PHASE_KINDS = dict.fromkeys(PHASES, "linear") | {"attention": "attention", "logits": "linear"}


def compiled_timeline(step: DecodeStep, num_steps: int = 9) -> list[Span]:
    """The phases of a step in one call, by its counters: another thread looks at them all the time.

    The step has one worker, so that a core is left for the thread that looks. Of `num_steps` it is the median one.
    Steps during which that thread had no core for a while are left out, unless there are no others.
    """
    from notebooks.helpers.taking import watched

    with step._ways[PACKED]():  # its model has the plain layers, whose weights are taken
        few = one_worker(step)
    seq = step.seqs[0]
    given = [seq.token_ids[seq.num_computed_tokens]], [seq.block_table], [seq.num_computed_tokens + 1]
    few.run(*given)
    least = 1e6 * min(harness.seconds_of(lambda: few.run(*given)) for _ in range(9))
    seen = []
    for _ in range(9 * num_steps):
        seen.append(spans_of(watched(few, lambda: few.run(*given))))
        whole = [spans for spans in seen if spans[-1].end > 0.8 * least]
        if len(whole) == num_steps:
            break
    return sorted(whole or seen, key=lambda spans: spans[-1].end)[len(whole or seen) // 2]


def one_worker(step: DecodeStep) -> Any:
    from nanovllm.backends.cpu.decode_step import DecodeRunner

    with one_thread():
        return DecodeRunner(step.runner.model, step.llm.llm_engine.kv_cache, step.context + 32)


def spans_of(times: Sequence[float]) -> list[Span]:
    """Microseconds: when each phase began, and when the last one ended. A phase lasts until the next one begins.

    >>> [span.name for span in spans_of([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 18.0])]
    ['qkv', 'attention', 'output', 'gate and up', 'down', 'logits']
    """
    names = [PHASES[phase % len(PHASES)] for phase in range(len(times) - 2)] + ["logits"]
    return [
        Span(name, start - times[0], end - times[0]) for name, (start, end) in zip(names, pairwise(times), strict=True)
    ]


def share_of(spans: Sequence[Span], kinds: Mapping[str, str]) -> dict[str, float]:
    """Return each kind's share of the time from the first to the last. The rest is Python, between operations."""
    whole = spans[-1].end - spans[0].start
    found = {kind: 0.0 for kind in KINDS}
    for span in spans:
        found[kinds[span.name]] += (span.end - span.start) / whole
    return found | {"nothing": 1 - sum(found.values())}


def draw_timeline(ax: Axes, spans: Sequence[Span], kinds: Mapping[str, str], title: str) -> None:
    """Slivers, one for each operation or phase. White: none of them runs."""
    for kind, color in KINDS.items():
        boxes = [pictures.box(span.start, span.end - span.start, 0, 1) for span in spans if kinds[span.name] == kind]
        pictures.polygons(ax, boxes, color, PAPER, 0.15)
    ax.set(xlim=(0, spans[-1].end), ylim=(-0.05, 1.05), yticks=[], title=title)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: pictures.duration(value) if value else "0"))


def draw_layer(ax: Axes, spans: Sequence[Span], layer: int) -> None:
    """The phases of one layer, named."""
    chosen = spans[layer * len(PHASES) : (layer + 1) * len(PHASES)]
    start = chosen[0].start
    moved = [Span(span.name, span.start - start, span.end - start) for span in chosen]
    draw_timeline(ax, moved, PHASE_KINDS, f"one call, its layer {layer}")
    for span in moved:
        ax.text((span.start + span.end) / 2, -0.18, span.name, ha="center", va="top", fontsize=8)
    ax.xaxis.tick_top()
    ax.spines["bottom"].set_visible(False)
