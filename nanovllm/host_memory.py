"""The memory of this machine that a process may use, which the control groups of a container may limit."""

import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
# For each version: the files of a group's limit and usage, and the entry of memory.stat for the part of the page cache
# that the system drops first. The usage includes the page cache.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


class HostMemory(NamedTuple):
    """The memory that this process may use, in bytes."""

    total: int
    available: int  # without swapping


def host_memory(root: Path = ROOT) -> HostMemory:
    """Return the memory of this machine, or of the tightest control group around this process if that is less."""
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group, (limit_file, usage_file, inactive_file) in control_groups(root):
        try:
            limit, usage = (int((group / name).read_text()) for name in (limit_file, usage_file))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            reclaimable = int(stat[inactive_file])
        except (OSError, KeyError, ValueError):  # no limit is set
            continue
        total, available = min(total, limit), min(available, limit - usage + reclaimable)
    return HostMemory(total, max(available, 0))


def control_groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders of the groups around this process, which all limit it, each with V1 or V2.

    In a container, the path of a group may be one of the host. Then only the folder where groups are mounted exists,
    and it is the container's own group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, files = (root / "sys/fs/cgroup/memory", V1) if controllers else (root / "sys/fs/cgroup", V2)
        folder = mount / path.lstrip("/")
        groups += [(group, files) for group in (folder, *folder.parents) if group.is_relative_to(mount)]
    return groups


def default_pool_bytes(limit: int) -> int:
    """Return the default size of a pool of KV cache: at most `limit`, and a quarter of the available memory.

    There are two pools, and a step needs memory, too.
    """
    return min(limit, host_memory().available // 4)
