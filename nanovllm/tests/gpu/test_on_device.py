"""Tests that need a real GPU, for its graphs, streams and memory."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...backends.gpu.backend import TritonBackend
from ...backends.gpu.capture import CudaCapture
from ...backends.gpu.graphs import BucketedGraphs, DecodeGraphs, DecodeOutput, buckets
from ...backends.gpu.model import seconds_on_gpu
from ...backends.gpu.ops import triton_ops
from ...llm import LLM
from ...requests.sampling_params import SamplingParams
from ..testing.engines import model_runner
from .test_backend import PROMPTS, make_llm, outputs_of

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SAMPLED = {"top_p": {"top_p": 0.8}, "top_k": {"top_k": 20, "top_p": 0.9}, "min_p": {"min_p": 0.05}, "n": {"n": 3}}


@pytest.fixture(autouse=True)
def on_cuda(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")


def on_gpu(checkpoint, capture: CudaCapture | None, has_kernels: bool = True, **options: Any) -> tuple[LLM, Any]:
    """Return an engine and its backend, with kernels, timed linear layers, and graphs if there is a capture."""
    llm = make_llm(checkpoint, device="cuda", **{"dtype": "float32"} | options)
    engine, runner = llm.llm_engine, model_runner(llm.llm_engine)
    if has_kernels:
        parts = runner.model, engine.kv_cache, engine.max_model_len, triton_ops(), capture, 8, seconds_on_gpu
        runner.backend = TritonBackend(*parts, progress=False)
    return llm, runner.backend


def test_graphs_kernels_and_plain_operations_generate_equal_tokens(checkpoint):
    plain, _ = on_gpu(checkpoint, None, has_kernels=False)
    kernels, _ = on_gpu(checkpoint, None)
    graphs, _ = on_gpu(checkpoint, CudaCapture())
    expected = outputs_of(plain, GREEDY)
    assert outputs_of(kernels, GREEDY) == expected
    for _ in range(2):  # the second time with cached prefixes
        assert outputs_of(graphs, GREEDY) == expected
    for prompt in PROMPTS:  # alone, in the graph of one row, which may use gated_gemv
        [one], [two] = (llm.generate([prompt], GREEDY, use_tqdm=False) for llm in (plain, graphs))
        assert one.outputs[0].token_ids == two.outputs[0].token_ids


@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED)
def test_graphs_sample_the_tokens_of_plain_operations(checkpoint, params):
    plain, _ = on_gpu(checkpoint, None, has_kernels=False)
    graphs, _ = on_gpu(checkpoint, CudaCapture())
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, **params)
    assert outputs_of(graphs, sampled) == outputs_of(plain, sampled)


def parts_of(backend: TritonBackend) -> tuple[DecodeGraphs, Callable[[int], None], DecodeOutput]:
    """Return the graphs of a backend, and the step that each of them has recorded, with its results."""
    graphs = backend._graphs  # noqa: SLF001 - a graph is compared with its own step
    return graphs, graphs._step, graphs._outputs  # noqa: SLF001 - as above


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_replayed_graph_matches_its_step_bit_for_bit(checkpoint, dtype, monkeypatch):
    llm, backend = on_gpu(checkpoint, CudaCapture(), dtype=dtype)
    _, step, outputs = parts_of(backend)
    replay, compared = BucketedGraphs.run, []

    def run(graphs: BucketedGraphs, num_rows: int) -> None:
        replay(graphs, num_rows)
        replayed = [each[:num_rows].clone() for each in outputs]
        step(next(size for size in buckets(8) if size >= num_rows))  # writes the same keys again
        for one, two in zip(replayed, outputs, strict=True):
            assert torch.equal(one, two[:num_rows])
        compared.append(num_rows)

    monkeypatch.setattr(BucketedGraphs, "run", run)
    outputs_of(llm, GREEDY)
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert {1, 6} <= set(compared)


def test_padding_rows_leave_the_pool_unchanged(checkpoint, monkeypatch):
    llm, backend = on_gpu(checkpoint, CudaCapture())
    graphs, replay = parts_of(backend)[0], BucketedGraphs.run
    blocks = llm.llm_engine.kv_cache.blocks
    before = blocks.clone()
    with torch.inference_mode():
        for rows in (1, 4, 8):
            monkeypatch.setattr(BucketedGraphs, "run", lambda each, _, rows=rows: replay(each, rows))
            graphs.run([])
    assert torch.equal(before.view(torch.uint8), blocks.view(torch.uint8))


def test_no_request_waits_for_the_compiler(checkpoint):
    import triton

    llm, _ = on_gpu(checkpoint, CudaCapture(), max_num_batched_tokens=8)
    compiled: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda **named: compiled.append(named["repr"]) and None
    try:
        for params in (GREEDY, SamplingParams(temperature=0, logit_bias={7: 5.0}), SamplingParams(n=3, seed=1)):
            outputs_of(llm, params)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    assert compiled == []


def test_a_decode_step_launches_one_graph_and_no_kernels(checkpoint):
    llm, _ = on_gpu(checkpoint, CudaCapture())
    engine = llm.llm_engine
    engine.add_request("a", "the fox", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.step()
    names = [event.name for event in profile.events()]
    assert names.count("cudaGraphLaunch") == 1
    assert not [name for name in names if "LaunchKernel" in name], names


def test_a_deleted_engine_frees_its_memory(checkpoint):
    def memory() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    used = []
    for _ in range(3):
        llm, backend = on_gpu(checkpoint, CudaCapture())
        outputs_of(llm, GREEDY)
        del llm, backend
        used.append(memory())
    assert used[2] <= used[1], "only the first engine may leave memory behind: the library's workspaces"


def test_a_failed_capture_leaves_the_stream_and_the_engine_unchanged(checkpoint):
    llm, _ = on_gpu(checkpoint, None)
    expected, before = outputs_of(llm, GREEDY), torch.cuda.current_stream()

    def fail() -> None:
        torch.ones(1000, device="cuda")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        CudaCapture()(fail)
    assert torch.cuda.current_stream() == before
    assert outputs_of(llm, GREEDY) == expected


def test_other_threads_may_allocate_during_a_capture():
    is_done, failures = threading.Event(), []

    def allocate() -> None:
        try:
            while not is_done.is_set():
                torch.empty(1000, pin_memory=True).to("cuda", non_blocking=True)
                torch.empty(2**22, device="cuda").zero_()
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            failures.append(error)

    x = torch.zeros(100, device="cuda")
    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        capture = CudaCapture()
        replays = [capture(lambda: x.add_(1)) for _ in range(50)]
    finally:
        is_done.set()
        thread.join()
    for replay in replays:
        replay()
    assert not failures and x.eq(50).all()
