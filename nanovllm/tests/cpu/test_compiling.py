"""The compiler and its cache: who may write where, what makes it stale, and processes that are killed or meet."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch

from ...backends.cpu import cache, compiler, compiling
from ...backends.attention_backend import VARIABLE

PACKAGE = Path(__file__).resolve().parents[2]


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    """A user's cache."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "own_root", lambda: tmp_path / "own")
    return tmp_path / "home"


def fill_by_hand(folder: Path) -> None:
    (folder / "kernels_1").mkdir(parents=True, exist_ok=True)
    (folder / "kernels_1" / "step.1.nbc").write_bytes(b"code")
    cache.mark_complete(folder)


# Folders


def test_any_change_of_a_source_or_of_numba_or_of_the_machine_makes_another_folder(tmp_path, monkeypatch):
    (tmp_path / "callee.py").write_text("ONE = 1\n")
    (tmp_path / "caller.py").write_text("from .callee import ONE\n")
    found = [cache.fingerprint(tmp_path), cache.fingerprint(tmp_path)]
    assert found[0] == found[1]
    (tmp_path / "callee.py").write_text("ONE = 2\n")
    found.append(cache.fingerprint(tmp_path))
    monkeypatch.setattr(cache, "version", lambda name: "9.9")
    found.append(cache.fingerprint(tmp_path))
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "znver99")
    found.append(cache.fingerprint(tmp_path))
    monkeypatch.setenv("NUMBA_OPT", "0")
    found.append(cache.fingerprint(tmp_path))
    assert len(set(found)) == 5


def test_a_folder_for_each_dtype_where_the_user_says(user, monkeypatch, tmp_path):
    folders = {dtype: cache.find_folder(dtype) for dtype in ("float32", "bfloat16")}
    assert len(set(folders.values())) == 2 and all(folder.is_relative_to(user) for folder in folders.values())
    assert folders["float32"].stat().st_mode & 0o077 == 0, "machine code is read by its owner alone"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    assert cache.find_folder("float32").is_relative_to(tmp_path / "named")


def test_a_home_that_cannot_be_written(user, monkeypatch, tmp_path):
    """A file stands where its folder should be; then nothing can be written at all."""
    user.write_text("")
    assert cache.find_folder("float32").is_relative_to(tmp_path / "own")
    monkeypatch.setattr(cache, "own_root", lambda: user / "own")
    assert cache.find_folder("float32") is None


def test_a_complete_cache_of_somebody_else_is_copied(user, monkeypatch, tmp_path):
    theirs = cache.find_folder("float32")
    fill_by_hand(theirs)
    real = cache.is_writable
    monkeypatch.setattr(cache, "is_writable", lambda folder: not folder.is_relative_to(user) and real(folder))
    mine = cache.find_folder("float32")
    assert mine.is_relative_to(tmp_path / "own") and cache.is_complete(mine)


def test_complete_is_what_has_all_of_its_files(tmp_path):
    assert not cache.is_complete(tmp_path)
    cache.mark_complete(tmp_path)
    assert not cache.is_complete(tmp_path), "nothing was compiled"
    fill_by_hand(tmp_path)
    assert cache.is_complete(tmp_path)
    for damage in (b"cod", b"code and more"):
        (tmp_path / "kernels_1" / "step.1.nbc").write_bytes(damage)
        assert not cache.is_complete(tmp_path)
    fill_by_hand(tmp_path)
    (tmp_path / cache.COMPLETE).write_text("{")
    assert not cache.is_complete(tmp_path)


def test_what_was_left_and_what_is_old_is_removed(tmp_path):
    mine, old, used = (tmp_path / name for name in ("mine", "old", "used"))
    for folder in (mine, old, used):
        fill_by_hand(folder)
    left = mine / "kernels_1" / "step.1.nbc.tmp.1f"
    left.write_bytes(b"co")
    then = time.time() - 100 * 86400
    for folder in (old, used):
        for path in (folder, folder / cache.COMPLETE):
            os.utime(path, (then, then))
    cache.note_use(used)
    cache.remove_left(mine)
    assert not left.exists() and not old.exists() and cache.is_complete(used) and cache.is_complete(mine)


# Numba's cache, with a function that is compiled at once


def tripled(x):
    return 3 * x


