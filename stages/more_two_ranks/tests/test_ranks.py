"""Ranks: parts of a model that add up, the tokens of a single rank, and what a rank holds."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ..__main__ import counts
from ..llama import LlamaForCausalLM, ModelConfig
from ..llm import LLM
from ..outputs import RequestOutput
from ..ranks import local_config, part_of, part_of_model
from ..sampling import SamplingParams
from .helpers import CONFIG, attend_without_cache, greedy_without_cache, write_checkpoint

SECONDS = 60.0  # after which a test that hangs fails
SHAPE = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
PROMPTS = [[3 + (7 * i + 11 * j) % 300 for i in range(10 + j)] for j in range(6)]
SMALL = {  # six requests of 34 tokens and more, in a third of the memory
    "block_size": 4,
    "kv_cache_tokens": 72,
    "kv_offloading_tokens": 288,
    "offload_policy": "load",
    "watermark": 0.0,
    "max_model_len": 64,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


# ---- the parts of a model


def rows_of(name: str, num_rows: int, rank: int) -> list[int]:
    """Return the rows of a layer's weight that a rank has."""
    rows = torch.arange(num_rows).unsqueeze(1)
    return part_of(f"model.layers.0.{name}.weight", rows, SHAPE, rank, 2).flatten().tolist()


def test_a_rank_has_the_rows_of_its_heads():
    """There are four heads of 8 rows, then the keys of two KV heads, then their values."""
    assert rows_of("self_attn.qkv_proj", 64, rank=0) == [*range(16), *range(32, 40), *range(48, 56)]
    assert rows_of("self_attn.qkv_proj", 64, rank=1) == [*range(16, 32), *range(40, 48), *range(56, 64)]


def test_a_rank_has_the_rows_of_its_hidden_units_in_both_matrices():
    assert rows_of("mlp.gate_up_proj", 96, rank=0) == [*range(24), *range(48, 72)]
    assert rows_of("mlp.gate_up_proj", 96, rank=1) == [*range(24, 48), *range(72, 96)]


@pytest.mark.parametrize(("name", "width"), [("self_attn.o_proj", 32), ("mlp.down_proj", 48)])
def test_a_layer_that_adds_up_is_divided_by_columns(name, width):
    weight = torch.arange(width).expand(32, width)
    parts = [part_of(f"model.layers.0.{name}.weight", weight, SHAPE, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), weight) and parts[0].shape == parts[1].shape


def random_model(config: ModelConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config, max_model_len=64).requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(std=0.3)
    return model


