"""Several ranks generate the tokens of one: any shape of model, and any way to use the pool."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ...beam_search import BeamSearch, BeamSearchParams
from ...distributed.rank_group import RankGroup
from ...llm_engine import LLMEngine
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ..testing.checkpoints import CONFIG, random_tensors, write_checkpoint
from ..testing.engines import answer, answers, params, step
from ..testing.ranks import engine_on, on_ranks

PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15)), [1, 44]]
FULL = pytest.mark.full
SHAPES: dict[str, dict[str, Any]] = {  # what differs from CONFIG
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True, "vocab_size": 319, "attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 20},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": True},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors, also for the norms and biases of Qwen."""
    tensors, generator = random_tensors(config), torch.Generator().manual_seed(1)
    if config["model_type"] == "qwen2":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}
    if config["model_type"] == "qwen3":
        for i in range(config["num_hidden_layers"]):
            for name in ("q_norm", "k_norm"):
                norm = 1 + 0.2 * torch.randn(config["head_dim"], generator=generator)
                tensors[f"model.layers.{i}.self_attn.{name}.weight"] = norm
    return tensors


def outputs_of(engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """Return the outputs of requests that arrive at once."""
    for i, (prompt, each) in enumerate(requests):
        engine.add_request(str(i), prompt, each)
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        ended |= {name: output for name, output in step(engine).items() if output.finished}
    return [ended[str(i)] for i in range(len(requests))]


def assert_same(world_size: int, function: Callable[[RankGroup], Any]) -> Any:
    """Assert that `function` returns the same on each of several ranks as on one. Return it."""
    expected = function(RankGroup())
    assert on_ranks(world_size, function) == [expected] * world_size
    return expected


def greedy_and_sampled(folder: Path, ranks: RankGroup, **options: Any) -> list[list[int]]:
    engine = engine_on(ranks, folder, max_num_batched_tokens=7, **options)
    kinds = [params(8), params(8, temperature=1.0, seed=3, top_p=0.9)]
    return [answer(output) for output in outputs_of(engine, [(p, kinds[i % 2]) for i, p in enumerate(PROMPTS)])]


@pytest.mark.parametrize(
    ("shape", "world_size"),
    [
        ("mqa", 2),
        ("tied", 2),
        *(pytest.param(name, 2, marks=FULL) for name in ("wide heads", "qwen3")),
        *(pytest.param(name, 4, marks=FULL) for name in ("gqa", "mqa", "mha", "tied", "qwen2")),
    ],
)
def test_any_shape_of_model(tmp_path, shape, world_size):
    config = CONFIG | SHAPES[shape]
    write_checkpoint(tmp_path, config, tensors_of(config), num_shards=3 * (shape == "tied"))
    tokens = assert_same(world_size, partial(greedy_and_sampled, tmp_path, skip_tokenizer_init=True))
    assert len({token for output in tokens for token in output}) > 10, "the model repeats a few tokens"


def everything(folder: Path, ranks: RankGroup, **options: Any) -> list[list[list[int]]]:
    """Serve samples, shared prefixes, preemption, loads from the host, and beams, in a small pool."""
    engine = engine_on(
        ranks, folder, kv_cache_tokens=56, kv_offloading_tokens=160, max_num_batched_tokens=9, max_num_seqs=4, **options
    )
    story = list(range(3, 19))
    kinds = [params(6, n=3, temperature=1.0, seed=5), params(8), params(7, n=2, temperature=0.8, seed=7, top_k=9)]
    requests = [(prompt, kinds[i % 3]) for i, prompt in enumerate([story, *PROMPTS, [*story, 77, 78], story[:9]])]
    tokens = [answers(output) for _ in range(2) for output in outputs_of(engine, requests)]
    assert engine.scheduler.num_preemptions > 0 and engine.kv_cache_manager.prefix_cache_stats.hits > 0
    assert engine.host_tier.num_blocks_loaded > 0
    beams = BeamSearch(engine, BeamSearchParams(beam_width=3, max_tokens=8)).run("beams", story)
    assert engine.reset_prefix_cache()
    return [*tokens, answers(beams)]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=FULL)])
def test_samples_prefixes_preemption_host_and_beams(checkpoint, world_size):
    assert_same(world_size, partial(everything, checkpoint))


def after_a_restart(folder: Path, disk: Path, ranks: RankGroup) -> list[list[int]]:
    """Return the tokens of an engine that finds its prompts' blocks in files, some of them damaged on one rank."""
    story, tokens = list(range(3, 31)), list[list[int]]()
    requests = [(story, params(12)), (story[:17], params(9)), ([*story, 50, 51], params(5))]
    options: dict[str, Any] = {"kv_disk_dir": str(disk / f"{ranks.world_size} ranks"), "kv_offloading_tokens": 0}
    for _ in range(2):
        engine = engine_on(ranks, folder, max_num_batched_tokens=9, max_num_seqs=2, **options)
        tokens += [answer(output) for output in outputs_of(engine, requests)]
        assert engine.disk_tier is not None
        engine.disk_tier.flush()
        damaged = sorted(engine.disk_tier.files.folder.glob("*/*.kv"))[::3]
        ranks.minimum([0])
        for path in damaged if ranks.rank == 0 else []:
            path.write_bytes(b"damaged")
    assert engine.disk_tier.num_blocks_loaded > 0
    return tokens


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=FULL)])
def test_blocks_on_disk_after_a_restart(checkpoint, tmp_path, world_size):
    assert_same(world_size, partial(after_a_restart, checkpoint, tmp_path))


def guessed(folder: Path, ranks: RankGroup, **options: Any) -> list[list[int]]:
    """Serve texts that repeat themselves, with drafts."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    engine = engine_on(ranks, folder, kv_cache_tokens=120, speculative_config=speculation, **options)
    requests = [
        ([7, 8, 9, 10] * 4, params(20)),
        ([5, 6] * 6, params(20, temperature=0.9, seed=2)),
        ([1, 44], params(9)),
    ]
    return [answer(output) for output in outputs_of(engine, requests)]


def test_speculation(checkpoint):
    assert_same(2, partial(guessed, checkpoint))
