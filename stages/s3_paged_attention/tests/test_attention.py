"""Attention over tiles: any mixture of prompts, chunks and decodes, on blocks that lie anywhere."""

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from ..attention import MAX_QUERIES, AttentionMetadata, PagedAttention
from ..kv_cache import KVCache
from ..llama import LlamaForCausalLM, ModelConfig
from ..model_runner import ModelRunner
from .helpers import attend_without_cache, make_sequence

HEAD_DIM = 8
BLOCK_SIZE = 4
HEADS = {"every head has its own": (4, 4), "pairs share": (4, 2), "all share one": (4, 1), "one head": (1, 1)}
MIXTURE = [(0, 7), (12, 1), (9, 6), (0, 1), (3, 1), (8, 4), (0, 2 * MAX_QUERIES + 3), (40, MAX_QUERIES + 1)]


def make_cache(num_blocks: int, num_layers: int = 1, num_kv_heads: int = 2, **options) -> KVCache:
    """Return a pool of NaN: a slot that is read before it is written would show."""
    config = ModelConfig(320, 32, 48, num_layers, 4, num_kv_heads, HEAD_DIM)
    settings = {"block_size": BLOCK_SIZE, "dtype": torch.float32, "device": torch.device("cpu")} | options
    cache = KVCache(config, num_blocks, **settings)
    cache.blocks.fill_(float("nan"))
    return cache


def random_qkv(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in heads]


