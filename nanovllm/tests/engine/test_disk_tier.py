"""The tier on disk: files that are whole or absent, a folder of bounded size, and the same tokens whatever happens.

The model is scripted (scripted.py), so a block with wrong contents changes the answer. Blocks have 4 slots and 1,024
bytes, so a file takes one page.
"""

import hashlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ... import LLM, SamplingParams, build
from ...beam_search import BeamSearch, BeamSearchParams
from ...engine.executor import Pending, Scheduled
from ...engine.kv_cache import BlockCopy
from ...engine.observer import Observer
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...requests.outputs import RequestOutput
from ...requests.tokens import StepOutput
from ...tiers import cost_model, disk_tier, host_tier, setup
from ...tiers.block_files import BlockFiles, weights_digest
from ...tiers.cost_model import CostModel, measure_disk
from ...tiers.disk_tier import DiskTier
from ...trace.tracer import Tracer
from ..testing.checkpoints import CONFIG, random_tensors, write_checkpoint
from ..testing.engines import (
    answer_alone,
    answers,
    assert_empty,
    params,
    reasons,
    run_to_the_end,
    scripted_engine,
    step,
)
from ..testing.processes import let_others_run
from ..testing.sequences import preempt
from ..testing.trace import Twin

FIRST, SECOND = list(range(10, 22)), list(range(50, 62))
GIB, PAGE = 2**30, 4096
DATA = bytes(range(256)) * 4


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def files_of(root: Path, max_bytes: int = GIB, namespace: str = "a") -> BlockFiles:
    return BlockFiles(root, namespace, max_bytes)


def paths(root: Path) -> list[Path]:
    """Return the files of all blocks, the oldest first."""
    return sorted(root.glob("*/*/*.kv"), key=lambda path: path.stat().st_mtime_ns)


def read(files: BlockFiles, block_hash: bytes, size: int = len(DATA)) -> bytes:
    data = bytearray(size)
    files.read(block_hash, memoryview(data))
    return bytes(data)


# Files


def test_block_is_read_as_it_was_written_by_any_process(tmp_path):
    files_of(tmp_path).write(name(1), memoryview(DATA))
    assert name(1) in files_of(tmp_path) and name(2) not in files_of(tmp_path)
    assert read(files_of(tmp_path), name(1)) == DATA
    assert paths(tmp_path) == [tmp_path / "a" / "00" / f"{name(1).hex()}.kv"]
    assert name(1) not in files_of(tmp_path, namespace="b")
    with pytest.raises(FileNotFoundError):
        read(files_of(tmp_path), name(2))


def test_only_the_owner_may_enter_the_folders_and_read_the_files(tmp_path, monkeypatch):
    root, checkpoint = tmp_path / "new", write_checkpoint(tmp_path / "checkpoint")
    set_clock(monkeypatch, when_changed(checkpoint) + 10)  # so that its digest is remembered
    engine = engine_of_folder(root, checkpoint)
    run_to_the_end(ask(engine, FIRST))
    engine.disk_tier.flush()
    modes = Counter((path.is_dir(), path.stat().st_mode & 0o777) for path in [root, *root.rglob("*")])
    assert modes.keys() == {(True, 0o700), (False, 0o600)} and modes[True, 0o700] > 3
    assert [*(root / "weights").iterdir()] and modes[False, 0o600] == 3 + 2, "blocks, the lock and a digest"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in the header": lambda data: data[:20],
    "without the last byte": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "of another version": lambda data: data[:8] + b"\2" + data[9:],
    "cut and filled": lambda data: data[:600] + bytes(len(data) - 600),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_deleted(tmp_path, damage):
    files_of(tmp_path).write(name(1), memoryview(DATA))
    [path] = paths(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="is damaged"):
        read(files_of(tmp_path), name(1))
    assert not path.exists()


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path, step):
    files = files_of(tmp_path)
    files.write(name(1), memoryview(DATA))
    [path] = paths(tmp_path)
    whole = path.read_bytes()
    for i in range(0, len(whole), step):
        for damaged in (whole[:i], whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="is damaged"):
                read(files, name(1))
    path.write_bytes(whole)
    assert read(files, name(1)) == DATA


def test_file_of_another_block_or_of_another_size_is_deleted(tmp_path):
    files = files_of(tmp_path)
    for number in (1, 2):
        files.write(name(number), memoryview(DATA[number:]))
    first, second = paths(tmp_path)
    second.rename(first)
    with pytest.raises(ValueError, match="is damaged"):
        read(files, name(1), len(DATA) - 1)
    files.write(name(1), memoryview(DATA))
    with pytest.raises(ValueError, match="is damaged"):
        read(files, name(1), 2 * len(DATA))
    assert paths(tmp_path) == []


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_foreign_file_does_not_block_a_reader(tmp_path, kind):
    files = files_of(tmp_path)
    files.write(name(1), memoryview(DATA))
    [path] = paths(tmp_path)
    path.rename(tmp_path / "elsewhere")
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: os.symlink(tmp_path / "elsewhere", path)}[kind](path)
    with pytest.raises((ValueError, OSError)):
        read(files, name(1))
    assert (tmp_path / "elsewhere").exists()


def test_failed_write_leaves_the_old_file_and_no_new_one(tmp_path, monkeypatch):
    files = files_of(tmp_path)
    files.write(name(1), memoryview(DATA))
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, parts[0]))  # a full disk writes less
    for number in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            files.write(name(number), memoryview(DATA))
    assert read(files, name(1)) == DATA
    assert {path.name for path in tmp_path.iterdir()} == {"a", "lock"}


def test_files_are_closed_when_they_have_left_the_systems_memory(tmp_path, monkeypatch):
    files, opened = files_of(tmp_path), list[int]()
    files.write(name(1), memoryview(DATA))
    original = os.open
    monkeypatch.setattr(os, "open", lambda *arguments: (opened.append(file := original(*arguments)), file)[1])
    files.drop_page_cache()
    [file] = opened
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


# Size


@pytest.mark.parametrize("num_folders", [1, 3])
def test_size_is_held_within_5_percent_by_all_namespaces_together(tmp_path, num_folders):
    all_files = [files_of(tmp_path, 100 * PAGE, str(i)) for i in range(num_folders)]
    sizes = []
    for number in range(250):
        all_files[number % num_folders].write(name(number), memoryview(DATA))
        sizes.append(len(paths(tmp_path)))
    assert max(sizes) == 100 and min(sizes[100:]) == 95, "in pages"
    kept = {int(path.stem, 16) for path in paths(tmp_path)}
    assert kept == {*range(250 - len(kept), 250)}, "the oldest are gone"


