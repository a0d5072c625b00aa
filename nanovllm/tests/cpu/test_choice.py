"""The choice between kernels and plain operations: options, requirements, compiling in the background, forks."""

import itertools
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ... import LLM, EngineArgs, SamplingParams
from ... import __main__ as command
from ...backends import choice
from ...backends.cpu import backend
from ...backends.cpu.backend import CpuChoice
from ...backends.cpu.machine_code import Variant
from ...backends.torch.attention import PagedAttention
from ...backends.torch.backend import TorchBackend
from ...distributed.rank_group import RankGroup
from ...options.attention_backend import BACKEND_VARIABLE, backend_of
from ...quantization import Format, QuantizedLinear, keep_wide
from ..testing.engines import OPTIONS
from ..testing.ranks import on_ranks


class FakeBackend:
    """A backend with kernels that records when it is built."""

    def __init__(self, calls):
        calls.append("build")


class FakeRunner:
    backend: Any = "plain"

    def __init__(self) -> None:
        self.model = nn.Sequential(QuantizedLinear(nn.Linear(32, 32, bias=False), Format.INT8))


def build_without_memory():
    raise MemoryError("you tried to allocate 30 bytes")


class FakeCompiler:
    """A compiler that ends when the test calls finish()."""

    def __init__(self, dtype, folder):
        self._folder, self.has_ended, self.error, self.is_closed, self.is_forgotten = folder, False, None, False, False
        COMPILERS.append(self)

    def finish(self, error=None):
        self.has_ended, self.error = True, error
        if error is None:
            (self._folder / "complete").touch()

    def close(self):
        self.is_closed = True

    def forget(self):
        self.is_forgotten = True


COMPILERS: list[FakeCompiler] = []
COMPILING = "compiling kernels, once per machine: about half a minute (Ctrl-C is safe, and leaves it to the next run)"
PROMPT, PARAMS = [1, 5, 9], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def kernels_folder(monkeypatch, tmp_path):
    """Compile nothing. The folder is complete if it has a file of that name."""
    COMPILERS.clear()
    monkeypatch.delenv(BACKEND_VARIABLE)
    monkeypatch.setattr(backend, "Compiler", FakeCompiler)
    monkeypatch.setattr(backend, "missing_requirement", lambda: None)
    monkeypatch.setattr(backend, "find_folder", lambda dtype: tmp_path)
    monkeypatch.setattr(backend, "is_complete", lambda folder: (folder / "complete").exists())
    monkeypatch.setattr(backend, "compile_here", lambda dtype, folder: None)
    return tmp_path


def choose(name="auto", unsupported=None) -> tuple[CpuChoice, list[str]]:
    calls: list[str] = []
    build: Any = partial(FakeBackend, calls)
    runner: Any = FakeRunner()
    return CpuChoice(name, runner, build, Variant(torch.float32), unsupported), calls


# Options


def test_eager_and_the_environment_change_the_backend(monkeypatch):
    assert [backend_of(name, False) for name in (None, "auto", "numba", "torch")] == ["auto", "auto", "numba", "torch"]
    assert [backend_of(name, True) for name in (None, "auto", "torch")] == ["torch"] * 3
    with pytest.raises(ValueError, match=r"enforce_eager .* attention_backend 'numba'"):
        EngineArgs(attention_backend="numba", enforce_eager=True)
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    assert [backend_of(name, False) for name in (None, "auto", "numba")] == ["torch", "torch", "numba"]
    monkeypatch.setenv(BACKEND_VARIABLE, "fast")
    with pytest.raises(ValueError, match=f"{BACKEND_VARIABLE} must be one of auto, numba, triton, torch, got 'fast'"):
        backend_of("auto", False)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "cpu_attn", 3, True])
def test_backends_of_vllm_are_rejected(name):
    with pytest.raises(ValueError, match="attention_backend must be "):
        EngineArgs(attention_backend=name)


