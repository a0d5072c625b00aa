"""Kernels on several ranks, with plain versions for kernels and a fake for CUDA graphs."""

from functools import partial
from pathlib import Path

import pytest

from ...backends.gpu.backend import TritonBackend
from ...backends.gpu.ops import PLAIN
from ...distributed.rank_group import RankGroup
from ...llm_engine import LLMEngine
from ..distributed.test_same_tokens import PROMPTS, outputs_of
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import answer, params
from ..testing.ranks import engine_on, on_ranks
from .test_backend import FakeCapture


def use_kernels(engine: LLMEngine, ranks: RankGroup, capture: FakeCapture | None) -> None:
    runner = engine.executor
    parts = runner.model, engine.kv_cache, engine.max_model_len
    runner.backend = TritonBackend(*parts, PLAIN, capture, 8, lambda step: 1.0, progress=False, ranks=ranks)


def answers(engine: LLMEngine) -> list[list[int]]:
    kinds = [params(8), params(8, temperature=1.0, seed=3, top_p=0.9)]
    return [answer(output) for output in outputs_of(engine, [(p, kinds[i % 2]) for i, p in enumerate(PROMPTS)])]


@pytest.fixture(params=[False, True], ids=["a head of its own", "tied"])
def folder(request, tmp_path) -> Path:
    """Return a checkpoint whose vocabulary two ranks cannot divide equally."""
    return write_checkpoint(tmp_path, tie_word_embeddings=request.param, vocab_size=319)


@pytest.mark.parametrize("has_graphs", [True, False])
def test_ranks_with_kernels_give_the_tokens_of_one(folder, has_graphs):
    def serve(ranks: RankGroup) -> tuple[list[list[int]], int]:
        engine, capture = engine_on(ranks, folder, max_num_batched_tokens=7), FakeCapture() if has_graphs else None
        use_kernels(engine, ranks, capture)
        before = ranks.num_all_reduces
        result = answers(engine)
        assert ranks.num_all_reduces > before
        return result, capture.num_replayed if capture else 0

    expected = answers(engine_on(RankGroup(), folder, max_num_batched_tokens=7))
    (first, num_replayed), second = on_ranks(2, serve)
    assert first == expected and second == (first, num_replayed) and (num_replayed > 0) == has_graphs


def test_graphs_are_dropped_once_the_ranks_have_reconnected(folder):
    def fail_on_one(ranks: RankGroup) -> None:
        if ranks.rank == 1:
            raise ValueError("no")

    def serve(ranks: RankGroup) -> list[list[int]]:
        engine, capture = engine_on(ranks, folder), FakeCapture()
        use_kernels(engine, ranks, capture)
        with pytest.raises((ValueError, RuntimeError), match="no"):
            ranks.call_on_all(partial(fail_on_one, ranks))
        result = answers(engine)
        assert capture.num_captured > 0 and capture.num_replayed == 0
        return result

    assert on_ranks(2, serve) == [answers(engine_on(RankGroup(), folder))] * 2
