"""Host memory: how much of it this process may use (a container can limit that), and how to get huge pages."""

import ctypes
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROOT = Path("/")
HUGE_PAGE = 1 << 21  # bytes
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # Linux: use huge pages on first write; turn used pages into huge ones
# For each version of Linux's control groups: the files with the limit and the usage, and memory.stat's entry for the
# part of the page cache that Linux drops first. The usage includes the page cache.
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2_FILES = ("memory.max", "memory.current", "inactive_file")


class HostMemory(NamedTuple):
    """The memory that this process may use, in bytes."""

    total: int
    available: int  # without swapping


def host_memory(root: Path = ROOT) -> HostMemory:
    """Return the memory that this process may use: the machine's, within the limit of each control group around it.

    Where /proc/meminfo cannot be read, `available` is the total.
    """
    try:
        meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        total, available = (int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):  # for example, not on Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group, (limit_file, usage_file, inactive_file) in control_groups(root):
        try:
            limit, usage = (int((group / name).read_text()) for name in (limit_file, usage_file))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            reclaimable = int(stat[inactive_file])
        except (OSError, KeyError, ValueError):  # no limit is set, or there is no such folder
            continue
        total, available = min(total, limit), min(available, limit - usage + reclaimable)
    return HostMemory(total, max(available, 0))


def control_groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folder of each control group around this process, with V1_FILES or V2_FILES, the names of its files.

    In a container, a group's path may be its path on the host. Then only the mount point exists, and it is the
    container's group. Folders that do not exist are returned, too.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, files = (root / "sys/fs/cgroup/memory", V1_FILES) if controllers else (root / "sys/fs/cgroup", V2_FILES)
        folder = mount / path.lstrip("/")
        groups += [(group, files) for group in (folder, *folder.parents) if group.is_relative_to(mount)]
    return groups


def default_pool_bytes(limit: int) -> int:
    """Return the default size of a pool in bytes: `limit`, or a quarter of the available memory if that is less.

    The rest of the memory is for a second pool and for the engine's steps.
    """
    return min(limit, host_memory().available // 4)


def allocate(
    shape: tuple[int, ...], dtype: "torch.dtype", device: "torch.device", pin_memory: bool = False
) -> "Tensor":
    """Return an uninitialized tensor. Raise RuntimeError if it does not fit in memory.

    The size of a tensor on the CPU is checked here: Linux may promise more memory than a machine or a container has,
    and kill the process once it uses that memory.
    """
    import torch

    size, total = math.prod(shape) * dtype.itemsize, host_memory().total
    if device.type == "cpu" and size > total:
        raise RuntimeError(f"a tensor of {size:,} bytes is larger than the memory, {total:,} bytes")
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)


def use_huge_pages(tensor: "Tensor", advice: int = MADV_HUGEPAGE) -> None:
    """Ask Linux to back a tensor on the CPU with huge pages, so that sequential reads cross fewer pages.

    Huge pages that the tensor fills only in part stay as they are. MADV_HUGEPAGE is for a tensor that has not been
    written yet, MADV_COLLAPSE for one that has. A refusal is ignored, as it only costs speed.
    """
    if sys.platform == "linux" and tensor.device.type == "cpu":
        start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE - start
        if size > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
