"""The Triton function of the branch more_kernel: on a GPU, elsewhere in Triton's interpreter. Numba's is the oracle."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from stages.more_kernel import paged_kernel
from stages.more_kernel.tests.uncompiled import uncompiled

NUM_LAYERS, LAYER = 2, 1


def attend_with_both(
    device: str,
    context_lens: list[int],
    tables: list[list[int]],
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return a step's attention [num_tokens, 2 KV heads, group, head_dim] by Triton's function, and by Numba's.

    Each sequence has a block table, with blocks of 5, and computes its last token. The pool is NaN past their ends.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(tables), 2, group, head_dim, generator=generator).to(dtype)
    blocks = torch.randn(8, NUM_LAYERS, 2, 5, 2, head_dim, generator=generator).to(dtype)
    for length, table in zip(context_lens, tables, strict=True):
        for slot in range(length, 5 * len(table)):
            blocks[table[slot // 5], :, :, slot % 5] = float("nan")
    width = max(map(len, tables))
    numbers = [[table + [0] * (width - len(table)) for table in tables], list(range(len(tables))), context_lens]
    arguments = [torch.tensor(each) for each in numbers]
    with uncompiled(paged_kernel):
        expected = torch.empty(q.shape)
        arrays = (each.numpy() for each in (expected, q.float(), blocks.float(), *arguments))
        paged_kernel.paged_attention(*arrays, LAYER)
    from stages.more_kernel.triton_kernel import paged_attention

    out = torch.empty(q.shape, dtype=dtype, device=device)
    paged_attention(out, *(each.to(device) for each in (q, blocks, *arguments)), layer=LAYER)
    return out.float().cpu(), expected


@pytest.mark.parametrize("context_len", [1, 3, 5])
def test_one_block(device, context_len):
    torch.testing.assert_close(*attend_with_both(device, [context_len], [[3]]), rtol=1e-5, atol=1e-5)


def test_each_program_follows_its_block_table_to_its_own_end(device):
    out, expected = attend_with_both(device, [13, 2, 10], [[7, 0, 4], [2], [1, 6]])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (3, 12)])
def test_sizes_need_not_be_powers_of_two(device, group, head_dim):
    out, expected = attend_with_both(device, [7], [[5, 2]], group, head_dim)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_once(device):
    out, expected = attend_with_both(device, [7], [[5, 2]], dtype=torch.bfloat16)
    torch.testing.assert_close(out, expected.bfloat16().float(), rtol=1e-2, atol=1e-2)
