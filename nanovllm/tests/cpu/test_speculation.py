"""Drafts with Numba's kernels: the same outputs as without them."""

import pytest

pytest.importorskip("numba")

from ..engine.test_speculation import History, check_histories, loopy  # noqa: F401  # a fixture


@pytest.mark.parametrize(
    "seeds", [pytest.param((4,), id="quick"), pytest.param(range(3, 103), marks=pytest.mark.nightly)]
)
def test_random_histories_give_the_same_outputs_with_kernels(loopy, seeds, with_kernels, tmp_path):  # noqa: F811
    counts = check_histories([History(seed, loopy, tmp_path) for seed in seeds], backend="numba")
    assert 0 < counts["accepted"] < counts["drafted"], counts
