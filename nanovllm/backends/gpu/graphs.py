"""CUDA graphs of decode steps: all launches of a step as one, for a few numbers of rows (buckets).

A plain step of a small model starts a thousand kernels, each of which takes the host longer to start than the device to
run. A graph is recorded once, and replayed with one call: the same kernels, at the same addresses. So its inputs lie in
StepInputs, its outputs in tensors that all graphs share, and a batch is padded to the next bucket.
"""

import bisect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from tqdm import tqdm

MAX_ROWS = 512
Step = Callable[[], None]


def buckets(max_rows: int) -> list[int]:
    """Return how many rows the graphs have, as in vLLM; the last one has all.

    >>> buckets(20), buckets(1), buckets(300)[-4:]
    ([1, 2, 4, 8, 16, 20], [1], [256, 272, 288, 300])
    """
    most = min(max_rows, MAX_ROWS)
    return sorted({size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most, 16)) if size < most} | {most})


class Capture(Protocol):
    def __call__(self, step: Step, shares_memory: bool = True) -> Step:
        """Record what `step` starts; returns what starts all of it again.

        Graphs that share memory must all be kept, and no two of them may run at a time.
        """


class CudaCapture:
    """torch.cuda.graph, with one pool of memory for the graphs that share theirs.

    The stream is its own: torch's is made once for the process, on whichever device was the current one then.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, step: Step, shares_memory: bool = True) -> Step:
        graph, pool = torch.cuda.CUDAGraph(), self._pool if shares_memory else None
        self._stream = self._stream or torch.cuda.Stream()
        # Where a capture fails, torch.cuda.graph leaves its stream the current one: the outer context does not. Another
        # thread, of another engine or a server, may allocate meanwhile: only this thread's calls must fit a graph.
        with torch.cuda.stream(self._stream), torch.cuda.graph(graph, pool, self._stream, "thread_local"):
            step()
        if shares_memory:
            self._pool = graph.pool()
        return graph.replay


class DecodeGraphs:
    """A graph for each bucket. The largest comes first: the others find room in what it has taken."""

    def __init__(self, step: Callable[[int], None], sizes: list[int], capture: Capture, progress: bool = True) -> None:
        """step(rows) starts a step of so many rows. Before it is recorded it runs once: kernels are compiled then."""
        self._sizes, self._replays = sizes, dict[int, Step]()
        for rows in tqdm(sizes[::-1], desc="capturing CUDA graphs", leave=False, disable=None if progress else True):
            step(rows)
            self._replays[rows] = capture(partial(step, rows))

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def run(self, num_rows: int) -> None:
        """Start the step of the smallest bucket that has room."""
        self._replays[self._sizes[bisect.bisect_left(self._sizes, num_rows)]]()
