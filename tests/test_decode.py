"""stages/bench/decode_step.py: it measures a step of the real engine, on memory that was written."""

from itertools import chain

import pytest
import torch

from stages.bench import decode_step, kernel
from stages.bench.counting import Operations
from stages.bench.decode_step import AttentionAlone, Case, DecodeStep
from stages.bench.engines import PACKAGES
from stages.bench.models import num_parameters, random_model
from stages.s1_contiguous_cache.llama import ModelConfig

TINY = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)
CASE = Case("tiny", "float32", batch=3, context=9)
each_stage = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture(scope="module")
def folder():
    return random_model(TINY)


def test_random_model_is_written_once_and_is_the_same_everywhere(folder):
    from safetensors.torch import load_file

    assert random_model(TINY) == folder
    random_model.cache_clear()
    again = random_model(TINY)
    first, second = (load_file(path / "model.safetensors") for path in (folder, again))
    assert again != folder and all(torch.equal(first[name], second[name]) for name in first)


@each_stage
def test_step_computes_one_token_of_each_sequence_and_can_be_repeated(folder, name):
    step = DecodeStep(name, folder, CASE)
    for count in (1, 2):
        assert step() > 0
        assert step.runner.num_tokens == 3 * count
    assert [seq.num_computed_tokens for seq in step.seqs] == [8, 8, 8]


@each_stage
def test_bytes_count_all_weights_keys_and_values(folder, name):
    step = DecodeStep(name, folder, CASE)
    layer = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 3 * 16 * 32 + 2 * 16  # q, k, v; o; gate, up, down; two norms
    weights = 50 * 16 + 2 * layer + 16  # the head is the embedding
    assert num_parameters(TINY) == weights
    assert step.num_kv_bytes == 3 * 9 * 2 * 2 * 2 * 8 * 4
    assert step.num_bytes == step.num_kv_bytes + 4 * weights


@each_stage
def test_mixed_batch_has_one_long_context(folder, name):
    step = DecodeStep(name, folder, Case("tiny", "float32", batch=3, context=150, is_mixed=True))
    assert [seq.num_tokens for seq in step.seqs] == [150, 128, 128] and step() > 0


def test_pool_is_written_before_it_is_read(folder):
    """The system maps unwritten memory to a single page of zeros, which reads would find in a cache."""
    for name in ("s1", "s3"):
        tensors = DecodeStep(name, folder, CASE).pool_tensors()
        assert tensors and all((x == torch.tensor(0.01)).all() for x in tensors)


def test_scattered_step_has_the_same_blocks_in_a_different_order(folder):
    step = DecodeStep("s3", folder, CASE, block_size=1)
    before = [list(seq.block_table) for seq in step.seqs]
    other = step.scattered()
    after = [seq.block_table for seq in other.seqs]
    assert [seq.block_table for seq in step.seqs] == before != after
    assert sorted(chain(*after)) == sorted(chain(*before)) and [len(table) for table in after] == [9, 9, 9]
    assert other.kv_cache is step.kv_cache and other() > 0


@each_stage
def test_attention_alone_has_fewer_operations_than_the_whole_step(folder, name):
    step = DecodeStep(name, folder, CASE)
    with Operations() as whole:
        step()
    alone = AttentionAlone(step)
    with Operations() as part:
        alone()
    assert 0 < part.count < whole.count and step.runner.num_steps == 1


@pytest.mark.full
def test_tiles_and_kernel_compute_the_same_step(folder):
    pytest.importorskip("numba")
    calls = kernel.both(folder, kernel.Work(Case("tiny", "float32", batch=2, context=150, is_mixed=True), num_tokens=3))
    sampled = {name: [token.token_id for token in call()] for name, call in calls.items()}
    assert sampled.keys() == {"tiles", "kernel"} and sampled["tiles"] == sampled["kernel"]


def test_case_is_measured(folder):
    case = Case("tiny", "float32", batch=2, context=150, is_mixed=True)
    result = decode_step.measure_case(case, folder, ("s1", "s3"), turns=(5, 5))
    assert result["turns"] == 5 and min(result["s1_ms"], result["s3_ms"]) > 0
    for name in ("s1_ms", "s3_ms", "s3_over_s1"):
        least, largest = result[f"{name}_spread"]
        assert least <= result[name] <= largest
    assert len({case.key for case in decode_step.CASES}) == len(decode_step.CASES)