def on_threads(size: int, work: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Run `work` for each rank in a thread of its own, with all-reduces between the threads. Return the results."""
    barrier, here = threading.Barrier(size, timeout=SECONDS), threading.local()
    tensors: dict[int, Tensor] = {}
    results: dict[int, Tensor] = {}

    def all_reduce(tensor: Tensor) -> None:
        tensors[here.rank] = tensor.clone()
        barrier.wait()
        tensor.copy_(sum(tensors[rank] for rank in range(size)))
        barrier.wait()

    def run(rank: int) -> None:
        here.rank = rank
        results[rank] = work(rank)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 2),
        ({"num_key_value_heads": 4}, 4),
        ({"tie_word_embeddings": True}, 2),
        ({"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}, 2),
        ({"qk_norm": True, "head_dim": 12}, 2),
    ],
    ids=str,
)
def test_parts_compute_what_the_whole_model_does(fields, size, monkeypatch):
    whole = random_model(replace(SHAPE, **fields))
    token_ids, positions = torch.arange(3, 12), torch.arange(9)
    expected = whole.compute_logits(whole(token_ids, positions, attend_without_cache))
    parts = [part_of_model(whole, rank, size, 64) for rank in range(size)]

    def logits(rank: int) -> Tensor:
        return parts[rank].compute_logits(parts[rank](token_ids, positions, attend_without_cache))

    results = on_threads(size, logits, monkeypatch)
    assert all(torch.equal(result, results[0]) for result in results), "the ranks must have the same numbers"
    assert (results[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_tied_head_stays_tied():
    part = part_of_model(random_model(replace(SHAPE, tie_word_embeddings=True)), 1, 2, 64)
    assert part.lm_head.weight is part.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "number", "size"),
    [("num_attention_heads", 4, 3), ("num_key_value_heads", 2, 4), ("intermediate_size", 49, 2)],
)
def test_a_model_that_cannot_be_divided_is_refused_with_both_numbers(tmp_path, name, number, size):
    folder = write_checkpoint(tmp_path / "model", CONFIG | {name: number}, tensors={"x": torch.zeros(1)})
    with pytest.raises(ValueError, match=rf"{size}\b.*{name}, {number}"):
        LLM(folder, tensor_parallel_size=size)
    with pytest.raises(ValueError, match=f"{name}, {number}"):
        local_config(ModelConfig.from_folder(folder), size)


def test_no_ranks_are_refused(checkpoint):
    with pytest.raises(ValueError, match="tensor_parallel_size is 0"):
        LLM(checkpoint, tensor_parallel_size=0)


# ---- the same tokens


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[LLM]:
    """Return an engine on two ranks."""
    llm = LLM(checkpoint, tensor_parallel_size=2, **SMALL)
    yield llm
    llm.llm_engine.ranks.close()


@pytest.fixture
def one(checkpoint: Path) -> LLM:
    return LLM(checkpoint, **SMALL)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_greedy_tokens_are_those_of_the_model_whatever_is_preempted_and_loaded(two, model):
    """Rank 1 stores its part of each block, and loads it again, or the tokens would differ."""
    expected = [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]
    for _ in range(2):
        assert tokens(two.generate(PROMPTS, GREEDY)) == expected
        two.kv_cache_manager.check_integrity()
    assert two.llm_engine.scheduler.num_preemptions > 3 and two.llm_engine.host_tier.num_blocks_loaded > 10


def test_seeded_samples_of_one_prompt_are_those_of_one_rank(two, one):
    """The prompt of 11 tokens ends in the middle of a block, which is copied for each sample but one."""
    params = SamplingParams(n=3, seed=5, temperature=1.5, top_p=0.9, max_tokens=16, ignore_eos=True)
    before = two.kv_cache.num_blocks_copied
    assert tokens(two.generate([PROMPTS[1]], params)) == tokens(one.generate([PROMPTS[1]], params))
    assert two.kv_cache.num_blocks_copied - before == 2


def test_a_second_engine_is_refused_and_leaves_the_ranks_of_the_first_alone(two, checkpoint):
    before = multiprocessing.active_children()
    with pytest.raises(ValueError, match="one engine"):
        LLM(checkpoint, tensor_parallel_size=2)
    assert multiprocessing.active_children() == before
    assert len(tokens(two.generate([PROMPTS[0]], GREEDY))[0]) == 24


def test_an_aborted_request_leaves_the_ranks_in_step(two, one):
    stream = two.stream(PROMPTS[:3], GREEDY)
    for _ in range(5):
        next(stream)
    stream.close()
    assert tokens(two.generate(PROMPTS[3:], GREEDY)) == tokens(one.generate(PROMPTS[3:], GREEDY))


# ---- what a rank holds, and what a step costs


def test_a_rank_holds_half_of_the_layers_and_of_each_block(two, one, model):
    """The embedding, the norms and the head are on both ranks."""
    copied = sum(weight.numel() for name, weight in model.named_parameters() if "_proj" not in name)
    divided = sum(weight.numel() for name, weight in model.named_parameters() if "_proj" in name)
    part = part_of_model(model, 1, 2, 64)
    assert sum(weight.numel() for weight in part.parameters()) == copied + divided // 2
    assert 2 * two.kv_cache.blocks.nbytes == one.kv_cache.blocks.nbytes
    assert 2 * two.llm_engine.host_tier.blocks.nbytes == one.llm_engine.host_tier.blocks.nbytes
    assert f"{one.kv_cache.bytes_per_token // 2:,} bytes each" in counts(two)


def test_a_step_has_two_all_reduces_for_each_layer(two, monkeypatch):
    sizes, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: [sizes.append(tensor.shape), all_reduce(tensor)])
    two.generate([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert sizes[-4:] == [(1, 32)] * 4 and len(sizes) == 8