def step(
    members: list[tuple[list[int], int, int]], block_size: int = BLOCK_SIZE, device: str = "cpu"
) -> AttentionMetadata:
    """Return a step of sequences, each with its block table, tokens computed before and tokens of this step."""
    width = max(len(table) for table, _, _ in members)
    positions = [(table, i) for table, before, now in members for i in range(before, before + now)]
    slots = [table[i // block_size] * block_size + i % block_size for table, i in positions]
    new_blocks = [table[i // block_size] for table, i in positions if i % block_size == 0]
    return AttentionMetadata(
        query_start_loc=[0, *accumulate(now for _, _, now in members)],
        context_lens=[before + now for _, before, now in members],
        block_tables=torch.tensor([t + t[-1:] * (width - len(t)) for t, _, _ in members], device=device),
        slot_mapping=torch.tensor(slots, device=device),
        new_blocks=torch.tensor(new_blocks, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True)
class Batch:
    """Sequences, each with tokens computed before and tokens of this step. Their blocks are scattered over a pool."""

    sizes: list[tuple[int, int]]
    block_size: int = BLOCK_SIZE
    heads: tuple[int, int] = (4, 2)  # heads, KV heads
    seed: int = 0

    def qkv(self) -> list[list[Tensor]]:
        """Return q, k and v of all tokens of each sequence."""
        lengths = [before + now for before, now in self.sizes]
        return [random_qkv(n, *self.heads, seed=100 * self.seed + i) for i, n in enumerate(lengths)]

    def expected(self) -> Tensor:
        """Return the attention [num_tokens, num_heads, head_dim] of each sequence by itself, without a cache."""
        outs = [attend_without_cache(0, *qkv) for qkv in self.qkv()]
        return torch.cat([out[before:] for out, (before, _) in zip(outs, self.sizes, strict=True)])

    def attend(self, tile_size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Return the attention of two steps: the earlier tokens, and then those of the step."""
        counts = [-(-(before + now) // self.block_size) for before, now in self.sizes]
        blocks = random.Random(self.seed).sample(range(sum(counts) + 3), sum(counts))
        tables = [[blocks.pop() for _ in range(count)] for count in counts]
        options = {"block_size": self.block_size, "dtype": dtype, "device": torch.device(device)}
        attention = PagedAttention(make_cache(sum(counts) + 3, num_kv_heads=self.heads[1], **options), tile_size)
        earlier = [(table, 0, before) for table, (before, _) in zip(tables, self.sizes, strict=True) if before]
        now = [(table, *size) for table, size in zip(tables, self.sizes, strict=True)]
        out = torch.empty(0)
        for members, is_now in ((earlier, False), (now, True)):
            if members:
                pairs = zip(self.qkv(), self.sizes, strict=True)
                tokens = [[x[before:] if is_now else x[:before] for x in qkv] for qkv, (before, _) in pairs]
                attend = attention.plan(step(members, self.block_size, device))
                out = attend(0, *(torch.cat(xs).to(device, dtype) for xs in zip(*tokens, strict=True)))
        assert out.dtype == dtype
        return out.float().cpu()


# The same result as without a cache


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("size", [(0, 1), (0, 7), (6, 1), (5, 4), (8, 8)], ids=str)
@pytest.mark.parametrize("tile_size", [4, 8, 4096])
def test_prompt_chunk_and_newest_token_attend_to_their_past(heads, size, tile_size):
    batch = Batch([size], heads=heads)
    torch.testing.assert_close(batch.attend(tile_size), batch.expected())


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("tile_size", [1, 16, 200, 4096])
def test_any_mixture_of_sequences_attends(block_size, tile_size):
    """Prompts, chunks and decodes, of any lengths. A tile may be smaller than a block, or larger than all contexts."""
    batch = Batch(MIXTURE, block_size)
    torch.testing.assert_close(batch.attend(tile_size), batch.expected())


@pytest.mark.parametrize("seed", range(5))
def test_random_mixture_attends(seed):
    rng = random.Random(seed)
    sizes = [(rng.choice([0, rng.randrange(30)]), rng.choice([1, 1, rng.randint(1, 30)])) for _ in range(12)]
    batch = Batch(sizes, block_size=rng.choice([1, 4, 5]), seed=seed)
    torch.testing.assert_close(batch.attend(tile_size=rng.choice([4, 64, 500])), batch.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    batch = Batch([(0, 7), (30, 1)])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(batch.attend(8, dtype), batch.expected(), atol=4 * eps, rtol=4 * eps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("tile_size", [16, 4096])
def test_any_mixture_attends_on_a_gpu(tile_size):
    batch = Batch(MIXTURE)
    torch.testing.assert_close(batch.attend(tile_size, device="cuda"), batch.expected(), atol=1e-4, rtol=1e-4)


def test_layers_do_not_see_each_other():
    attention = PagedAttention(make_cache(3, num_layers=2), 4)
    layers = [random_qkv(6, seed=1), random_qkv(6, seed=2)]
    attend = attention.plan(step([([2, 0], 0, 5)]))
    for layer, qkv in enumerate(layers):
        attend(layer, *(x[:5] for x in qkv))
    attend = attention.plan(step([([2, 0], 5, 1)]))
    for layer, qkv in enumerate(layers):
        out = attend(layer, *(x[5:] for x in qkv))
        torch.testing.assert_close(out, attend_without_cache(layer, *qkv)[5:])


# The pool


def test_step_writes_its_own_slots_and_clears_the_rest_of_new_blocks():
    """5 tokens fill block 2 and the first slot of block 0. Another sequence adds one to block 3, which is not new."""
    cache = make_cache(4)
    cache.blocks[3] = 5.0
    q, k, v = random_qkv(6)
    PagedAttention(cache, 4).plan(step([([2, 0], 0, 5), ([3], 1, 1)]))(0, q, k, v)
    blocks, offsets = [2, 2, 2, 2, 0, 3], [0, 1, 2, 3, 0, 1]
    assert torch.equal(cache.blocks[blocks, 0, 0, offsets], k) and torch.equal(cache.blocks[blocks, 0, 1, offsets], v)
    assert (cache.blocks[0, 0, :, 1:] == 0).all() and (cache.blocks[3, 0, :, [0, 2, 3]] == 5).all()
    assert cache.blocks[1].isnan().all()


def test_keys_of_an_earlier_holder_are_not_seen():
    attention = PagedAttention(make_cache(3), 4)
    attention.plan(step([([0, 1, 2], 0, 12)]))(0, *(1e30 * x for x in random_qkv(12)))
    qkv = random_qkv(6, seed=3)
    attend = attention.plan(step([([2, 0], 0, 6)]))
    torch.testing.assert_close(attend(0, *qkv), attend_without_cache(0, *qkv))


def test_rows_of_blocks_are_read_end_to_end():
    cache = make_cache(6, num_layers=2)
    _, k, v = random_qkv(12)
    cache.write(1, step([([5, 0, 3], 0, 12)]).slot_mapping, k, v)
    keys, values = cache.read(1, torch.tensor([[5, 0], [3, 5]]))
    assert torch.equal(keys, torch.stack((k[:8], torch.cat((k[8:], k[:4])))))
    assert torch.equal(values, torch.stack((v[:8], torch.cat((v[8:], v[:4])))))


# The metadata of a step


class Recorder(PagedAttention):
    """A backend that keeps the metadata of the last step. Its attention is zeros."""

    def plan(self, step: AttentionMetadata):
        self.step = step
        return lambda layer, q, k, v: torch.zeros_like(q)


def metadata(model: LlamaForCausalLM, *batch: tuple[list[int], int, int]) -> AttentionMetadata:
    """Run sequences, each with its block table, tokens computed before and tokens of this step."""
    attention, scheduled = Recorder(make_cache(1), 4), []
    for table, before, now in batch:
        seq = make_sequence(str(table), before + now, max_tokens=9)
        seq.block_table, seq.num_computed_tokens = table, before
        scheduled.append((seq, now))
    ModelRunner(model, attention, BLOCK_SIZE, torch.device("cpu")).run(scheduled)
    return attention.step


def test_tokens_go_where_the_block_table_says(model):
    """Block 3 is slots 12 to 15, block 0 slots 0 to 3. Token 8 begins a block, token 7 ends one."""
    step = metadata(model, ([3, 0], 0, 6), ([1], 0, 3), ([2, 7, 5], 8, 1), ([1, 4], 7, 1))
    assert step.slot_mapping.tolist() == [12, 13, 14, 15, 0, 1] + [4, 5, 6] + [20] + [19]
    assert (step.query_start_loc, step.context_lens) == ([0, 6, 9, 10, 11], [6, 3, 9, 8])


def test_block_tables_are_padded_with_their_own_last_block(model):
    """No other sequence's memory is read behind the end of a text."""
    step = metadata(model, ([3, 0], 0, 6), ([1], 0, 3), ([7, 2, 5], 8, 1))
    assert step.block_tables.tolist() == [[3, 0, 0], [1, 1, 1], [7, 2, 5]]


def test_blocks_of_later_chunks_are_left_out(model):
    """The first sequence has 3 blocks, and computes 2 tokens."""
    step = metadata(model, ([4, 6, 1], 0, 2), ([3, 5], 4, 1))
    assert step.block_tables.tolist() == [[4, 4], [3, 5]]


def test_new_blocks_are_those_whose_first_slot_is_written(model):
    step = metadata(model, ([3, 0], 0, 6), ([7, 2, 5, 9], 2, 8), ([8, 4], 4, 1), ([6, 1], 5, 1))
    assert step.new_blocks.tolist() == [3, 0, 2, 5, 4]
    assert metadata(model, ([6, 1], 5, 1)).new_blocks.tolist() == []
