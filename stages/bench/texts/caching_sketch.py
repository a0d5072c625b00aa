"""*Memory Pool Management*: its sketch of PyTorch's caching allocator, completed literally, and one without its faults.

[ held 2 | free 6 ]      a free block is split, and merges with its free neighbors when it comes back
[ free 20         ]      a segment without held blocks goes back to the device when memory runs out
"""

from collections.abc import Callable
from dataclasses import dataclass

MB = 2**20


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    segment: list["Block"]
    size: int  # bytes
    is_held: bool = False


def split(block: Block, size: int) -> Block:
    """Cut a block to `size` bytes, and return the rest."""
    rest = Block(block.segment, block.size - size)
    block.segment.insert(block.segment.index(block) + 1, rest)
    block.size = size
    return rest


def merge(block: Block) -> Block:
    """Free a block. Return a new one in place of it and its free neighbors."""
    block.is_held, segment = False, block.segment
    at = segment.index(block)
    start, end = at - (at > 0 and not segment[at - 1].is_held), at + 1
    end += end < len(segment) and not segment[end].is_held
    segment[start:end] = [Block(segment, sum(each.size for each in segment[start:end]))]
    return segment[start]


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


class Segments:
    """Memory that came from a device, in segments of blocks."""

    def __init__(self) -> None:
        self.segments = list[list[Block]]()

    def new_segment(self, size: int) -> Block:
        """Return a block that is a whole new segment."""
        segment = list[Block]()
        segment.append(Block(segment, size))
        self.segments.append(segment)
        return segment[0]

    @property
    def reserved(self) -> int:
        """The bytes of all segments."""
        return sum(block.size for segment in self.segments for block in segment)


class Sketch(Segments):
    """The text's allocator. Free blocks are in a list of their own, beside the segments."""

    def __init__(self) -> None:
        super().__init__()
        self.free = list[Block]()

    def allocate(self, size: int) -> Block:
        """Take the first listed block that fits, or a new segment."""
        block = next((block for block in self.free if block.size >= size), None)
        if block is None:
            block = self.new_segment(by_text(size))
        else:
            self.free.remove(block)
            if block.size > size:
                self.free.append(split(block, size))
        block.is_held = True
        return block

    def release(self, block: Block) -> None:
        """List the merged block. Its parts still are listed."""
        self.free.append(merge(block))

    def collect(self) -> None:
        """Return empty segments to the device, from the list that is walked: the next one is skipped."""
        for segment in self.segments:
            if not any(block.is_held for block in segment):
                self.segments.remove(segment)


class CachingAllocator(Segments):
    """An allocator that keeps freed memory for later requests.

    A free block of more than `max_split` bytes is never split: it serves requests of more than half its size.
    """

    def __init__(
        self, num_bytes: int, segment_size: Callable[[int], int] = by_text, max_split: int | None = None
    ) -> None:
        super().__init__()
        self.num_bytes, self.segment_size, self.max_split = num_bytes, segment_size, max_split or num_bytes

    def allocate(self, size: int) -> Block:
        """Take the smallest free block that fits, or a new segment. Collect once if the device is full.

        Raise MemoryError, and take nothing, if that is not enough.
        """
        free = (block for segment in self.segments for block in segment if not block.is_held and block.size >= size)
        fitting = [block for block in free if block.size <= self.max_split or 2 * size > block.size]
        block = min(fitting, key=lambda each: each.size) if fitting else self._from_device(self.segment_size(size))
        if size < block.size <= self.max_split:
            split(block, size)
        block.is_held = True
        return block

    def release(self, block: Block) -> None:
        merge(block)

    def collect(self) -> None:
        """Return all segments without a held block to the device."""
        self.segments = [segment for segment in self.segments if any(block.is_held for block in segment)]

    @property
    def held(self) -> int:
        """The bytes of all held blocks."""
        return sum(block.size for segment in self.segments for block in segment if block.is_held)

    def snapshot(self) -> list[list[tuple[int, bool]]]:
        """Return the blocks of each segment, as (bytes, whether it is held)."""
        return [[(block.size, block.is_held) for block in segment] for segment in self.segments]

    def _from_device(self, size: int) -> Block:
        if self.reserved + size > self.num_bytes:
            self.collect()
        if self.reserved + size > self.num_bytes:
            raise MemoryError(f"{size:,} bytes are needed, {self.num_bytes - self.reserved:,} are left")
        return self.new_segment(size)


# ---- cases


def parts() -> str:
    text = Sketch()
    text.release(text.allocate(8 * MB))
    text.allocate(2 * MB)
    return " + ".join(f"{block.size // MB}" for block in text.segments[0]) + " MB"


def merged() -> str:
    text = Sketch()
    text.release(text.allocate(6 * MB))
    two, three, last = (text.allocate(size * MB) for size in (2, 3, 1))
    for block in (three, two, last):
        text.release(block)
    return f"{sum(block.size for block in text.free) // MB} MB, in a segment of {text.reserved // MB}"


def collected() -> int:
    text = Sketch()
    for block in [text.allocate(2 * MB) for _ in range(4)]:
        text.release(block)
    text.collect()
    return len(text.segments)


def rounded() -> str:
    text = Sketch()
    for _ in range(8):
        text.allocate(5 * MB)
    return f"{1 - 8 * 5 * MB / text.reserved:.1%}, in segments of {text.reserved // len(text.segments) // MB} MB"
