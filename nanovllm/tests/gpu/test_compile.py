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
    "multiply_part",
    "find_peak",
    "join_peaks",
}
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
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "nanovllm.tests.gpu.compile_kernels", *shape.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {launch["kernel"] for launch in launches} == KERNELS
    assert all(launch["shared"] <= SHARED_MEMORY for launch in launches), launches
    if not shape.startswith("float32"):  # its products take no tensor cores, and many registers
        assert not any(launch["stack"] for launch in launches), launches
