"""Int8Blocks: keys and values in 8 bits, in the layout that CPU kernels read.

    number = scale * q     q from -127 to 127; for each token and KV head, the key has a float32 scale and the value
                           has another one: the largest |number| / 127

A block is a contiguous run of bytes, [num_layers, num_kv_heads, block_size * (2 * head_dim + 8)], which holds for each
layer and KV head:

    keys     int8 [block_size / 4, head_dim / 4, 4 tokens, 4 numbers]
    values   int8 [block_size / 4, head_dim, 4 tokens]
    scales   float32 [2, block_size], of keys and of values

Four tokens are side by side because a processor multiplies bytes in groups of four: four numbers of a key by four
numbers of a query, or a number of each of four values by the weights of their tokens. The kernels are in
../backends/cpu/int8_attention.py.
"""

import torch
from torch import Tensor

from ..llama import ModelConfig

TOKENS_PER_QUAD = 4  # tokens that are side by side


def int8_block_shape(model: ModelConfig, block_size: int) -> tuple[int, ...]:
    """Return the shape of a block in bytes. Raise ValueError if kernels cannot read such blocks."""
    if block_size % TOKENS_PER_QUAD or model.head_dim % 16:
        needs = f"a block_size that is a multiple of {TOKENS_PER_QUAD} and a head_dim that is a multiple of 16"
        raise ValueError(f"kv_cache_dtype 'int8' needs {needs}, got {block_size} and {model.head_dim}")
    return model.num_hidden_layers, model.num_key_value_heads, block_size * (2 * model.head_dim + 8)


class Int8Blocks:
    """Views of a uint8 pool [num_blocks, *int8_block_shape()] that quantize the keys and values written to it."""

    def __init__(self, blocks: Tensor, block_size: int, head_dim: int) -> None:
        keys, values, scales = blocks.split([block_size * head_dim, block_size * head_dim, block_size * 8], -1)
        quads, self._block_size = block_size // TOKENS_PER_QUAD, block_size
        self._keys = keys.view(torch.int8).unflatten(-1, (quads, head_dim // 4, TOKENS_PER_QUAD, 4))
        self._values = values.view(torch.int8).unflatten(-1, (quads, head_dim, TOKENS_PER_QUAD))
        self._scales = scales.view(torch.float32).unflatten(-1, (2, block_size))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of tokens in `slots`, int64 [num_tokens]. Return them as read() would: rounded.

        k, v [num_tokens, num_kv_heads, head_dim]
        """
        block, offset = slots // self._block_size, slots % self._block_size
        quad, token = offset // TOKENS_PER_QUAD, offset % TOKENS_PER_QUAD
        both = torch.stack((k, v), 2).float()  # [num_tokens, num_kv_heads, 2, head_dim]
        scales = both.abs().amax(-1) / 127  # [num_tokens, num_kv_heads, 2]
        divisors = torch.where(scales == 0, 1, scales)[..., None]
        integers = (both / divisors).round_()
        keys, values = integers.to(torch.int8).unbind(2)
        self._keys[:, layer][block, :, quad, :, token] = keys.unflatten(-1, (-1, 4))
        self._values[:, layer][block, :, quad, :, token] = values
        self._scales[:, layer][block, :, :, offset] = scales
        k, v = (integers * scales[..., None]).to(k.dtype).unbind(2)
        return k, v

    def read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of these blocks, one block after another.

        blocks int64 [..., num_blocks] -> [..., num_blocks * block_size, num_kv_heads, head_dim] each
        """
        keys, values, scales = (
            part[:, layer].index_select(0, blocks.flatten()) for part in (self._keys, self._values, self._scales)
        )
        k = keys.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(1, 2)  # [all blocks, block_size, num_kv_heads, head_dim]
        v = values.permute(0, 2, 4, 1, 3).flatten(1, 2)
        k_scales, v_scales = scales.permute(2, 0, 3, 1)[..., None]  # [all blocks, block_size, num_kv_heads, 1] each
        numbers = [(integers * scale).to(dtype) for integers, scale in ((k, k_scales), (v, v_scales))]
        k, v = (each.contiguous().unflatten(0, blocks.shape).flatten(-4, -3) for each in numbers)
        return k, v
