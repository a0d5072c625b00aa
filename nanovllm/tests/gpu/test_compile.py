"""What no interpreter shows: the kernels are compiled for an H200. It needs no GPU, the compiler is Triton's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: make test-triton")

SHARED_MEMORY = 227 * 1024  # of an H200's multiprocessor, for one program
KERNELS = {
    "attend_split",
    "merge_splits",
    "attend_queries",
    "rotate_and_write_row",
    "add_rms_norm_row",
    "silu_and_mul_part",
    "multiply_row",
    "multiply_part",
    "find_peak",
    "join_peaks",
}
READERS = KERNELS - {"rotate_and_write_row", "join_peaks"}  # of these two a program reads a few numbers
full = pytest.mark.full


@pytest.mark.parametrize(
    "shape",  # dtype, num_kv_heads, group, head_dim, block_size
    [
        "bfloat16 8 4 128 16",
        pytest.param("float16 4 8 64 16", marks=full),
        pytest.param("bfloat16 2 7 80 128", marks=full),
        pytest.param("bfloat16 2 2 256 16", marks=full),
        pytest.param("float32 2 1 256 1", marks=full),
        pytest.param("float32 8 4 128 16", marks=full),
    ],
)
def test_kernels_compile_and_fit(shape: str, tmp_path: Path) -> None:
    launches = [json.loads(line) for line in run("compile_kernels", *shape.split(), cache=tmp_path)]
    assert {launch["kernel"] for launch in launches} == KERNELS
    assert all(launch["shared"] <= SHARED_MEMORY for launch in launches), launches
    assert all(launch["wide_loads"] for launch in launches if launch["kernel"] in READERS), launches
    # What of a weight went through shared memory would have to be there: a tile is 8 KiB and more.
    assert all(launch["shared"] < 1024 for launch in launches if launch["kernel"] == "multiply_row"), launches
    if not shape.startswith("float32"):  # its products take no tensor cores, and many registers
        assert not any(launch["stack"] for launch in launches), launches


@pytest.mark.parametrize("max_rows", ["8", pytest.param("300", marks=full)])
def test_no_request_waits_for_the_compiler(checkpoint: Path, max_rows: str, tmp_path: Path) -> None:
    assert run("launch_forms", str(checkpoint), "bfloat16", max_rows, cache=tmp_path) == []


def run(module: str, *arguments: str, cache: Path) -> list[str]:
    """The lines that it prints, in a process without the interpreter."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"nanovllm.tests.gpu.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
