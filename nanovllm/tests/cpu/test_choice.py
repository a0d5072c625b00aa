"""What an engine computes with, and why: asked for, forced, missing, compiling, taken up, forked."""

import os
import sys
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ... import LLM, EngineArgs, SamplingParams
from ... import __main__ as command
from ...backends import choice as backends
from ...backends.cpu import choice as module
from ...backends.cpu import threads
from ...backends.cpu.choice import Choice
from ...backends.attention_backend import VARIABLE, backend_of
from ...backends.torch.attention import PagedAttention
from ...backends.torch.backend import TorchBackend
from ..helpers import OPTIONS


class Kernels:
    """In place of a backend with kernels: it notes when it is built, and when it is closed."""

    def __init__(self, calls):
        self._calls = calls
        calls.append("use")

    def close(self):
        self._calls.append("drop")


class Runner:
    backend: Any = "plain"


def fails_for_lack_of_memory():
    raise MemoryError("you tried to allocate 30 bytes")


class Compiler:
    """In place of a process: it ends when the test says so."""

    def __init__(self, dtype, folder):
        self.ended, self.error, self.is_closed, self.is_forgotten = Event(), None, False, False
        COMPILERS.append(self)

    @property
    def has_ended(self):
        return self.ended.is_set()

    def wait(self, seconds):
        self.ended.wait(seconds)

    def close(self):
        self.is_closed = True

    def forget(self):
        self.is_forgotten = True


COMPILERS: list[Compiler] = []
PROMPT, PARAMS = [1, 5, 9], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch, tmp_path):
    """Nothing is compiled; a folder is complete if it has a file of that name."""
    COMPILERS.clear()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(module, "Compiler", Compiler)
    monkeypatch.setattr(module, "missing_requirement", lambda: None)
    monkeypatch.setattr(module, "find_folder", lambda dtype: tmp_path)
    monkeypatch.setattr(module, "is_complete", lambda folder: (folder / "complete").exists())
    monkeypatch.setattr(module, "compile_here", lambda dtype, folder: None)
    return tmp_path


def choose(backend="auto", refusal=None) -> tuple[Choice, list[str]]:
    calls: list[str] = []
    build: Any = partial(Kernels, calls)
    return Choice(backend, Runner(), build, torch.float32, refusal), calls


# What is asked for


def test_the_three_words_and_eager(monkeypatch):
    assert [backend_of(name, False) for name in (None, "auto", "numba", "torch")] == ["auto", "auto", "numba", "torch"]
    assert [backend_of(name, True) for name in (None, "auto", "torch")] == ["torch"] * 3
    with pytest.raises(ValueError, match="enforce_eager is for plain operations, attention_backend 'numba' for kern"):
        EngineArgs(attention_backend="numba", enforce_eager=True)
    monkeypatch.setenv(VARIABLE, "torch")
    assert [backend_of(name, False) for name in (None, "auto", "numba")] == ["torch", "torch", "numba"]
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ValueError, match=f"{VARIABLE} must be one of auto, numba, triton, torch .*, not 'fast'"):
        backend_of("auto", False)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "cpu_attn", 3, True])
def test_a_backend_of_vllms_is_refused_in_words(name):
    told = r"attention_backend must be one of auto, numba, triton, torch \(vLLM's own are not"
    with pytest.raises(ValueError, match=told):
        EngineArgs(attention_backend=name)


def test_the_command_has_both_and_says_what_was_taken(run):
    told = run("generate", "the", "--max-tokens", "2", "--enforce-eager")
    assert told[0] == 0 and "\nplain operations: they were asked for\n" in told[1] and not COMPILERS
    status, out, err = run("generate", "the", "--attention-backend", "numba", "--enforce-eager")
    assert (status, out) == (2, "") and err.startswith("error: enforce_eager is for") and err.count("\n") == 1
    assert "not one of 'auto', 'numba', 'triton', 'torch'" in run("batch", "x", "--attention-backend", "CPU_ATTN")[2]


# What is taken


def test_kernels_that_are_compiled_are_used_at_once(stand_ins):
    (stand_ins / "complete").touch()
    found, calls = choose()
    assert calls == ["use"] and not COMPILERS and found.says.startswith("kernels: numba ")


def test_kernels_that_cannot_be_loaded_are_compiled_anew(stand_ins, monkeypatch):
    (stand_ins / "complete").touch()

    def damaged(dtype, folder):
        raise EOFError("ran out of input")

    monkeypatch.setattr(module, "compile_here", damaged)
    found, calls = choose()
    assert not calls and found.is_compiling and not (stand_ins / "complete").exists()


