"""Kernels on several ranks: the same tokens as on one, also after an error, and all ranks use kernels or none does."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from ...backends.cpu import backend, runner
from ...backends.torch.backend import TorchBackend
from ...distributed.rank_group import RankGroup
from ...llm import LLM
from ...llm_engine import LLMEngine
from ...options.attention_backend import BACKEND_VARIABLE
from ...requests.outputs import RequestOutput
from ..distributed import test_same_tokens as same
from ..testing.checkpoints import CONFIG, write_checkpoint
from ..testing.engines import OPTIONS, answer, params
from ..testing.ranks import engine_on, on_ranks

FULL = pytest.mark.full
NUM_ALL_REDUCES = 1 + 2 * CONFIG["num_hidden_layers"]  # in a step: the embedding, and each half of a layer


def assert_same(world_size: int, function: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    """Assert that kernels on several ranks return what plain operations on one rank return."""
    expected = function(RankGroup(), attention_backend="torch")
    patch.setattr(TorchBackend, "compute", lambda *_: pytest.fail("a rank uses plain operations"))
    assert on_ranks(world_size, partial(function, attention_backend="numba")) == [expected] * world_size


@pytest.mark.parametrize(
    ("shape", "world_size"),
    [
        ("mqa", 2),
        ("tied", 2),
        *(pytest.param(name, 2, marks=FULL) for name in ("wide heads", "qwen3")),
        *(pytest.param(name, 4, marks=FULL) for name in ("gqa", "mqa", "mha", "tied", "qwen2")),
    ],
)
def test_any_shape_of_model(tmp_path, shape, world_size, with_kernels, monkeypatch):
    config = CONFIG | same.SHAPES[shape]
    write_checkpoint(tmp_path, config, same.tensors_of(config))
    assert_same(world_size, partial(same.greedy_and_sampled, tmp_path, skip_tokenizer_init=True), monkeypatch)


@pytest.mark.parametrize("serve", [same.everything, same.guessed])
def test_any_way_to_use_the_pool(serve, checkpoint, with_kernels, monkeypatch):
    assert_same(2, partial(serve, checkpoint), monkeypatch)


def greedy(engine: LLMEngine) -> list[list[int]]:
    return [answer(output) for output in same.outputs_of(engine, [(prompt, params(8)) for prompt in same.PROMPTS])]


def logprobs(engine: LLMEngine, prompts: list[list[int]]) -> list[list[dict[int, float]]]:
    """Return the log-probabilities of the whole vocabulary for each token, of prompts that arrive at once."""

    def numbers(output: RequestOutput) -> list[dict[int, float]]:
        return [{token: each.logprob for token, each in row.items()} for row in output.outputs[0].logprobs or []]

    requests = [(prompt, params(6, logprobs=-1)) for prompt in prompts]
    return [numbers(output) for output in same.outputs_of(engine, requests)]


def test_company_changes_no_bit_on_two_ranks(checkpoint, with_kernels):
    """Two numbers have only one sum. With more ranks, the order of their sums may depend on the batch."""

    def serve(ranks: RankGroup) -> list[list[dict[int, float]]]:
        engine = engine_on(ranks, checkpoint, attention_backend="numba", max_num_batched_tokens=7)
        together = logprobs(engine, same.PROMPTS)
        assert together == [logprobs(engine, [prompt])[0] for prompt in same.PROMPTS]
        assert engine.kernels.uses_kernels
        return together

    first, second = on_ranks(2, serve)
    assert first == second


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "tolerance"),
    [
        ("float32", "auto", 1e-5),
        pytest.param("float32", "int8", 1e-2, marks=FULL),
        pytest.param("bfloat16", "auto", 5e-2, marks=FULL),
    ],
)
def test_log_probabilities_are_those_of_one_rank(
    dtype, kv_cache_dtype, tolerance, tmp_path, compiled, kernels_folder, monkeypatch
):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels_folder))
    compiled(getattr(torch, dtype), is_kv_int8=kv_cache_dtype == "int8")

    folder = write_checkpoint(tmp_path, head_dim=16)

    def serve(ranks: RankGroup) -> list[dict[int, float]]:
        options: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
        engine = engine_on(ranks, folder, attention_backend="numba", **options)
        before = ranks.num_all_reduces
        result = [first for first, *_ in logprobs(engine, same.PROMPTS)]
        num_steps = engine.executor.num_steps if ranks.world_size > 1 else 0
        assert ranks.num_all_reduces - before == num_steps * NUM_ALL_REDUCES
        return result

    expected = serve(RankGroup())
    first, second = on_ranks(2, serve)
    assert first == second and len(expected[0]) == CONFIG["vocab_size"]
    for row, wanted in zip(first, expected, strict=True):
        assert [row[token] for token in sorted(row)] == pytest.approx(
            [wanted[token] for token in sorted(wanted)], abs=tolerance
        )


@pytest.mark.parametrize("at", range(NUM_ALL_REDUCES))
def test_error_in_the_middle_of_a_step_ends_no_request(at, checkpoint, with_kernels, monkeypatch):
    """It fails the step on both ranks. They reconnect, and go on with kernels."""

    def serve(ranks: RankGroup, attention_backend: str) -> list[list[int]]:
        engine = engine_on(ranks, checkpoint, attention_backend=attention_backend)
        all_reduce, calls, errors = ranks.all_reduce, count(), [RuntimeError("no memory")] * ranks.rank

        def fail(tensor: torch.Tensor) -> None:
            if next(calls) == 2 * NUM_ALL_REDUCES + at and errors:  # in the third step
                raise errors.pop()
            all_reduce(tensor)

        monkeypatch.setattr(ranks, "all_reduce", fail)
        result = greedy(engine)
        assert ranks.num_reconnections == int(ranks.world_size > 1) and not errors
        return result

    assert_same(2, serve, monkeypatch)


@pytest.mark.parametrize(("module", "name"), [(backend, "compile_here"), (runner, "Helpers")])
def test_all_ranks_use_kernels_or_none_does(module, name, checkpoint, with_kernels, monkeypatch):
    """One of the ranks cannot load the kernels, or start its threads."""
    real, calls = getattr(module, name), count(1)

    def fail_once_in_two(*arguments: Any) -> Any:
        if next(calls) % 2 == 0:
            raise RuntimeError("not here")
        return real(*arguments)

    def fail(ranks: RankGroup) -> None:
        with pytest.raises(ValueError, match=r"'numba' is unavailable: RuntimeError: .*not here"):
            engine_on(ranks, checkpoint, attention_backend="numba")

    def serve(ranks: RankGroup) -> list[list[int]]:
        engine = engine_on(ranks, checkpoint, attention_backend="auto")
        assert "not here" in engine.kernels.description and not engine.kernels.uses_kernels
        return greedy(engine)

    monkeypatch.delenv(BACKEND_VARIABLE)
    expected = greedy(engine_on(RankGroup(), checkpoint))
    monkeypatch.setattr(module, name, fail_once_in_two)
    on_ranks(2, fail)
    assert on_ranks(2, serve) == [expected] * 2


@pytest.mark.full
def test_two_processes_use_kernels(checkpoint, with_kernels, monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE)
    one = LLM(checkpoint, attention_backend="torch", **OPTIONS)
    two = LLM(checkpoint, tensor_parallel_size=2, **OPTIONS)
    outputs = [llm.generate(same.PROMPTS, params(12), use_tqdm=False) for llm in (one, two)]
    assert two.llm_engine.kernels.uses_kernels
    assert [answer(output) for output in outputs[0]] == [answer(output) for output in outputs[1]]
    assert two.llm_engine.ranks.num_all_reduces == two.llm_engine.executor.num_steps * NUM_ALL_REDUCES
