"""*Memory Pool Management*: its sketch of PyTorch's caching allocator, completed literally."""

from dataclasses import dataclass

from stages.bench.texts import Cases

SEGMENT = 2  # MB: a new segment has a multiple


@dataclass(eq=False)
class Block:
    """A part of a segment. Sizes are in MB."""

    segment: list["Block"]
    size: int
    is_held: bool = False


class Sketch:
    """The text's allocator. Free blocks are in a list of their own, beside the segments."""

    def __init__(self) -> None:
        self.segments, self.free = list[list[Block]](), list[Block]()

    def allocate(self, size: int) -> Block:
        block = next((block for block in self.free if block.size >= size), None)
        if block is None:
            segment = list[Block]()
            block = Block(segment, -(-size // SEGMENT) * SEGMENT)
            segment.append(block)
            self.segments.append(segment)
        else:
            self.free.remove(block)
            if block.size > size:
                rest = Block(block.segment, block.size - size)
                block.segment.insert(block.segment.index(block) + 1, rest)
                block.size = size
                self.free.append(rest)
        block.is_held = True
        return block

    def release(self, block: Block) -> None:
        """Merge with free neighbors. The merged block is listed, and its parts still are."""
        block.is_held, segment = False, block.segment
        at = segment.index(block)
        start, end = at - (at > 0 and not segment[at - 1].is_held), at + 1
        end += end < len(segment) and not segment[end].is_held
        merged = Block(segment, sum(each.size for each in segment[start:end]))
        segment[start:end] = [merged]
        self.free.append(merged)

    def collect(self) -> None:
        """Return empty segments to the device, from the list that is walked: the next one is skipped."""
        for segment in self.segments:
            if not any(block.is_held for block in segment):
                self.segments.remove(segment)

    @property
    def num_bytes(self) -> int:
        """MB of all segments."""
        return sum(block.size for segment in self.segments for block in segment)


def cases() -> Cases:
    one, parts, many, fives = Sketch(), Sketch(), Sketch(), Sketch()
    one.release(one.allocate(8))
    one.allocate(2)
    parts.release(parts.allocate(6))
    two, three, last = (parts.allocate(size) for size in (2, 3, 1))
    for block in (three, two, last):
        parts.release(block)
    for block in [many.allocate(2) for _ in range(4)]:
        many.release(block)
    many.collect()
    for _ in range(8):
        fives.allocate(5)
    return {
        "split": (" + ".join(f"{block.size}" for block in one.segments[0]) + " MB",),
        "merged": (f"{sum(block.size for block in parts.free)} MB, in a segment of {parts.num_bytes}",),
        "collected": (f"{len(many.segments)}",),
        "rounded": (f"{1 - 8 * 5 / fives.num_bytes:.1%}, in segments of {fives.num_bytes // len(fives.segments)} MB",),
    }
