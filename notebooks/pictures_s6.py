"""What stage 6's notebook draws with: the tree of cached texts, a staircase, hit rates beside what a text claims."""

import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from notebooks import pictures
from notebooks.pictures import ACCENT, GREY, INK, PALE, PAPER, USED
from notebooks.prefixes import depth
from stages.s6_prefix_caching.prefix_cache import CachedBlock, PrefixCache


class Node(NamedTuple):
    """A cached block: how many come before it in its text, and its row, which the first of its children shares."""

    cached: CachedBlock
    depth: int
    row: int


def tree(blocks: Sequence[CachedBlock]) -> list[Node]:
    """The cached texts from the root on, each branch on rows of its own.

    >>> a = CachedBlock(b"a", None, [1], 0)
    >>> b, c = (CachedBlock(bytes([i]), a, [i], i) for i in (2, 3))
    >>> [(node.cached.block, node.depth, node.row) for node in tree([a, b, c])]
    [(0, 0, 0), (2, 1, 0), (3, 1, 1)]
    """
    nodes: list[Node] = []

    def add(parent: CachedBlock | None, row: int) -> int:
        """Returns the next row."""
        children = [cached for cached in blocks if cached.parent is parent]
        for child in children:
            nodes.append(Node(child, depth(child), row))
            row = add(child, row)
        return row if children else row + 1

    add(None, 0)
    return nodes


def draw_tree(
    ax: Axes,
    cache: PrefixCache,
    text_of: Callable[[list[int]], str],
    hits: Collection[int] = (),
    held: Collection[int] = (),
) -> None:
    """A box a block with its text. `hits`: blocks that a request has just found; of those that nobody holds the small
    number says when each will be evicted.
    """
    nodes = tree(list(cache.blocks._cached.values()))
    place = {node.cached: node for node in nodes}
    turn = {block: number for number, block in enumerate(cache.blocks._idle, start=1)}
    for node in nodes:
        left, bottom, block = node.depth, -node.row, node.cached.block
        fill = ACCENT if block in hits else PALE if block in turn else USED
        pictures.polygons(ax, [pictures.box(left, 0.93, bottom, 0.72)], fill, edge=INK, width=0.6)
        parent = place.get(node.cached.parent) if node.cached.parent else None
        if parent:
            x = [parent.depth + 0.93, parent.depth + 0.965, parent.depth + 0.965, left]
            y = [0.36 - parent.row] * 2 + [bottom + 0.36] * 2
            ax.plot(x, y, color=GREY, linewidth=0.8)
        words = "\n".join(textwrap.wrap(text_of(node.cached.token_ids), 16)[:2])
        color = PAPER if fill == USED else INK
        ax.text(left + 0.03, bottom + 0.4, words, va="center", fontsize=7.5, color=color)
        if block in turn:
            ax.text(left + 0.91, bottom + 0.08, f"{turn[block]}", ha="right", fontsize=6.5, color=INK)
    deepest, last = max(node.depth for node in nodes), max(node.row for node in nodes)
    ax.set(xlim=(-0.02, deepest + 1), ylim=(-last - 0.1, 0.85), xticks=[], yticks=[])
    pictures.bare(ax)


def staircase(ax: Axes, x: Sequence[int], computed: Sequence[int]) -> None:
    """Tokens that a prompt computes, by how many it shares with one that was served."""
    ax.step(x, computed, where="post", color=USED, linewidth=1.6)
    ax.set(xlabel="tokens shared with a prompt that was served", ylabel="tokens computed", ylim=(0, None))
    pictures.thousands(ax.xaxis, ax.yaxis)


def beside_claims(ax: Axes, rates: Mapping[str, float], claimed: Mapping[str, float]) -> None:
    """A bar a kind of traffic, and a diamond where a text says it is."""
    rows = range(len(rates))
    ax.barh(rows, list(rates.values()), color=USED, height=0.5)
    ax.plot(list(claimed.values()), rows, "D", color=ACCENT, markersize=6, clip_on=False, markeredgecolor=INK)
    for row, rate in zip(rows, rates.values(), strict=True):
        is_inside = rate > 0.15
        ax.text(0.02 if is_inside else 0.09, row, f"{rate:.0%}", va="center", color=PAPER if is_inside else USED)
    ax.set(yticks=list(rows), yticklabels=list(rates), xlim=(0, 1), ylim=(len(rates) - 0.5, -0.5))
    ax.tick_params(axis="y", length=0)
    pictures.percent(ax.xaxis)


def pairs(ax: Axes, off: Mapping[str, float], on: Mapping[str, float]) -> None:
    """For each name a hollow dot and a full one: without and with the cache."""
    for row, name in enumerate(off):
        ax.plot([on[name], off[name]], [row, row], color=PALE, linewidth=2.5, zorder=1)
        ax.plot(off[name], row, "o", color=INK, markerfacecolor=PAPER, markersize=6)
        ax.plot(on[name], row, "o", color=USED, markersize=6)
    ax.set(yticks=[], xlim=(0, None), ylim=(len(off) - 0.5, -0.5))
    ax.spines["left"].set_visible(False)
