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

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from numba import typeof, types

from ...backends.cpu import compiler, step
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


def fill_by_hand(folder: Path) -> None:
    (folder / "kernels_1").mkdir(parents=True, exist_ok=True)
    (folder / "kernels_1" / "step.1.nbc").write_bytes(b"code")
    compiler.mark_complete(folder)


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


def test_a_second_install_of_the_same_sources_has_its_own_folder(tmp_path):
    """Numba looks for code by path, so a complete folder of the first install holds none for the second one."""
    for install in ("first", "second"):
        (tmp_path / install).mkdir()
        (tmp_path / install / "kernel.py").write_text("ONE = 1\n")
    assert compiler.fingerprint(tmp_path / "first") != compiler.fingerprint(tmp_path / "second")


def test_the_process_imports_the_package_by_the_path_of_this_one(tmp_path, monkeypatch):
    """An install may be reached through a link. Kernels stored by the path that it leads to would not be found."""
    environments = []
    (tmp_path / "install").symlink_to(PACKAGE.parent)
    linked = tmp_path / "install" / Path(compiler.__file__).relative_to(PACKAGE.parent)
    monkeypatch.setattr(compiler, "__file__", str(linked))
    monkeypatch.setattr(compiler.subprocess, "Popen", lambda *_, env, **__: environments.append(env))
    compiler.start("float32", tmp_path, None)
    assert environments[0]["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "install")


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


def test_a_complete_read_only_cache_is_copied(user, monkeypatch, tmp_path):
    theirs = compiler.find_folder("float32")
    fill_by_hand(theirs)
    real = compiler.is_writable
    monkeypatch.setattr(compiler, "is_writable", lambda folder: not folder.is_relative_to(user) and real(folder))
    mine = compiler.find_folder("float32")
    assert mine.is_relative_to(tmp_path / "own") and compiler.is_complete(mine)


def test_a_folder_is_complete_if_it_has_all_files(tmp_path):
    assert not compiler.is_complete(tmp_path)
    compiler.mark_complete(tmp_path)
    assert not compiler.is_complete(tmp_path), "nothing has been compiled"
    fill_by_hand(tmp_path)
    assert compiler.is_complete(tmp_path)
    for damage in (b"cod", b"code and more"):
        (tmp_path / "kernels_1" / "step.1.nbc").write_bytes(damage)
        assert not compiler.is_complete(tmp_path)
    fill_by_hand(tmp_path)
    (tmp_path / compiler.MARKER).write_text("{")
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


# Numba's cache, with a function that compiles at once


def tripled(x):
    return 3 * x


@pytest.fixture
def entry(monkeypatch):
    """Replace the step by a small function, and return it."""
    from numba import njit

    function = njit(tripled)
    monkeypatch.setattr(compiler, "entry_of", lambda dtype: (function, (np.float32(1),)))
    return function


def test_a_stored_function_is_loaded_and_numba_settings_are_restored(entry, tmp_path):
    from numba import config, njit

    before = config.CACHE_DIR
    compiler.fill(compiler.Variant(torch.float32), tmp_path)
    assert before == config.CACHE_DIR and compiler.is_complete(tmp_path) and entry(2.0) == 6
    again = njit(tripled)
    compiler.store_in(tmp_path, again)
    again.compile(entry.signatures[0])
    assert sum(again.stats.cache_hits.values()) == 1 and not again.stats.cache_misses


def test_full_disk_does_not_stop_compilation_but_is_an_error_of_the_process(entry, tmp_path, monkeypatch):
    from numba.core.caching import IndexDataCacheFile

    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    compiler.compile_here(compiler.Variant(torch.float32), tmp_path)
    assert entry.signatures and not compiler.is_complete(tmp_path)
    entry.overloads.clear()
    with pytest.raises(OSError, match="No space left"):
        compiler.fill(compiler.Variant(torch.float32), tmp_path)
    assert not compiler.is_complete(tmp_path)


def test_progress_counts_the_kernels_of_the_step(tmp_path):
    integer, grid = types.int64, typeof(step.Grid(0, 0, 0, 0))
    total = len(re.findall(r"^@(?:kernel|entry)$", Path(step.__file__).read_text(), re.MULTILINE))
    with compiler.progress_in(tmp_path):
        assert compiler.read_progress(tmp_path) == compiler.read_progress(None) == "about half a minute"
        for function, arguments, count in [
            (step.part_of.py_func, (integer, grid, integer, integer), 1),
            (step.grid_of.py_func, (integer,) * 4, 2),
            (step.grid_of.py_func, (integer,) * 4, 2),
            (tripled, (integer,), 2),
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

    def slow(dtype, folder):
        compiled.append(dtype)
        let_others_run()
        fill_by_hand(folder)

    monkeypatch.setattr(compiler, "compile_step", slow)
    threads = [Thread(target=compiler.fill, args=(compiler.Variant(torch.float32), tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and compiler.is_complete(tmp_path)


def test_two_engines_that_load_at_once_use_their_own_folders(tmp_path, monkeypatch):
    from numba import config, njit

    before, function, real = config.CACHE_DIR, njit(tripled), compiler.store_in

    def slow(folder, function):
        real(folder, function)
        let_others_run()

    monkeypatch.setattr(compiler, "store_in", slow)
    types = {torch.float32: np.float32, torch.bfloat16: np.uint16}
    monkeypatch.setattr(compiler, "entry_of", lambda dtype: (function, (types[dtype](1),)))
    threads = [Thread(target=compiler.fill, args=(dtype, tmp_path / str(dtype))) for dtype in types]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == config.CACHE_DIR
    assert all(len(list((tmp_path / str(dtype)).glob("*/*.nbc"))) == 1 for dtype in types)


# The process, with a program given by the test


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Return make(code), a Compiler whose process runs that code."""

    def make(code: str) -> compiler.Compiler:
        command = [sys.executable, "-S", "-c", code]

        def started(dtype, folder, output):
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)

        monkeypatch.setattr(compiler, "start", started)
        return compiler.Compiler(compiler.Variant(torch.float32), tmp_path)

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
def test_a_second_install_compiles_in_the_background_too(checkpoint, tmp_path):
    (tmp_path / "install").symlink_to(PACKAGE.parent)
    script = GENERATE.format(package=PACKAGE.name, checkpoint=str(checkpoint))
    finish(run_script(script, tmp_path), COMPILING)
    again = run_script(script, tmp_path, tmp_path / "install")
    (_, first), (_, second) = json.loads(finish(again, COMPILING))
    assert (first, second) == ("plain ", "kernel")


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
