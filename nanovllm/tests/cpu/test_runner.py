"""Steps of any mix of prompts, chunks and decodes against plain operations; packing, planning and sampling."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from ...backends.cpu import runner
from ...backends.cpu.layout import JOB, MERGE, PART, SPLIT, pack
from ...backends.cpu.runner import StepRunner, plan_step, sample_rows, why_unsupported
from ...backends.torch.attention import PagedAttention
from ...backends.torch.backend import TorchBackend
from ...backends.torch.sampler import sample
from ...engine.executor import with_drafts
from ...engine.kv_cache import KVCache
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM, ModelConfig
from ...requests.sampling_params import SamplingParams
from ...requests.tokens import SamplingRow
from ..testing.sequences import make_sequence

FULL = pytest.mark.full
ROUNDINGS = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of numbers around 1
DTYPES = [  # kernels take half a minute to compile for a dtype, and float16 differs only in loads and stores
    torch.float32,
    pytest.param(torch.bfloat16, marks=FULL),
    pytest.param(torch.float16, marks=pytest.mark.nightly),
]
CPU = torch.device("cpu")
LONGEST = 1300  # tokens of a sequence: three splits of a decode


def random_model(rng: random.Random, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a model with odd sizes, groups of 1 to 8 heads, and random features."""
    kvs, group, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 5, 8]), rng.choice([4, 6, 16, 20, 64, 80])
    config = ModelConfig(
        vocab_size=50,
        hidden_size=rng.choice([6, 34, 64, 58]),
        intermediate_size=rng.choice([6, 32, 70, 96]),
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


class Driver:
    """Sequences that grow by given steps, in a pool of their own."""

    def __init__(self, model, block_size, dtype, num_seqs, is_int8=False):
        blocks_each = -(-LONGEST // block_size)
        stored = "int8" if is_int8 else "auto"
        self.kv_cache = KVCache(model.config, num_seqs * blocks_each + 1, block_size, dtype, CPU, stored)
        self.kv_cache.blocks.view(torch.uint8).fill_(255)  # NaN: unwritten slots must not be read
        rng = random.Random(5)
        blocks = rng.sample(range(num_seqs * blocks_each + 1), num_seqs * blocks_each)
        tables = [blocks[i * blocks_each : (i + 1) * blocks_each] for i in range(num_seqs)]
        ids = [[rng.randrange(50) for _ in range(LONGEST)] for _ in tables]
        self.ids = ids
        self.seqs = [make_sequence(str(i), 1, LONGEST) for i in range(num_seqs)]
        for seq, table in zip(self.seqs, tables, strict=True):
            seq.block_table = table

    def run(self, compute, compute_logits, steps):
        """Return the logits of all tokens. `compute` returns the hidden states of a batch."""
        logits = []
        for step in steps:
            batch = []
            for seq, token_ids, count in zip(self.seqs, self.ids, step, strict=True):
                if count:
                    seq.token_ids = token_ids[: seq.num_computed_tokens + count]
                    batch.append((seq, count))
            with torch.inference_mode():
                logits.append(compute_logits(compute(batch)).float())
            for seq, count in batch:
                seq.num_computed_tokens += count
        return torch.cat(logits)

    def plain(self, model, steps):
        attention = PagedAttention(self.kv_cache, 64)
        backend = TorchBackend(model, attention, self.kv_cache.block_size, CPU)
        return self.run(lambda batch: backend.compute(batch).hidden, backend.compute_logits, steps)

    def fast(self, model, steps):
        """Return the logits of StepRunner. Those that a step computes must be the same."""
        steps_of = StepRunner(model, self.kv_cache, LONGEST)

        def compute(batch):
            hidden, logits = steps_of.run(batch)
            ends = torch.tensor([count for _, count in batch]).cumsum(0) - 1
            assert torch.equal(steps_of.compute_logits(hidden[ends]), logits)
            return hidden

        return self.run(compute, steps_of.compute_logits, steps)

    def written(self):
        """Return the keys and values of all computed tokens."""
        cache, written = self.kv_cache, []
        for seq in self.seqs:
            pieces = cache.pieces(torch.tensor(seq.block_table))
            written += [cache.read(layer, pieces, seq.num_computed_tokens) for layer in range(cache.num_layers)]
        return torch.cat([torch.stack(both) for both in written], 1).float()


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
@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("workers", [1, 2])
def test_any_mix_of_tokens_gives_the_plain_logits(workers, rounds, dtype, compiled, monkeypatch):
    compiled(dtype)
    torch.manual_seed(workers)
    rng = random.Random(workers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    for _ in range(rounds):
        model, block_size, num_seqs = random_model(rng, dtype), rng.choice([1, 4, 5, 16]), rng.choice([1, 3, 6])
        steps = random_steps(rng, num_seqs, 6)
        steps[:0] = [[min(700, LONGEST - sum(step[i] for step in steps)) for i in range(num_seqs)]]
        plain, fast = (Driver(model, block_size, dtype, num_seqs) for _ in range(2))
        expected = plain.plain(model, steps)
        assert_near(fast.fast(model, steps), expected, ROUNDINGS[dtype])
        assert_near(fast.written(), plain.written(), ROUNDINGS[dtype])


@pytest.mark.parametrize("context_len", [5, 2 * SPLIT + 3])
def test_each_token_of_a_draft_has_a_row_of_logits(context_len, compiled):
    """Drafts of different lengths, one of them empty, give the logits of the same tokens in a chunk."""
    compiled(torch.float32)
    rng = random.Random(context_len)
    model, lengths, drafts = random_model(rng, torch.float32), [3, context_len, context_len], [8, 0, 30]
    plain, fast = (Driver(model, 4, torch.float32, 3) for _ in range(2))
    plain.plain(model, [lengths])
    expected = plain.plain(model, [[1 + draft for draft in drafts]])
    fast.plain(model, [lengths])
    batch = []
    for seq, token_ids, length, draft in zip(fast.seqs, fast.ids, lengths, drafts, strict=True):
        seq.token_ids, seq.draft_token_ids = token_ids[: length + 1], token_ids[length + 1 :][:draft]
        batch.append((seq, 1))
    _, logits = StepRunner(model, fast.kv_cache, LONGEST).run(with_drafts(batch))
    assert logits is not None
    assert_near(logits, expected, ROUNDINGS[torch.float32])
    for seq, draft in zip(fast.seqs, drafts, strict=True):
        seq.num_computed_tokens += 1 + draft
    assert_near(fast.written(), plain.written(), ROUNDINGS[torch.float32])


def assert_near(result: torch.Tensor, expected: torch.Tensor, rounding: float) -> None:
    """Assert that errors are at most a few roundings of the largest number."""
    assert result.shape == expected.shape and result.isfinite().all()
    assert (result - expected).abs().max() <= 4 * rounding * max(1, expected.abs().max())


def test_a_model_stays_as_it_is_without_memory_for_kernels(monkeypatch, compiled):
    compiled(torch.float32)
    model = random_model(random.Random(0), torch.float32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}

    def no_memory(self, workers, dtype):
        raise MemoryError("no room")

    monkeypatch.setattr(StepRunner, "_make_workspace", no_memory)
    with pytest.raises(MemoryError, match="no room"):
        StepRunner(model, KVCache(model.config, 3, 4, torch.float32, CPU), 12)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_packing_allocates_no_second_weight():
    weight = torch.randn(4096, 512)  # 8 MiB, and a copy of 4 columns takes 128 KiB
    with torch.profiler.profile(profile_memory=True) as profile:
        pack(weight)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages()) <= weight.nbytes // 50


# Jobs


def sequence(context_len: int, count: int) -> Sequence:
    seq = make_sequence("a", context_len, max_tokens=1)
    seq.num_computed_tokens, seq.block_table = context_len - count, list(range(-(-context_len // 16)))
    return seq


def test_jobs_cover_each_pair_of_query_and_key_once():
    rng = random.Random(1)
    for _ in range(50):
        starts, context_lens = [0], []
        for _ in range(rng.randint(1, 5)):
            query_len = rng.choice([1, 1, rng.randint(1, 90)])
            starts.append(starts[-1] + query_len)
            context_lens.append(query_len + rng.choice([0, 3, SPLIT - 1, SPLIT, 3 * SPLIT]))
        batch = [
            (sequence(context_len, end - start), end - start)
            for (start, end), context_len in zip(pairwise(starts), context_lens, strict=True)
        ]
        plan = plan_step(batch, 16, tile=16)
        jobs, merges, num_splits = plan.jobs, plan.merges, plan.num_splits
        seen = {}
        for row, queries, seq, start, end, split, writes in (jobs[i : i + JOB] for i in range(0, len(jobs), JOB)):
            for query in range(row, row + queries):
                position = context_lens[seq] - (starts[seq + 1] - query)
                assert starts[seq] <= query < starts[seq + 1] and start <= position
                assert writes == (starts[seq + 1] - starts[seq] == 1 and end == position + 1)
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


def test_a_weight_that_has_no_pairs_of_columns_is_unsupported(monkeypatch):
    config = ModelConfig(
        vocab_size=50, hidden_size=34, intermediate_size=7, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    assert why_unsupported(model) is None
    monkeypatch.setattr(runner, "type_of", lambda dtype: torch.bfloat16)
    assert why_unsupported(model) == "a weight of 34 x 7 cannot be packed in pairs of columns"


def resident_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not report used memory")
def test_memory_does_not_grow_with_different_numbers_of_rows(compiled):
    compiled(torch.float32)
    model = random_model(random.Random(0), torch.float32)
    steps = StepRunner(model, KVCache(model.config, 100, 16, torch.float32, CPU), LONGEST)

    def run(rows: int) -> None:
        steps.run([(sequence(rows, rows), rows)])

    for rows in (1, 400):
        run(rows)
    before = resident_memory()
    for rows in range(1, 400, 4):
        run(rows)
    assert resident_memory() - before < 8 * 2**20, "32 MiB would be a third of a MiB for each number of rows"


# The sampler

GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=5)


@pytest.fixture
def find_likeliest(compiled):
    compiled(torch.float32)
    model = random_model(random.Random(0), torch.float32)
    return StepRunner(model, KVCache(model.config, 3, 4, torch.float32, CPU), 12).find_likeliest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_returns_the_plain_samplers_tokens(dtype, find_likeliest):
    torch.manual_seed(0)
    for size in (1, 15, 16, 300, PART, 2 * PART + 5):
        logits = (5 * torch.randn(8, size)).to(dtype)
        logits[1] = 2.0  # the first of equals
        logits[2, : size // 2] = -torch.inf
        logits[3, : size - 1] = -torch.inf
        logits[4, size // 2 :] = logits[4].max()
        for kinds in ([GREEDY] * 8, [GREEDY, DRAWN] * 4, [DRAWN] * 8):
            rows = [SamplingRow(params, seed, 0, 7) for seed, params in enumerate(kinds)]
            result, expected = sample_rows(logits, rows, find_likeliest), sample(logits, rows)
            assert result.token_ids == expected.token_ids
            assert result.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert sample_rows(logits[:0], [], find_likeliest).token_ids == []


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_an_error_names_the_row_without_probabilities(fault, find_likeliest):
    for size in (3, 16, 300, PART + 1):
        for place in {0, size // 2, size - 1}:
            logits = torch.randn(4, size)
            logits[2, ... if fault == -torch.inf else place] = fault
            for kinds in ([GREEDY] * 4, [DRAWN, GREEDY] * 2, [GREEDY, GREEDY, DRAWN, GREEDY]):
                rows = [SamplingRow(params, 0, 0, 7) for params in kinds]
                with pytest.raises(FloatingPointError, match="row 2 are NaN, infinite or all -inf"):
                    sample_rows(logits, rows, find_likeliest)