def test_least_recently_used_blocks_go_first_and_the_first_of_a_text_last(tmp_path, monkeypatch):
    files = files_of(tmp_path, 20 * PAGE)
    for number in range(20):
        files.write(name(number), memoryview(DATA))
    for path in tmp_path.rglob("*.kv"):
        os.utime(path, (int(path.stem, 16), int(path.stem, 16)))
    monkeypatch.setattr(time, "time_ns", lambda: 1000 * 10**9)  # long before what is written now
    files.touch([name(3), name(4), name(5)])
    removed: list[bytes] = []
    for number in range(100, 120):
        removed += files.write(name(number), memoryview(DATA))
    others = [number for number in range(20) if number not in (3, 4, 5)]
    assert removed == [name(number) for number in [*others, 5, 4, 3]]


def test_block_that_was_removed_for_newer_ones_is_a_miss(make):
    engine = make(num_blocks=10, kv_disk_size=9 * PAGE / GIB)
    run(ask(engine, FIRST))
    run(ask(engine, [*range(100, 138)], max_tokens=1))  # takes all blocks of both
    assert num_cached(run(ask(engine, FIRST))) == [0] and counts(engine)[2] == 0


def test_start_measures_the_size_and_removes_leftovers(tmp_path):
    files = files_of(tmp_path, 10 * PAGE)
    for number in range(10):
        files.write(name(number), memoryview(DATA))
    (tmp_path / "lock").write_bytes(b"")
    (tmp_path / "new").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not a block")
    again = files_of(tmp_path, 6 * PAGE)
    assert len(again.remove_oldest()) == 5 and len(paths(tmp_path)) == 5
    assert not (tmp_path / "new").exists() and (tmp_path / "notes.txt").exists()
    assert int.from_bytes((tmp_path / "lock").read_bytes(), "little") == 5 * PAGE


def test_folder_that_is_removed_is_made_again(tmp_path):
    files = files_of(tmp_path / "root")
    (tmp_path / "root").mkdir()
    files.write(name(1), memoryview(DATA))
    subprocess.run(["rm", "-r", str(tmp_path / "root")], check=True)
    with pytest.raises(OSError, match="No such file"):
        read(files, name(1))
    files.write(name(2), memoryview(DATA))
    assert read(files, name(2)) == DATA


# The engine


class DiskEngine(LLMEngine):
    """An engine with a tier on disk."""

    disk_tier: DiskTier


def engine_of_folder(root: Path, checkpoint: Path, num_blocks: int = 40, **options: Any) -> DiskEngine:
    options = {"kv_offloading_tokens": 0, "kv_disk_dir": str(root)} | options
    engine = scripted_engine(checkpoint, num_blocks, **options)
    engine.__class__ = DiskEngine
    return engine  # type: ignore[return-value]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Callable[..., DiskEngine]:
    """Return a function that makes an engine on the test's folder, as after a restart."""
    return lambda **options: engine_of_folder(tmp_path / "disk", checkpoint, **options)


NUMBERS = count()  # of requests


def ask(engine: DiskEngine, *prompts: list[int], max_tokens: int = 8, **options: Any) -> DiskEngine:
    for prompt in prompts:
        engine.add_request(f"r{next(NUMBERS)}", prompt, params(max_tokens, temperature=1.0, seed=3, **options))
    return engine


def run(engine: DiskEngine) -> list[RequestOutput]:
    """Run to the end, assert that each request has its own answer, and wait for the files."""
    outputs = [*run_to_the_end(engine).values()]
    for output in outputs:
        n = len(output.outputs)
        expected = [answer_alone(output.prompt_token_ids, len(each), 3, i) for i, each in enumerate(answers(output))]
        assert reasons(output) == ["length"] * n and answers(output) == expected, output.error
    engine.disk_tier.flush()
    engine.disk_tier.collect()
    return outputs


def counts(engine: DiskEngine) -> tuple[int, int, int]:
    """Return the stored, loaded and lost blocks."""
    tier = engine.disk_tier
    return tier.num_blocks_stored, tier.num_blocks_loaded, tier.num_blocks_lost


def num_cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens or 0 for output in outputs]


def damage_all(root: Path, *, keep: int = 0) -> None:
    """Damage all blocks but the `keep` most recently used ones, with which the last prompt begins."""
    for path in paths(root)[::-1][keep:]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")