def test_the_command_has_both_options_and_prints_the_choice(run):
    status, out, _ = run("generate", "the", "--max-tokens", "2", "--enforce-eager")
    assert status == 0 and "\nplain operations: as requested\n" in out and not COMPILERS
    status, out, err = run("generate", "the", "--attention-backend", "numba", "--enforce-eager")
    assert (status, out) == (2, "") and err.startswith("error: enforce_eager ") and err.count("\n") == 1
    assert "not one of 'auto', 'numba', 'triton', 'torch'" in run("batch", "x", "--attention-backend", "CPU_ATTN")[2]


# The choice


def test_quantized_layers_keep_a_wide_copy_only_while_kernels_compile(monkeypatch):
    runner: Any = FakeRunner()
    choice = CpuChoice("auto", runner, partial(FakeBackend, []), Variant(torch.float32))
    [layer] = runner.model
    layer.quantize([torch.randn(32, 32)])
    x, expected = torch.randn(2, 32), layer.dequantize()
    assert torch.equal(layer(x), F.linear(x, expected))
    monkeypatch.setattr(layer, "dequantize", lambda: pytest.fail("the weight is dequantized again"))
    assert torch.equal(layer(x), F.linear(x, expected))
    COMPILERS[-1].finish()
    choice.switch_when_ready()
    assert choice.uses_kernels and not layer.keeps_wide
    monkeypatch.undo()
    assert torch.equal(layer(x), F.linear(x, expected)), "from the integers"


def test_wide_copies_stay_within_the_memory():
    layers = [QuantizedLinear(nn.Linear(32, outputs, bias=False), Format.INT8) for outputs in (32, 64, 32)]
    keep_wide(nn.Sequential(*layers), 2 * 32 * 32 * 2, torch.bfloat16)
    assert [layer.keeps_wide for layer in layers] == [True, False, True]


def test_compiled_kernels_are_used_at_once(kernels_folder):
    (kernels_folder / "complete").touch()
    choice, calls = choose()
    assert calls == ["build"] and not COMPILERS and choice.description.startswith("kernels: numba ")


def test_kernels_that_cannot_be_loaded_are_compiled_again(kernels_folder, monkeypatch):
    (kernels_folder / "complete").touch()

    def damaged(dtype, folder):
        raise EOFError("ran out of input")

    monkeypatch.setattr(backend, "compile_here", damaged)
    choice, calls = choose()
    assert not calls and "being compiled" in choice.description and not (kernels_folder / "complete").exists()


def test_a_missing_requirement_is_described_or_raised(monkeypatch):
    monkeypatch.setattr(backend, "missing_requirement", lambda: "numba is not installed (pip install 'numba>=0.68')")
    choice, calls = choose("auto")
    assert choice.description == "plain operations: numba is not installed (pip install 'numba>=0.68')"
    assert not calls
    with pytest.raises(ValueError, match=r"attention_backend 'numba' is unavailable: numba is not installed \(pip"):
        choose("numba")


def test_an_unsupported_device_is_described_or_raised():
    assert choose(unsupported="the device is cuda")[0].description == "plain operations: the device is cuda"
    with pytest.raises(ValueError, match="'numba' is unavailable: the device is cuda"):
        choose("numba", "the device is cuda")
    assert choose("torch", "the device is cuda")[0].description == "plain operations: as requested"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_wait_for_required_kernels_is_announced(monkeypatch, caplog, kernels_folder, is_compiled):
    monkeypatch.setattr(backend, "is_complete", lambda folder: is_compiled)
    caplog.set_level("INFO", "nanovllm")
    choose("numba")
    assert [record.getMessage() for record in caplog.records] == [COMPILING][is_compiled:]


def test_required_kernels_are_compiled_before_the_engine_starts(monkeypatch):
    assert choose("numba")[1] == ["build"] and not COMPILERS

    def fails(dtype, folder):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(backend, "compile_here", fails)
    with pytest.raises(ValueError, match="'numba' is unavailable: RuntimeError: no such instruction"):
        choose("numba")


