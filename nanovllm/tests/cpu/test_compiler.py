"""The compiler and its cache: folders and when they are stale, full disks, killed processes, several at once."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("numba")
from numba import typeof, types

from ...backends.cpu import compiler, step
from ...backends.cpu.machine_code import MachineCode, Variant
from ...backends.cpu.vectors import kernel
from ...options.attention_backend import BACKEND_VARIABLE
from ..testing.processes import let_others_run

PACKAGE = Path(__file__).resolve().parents[2]


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    """Set the user's cache folder, and return it."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compiler, "temporary_root", lambda: SimpleNamespace(name=str(tmp_path / "own")))
    return tmp_path / "home"


CODE = MachineCode("function", b"code")


def fill_by_hand(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    CODE.write(folder / compiler.CODE)


# Folders


def test_the_folder_depends_on_sources_numba_and_the_machine(tmp_path, monkeypatch):
    (tmp_path / "callee.py").write_text("ONE = 1\n")
    (tmp_path / "caller.py").write_text("from .callee import ONE\n")
    hashes = [compiler.fingerprint(tmp_path), compiler.fingerprint(tmp_path)]
    assert hashes[0] == hashes[1]
    (tmp_path / "callee.py").write_text("ONE = 2\n")
    hashes.append(compiler.fingerprint(tmp_path))
    monkeypatch.setattr(compiler, "version", lambda name: "9.9")
    hashes.append(compiler.fingerprint(tmp_path))
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "znver99")
    hashes.append(compiler.fingerprint(tmp_path))
    monkeypatch.setenv("NUMBA_OPT", "0")
    hashes.append(compiler.fingerprint(tmp_path))
    assert len(set(hashes)) == 5


def test_a_second_install_of_the_same_sources_shares_the_folder(tmp_path):
    for install in ("first", "second"):
        (tmp_path / install).mkdir()
        (tmp_path / install / "kernel.py").write_text("ONE = 1\n")
    assert compiler.fingerprint(tmp_path / "first") == compiler.fingerprint(tmp_path / "second")


def test_each_dtype_has_a_folder_in_the_named_cache(user, monkeypatch, tmp_path):
    folders = {dtype: compiler.find_folder(dtype) for dtype in ("float32", "bfloat16")}
    assert len(set(folders.values())) == 2 and all(folder.is_relative_to(user) for folder in folders.values())
    assert folders["float32"].stat().st_mode & 0o077 == 0, "only its owner may read machine code"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    assert compiler.find_folder("float32").is_relative_to(tmp_path / "named")


def test_a_read_only_home_leads_to_a_temporary_folder_or_none(user, monkeypatch, tmp_path):
    """First there is a file where the folder should be, then no folder is writable."""
    user.write_text("")
    assert compiler.find_folder("float32").is_relative_to(tmp_path / "own")
    monkeypatch.setattr(compiler, "temporary_root", lambda: SimpleNamespace(name=str(user / "own")))
    assert compiler.find_folder("float32") is None


def test_kernels_in_a_read_only_cache_are_used_there(user, monkeypatch, tmp_path):
    theirs = compiler.find_folder("float32")
    fill_by_hand(theirs)
    monkeypatch.setattr(compiler, "is_writable", lambda folder: False)
    assert compiler.find_folder("float32") == theirs and compiler.find_folder("bfloat16") is None


def test_a_folder_is_complete_if_its_code_is_as_it_was_written(tmp_path):
    assert not compiler.is_complete(tmp_path)
    fill_by_hand(tmp_path)
    path = tmp_path / compiler.CODE
    assert compiler.is_complete(tmp_path) and MachineCode.read(path) == CODE
    whole = path.read_bytes()
    for damaged in (b"", whole[:8], whole[:-1], whole + b"e", whole[:-1] + b"E", whole[:3] + b"." + whole[4:]):
        path.write_bytes(damaged)
        assert not compiler.is_complete(tmp_path)


def test_old_folders_are_removed(tmp_path):
    mine, old, used = (tmp_path / name for name in ("mine", "old", "used"))
    for folder in (mine, old, used):
        fill_by_hand(folder)
    then = time.time() - 100 * 86400
    for folder in (mine, old):
        os.utime(folder, (then, then))
    compiler.remove_old(mine)
    assert not old.exists() and compiler.is_complete(used) and compiler.is_complete(mine)


# Machine code, of a function that compiles at once


def in_order(worker, seen, step, model, like, like_x):
    return ((worker * 10 + seen) * 10 + step) * 10 + model


@pytest.fixture
def entry(monkeypatch):
    """Replace the step by a small function."""
    signature = types.int64(*[types.int64] * 4, *[types.CPointer(types.float32)] * 2)
    monkeypatch.setattr(compiler, "entry_of", lambda variant: (kernel(in_order), signature))
    monkeypatch.setattr(compiler, "STEPS", {})