class Gate:
    """Reads of files that wait until they are let through."""

    def __init__(self, engine: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        read = engine.disk_tier.files.read

        def slow(block_hash: bytes, into: memoryview) -> None:
            assert self.is_open.wait(60), "a read is never let through"
            read(block_hash, into)

        monkeypatch.setattr(engine.disk_tier.files, "read", slow)

    def open(self, engine: DiskEngine) -> None:
        """Let all reads through, and wait for them."""
        self.is_open.set()
        while not all(load.is_done for load in engine.disk_tier.loads):
            time.sleep(0.001)


def test_restart_finds_the_prompt(make):
    engine = ask(make(), FIRST)
    run(engine)
    assert counts(engine) == (3, 0, 0), "the prompt's blocks, not the answer's"
    again = ask(make(), FIRST, [*FIRST, 1, 2])
    assert sorted(num_cached(run(again))) == [8, 12], "the last token of a prompt is computed"
    assert counts(again) == (0, 3, 0) and again.executor.num_tokens == 4 + 7 + 2 + 7


@pytest.mark.parametrize(("save", "num_stored"), [("prompt", 3), ("all", 4), ("evicted", 0)])
def test_kv_disk_save_says_which_blocks_are_stored(make, save, num_stored):
    engine = ask(make(kv_disk_save=save, num_blocks=10), FIRST)
    run(engine)
    assert counts(engine)[0] == num_stored
    run(ask(engine, [*range(100, 138)], max_tokens=1))  # takes all blocks
    assert counts(engine)[0] == {"prompt": 12, "all": 13, "evicted": 4}[save]


def test_blocks_are_on_the_device_the_host_and_the_disk(make):
    """A block comes from where it is found first."""
    engine = make(num_blocks=10, kv_offloading_tokens=8)
    run(ask(engine, FIRST))
    run(ask(engine, [*range(100, 138)], max_tokens=1))
    run(ask(engine, FIRST))
    assert engine.host_tier.num_blocks_loaded + engine.disk_tier.num_blocks_loaded == 2
    again = make(num_blocks=10, kv_offloading_tokens=8)
    run(ask(again, FIRST, SECOND))
    assert (again.host_tier.num_blocks_loaded, counts(again)) == (0, (3, 2, 0))


@pytest.mark.parametrize("save", ["prompt", "all"])
@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_prompts_around_whole_blocks_are_stored_and_found_as_full_blocks(make, place, save):
    """Prompts of k blocks, and of one token more or less, with 3 output tokens, of which 2 are computed."""
    options = {"num_blocks": 12, "kv_offloading_tokens": 400 * (place == "host"), "kv_disk_save": save}
    for length in (3, 4, 5, 8, 9, 16):
        engine, prompt = make(**options), [*range(100 + length, 100 + 2 * length)]
        run(ask(engine, prompt, max_tokens=3))
        num_full = length // 4 if save == "prompt" else (length + 2) // 4
        assert counts(engine) == (num_full, 0, 0), "a block is stored once it is full"
        if place == "host":
            run(ask(engine, [length] * 48, max_tokens=1))  # takes the device's blocks
        elif place == "disk":
            engine = make(**options)
        computed, stored = engine.executor.num_tokens, counts(engine)[0]
        num_hits = (length - 1) // 4
        assert num_cached(run(ask(engine, prompt, max_tokens=3))) == [4 * num_hits]
        assert engine.executor.num_tokens - computed == length - 4 * num_hits + 2
        assert engine.host_tier.num_blocks_loaded == num_hits * (place == "host")
        assert counts(engine) == (stored, num_hits * (place == "disk"), 0), "nothing is stored again"


def test_int8_blocks_give_the_same_tokens_from_the_disk_and_only_to_int8(tmp_path):
    """A real model, since a scripted one writes no numbers."""
    folder = write_checkpoint(tmp_path / "checkpoint", config=CONFIG | {"hidden_size": 64})
    options: dict[str, Any] = {"block_size": 4, "kv_cache_tokens": 160, "offload_policy": "load"}
    options |= {"kv_disk_dir": tmp_path / "disk", "attention_backend": "torch"}
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)

    def serve(**more: Any) -> tuple[list[list[int]], int]:
        llm = LLM(str(folder), **options | more)
        outputs = llm.generate([FIRST, SECOND, [*FIRST, 7]], sampling)
        llm.llm_engine.disk_tier.flush()
        return [answer for output in outputs for answer in answers(output)], llm.stats().disk_blocks_loaded

    expected, _ = serve(kv_cache_dtype="int8")
    assert serve(kv_cache_dtype="int8") == (expected, 2 + 2 + 1)
    assert serve()[1] == serve(dtype="bfloat16")[1] == 0, "they have blocks of another kind"


def test_prompt_of_another_salt_checkpoint_or_option_is_not_found(make, tmp_path):
    run(ask(make(), FIRST))
    other = write_checkpoint(tmp_path / "other", tensors=random_tensors(CONFIG, seed=1))
    for engine in (
        engine_of_folder(tmp_path / "disk", other),
        make(hf_overrides={"rope_theta": 5000.0}),
        make(dtype="bfloat16"),
        make(attention_backend="numba"),
        make(quantization="int8"),
    ):
        assert num_cached(run(ask(engine, FIRST))) == [0]
    engine = make()
    engine.add_request("a", {"prompt_token_ids": FIRST, "cache_salt": "b"}, params(2, temperature=1.0, seed=3))
    assert num_cached(run(engine)) == [0]
    assert num_cached(run(ask(make(), FIRST))) == [8]


def test_changed_weights_have_another_digest(tmp_path):
    """Also if only one byte changes, and the size and the time of the file do not."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    file = folder / "model.safetensors"
    long_ago = time.time_ns() - 10**12
    digests = set()
    for i in range(3):
        data = bytearray(file.read_bytes())
        data[-1] = i
        file.write_bytes(data)
        os.utime(file, ns=(long_ago, long_ago))
        digests |= {weights_digest(folder, tmp_path / "disk") for _ in range(2)}
    assert len(digests) == 3
    (folder / "config.json").write_text("{}")
    assert weights_digest(folder, tmp_path / "disk") not in digests


@pytest.mark.parametrize(("seconds", "num_read"), [(1.9, 2), (2.1, 1)])
def test_weights_are_read_once_if_they_had_settled_by_then(tmp_path, monkeypatch, seconds, num_read):
    """A file that has just changed could change again at the same time of its file system."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    file_digest, num_files = hashlib.file_digest, 2
    read: list[object] = []
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(file) or file_digest(file, kind))
    set_clock(monkeypatch, when_changed(folder) + seconds)
    assert len({weights_digest(folder, tmp_path / "disk") for _ in range(2)}) == 1
    assert len(read) == num_read * num_files


