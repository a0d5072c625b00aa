"""CUDA graphs: which steps are recorded, in which order, and which graph a batch replays."""

from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ...backends.gpu.backend import on_device
from ...backends.gpu.capture import CudaCapture
from ...backends.gpu.graphs import BucketedGraphs, buckets


class Log:
    """A step and a capture that record their calls."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def step(self, rows: int) -> None:
        self.events.append(("step", rows))

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        self.events.append(("capture", 0))
        step()
        return step


def test_the_largest_graph_is_captured_first_and_each_step_runs_before_its_capture():
    log = Log()
    BucketedGraphs(log.step, [1, 2, 4], log.capture, progress=False)
    assert log.events == [each for rows in (4, 2, 1) for each in (("step", rows), ("capture", 0), ("step", rows))]


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 10), (10, 10)])
def test_a_batch_replays_the_smallest_graph_with_room(num_rows, bucket):
    log = Log()
    graphs = BucketedGraphs(log.step, buckets(10), log.capture, progress=False)
    log.events.clear()
    graphs.run(num_rows)
    assert log.events == [("step", bucket)] and graphs.max_rows == 10


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 255, 256, 257, 300, 512, 10_000])
def test_buckets_add_little_padding(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, 512)
    assert all(b - a <= max(16, a) for a, b in pairwise(sizes))


@contextmanager
def recorded(events: list[Any], *arguments: Any):
    events.append(arguments)
    try:
        yield
    finally:
        events.append("exit")


class FakeCuda:
    """A torch.cuda whose contexts record their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[Any] = []
        self.streams: list[Any] = []
        self.devices: list[Any] = []
        graph = SimpleNamespace(pool=lambda: "the pool", replay=lambda: None)
        for name, value in {
            "CUDAGraph": lambda: graph,
            "Stream": SimpleNamespace,
            "current_device": lambda: 7,
            "stream": lambda stream: recorded(self.streams, stream),
            "graph": lambda graph, *arguments: recorded(self.captures, *arguments),
            "device": lambda device: recorded(self.devices, device),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_graphs_share_one_pool_and_one_stream(monkeypatch):
    cuda, capture = FakeCuda(monkeypatch), CudaCapture()
    for shares_memory in (False, True, True):
        capture(lambda: None, shares_memory)
    captures = [each for each in cuda.captures if each != "exit"]
    assert [pool for pool, *_ in captures] == [None, None, "the pool"]
    assert len({id(stream) for _, stream, _ in captures}) == 1
    assert {mode for *_, mode in captures} == {"thread_local"}, "another thread's allocation would end the capture"


def test_a_stream_serves_another_capture_once_all_graphs_of_the_first_are_gone(monkeypatch):
    cuda, first = FakeCuda(monkeypatch), CudaCapture()
    replay = first(lambda: None, shares_memory=False)
    CudaCapture()(lambda: None)
    del first
    CudaCapture()(lambda: None)  # takes the second one's
    del replay
    CudaCapture()(lambda: None)
    one, two, three, four = (stream for (stream,) in (each for each in cuda.streams if each != "exit"))
    assert one is not two and three is two and four is one


def test_a_failed_capture_restores_the_current_stream(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        CudaCapture()(fail)
    assert len(cuda.streams) == 2 and cuda.streams[-1] == "exit"


@pytest.mark.parametrize(("device", "entered"), [("cuda:1", [(torch.device("cuda:1"),), "exit"]), ("cpu", [])])
def test_kernels_launch_on_the_runners_device_not_the_threads(monkeypatch, device, entered):
    cuda = FakeCuda(monkeypatch)
    with on_device(torch.device(device)):
        assert cuda.devices == entered[:1]
    assert cuda.devices == entered
