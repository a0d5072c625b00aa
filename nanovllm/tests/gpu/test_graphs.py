"""Which steps are recorded, in which order, and which one runs."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from ...kernels.gpu.graphs import DecodeGraphs, buckets


class Notes:
    """A step, and what captures it: both note what they are asked for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def step(self, rows: int) -> None:
        self.events.append(("step", rows))

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        self.events.append(("capture", 0))
        step()
        return step


def test_the_largest_is_captured_first_and_each_has_run_before():
    notes = Notes()
    DecodeGraphs(notes.step, [1, 2, 4], notes.capture, progress=False)
    assert notes.events == [each for rows in (4, 2, 1) for each in (("step", rows), ("capture", 0), ("step", rows))]


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 10), (10, 10)])
def test_a_batch_runs_in_the_smallest_that_has_room(num_rows, bucket):
    notes = Notes()
    graphs = DecodeGraphs(notes.step, buckets(10), notes.capture, progress=False)
    notes.events.clear()
    graphs.run(num_rows)
    assert notes.events == [("step", bucket)] and graphs.max_rows == 10


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 255, 256, 257, 300, 512, 10_000])
def test_every_number_of_rows_has_a_bucket_that_is_not_much_larger(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, 512)
    assert all(b - a <= max(16, a) for a, b in pairwise(sizes))
