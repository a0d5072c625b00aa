"""The memory that a process may use: the machine's, or less in a control group, in both versions of their interface."""

import mmap
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .. import host_memory as module
from ..build import num_blocks_for
from ..checkpoints.sizes import kv_bytes_per_token
from ..checkpoints.weights import dummy_model
from ..engine.kv_cache import KVCache
from ..host_memory import HUGE_PAGE, MADV_HUGEPAGE, HostMemory, default_pool_bytes, host_memory, use_huge_pages
from ..llama import ModelConfig
from ..options.config import EngineConfig
from .testing import limited

ROOT, GIB = Path(__file__).resolve().parents[2], 2**30
MEMINFO = f"MemTotal: {8 * 2**20} kB\nMemFree: {2**20} kB\nMemAvailable: {4 * 2**20} kB\n"
UNLIMITED = 9223372036854771712  # of version 1


@pytest.fixture
def root(tmp_path):
    """Return a root folder for a machine with 8 GiB, 4 of them available, and with no control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def put_in_group(root: Path, *lines: str) -> None:
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def write_v1(folder: Path, limit: int, usage: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"cache 1\ninactive_file 7\ntotal_cache 1\ntotal_inactive_file {inactive}\n")


def write_v2(folder: Path, limit: int | str, usage: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon {usage - inactive}\nactive_file 5\ninactive_file {inactive}\n")


def test_without_control_groups_the_machine_is_the_limit(root):
    assert host_memory(root) == HostMemory(8 * GIB, 4 * GIB)
    put_in_group(root, "0::/")  # the root group of version 2 has no limit
    assert host_memory(root) == HostMemory(8 * GIB, 4 * GIB)


def test_group_of_version_2_limits_memory(root):
    put_in_group(root, "0::/app")
    write_v2(root / "sys/fs/cgroup/app", 2 * GIB, usage=GIB // 2)
    assert host_memory(root) == HostMemory(2 * GIB, 3 * GIB // 2)


def test_group_of_version_1_limits_memory(root):
    put_in_group(root, "9:cpu,cpuacct:/other", "4:memory:/app", "0::/")
    write_v1(root / "sys/fs/cgroup/memory", UNLIMITED, usage=3 * GIB)
    write_v1(root / "sys/fs/cgroup/memory/app", 2 * GIB, usage=GIB // 2)
    write_v1(root / "sys/fs/cgroup/memory/other", GIB // 4, usage=0)
    assert host_memory(root) == HostMemory(2 * GIB, 3 * GIB // 2)


@pytest.mark.parametrize("write", [write_v1, write_v2])
@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ((GIB, GIB // 4), (2 * GIB, 0), HostMemory(GIB, 3 * GIB // 4)),
        ((2 * GIB, 0), (GIB, GIB // 4), HostMemory(GIB, 3 * GIB // 4)),
        ((3 * GIB, 5 * GIB // 2), (2 * GIB, 0), HostMemory(2 * GIB, GIB // 2)),  # neighbors fill the outer group
        ((2 * GIB, GIB), (16 * GIB, 0), HostMemory(2 * GIB, GIB)),
        ((16 * GIB, 0), (16 * GIB, 0), HostMemory(8 * GIB, 4 * GIB)),
        ((GIB, 2 * GIB), (GIB, 0), HostMemory(GIB, 0)),
    ],
)
def test_tightest_of_nested_groups_counts(root, write, outer, inner, expected):
    put_in_group(root, "0::/pod/app" if write is write_v2 else "4:memory:/pod/app")
    mount = root / ("sys/fs/cgroup" if write is write_v2 else "sys/fs/cgroup/memory")
    write(mount / "pod", *outer)
    write(mount / "pod/app", *inner)
    assert host_memory(root) == expected


@pytest.mark.parametrize("write", [write_v1, write_v2])
def test_page_cache_that_the_system_drops_first_is_available(root, write):
    put_in_group(root, "0::/app" if write is write_v2 else "4:memory:/app")
    mount = root / ("sys/fs/cgroup" if write is write_v2 else "sys/fs/cgroup/memory")
    write(mount / "app", 2 * GIB, usage=2 * GIB, inactive=GIB)
    assert host_memory(root) == HostMemory(2 * GIB, GIB)


@pytest.mark.parametrize("write", [write_v1, write_v2])
def test_container_whose_group_has_a_path_of_the_host_is_limited_where_groups_are_mounted(root, write):
    put_in_group(root, "0::/../../docker/abc" if write is write_v2 else "4:memory:/docker/abc")
    write(root / ("sys/fs/cgroup" if write is write_v2 else "sys/fs/cgroup/memory"), 2 * GIB, usage=GIB)
    assert host_memory(root) == HostMemory(2 * GIB, GIB)


def test_unlimited_or_unreadable_group_changes_nothing(root):
    put_in_group(root, "4:memory:/app", "0::/app")
    write_v2(root / "sys/fs/cgroup/app", "max", usage=GIB)
    (root / "sys/fs/cgroup/memory/app").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory/app/memory.limit_in_bytes").write_text("")
    assert host_memory(root) == HostMemory(8 * GIB, 4 * GIB)


def test_system_without_these_files_reports_its_physical_memory(tmp_path):
    memory = host_memory(tmp_path)
    assert memory.total == memory.available > GIB // 4


@pytest.mark.parametrize("part", ["quick", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_process_in_a_real_group_reports_the_groups_limit(part):
    with limited.group(GIB // 2, must_exist=part == "nightly") as run:
        code = "from nanovllm.host_memory import host_memory; print(*host_memory())"
        total, available = map(int, run(sys.executable, "-c", code, PYTHONPATH=str(ROOT)).split())
    assert total == GIB // 2 and GIB // 4 < available < GIB // 2
    assert host_memory().total > GIB // 2, "this process is in the group, too"


# Decisions about memory


MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=2**20,
)


def test_default_pool_takes_at_most_a_quarter_of_the_available_memory(monkeypatch):
    config = EngineConfig(model="x", dtype="float32", device="cpu", max_num_seqs=1024)
    sizes = []
    for available in (64 * GIB, GIB, 2**20):
        monkeypatch.setattr(module, "host_memory", lambda size=available: HostMemory(2 * size, size))
        assert default_pool_bytes(GIB) == min(GIB, available // 4)
        num_blocks = num_blocks_for(config, MODEL, 2**20, torch.device("cpu"))
        sizes.append(num_blocks * config.block_size * kv_bytes_per_token(MODEL, 4))
    assert sizes == [GIB, GIB // 4, 2**18]


def test_pool_that_the_user_sizes_is_not_changed(monkeypatch):
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(2**20, 2**20))
    config = EngineConfig(model="x", dtype="float32", device="cpu", kv_cache_tokens=4096)
    assert num_blocks_for(config, MODEL, 4096, torch.device("cpu")) * config.block_size == 4096


# Huge pages


def is_advised(tensor: torch.Tensor) -> bool:
    """Return whether Linux has been asked for huge pages in the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    mappings = re.split(r"^([0-9a-f]+)-([0-9a-f]+) .*$", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    [flags] = [
        re.search(r"^VmFlags:(.*)$", text, re.MULTILINE)
        for start, end, text in zip(*(mappings[i::3] for i in range(3)), strict=True)
        if int(start, 16) <= middle < int(end, 16)
    ]
    return flags is not None and "hg" in flags[1].split()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this system has no huge pages")
def test_weights_and_pool_are_in_huge_pages_where_the_system_has_them(tmp_path):
    model = replace(MODEL, hidden_size=512, intermediate_size=1024, head_dim=128)
    pool = KVCache(model, 1024, 16, torch.float32, torch.device("cpu"))
    weights = dummy_model(tmp_path, model, torch.float32, torch.device("cpu"), 64)
    assert is_advised(pool.blocks) and is_advised(weights.model.layers[0].mlp.gate_up_proj.weight)
    # A mapping of its own, since an allocator may hand out memory that a freed tensor left advised.
    assert not is_advised(torch.frombuffer(mmap.mmap(-1, 2 * HUGE_PAGE), dtype=torch.uint8))


@pytest.mark.parametrize(("size", "advice"), [(0, MADV_HUGEPAGE), (100, MADV_HUGEPAGE), (3 * HUGE_PAGE, 99)])
def test_refused_or_impossible_huge_pages_change_nothing(size, advice):
    tensor = torch.ones(size, dtype=torch.uint8)
    use_huge_pages(tensor, advice)
    assert tensor.sum() == size


def test_weights_without_room_are_an_error_that_names_their_size(tmp_path):
    model = replace(MODEL, vocab_size=2**50)
    with pytest.raises(ValueError, match=r"^cpu has no room for the weights, [\d,]{22,} bytes$"):
        dummy_model(tmp_path, model, torch.float32, torch.device("cpu"), 64)