FLOAT32 = Variant(torch.float32)


def test_compiled_code_is_stored_and_loaded(entry, tmp_path, monkeypatch):
    code = compiler.fill(FLOAT32, tmp_path)
    assert MachineCode.read(tmp_path / compiler.CODE) == code
    monkeypatch.setattr(compiler, "compile_step", lambda variant, folder: pytest.fail("it is compiled again"))
    assert compiler.fill(FLOAT32, tmp_path) == code
    compiler.compile_here(FLOAT32, tmp_path)
    assert compiler.STEPS[FLOAT32](1, 2, 3, -4) == 1226


def test_a_full_disk_does_not_stop_compilation_but_is_an_error_of_the_process(entry, tmp_path, monkeypatch):
    def full(code, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MachineCode, "write", full)
    compiler.compile_here(FLOAT32, tmp_path)
    assert compiler.STEPS[FLOAT32](1, 2, 3, 4) == 1234 and not compiler.is_complete(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        compiler.fill(FLOAT32, tmp_path)


def test_variants_of_a_pool_share_one_function():
    """So a step that could not be stored isn't compiled again, and what it has compiled is used."""
    entries = [compiler.entry_of(Variant(dtype))[0] for dtype in (torch.float32, torch.float32, torch.bfloat16)]
    assert (
        entries[0] is entries[1] is entries[2] and entries[0] is not compiler.entry_of(Variant(torch.float32, True))[0]
    )


def test_code_that_cannot_be_stored_leaves_nothing(tmp_path):
    path = tmp_path / compiler.CODE
    path.mkdir()
    (path / "file").touch()
    with pytest.raises(OSError, match="step"):
        CODE.write(path)
    assert MachineCode.read(path) is None and [*tmp_path.iterdir()] == [path]


def test_progress_counts_the_kernels_of_the_step(tmp_path):
    integer, grid = types.int64, typeof(step.Grid(0, 0, 0, 0))
    total = len(re.findall(r"^@kernel$", Path(step.__file__).read_text(), re.MULTILINE))
    with compiler.progress_in(tmp_path):
        assert compiler.read_progress(tmp_path) == compiler.read_progress(None) == "about half a minute"
        for function, arguments, count in [
            (step.part_of.py_func, (integer, grid, integer, integer), 1),
            (step.grid_of.py_func, (integer,) * 4, 2),
            (step.grid_of.py_func, (integer,) * 4, 2),
            (in_order, (integer,) * 6, 2),
        ]:
            kernel(function).compile(arguments)
            assert compiler.read_progress(tmp_path) == f"{count} of {total} are ready"
    assert compiler.read_progress(tmp_path) == "about half a minute", "it is done"


def test_every_kernel_of_the_step_is_called_in_it():
    """So all variants compile all of them, and the progress ends at their number. A part belongs to one kernel."""
    source = Path(step.__file__).read_text()
    kinds = {name: kind for kind, name in re.findall(r"^@(kernel|part)\ndef (\w+)", source, re.MULTILINE)}
    calls = {name: len(re.findall(rf"\b{name}\(", source)) - 1 for name in kinds}
    assert [name for name, kind in kinds.items() if kind == "part" and calls[name] != 1] == []
    assert min(calls.values()) > 0 and [*kinds.values()].count("part") > 10


def test_several_compilers_compile_only_once(tmp_path, monkeypatch):
    compiled = []

    def slow(variant, folder):
        compiled.append(variant)
        let_others_run()
        return CODE

    monkeypatch.setattr(compiler, "compile_step", slow)
    threads = [Thread(target=compiler.fill, args=(FLOAT32, tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and compiler.is_complete(tmp_path)


# The process, with a program given by the test


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Return make(code), a Compiler whose process runs that code."""

    def make(code: str) -> compiler.Compiler:
        command = [sys.executable, "-S", "-c", code]

        def started(dtype, folder, output):
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)

        monkeypatch.setattr(compiler, "start", started)
        return compiler.Compiler(FLOAT32, tmp_path)

    return make


def test_a_compiler_ends_without_an_error(process):
    made = process("print('one line')")
    made.wait(60)
    assert made.has_ended and made.error is None


def test_a_failed_compiler_has_an_error(process):
    made = process("raise OSError(28, 'No space left on device')")
    made.wait(60)
    assert made.error == "OSError: [Errno 28] No space left on device"
    killed = process("import os; os.kill(os.getpid(), 9)")
    killed.wait(60)
    assert killed.error == "the compiler exited with status -9"


@pytest.mark.parametrize("way", ["close", "collect"])
def test_the_process_ends_with_its_owner_and_leaves_no_zombie(process, way):
    made = process("import time; time.sleep(60)")
    child = made.process
    if way == "close":
        made.close()
        made.close()
    else:
        del made
        gc.collect()
    assert child.returncode == -signal.SIGKILL, "the process must have been waited for"


# With real kernels


def run_script(script: str, home: Path, install: Path = PACKAGE.parent, **variables: str) -> subprocess.Popen[str]:
    unset = (BACKEND_VARIABLE, "NUMBA_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(install), "OMP_NUM_THREADS": "2"} | variables
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe, cwd=home)


COMPILING = (
    r"(compiling kernels, once per machine: (about half a minute|\d+ of \d+ are ready) "
    r"\(Ctrl-C is safe, and leaves it to the next run\)\n)+"
)


def finish(process: subprocess.Popen[str], err: str = "") -> str:
    """Return the output of a process that prints just what matches `err` on standard error."""
    out, printed = process.communicate(timeout=300)
    assert process.returncode == 0 and re.fullmatch(err, printed), printed
    return out


GENERATE = """
import json
import torch
from {package} import LLM, SamplingParams
params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
llm = LLM({checkpoint!r}, offload_policy="load")
kernels, results = llm.llm_engine.kernels, []
def generate():
    [output] = llm.generate([[1, 5, 9, 33]], params, use_tqdm=False)
    results.append([output.outputs[0].token_ids, kernels.description[:6]])
generate()
kernels.wait(200)
generate()
print(json.dumps(results))
"""


@pytest.mark.nightly
def test_the_first_engine_starts_at_once_and_the_second_one_has_kernels(checkpoint, tmp_path):
    script = GENERATE.format(package=PACKAGE.name, checkpoint=str(checkpoint))
    (plain, first), (tokens, second) = json.loads(finish(run_script(script, tmp_path), COMPILING))
    assert (first, second) == ("plain ", "kernel") and tokens == plain
    assert json.loads(finish(run_script(script, tmp_path))) == [[plain, "kernel"]] * 2, "it must not compile again"


@pytest.mark.nightly
def test_a_second_install_uses_the_kernels_of_the_first(checkpoint, tmp_path):
    (tmp_path / "install").symlink_to(PACKAGE.parent)
    script = GENERATE.format(package=PACKAGE.name, checkpoint=str(checkpoint))
    finish(run_script(script, tmp_path), COMPILING)
    again = run_script(script, tmp_path, tmp_path / "install")
    assert [kernels for _, kernels in json.loads(finish(again))] == ["kernel"] * 2


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None  # an import fails
{generate}
"""


def test_compiled_kernels_run_without_an_import_of_numba(with_kernels, kernels_folder, checkpoint, tmp_path):
    script = WITHOUT_NUMBA.format(generate=GENERATE.format(package=PACKAGE.name, checkpoint=str(checkpoint)))
    out = finish(run_script(script, tmp_path, NUMBA_CACHE_DIR=str(kernels_folder)))
    assert [kernels for _, kernels in json.loads(out)] == ["kernel"] * 2


@pytest.mark.nightly
def test_two_engines_finish_the_work_of_a_killed_one(checkpoint, tmp_path):
    """The first engine is killed while its compiler runs, which must end too."""
    script = GENERATE.format(package=PACKAGE.name, checkpoint=str(checkpoint))
    report = "import os\nprint(*os.popen(f'pgrep -P {os.getpid()}').read().split(), flush=True)\n"
    first = run_script(script.replace("generate()\nkernels.wait", f"{report}kernels.wait", 1), tmp_path)
    children = [Path("/proc", pid) for pid in first.stdout.readline().split()]
    time.sleep(4)
    first.kill()
    first.communicate()
    deadline = time.monotonic() + 60
    while any(child.exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children and not any(child.exists() for child in children)
    both = [run_script(script, tmp_path), run_script(script, tmp_path)]
    results = [json.loads(finish(each, COMPILING)) for each in both]
    assert results[0][1] == results[1][1] and results[0][1][1] == "kernel"


FORK = """
import os
from {package} import LLM, SamplingParams
llm = LLM({checkpoint!r}, offload_policy="load", attention_backend="numba")
params = SamplingParams(max_tokens=5, temperature=0)
def tokens(llm):
    return llm.generate([[1, 5, 9]], params, use_tqdm=False)[0].outputs[0].token_ids
before = tokens(llm)
if os.fork() == 0:
    other = LLM({checkpoint!r}, offload_policy="load", attention_backend="numba")
    os._exit(0 if tokens(llm) == tokens(other) == before else 1)
print("child", os.waitstatus_to_exitcode(os.wait()[1]), tokens(llm) == before)
"""


@pytest.mark.nightly
def test_a_forked_child_uses_its_parents_kernels_and_starts_engines(checkpoint, tmp_path):
    script = FORK.format(package=PACKAGE.name, checkpoint=str(checkpoint))
    assert finish(run_script(script, tmp_path), COMPILING).splitlines()[-1] == "child 0 True"
