"""find_likeliest compared with its plain version."""

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.ops import LOGITS_PER_PROGRAM, LikeliestWorkspace, triton_ops
from .pools import DTYPES

PIECE = LOGITS_PER_PROGRAM


def find_both(logits: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of the kernel and of plain torch, each [rows, 3]."""
    workspace = LikeliestWorkspace(len(logits), logits.shape[1], logits.device)
    outs = [torch.full((len(logits), 3), 7.0, device=logits.device) for _ in range(2)]
    for run, out in zip((triton_ops().find_likeliest, plain.find_likeliest), outs, strict=True):
        run(logits, workspace, out)
    return outs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 5), (3, PIECE), (2, 3 * PIECE + 1)])
def test_find_likeliest_matches_plain_torch(rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 5 * torch.randn(rows, vocab_size, generator=generator).to(device, dtype)  # bfloat16 has tied peaks
    logits[0, : vocab_size // 2] = -torch.inf
    result, expected = find_both(logits)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(result[:, 0], expected[:, 0])


def test_ties_go_to_the_lowest_token_id_across_pieces(device: str) -> None:
    logits = torch.zeros(3, 2 * PIECE, device=device)
    logits[1, [PIECE - 1, PIECE]] = 2.0
    logits[2, [PIECE, PIECE + 5]] = 2.0
    assert [result[:, 0].tolist() for result in find_both(logits)] == [[0, PIECE - 1, PIECE]] * 2


@pytest.mark.parametrize("place", [0, PIECE + 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_without_probabilities_have_no_logprob(value: float, place: int, device: str) -> None:
    logits = torch.randn(3, 2 * PIECE, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0] = -torch.inf
    logits[1, place] = value
    for result in find_both(logits):
        assert result[:, 1].isfinite().tolist() == [False, False, True]
        assert 0 <= result[2, 0] < 2 * PIECE


def test_logits_may_be_part_of_a_wider_buffer(device: str) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(device)[:, :200]
    torch.testing.assert_close(*find_both(logits), rtol=1e-5, atol=1e-5)
