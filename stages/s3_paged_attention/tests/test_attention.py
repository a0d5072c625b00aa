"""Attention over tiles: any mixture of prompts, chunks and decodes, on blocks that lie anywhere."""

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from .. import attention as attention_module
from ..attention import MAX_QUERIES, AttentionMetadata, PagedAttention
from ..kv_cache import KVCache
from ..llama import LlamaForCausalLM, ModelConfig
from ..model_runner import ModelRunner
from ..online_softmax import Part, attend_part
from .helpers import attend_without_cache, make_sequence

HEAD_DIM = 8
BLOCK_SIZE = 4
HEADS = {"every head has its own": (4, 4), "pairs share": (4, 2), "all share one": (4, 1), "one head": (1, 1)}
PROMPTS_AND_DECODES = [(0, 7), (12, 1), (0, 1), (3, 1), (0, 2 * MAX_QUERIES + 3), (70, 1)]
CHUNKS = [(9, 6), (8, 4), (40, MAX_QUERIES + 1)]


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
        assert out.dtype == dtype, f"q, k and v are {dtype}"
        return out.float().cpu()

    def check(self, tile_size: int, tolerance: float = 1e-5, **options) -> None:
        """Raise AssertionError with the first sequence and token whose attention is wrong."""
        out, expected = self.attend(tile_size, **options), self.expected()
        is_wrong = ~out.isclose(expected, rtol=10 * tolerance, atol=tolerance).flatten(1).all(1)
        ends = [*accumulate(now for _, now in self.sizes)]
        for i, ((before, now), end) in enumerate(zip(self.sizes, ends, strict=True)):
            if wrong := is_wrong[end - now : end].nonzero().flatten().tolist():
                off = (out - expected)[end - now + wrong[0]].abs().max()
                doing = f"decodes token {before}" if now == 1 else f"computes tokens {before} to {before + now - 1}"
                attention = f"attention of token {before + wrong[0]} to all tokens up to itself"
                raise AssertionError(f"sequence {i} of {len(ends)} {doing}: {attention} is off by {off:.2g}")


# The same result as without a cache


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("size", [(0, 1), (0, 7), (6, 1), (8, 1)], ids=str)
@pytest.mark.parametrize("tile_size", [4, 8, 4096])
def test_prompt_and_newest_token_attend_to_their_past(heads, size, tile_size):
    Batch([size], heads=heads).check(tile_size)


@pytest.mark.parametrize("size", [(5, 4), (8, 8)], ids=str)
@pytest.mark.parametrize("tile_size", [4, 8, 4096])
def test_chunk_of_a_prompt_attends_to_its_past(size, tile_size):
    """Stage 4 will compute prompts in chunks."""
    Batch([size]).check(tile_size)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("tile_size", [1, 16, 200, 4096])
def test_prompts_and_decodes_share_a_step(block_size, tile_size):
    """A tile may be smaller than a block, or larger than all contexts together."""
    Batch(PROMPTS_AND_DECODES, block_size).check(tile_size)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("tile_size", [1, 16, 200, 4096])
def test_chunks_share_a_step_with_prompts_and_decodes(block_size, tile_size):
    Batch([*PROMPTS_AND_DECODES, *CHUNKS], block_size).check(tile_size)


def test_decode_beside_a_prompt_is_one_row_of_one_query(monkeypatch):
    """Rows of a batch are as long as the longest of them, so decodes have batches of their own."""
    shapes: list[tuple[int, int]] = []

    def attend(q: Tensor, *others: Tensor) -> Part:
        shapes.append((q.shape[0], q.shape[-2]))  # rows, queries of each
        return attend_part(q, *others)

    monkeypatch.setattr(attention_module, "attend_part", attend)
    Batch([(0, 7), (3, 1), (5, 1)], block_size=8).check(4096)
    assert shapes[-2:] == [(2, 1), (1, 7)]


@pytest.mark.parametrize("seed", range(5))
def test_random_prompts_and_decodes_share_a_step(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([(0, rng.randint(1, 30)), (rng.randint(1, 30), 1)]) for _ in range(12)]
    Batch(sizes, block_size=rng.choice([1, 4, 5]), seed=seed).check(tile_size=rng.choice([4, 64, 500]))


