"""What an engine on a GPU computes with, and why."""

import pytest

from ...backends.gpu import choice as module
from ...backends.gpu.choice import GpuChoice
from ...backends.gpu.linear import seconds_on_gpu
from ...backends.gpu.ops import PLAIN
from ...backends.options import VARIABLE, backend_of


class Runner:
    backend = "plain"


class Build:
    """In place of a backend's class."""

    def __init__(self, *fails):
        self.captures, self._fails = [], fails  # whether it had graphs, for each call; the calls that raise

    def __call__(self, ops, capture, timer):
        assert ops is PLAIN and timer is seconds_on_gpu
        self.captures.append(capture is not None)
        if "kernels" in self._fails or (capture is not None and "graphs" in self._fails):
            raise RuntimeError("out of memory")
        return f"kernels {len(self.captures)}"


@pytest.fixture(autouse=True)
def has_triton(monkeypatch):
    monkeypatch.setattr(module, "triton_ops", lambda: PLAIN)
    monkeypatch.setattr(module, "CudaCapture", lambda: "a capture")
    monkeypatch.setattr(module, "version", lambda name: "3.6.0")


@pytest.mark.parametrize(
    ("backend", "is_eager", "fails", "captures", "says"),
    [
        ("auto", False, (), [True], "kernels: triton 3.6.0, CUDA graphs"),
        ("triton", True, (), [False], "kernels: triton 3.6.0, no graphs: enforce_eager"),
        ("torch", False, (), [], "plain operations: they were asked for"),
        ("auto", False, ("graphs",), [True, False], "kernels: triton 3.6.0, no graphs: RuntimeError: out of memory"),
        ("auto", False, ("kernels",), [True, False], "plain operations: RuntimeError: out of memory"),
    ],
)
def test_what_is_used_and_what_is_said(backend, is_eager, fails, captures, says):
    runner, build = Runner(), Build(*fails)
    choice = GpuChoice(backend, is_eager, runner, build)
    assert choice.says == says and build.captures == captures
    assert runner.backend == (f"kernels {len(captures)}" if choice.uses_kernels else "plain")


def test_without_triton(monkeypatch):
    def missing():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(module, "triton_ops", missing)
    assert "triton cannot be imported: No module named" in GpuChoice("auto", False, Runner(), Build()).says
    with pytest.raises(ValueError, match="'triton' cannot be had: triton cannot be imported"):
        GpuChoice("triton", False, Runner(), Build())


def test_what_is_forced_and_cannot_be_had_is_an_error():
    with pytest.raises(ValueError, match="'triton' cannot be had: RuntimeError: out of memory"):
        GpuChoice("triton", False, Runner(), Build("kernels"))
    with pytest.raises(ValueError, match="'numba' cannot be had: its kernels are for the CPU"):
        GpuChoice("numba", False, Runner(), Build())


def test_eager_is_without_graphs_on_a_gpu_and_without_kernels_on_a_cpu(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert backend_of("auto", True) == "torch" and backend_of("auto", True, is_gpu=True) == "auto"
    assert backend_of("triton", True, is_gpu=True) == backend_of("triton", True) == "triton"
