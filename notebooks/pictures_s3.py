"""What stage 3's notebook draws with: axes in doublings and in bytes, a softmax as it grows, a roofline."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from notebooks import pictures
from notebooks.pictures import ACCENT, GREY, INK, PALE, USED
from notebooks.roofline import Work, roof


def in_bytes(number: float) -> str:
    """
    >>> [in_bytes(number) for number in (512, 2048, 3 * 2**20)]
    ['512 B', '2 KB', '3 MB']
    """
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if number >= size:
            return f"{number / size:.0f} {unit}"
    return f"{number:.0f} B"


def ticks_at(axis: Axis, values: Sequence[float], show: str = "{:,.0f}") -> None:
    """Ticks at these values and no others, each written as `show`, or as bytes if that is "bytes"."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value) if show == "bytes" else show.format(value)))
    axis.set_minor_locator(NullLocator())


def growing(axes: Sequence[Axes], read: Sequence[int], panels: Mapping[str, Sequence[float]]) -> None:
    """A quantity a row against the keys read so far. A step: it is what it is until the next tile is merged. The last
    one is an error, on a scale of powers of ten.
    """
    for ax, (name, values) in zip(axes, panels.items(), strict=True):
        ax.step([0, *read], [values[0], *values], where="pre", color=USED, linewidth=1.6)
        ax.set_ylabel(name, rotation=0, ha="left", va="center")
        ax.yaxis.set_label_coords(-0.17, 0.5)
    axes[-1].set(yscale="log", xlabel="keys read", xlim=(0, read[-1]))
    axes[-1].plot(read[-1], panels[next(reversed(panels))][-1], "o", color=ACCENT, markersize=6, clip_on=False)


def roofline(ax: Axes, speed: float, bandwidth: float, steps: Mapping[str, Mapping[str, tuple[Work, float]]]) -> None:
    """What the machine allows, and what steps reach, in billions of operations a second. `steps` maps "prefill" and
    "decode" to steps: a label, their work, and the seconds that they take.
    """
    marks = {"prefill": ("s", ACCENT), "decode": ("o", USED)}
    every = [work.intensity for kind in steps.values() for work, _ in kind.values()]
    low, high, ridge = min(every) / 2, max(every) * 4, speed / bandwidth
    ax.plot([low, ridge, high], [roof(x, speed, bandwidth) / 1e9 for x in (low, ridge, high)], color=INK, linewidth=1.6)
    ax.axvline(ridge, color=PALE, linewidth=1, zorder=0)
    for kind, (mark, color) in marks.items():
        for text, (work, seconds) in steps[kind].items():
            at = (work.intensity, work.operations / seconds / 1e9)
            ax.plot([at[0]] * 2, [at[1], roof(at[0], speed, bandwidth) / 1e9], ":", color=GREY, linewidth=0.8)
            ax.plot(*at, mark, color=color, markersize=6)
            is_tight = any(1 < other.intensity / work.intensity < 2 for other, _ in steps[kind].values())
            pictures.label(ax, f"{kind}, {text}", at, (-7, -6) if is_tight else (7, -6), color)
    slowest = min(work.operations / seconds for kind in steps.values() for work, seconds in kind.values()) / 1e9
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(slowest / 2, 1.6 * speed / 1e9))
    ax.set(xlabel="operations for each byte that must be read", ylabel="billion operations a second")
    middle = (low * ridge) ** 0.5
    pictures.label(ax, f"memory: {bandwidth / 1e9:.0f} GB/s", (middle, middle * bandwidth / 1e9), (-8, 6), INK)
    pictures.label(ax, f"arithmetic: {speed / 1e9:,.0f} billion/s", (high, speed / 1e9), (-4, 4), INK)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(NullLocator())