@pytest.mark.parametrize("seed", range(5))
def test_random_chunks_share_a_step(seed):
    rng = random.Random(seed)
    sizes = [(rng.randrange(30), rng.randint(1, 30)) for _ in range(12)]
    Batch(sizes, block_size=rng.choice([1, 4, 5]), seed=seed).check(tile_size=rng.choice([4, 64, 500]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    """The parts are float32 until they are merged, so the result is attention in float32, rounded at the end."""
    batch = Batch([(0, 7), (30, 1), (200, 1)])
    inputs = [[x.to(dtype).float() for x in qkv] for qkv in batch.qkv()]
    exact = [attend_without_cache(0, *qkv)[before:] for qkv, (before, _) in zip(inputs, batch.sizes, strict=True)]
    share = (batch.attend(8, dtype) == torch.cat(exact).to(dtype).float()).float().mean().item()
    assert share > 0.95, f"only {share:.0%} of the numbers are those of float32, rounded once"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("tile_size", [16, 4096])
def test_any_mixture_attends_on_a_gpu(tile_size):
    Batch([*PROMPTS_AND_DECODES, *CHUNKS]).check(tile_size, tolerance=1e-4, device="cuda")


def test_layers_do_not_see_each_other():
    attention = PagedAttention(make_cache(3, num_layers=2), 4)
    layers = [random_qkv(6, seed=1), random_qkv(6, seed=2)]
    attend = attention.plan(step([([2, 0], 0, 5)]))
    for layer, qkv in enumerate(layers):
        attend(layer, *(x[:5] for x in qkv))
    attend = attention.plan(step([([2, 0], 5, 1)]))
    for layer, qkv in enumerate(layers):
        off = (attend(layer, *(x[5:] for x in qkv)) - attend_without_cache(layer, *qkv)[5:]).abs().max().item()
        assert off < 1e-5, f"layer {layer} attends to keys or values that are not its own"


# The pool


def test_step_writes_its_own_slots_and_clears_the_rest_of_new_blocks():
    """5 tokens fill block 2 and the first slot of block 0. Another sequence adds one to block 3, which is not new."""
    cache = make_cache(4)
    cache.blocks[3] = 5.0
    q, k, v = random_qkv(6)
    PagedAttention(cache, 4).plan(step([([2, 0], 0, 5), ([3], 1, 1)]))(0, q, k, v)
    for i, (block, offset) in enumerate([(2, 0), (2, 1), (2, 2), (2, 3), (0, 0), (3, 1)]):
        stored = cache.blocks[block, 0, :, offset]
        if not stored.equal(torch.stack((k[i], v[i]))):
            raise AssertionError(f"the keys and values of token {i} are not in block {block}, offset {offset}")
    if not (cache.blocks[0, 0, :, 1:] == 0).all():
        raise AssertionError("block 0 is new: its slots without a token are zeros")
    if not ((cache.blocks[3, 0, :, [0, 2, 3]] == 5).all() and cache.blocks[1].isnan().all()):
        raise AssertionError("a step writes to the slots of its own tokens only, and leaves the other blocks alone")


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
    prompt, short, decode, last = step.slot_mapping.split([6, 3, 1, 1])
    assert prompt.tolist() == [12, 13, 14, 15, 0, 1], "the slots of tokens 0 to 5 of a sequence in blocks 3 and 0"
    assert short.tolist() == [4, 5, 6], "the slots of tokens 0 to 2 of a sequence in block 1"
    assert decode.tolist() == [20], "the slot of token 8 of a sequence in blocks 2, 7 and 5"
    assert last.tolist() == [19], "the slot of token 7 of a sequence in blocks 1 and 4"
    assert step.query_start_loc == [0, 6, 9, 10, 11], "where the tokens of each sequence start, and the end of the step"
    assert step.context_lens == [6, 3, 9, 8], "tokens that each sequence has after this step"


def test_short_block_tables_continue_with_blocks_of_their_own(model):
    """Nothing but its own memory is read past the end of a sequence."""
    tables = [[3, 0], [1], [7, 2, 5]]
    step = metadata(model, (tables[0], 0, 6), (tables[1], 0, 3), (tables[2], 8, 1))
    for table, row in zip(tables, step.block_tables.tolist(), strict=True):
        assert row[: len(table)] == table, f"the row of a sequence in blocks {table} begins with its table"
        assert {*row} == {*table}, f"the row of a sequence in blocks {table} continues with these blocks only"


@pytest.mark.parametrize(
    "batch, new",
    [
        ([([3, 0], 0, 6)], [3, 0]),
        ([([8, 4], 4, 1)], [4]),
        ([([6, 1], 5, 1)], []),
        ([([5, 2], 7, 1)], []),
        ([([3, 0], 0, 6), ([8, 4], 4, 1), ([6, 1], 5, 1)], [3, 0, 4]),
    ],
    ids=str,
)
def test_new_blocks_are_those_whose_first_slot_is_written(model, batch, new):
    """Each sequence has its blocks (of 4 slots), the tokens computed before, and those of this step."""
    new_blocks = metadata(model, *batch).new_blocks.tolist()
    assert sorted(new_blocks) == sorted(new), "a block is new if this step writes its first slot"


def test_chunk_has_the_blocks_that_it_reaches(model):
    """Sequences with 3 and 4 blocks compute chunks that end in the first one, and in the third."""
    step = metadata(model, ([4, 6, 1], 0, 2), ([7, 2, 5, 9], 2, 8))
    assert step.block_tables.tolist() == [[4, 4, 4], [7, 2, 5]] and step.new_blocks.tolist() == [4, 2, 5]
