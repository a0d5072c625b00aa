"""How much of a step async_scheduling hides, in milliseconds. On a busy machine it fails, so only .ci/nightly runs it.

The device is a stand-in that takes 4 ms a step on a timer of its own, and no time of the CPU. For the figures, run

    python -m nanovllm.tests.engine.test_overlap_timing
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from ...engine.executor import Pending, Scheduled
from ...requests.sampling_params import RequestOutputKind
from ...requests.tokens import StepOutput
from ..testing.checkpoints import CONFIG, train_tokenizer, write_checkpoint
from ..testing.engines import params
from .test_async_scheduling import NUM_ROWS, RecordingExecutor, recorded_engine

pytestmark = pytest.mark.nightly
STEP_SECONDS = 0.004


class Timer:
    """A device that runs one step after another, and what the host does with it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._free_at = seconds, 0.0
        self.idle: list[float] = []  # seconds for which the device had nothing to do before each step
        self.waited = 0.0  # seconds for which the host has waited

    def start(self) -> float:
        """Queue a step behind the others. Return the time at which it ends."""
        now = time.perf_counter()
        self.idle.append(max(now - self._free_at, 0.0))
        self._free_at = max(now, self._free_at) + self.seconds
        return self._free_at

    def wait(self, until: float) -> None:
        started = time.perf_counter()
        time.sleep(max(until - started, 0.0))
        self.waited += time.perf_counter() - started


class TimedStep(NamedTuple):
    step: Pending
    timer: Timer
    ends_at: float

    def tokens(self) -> StepOutput:
        self.timer.wait(self.ends_at)
        return self.step.tokens()


class TimedExecutor(RecordingExecutor):
    """A RecordingExecutor whose steps take time."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.timer = Timer(seconds)

    def launch(self, batch: list[Scheduled], num_decodes: int = 0) -> Pending:
        step = super().launch(batch, num_decodes)
        return TimedStep(step, self.timer, self.timer.start())


class Figures(NamedTuple):
    """Medians of a step, in milliseconds."""

    step: float
    host: float  # all work of the host
    idle: float  # the device waits for the host

    def __str__(self) -> str:
        return f"step {self.step:.2f} ms, host's work {self.host:.2f} ms, idle device {self.idle:.2f} ms"


def measure(checkpoint: Path, is_async: bool, num_steps: int = 100, seconds: float = STEP_SECONDS) -> Figures:
    """Measure decode steps of NUM_ROWS requests that stream deltas."""
    executor = TimedExecutor(seconds)
    engine = recorded_engine(checkpoint, executor, async_scheduling=is_async)
    streamed = params(num_steps + 30, output_kind=RequestOutputKind.DELTA)
    for i in range(NUM_ROWS):
        engine.add_request(str(i), [3 + i, 4, 5], streamed)
    for _ in range(10):
        engine.step()
    steps, hosts = [], []
    executor.timer.idle.clear()
    for _ in range(num_steps):
        started, waited = time.perf_counter(), executor.timer.waited
        assert len(engine.step()) == NUM_ROWS
        steps.append(time.perf_counter() - started)
        hosts.append(steps[-1] - (executor.timer.waited - waited))
    return Figures(*(1000 * median(each) for each in (steps, hosts, executor.timer.idle)))


def write_long_checkpoint(folder: Path) -> Path:
    return write_checkpoint(folder, CONFIG | {"max_position_embeddings": 512}, tokenizer_model=train_tokenizer())


def test_host_works_while_the_device_runs(tmp_path):
    """On a device that takes as long as the host, a step takes as long as either, instead of their sum."""
    path = write_long_checkpoint(tmp_path)
    host = measure(path, is_async=False, num_steps=20, seconds=0.0).host / 1000
    for _ in range(4):  # other programs may slow it down
        serial, overlapped = (measure(path, is_async, 20, seconds=1.2 * host) for is_async in (False, True))
        if overlapped.step < 0.75 * serial.step and overlapped.idle < 0.25 * serial.idle:
            return
    raise AssertionError(f"not overlapped: {overlapped}; one by one: {serial}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = write_long_checkpoint(Path(folder))
        for is_async in (False, True):
            print(f"async_scheduling={is_async}:", measure(path, is_async))
