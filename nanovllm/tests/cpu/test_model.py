"""Steps of many rows against plain operations: random models and sizes, any mix of prompts, chunks and decodes."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from ...backends.cpu.attention import SPLIT
from ...backends.cpu.elementwise import add_and_norm
from ...backends.cpu.matmul import PackedEmbedding, PackedLinear, pack, why_not_packed
from ...backends.cpu.model import swap_in, swap_out
from ...backends.cpu.sampler import CHUNK, sample_rows
from ...backends.cpu.step_attention import JOB, MERGE, jobs_of
from ...backends.cpu.vectors import like_of
from ...backends.torch.attention import PagedAttention
from ...backends.torch.model_runner import ModelRunner
from ...backends.torch.sampler import SamplingRow, sample
from ...engine.kv_cache import KVCache
from ...engine.sampling_params import SamplingParams
from ...llama import LlamaForCausalLM, ModelConfig

FULL = pytest.mark.full
ROUNDINGS = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of numbers around 1
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=FULL), pytest.param(torch.float16, marks=FULL)]
CPU = torch.device("cpu")
LONGEST = 1300  # tokens of a sequence: three splits of a decode


def random_model(rng: random.Random, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a model with odd sizes, groups of 1 to 8 heads, and random features."""
    kvs, group, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 5, 8]), rng.choice([4, 6, 16, 20, 64, 80])
    config = ModelConfig(
        vocab_size=50,
        hidden_size=rng.choice([7, 34, 64, 57]),
        intermediate_size=rng.choice([5, 32, 96]),
        num_hidden_layers=2,
        num_attention_heads=kvs * group,
        num_key_value_heads=kvs,
        head_dim=head_dim,
        max_position_embeddings=LONGEST,
        qk_norm=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
        attention_output_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            weight.copy_(torch.rand_like(weight) + 0.5)
    return model.to(dtype)


def packable_model() -> LlamaForCausalLM:
    seeds = map(random.Random, range(100))
    return next(model for seed in seeds if why_not_packed(model := random_model(seed, torch.float32)) is None)


class Driver:
    """Sequences that grow by given steps, in a pool of their own."""

    def __init__(self, model, block_size, dtype, num_seqs):
        blocks_each = -(-LONGEST // block_size)
        self.kv_cache = KVCache(model.config, num_seqs * blocks_each + 1, block_size, dtype, CPU)
        self.kv_cache.blocks.fill_(torch.nan)  # unwritten slots must not be read
        rng = random.Random(5)
        blocks = rng.sample(range(num_seqs * blocks_each + 1), num_seqs * blocks_each)
        tables = [blocks[i * blocks_each : (i + 1) * blocks_each] for i in range(num_seqs)]
        ids = [[rng.randrange(50) for _ in range(LONGEST)] for _ in tables]
        self.seqs = [
            SimpleNamespace(num_computed_tokens=0, token_ids=token_ids, block_table=table)
            for token_ids, table in zip(ids, tables, strict=True)
        ]

    def run(self, model, attention, steps):
        """Return the logits of all tokens."""
        runner, logits = ModelRunner(model, attention, self.kv_cache.block_size, CPU), []
        for step in steps:
            batch = [(seq, count) for seq, count in zip(self.seqs, step, strict=True) if count]
            with torch.inference_mode():
                logits.append(model.compute_logits(runner.compute(batch)[0]).float())
            for seq, count in batch:
                seq.num_computed_tokens += count
        return torch.cat(logits)


def random_steps(rng: random.Random, num_seqs: int, num_steps: int) -> list[list[int]]:
    """Return the number of tokens of each sequence in each step; with 0 it does not run."""
    lengths, steps = [0] * num_seqs, []
    for _ in range(num_steps):
        step = [rng.choice([1, 1, 1, 2, 40, 150, 0]) for _ in lengths]
        step = [count if length + count <= LONGEST else 0 for count, length in zip(step, lengths, strict=True)]
        if any(step):
            lengths = [length + count for length, count in zip(lengths, step, strict=True)]
            steps.append(step)
    return steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("workers", [1, 2])
def test_any_mix_of_tokens_gives_the_plain_logits(workers, rounds, dtype, compiled):
    compiled(dtype)
    torch.manual_seed(workers)
    rng = random.Random(workers)
    for _ in range(rounds):
        model, block_size, num_seqs = random_model(rng, dtype), rng.choice([1, 4, 5, 16]), rng.choice([1, 3, 6])
        steps = random_steps(rng, num_seqs, 6)
        steps[:0] = [[min(700, LONGEST - sum(step[i] for step in steps)) for i in range(num_seqs)]]
        plain = Driver(model, block_size, dtype, num_seqs)
        expected = plain.run(model, PagedAttention(plain.kv_cache, 64), steps)
        fast = Driver(model, block_size, dtype, num_seqs)
        attention = swap_in(model, fast.kv_cache, workers)
        logits = fast.run(model, attention, steps)
        swap_out(model)
        assert_near(logits, expected, ROUNDINGS[dtype])
        both = fast.kv_cache.blocks.float(), plain.kv_cache.blocks.float()
        assert (both[0].isnan() == both[1].isnan()).all()  # the same slots are written
        assert_near(*(blocks.nan_to_num() for blocks in both), ROUNDINGS[dtype])


def assert_near(result: torch.Tensor, expected: torch.Tensor, rounding: float) -> None:
    """Assert that errors are at most a few roundings of the largest number."""
    assert result.shape == expected.shape and result.isfinite().all()
    assert (result - expected).abs().max() <= 4 * rounding * max(1, expected.abs().max())


def test_the_attention_backend_serves_a_plain_model_too(compiled):
    """A plain model calls it with heads that are rotated already."""
    compiled(torch.float32)
    torch.manual_seed(0)
    rng = random.Random(0)
    model, steps = random_model(rng, torch.float32), [[30, 1, 7], [1, 1, 1], [600, 20, 1], [1, 1, 1]]
    plain, fast = (Driver(model, 5, torch.float32, 3) for _ in range(2))
    expected = plain.run(model, PagedAttention(plain.kv_cache, 64), steps)
    attention = swap_in(model, fast.kv_cache, 2)
    swap_out(model)
    assert_near(fast.run(model, attention, steps), expected, ROUNDINGS[torch.float32])


@pytest.mark.parametrize("tied", [False, True])
def test_swap_out_restores_every_module_and_weight(tied):
    model = packable_model()
    if tied:
        model.config = replace(model.config, tie_word_embeddings=True)
        model.tie_weights()
    before = {name: id(module) for name, module in model.named_modules()}
    weights = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    kv_cache = KVCache(model.config, 3, 4, torch.float32, CPU)
    swap_in(model, kv_cache, 1, packs=True)
    assert isinstance(model.lm_head, PackedLinear)
    swap_out(model)
    assert {name: id(module) for name, module in model.named_modules()} == before
    for name, weight in model.named_parameters():
        address, expected = weights[name]
        assert weight.data_ptr() == address and torch.equal(weight, expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [5, 64, 77])
def test_tied_embedding_reads_the_packed_weight_of_the_head(vocab_size, dtype):
    embedding, head = nn.Embedding(vocab_size, 18, dtype=dtype), nn.Linear(18, vocab_size, bias=False, dtype=dtype)
    head.weight = embedding.weight.requires_grad_(False)
    input_ids = torch.tensor([vocab_size - 1, 0, 3, 3, vocab_size // 2])
    expected = embedding(input_ids)
    packed = PackedEmbedding(embedding, PackedLinear(head))
    assert torch.equal(packed(input_ids), expected) and packed(input_ids[:0]).shape == (0, 18)
    assert packed.unpack() is embedding and torch.equal(embedding(input_ids), expected)


def test_weight_stays_as_it_is_without_memory_to_pack_it(monkeypatch):
    linear = nn.Linear(18, 64).requires_grad_(False)
    before = linear.weight.clone()

    def no_memory(*args, **options):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty_like", no_memory)
    with pytest.raises(RuntimeError, match="can't allocate"):
        PackedLinear(linear)
    assert torch.equal(linear.weight, before)


def test_packing_allocates_no_second_weight():
    weight = torch.randn(4096, 512)  # 8 MiB, and a copy of 4 columns takes 128 KiB
    with torch.profiler.profile(profile_memory=True) as profile:
        pack(weight)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages()) <= weight.nbytes // 50


# Jobs


def test_jobs_cover_each_pair_of_query_and_key_once():
    rng = random.Random(1)
    for _ in range(50):
        starts, context_lens = [0], []
        for _ in range(rng.randint(1, 5)):
            query_len = rng.choice([1, 1, rng.randint(1, 90)])
            starts.append(starts[-1] + query_len)
            context_lens.append(query_len + rng.choice([0, 3, SPLIT - 1, SPLIT, 3 * SPLIT]))
        step = SimpleNamespace(query_start_loc=starts, context_lens=context_lens)
        jobs, merges, num_splits = jobs_of(step, tile=16)
        seen = {}
        for row, queries, seq, start, end, split in (jobs[i : i + JOB] for i in range(0, len(jobs), JOB)):
            for query in range(row, row + queries):
                position = context_lens[seq] - (starts[seq + 1] - query)
                assert starts[seq] <= query < starts[seq + 1] and start <= position
                seen.setdefault(query, []).append((start, min(end, position + 1), split))
        merged = {merges[i]: range(merges[i + 1], sum(merges[i + 1 : i + 3])) for i in range(0, len(merges), MERGE)}
        assert sorted(split for splits in merged.values() for split in splits) == list(range(num_splits))
        for seq, (first, last) in enumerate(pairwise(starts)):
            for query in range(first, last):
                splits = sorted(seen.pop(query))
                ends = [0, *(end for _, end, _ in splits)]
                assert [start for start, _, _ in splits] == ends[:-1]
                assert ends[-1] == context_lens[seq] - (last - query) + 1
                assert [split for _, _, split in splits] == list(merged.get(query, [-1]))
        assert not seen


# Norms and linear layers


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_norm(dtype, compiled):
    compiled(dtype)
    torch.manual_seed(0)
    for rows, size in [(1, 1), (3, 16), (5, 57), (600, 64)]:
        x, y, weight = torch.randn(rows, size), torch.randn(rows, size).to(dtype), torch.rand(size)
        for more in (torch.zeros_like(y), y):
            result, out = x.clone(), torch.empty(rows, size, dtype=dtype)
            at_y = more.data_ptr() if more is y else 0
            common = weight.data_ptr(), 1e-5, rows, size, 2, like_of(dtype), out.data_ptr()
            add_and_norm(result.data_ptr(), at_y, *common)
            expected = x + more.float()
            assert torch.equal(result, expected)
            normed = expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-5) * weight
            assert_near(out.float(), normed, ROUNDINGS[dtype] / 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_linear_computes_the_same_as_linear(dtype, compiled):
    compiled(dtype)
    torch.manual_seed(0)
    for rows, size, outputs in [(1, 2, 32), (2, 18, 7), (3, 34, 70), (40, 64, 33), (600, 48, 320)]:
        for bias in (False, True):
            plain = nn.Linear(size, outputs, bias=bias, dtype=dtype).requires_grad_(False)
            x = torch.randn(rows, size, dtype=dtype)
            expected = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
            layer = PackedLinear(plain)
            assert layer.weight is plain.weight and layer(x).dtype == dtype
            assert_near(
                layer(x).double(), expected, {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
            )


def test_weights_are_packed_if_their_sizes_allow():
    model = packable_model()
    assert why_not_packed(model) is None
    model.config = replace(model.config, intermediate_size=70)
    assert why_not_packed(model) == "an MLP of 70 cannot be packed in blocks of 32 outputs"
    model.lm_head = nn.Linear(33, 64)
    assert why_not_packed(model) == "a weight of 64 x 33 cannot be packed in pairs of columns"


@pytest.mark.full
def test_plain_linear_layers_get_padded_rows_in_half_precision(compiled, monkeypatch):
    """The library behind them keeps code for each number of rows that it has seen."""
    compiled(torch.bfloat16)
    torch.manual_seed(0)
    seen, real = set(), nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, *rest: seen.add(len(x)) or real(x, *rest))
    model = random_model(random.Random(3), torch.bfloat16)
    steps = [[count, 1, 1] for count in range(1, 40)]
    plain, fast = (Driver(model, 16, torch.bfloat16, 3) for _ in range(2))
    logits = plain.run(model, PagedAttention(plain.kv_cache, 64), steps)
    assert len(seen) >= 39
    seen.clear()
    attention = swap_in(model, fast.kv_cache, 1, packs=False)
    monkeypatch.setattr(model, "compute_logits", lambda hidden: real(hidden, model.lm_head.weight))
    assert_near(fast.run(model, attention, steps), logits, ROUNDINGS[torch.bfloat16])
    assert seen == {16, 32, 48}


def resident_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not report used memory")
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_does_not_grow_with_different_numbers_of_rows(dtype, compiled):
    compiled(dtype)
    layer = PackedLinear(nn.Linear(64, 128, dtype=dtype).requires_grad_(False))
    for rows in (1, 400):
        layer(torch.zeros(rows, 64, dtype=dtype))
    before = resident_memory()
    for rows in range(1, 400):
        layer(torch.zeros(rows, 64, dtype=dtype))
    assert resident_memory() - before < 16 * 2**20, "130 MiB would be a third of a MiB for each number of rows"


# The sampler

GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sampler_returns_the_plain_samplers_tokens(dtype, compiled):
    compiled(dtype)
    torch.manual_seed(0)
    for size in (1, 15, 16, 300, CHUNK, 2 * CHUNK + 5):
        logits = (5 * torch.randn(8, size)).to(dtype)
        logits[1] = 2.0  # the first of equals
        logits[2, : size // 2] = -torch.inf
        logits[3, : size - 1] = -torch.inf
        logits[4, size // 2 :] = logits[4].max()
        for kinds in ([GREEDY] * 8, [GREEDY, DRAWN] * 4, [DRAWN] * 8):
            rows = [SamplingRow(params, seed, 0, 7) for seed, params in enumerate(kinds)]
            result, expected = sample_rows(logits, rows), sample(logits, rows)
            assert [token.token_id for token in result] == [token.token_id for token in expected]
            logprobs = [token.logprob for token in expected]
            assert [token.logprob for token in result] == pytest.approx(logprobs, abs=2e-5)
    assert sample_rows(logits[:0], []) == []


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_an_error_names_the_row_without_probabilities(fault, compiled):
    compiled(torch.float32)
    for size in (3, 16, 300, CHUNK + 1):
        for place in {0, size // 2, size - 1}:
            logits = torch.randn(4, size)
            logits[2, ... if fault == -torch.inf else place] = fault
            for kinds in ([GREEDY] * 4, [DRAWN, GREEDY] * 2, [GREEDY, GREEDY, DRAWN, GREEDY]):
                rows = [SamplingRow(params, 0, 0, 7) for params in kinds]
                with pytest.raises(FloatingPointError, match="row 2 are NaN, infinite or all -inf"):
                    sample_rows(logits, rows)
