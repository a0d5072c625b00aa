"""Kernels give the answers on record, just as plain operations do: see ../test_record.py."""

import pytest

pytest.importorskip("numba")
pytest.importorskip("llguidance")

from ..test_record import STORYTELLER, assert_as_recorded, check, write_random


@pytest.mark.parametrize("model", ["random", pytest.param("storyteller", marks=pytest.mark.full)])
def test_kernels_give_the_recorded_answers(model, with_kernels, tmp_path):
    assert_as_recorded(check(model, STORYTELLER if model == "storyteller" else write_random(tmp_path), "numba"))