def when_changed(folder: Path) -> float:
    """Return when a file of a checkpoint last changed, in seconds."""
    return max(path.stat().st_ctime_ns for path in folder.iterdir()) / 1e9


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: int(seconds * 1e9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_damaged", [False, True])
def test_blocks_of_a_gpu_survive_a_restart(make, tmp_path, is_damaged):
    """Copies go through pinned buffers, on streams of their own."""
    options = {"device": "cuda", "dtype": "float32"}
    run(ask(make(**options), FIRST, SECOND))
    if is_damaged:
        damage_all(tmp_path / "disk", keep=2)
    engine = ask(make(**options), FIRST, SECOND, FIRST[::-1], n=2)
    run(engine)
    assert counts(engine)[1] > 0 and (counts(engine)[2] > 0) == is_damaged


def test_files_and_loads_wait_for_their_copies(on_simulated_cuda, tmp_path):
    """More blocks than there are buffers for reads, so that each buffer is used again."""
    blocks = on_simulated_cuda(torch.randn(20, 1, 2, 4, 2, 8))
    expected, files = [block.clone() for block in blocks.as_subclass(torch.Tensor)], files_of(tmp_path)
    tier = DiskTier(blocks, files, "all", 0, Observer())
    for number, block in enumerate(expected):
        tier.save(number, name(number), is_prompt=True)
        tier.flush()
        assert read(files, name(number), block.nbytes) == block.numpy().tobytes()
    sources = tier.hold([name(number) for number in range(20)])
    tier.load([BlockCopy(source, 19 - number) for number, source in enumerate(sources)])
    arrived, lost = tier.collect(wait=True)
    assert sorted(arrived) == [*range(20)] and not lost
    assert torch.equal(blocks.as_subclass(torch.Tensor), torch.stack(expected[::-1]))


def test_load_from_disk_waits_for_the_steps_that_use_its_blocks(on_simulated_cuda, tmp_path):
    """A step that was launched before the load may still write to its target."""
    blocks = on_simulated_cuda(torch.randn(2, 1, 2, 4, 2, 8))
    first = blocks[0].as_subclass(torch.Tensor).clone()
    tier = DiskTier(blocks, files_of(tmp_path), "all", 0, Observer())
    tier.save(0, name(0), is_prompt=True)
    tier.flush()
    blocks[1].copy_(torch.zeros(1, 2, 4, 2, 8), non_blocking=True)
    tier.load([BlockCopy(*tier.hold([name(0)]), 1)])
    tier.collect(wait=True)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(blocks[1].as_subclass(torch.Tensor), first)


# The choice between the disk and computing


class Clock:
    """A time that passes only while a block is read, or the host waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.device_is_free = 0.0
        self._lock, self._monkeypatch = threading.Lock(), monkeypatch
        for module in (disk_tier, host_tier, cost_model):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def measured(self, load_bytes_per_second: float, tokens_per_second: float) -> None:
        """Let engines measure these speeds when they start."""
        cost = CostModel(load_bytes_per_second, 1e12, tokens_per_second, num_tokens=16)
        self._monkeypatch.setattr(build, "measure", lambda *parts: cost)
        self._monkeypatch.setattr(setup, "measure_disk", lambda *parts: cost)

    def real(self, engine: DiskEngine, bytes_per_second: float, tokens_per_second: float) -> None:
        """Let an engine take as long as these speeds say."""
        launch = engine.executor.launch

        def slow_launch(batch: list[Scheduled], *numbers: int) -> SlowStep:
            self.device_is_free = max(self.now, self.device_is_free) + sum(n for _, n in batch) / tokens_per_second
            return SlowStep(launch(batch, *numbers), self, self.device_is_free)

        self.slow_down(engine.disk_tier.files, bytes_per_second)
        self._monkeypatch.setattr(engine.executor, "launch", slow_launch)

    def slow_down(self, files: BlockFiles, bytes_per_second: float) -> None:
        """Let reads take as long as this speed says."""
        read = files.read

        def slow_read(block_hash: bytes, into: memoryview) -> None:
            read(block_hash, into)
            with self._lock:
                self.now += len(into) / bytes_per_second

        self._monkeypatch.setattr(files, "read", slow_read)


@dataclass
class SlowStep:
    """A step on a device that is busy until a certain time."""

    step: Pending
    clock: Clock
    ends: float

    def tokens(self) -> StepOutput:
        self.clock.now = max(self.clock.now, self.ends)
        return self.step.tokens()


MANY = [[number] * 12 for number in range(40)]  # three blocks each, two of which are hits


@pytest.fixture
def auto(make, monkeypatch) -> Callable[..., tuple[DiskEngine, Clock]]:
    """Return a function that makes an engine under "auto", after another one has stored MANY.

    A token has 256 bytes, and a second has 1,000 tokens by the first measurement.
    """
    run(ask(make(num_blocks=200, offload_policy="load"), *MANY))

    def start(
        measured: float, real: float, tokens_per_second: float = 1000, **options: Any
    ) -> tuple[DiskEngine, Clock]:
        clock = Clock(monkeypatch)
        clock.measured(measured, 1000)
        engine = make(num_blocks=200, offload_policy="auto", **options)
        clock.real(engine, real, tokens_per_second)
        return engine, clock

    return start


def loaded(engine: DiskEngine, prompts: list[list[int]]) -> list[int]:
    """Serve one prompt after another. Return how many blocks of each come from the disk."""
    numbers = []
    for prompt in prompts:
        before = counts(engine)[1]
        run(ask(engine, prompt, max_tokens=1))
        numbers.append(counts(engine)[1] - before)
    return numbers


def test_time_of_a_load_leaves_out_the_wait_for_the_one_before_it(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_tier, "NUM_READERS", 1)
    clock, timed, files, blocks = Clock(monkeypatch), list[tuple[int, float]](), files_of(tmp_path), torch.randn(5, 8)

    class Timer(Observer):
        def tell(self, kind: str, *details: Any) -> None:
            if kind == "timed":
                timed.append(details[1:])

    tier = DiskTier(blocks, files, "all", 0, Timer())
    for block in range(5):
        tier.save(block, name(block), is_prompt=True)
    tier.flush()
    clock.slow_down(files, bytes_per_second=blocks[0].nbytes)
    for some in ((0, 1, 2), (3, 4)):
        tier.load([BlockCopy(*tier.hold([name(block)]), block) for block in some])
    tier.collect(wait=True)
    assert timed == [(3, 3.0), (2, 2.0)]


@pytest.mark.parametrize(("speed", "is_faster"), [(255_000, False), (257_000, True)])
def test_auto_policy_stores_always_and_loads_what_is_faster(make, auto, speed, is_faster):
    engine, _ = auto(speed, speed)
    assert loaded(engine, MANY[:3]) == [2 * is_faster] * 3
    run(ask(engine, SECOND))
    stats = engine.stats()
    assert stats.disk_blocks_stored == 3 and num_cached(run(ask(make(), SECOND))) == [8]
    assert (stats.blocks_declined, stats.speeds_corrected) == (6 * (not is_faster), 0)
    assert ("6 computed instead of loaded" in str(stats)) == (not is_faster)
    values = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    assert values["nanovllm:kv_declined_blocks"] == stats.blocks_declined
    assert values["nanovllm:kv_speed_corrections"] == 0
    assert "nanovllm:kv_declined_blocks" not in {metric.name for metric in make().get_metrics()}


def test_disk_that_looked_slow_at_the_start_is_tried_again(auto):
    engine, _ = auto(measured=1000, real=1_000_000)
    assert loaded(engine, MANY[:20]) == [0] * 15 + [2] * 5
    assert (engine.stats().blocks_declined, engine.stats().speeds_corrected) == (30, 1)


def test_disk_that_stays_slow_is_tried_once_in_16_hits(auto):
    engine, _ = auto(measured=1000, real=1000)
    assert loaded(engine, MANY) == ([0] * 15 + [2]) * 2 + [0] * 8 and engine.stats().speeds_corrected == 0


@pytest.mark.parametrize(("real", "expected"), [(100_000, [2, 0, 0]), (260_000, [2, 2, 2])])
def test_disk_that_has_become_slow_is_left_alone(auto, real, expected):
    """The second one is slower than it was, but by less than 2 times."""
    engine, _ = auto(measured=500_000, real=real)
    assert loaded(engine, MANY[:3]) == expected and engine.stats().speeds_corrected == (expected[1] == 0)


@pytest.mark.parametrize(("real", "is_corrected"), [(400, True), (600, False), (1900, False)])
@pytest.mark.parametrize("is_async", [False, True])
def test_prefill_that_takes_longer_than_measured_lets_hits_be_loaded(auto, real, is_corrected, is_async):
    engine, _ = auto(255_000, 255_000, tokens_per_second=real, async_scheduling=is_async)
    run(ask(engine, SECOND))
    assert loaded(engine, MANY[:1]) == [2 * is_corrected]
    assert engine.stats().speeds_corrected == is_corrected


def test_prefill_that_is_faster_than_measured_lets_hits_be_computed(auto):
    """The first step begins after an idle time, so it may have been slower. The second one follows it at once."""
    engine, _ = auto(500_000, 500_000, tokens_per_second=5000, max_num_batched_tokens=10)
    run(ask(engine, [*range(40)], max_tokens=1))
    assert loaded(engine, MANY[:1]) == [0] and engine.stats().speeds_corrected == 1


def test_time_between_two_calls_is_not_a_prefills(auto):
    engine, clock = auto(255_000, 255_000, async_scheduling=True)
    ask(engine, SECOND)
    while engine.has_unfinished_requests():
        engine.step()
        clock.now += 1000
    assert loaded(engine, MANY[:1]) == [0] and engine.stats().speeds_corrected == 0


def test_measurement_of_the_disk_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    options = {"offload_policy": "auto", "block_size": 4, "kv_cache_tokens": 64, "kv_disk_dir": tmp_path / "disk"}
    cost = LLM(str(checkpoint), **options).llm_engine.tiers.disk_cost_model
    assert cost and min(cost.load_bytes_per_second, cost.store_bytes_per_second, cost.tokens_per_second) > 0
    assert paths(tmp_path / "disk") == [] and not [*(tmp_path / "disk").glob("measure*")]
    monkeypatch.setattr(BlockFiles, "write", refuse_write)  # then it is used without a measurement
    engine = LLM(str(checkpoint), **options).llm_engine
    assert engine.disk_tier and engine.tiers.disk_cost_model is None


def test_blocks_are_measured_on_the_disk_and_not_in_memory(tmp_path, monkeypatch):
    """Each block reaches the disk, and leaves the system's memory, before the first one is read."""
    calls: list[str] = []

    def recorded(call: str) -> Callable[..., Any]:
        original = getattr(os, call)
        return lambda *arguments: (calls.append(call), original(*arguments))[1]

    for call in ("writev", "fsync", "posix_fadvise", "readv"):
        monkeypatch.setattr(os, call, recorded(call))
    measure_disk(CostModel(1, 1, 1), tmp_path, 1024)
    num = calls.count("writev")
    assert num > 0 and calls == ["writev"] * num + ["fsync", "posix_fadvise"] * num + ["readv"] * num


def refuse_write(*arguments: Any) -> None:
    raise OSError(30, "Read-only file system")


# Blocks that are lost


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_lost_block_is_computed_again_by_all_that_hold_it(make, tmp_path, n, keep):
    run(ask(make(), FIRST))
    damage_all(tmp_path / "disk", keep=keep)
    engine = ask(make(), [*FIRST, 1], [*FIRST, 2, 3], FIRST[:9], n=n)
    assert num_cached(run(engine)) == [4 * keep] * 3 and engine.stats().cached_tokens == 12 * keep
    assert counts(engine) == (3 - keep, keep, 3 - keep) and engine.scheduler.num_preemptions > 0
    assert num_cached(run(ask(make(), FIRST))) == [8], "it was stored again"


def test_loads_that_fail_while_all_seats_are_taken_leave_no_seat_taken(make, monkeypatch, tmp_path):
    """Two requests load, two wait for their seats, and no load arrives."""
    run(ask(make(), FIRST, SECOND))
    damage_all(tmp_path / "disk")
    engine = make(max_num_seqs=2)
    gate = Gate(engine, monkeypatch)
    ask(engine, FIRST, SECOND, [*FIRST, 1], [*SECOND, 2])
    engine.scheduler.schedule()  # a step would wait for a load
    assert len(engine.scheduler.running) == len(engine.scheduler.waiting) == 2
    gate.open(engine)
    assert len(run(engine)) == 4 and counts(engine)[2] >= 4


def test_vanished_block_is_a_miss(make, tmp_path):
    run(ask(make(), FIRST))
    engine = make()
    engine.add_request("a", FIRST, params(8, temperature=1.0, seed=3))
    engine.kv_cache_manager.find_hits(engine.requests["a"][0])  # then another process removes them
    for path in paths(tmp_path / "disk"):
        path.unlink()
    run(engine)
    assert counts(engine) == (3, 0, 2)


def test_others_run_during_a_load(make, monkeypatch):
    run(ask(make(), FIRST))
    engine = make()
    gate = Gate(engine, monkeypatch)
    ask(engine, SECOND)
    step(engine)
    ask(engine, FIRST)
    for _ in range(3):
        assert len(step(engine)) == 1 and engine.disk_tier.loads and len(engine.scheduler.running) == 2
    gate.open(engine)
    assert len(step(engine)) == 2
    run(engine)


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_neither_an_abort_nor_a_preemption_waits_for_the_disk(make, monkeypatch, tmp_path, n, is_damaged):
    run(ask(make(), FIRST))
    if is_damaged:
        damage_all(tmp_path / "disk", keep=1)
    engine = make()
    gate = Gate(engine, monkeypatch)
    ask(engine, SECOND)
    ask(engine, FIRST, FIRST[:9], n=n)
    step(engine)
    _, aborted, _ = [*engine.requests]
    assert engine.disk_tier.loads and len(engine.scheduler.running) == 2 + n
    assert engine.abort_request(aborted)
    preempt(engine.scheduler, engine.scheduler.running[-1])
    engine.kv_cache_manager.check_integrity()
    assert len(step(engine)) == 1 and engine.disk_tier.arriving()
    gate.open(engine)
    run(engine)


def test_newer_requests_start_over_too_so_that_none_overtakes_another(make, monkeypatch, tmp_path):
    run(ask(make(), FIRST))
    damage_all(tmp_path / "disk")
    engine = make()
    gate = Gate(engine, monkeypatch)
    ask(engine, SECOND, FIRST, SECOND[::-1])
    assert len(step(engine)) == 2
    gate.open(engine)
    run(engine)
    assert engine.scheduler.num_preemptions == 2


def test_overlapped_steps_survive_a_lost_block(make, tmp_path):
    run(ask(make(), FIRST))
    damage_all(tmp_path / "disk", keep=1)
    engine = make(async_scheduling=True)
    ask(engine, SECOND, max_tokens=20)
    for _ in range(3):
        engine.step()
    ask(engine, FIRST, SECOND[::-1], n=2)
    run(engine)
    assert counts(engine)[2] == 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_beam_search_loads_its_prompt_or_computes_it(checkpoint, tmp_path, is_damaged):
    options = {"block_size": 4, "kv_cache_tokens": 64, "offload_policy": "load", "kv_disk_dir": str(tmp_path / "disk")}

    def search() -> tuple[list[list[int]], DiskTier]:
        engine = LLMEngine(EngineConfig(str(checkpoint), **options))  # type: ignore[arg-type]
        output = BeamSearch(engine, BeamSearchParams(beam_width=2, max_tokens=3)).run("a", FIRST)
        assert output.error is None and engine.disk_tier
        assert_empty(engine)
        engine.disk_tier.flush()
        return answers(output), engine.disk_tier

    expected, _ = search()
    if is_damaged:
        damage_all(tmp_path / "disk", keep=1)
    found, tier = search()
    assert found == expected
    assert (tier.num_blocks_loaded, tier.num_blocks_lost) == ((1, 1) if is_damaged else (2, 0))


def test_reset_empties_the_disk_for_all_engines(make, tmp_path):
    run(ask(make(), FIRST))
    engine, other = make(), make()
    run(ask(engine, FIRST, SECOND))
    assert engine.reset_prefix_cache() and paths(tmp_path / "disk") == []
    assert num_cached(run(ask(other, FIRST))) == [0] and num_cached(run(ask(engine, SECOND))) == [0]
    assert num_cached(run(ask(make(), FIRST))) == [8]


# Writes that are impossible


def test_queue_drops_blocks_and_stores_them_when_they_are_evicted(make, monkeypatch):
    monkeypatch.setattr(disk_tier, "QUEUE_BYTES", 1)  # two buffers
    engine = make(num_blocks=10)
    is_open = threading.Event()
    write = engine.disk_tier.files.write

    def slow(block_hash: bytes, data: memoryview) -> list[bytes]:
        assert is_open.wait(60)
        return write(block_hash, data)

    monkeypatch.setattr(engine.disk_tier.files, "write", slow)
    ask(engine, FIRST)
    run_to_the_end(engine)
    assert engine.disk_tier.num_blocks_dropped == 1
    is_open.set()
    engine.disk_tier.flush()
    run(ask(engine, [*range(100, 138)], max_tokens=1))
    assert num_cached(run(ask(make(), [*FIRST, 1]))) == [12], "also the dropped one, the third"


def test_reset_forgets_which_blocks_were_dropped(tmp_path, monkeypatch):
    """So a block that is computed again, now as an answer's, stays off the disk if that is for prompts."""
    monkeypatch.setattr(disk_tier, "QUEUE_BYTES", 1)  # two buffers
    files, is_open = files_of(tmp_path), threading.Event()
    write = files.write
    monkeypatch.setattr(files, "write", lambda *block: is_open.wait(60) and write(*block))
    tier = DiskTier(torch.zeros(3, 4), files, "prompt", 3, Observer())
    for number in range(3):
        tier.save(number, name(number), is_prompt=True)
    assert tier.num_blocks_dropped == 1
    is_open.set()
    tier.reset()
    tier.save(2, name(2), is_prompt=False)
    tier.store(2, name(2))
    tier.flush()
    assert paths(tmp_path) == []


@pytest.mark.parametrize("call", ["open", "writev", "replace"])
def test_full_or_read_only_folder_is_one_warning_and_reads_go_on(make, monkeypatch, caplog, call):
    run(ask(make(), FIRST))
    original = getattr(os, call)

    def refuse(*arguments: Any) -> int:
        raise OSError(30, "Read-only file system", *(("new", None, "block") if call == "replace" else ()))

    def refuse_writes(*arguments: Any) -> int:
        is_read = call == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR)
        return original(*arguments) if is_read else refuse()

    monkeypatch.setattr(os, call, refuse_writes)
    engine = make()
    run(ask(engine, FIRST, SECOND))
    assert counts(engine) == (0, 2, 0) and len(caplog.records) == 1
    damage_all(engine.disk_tier.files.root)
    monkeypatch.setattr(os, "unlink", refuse)
    for _ in range(2):
        engine = make()
        for _ in range(2):
            run(ask(engine, FIRST))
        assert counts(engine) == (0, 0, 2), "a file that cannot be deleted is read once"


