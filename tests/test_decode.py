"""What decode.py measures is a step of the real engine, on memory that is there."""

from itertools import chain

import pytest
import torch

from notebooks.attending import AttentionAlone
from stages import decode
from stages.decode import STAGES, Case, DecodeStep
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


@pytest.fixture(scope="module")
def folder():
    with decode.random_model(TINY) as folder:
        yield folder


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_computes_one_token_of_each_sequence_and_can_be_repeated(folder, stage):
    step = DecodeStep(STAGES[stage], folder, CASE)
    for count in (1, 2):
        assert step() > 0
        assert step.engine.model_runner.num_tokens == 3 * count
    assert [seq.num_computed_tokens for seq in step.seqs] == [8, 8, 8]


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_those_of_all_weights_keys_and_values(folder, stage):
    step = DecodeStep(STAGES[stage], folder, CASE)
    layer = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 3 * 16 * 32 + 2 * 16  # q, k, v; o; gate, up, down; two norms
    weights = 50 * 16 + 2 * layer + 16  # the head is the embedding
    assert step.num_kv_bytes == 3 * 9 * 2 * 2 * 2 * 8 * 4
    assert step.num_bytes == step.num_kv_bytes + 4 * weights


def test_the_pool_was_written_before_it_is_read(folder):
    """Memory that nobody wrote is one page of zeros, and is read from a cache."""
    for stage in ("s1", "s3"):
        pool = DecodeStep(STAGES[stage], folder, CASE).engine.kv_cache
        assert all((x == torch.tensor(0.01)).all() for x in ([pool.k, pool.v] if stage == "s1" else [pool.blocks]))


def test_scattered_is_the_same_batch_and_pool_with_its_blocks_dealt_out_again(folder):
    step = DecodeStep(STAGES["s3"], folder, CASE, block_size=1)
    before = [list(seq.block_table) for seq in step.seqs]
    other = step.scattered()
    after = [seq.block_table for seq in other.seqs]
    assert [seq.block_table for seq in step.seqs] == before != after
    assert sorted(chain(*after)) == sorted(chain(*before)) and [len(table) for table in after] == [9, 9, 9]
    assert other.engine is step.engine and other() > 0


@pytest.mark.parametrize("stage", STAGES)
def test_attention_alone_leaves_the_engine_as_it_was(folder, stage):
    step = DecodeStep(STAGES[stage], folder, CASE)
    attention = step.engine.model_runner._attention
    alone = AttentionAlone(step)
    assert step.engine.model_runner._attention is attention
    alone()
    alone()


def test_no_call_always_follows_the_same_one():
    calls = []
    rounds = decode.in_turn({name: lambda name=name: calls.append(name) or 0.0 for name in "abcd"})
    orders = {"".join(calls[i : i + 4]) for i in range(0, len(calls), 4)}
    assert all(set(each) == set("abcd") for each in rounds) and len(orders) > 1
    assert len(calls) == 4 * (len(rounds) + 2)
