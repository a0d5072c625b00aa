"""Capture: records the launches of a step as a CUDA graph, which replays them with a single call."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

Launcher = Callable[[], None]  # launches work on the device
IDLE_STREAMS = defaultdict[int, list[torch.cuda.Stream]](list)  # by device, the streams of deleted CudaCaptures


class Capture(Protocol):
    """A way to record a step for replay."""

    def __call__(self, step: Launcher, shares_memory: bool = True) -> Launcher:
        """Record the launches of `step`, and return a function that replays them.

        Graphs that share memory must all stay alive, and must never run at the same time.
        """


class CudaCapture:
    """A Capture that records CUDA graphs. Graphs that share memory use one pool.

    Each CudaCapture has its own stream: torch creates its default capture stream only once per process, on whichever
    device is current at that moment. cuBLAS keeps 32 MiB for each stream that it has seen, so a new CudaCapture reuses
    the stream of a deleted one. Two live ones never share a stream: since torch 2.13, deleting a graph frees cuBLAS's
    memory for all graphs of the same stream (pytorch#193402).
    """

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None  # graphs that share memory use this one's pool
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: Launcher, shares_memory: bool = True) -> Launcher:
        graph = torch.cuda.CUDAGraph()
        pool = self._first.pool() if self._first is not None and shares_memory else None
        self._stream = self._stream or self._take_stream()
        # If a capture fails, torch.cuda.graph leaves its stream current; the outer context restores the previous one.
        # "thread_local" lets other threads (another engine's, a server's) allocate memory during the capture.
        with torch.cuda.stream(self._stream), torch.cuda.graph(graph, pool, self._stream, "thread_local"):
            step()
        if shares_memory and self._first is None:
            self._first = graph
        return partial(replay, graph, self)

    def _take_stream(self) -> torch.cuda.Stream:
        idle = IDLE_STREAMS[torch.cuda.current_device()]
        stream = idle.pop() if idle else torch.cuda.Stream()
        weakref.finalize(self, idle.append, stream)
        return stream


def replay(graph: torch.cuda.CUDAGraph, capture: CudaCapture) -> None:
    """Launch a graph. Holding `capture` keeps its stream from being reused while the graph can be replayed."""
    graph.replay()
