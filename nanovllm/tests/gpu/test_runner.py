"""The backend of a GPU, with the kernels' plain twins, and with a stand-in for graphs that notes what is captured."""

import gc
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from ...backends.gpu.backend import TritonBackend
from ...backends.gpu.graphs import Capture, CudaCapture, buckets
from ...backends.gpu.inputs import StepInputs
from ...backends.gpu.linear import Timer
from ...backends.gpu.ops import PLAIN, Ops, triton_ops
from ...engine.beam_search import BeamSearchParams
from ...engine.sampling_params import SamplingParams
from ...llm import LLM
from ..helpers import model_runner

PROMPTS: list[str | list[int]] = [
    "the fox",
    "the fox and the crow",
    "a lion",
    "the fox and the crow went",
    [5, 6, 7],
    "a",
]


class Recording:
    """In place of CUDA graphs: to replay a step is to do it again, and that must read and write the same memory."""

    def __init__(self) -> None:
        self.num_captured, self.num_replayed = 0, 0

    def __call__(self, step: Callable[[], None], shares_memory: bool = True) -> Callable[[], None]:
        self.num_captured += 1
        step()

        def replay() -> None:
            self.num_replayed += 1
            step()

        return replay


def with_kernels(
    llm: LLM, capture: Capture | None, max_rows: int = 8, ops: Ops = PLAIN, timer: Timer | None = None
) -> TritonBackend:
    """Make `llm` compute with twins, or with `ops`, from now on."""
    engine, runner = llm.llm_engine, model_runner(llm.llm_engine)
    model, longest = runner.model, engine.max_model_len
    backend = TritonBackend(model, engine.kv_cache, longest, ops, capture, max_rows, timer, progress=False)
    runner.backend = backend
    return backend


def made(checkpoint, **options) -> LLM:
    defaults: dict[str, Any] = {
        "kv_cache_tokens": 512,
        "block_size": 4,
        "attention_backend": "torch",
        "max_num_seqs": 8,
    }
    return LLM(str(checkpoint), **defaults | options)


def outputs_of(llm: LLM, params) -> list:
    outputs = llm.generate(PROMPTS, params)
    return [(each.token_ids, each.finish_reason) for output in outputs for each in output.outputs]


WAYS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True),
    "likeliest": SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=20, ignore_eos=True),
    "samples": SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=12, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    "processors": SamplingParams(temperature=0, max_tokens=8, logit_bias={7: 5.0}, ignore_eos=True),
}
POOLS = {"roomy": {}, "small": {"kv_cache_tokens": 96}, "chunks": {"max_num_batched_tokens": 8}}


ALL = [(way, pool, has_graphs) for way in WAYS for pool in POOLS for has_graphs in (True, False)]
SHORT = {*((way, "roomy", True) for way in WAYS), ("greedy", "small", True), ("seeded", "chunks", False)}


@pytest.mark.parametrize(
    ("way", "pool", "has_graphs"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.full) for case in ALL],
)
def test_tokens_are_those_of_plain_operations(checkpoint, way, pool, has_graphs):
    plain, fast = made(checkpoint, **POOLS[pool]), made(checkpoint, **POOLS[pool])
    capture = Recording() if has_graphs else None
    with_kernels(fast, capture)
    for _ in range(2):  # the second time with cached prefixes
        assert outputs_of(fast, WAYS[way]) == outputs_of(plain, WAYS[way])
    fast.llm_engine.kv_cache_manager.check_integrity()
    assert capture is None or capture.num_replayed > 10


