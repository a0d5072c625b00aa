"""Which steps are recorded, in which order, and which one runs."""

from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ...backends.gpu.backend import on_device
from ...backends.gpu.graphs import CudaCapture, DecodeGraphs, buckets


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


@contextmanager
def noted(events: list[Any], *arguments: Any):
    events.append(arguments)
    try:
        yield
    finally:
        events.append("out")


class Cuda:
    """In place of torch.cuda: a capture of which nothing is left when it fails, as torch's leaves its stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[Any] = []
        self.streams: list[Any] = []
        self.devices: list[Any] = []
        graph = SimpleNamespace(pool=lambda: "the pool", replay=lambda: None)
        for name, value in {
            "CUDAGraph": lambda: graph,
            "Stream": lambda: object(),
            "stream": lambda stream: noted(self.streams, stream),
            "graph": lambda graph, *how: noted(self.captures, *how),
            "device": lambda device: noted(self.devices, device),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_graphs_share_a_pool_and_a_stream_of_their_own(monkeypatch):
    cuda, capture = Cuda(monkeypatch), CudaCapture()
    for shares_memory in (False, True, True):
        capture(lambda: None, shares_memory)
    captures = [each for each in cuda.captures if each != "out"]
    assert [pool for pool, *_ in captures] == [None, None, "the pool"]
    assert len({id(stream) for _, stream, _ in captures}) == 1
    assert {mode for *_, mode in captures} == {"thread_local"}, "another thread's allocation would end the capture"


def test_after_a_capture_that_fails_the_stream_is_the_one_before(monkeypatch):
    cuda = Cuda(monkeypatch)

    def fails() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        CudaCapture()(fails)
    assert len(cuda.streams) == 2 and cuda.streams[-1] == "out"


@pytest.mark.parametrize(("device", "entered"), [("cuda:1", [(torch.device("cuda:1"),), "out"]), ("cpu", [])])
def test_kernels_start_on_the_runners_device_whatever_the_threads_is(monkeypatch, device, entered):
    cuda = Cuda(monkeypatch)
    with on_device(torch.device(device)):
        assert cuda.devices == entered[:1]
    assert cuda.devices == entered