def test_folder_in_place_of_a_file_costs_only_its_own_block(make, tmp_path, caplog):
    """It is no hit, the blocks after it are saved, and nothing in it is removed."""
    run(ask(make(), FIRST))
    for path in paths(tmp_path / "disk"):
        path.unlink()
        (path / "inside").mkdir(parents=True)
    engine = make()
    run(ask(engine, FIRST, SECOND))
    assert counts(engine) == (3, 0, 0) and not caplog.records
    assert len([*(tmp_path / "disk").glob("*/*/*.kv/inside")]) == 3
    assert num_cached(run(ask(make(), SECOND))) == [8]


@pytest.mark.nightly
def test_full_and_then_read_only_file_system(make, tmp_path, caplog):
    """A real one, if this user may mount it: full after a few blocks, and read-only after a restart."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        prompts = [[i, *range(10, 21)] for i in range(20)]
        engine = make()
        for prompt in prompts:
            run(ask(engine, prompt))
        assert 3 <= counts(engine)[0] < 16 and len(caplog.records) == 1
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        engine = make()
        assert sorted(num_cached(run(ask(engine, prompts[0], prompts[19])))) == [0, 8]
        assert counts(engine) == (0, 2, 0) and len(caplog.records) == 2
        assert engine.reset_prefix_cache() and num_cached(run(ask(engine, prompts[0]))) == [0]
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_reset_of_a_read_only_folder_finds_nothing_any_more(make, monkeypatch):
    run(ask(make(), FIRST))
    engine = make()

    def refuse(*arguments: Any) -> int:
        raise OSError(30, "Read-only file system")

    engine.disk_tier.flush()
    monkeypatch.setattr(os, "unlink", refuse)
    assert engine.reset_prefix_cache()
    assert num_cached(run(ask(engine, FIRST))) == [0]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_disk_dir": ""}, "kv_disk_dir must be the path of a folder, got ''"),
        ({"kv_disk_size": 0.0}, "kv_disk_size must be a number of GiB, above 0, got 0.0"),
        ({"kv_disk_save": "none"}, "kv_disk_save must be one of prompt, all, evicted, got 'none'"),
        ({"kv_disk_size": 1e-6}, "kv_disk_size must hold two blocks of 1,024 bytes, got 1,073 bytes"),
        ({"enable_prefix_caching": False}, "kv_disk_dir '.*' needs enable_prefix_caching, got False"),
        ({"offload_policy": "recompute"}, "kv_disk_dir '.*' needs offload_policy auto or load, got 'recompute'"),
    ],
)
def test_invalid_option_is_refused(make, options, error):
    with pytest.raises(ValueError, match=f"^{error}$"):
        make(**options)


def test_folder_that_is_a_file_or_open_to_others_is_refused(make, tmp_path):
    (tmp_path / "disk").write_text("")
    with pytest.raises(ValueError, match="kv_disk_dir must be a folder, got "):
        make()
    (tmp_path / "disk").unlink()
    (tmp_path / "disk").mkdir()
    for mode in (0o777, 0o770, 0o720, 0o730, 0o702, 0o1777):
        (tmp_path / "disk").chmod(mode)
        with pytest.raises(ValueError, match="kv_disk_dir must be writable only by its owner"):
            make()
    for mode in (0o700, 0o755):
        (tmp_path / "disk").chmod(mode)
        assert make().disk_tier


# Statistics and traces


def test_statistics_and_metrics_count_the_blocks(make, tmp_path):
    first = make()
    run(ask(first, FIRST))
    damage_all(tmp_path / "disk", keep=1)
    engine = make()
    run(ask(engine, FIRST))
    stats = engine.stats()
    assert (stats.disk_blocks_stored, stats.disk_blocks_loaded, stats.disk_blocks_lost) == (1, 1, 1)
    assert (stats.blocks_stored, stats.blocks_loaded) == (0, 0) and "disk: 1 stored, 1 loaded, 1 lost" in str(stats)
    values = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    assert values["nanovllm:kv_disk_load_bytes"] == 1024 and values["nanovllm:kv_disk_store_bytes"] == 1024
    assert values["nanovllm:kv_disk_lost_blocks"] == 1 and values["vllm:external_prefix_cache_queries"] == 12


@pytest.mark.parametrize("is_damaged", [False, True])
def test_trace_of_loads_replays_to_the_same_state(make, tmp_path, is_damaged):
    run(ask(make(), FIRST))
    if is_damaged:
        damage_all(tmp_path / "disk", keep=1)
    engine, tracer = make(), Tracer()
    twin = Twin(engine, tracer)
    tracer.attach(engine, twin)
    run(ask(engine, SECOND, FIRST, FIRST[:9]))
    tracer.detach()
    assert tracer.error is None
    kinds = Counter(event["kind"] for event in twin.events)
    expected = {"disk_loaded": 2, "disk_arrived": 1 if is_damaged else 2, "disk_stored": 4 if is_damaged else 3}
    assert expected.items() <= kinds.items() and kinds["lost"] == kinds["disk_bad"] == int(is_damaged)
    whys = {event["why"] for event in twin.events if event["kind"] == "preempt"}
    assert whys == ({"lost"} if is_damaged else set())


# Several processes


def write_forever(root: str, max_bytes: int, seed: int) -> None:
    """Write, read and touch random blocks. The content of each follows from its hash. Leave with 1 if one is wrong."""
    files, rng = BlockFiles(Path(root), "a", max_bytes), random.Random(seed)
    files.remove_oldest()
    while True:
        number = rng.randrange(200)
        try:
            assert read(files, name(number)) == content(number)
        except ValueError:
            os._exit(1)
        except FileNotFoundError:
            files.write(name(number), memoryview(content(number)))
        files.touch([name(number)])


def content(number: int) -> bytes:
    return random.Random(number).randbytes(1024)


@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=pytest.mark.nightly)])
def test_processes_that_are_killed_leave_whole_files_and_hold_the_size(tmp_path, num_kills):
    """Two processes at a time, and each is killed at a random moment."""
    rng, limit, context = random.Random(num_kills), 100 * PAGE, multiprocessing.get_context("fork")
    writers: list[multiprocessing.process.BaseProcess] = []
    files, most = files_of(tmp_path, limit), 0
    for _ in range(num_kills):
        while len(writers) < 2:
            writers.append(context.Process(target=write_forever, args=(str(tmp_path), limit, rng.randrange(2**30))))
            writers[-1].start()
        looks = rng.randrange(1, 60)
        while looks > 0 or most == 0:
            looks -= 1
            assert all(writer.is_alive() for writer in writers), "it has read a wrong block"
            with files._locked():  # noqa: SLF001 - so no file is counted that another one has replaced
                most = max(most, len(paths_that_exist(tmp_path)))
        victim = writers.pop(0)
        victim.kill()
        victim.join()
    for writer in writers:
        assert writer.is_alive()
        writer.kill()
        writer.join()
    files.remove_oldest()
    assert 0 < most <= 100 and {path.name for path in tmp_path.iterdir()} == {"a", "lock"}
    for path in paths(tmp_path):
        assert read(files, bytes.fromhex(path.stem)) == content(int(path.stem, 16))
    assert int.from_bytes((tmp_path / "lock").read_bytes(), "little") == len(paths(tmp_path)) * PAGE


def paths_that_exist(root: Path) -> list[Path]:
    return [*root.glob("*/*/*.kv")]


PREFILL = """
import sys
from nanovllm import LLM, SamplingParams
options = {"offload_policy": "load", "block_size": 4, "kv_cache_tokens": 160}
llm = LLM(sys.argv[1], kv_disk_dir=sys.argv[2], kv_disk_size=0.1, **options)
llm.generate(list(range(10, 40)), SamplingParams(max_tokens=1))
llm.llm_engine.disk_tier.flush()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
@pytest.mark.parametrize("is_killed", [True, False])
def test_one_process_computes_a_prompt_and_another_one_answers(checkpoint, tmp_path, is_killed):
    """Prefill and decode in two processes. The first one may still run, or be killed."""
    command = [sys.executable, "-c", PREFILL, str(checkpoint), str(tmp_path / "disk")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prefill:
        assert prefill.stdout and prefill.stdout.readline() == "ready\n"
        if is_killed:
            prefill.kill()
            prefill.wait()
        options: dict[str, Any] = {"offload_policy": "load", "block_size": 4, "kv_cache_tokens": 160}
        sampling = SamplingParams(temperature=0.0, max_tokens=8)
        [expected] = LLM(str(checkpoint), **options).generate([*range(10, 40)], sampling)
        llm = LLM(str(checkpoint), kv_disk_dir=tmp_path / "disk", kv_disk_size=0.1, **options)
        [output] = llm.generate([*range(10, 40)], sampling)
        prefill.kill()
    assert answers(output) == answers(expected) and output.num_cached_tokens == 28
    assert llm.stats().disk_blocks_loaded == 7


# Random histories


class DiskHistory:
    """Requests that start alike, aborts, resets, restarts, and files that are damaged, removed or refused."""

    def __init__(self, checkpoint: Path, root: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.root, self.seen = root, Counter[str]()
        self.texts = [[rng.randrange(320) for _ in range(25)] for _ in range(2)]
        self.late, self.failing, self.busy = rng.choice([0.0, 0.5]), rng.choice([0.0, 0.1]), rng.choice([0.05, 0.3])
        self.make = lambda: engine_of_folder(
            root,
            checkpoint,
            num_blocks=rng.randrange(8, 24),
            kv_offloading_tokens=4 * rng.choice([0, 0, 4]),
            kv_disk_size=rng.choice([12 * PAGE / GIB, 1.0]),
            kv_disk_save=rng.choice(["prompt", "all", "evicted"]),
            max_num_seqs=rng.choice([1, 2, 4, 32]),
            max_num_batched_tokens=rng.choice([1, 3, 8, 64]),
            async_scheduling=rng.random() < 0.3,
        )
        self.sent: dict[str, tuple[list[int], SamplingParams]] = {}

    def start(self) -> None:
        """Start an engine whose files are slow and fail at times."""
        self.engine = self.make()
        files, rng = self.engine.disk_tier.files, self.rng
        original = {"read": files.read, "write": files.write}

        def faulty(verb: str) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                if rng.random() < self.late:
                    let_others_run()
                if rng.random() < self.failing:
                    raise OSError(5, "Input/output error")
                return original[verb](*arguments)

            return call

        for verb in original:
            setattr(files, verb, faulty(verb))

    def disturb(self) -> None:
        """Damage, cut or remove files."""
        for path in paths_that_exist(self.root):
            if self.rng.random() < 0.3:
                try:
                    data = bytearray(path.read_bytes())
                    data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                    if self.rng.random() < 0.3:
                        path.unlink()
                    else:
                        path.write_bytes(data[: self.rng.choice([len(data), len(data), len(data) // 2])])
                    self.seen["disturbed"] += 1
                except FileNotFoundError:
                    pass  # it has been deleted

    def end(self, output: RequestOutput) -> None:
        prompt, sampling = self.sent.pop(output.request_id)
        for i, (token_ids, reason) in enumerate(zip(answers(output), reasons(output), strict=True)):
            assert token_ids == answer_alone(prompt, len(token_ids), sampling.seed, i)
            assert reason in ("length", "abort") or "blocks, the pool has" in str(output.error)
            assert reason != "length" or len(token_ids) == sampling.max_tokens

    def run(self, num_requests: int) -> None:
        """Send requests over several lives of the engine, and check every answer."""
        rng, number = self.rng, 0
        self.start()
        while number < num_requests or self.engine.has_unfinished_requests():
            if number < num_requests and rng.random() < self.busy:
                beginning = rng.choice(self.texts)[: rng.choice([0, 9, 13, 20, 25])]
                prompt = beginning + [rng.randrange(320) for _ in range(rng.randrange(1, 8))]
                sampling = params(
                    rng.randrange(1, 16), n=rng.choice([1, 1, 2, 3]), temperature=1.0, seed=rng.randrange(9)
                )
                sampling.n = min(sampling.n, self.engine.config.max_num_seqs)
                self.engine.add_request(str(number), prompt, sampling)
                self.sent[str(number)] = prompt, sampling
                number += 1
            if rng.random() < 0.03 and (output := self.engine.abort_request(str(rng.randrange(number + 1)))):
                self.end(output)
            if rng.random() < 0.03:
                self.engine.disk_tier.flush()
                self.disturb()
            if rng.random() < 0.003:
                assert self.engine.reset_prefix_cache(reset_running_requests=True)
            for output in step(self.engine).values():
                if output.finished:
                    self.end(output)
            if not self.engine.has_unfinished_requests() and rng.random() < 0.5:
                self.stop()
                self.start()
        self.stop()
        assert not self.sent

    def stop(self) -> None:
        assert_empty(self.engine)
        tier = self.engine.disk_tier
        tier.flush()
        tier.collect()
        self.seen += Counter(loaded=tier.num_blocks_loaded, lost=tier.num_blocks_lost, stored=tier.num_blocks_stored)
        self.seen["preempted"] += self.engine.scheduler.num_preemptions
        assert {path.name for path in self.root.iterdir() if path.is_file()} <= {"lock"}


@pytest.mark.parametrize("seeds", [range(7, 12), pytest.param(range(1000), marks=pytest.mark.nightly)])
def test_random_histories_with_faults_give_every_request_its_own_answer(checkpoint, tmp_path, seeds, monkeypatch):
    monkeypatch.setattr(disk_tier, "RETRY_SECONDS", 0.0)
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = DiskHistory(checkpoint, tmp_path / str(seed), seed)
        history.run(history.rng.randrange(1, 20))
        seen += history.seen
        shutil.rmtree(tmp_path / str(seed))
    assert min(seen[kind] for kind in ("loaded", "lost", "stored", "preempted", "disturbed")) > 2, f"too little: {seen}"
