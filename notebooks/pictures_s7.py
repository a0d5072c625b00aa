"""What stage 7's notebook draws with: a map of two speeds, who is where, bars of three policies."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from notebooks import pictures
from notebooks.pictures import ACCENT, INK, LIGHT, PALE, PAPER, USED
from notebooks.tiers import Machine, Where

PLACES = {"device": USED, "host": ACCENT, "waits": LIGHT}


def map_of_winners(ax: Axes, machines: Sequence[Machine], shifts: Mapping[str, tuple[float, float]]) -> None:
    """How fast a link moves keys and values, one way, against how fast a prefill makes them, both in tokens a second.
    Models with keys and values of different sizes share this map. `shifts`: where a machine's name stands.
    """
    low, high, bottom, top = 1e3, 1e8, 1e2, 1e6
    even = [(low, low / 2), (2 * top, top)]
    pictures.polygons(ax, [[(low, bottom), (high, bottom), (high, top), (2 * top, top), even[0]]], PALE)
    ax.plot(*zip(*even, strict=True), color=INK, linewidth=1.2)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    ax.set(xlabel="link: keys and values of so many tokens a second, one way", ylabel="prefill, tokens a second")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    pictures.thousands(ax.xaxis, ax.yaxis)
    ax.text(2e3, 2.5e5, "recompute is quicker", color=INK)
    ax.text(7e7, 1.6e2, "swap is quicker", color=INK, ha="right")
    for machine in machines:
        place = machine.bytes_per_second / machine.bytes_per_token, machine.tokens_per_second
        ax.plot(*place, "o", color=USED, markersize=6, markeredgecolor=PAPER)
        pictures.label(ax, machine.name, place, shifts.get(machine.name, (7, 0)), USED)


def place_of(where: Where) -> str:
    """
    >>> [place_of(where) for where in (Where(3, 0), Where(0, 3), Where(0, 0))]
    ['device', 'host', 'waits']
    """
    return "device" if where.device else "host" if where.host else "waits"


def who_is_where(ax: Axes, moments: Sequence[Mapping[int, Where]], num_requests: int) -> None:
    """A row a request, a column a step, the first to arrive at the top."""
    boxes: dict[str, list] = {place: [] for place in PLACES}
    for number in range(num_requests):
        places = [place_of(moment[number]) if number in moment else "" for moment in moments]
        for place, start, length in stretches(places):
            thin = 0.0 if place == "device" else 0.2
            boxes[place].append(pictures.box(start, length, number + 0.08 + thin, 0.84 - 2 * thin))
    for place, color in PLACES.items():
        pictures.polygons(ax, boxes[place], color)
    ax.set(xlim=(0, len(moments)), ylim=(num_requests, 0), yticks=[], ylabel="requests, by arrival")
    pictures.thousands(ax.xaxis)


def stretches(places: Sequence[str]) -> list[tuple[str, int, int]]:
    """What is the same for some time: what, from when, how long. Empty ones are left out.

    >>> stretches(["waits", "device", "device", "", ""])
    [('waits', 0, 1), ('device', 1, 2)]
    """
    found, start = [], 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[start]:
            if places[start]:
                found.append((places[start], start, end - start))
            start = end
    return found


def key(ax: Axes, places: Sequence[str] = tuple(PLACES)) -> None:
    """What the colours mean, above the upper right corner of the axes."""
    handles = [Patch(facecolor=PLACES[place], label=place) for place in places]
    look = {"frameon": False, "handlelength": 0.9, "handleheight": 0.8, "columnspacing": 1.4, "borderaxespad": 0.2}
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), **look)
