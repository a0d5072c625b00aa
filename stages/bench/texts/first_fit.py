"""*Memory Pool Management*: simulate_fragmentation(), first fit on a sorted list of free regions."""

import random
from collections.abc import Iterator
from typing import NamedTuple

DEVICE, LARGEST = 80 * 1024, 256  # MB
FREES = 0.4  # share of the operations, once something is held


class FirstFit:
    """The text's allocator: `free` lists (offset, size) of each free region, in order."""

    def __init__(self, size: int = DEVICE) -> None:
        self.size, self.free = size, [(0, size)]

    def allocate(self, size: int) -> int | None:
        """Return the offset of the first region that is large enough, or None."""
        for i, (offset, room) in enumerate(self.free):
            if room >= size:
                del self.free[i]
                if room > size:
                    self.free.append((offset + size, room - size))
                    self.free.sort()
                return offset
        return None

    def release(self, offset: int, size: int) -> None:
        """Free a region, and merge all neighbors in a new list."""
        merged = list[tuple[int, int]]()
        for start, room in sorted([*self.free, (offset, size)]):
            before, held = merged[-1] if merged else (0, -1)
            if before + held == start:
                merged[-1] = before, held + room
            else:
                merged.append((start, room))
        self.free = merged

    @property
    def fragmentation(self) -> float:
        """The text's measure: 1 - the largest free region / all free memory."""
        sizes = [size for _, size in self.free]
        return 1 - max(sizes) / sum(sizes) if sizes else 0.0

    @property
    def full(self) -> float:
        """The share of the pool that is held."""
        return 1 - sum(size for _, size in self.free) / self.size


class Moment(NamedTuple):
    """The pool after an operation. The fields that s1.strip() draws come first."""

    num_slots: int  # MB
    pieces: tuple[tuple[int, int, int], ...]  # (start, size, used) of each
    full: float
    fragmentation: float


class Operation(NamedTuple):
    """The state of the simulation after one operation."""

    peak: float  # of the fragmentation, so far
    full: float
    is_refused: bool


def simulate(seed: int, num_operations: int) -> tuple[list[Operation], FirstFit, list[tuple[int, int]]]:
    """Run the text's loop. Return every operation, the pool, and the (offset, size) of the pieces that are held."""
    rng, pool, held, operations, peak = random.Random(seed), FirstFit(), list[tuple[int, int]](), list[Operation](), 0.0
    for _ in range(num_operations):
        is_refused = run_one(rng, pool, held, FREES)
        peak = max(peak, pool.fragmentation)
        operations.append(Operation(peak, pool.full, is_refused))
    return operations, pool, held


def run_one(rng: random.Random, pool: FirstFit, held: list[tuple[int, int]], frees: float) -> bool:
    """Free a random piece, or allocate one of random size. Return whether it was refused."""
    if held and rng.random() < frees:
        piece = rng.choice(held)
        held.remove(piece)
        pool.release(*piece)
        return False
    size = rng.randint(1, LARGEST)
    offset = pool.allocate(size)
    if offset is not None:
        held.append((offset, size))
    return offset is None


def drained() -> Iterator[Moment]:
    """Yield the pool after 1,000 and 5,000 operations, and when it is as full as at first after more frees."""
    rng, pool, held, levels = random.Random(0), FirstFit(), list[tuple[int, int]](), list[float]()
    for operations in (1000, 4000, 0):
        for _ in range(operations):
            run_one(rng, pool, held, FREES)
        while not operations and pool.full > levels[0]:
            run_one(rng, pool, held, 0.65)
        levels.append(pool.full)
        pieces = tuple((offset, size, size) for offset, size in sorted(held))
        yield Moment(DEVICE, pieces, pool.full, pool.fragmentation)
