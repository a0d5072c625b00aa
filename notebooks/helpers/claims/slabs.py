"""A slab allocator: memory in slabs, a slab in pieces of one size. What it wastes, and what happens when a class is
full (claim 6).
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from notebooks.helpers import pictures
from notebooks.helpers.claims.table import SLABS, Finding

KB, MB = 1024, 1024**2


class Piece(NamedTuple):
    slab: int
    size: int  # of the class
    asked: int


class Full(Exception):
    """No piece is left for a request."""


class SlabAllocator:
    """`num_slabs` slabs of `slab_size` bytes; each serves one class of sizes at a time.

    partition   what a class may have:
        "fixed"    as many slabs as the others, for ever: a full class refuses, however empty the others are
        "borrow"   the same, but a full class takes a piece of the next larger one
        "shared"   any slab that nobody uses; an empty slab goes back, and may serve another class next
    """

    def __init__(self, classes: Sequence[int], num_slabs: int, slab_size: int, partition: str = "shared") -> None:
        if max(classes) > slab_size:
            raise ValueError(f"a class of {max(classes):,} bytes does not fit a slab of {slab_size:,}")
        self.classes, self.slab_size, self.num_slabs, self.partition = sorted(classes), slab_size, num_slabs, partition
        self._class_of: dict[int, int] = {}  # slab -> class
        self._held = [0] * num_slabs  # pieces of each slab that are held
        self._unused = list(range(num_slabs))
        self.held, self.asked = 0, 0  # bytes handed out, bytes of them that were asked for
        if partition != "shared":
            for slab in range(num_slabs):
                self._class_of[slab] = self.classes[slab % len(self.classes)]
            self._unused = []

    def allocate(self, num_bytes: int) -> Piece:
        """A piece of the least class that holds `num_bytes`. Raises Full, and takes nothing."""
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

    @property
    def num_bytes(self) -> int:
        return self.num_slabs * self.slab_size

    def check_integrity(self) -> None:
        assert sum(self._held[slab] * size for slab, size in self._class_of.items()) == self.held, "a piece is lost"
        assert len(self._unused) + len(self._class_of) == self.num_slabs, "a slab is lost"
        assert all(self._held[slab] <= self.slab_size // size for slab, size in self._class_of.items()), "too full"


# ---- mixed traffic


class Served(NamedTuple):
    inside: float  # share of what is handed out that nobody asked for
    refused: float  # share of the requests
    used: float  # share of the memory that was asked for and is held, when a request is refused


def mixed(rng: random.Random) -> int:
    """Bytes: mostly blocks of keys and values, some activations, a few adapters."""
    kind = rng.random()
    if kind < 0.6:
        return 128 * KB  # a block of 16 tokens of a small model
    if kind < 0.95:
        return int(rng.uniform(4 * KB, 1 * MB))  # activations: they come and go
    return int(rng.uniform(2 * MB, 12 * MB))  # an adapter


def serve(allocator: SlabAllocator, num_operations: int, seed: int = 0, frees: float = 0.45) -> Served:
    """Allocate and free at random; a request that is refused is lost."""
    rng, held = random.Random(seed), list[Piece]()
    refused = asked = 0
    inside, used = list[float](), list[float]()
    for _ in range(num_operations):
        if held and rng.random() < frees:
            allocator.free(held.pop(rng.randrange(len(held))))
            continue
        asked += 1
        try:
            held.append(allocator.allocate(mixed(rng)))
        except Full:
            refused += 1
            used.append(allocator.asked / allocator.num_bytes)
        inside.append(1 - allocator.asked / max(allocator.held, 1))
    allocator.check_integrity()
    return Served(sum(inside) / len(inside), refused / asked, sum(used) / len(used) if used else 1.0)


POWERS = [4 * KB * 2**i for i in range(13)]  # 4 KB to 16 MB
BY_4 = [4 * KB * 4**i for i in range(7)]
BY_16 = [4 * KB * 16**i for i in range(4)]
FINE = sorted({4 * KB * 2**i * j // 4 for i in range(13) for j in (4, 5, 6, 7) if 4 * KB * 2**i * j // 4 <= 16 * MB})
LISTS = {"each twice the one before": POWERS, "four times": BY_4, "sixteen times": BY_16, "four in each doubling": FINE}


def compare(num_operations: int) -> dict[str, Served]:
    """Ways to hand out 512 MB in slabs of 16 MB."""
    ways = {f"{name}, slabs shared": (classes, "shared") for name, classes in LISTS.items()}
    ways |= {
        "each twice the one before, fixed partitions": (POWERS, "fixed"),
        "each twice the one before, a full class borrows": (POWERS, "borrow"),
    }
    return {
        name: serve(SlabAllocator(classes, 32, 16 * MB, partition), num_operations)
        for name, (classes, partition) in ways.items()
    }


# ---- what a list of classes wastes


def waste(sizes: Iterable[int], classes: Sequence[int]) -> float:
    """
    >>> waste([32], [32, 64]), waste([33], [32, 64])
    (0.0, 0.484375)
    """
    sizes = list(sizes)
    return 1 - sum(sizes) / sum(min(c for c in classes if c >= size) for size in sizes)


def table(found: dict[str, Served]) -> str:
    rows = "".join(f"| {name} | {s.inside:.0%} | {s.refused:.1%} | {s.used:.0%} |\n" for name, s in found.items())
    return (
        "| classes | empty inside pieces | requests refused | in use, where one is refused |\n|---|---|---|---|\n"
        + rows
        + "\nFine classes waste little inside a piece, and need more slabs that are not full. A full class with a "
        "fixed "
        "share refuses while others stand empty; one that borrows wastes the larger piece; slabs that are shared go "
        "to whoever needs them, once they are empty."
    )


def finding_6(num_samples: int = 4000) -> Finding:
    rng = random.Random(0)
    even = [rng.randint(4 * KB, 16 * MB) for _ in range(num_samples)]
    traffic = [mixed(rng) for _ in range(num_samples)]
    rows = {
        name: (
            waste(traffic, classes),
            waste(even, classes),
            max(1 - (low + 1) / high for low, high in itertools.pairwise(classes)),
        )
        for name, classes in LISTS.items()
    }
    found = "; ".join(f"{name}: {a:.0%} / {b:.0%} / {c:.0%}" for name, (a, b, c) in rows.items())
    has_all = [
        name for name, (a, b, c) in rows.items() if 0.05 <= a <= 0.15 and abs(b - 0.5) < 0.05 and abs(c - 0.91) < 0.03
    ]
    return Finding(
        6,
        "slabs by size class waste 5-15%, 50% at uniform sizes, up to 91% just over a class",
        (SLABS,),
        "four lists of classes; the waste of mixed traffic / of sizes drawn evenly / just over a class",
        found,
        f"{', '.join(has_all)}: all three" if has_all else "each can be had, no list of these has all three",
    )


def say(found: dict[str, Served]) -> None:
    pictures.say(table(found))
