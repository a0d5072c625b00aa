"""A CUDA device on a CPU whose copies run as late as they can: when something waits for them.

So a copy that nothing waits for is a copy that never happens, and a test sees it on any machine.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Event:
    """A point in the work of a stream."""

    def __init__(self, stream: "Stream") -> None:
        self._stream, self._end = stream, stream.num_launched

    def query(self) -> bool:
        return self._stream.num_done >= self._end

    def synchronize(self) -> None:
        self._stream.run(self._end)


class Stream:
    """Copies that have been launched, in order."""

    def __init__(self, *_: object) -> None:
        self.num_done = self.num_launched = 0
        self._work: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self.num_launched += 1

    def run(self, end: int) -> None:
        """Run the work up to this number."""
        with self._lock:
            while self.num_done < end:
                self._work[self.num_done]()
                self.num_done += 1

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.launch(event.synchronize)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.run(self.num_launched)


class DeviceTensor(Tensor):
    """A tensor that seems to be on a CUDA device."""

    is_cuda, is_cpu = True, False
    current = threading.local()  # .stream of each thread

    def record_stream(self, stream: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = (each.as_subclass(Tensor) for each in args)
            current_stream().launch(lambda: target.copy_(source))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


COMPUTE = Stream()


def current_stream(*_: object) -> Stream:
    return getattr(DeviceTensor.current, "stream", COMPUTE)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, DeviceTensor.current.stream = current_stream(), stream
    try:
        yield
    finally:
        DeviceTensor.current.stream = before


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(DeviceTensor)