@pytest.fixture
def entry(monkeypatch):
    """An entry in place of the kernels."""
    from numba import njit

    from ...backends.cpu import entries

    function = njit(tripled)
    monkeypatch.setattr(entries, "entries", lambda dtype: [(function, (np.float32(1),))])
    return function


def test_a_compiled_function_is_kept_and_found_and_numba_is_as_before(entry, tmp_path):
    from numba import config, njit

    before = config.CACHE_DIR
    compiling.fill(torch.float32, tmp_path)
    assert before == config.CACHE_DIR and cache.is_complete(tmp_path) and entry(2.0) == 6
    again = njit(tripled)
    compiling.keep_in(tmp_path, again)
    again.compile(entry.signatures[0])
    assert sum(again.stats.cache_hits.values()) == 1 and not again.stats.cache_misses


def test_a_full_disk_is_no_loss_to_who_compiles_for_himself_and_an_error_of_who_fills(entry, tmp_path, monkeypatch):
    from numba.core.caching import IndexDataCacheFile

    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    compiling.compile_here(torch.float32, tmp_path)
    assert entry.signatures and not cache.is_complete(tmp_path)
    entry.overloads.clear()
    with pytest.raises(OSError, match="No space left"):
        compiling.fill(torch.float32, tmp_path)
    assert not cache.is_complete(tmp_path)


def test_two_compilers_that_meet_compile_once(tmp_path, monkeypatch):
    compiled = []

    def slow(dtype, folder):
        compiled.append(dtype)
        time.sleep(0.1)
        fill_by_hand(folder)

    monkeypatch.setattr(compiling, "compile_all", slow)
    threads = [Thread(target=compiling.fill, args=(torch.float32, tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and cache.is_complete(tmp_path)


def test_two_engines_that_load_at_once_keep_to_their_folders(tmp_path, monkeypatch):
    from numba import config, njit

    from ...backends.cpu import entries

    before, function, real = config.CACHE_DIR, njit(tripled), compiling.keep_in

    def slow(folder, function):
        real(folder, function)
        time.sleep(0.05)  # the other one may come

    monkeypatch.setattr(compiling, "keep_in", slow)
    kinds = {torch.float32: np.float32, torch.bfloat16: np.uint16}
    monkeypatch.setattr(entries, "entries", lambda dtype: [(function, (kinds[dtype](1),))])
    threads = [Thread(target=compiling.fill, args=(dtype, tmp_path / str(dtype))) for dtype in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == config.CACHE_DIR
    assert all(len(list((tmp_path / str(dtype)).glob("*/*.nbc"))) == 1 for dtype in kinds)


# The process, with a program that does as the test says


@pytest.fixture
def process(monkeypatch, tmp_path):
    """process("code") is a Compiler whose process runs that code; what it loads then is in process.loaded."""

    def make(code: str) -> compiler.Compiler:
        command = [sys.executable, "-S", "-c", code]
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=out)
        monkeypatch.setattr(compiler, "start", lambda dtype, folder: started)
        return compiler.Compiler(torch.float32, tmp_path)

    make.loaded = []
    monkeypatch.setattr(compiler, "compile_all", lambda dtype, folder: make.loaded.append((dtype, folder)))
    return make


def test_what_was_compiled_is_loaded_before_anybody_asks(process, tmp_path):
    made = process("pass")
    assert made.wait(20) and made.has_ended and made.error is None
    assert process.loaded == [(torch.float32, tmp_path)]


def test_a_compiler_that_fails_says_why(process):
    made = process("raise OSError(28, 'No space left on device')")
    assert made.wait(20) and made.error == "OSError: [Errno 28] No space left on device" and not process.loaded
    killed = process("import os; os.kill(os.getpid(), 9)")
    assert killed.wait(20) and killed.error == "their compiler ended with status -9"


@pytest.mark.parametrize("way", ["close", "forgotten"])
def test_it_ends_with_its_owner_and_leaves_no_zombie(process, way):
    made = process("import time; time.sleep(60)")
    child = made.process
    if way == "close":
        made.close()
        made.close()
    else:
        del made
        gc.collect()
    assert child.returncode == -signal.SIGKILL, "it was waited for"
    assert not process.loaded


def test_it_may_be_collected_in_its_own_thread(process, monkeypatch):
    """As by a garbage collector while it loads."""
    told, go = [], Event()

    def load(dtype, folder):
        go.wait(20)
        try:
            made.close()
            told.append("closed")
        except RuntimeError as error:
            told.append(str(error))

    monkeypatch.setattr(compiler, "compile_all", load)
    made = process("pass")
    go.set()
    assert made.wait(20) and told == ["closed"]


# The real ones


def run_script(script: str, home: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "NUMBA_CACHE_DIR")}
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "2"} | variables
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, ""), err
    return out


