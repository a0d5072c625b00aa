"""A slab allocator: memory in slabs, each in pieces of one size. What it wastes, and when it refuses (claim 6)."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from notebooks.helpers.claims.findings import Finding, finding

KB, MB = 1024, 1024**2


class Piece(NamedTuple):
    """A piece of a slab, for a request of `asked` bytes."""

    slab: int
    size: int  # of the class
    asked: int


class Full(Exception):
    """No piece is left for a request."""


class SlabAllocator:
    """`num_slabs` slabs of `slab_size` bytes. Each serves one class of sizes at a time.

    partition   the slabs of a class:
        "fixed"    as many as every other class has, forever: a full class refuses, however empty the others are
        "borrow"   the same, but a full class takes a piece of the next larger one
        "shared"   any unused slab; an empty slab can serve another class next
    """

    def __init__(self, classes: Sequence[int], num_slabs: int, slab_size: int, partition: str = "shared") -> None:
        if max(classes) > slab_size:
            raise ValueError(f"a class of {max(classes):,} bytes does not fit a slab of {slab_size:,}")
        self.classes, self.slab_size, self.num_slabs, self.partition = sorted(classes), slab_size, num_slabs, partition
        self.num_bytes = num_slabs * slab_size
        self._class_of: dict[int, int] = {}  # slab -> class
        self._held = [0] * num_slabs  # pieces of each slab that are held
        self._unused = list(range(num_slabs))
        self.held, self.asked = 0, 0  # bytes handed out, and bytes of them that were asked for
        if partition != "shared":
            self._class_of = {slab: self.classes[slab % len(self.classes)] for slab in self._unused}
            self._unused = []

    def allocate(self, num_bytes: int) -> Piece:
        """Return a piece of the smallest class that holds `num_bytes`. If none is left, raise Full and take nothing."""
        fitting = [size for size in self.classes if size >= num_bytes]
        if not fitting:
            raise Full(f"{num_bytes:,} bytes: the largest class has {self.classes[-1]:,}")
        for size in fitting if self.partition == "borrow" else fitting[:1]:
            slab = self._slab_with_room(size)
            if slab is not None:
                self._held[slab] += 1
                self.held, self.asked = self.held + size, self.asked + num_bytes
                return Piece(slab, size, num_bytes)
        raise Full(f"no piece of {fitting[0]:,} bytes is left, {self.num_bytes - self.held:,} bytes are free")

    def free(self, piece: Piece) -> None:
        self._held[piece.slab] -= 1
        self.held, self.asked = self.held - piece.size, self.asked - piece.asked
        if not self._held[piece.slab] and self.partition == "shared":
            del self._class_of[piece.slab]
            self._unused.append(piece.slab)

    def _slab_with_room(self, size: int) -> int | None:
        room = self.slab_size // size
        for slab, its_size in self._class_of.items():
            if its_size == size and self._held[slab] < room:
                return slab
        if not self._unused:
            return None
        slab = self._unused.pop()
        self._class_of[slab] = size
        return slab

    def check_integrity(self) -> None:
        assert sum(self._held[slab] * size for slab, size in self._class_of.items()) == self.held, "a piece is lost"
        assert len(self._unused) + len(self._class_of) == self.num_slabs, "a slab is lost"


# ---- mixed traffic


class Served(NamedTuple):
    """The result of random traffic."""

    inside: float  # share of the held bytes that were not asked for
    refused: float  # share of the requests
    used: float  # share of all memory that is held and was asked for, when a request is refused


def mixed(rng: random.Random) -> int:
    """Return a number of bytes: mostly blocks of keys and values, some activations, a few adapters."""
    kind = rng.random()
    if kind < 0.6:
        return 128 * KB  # a block of 16 tokens of a small model
    return int(rng.uniform(4 * KB, 1 * MB)) if kind < 0.95 else int(rng.uniform(2 * MB, 12 * MB))


def serve(allocator: SlabAllocator, num_operations: int, seed: int = 0, frees: float = 0.45) -> Served:
    """Allocate and free at random."""
    rng, held, asked = random.Random(seed), list[Piece](), 0
    inside, used = list[float](), list[float]()
    for _ in range(num_operations):
        if held and rng.random() < frees:
            allocator.free(held.pop(rng.randrange(len(held))))
            continue
        asked += 1
        try:
            held.append(allocator.allocate(mixed(rng)))
        except Full:
            used.append(allocator.asked / allocator.num_bytes)
        inside.append(1 - allocator.asked / max(allocator.held, 1))
    allocator.check_integrity()
    return Served(sum(inside) / len(inside), len(used) / asked, sum(used) / len(used) if used else 1.0)


def factors(factor: int) -> list[int]:
    """Return classes from 4 KB to 16 MB, each `factor` times the one before, except the last."""
    sizes = [4 * KB]
    while sizes[-1] < 16 * MB:
        sizes.append(min(sizes[-1] * factor, 16 * MB))
    return sizes


POWERS = factors(2)
LISTS = {
    "each twice the one before": POWERS,
    "four times": factors(4),
    "sixteen times": factors(16),
    "four in each doubling": [size * j // 4 for size in POWERS[:-1] for j in (4, 5, 6, 7)] + POWERS[-1:],
    "eleven times": factors(11),
}


def compare(num_operations: int) -> str:
    """Return a table of ways to hand out 512 MB in slabs of 16 MB."""
    ways = {f"{name}, slabs shared": (classes, "shared") for name, classes in LISTS.items()}
    ways |= {"each twice the one before, fixed partitions": (POWERS, "fixed")}
    ways |= {"each twice the one before, a full class borrows": (POWERS, "borrow")}
    rows = ""
    for name, (classes, partition) in ways.items():
        result = serve(SlabAllocator(classes, 32, 16 * MB, partition), num_operations)
        rows += f"| {name} | {result.inside:.0%} | {result.refused:.1%} | {result.used:.0%} |\n"
    return (
        "| classes | empty inside pieces | requests refused | in use when one is refused |\n|---|---|---|---|\n" + rows
    )


# ---- the waste of a list of classes


def waste(sizes: Iterable[int], classes: Sequence[int]) -> float:
    """Return the share of the pieces that stays empty.

    >>> waste([32], [32, 64]), waste([33], [32, 64])
    (0.0, 0.484375)
    """
    sizes = list(sizes)
    return 1 - sum(sizes) / sum(min(c for c in classes if c >= size) for size in sizes)


def finding_6(num_samples: int = 4000) -> Finding:
    rng = random.Random(0)
    uniform = [rng.randint(4 * KB, 16 * MB) for _ in range(num_samples)]
    traffic = [mixed(rng) for _ in range(num_samples)]
    rows = {}
    for name, classes in LISTS.items():
        just_above = max(1 - (low + 1) / high for low, high in itertools.pairwise(classes))
        rows[name] = waste(traffic, classes), waste(uniform, classes), just_above
    all_three = [
        n for n, (a, b, c) in rows.items() if 0.05 <= a <= 0.15 and abs(b - 0.5) < 0.05 and abs(c - 0.91) < 0.03
    ]
    found = "; ".join(f"{name} {a:.0%}, {b:.0%}, {c:.0%}" for name, (a, b, c) in rows.items())
    return finding(6, rows=found, all_three=" and ".join(all_three) or "no list", eleven=rows["eleven times"][0])
