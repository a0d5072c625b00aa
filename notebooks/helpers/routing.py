"""Helpers of the notebook on routing: runs of `python -m stages.bench routing`, and their pictures."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, USED, Line
from stages.bench import routing
from stages.bench.models import STORYTELLER
from stages.bench.options import Routing
from stages.bench.routing import StepCost

LOOKS = {"round robin": (GREY, "x--"), "least queue": (ACCENT, "s--"), "prefix-aware": (USED, "o-")}
Point = dict[str, Any]


class Routed:
    """The report of one run: three routers, on several numbers of engines."""

    def __init__(self, engines: Sequence[int], num_requests: int, **options: Any) -> None:
        engine = {"model": str(STORYTELLER), "device": "cpu", "attention_backend": "torch", "kv_cache_tokens": 4096}
        chosen = Routing(engines=",".join(map(str, engines)), num_requests=num_requests, **options)
        self.report = routing.routing(engine, chosen)
        self.cost = StepCost(**self.report["cost"])
        self.points: list[Point] = self.report["points"]

    def of(self, router: str, num_engines: int) -> Point:
        """Return the numbers of a router on `num_engines` engines."""
        return next(each for each in self.points if (each["router"], each["engines"]) == (router, num_engines))

    def series(self, name: str, percentile: str | None = None) -> list[Line]:
        """Return a line for each router: a number of its points over the number of engines."""
        lines = []
        for router, (color, style) in LOOKS.items():
            points = [each for each in self.points if each["router"] == router]
            values = [each[name] if percentile is None else each[name][percentile] for each in points]
            lines.append(Line([each["engines"] for each in points], values, router, color, style=style))
        ends = sorted(
            lines, key=lambda line: line.y[-1]
        )  # labels in the order of the lines' ends, so none hides another
        return [line._replace(shift=(6, 9 * (ends.index(line) - 1))) for line in lines]


def steps_ms(cost: StepCost) -> dict[str, float]:
    """Return the milliseconds of typical steps.

    >>> steps_ms(StepCost(fixed=0.001, per_token=0.0, per_read=0.0))["8 sequences decode, 300 tokens each"]
    1.0
    """
    whole, cached = 288 * 289 // 2, 256 * 257 // 2  # a token reads itself and all before it
    steps = {
        "a prompt of 288 tokens": (288, whole),
        "the same, 256 of them cached": (32, whole - cached),
        "8 sequences decode, 300 tokens each": (8, 8 * 300),
        "1 sequence decodes": (1, 300),
    }
    return {name: 1000 * cost.seconds(*size) for name, size in steps.items()}


def draw_steps(ax: Axes, cost: StepCost) -> None:
    """Draw the times of typical steps."""
    pictures.costs(ax, {name: 1000 * ms for name, ms in steps_ms(cost).items()}, accent=["a prompt of 288 tokens"])


def draw_engines(ax: Axes, lines: Sequence[Line], y: str) -> None:
    """Draw lines over the number of engines."""
    pictures.lines(ax, lines, "engines", y, "x")
    ax.set_xticks(lines[0].x)
    ax.set_ylim(bottom=0)
