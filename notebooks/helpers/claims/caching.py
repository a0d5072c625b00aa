"""A simulator of a caching allocator: segments from a device, blocks that split and merge, a snapshot (claim 24)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from notebooks.helpers import pictures
from notebooks.helpers.claims.findings import Finding, finding, not_measured, on_gpu
from notebooks.helpers.pictures import INK, PAPER, USED
from stages.bench.texts import memory_pool
from stages.bench.texts.memory_pool import MB

SegmentSize = Callable[[int], int]


def by_text(size: int) -> int:
    """Return the bytes of a new segment as in the text: rounded up to 2 MB.

    >>> by_text(5 * MB) // MB
    6
    """
    return -(-size // (2 * MB)) * 2 * MB


def by_torch(size: int) -> int:
    """Return the bytes of a new segment as in PyTorch: 2 MB up to 1 MB, 20 MB below 10 MB, then rounded up to 2 MB.

    >>> [by_torch(size * MB) // MB for size in (1, 5, 11)]
    [2, 20, 12]
    """
    return 2 * MB if size <= MB else 20 * MB if size < 10 * MB else by_text(size)


@dataclass(eq=False)
class Segment:
    """Memory of the device, in blocks: [bytes, whether it is held]."""

    blocks: list[list[int]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.blocks)


Handle = tuple[Segment, list[int]]  # where a block is


class CachingAllocator:
    """An allocator that keeps freed memory for later requests.

        [ held 2 | free 6 ]      a free block is split, and merges with its free neighbors when it comes back
        [ free 20         ]      a segment without held blocks goes back to the device when memory runs out

    A free block of more than `max_split` bytes is never split: it serves requests of more than half its size.
    """

    def __init__(self, num_bytes: int, segment_size: SegmentSize = by_text, max_split: int | None = None) -> None:
        self.num_bytes, self.segment_size, self.max_split = num_bytes, segment_size, max_split
        self.segments, self.num_collections = list[Segment](), 0

    def allocate(self, size: int) -> Handle:
        """Take the smallest free block that fits, or a new segment. Collect once if the device is full.

        Raise MemoryError, and take nothing, if that is not enough.
        """
        fitting = [
            (block[0], segment, block)
            for segment in self.segments
            for block in segment.blocks
            if not block[1] and block[0] >= size and (self._may_split(block[0]) or 2 * size > block[0])
        ]
        if fitting:
            _, segment, block = min(fitting, key=lambda found: found[0])
        else:
            segment, block = self._new_segment(size)
        if block[0] > size and self._may_split(block[0]):
            segment.blocks.insert(segment.blocks.index(block) + 1, [block[0] - size, False])
            block[0] = size
        block[1] = True
        return segment, block

    def free(self, handle: Handle) -> None:
        """Free a block, and merge it with free neighbors."""
        segment, block = handle
        block[1] = False
        merged = list[list[int]]()
        for each in segment.blocks:
            if merged and not merged[-1][1] and not each[1]:
                merged[-1][0] += each[0]
            else:
                merged.append(each)
        segment.blocks = merged

    def collect(self) -> None:
        """Return all segments without a held block to the device."""
        self.segments = [segment for segment in self.segments if any(is_held for _, is_held in segment.blocks)]
        self.num_collections += 1

    def snapshot(self) -> list[list[tuple[int, bool]]]:
        """Return the blocks of each segment, as (bytes, whether it is held)."""
        return [[(size, bool(is_held)) for size, is_held in segment.blocks] for segment in self.segments]

    @property
    def reserved(self) -> int:
        """The bytes of all segments."""
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def held(self) -> int:
        """The bytes of all held blocks."""
        return sum(size for segment in self.segments for size, is_held in segment.blocks if is_held)

    def _may_split(self, size: int) -> bool:
        return self.max_split is None or size <= self.max_split

    def _new_segment(self, size: int) -> Handle:
        needed = self.segment_size(size)
        if self.reserved + needed > self.num_bytes:
            self.collect()
        if self.reserved + needed > self.num_bytes:
            raise MemoryError(f"{needed:,} bytes are needed, {self.num_bytes - self.reserved:,} are left")
        self.segments.append(Segment([[needed, False]]))
        return self.segments[-1], self.segments[-1].blocks[0]


# ---- pictures and the finding


def draw(moments: dict[str, list[list[tuple[int, bool]]]]) -> Figure:
    """Draw snapshots, a line for each segment."""
    title = "A freed block merges with its neighbors, and a held one keeps holes apart"
    fig, axes = pictures.figure(title, 3.0, rows=2, columns=2)
    widest = max(sum(size for size, _ in segment) for snapshot in moments.values() for segment in snapshot)
    for ax, (name, snapshot) in zip(axes, moments.items(), strict=True):
        for row, segment in enumerate(snapshot):
            left = 0
            for size, is_held in segment:
                pictures.polygons(ax, [pictures.box(left, size, -row, 0.7)], USED if is_held else PAPER, INK)
                left += size
        ax.set(title=name, xlim=(0, widest), ylim=(-1.2, 1.2), xticks=[], yticks=[])
        pictures.bare(ax)
    pictures.legend(axes[1], {"held": USED, "free": PAPER})
    return fig


def story() -> dict[str, list[list[tuple[int, bool]]]]:
    """Return snapshots of a small device: a segment splits, has a hole, and merges again."""
    allocator, moments = CachingAllocator(16 * MB), {}
    blocks = [allocator.allocate(8 * MB)]
    allocator.free(blocks.pop())
    blocks = [allocator.allocate(size * MB) for size in (2, 3, 1)]
    moments["a free segment of 8 MB: 2, 3 and 1 are taken"] = allocator.snapshot()
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    moments["2 and 1 are freed"] = allocator.snapshot()
    blocks.append(allocator.allocate(6 * MB))
    moments["6 are taken: no hole fits, so a new segment"] = allocator.snapshot()
    allocator.free(blocks[1])
    moments["3 are freed: one block of 8"] = allocator.snapshot()
    return moments


def peak_empty(steps: Iterable[int | None], size: int, segment_size: SegmentSize) -> float:
    """Return the largest share of the reserved memory that no block has, once more than 100 blocks are held.

    `steps` are those of the text's benchmark: an index to free, or None to allocate.
    """
    allocator, handles, peak = CachingAllocator(2**40, segment_size), list[Handle](), 0.0
    reserved = held = 0
    for index in steps:
        if index is None:
            handles.append(allocator.allocate(size))
            held += size
        else:
            allocator.free(handles.pop(index))
            held -= size
        if len(handles) > 100:
            reserved = allocator.reserved
            peak = max(peak, 1 - held / reserved)
    return peak


def largest_after(max_split: int | None) -> int:
    """Return the largest request in MB that fits after a small one was taken from a segment of 600 MB.

    Everything else is full.
    """
    allocator = CachingAllocator(602 * MB, max_split=max_split)
    allocator.free(allocator.allocate(600 * MB))
    allocator.allocate(2 * MB)
    return max(size for segment in allocator.snapshot() for size, is_held in segment if not is_held) // MB


def finding_24(num_operations: int = 400) -> Finding:
    steps = list(memory_pool.benchmark_steps(num_operations))
    empty = {rule.__name__: peak_empty(steps, 5 * MB, rule) for rule in (by_text, by_torch)}
    table = on_gpu(5, "Claim 5")
    share = table and table.rows.get("caching", {}).get("empty share")
    return finding(
        24,
        by_text=empty["by_text"],
        by_torch=empty["by_torch"],
        split=largest_after(None),
        whole=largest_after(512 * MB),
        gpu=f"{share:.1%} on {table.machine}" if table and share is not None else not_measured(5),
    )