def test_too_little_memory_leaves_plain_operations(kernels_folder):
    (kernels_folder / "complete").touch()
    runner: Any = FakeRunner()
    choice = CpuChoice("auto", runner, build_without_memory, Variant(torch.float32))
    assert not choice.uses_kernels
    assert choice.description.endswith("kernels could not be loaded: MemoryError: you tried to allocate 30 bytes")
    with pytest.raises(ValueError, match="'numba' is unavailable: MemoryError: you tried"):
        CpuChoice("numba", runner, build_without_memory, Variant(torch.float32))


def test_without_a_writable_folder_only_required_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr(backend, "find_folder", lambda dtype: None)
    assert "set NUMBA_CACHE_DIR" in choose()[0].description and not COMPILERS
    assert choose("numba")[1] == ["build"], "in memory"


def test_without_a_compiler_process_plain_operations_compute(monkeypatch):
    def fails(dtype, folder):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(backend, "Compiler", fails)
    choice, _ = choose()
    assert choice.description.startswith("plain operations: kernels could not be compiled: [Errno 11]")


def test_numba_must_be_installed_and_recent(monkeypatch):
    monkeypatch.undo()
    assert backend.missing_requirement() is None
    monkeypatch.setattr(backend, "version", lambda name: "0.59.1")
    assert backend.missing_requirement() == (
        "numba 0.68 or newer is needed, but 0.59.1 is installed (pip install 'numba>=0.68')"
    )

    def missing(name):
        raise backend.PackageNotFoundError(name)

    monkeypatch.setattr(backend, "version", missing)
    assert backend.missing_requirement() == "numba is not installed (pip install 'numba>=0.68')"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_ranks_compile_before_the_engine_starts_and_choose_the_same(monkeypatch, is_compiled):
    """One rank cannot load the kernels, at first."""
    calls = itertools.count(1)

    def fail_once(*arguments: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("no such instruction")

    def build_on(ranks: RankGroup, calls: list[str]) -> FakeBackend:
        return ranks.call_on_all(partial(FakeBackend, calls))

    def reasons(ranks: RankGroup) -> list[str | None]:
        runner: Any = FakeRunner()
        choices = [
            CpuChoice("auto", runner, partial(build_on, ranks, []), Variant(torch.float32), ranks=ranks)
            for _ in range(2)
        ]
        return [each.reason for each in choices] + [runner.backend.__class__.__name__]

    monkeypatch.setattr(backend, "is_complete", lambda folder: is_compiled)
    monkeypatch.setattr(backend, "compile_here", fail_once)
    for first, *others in on_ranks(2, reasons):
        assert "RuntimeError: no such instruction" in first and others == [None, "FakeBackend"]
    assert not COMPILERS


# Compiling in the background


@pytest.fixture
def llm(checkpoint, monkeypatch):
    """Return an engine whose kernels are plain operations, and whose `calls` record when it switches to them."""
    llm, calls = LLM(checkpoint, kv_cache_tokens=64, **OPTIONS), []
    plain = llm.llm_engine.executor.backend
    monkeypatch.setattr(llm.llm_engine.kernels, "_build", lambda: calls.append("build") or plain)
    llm.calls = calls
    return llm


def test_the_engine_switches_to_kernels_when_no_request_is_running(llm):
    engine, calls = llm.llm_engine, llm.calls
    engine.add_request("a", PROMPT, PARAMS)
    COMPILERS[0].finish()
    while engine.has_unfinished_requests():
        engine.step()
        if "b" not in engine.requests and len(engine.requests) == 1 and not calls and engine.requests.get("a"):
            engine.add_request("b", PROMPT, PARAMS)
        assert not calls and not engine.kernels.uses_kernels
    assert engine.kernels.description == "plain operations: kernels are being compiled (once per machine)"
    engine.add_request("c", PROMPT, PARAMS)
    assert calls == ["build"] and engine.kernels.uses_kernels
    engine.abort_request("c")
    engine.add_request("d", PROMPT, PARAMS)
    assert calls == ["build"]


def test_the_engine_runs_on_if_the_compiler_fails(llm):
    COMPILERS[0].finish("OSError: [Errno 28] No space left on device")
    [output] = llm.generate([PROMPT], PARAMS)
    assert len(output.outputs[0].token_ids) == 3
    assert llm.llm_engine.kernels.description.endswith("kernels could not be compiled: " + COMPILERS[0].error)


def test_a_command_waits_for_its_compiler_and_prints_why(run, monkeypatch):
    waits = []
    monkeypatch.setattr(FakeCompiler, "wait", lambda self, seconds: waits.append(seconds), raising=False)
    status, out, err = run("generate", "the", "--max-tokens", "2")
    assert (status, waits) == (0, [10] * 12) and "are being compiled" in out
    assert err == f"{COMPILING}\n" * 12

    def interrupt(self, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeCompiler, "wait", interrupt)
    assert run("generate", "the", "--max-tokens", "2")[0] == 0, "the results are complete"


def test_wait_says_how_far_the_compiler_is(llm, monkeypatch, kernels_folder, caplog):
    def wait(self, seconds):
        (kernels_folder / "progress").write_text("12 of 31 are ready")
        if len(caplog.records) == 2:
            self.finish()

    caplog.set_level("INFO", "nanovllm")
    monkeypatch.setattr(FakeCompiler, "wait", wait, raising=False)
    llm.llm_engine.kernels.wait(200)
    expected = COMPILING, COMPILING.replace("about half a minute", "12 of 31 are ready")
    assert tuple(record.getMessage() for record in caplog.records) == expected


def test_a_benchmark_waits_for_kernels_and_measures_them(run, monkeypatch):
    monkeypatch.setattr(FakeCompiler, "wait", lambda self, seconds: self.finish(), raising=False)
    used = []

    def build(model, kv_cache, max_model_len, ranks):
        used.append(model)
        return TorchBackend(model, PagedAttention(kv_cache, tile_size=64), kv_cache.block_size, torch.device("cpu"))

    monkeypatch.setattr(choice, "NumbaBackend", build)
    small = ("--input-len", "4", "--output-len", "3", "--rounds", "1")
    status, out, err = run("bench latency", *small)
    assert status == 0 and len(used) == 1 and "with kernels: numba" in out
    assert err.splitlines()[0] == COMPILING


def test_closing_an_engine_ends_its_compiler(llm):
    llm.llm_engine.kernels.close()
    llm.llm_engine.kernels.close()
    assert COMPILERS[0].is_closed and "the engine was closed" in llm.llm_engine.kernels.description


# Forks and threads


def in_a_forked_child(check) -> bool:
    if (child := os.fork()) == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_keeps_kernels_and_leaves_the_compiler_to_its_parent(kernels_folder):
    waiting, _ = choose()
    (kernels_folder / "complete").touch()
    used, calls = choose()
    assert in_a_forked_child(
        lambda: (
            calls == ["build"]
            and used.uses_kernels
            and torch.get_num_threads() == 1
            and COMPILERS[0].is_forgotten
            and waiting.description == "plain operations: this process was forked"
        )
    )
    assert used.uses_kernels and "being compiled" in waiting.description


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_command_shortens_spinning_unless_the_user_sets_it(name, monkeypatch):
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(each, "1")  # to be restored
        monkeypatch.delenv(each)
    command.limit_openmp_spinning()
    assert os.environ.pop("GOMP_SPINCOUNT") == "1000"
    monkeypatch.setenv(name, "7")
    command.limit_openmp_spinning()
    assert os.environ[name] == "7" and len({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}) == 1