def test_linear_layers_of_few_rows_by_gemv_make_the_same_tokens(checkpoint):
    seconds, calls = (2.0**-i for i in count()), []
    ops = PLAIN._replace(gemv=lambda *arguments: calls.append(1) or PLAIN.gemv(*arguments))
    plain, fast = made(checkpoint), made(checkpoint)
    backend = with_kernels(fast, Recording(), ops=ops, timer=lambda step: next(seconds))  # what is timed last is faster
    assert len(backend._model.model._linears.by_kernel) == 3 * 5, "rows 1, 2 and 4, five shapes"
    calls.clear()
    assert outputs_of(fast, WAYS["greedy"]) == outputs_of(plain, WAYS["greedy"]) and not calls, "six decode together"
    found, expected = (llm.generate(PROMPTS[:2], WAYS["seeded"]) for llm in (fast, plain))
    assert calls and [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


@pytest.mark.parametrize("has_graphs", [True, False])
def test_beams_are_those_of_plain_operations(checkpoint, has_graphs):
    plain, fast = made(checkpoint), made(checkpoint)
    with_kernels(fast, Recording() if has_graphs else None)
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    found, expected = (llm.beam_search(["the fox", "a lion"], params) for llm in (fast, plain))
    assert [[each.tokens for each in one.sequences] for one in found] == [
        [each.tokens for each in one.sequences] for one in expected
    ]


def test_blocks_that_went_to_the_host_come_back(checkpoint):
    options = {"kv_cache_tokens": 96, "offload_policy": "load", "kv_offloading_tokens": 512}
    plain, fast = made(checkpoint, **options), made(checkpoint, **options)
    with_kernels(fast, Recording())
    for _ in range(3):
        assert outputs_of(fast, WAYS["greedy"]) == outputs_of(plain, WAYS["greedy"])
    assert fast.llm_engine.host_tier.num_blocks_loaded > 0


def test_a_graph_is_captured_for_each_bucket_and_a_larger_batch_runs_without(checkpoint):
    fast, capture = made(checkpoint), Recording()
    with_kernels(fast, capture, max_rows=4)
    assert capture.num_captured == len(buckets(4)) == 3
    plain = made(checkpoint)
    assert outputs_of(fast, WAYS["greedy"]) == outputs_of(plain, WAYS["greedy"])
    assert capture.num_replayed == 0, "six decode together"
    fast.generate(PROMPTS[:3], WAYS["greedy"])
    assert capture.num_replayed == 19


def test_what_a_graph_reads_and_writes_never_moves(checkpoint):
    fast = made(checkpoint)
    decodes = with_kernels(fast, Recording())._decodes

    def addresses() -> list[int]:
        tensors = [*decodes.inputs.device.values(), decodes.inputs.block_tables, *decodes._made]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    outputs_of(fast, WAYS["greedy"])
    assert addresses() == before


def test_a_capture_that_fails_leaves_plain_operations(checkpoint):
    def fails(step, shares_memory=True):
        raise RuntimeError("no memory for a graph")

    fast, plain = made(checkpoint), made(checkpoint)
    with pytest.raises(RuntimeError, match="no memory"):
        with_kernels(fast, fails)
    assert outputs_of(fast, WAYS["greedy"]) == outputs_of(plain, WAYS["greedy"])


def test_a_capture_that_fails_keeps_no_memory(checkpoint, monkeypatch):
    inputs, real = [], StepInputs.apply_changes
    monkeypatch.setattr(StepInputs, "apply_changes", lambda self: inputs.append(weakref.ref(self)) or real(self))

    def fails(step, shares_memory=True):
        raise RuntimeError("no memory for a graph")

    fast = made(checkpoint)
    with pytest.raises(RuntimeError, match="no memory"):
        with_kernels(fast, fails)
    gc.collect()
    assert len(inputs) == 1 and inputs[0]() is None


def test_a_step_is_prepared_while_the_one_before_runs(checkpoint, monkeypatch):
    """Only where sequences come, go or are at another token than was guessed, a step is made anew."""
    anew, real = [], StepInputs._begin
    monkeypatch.setattr(StepInputs, "_begin", lambda self, seqs, at: anew.append(len(seqs)) or real(self, seqs, at))
    fast, capture = made(checkpoint), Recording()
    with_kernels(fast, capture)
    anew.clear()
    outputs_of(fast, WAYS["greedy"])
    assert capture.num_replayed == 19 and anew == [6]


def test_blocks_are_not_cleared_and_what_lay_there_is_never_read(checkpoint):
    fast, plain = made(checkpoint), made(checkpoint)
    with_kernels(fast, Recording())
    fast.llm_engine.kv_cache.blocks.fill_(float("nan"))
    assert outputs_of(fast, WAYS["greedy"]) == outputs_of(plain, WAYS["greedy"])
    assert fast.llm_engine.executor.num_steps > 0 and torch.isnan(fast.llm_engine.kv_cache.blocks).any()


def test_kernels_make_the_tokens_of_plain_operations(checkpoint, device):
    """In Triton's interpreter, or on a GPU: prompts in chunks, mixed steps, decodes."""
    pytest.importorskip("nanovllm.backends.gpu.decode", reason="needs triton: make test-triton")
    options = {"device": device, "dtype": "float32", "max_num_batched_tokens": 8}
    plain, fast = made(checkpoint, **options), made(checkpoint, **options)
    with_kernels(fast, CudaCapture() if device == "cuda" else Recording(), max_rows=4, ops=triton_ops())
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found, expected = (llm.generate(PROMPTS[1:4], params) for llm in (fast, plain))  # the interpreter is slow
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
