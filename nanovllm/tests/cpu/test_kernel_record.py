"""Hold the kernels to the record of what the plain operations answer: ../test_record.py."""

import pytest

pytest.importorskip("numba")
pytest.importorskip("llguidance")

from ..test_record import MODELS, STORYTELLER, assert_as_recorded, check, write_random


@pytest.mark.parametrize("model", MODELS)
def test_kernels_answer_as_recorded(model, with_kernels, tmp_path):
    assert_as_recorded(check(model, STORYTELLER if model == "storyteller" else write_random(tmp_path), "numba"))
