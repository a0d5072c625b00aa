"""The states of a request, as stage 4's scheduler moves it: a diagram whose arrows are what an observer hears."""

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, INK, PALE, PAPER, USED
from stages.bench.engines import without_model
from stages.bench.models import STORYTELLER
from stages.s4_continuous_batching import SamplingParams
from stages.s4_continuous_batching.observer import Observer

STATES = {  # name: (x, y, fill, ink)
    "waiting": (1.2, 1.0, PAPER, INK),
    "running:\na chunk a step": (4.2, 1.0, PALE, INK),
    "running:\na token a step": (7.2, 1.0, USED, PAPER),
    "finished": (10.0, 1.0, PAPER, INK),
    "error": (7.2, -0.65, PAPER, INK),
}
ARROWS = [  # from, to, what is heard, bend, where the label stands
    ("waiting", "running:\na chunk a step", "admit", 0.0, (2.7, 1.14)),
    ("running:\na chunk a step", "running:\na token a step", "step", 0.0, (5.7, 1.14)),
    ("running:\na token a step", "finished", "finish", 0.0, (8.72, 1.14)),
    ("running:\na token a step", "waiting", "preempt", -0.32, (4.2, 2.34)),
    ("running:\na token a step", "error", "finish", 0.0, (7.55, 0.1)),
    ("waiting", "error", "finish", 0.12, (3.6, -0.72)),
]


class Kinds(Observer):
    """The kinds of events that were heard."""

    def __init__(self) -> None:
        self.heard = set[str]()

    def tell(self, kind: str, *details: object) -> None:
        self.heard.add(kind)


def check() -> None:
    """Assert that an engine tells of each arrow: with two sequences that outgrow its pool, and one that is too long."""
    observer = Kinds()
    engine = without_model("s4", observer=observer, model=str(STORYTELLER), block_size=4, kv_cache_tokens=16)
    for request_id, num_tokens in (("0", 7), ("1", 6), ("too long", 40)):
        engine.add_request(request_id, [3] * num_tokens, SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    expected = {"add", "refuse", *(kind for _, _, kind, _, _ in ARROWS)}
    assert observer.heard >= expected, f"nobody tells of {expected - observer.heard}"


def draw() -> Figure:
    fig, (ax,) = pictures.figure("A request's states, and what an observer hears of them", height=2.9)
    for name, (x, y, fill, ink) in STATES.items():
        look = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "facecolor": fill, "edgecolor": INK, "linewidth": 0.9}
        ax.add_patch(FancyBboxPatch((x - 0.85, y - 0.32), 1.7, 0.64, **look))
        ax.text(x, y, name, ha="center", va="center", color=ink)
    for start, end, name, bend, at in ARROWS:
        (x0, y0, *_), (x1, y1, *_) = STATES[start], STATES[end]
        if bend < 0:
            a, b = (x0, y0 + 0.34), (x1, y1 + 0.34)
        elif y0 == y1:
            a, b = (x0 + 0.87, y0), (x1 - 0.87, y1)
        else:
            a, b = (x0, y0 - 0.34), ((x1 - 0.87, y1) if x0 != x1 else (x1, y1 + 0.34))
        color = ACCENT if name == "preempt" else INK
        style = f"arc3,rad={-bend if bend < 0 else bend}"
        ax.add_patch(
            FancyArrowPatch(a, b, arrowstyle="-|>", mutation_scale=9, color=color, linewidth=1.1, connectionstyle=style)
        )
        ax.text(*at, name, ha="center", va="bottom", fontsize=8, color=pictures.darker(color))
    ax.text(10.0, 0.56, "stop, length,\nor abort", ha="center", va="top", fontsize=8)
    ax.text(7.2, -1.08, "it outgrew the pool", ha="center", va="top", fontsize=8)
    ax.text(0.1, 1.4, "add, or refuse", ha="left", va="bottom", fontsize=8)
    ax.set(xlim=(0.1, 11.2), ylim=(-1.4, 2.75), xticks=[], yticks=[])
    pictures.bare(ax)
    return fig
