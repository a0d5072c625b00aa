"""nanovllm bench host, and what each row of a step costs the host, counted in calls of functions."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ...bench.bench_options import Host
from ...bench.host import Load, host
from ...bench.report import text
from ..testing.checkpoints import write_checkpoint

# Of a row in a step, in Python and in C. The second number is for requests that come and go: one row in 32 is new.
MAX_CALLS = {"final": (14, 44), "deltas": (30, 54)}


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=512)


def calls_in_a_step(load: Load) -> int:
    """Return how many functions a step calls, in Python and in C: the median of some steps."""
    counts = []
    for _ in range(15):
        count = 0

        def note(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        load.step()
        sys.setprofile(None)
        counts.append(count)
    return sorted(counts)[len(counts) // 2]


@pytest.mark.parametrize("comes_and_goes", [False, True])
@pytest.mark.parametrize("kind", MAX_CALLS)
def test_row_costs_the_host_a_few_calls(long_checkpoint, kind, comes_and_goes):
    few, many = (
        calls_in_a_step(Load({"model": str(long_checkpoint)}, rows, kind, comes_and_goes)) for rows in (32, 96)
    )
    assert (many - few) / 64 <= MAX_CALLS[kind][comes_and_goes]


def test_host_reports_a_row_for_each_size(long_checkpoint):
    report = host({"model": str(long_checkpoint)}, Host(num_seqs="2,3", num_steps=2, rounds=2))
    assert list(report["measured"]) == ["final", "final, coming and going", "deltas", "deltas, coming and going"]
    for column in report["measured"].values():
        assert list(column) == ["2 rows: ms", "3 rows: ms"]
        assert all(list(each) == ["median", "least", "largest"] for each in column.values())
    assert "coming and going" in text(report)
