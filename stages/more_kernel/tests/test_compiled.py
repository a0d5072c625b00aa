"""The kernel as Numba compiles it, in whole engines. It takes a few seconds once: __pycache__ keeps the result."""

import pytest
import torch

from .. import paged_kernel
from ..kv_cache import KVCache
from ..llm import LLM
from ..sampling import SamplingParams
from .helpers import greedy_without_cache

PROMPTS = [[1, 5, 9], [1, 300, 301, 302, 303], list(range(3, 33)), [1, 44]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def num_calls(monkeypatch) -> dict[str, int]:
    """Return counts that go up whenever attention calls the kernel, or copies blocks for tiles."""
    counts = {"kernel": 0, "copies": 0}

    def count(owner: object, function: str, name: str) -> None:
        original = getattr(owner, function)

        def counted(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, function, counted)

    count(paged_kernel, "paged_attention", "kernel")
    count(KVCache, "read", "copies")
    return counts


@pytest.mark.parametrize("budget", [512, 7])
def test_tokens_are_those_of_the_model(checkpoint, model, num_calls, budget):
    """Prompts are computed at once or in chunks, in a pool that holds NaN."""
    llm = LLM(checkpoint, block_size=4, max_num_batched_tokens=budget, offload_policy="recompute")
    llm.kv_cache.blocks.fill_(float("nan"))
    assert tokens(llm) == [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]
    assert num_calls == {"kernel": 2 * llm.model_runner.num_steps, "copies": 0}, "2 layers"


@pytest.mark.parametrize("options", [{"enable_kernel": False}, {"dtype": "bfloat16"}], ids=str)
def test_tiles_take_over_where_there_is_no_kernel(checkpoint, num_calls, options):
    llm = LLM(checkpoint, **options, offload_policy="recompute")
    assert [len(token_ids) for token_ids in tokens(llm)] == [24] * 4
    assert num_calls["kernel"] == 0 and num_calls["copies"] > 0


def test_a_kernel_and_tiles_give_the_same_logits(checkpoint):
    """After a prompt of 30 tokens, and after the one that follows it. Numba has to be able to compile the kernel."""
    logits = {}
    for has_kernel in (True, False):
        llm = LLM(checkpoint, enable_kernel=has_kernel, offload_policy="recompute")
        [seq] = llm.input_processor.process("a", PROMPTS[2], GREEDY)
        llm.kv_cache_manager.allocate(seq, [])
        logits[has_kernel] = [llm.model_runner.compute_logits([(seq, 30)])]
        seq.token_ids.append(7)
        seq.num_computed_tokens = 30
        logits[has_kernel].append(llm.model_runner.compute_logits([(seq, 1)]))
    for kernel, tiles in zip(logits[True], logits[False], strict=True):
        torch.testing.assert_close(kernel, tiles, rtol=1e-4, atol=1e-4)