@pytest.mark.parametrize("backend", ["auto", "numba"])
def test_what_is_missing_is_said_or_raised(backend, monkeypatch):
    monkeypatch.setattr(module, "missing_requirement", lambda: "numba is not installed (pip install nanovllm[kernels])")
    if backend == "auto":
        found, calls = choose()
        assert found.says == "plain operations: numba is not installed (pip install nanovllm[kernels])" and not calls
    else:
        with pytest.raises(ValueError, match=r"attention_backend 'numba' cannot be had: numba is not installed \(pip"):
            choose(backend)


def test_a_model_that_kernels_cannot_serve():
    assert choose(refusal="the device is cuda")[0].says == "plain operations: the device is cuda"
    with pytest.raises(ValueError, match="'numba' cannot be had: the device is cuda"):
        choose("numba", "the device is cuda")
    assert choose("torch", "the device is cuda")[0].says == "plain operations: they were asked for"


def test_a_forced_choice_is_there_before_the_engine_or_raises(monkeypatch):
    assert choose("numba")[1] == ["use"] and not COMPILERS

    def fails(dtype, folder):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(module, "compile_here", fails)
    with pytest.raises(ValueError, match="'numba' cannot be had: RuntimeError: no such instruction"):
        choose("numba")


def test_kernels_that_the_machine_has_no_room_for(stand_ins):
    (stand_ins / "complete").touch()
    found = Choice("auto", Runner(), fails_for_lack_of_memory, torch.float32)
    assert not found.uses_kernels
    assert found.says.endswith("kernels could not be taken up: MemoryError: you tried to allocate 30 bytes")
    with pytest.raises(ValueError, match="'numba' cannot be had: MemoryError: you tried"):
        Choice("numba", Runner(), fails_for_lack_of_memory, torch.float32)


def test_nowhere_to_keep_them(monkeypatch):
    monkeypatch.setattr(module, "find_folder", lambda dtype: None)
    assert "NUMBA_CACHE_DIR names a folder" in choose()[0].says and not COMPILERS
    assert choose("numba")[1] == ["use"], "in memory"


def test_no_process_can_be_started(monkeypatch):
    def fails(dtype, folder):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(module, "Compiler", fails)
    found, _ = choose()
    assert found.says.startswith("plain operations: kernels could not be compiled: [Errno 11]")


def test_numba_of_another_version_or_none(monkeypatch):
    monkeypatch.undo()
    assert module.missing_requirement() is None
    monkeypatch.setattr(module, "version", lambda name: "0.59.1")
    assert module.missing_requirement() == "numba 0.59.1 is installed, 0.68 is needed (pip install nanovllm[kernels])"
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert module.missing_requirement() == "numba is not installed (pip install nanovllm[kernels])"


# Taken up


@pytest.fixture
def llm(checkpoint, monkeypatch):
    """Its kernels are those of plain operations, but that `calls` notes when they are taken up."""
    llm, calls = LLM(checkpoint, kv_cache_tokens=64, **OPTIONS), []
    plain = llm.llm_engine.executor.backend
    monkeypatch.setattr(llm.llm_engine.kernels, "_build", lambda: calls.append("use") or plain)
    llm.calls = calls
    return llm


def test_kernels_are_taken_up_only_while_no_request_is_there(llm):
    engine, calls = llm.llm_engine, llm.calls
    engine.add_request("a", PROMPT, PARAMS)
    COMPILERS[0].ended.set()
    while engine.has_unfinished_requests():
        engine.step()
        if "b" not in engine.requests and len(engine.requests) == 1 and not calls and engine.requests.get("a"):
            engine.add_request("b", PROMPT, PARAMS)
        assert not calls and not engine.kernels.uses_kernels
    assert engine.kernels.says == "plain operations: kernels are being compiled, once on this machine"
    engine.add_request("c", PROMPT, PARAMS)
    assert calls == ["use"] and engine.kernels.uses_kernels
    engine.abort_request("c")
    engine.add_request("d", PROMPT, PARAMS)
    assert calls == ["use"]


def test_a_compiler_that_fails_is_told_and_missed_by_nobody(llm):
    COMPILERS[0].error = "OSError: [Errno 28] No space left on device"
    COMPILERS[0].ended.set()
    [output] = llm.generate([PROMPT], PARAMS)
    assert len(output.outputs[0].token_ids) == 3
    assert llm.llm_engine.kernels.says.endswith("kernels could not be compiled: " + COMPILERS[0].error)


