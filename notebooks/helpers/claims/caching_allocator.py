"""torch's caching allocator for CUDA: its rules in a small model that runs anywhere, and the real one where there is a
GPU.

    a size is rounded up to 512 bytes; up to 1 MB it comes from segments of 2 MB, below 10 MB from segments of 20 MB,
    else from one of its own, rounded up to 2 MB; the smallest free block that fits is taken, and split if enough is
    left; a freed block is joined with its free neighbours and kept; when the device has no more, free segments go back
"""

import bisect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

KB, MB = 1024, 1024**2
MIN_BLOCK, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE, ROUND = 512, 1 * MB, 2 * MB, 20 * MB, 10 * MB, 2 * MB


class OutOfMemory(RuntimeError):
    pass


class Block(NamedTuple):
    segment: int
    start: int
    size: int


class CachingAllocator:
    """`capacity` bytes of a device. The knobs are those of PYTORCH_CUDA_ALLOC_CONF:

    max_split_size          blocks above it are not split, and are not given to smaller requests
    garbage_collection      above this share of the capacity, free segments go back before a new one is taken
    """

    def __init__(self, capacity: int, max_split_size: int | None = None, garbage_collection: float = 0.0) -> None:
        self.capacity, self.max_split_size, self.garbage_collection = capacity, max_split_size, garbage_collection
        self._segments: dict[int, int] = {}  # number -> size
        self._blocks: dict[int, list[tuple[int, int, bool]]] = {}  # segment -> (start, size, is free), in order
        self._next = 0
        self.num_device_mallocs = self.num_device_frees = 0

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return sum(self._segments.values())

    @property
    def allocated(self) -> int:
        """Bytes of blocks that are in use."""
        return sum(size for blocks in self._blocks.values() for _, size, is_free in blocks if not is_free)

    def malloc(self, num_bytes: int) -> Block:
        size = -(-max(num_bytes, 1) // MIN_BLOCK) * MIN_BLOCK
        found = self._best_fit(size)
        if found is None:
            found = self._new_segment(size)
        return self._take(*found, size)

    def free(self, block: Block) -> None:
        """Joins the block with its free neighbours; nothing goes back to the device."""
        blocks = self._blocks[block.segment]
        at = bisect.bisect_left(blocks, (block.start,))
        assert blocks[at][:2] == (block.start, block.size) and not blocks[at][2], "freed twice"
        low = at - 1 if at and blocks[at - 1][2] else at
        high = at + 1 if at + 1 < len(blocks) and blocks[at + 1][2] else at
        size = sum(blocks[i][1] for i in range(low, high + 1))
        blocks[low : high + 1] = [(blocks[low][0], size, True)]

    def empty_cache(self) -> None:
        """Gives back every segment that is one free block."""
        for segment in [s for s, blocks in self._blocks.items() if len(blocks) == 1 and blocks[0][2]]:
            del self._blocks[segment], self._segments[segment]
            self.num_device_frees += 1

    def snapshot(self) -> list[dict[str, Any]]:
        """As torch.cuda.memory_snapshot(): segments with their blocks."""
        names = {True: "inactive", False: "active_allocated"}
        return [
            {"total_size": size, "blocks": [{"size": n, "state": names[free]} for _, n, free in self._blocks[segment]]}
            for segment, size in self._segments.items()
        ]

    def _best_fit(self, size: int) -> tuple[int, int] | None:
        """(segment, index in its blocks) of the smallest free block that fits, of the same pool."""
        fits = [
            (n, segment, i)
            for segment, blocks in self._blocks.items()
            if (self._segments[segment] == SMALL_SEGMENT) == (size <= SMALL)
            for i, (_, n, is_free) in enumerate(blocks)
            if is_free and n >= size and self._may_serve(n, size)
        ]
        return min(fits)[1:] if fits else None

    def _may_serve(self, block: int, size: int) -> bool:
        limit = self.max_split_size
        if limit is None or block < limit:
            return True
        return size >= limit and block < size + LARGE_SEGMENT

    def _new_segment(self, size: int) -> tuple[int, int]:
        if size <= SMALL:
            num_bytes = SMALL_SEGMENT
        elif size < LARGE:
            num_bytes = LARGE_SEGMENT
        else:
            num_bytes = -(-size // ROUND) * ROUND
        if self.garbage_collection and self.reserved + num_bytes > self.garbage_collection * self.capacity:
            self.empty_cache()
        if self.reserved + num_bytes > self.capacity:
            self.empty_cache()
        if self.reserved + num_bytes > self.capacity:
            free = self.reserved - self.allocated
            raise OutOfMemory(
                f"{size:,} bytes: {free:,} are reserved and free, {self.capacity - self.reserved:,} unreserved"
            )
        self._next += 1
        self.num_device_mallocs += 1
        self._segments[self._next] = num_bytes
        self._blocks[self._next] = [(0, num_bytes, True)]
        return self._next, 0

    def _take(self, segment: int, at: int, size: int) -> Block:
        start, room, _ = self._blocks[segment][at]
        is_small = self._segments[segment] == SMALL_SEGMENT
        enough = MIN_BLOCK if is_small else SMALL + 1
        may_split = is_small or self.max_split_size is None or room < self.max_split_size
        if room - size >= enough and may_split:
            self._blocks[segment][at : at + 1] = [(start, size, False), (start + size, room - size, True)]
        else:
            size = room
            self._blocks[segment][at] = (start, size, False)
        return Block(segment, start, size)


# ---- what it does to growing caches


class Grown(NamedTuple):
    steps: int  # that ran before memory ended; all of them, if it did not
    reserved: int  # most
    allocated: int  # most
    mallocs: int  # of the device


def grow_by_copy(allocator: CachingAllocator, steps: int, sequences: int = 8, token_bytes: int = 128 * KB) -> Grown:
    """Sequences whose keys and values are one tensor each, which every step replaces by a longer one: what torch.cat
    does. They begin 32 tokens apart, and one that has 512 tokens ends and begins again.
    """
    lengths = [64 + 32 * i for i in range(sequences)]
    try:
        blocks = [allocator.malloc(n * token_bytes) for n in lengths]
    except OutOfMemory:
        return Grown(0, allocator.reserved, allocator.allocated, allocator.num_device_mallocs)
    reserved = allocated = 0
    for step in range(steps):
        for i in range(sequences):
            lengths[i] = lengths[i] + 1 if lengths[i] < 512 else 64
            try:
                longer = allocator.malloc(lengths[i] * token_bytes)
            except OutOfMemory:
                return Grown(step, max(reserved, allocator.reserved), allocated, allocator.num_device_mallocs)
            reserved, allocated = max(reserved, allocator.reserved), max(allocated, allocator.allocated)
            allocator.free(blocks[i])
            blocks[i] = longer
    return Grown(steps, reserved, allocated, allocator.num_device_mallocs)


def knobs(steps: int, capacity: int = 1024 * MB) -> dict[str, Grown]:
    """The same growth with the allocator as it is, and with its knobs."""
    ways: dict[str, dict[str, Any]] = {
        "as it is": {},
        "max_split_size_mb:32": {"max_split_size": 32 * MB},
        "garbage_collection_threshold:0.6": {"garbage_collection": 0.6},
    }
    return {name: grow_by_copy(CachingAllocator(capacity, **options), steps) for name, options in ways.items()}


def by_hand() -> list[tuple[str, list[str]]]:
    """Four calls, and the blocks of the one segment after each: split, free, join."""
    allocator, story = CachingAllocator(64 * MB), list[tuple[str, list[str]]]()

    def note(what: str) -> None:
        (segment,) = allocator.snapshot()
        story.append(
            (
                what,
                [f"{b['size'] / MB:g} MB {'free' if b['state'] == 'inactive' else 'used'}" for b in segment["blocks"]],
            )
        )

    a = allocator.malloc(6 * MB)
    note("malloc 6 MB: a segment of 20 MB, split")
    b = allocator.malloc(5 * MB)
    note("malloc 5 MB: from the rest, split")
    allocator.free(a)
    note("free the first: kept, with a used neighbour")
    allocator.free(b)
    note("free the second: joined with both neighbours")
    return story


def live(sizes: Iterable[int] = (6 * MB, 5 * MB)) -> str:
    """The same by torch, where there is a CUDA device: what it has reserved and allocated."""
    if not torch.cuda.is_available():
        return "No CUDA device here, so what you see is the model; `make gpu PART=5` times the real one."
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    after = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    segments = len(torch.cuda.memory_snapshot())
    del tensors
    kept = torch.cuda.memory_reserved()
    return (
        f"Your GPU, now: {(after[1] - before[1]) / MB:.0f} MB allocated, {(after[0] - before[0]) / MB:.0f} MB "
        "reserved in "
        f"{segments} segments; freed, it keeps {(kept - before[0]) / MB:.0f} MB."
    )