GENERATE = """
import json, sys, time
import torch
start = time.perf_counter()
from {package} import LLM, SamplingParams
params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
llm = LLM({checkpoint!r}, offload_policy="load")
kernels, told = llm.llm_engine.kernels, []
def tell():
    [output] = llm.generate([[1, 5, 9, 33]], params, use_tqdm=False)
    told.append([output.outputs[0].token_ids, kernels.says[:6], time.perf_counter() - start])
tell()
kernels.wait(200)
tell()
print(json.dumps(told))
"""


@pytest.mark.full
def test_the_first_engine_starts_at_once_and_the_next_has_kernels_from_its_first_token(checkpoint, tmp_path):
    script = GENERATE.format(package=PACKAGE.name, checkpoint=str(checkpoint))
    (plain, _, first), (tokens, says, _) = json.loads(finish(run_script(script, tmp_path)))
    assert says == "kernel" and tokens == plain and first < 10
    told = json.loads(finish(run_script(script, tmp_path)))
    assert [each[:2] for each in told] == [[plain, "kernel"]] * 2 and told[0][2] < 5, "3 s on a machine at rest"


@pytest.mark.full
def test_a_killed_compiler_and_two_engines_at_once(checkpoint, tmp_path):
    """A first engine is killed while its child compiles: the child ends too. Two engines then finish its work."""
    script = GENERATE.format(package=PACKAGE.name, checkpoint=str(checkpoint))
    waiting = "llm.llm_engine.kernels._compiler.process.pid"
    begun = script.replace("tell()\nkernels.wait", f"print({waiting}, flush=True)\nkernels.wait", 1)
    first = run_script(begun, tmp_path)
    child = int(first.stdout.readline())
    time.sleep(4)
    first.kill()
    first.communicate()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()
    told = [json.loads(finish(each)) for each in [run_script(script, tmp_path), run_script(script, tmp_path)]]
    assert told[0][1][:2] == told[1][1][:2] and told[0][1][1] == "kernel"


FORK = """
import multiprocessing, os, sys
import torch
from numba import njit, prange
from {package}.backends.cpu.threads import numba_threads, start_team
@njit(parallel=True)
def total(n):
    found = 0
    for i in prange(n):
        found += i
    return found
def work():
    with numba_threads():
        assert total(100) == 4950
if __name__ == "__main__":
    start_team()
    work()
    from {package} import LLM, SamplingParams
    llm = LLM({checkpoint!r}, offload_policy="load", attention_backend="numba")
    params = SamplingParams(max_tokens=5, temperature=0)
    def tokens():
        return llm.generate([[1, 5, 9]], params, use_tqdm=False)[0].outputs[0].token_ids
    before = tokens()
    if os.fork() == 0:
        says = llm.llm_engine.kernels.says
        same = tokens() == before and says.startswith("plain operations: this process was forked")
        os._exit(0 if same else 1)
    print("engine", os.waitstatus_to_exitcode(os.wait()[1]))
    if os.fork() == 0:
        os.close(2)
        work()
        os._exit(0)
    print("loop", os.waitstatus_to_exitcode(os.wait()[1]) != 0, start_team())
    spawned = multiprocessing.get_context("spawn").Process(target=work)
    spawned.start()
    spawned.join()
    print("spawned", spawned.exitcode, tokens() == before)
"""


@pytest.mark.full
def test_a_fork_of_an_engine_with_kernels_goes_on_where_numba_would_end_it(checkpoint, tmp_path):
    """And a spawned process is free to use them."""
    script = tmp_path / "fork.py"
    script.write_text(FORK.format(package=PACKAGE.name, checkpoint=str(checkpoint)))
    run = f"import runpy, sys; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
    told = finish(run_script(run, tmp_path)).splitlines()
    assert told[0] == "engine 0" and told[2] == "spawned 0 True"
    assert told[1] in ("loop True omp", "loop False workqueue")