def test_a_command_waits_for_the_compiler_that_it_started_and_says_so(run, monkeypatch):
    waits = []
    monkeypatch.setattr(Compiler, "wait", lambda self, seconds: waits.append(seconds))
    status, out, err = run("generate", "the", "--max-tokens", "2")
    assert (status, waits) == (0, [120]) and "are being compiled" in out
    assert err.startswith("compiling kernels for the next runs") and err.count("\n") == 1

    def interrupt(self, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(Compiler, "wait", interrupt)
    assert run("generate", "the", "--max-tokens", "2")[0] == 0, "all that was asked for is there"


def test_a_bench_measures_what_it_says(run, monkeypatch):
    monkeypatch.setattr(Compiler, "wait", lambda self, seconds: self.ended.set())
    used = []

    def build(model, kv_cache, max_model_len):
        used.append(model)
        return TorchBackend(model, PagedAttention(kv_cache, tile_size=64))

    monkeypatch.setattr(backends, "NumbaBackend", build)
    small = ("--input-len", "4", "--output-len", "3", "--rounds", "1", "--no-peer")
    status, out, _ = run("bench latency", *small)
    assert status == 0 and len(used) == 1 and "with kernels: numba" in out


def test_an_engine_that_ends_ends_its_compiler(llm):
    llm.llm_engine.kernels.close()
    llm.llm_engine.kernels.close()
    assert COMPILERS[0].is_closed and not llm.llm_engine.kernels.is_compiling


# Forks and threads


def in_a_forked_child(check) -> bool:
    if (child := os.fork()) == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_goes_on_without_kernels(stand_ins):
    waiting, _ = choose()
    (stand_ins / "complete").touch()
    used, calls = choose()
    assert in_a_forked_child(
        lambda: (
            calls == ["use", "drop"]
            and used.says == "plain operations: this process was forked from one with kernels"
            and COMPILERS[0].is_forgotten
            and not waiting.is_compiling
        )
    )
    assert calls == ["use"] and used.uses_kernels and waiting.is_compiling


def test_threads_are_as_many_as_torch_has_and_then_as_before(monkeypatch):
    import numba

    numbers = [7]
    monkeypatch.setattr(numba, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(numba, "set_num_threads", numbers.append)
    monkeypatch.setattr(threads, "start_team", lambda: "omp")
    with pytest.raises(ZeroDivisionError), threads.numba_threads() as count:
        assert numbers == [7, count] and count == min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        raise ZeroDivisionError
    assert numbers == [7, count, 7]


@pytest.mark.parametrize(("named", "there", "expected"), [
    ("default", {"omp", "workqueue"}, "omp"),
    ("default", {"workqueue"}, "workqueue"),
    ("tbb", {"tbb", "omp"}, "tbb"),
])  # fmt: skip
def test_the_threading_layer_is_openmp_unless_there_is_none_or_the_user_names_one(named, there, expected, monkeypatch):
    config, started, before = SimpleNamespace(THREADING_LAYER=named), [], torch.get_num_threads()

    def threading_layer():
        if not started:
            raise ValueError("Threading layer is not initialized.")
        return started[0]

    def get_num_threads():
        if config.THREADING_LAYER not in there:
            raise ValueError("No threading layer could be loaded.")
        started.append(config.THREADING_LAYER)
        torch.set_num_threads(before + 1)  # so does Numba, of the OpenMP that it shares with torch

    fake = SimpleNamespace(threading_layer=threading_layer, get_num_threads=get_num_threads)
    monkeypatch.setitem(sys.modules, "numba", fake)
    monkeypatch.setitem(sys.modules, "numba.core", SimpleNamespace(config=config))
    assert threads.start_team.__wrapped__() == expected and named == config.THREADING_LAYER
    assert torch.get_num_threads() == before
    assert threads.start_team.__wrapped__() == expected, "what runs already stays"


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_command_says_how_threads_wait_unless_the_user_does(name, monkeypatch):
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(each, "1")  # to be restored
        monkeypatch.delenv(each)
    command.shorten_spinning()
    assert os.environ.pop("GOMP_SPINCOUNT") == "1000"
    monkeypatch.setenv(name, "7")
    command.shorten_spinning()
    assert os.environ[name] == "7" and len({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}) == 1
