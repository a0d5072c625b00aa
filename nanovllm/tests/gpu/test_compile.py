"""Compile the kernels for several GPUs. None is needed, because Triton brings its own compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...quantization import Format

triton = pytest.importorskip("triton", reason="needs triton: make test-triton")

KERNELS = {
    "attend_split",
    "merge_splits",
    "attend_queries",
    "rotate_and_write_row",
    "embed_row",
    "add_rms_norm_row",
    "silu_and_mul_part",
    "multiply_row",
    "multiply_tiles",
    "reduce_chunks",
    "sample_row",
}
USE_POOL = {"attend_split", "merge_splits", "attend_queries", "rotate_and_write_row"}
READERS = KERNELS - {"rotate_and_write_row", "multiply_tiles"}  # the latter reads integers four bytes at a time
PIPELINED = {"attend_split", "attend_queries"}
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
        "bfloat16 8 4 128 16 fp8",
        "bfloat16 8 4 128 16 int8",
        pytest.param("float16 2 7 80 128 fp8", marks=full),
        pytest.param("float16 2 2 256 16 int8", marks=full),
    ],
)
def test_kernels_compile_and_fit_an_h200(shape: str, tmp_path: Path) -> None:
    launches = [json.loads(line) for line in run("resources", "90", *shape.split(), cache=tmp_path)]
    assert {launch["kernel"] for launch in launches} == kernels_of(shape)
    assert all(launch["wide_loads"] for launch in launches if launch["kernel"] in READERS), launches
    assert all(launch["in_flight"] for launch in launches if launch["kernel"] in PIPELINED), launches
    assert all(launch["waits"] for launch in launches), launches
    products = [launch for launch in launches if launch["kernel"] == "multiply_tiles"]
    assert all(launch["prefetches"] for launch in products), launches
    assert all(launch["wide_loads"] and launch["in_flight"] for launch in products if launch["bits"] == 16), launches
    # At most 4 rows of the weight are read at a time. More wide loads show that two tiles are in flight.
    assert all(launch["wide_loads"] > 6 for launch in launches if launch["kernel"] == "multiply_row"), launches
    # Weights must not pass through shared memory, where a tile would take 8 KiB or more.
    assert all(launch["shared"] < 1024 for launch in launches if launch["kernel"] == "multiply_row"), launches
    if not shape.startswith("float32"):  # float32 products don't use tensor cores, and need many registers
        assert all(launch["stack"] < 64 for launch in launches), launches  # sample_row's has 48 with triton 3.6


def test_weights_in_each_format_fit_a_gpu_with_little_shared_memory(tmp_path: Path) -> None:
    """gemm() loads several tiles ahead: more bytes for each number leave room for fewer."""
    launches = [json.loads(line) for line in run("products", "89", "float16", cache=tmp_path)]
    assert len(launches) == len(Format) and all(launch["in_flight"] for launch in launches), launches


def kernels_of(shape: str) -> set[str]:
    return USE_POOL if shape.endswith(("fp8", "int8")) else KERNELS


def test_prefill_on_paper_is_as_compiled(tmp_path: Path) -> None:
    """The guide's table names the compiler's version, and another one makes other code."""
    from .compiler import PAGE, PREFILL_BLOCK

    [block] = PREFILL_BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    lines = run("prefill", cache=tmp_path)
    shares = [float(line.split("|")[-2].split("%")[0]) for line in lines if "%" in line]
    assert len(shares) == 4 and max(shares) >= 40, "some program should reach 40% of the peak"
    if f"triton {triton.__version__} " in block:
        assert lines == block.splitlines()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape",
    [
        "float16 8 4 128 16",
        "float16 2 2 256 16",
        "float32 8 4 128 16",
        "float16 8 4 128 16 int8",
        "float16 8 4 128 16 fp8",
    ],
)
@pytest.mark.parametrize("capability", ["80", "86", "89", "120"])
def test_kernels_compile_and_fit_other_gpus(capability: str, shape: str, tmp_path: Path) -> None:
    if shape.endswith("fp8") and int(capability) < 89:
        pytest.skip("a GPU so old does not convert fp8")
    launches = [json.loads(line) for line in run("resources", capability, *shape.split(), cache=tmp_path)]
    assert {launch["kernel"] for launch in launches} == kernels_of(shape)
    assert {launch["waits"] for launch in launches} == {int(capability) >= 90}
    is_wide = " 256 " in shape  # heads so wide leave prefill no room to load tiles ahead
    pipelined = {"attend_split"} if is_wide else PIPELINED
    assert all(launch["in_flight"] for launch in launches if launch["kernel"] in pipelined), launches
    if not is_wide and not shape.startswith("float32"):
        assert all(launch["stack"] <= 128 for launch in launches), launches


@pytest.mark.nightly
def test_kernels_compile_for_an_old_gpu(tmp_path: Path) -> None:
    arguments = "75", "float16", "8", "4", "128", "16"
    launches = [json.loads(line) for line in run("resources", *arguments, cache=tmp_path)]
    assert {launch["kernel"] for launch in launches} == KERNELS


@pytest.mark.parametrize("max_rows", ["8", pytest.param("300", marks=full)])
def test_requests_launch_only_kernels_compiled_at_start(checkpoint: Path, max_rows: str, tmp_path: Path) -> None:
    assert run("variants", str(checkpoint), "bfloat16", max_rows, cache=tmp_path) == []


def run(*arguments: str, cache: Path) -> list[str]:
    """Run compiler.py in a process without the interpreter, and return the lines it prints."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "nanovllm.tests.gpu.compiler", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
