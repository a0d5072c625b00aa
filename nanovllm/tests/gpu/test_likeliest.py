"""find_likeliest beside its twin: vocabularies of one piece and of several, equals, and rows without probabilities."""

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.split import PIECE, LikeliestRoom


def both(logits: torch.Tensor) -> list[torch.Tensor]:
    """[rows, 3] each"""
    from ...backends.gpu.likeliest import find_likeliest

    room = LikeliestRoom(len(logits), logits.shape[1], logits.device)
    tolds = [torch.full((len(logits), 3), 7.0, device=logits.device) for _ in range(2)]
    for run, told in zip((find_likeliest, plain.find_likeliest), tolds, strict=True):
        run(logits, room, told)
    return tolds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 5), (3, PIECE), (2, 3 * PIECE + 1)])
def test_as_its_twin(rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 5 * torch.randn(rows, vocab_size, generator=generator).to(device, dtype)  # in bfloat16 peaks have equals
    logits[0, : vocab_size // 2] = -torch.inf
    found, expected = both(logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:, 0], expected[:, 0])


def test_of_equals_the_first_also_in_another_piece(device: str) -> None:
    logits = torch.zeros(3, 2 * PIECE, device=device)
    logits[1, [PIECE - 1, PIECE]] = 2.0
    logits[2, [PIECE, PIECE + 5]] = 2.0
    assert [found[:, 0].tolist() for found in both(logits)] == [[0, PIECE - 1, PIECE]] * 2


@pytest.mark.parametrize("place", [0, PIECE + 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_probabilities_has_no_logprob(value: float, place: int, device: str) -> None:
    logits = torch.randn(3, 2 * PIECE, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0] = -torch.inf
    logits[1, place] = value
    for told in both(logits):
        assert told[:, 1].isfinite().tolist() == [False, False, True]
        assert 0 <= told[2, 0] < 2 * PIECE


def test_rows_of_a_wider_buffer(device: str) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(device)[:, :200]
    torch.testing.assert_close(*both(logits), rtol=1e-5, atol=1e-5)
