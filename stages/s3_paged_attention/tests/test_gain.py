"""What this stage buys: a step needs room for one tile, and the same few operations, whatever it serves.

Steps of a whole model, as the engine runs them. Memory and operations are counted, time is not.
"""

from importlib import import_module

import pytest
import torch

from ..attention import PagedAttention
from ..kv_cache import KVCache
from ..llama import LlamaForCausalLM, ModelConfig, load_model
from ..model_runner import ModelRunner
from ..sampling import SamplingParams
from . import gain
from .helpers import CONFIG, make_sequence, write_checkpoint
from .watch import Watch

BLOCK_SIZE, TILE_SIZE = 4, 256
TILE = 2 * TILE_SIZE * 2 * 8 * 4  # bytes: keys and values x slots x KV heads x head_dim x float32


@pytest.fixture(scope="module")
def long_model(tmp_path_factory) -> LlamaForCausalLM:
    """Two layers, and room for 2,048 tokens."""
    folder = write_checkpoint(tmp_path_factory.mktemp("long"), CONFIG | {"max_position_embeddings": 2048})
    return load_model(folder, ModelConfig.from_folder(folder), torch.float32, torch.device("cpu"))


def run(model: LlamaForCausalLM, sizes: list[tuple[int, int]], tile_size: int = TILE_SIZE) -> Watch:
    """A step of sequences of (tokens computed before, tokens now), their blocks scattered over a pool of zeros."""
    seqs = []
    counts = [-(-(before + now) // BLOCK_SIZE) for before, now in sizes]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    for i, ((before, now), count) in enumerate(zip(sizes, counts, strict=True)):
        seq = make_sequence(str(i), before + now, max_tokens=1)
        seq.params = SamplingParams(temperature=0.0)  # a random draw has noise of its own for each sequence
        seq.num_computed_tokens, seq.block_table = before, [blocks.pop() for _ in range(count)]
        seqs.append(seq)
    cache = KVCache(model.config, sum(counts), BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.blocks.zero_()
    runner = ModelRunner(model, PagedAttention(cache, tile_size), BLOCK_SIZE, torch.device("cpu"))
    with Watch() as seen:
        runner.run([(seq, now) for seq, (_, now) in zip(seqs, sizes, strict=True)])
    return seen


def test_the_largest_temporary_of_a_step_is_one_tile_however_long_the_contexts(long_model):
    """And however many they are. Stage 2 copied the whole of each."""
    for num_seqs in (1, 2, 4):
        sizes = [[(context_len - 1, 1)] * num_seqs for context_len in (256, 512, 1024, 2048)]
        assert [run(long_model, each).largest for each in sizes] == [TILE] * 4


def test_so_it_is_when_one_context_is_long_and_the_others_are_not(long_model):
    assert run(long_model, [(7, 1), (2000, 1), (40, 1)]).largest == TILE


def test_a_prompt_that_comes_in_chunks_needs_no_more_at_its_end_than_at_its_beginning(long_model):
    chunks = [run(long_model, [(before, 8)]).largest for before in (256, 512, 2040)]
    assert chunks[0] == chunks[1] == chunks[2]


def test_a_step_takes_no_more_operations_for_twenty_sequences_than_for_two(long_model):
    """Not the attention, if it has as many tiles, nor the tables and slots, nor anything else of the step."""
    for contexts in ([5], [200, 31, 1, 90]):
        few, many = (run(long_model, [(n, 1) for n in contexts] * count, tile_size=64 * count) for count in (2, 20))
        assert few.num_operations == many.num_operations


def test_the_gain_in_figures(tmp_path):
    """They are told at the end of the exercise, beside those of the stage before."""
    counts = gain.now(import_module("..", __package__), tmp_path)
    two, twenty = (counts.pop(f"operations for {n} sequences") for n in (2, 20))
    assert two == twenty
    assert counts == {
        "the largest tensor, context 256 (bytes)": TILE,
        "the largest tensor, context 2,000 (bytes)": TILE,
    }
