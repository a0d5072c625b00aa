"""Weights are in memory once, while an engine loads them and afterwards, for each dtype and backend."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from ..peak_memory import (
    BACKENDS,
    BLOCK,
    DTYPES,
    MAX_RATIO,
    PAGE,
    QWEN,
    SMALL,
    TINY,
    Peak,
    command,
    write_random_checkpoint,
)
from ..testing import limited

ROOT = Path(__file__).resolve().parents[3]
FULL = pytest.mark.full
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux reports peak memory")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TINY)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Yield a checkpoint of 1 GB, and remove it."""
    folder = write_random_checkpoint(tmp_path_factory.mktemp("qwen") / "model", QWEN)
    yield folder
    for path in folder.iterdir():
        path.unlink()


@pytest.fixture
def environment(compiled, kernels_folder):
    """Return a function that returns the environment of an engine, with compiled kernels for a dtype."""

    def prepare(dtype: str) -> dict[str, str]:
        compiled(getattr(torch, dtype))
        return {"NUMBA_CACHE_DIR": str(kernels_folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    return prepare


def measured(*arguments, environment) -> Peak:
    done = subprocess.check_output(command(*arguments), env=os.environ | environment, timeout=limited.SECONDS)
    return Peak(*json.loads(done))


@pytest.mark.parametrize(("backend", "dtype"), [
    pytest.param("numba", "float32", marks=pytest.mark.nightly),
    pytest.param("torch", "float32", marks=FULL),
    pytest.param("numba", "bfloat16", marks=pytest.mark.nightly),
])  # fmt: skip
def test_weights_of_a_small_model_are_in_memory_once(backend, dtype, tiny, tmp_path, environment):
    """Only the large model shows it for plain bfloat16, because a library's buffers would count for much here."""
    folder = write_random_checkpoint(tmp_path / "model", SMALL)
    peak = measured(folder, tiny, dtype, backend, 4, environment=environment(dtype))
    assert peak.weights > 50_000_000 and peak.peak > peak.weights and peak.ratio <= MAX_RATIO, peak


@pytest.mark.nightly
@every_dtype
@every_backend
def test_weights_of_a_large_model_are_in_memory_once(backend, dtype, qwen, tiny, environment):
    peak = measured(qwen, tiny, dtype, backend, 256, environment=environment(dtype))
    assert peak.weights > 980_000_000 and peak.peak > peak.weights and peak.ratio <= MAX_RATIO, peak
    assert peak.ratio == pytest.approx(documented()[backend, dtype], abs=0.1), "the docs show another number"


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_is_never_in_memory_in_its_own_dtype_while_it_is_quantized(quantization, qwen, tiny, environment):
    peak = measured(qwen, tiny, quantization, "numba", 256, environment=environment("bfloat16"))
    own = (qwen / "model.safetensors").stat().st_size
    assert peak.weights < 0.55 * own and peak.peak - peak.pool < 0.85 * own, peak


@pytest.mark.nightly
def test_model_of_1_gb_generates_in_a_group_of_1_9_gb(qwen, tiny, environment):
    prepared = environment("bfloat16")
    arguments = qwen, tiny, "bfloat16", "numba", 256
    with limited.group(1_900_000_000, must_exist=True) as run:
        inside = Peak(*json.loads(run(*command(*arguments), **prepared)))
    assert inside.token_ids == measured(*arguments, environment=prepared).token_ids


def documented() -> dict[tuple[str, str], float]:
    """Return the last column of the table in the docs by backend and dtype."""
    [table] = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    return {(row[0], row[1]): float(row[-1]) for row in rows}


def test_docs_show_a_peak_within_the_limit_for_each_backend_and_dtype():
    peaks = documented()
    assert peaks.keys() == {(backend, dtype) for backend in BACKENDS for dtype in DTYPES}
    assert all(1 < peak <= MAX_RATIO for peak in peaks.values())
