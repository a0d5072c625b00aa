"""Steps of few rows: a model whose layers are one compiled function (decode_step.py)."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...llama import LlamaForCausalLM
from .attention import PART, PLACES, Pool
from .decode_step import decode_step
from .matmul import type_of
from .packed import PackedLinear
from .phases import FEW, PHASES, SPLIT
from .plan import like_of
from .step_parts import Model, Room, Sizes, Step, Weights
from .team import STRIDE, Helpers

if TYPE_CHECKING:
    from ...engine.kv_cache import KVCache

NO_STEP = Step(*[0] * len(Step._fields))
MAX_ROWS = 64  # more of them are a step of many rows


class FewRows:
    """A model's decode step for one to max_rows sequences: FEW, or MAX_ROWS if its linear layers are packed."""

    def __init__(self, model: LlamaForCausalLM, kv_cache: "KVCache", max_model_len: int) -> None:
        self._model, self._blocks = model, kv_cache.blocks  # what addresses are taken of must live as long
        self._max_model_len = max_model_len
        self.max_rows = MAX_ROWS if isinstance(model.lm_head, PackedLinear) else FEW
        config, workers = model.config, torch.get_num_threads()
        _, num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.blocks.shape
        self._shape = Pool(num_layers, block_size, num_kv_heads, head_dim)
        heads = config.num_attention_heads
        self._sizes = Sizes(
            workers, config.hidden_size, heads, heads // num_kv_heads, config.intermediate_size, config.vocab_size
        )
        self._kept: list[Tensor] = []  # a helper may look at some of it after the last step
        self._owned = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]  # if it gets others
        weights = self._take_weights()
        room = self._make_room(-(-max_model_len // SPLIT))
        dtype, eps = kv_cache.blocks.dtype, np.float32(config.rms_norm_eps)
        self._fixed = Model(like_of(dtype), like_of(type_of(dtype)), self._shape, self._sizes, weights, room, eps)
        self._helpers = Helpers(workers - 1, partial(help_with, self._fixed, self._kept))

    def run(
        self, token_ids: list[int], block_tables: list[list[int]], context_lens: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute a token of each sequence, which its context includes.

        Returns hidden [rows, hidden_size] and logits float32 [rows, vocab_size].
        """
        rows = len(token_ids)
        assert 1 <= rows <= self.max_rows, f"{rows} rows, at most {self.max_rows}"
        self._check(token_ids, block_tables, context_lens)
        width = max(len(table) for table in block_tables)
        numbers = token_ids + context_lens
        for table in block_tables:
            numbers += table + [0] * (width - len(table))
        given = torch.tensor(numbers, dtype=torch.int64)  # [rows + rows + rows * width]
        hidden = torch.empty(rows, self._sizes.hidden_size, dtype=self._blocks.dtype)
        logits = torch.empty(rows, self._sizes.vocab_size)
        at, splits = given.data_ptr(), -(-max(context_lens) // SPLIT)
        step = Step(
            *(self._helpers.call(), at, at + 16 * rows, width, at + 8 * rows, rows, splits),
            *(hidden.data_ptr(), logits.data_ptr()),
        )
        decode_step(0, step.number - 1, step, self._fixed)
        return hidden, logits

    def _check(self, token_ids: list[int], block_tables: list[list[int]], context_lens: list[int]) -> None:
        """Assert that all numbers are in range: a kernel would read, and write, out of bounds."""
        size, longest = self._sizes.vocab_size, max(context_lens)
        assert min(token_ids) >= 0 and max(token_ids) < size, f"token ids {token_ids}, of {size}"
        assert longest <= self._max_model_len, f"a context of {longest} tokens, at most {self._max_model_len}"
        for table, length in zip(block_tables, context_lens, strict=True):
            slots = len(table) * self._shape.block_size
            assert 1 <= length <= slots, f"a context of {length} tokens in {slots} slots"

    def _take_weights(self) -> Weights:
        model, addresses, packed, biases = plain_model(self._model), [], [], []
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
            addresses.append([linear.weight.data_ptr() for linear in linears])
            packed.append(list(map(packed_address, linears)))
            biases.append([0 if linear.bias is None else linear.bias.data_ptr() for linear in linears])
        norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        return Weights(
            matrices=self._keep(torch.tensor(addresses)),
            packed=self._keep(torch.tensor(packed)),
            biases=self._keep(torch.tensor(biases)),
            no_bias=self._keep(self._blocks.new_zeros(self._most_outputs())),
            norms=self._keep(torch.stack([norm.weight.detach().float() for norm in norms])),
            head_norms=self._take_head_norms(model),
            last_norm=self._keep(model.norm.weight.detach().float()),
            embedding=model.embed_tokens.weight.data_ptr(),
            head=self._model.lm_head.weight.data_ptr(),
            packed_head=packed_address(self._model.lm_head),
            cos=model.rotary_emb.cos.data_ptr(),
            sin=model.rotary_emb.sin.data_ptr(),
            pool=self._blocks.data_ptr(),
        )

    def _take_head_norms(self, model: Any) -> int:
        """Return their address, or 0 if the model has none."""
        if not self._model.config.qk_norm:
            return 0
        norms = [norm for layer in model.layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
        return self._keep(torch.stack([norm.weight.detach().float() for norm in norms]))

    def _make_room(self, splits: int) -> Room:
        workers, size, heads, group, inner, _ = self._sizes
        num_layers, _, num_kv_heads, head_dim = self._shape
        rows, dtype = self.max_rows, type_of(self._blocks.dtype)
        parts = rows * splits * heads  # of attention

        def numbers(count: int, dtype: torch.dtype = torch.float32) -> int:
            return self._keep(torch.empty(count, dtype=dtype))

        return Room(
            x=numbers(rows * size),
            qkv=numbers(rows * (heads + 2 * num_kv_heads) * head_dim),
            y=numbers(rows * max(size, 2 * inner)),
            act=numbers(rows * inner, dtype),
            out=numbers(parts * head_dim),
            peaks=numbers(parts),
            sums=numbers(parts),
            own=numbers(workers * rows * max(size, heads * head_dim), dtype),
            heads=numbers(workers * (group + 1) * head_dim),
            scores=numbers(workers * 4 * PART),
            places=self._keep(torch.empty(workers * PLACES, dtype=torch.int64)),
            counters=self._keep(torch.zeros((num_layers * PHASES + 1) * STRIDE, dtype=torch.int64)),
            mailbox=self._keep(torch.zeros(len(Step._fields), dtype=torch.int64)),
        )

    def _most_outputs(self) -> int:
        config = self._model.config
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        return max(heads * config.head_dim, config.hidden_size, 2 * config.intermediate_size, config.vocab_size)

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def plain_model(model: LlamaForCausalLM) -> Any:
    """Return its layers, also if ManyRows has taken their place."""
    return getattr(model.model, "plain", model.model)


def packed_address(linear: Any) -> int:
    return linear.packed.data_ptr() if isinstance(linear, PackedLinear) else 0


def help_with(fixed: Model, kept: list[Tensor], worker: int, seen: int) -> int:
    """`kept` lives as long as a helper that works with its addresses."""
    return decode_step(worker, seen, NO_STEP, fixed)
