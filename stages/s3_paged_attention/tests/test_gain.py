"""The gain of this stage: memory for two tiles at most, and the same few operations for any number of sequences.

Memory and operations are counted, time is not.
"""

from importlib import import_module

import pytest
import torch

from ..attention import PagedAttention
from ..kv_cache import KVCache
from ..llama import LlamaForCausalLM, ModelConfig, load_model
from ..model_runner import ModelRunner
from . import gain
from .helpers import CONFIG, make_sequence, write_checkpoint
from .watch import Watch

BLOCK_SIZE, TILE_SIZE = 4, 512
TILE = TILE_SIZE * 2 * 8 * 4  # bytes of the keys of a tile: slots x KV heads x head_dim x float32
LARGEST = 2 * TILE  # a tensor may hold keys and values


@pytest.fixture(scope="module")
def long_model(tmp_path_factory) -> LlamaForCausalLM:
    """Return a model of 2 layers, for texts of up to 4,096 tokens."""
    folder = write_checkpoint(tmp_path_factory.mktemp("long"), CONFIG | {"max_position_embeddings": 4096})
    return load_model(folder, ModelConfig.from_folder(folder), torch.float32, torch.device("cpu"))


def run(model: LlamaForCausalLM, sizes: list[tuple[int, int]], tile_size: int = TILE_SIZE) -> Watch:
    """Watch a step of sequences, each with tokens computed before and tokens of this step."""
    counts = [-(-(before + now) // BLOCK_SIZE) for before, now in sizes]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    batch = []
    for i, ((before, now), count) in enumerate(zip(sizes, counts, strict=True)):
        seq = make_sequence(str(i), before + now, max_tokens=1)
        seq.num_computed_tokens, seq.block_table = before, [blocks.pop() for _ in range(count)]
        batch.append((seq, now))
    cache = KVCache(model.config, sum(counts), BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.blocks.zero_()
    runner = ModelRunner(model, PagedAttention(cache, tile_size), BLOCK_SIZE, torch.device("cpu"))
    with Watch() as watch:
        runner.compute_logits(batch)
    return watch


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_memory_does_not_grow_with_the_contexts(long_model, num_seqs):
    """At the worst moment, the keys and values of one tile are still there while the next is copied."""
    for context_len in (512, 4096):
        watch = run(long_model, [(context_len - 1, 1)] * num_seqs)
        assert watch.largest <= LARGEST, f"the bytes of the largest tensor, at context {context_len}"
        allowed = 5 * TILE + 64 * num_seqs * 4096 // BLOCK_SIZE
        assert watch.peak < allowed, f"the bytes of all tensors beside the pool, at context {context_len}"


def test_one_long_context_among_short_ones_needs_one_tile(long_model):
    watch = run(long_model, [(7, 1), (4000, 1), (40, 1)])
    assert watch.largest <= LARGEST, "the bytes of the largest tensor, at contexts 8, 4,001 and 41"


def test_chunk_needs_as_much_memory_at_the_end_of_a_prompt_as_at_its_beginning(long_model):
    early, late = (run(long_model, [(before, 8)]).largest for before in (512, 4080))
    assert early == late, "the bytes of the largest tensor, for a chunk of 8 after 512 tokens and after 4,080"


@pytest.mark.parametrize("contexts", [[5], [200, 31, 1, 90]], ids=str)
def test_twenty_sequences_take_as_many_operations_as_two(long_model, contexts):
    """Each has as much room in a tile."""
    few, many = (run(long_model, [(n, 1) for n in contexts] * count, tile_size=512 * count) for count in (2, 20))
    assert few.num_operations == many.num_operations, "an operation is done once per sequence"


def test_gain_in_figures(tmp_path):
    """`make check` prints them at the end of the exercise, next to those of the previous stage."""
    short, long, num_operations = gain.now(import_module("..", __package__), tmp_path).values()
    assert short == long <= LARGEST, "the bytes of the largest tensor, at context 512 and 2,000"
    assert num_operations == 0, "operations that 18 more sequences add"
