"""How much memory this machine has: of its first GPU, or else its own. Without torch."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    size: int  # bytes
    of: str  # "this GPU" | "this machine" | "memory", that a caller gave
    is_gpu: bool


def find_memory() -> Memory:
    gpu = gpu_bytes()
    return Memory(gpu, "this GPU", True) if gpu else Memory(host_bytes(), "this machine", False)


def gpu_bytes() -> int | None:
    """Of the first GPU that nvidia-smi tells of."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
        return int(done.stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def host_bytes() -> int:
    """What the machine has, or a container may take of it."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(size, int(limit.read_text()))
    except (OSError, ValueError):  # there is no limit
        return size
