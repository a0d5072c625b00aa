"""TritonBackend and GpuChoice, with plain versions for kernels and a fake for CUDA graphs."""

import gc
import re
import weakref
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...backends import choice as choice_module
from ...backends.gpu import backend as backend_module
from ...backends.gpu.backend import BuildBackend, GpuChoice, TritonBackend, check_fp8
from ...backends.gpu.capture import Capture, CudaCapture
from ...backends.gpu.graphs import buckets
from ...backends.gpu.inputs import HostBuffer, StepInputs
from ...backends.gpu.model import Timer, seconds_on_gpu
from ...backends.gpu.ops import PLAIN, Ops, triton_ops, with_fallbacks, without_fallbacks
from ...backends.gpu.tiles import PREFILL_ROWS
from ...beam_search import BeamSearchParams
from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ...llm import LLM
from ...options.attention_backend import BACKEND_VARIABLE, backend_of
from ...requests.outputs import RequestOutput
from ...requests.pooling_params import PoolingParams
from ...requests.sampling_params import SamplingParams
from ...requests.speculation import NgramDrafter
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import model_runner

PROMPTS: list[str | list[int]] = [
    "the fox",
    "the fox and the crow",
    "a lion",
    "the fox and the crow went",
    [5, 6, 7],
    "a",
]


class FakeCapture:
    """A Capture whose replays run the step again. That gives equal results only if the step's memory stays in place."""

    def __init__(self) -> None:
        self.num_captured, self.num_replayed = 0, 0

    def __call__(self, step: Callable[[], None], shares_memory: bool = True) -> Callable[[], None]:
        self.num_captured += 1
        step()

        def replay() -> None:
            self.num_replayed += 1
            step()

        return replay


def failing_capture(step: Callable[[], None], shares_memory: bool = True) -> Callable[[], None]:
    raise RuntimeError("no memory for a graph")


def use_kernels(
    llm: LLM, capture: Capture | None, max_rows: int = 8, ops: Ops = PLAIN, timer: Timer | None = None
) -> TritonBackend:
    """Make `llm` compute with a TritonBackend from now on."""
    engine, runner = llm.llm_engine, model_runner(llm.llm_engine)
    parts = runner.model, engine.kv_cache, engine.max_model_len
    runner.backend = backend = TritonBackend(*parts, ops, capture, max_rows, timer, progress=False)
    return backend


def make_llm(checkpoint, **options) -> LLM:
    defaults: dict[str, Any] = {
        "kv_cache_tokens": 512,
        "block_size": 4,
        "attention_backend": "torch",
        "max_num_seqs": 8,
    }
    return LLM(str(checkpoint), **defaults | options)


def outputs_of(llm: LLM, params) -> list:
    return end_positions(llm.generate(PROMPTS, params))


def end_positions(outputs: list[RequestOutput]) -> list:
    return [(each.token_ids, each.finish_reason) for output in outputs for each in output.outputs]


@pytest.fixture(scope="module")
def served(checkpoint) -> Callable[[str], list[RequestOutput]]:
    """Return a function that returns what plain operations give for PROMPTS and some of PARAMS, computed once."""
    return cache(lambda params: make_llm(checkpoint).generate(PROMPTS, PARAMS[params]))


@pytest.fixture(scope="module")
def expected(served) -> Callable[[str], list]:
    """Return a function that returns the same in the form of outputs_of()."""
    return lambda params: end_positions(served(params))


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True),
    "top_k": SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=20, ignore_eos=True),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2, top_p=0.8, seed=3, max_tokens=20, ignore_eos=True),
    "n": SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=12, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    "processors": SamplingParams(temperature=0, max_tokens=8, logit_bias={7: 5.0}, ignore_eos=True),
}
POOLS = {"roomy": {}, "small": {"kv_cache_tokens": 96}, "chunks": {"max_num_batched_tokens": 8}}
CASES = [
    ("greedy", "small", True),
    ("seeded", "chunks", False),
    ("n", "roomy", True),
    ("logprobs", "roomy", True),
]
MORE = [
    ("top_k", "roomy", True),
    ("min_p", "chunks", True),
    ("processors", "small", True),
    ("greedy", "roomy", False),
    ("seeded", "small", True),
    ("top_k", "small", False),
    ("min_p", "roomy", False),
    ("n", "small", True),
    ("logprobs", "chunks", False),
    ("processors", "roomy", False),
]


@pytest.mark.parametrize(
    ("params", "pool", "has_graphs"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_tokens_match_plain_operations(checkpoint, expected, params, pool, has_graphs):
    fast, capture = make_llm(checkpoint, **POOLS[pool]), FakeCapture() if has_graphs else None
    use_kernels(fast, capture)
    for _ in range(2):  # the second time with cached prefixes
        assert outputs_of(fast, PARAMS[params]) == expected(params)
    fast.llm_engine.kv_cache_manager.check_integrity()
    assert capture is None or capture.num_replayed > 10


def test_tokens_match_when_kernels_compute_linear_layers(checkpoint):
    seconds, rows = (2.0**-i for i in count()), list[tuple[str, int]]()

    def counted(name: str) -> Callable[..., None]:
        return lambda *arguments: rows.append((name, len(arguments[0]))) or getattr(PLAIN, name)(*arguments)

    ops = PLAIN._replace(gemv=counted("gemv"), gemm=counted("gemm"))
    plain, fast = make_llm(checkpoint), make_llm(checkpoint)
    use_kernels(fast, FakeCapture(), ops=ops, timer=lambda step: next(seconds))  # the last one timed wins
    assert {*rows} == {("gemv", 1), ("gemm", 2), ("gemm", 4), ("gemm", 8)}
    for prompts, launched in ((PROMPTS, ("gemm", 8)), (PROMPTS[:1], ("gemv", 1))):
        rows.clear()
        results = [llm.generate(prompts, PARAMS["seeded"]) for llm in (fast, plain)]
        assert end_positions(results[0]) == end_positions(results[1]) and rows[-1] == launched


@pytest.mark.parametrize("reaches_device", [True, False])
def test_tokens_match_if_steps_fail_and_are_run_again(checkpoint, expected, reaches_device, monkeypatch):
    """A failed step may have brought its inputs to the device or not. A sequence alone never fails here."""
    fast = make_llm(checkpoint)
    use_kernels(fast, FakeCapture())
    real, failures = HostBuffer.copy_to, list[int]()

    def copy_to(buffer: HostBuffer, device: torch.Tensor) -> None:
        rows = int((buffer.fields["context_lens"] > 0).sum())
        fails = rows > 1 and buffer.fields["changed_blocks"].any()  # a block table has changed
        if reaches_device or not fails:
            real(buffer, device)
        if fails:
            failures.append(rows)
            raise RuntimeError("out of memory")

    monkeypatch.setattr(HostBuffer, "copy_to", copy_to)
    assert outputs_of(fast, PARAMS["greedy"]) == expected("greedy") and len(failures) > 3


class RecordLaunches(TorchDispatchMode):
    """The names of torch's operations that make or change numbers, and of kernels, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function.overloadpacket).removeprefix("aten.")
        if not function.is_view and "empty" not in name:
            self.names.append(name)
        return function(*arguments, **(keywords or {}))

    def ops(self) -> Ops:
        """Return kernels that are recorded and compute nothing."""
        return Ops(*(partial(self._launch, name) for name in Ops._fields))

    def _launch(self, name: str, *arguments: object) -> None:
        self.names.append(name)


def test_a_graph_launches_two_kernels_before_its_first_layer(checkpoint):
    graphs: list[list[str]] = []

    def capture(step: Callable[[], None], shares_memory: bool = True) -> Callable[[], None]:
        log.names.clear()
        with log:
            step()
        graphs.append([*log.names])
        return step

    log, llm = RecordLaunches(), make_llm(checkpoint)
    use_kernels(llm, capture, ops=log.ops())
    attention = ["add_rms_norm", "mm", "rotate_and_write", "paged_decode", "mm"]
    layers = [*attention, "add_rms_norm", "mm", "silu_and_mul", "mm"] * llm.model_config.num_hidden_layers
    assert len(graphs) == 4
    for names in graphs:
        assert names == ["index_copy_", "embed", *layers, "add_rms_norm", "mm", "sample_rows"]


@pytest.mark.parametrize("faster", PREFILL_ROWS)
def test_prefill_uses_the_shape_that_is_faster(checkpoint, faster, monkeypatch):
    used: list[int] = []

    def paged_prefill(*arguments) -> None:
        used.append(arguments[-2].rows_per_program)
        PLAIN.paged_prefill(*arguments)

    def timer(step: Callable[[], None]) -> float:
        step()
        return 1.0 if used[-1] == faster else 2.0

    monkeypatch.setattr(backend_module, "TIMED_TOKENS", 64)
    fast = make_llm(checkpoint, dtype="bfloat16")
    use_kernels(fast, None, ops=PLAIN._replace(paged_prefill=paged_prefill), timer=timer)
    assert {*used} == {*PREFILL_ROWS}
    used.clear()
    fast.generate(PROMPTS[:2], PARAMS["greedy"])
    assert {*used} == {faster}


@pytest.mark.parametrize("has_graphs", [True, False])
def test_beams_match_plain_operations(checkpoint, has_graphs):
    plain, fast = make_llm(checkpoint), make_llm(checkpoint)
    use_kernels(fast, FakeCapture() if has_graphs else None)
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    result, expected = (llm.beam_search(["the fox", "a lion"], params) for llm in (fast, plain))
    assert [[each.tokens for each in one.sequences] for one in result] == [
        [each.tokens for each in one.sequences] for one in expected
    ]


def test_tokens_match_with_blocks_loaded_from_the_host(checkpoint, expected):
    options = {"kv_cache_tokens": 96, "offload_policy": "load", "kv_offloading_tokens": 512}
    fast = make_llm(checkpoint, **options)
    use_kernels(fast, FakeCapture())
    for _ in range(3):
        assert outputs_of(fast, PARAMS["greedy"]) == expected("greedy")
    assert fast.llm_engine.host_tier.num_blocks_loaded > 0


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_tokens_match_with_keys_and_values_in_8_bits(kv_cache_dtype, tmp_path):
    """Blocks are hit, copied for samples, and loaded from the host."""
    checkpoint, options = write_checkpoint(tmp_path, hidden_size=64), {"kv_cache_dtype": kv_cache_dtype}
    plain = make_llm(checkpoint, **options)
    fast = make_llm(checkpoint, offload_policy="load", kv_cache_tokens=96, kv_offloading_tokens=512, **options)
    use_kernels(fast, FakeCapture())
    for params in (PARAMS["greedy"], SamplingParams(n=3, max_tokens=8, seed=1, ignore_eos=True)):
        for _ in range(2):
            assert outputs_of(fast, params) == outputs_of(plain, params)
    engine = fast.llm_engine
    assert engine.host_tier.num_blocks_loaded > 0 and engine.kv_cache.num_blocks_copied > 0


@pytest.mark.parametrize("has_graphs", [True, False])
def test_embeddings_match_plain_operations(checkpoint, has_graphs):
    """Some prompts end in a chunk of one token, which a graph computes beside sequences that generate."""
    plain, fast = (make_llm(checkpoint, max_num_batched_tokens=4) for _ in range(2))
    capture = FakeCapture() if has_graphs else None
    use_kernels(fast, capture)
    ended: list[dict[str, RequestOutput]] = [{}, {}]
    for llm, outputs in zip((plain, fast), ended, strict=True):
        for i in range(1, 8):
            llm.llm_engine.add_request(f"text {i}", [5, i], PARAMS["greedy"])
            llm.llm_engine.add_request(f"embedding {i}", list(range(20, 20 + i)), PoolingParams())
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
    for request_id, output in ended[0].items():
        assert ended[1][request_id].outputs[0].token_ids == output.outputs[0].token_ids
        if output.embedding is not None:
            assert ended[1][request_id].embedding == pytest.approx(output.embedding, abs=1e-5)
    assert capture is None or capture.num_replayed > 10


def test_each_bucket_has_a_graph_and_larger_batches_run_without(checkpoint, expected):
    fast, capture = make_llm(checkpoint), FakeCapture()
    use_kernels(fast, capture, max_rows=4)
    assert capture.num_captured == len(buckets(4)) == 3
    assert outputs_of(fast, PARAMS["greedy"]) == expected("greedy")
    assert capture.num_replayed == 0, "six sequences decode together"
    fast.generate(PROMPTS[:3], PARAMS["greedy"])
    assert capture.num_replayed == 19


def test_graph_inputs_and_outputs_never_move(checkpoint):
    fast = make_llm(checkpoint)
    graphs = use_kernels(fast, FakeCapture())._graphs  # noqa: SLF001 - nothing else reads a graph's memory

    def addresses() -> list[int]:
        tensors = [leaf for leaf in tree_leaves([vars(graphs), vars(graphs.inputs)]) if isinstance(leaf, torch.Tensor)]
        assert len(tensors) > len(graphs.inputs.device)
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    outputs_of(fast, PARAMS["greedy"])
    assert addresses() == before


def test_a_failed_capture_leaves_plain_operations(checkpoint, expected):
    fast = make_llm(checkpoint)
    with pytest.raises(RuntimeError, match="no memory"):
        use_kernels(fast, failing_capture)
    assert outputs_of(fast, PARAMS["greedy"]) == expected("greedy")


def test_a_failed_capture_keeps_no_memory(checkpoint, monkeypatch):
    inputs, real = [], StepInputs.block_tables
    monkeypatch.setattr(StepInputs, "block_tables", lambda self: inputs.append(weakref.ref(self)) or real(self))
    fast = make_llm(checkpoint)
    with pytest.raises(RuntimeError, match="no memory"):
        use_kernels(fast, failing_capture)
    gc.collect()
    assert len(inputs) == 1 and inputs[0]() is None


@pytest.mark.parametrize(("params", "has_graphs"), [("seeded", False), pytest.param("n", True, marks=pytest.mark.full)])
def test_tokens_match_if_each_token_of_a_draft_has_a_row(checkpoint, served, params, has_graphs, monkeypatch):
    """Graphs have rows for some of the steps only."""
    outputs = served(params)
    texts = [[*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs]

    def propose(drafter: NgramDrafter, token_ids: list[int], most: int) -> list[int]:
        drafts = [text[len(token_ids) :][: min(most, 4)] for text in texts if text[: len(token_ids)] == token_ids]
        return [token ^ (token % 3 == 0) for token in drafts[0]] if drafts else []

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    fast = make_llm(checkpoint, kv_cache_tokens=96, speculative_config=speculation, async_scheduling=True)
    capture = FakeCapture() if has_graphs else None
    use_kernels(fast, capture, max_rows=32)
    for _ in range(2):
        assert outputs_of(fast, PARAMS[params]) == end_positions(outputs)
    stats = fast.stats()
    assert 20 < stats.accepted_tokens < stats.draft_tokens
    assert capture is None or capture.num_replayed > 5


@pytest.mark.parametrize(
    ("params", "has_graphs"),
    [
        *(("seeded", True), ("n", True)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("greedy", False), ("top_k", False), ("min_p", True), ("processors", True))
        ),
    ],
)
def test_tokens_match_plain_operations_if_steps_are_launched_ahead(
    checkpoint, expected, params, has_graphs, monkeypatch
):
    """The device feeds each token to the next step, except where logits processors need the host."""
    fast = make_llm(checkpoint, async_scheduling=True)
    backend = use_kernels(fast, FakeCapture() if has_graphs else None)
    placeholders, real, real_one, real_fill = [], Sequence.input_ids, Sequence.input_id, StepInputs.fill

    def input_ids(seq: Sequence, *args: int) -> list[int]:
        placeholders.extend(token_id for token_id in real(seq, *args) if token_id < 0)
        return real(seq, *args)

    def input_id(seq: Sequence, position: int) -> int:
        placeholders.extend([position] if real_one(seq, position) < 0 else [])
        return real_one(seq, position)

    def fill(inputs: StepInputs, batch: list[Scheduled]) -> None:
        real_fill(inputs, batch)
        placeholders.extend(token_id for token_id in inputs.device["input_ids"][: len(batch)].tolist() if token_id < 0)

    monkeypatch.setattr(Sequence, "input_ids", input_ids)
    monkeypatch.setattr(Sequence, "input_id", input_id)
    monkeypatch.setattr(StepInputs, "fill", fill)
    assert outputs_of(fast, PARAMS[params]) == expected(params)
    assert (len(placeholders) > 20) == (params != "processors") and fast.llm_engine.executor.num_steps > 0
    assert model_runner(fast.llm_engine).backend is backend


def test_row_without_probabilities_fails_alone_if_steps_are_launched_ahead(checkpoint):
    fast = make_llm(checkpoint, async_scheduling=True)
    with torch.inference_mode():
        model_runner(fast.llm_engine).model.model.embed_tokens.weight[300] = float("nan")
    use_kernels(fast, FakeCapture())
    broken, whole = fast.generate([[300, 5], [5, 6]], PARAMS["greedy"])
    assert broken.error is not None and "no token can be sampled" in broken.error
    assert whole.error is None and len(whole.outputs[0].token_ids) == 20


def test_rows_get_table_indices_only_when_sequences_come_or_go(checkpoint, monkeypatch):
    assigned, real = [], StepInputs._assign_indices  # noqa: SLF001 - only time tells the two ways apart
    monkeypatch.setattr(
        StepInputs, "_assign_indices", lambda self, seqs: assigned.append(len(seqs)) or real(self, seqs)
    )
    fast, capture = make_llm(checkpoint), FakeCapture()
    use_kernels(fast, capture)
    assigned.clear()
    outputs_of(fast, PARAMS["greedy"])
    assert capture.num_replayed == 19 and assigned == [6]


def test_unwritten_slots_are_never_read(checkpoint, expected):
    fast = make_llm(checkpoint)
    use_kernels(fast, FakeCapture())
    fast.llm_engine.kv_cache.blocks.fill_(float("nan"))
    assert outputs_of(fast, PARAMS["greedy"]) == expected("greedy")
    assert fast.llm_engine.executor.num_steps > 0 and torch.isnan(fast.llm_engine.kv_cache.blocks).any()


def test_kernels_give_the_tokens_and_embeddings_of_plain_operations(checkpoint, device):
    """The real kernels compute prefills in chunks, mixed steps and decodes."""
    options = {"device": device, "dtype": "float32", "max_num_batched_tokens": 8}
    plain, fast = make_llm(checkpoint, **options), make_llm(checkpoint, **options)
    use_kernels(fast, CudaCapture() if device == "cuda" else FakeCapture(), max_rows=4, ops=triton_ops())
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    result, expected = (llm.generate(PROMPTS[1:4], params) for llm in (fast, plain))  # few, the interpreter is slow
    assert [each.outputs[0].token_ids for each in result] == [each.outputs[0].token_ids for each in expected]
    one, other = (llm.embed([[5], [5, 6, 7, 8, 9]], use_tqdm=False) for llm in (fast, plain))
    for mine, theirs in zip(one, other, strict=True):
        assert mine.outputs.embedding == pytest.approx(theirs.outputs.embedding, abs=1e-5)


# GpuChoice


class FakeRunner:
    backend = "plain"


class FakeBuild:
    """A constructor of backends that fails for some features."""

    def __init__(self, *fails):
        self.captures, self._fails = [], fails  # whether each call had a capture

    def __call__(self, ops, capture, timer):
        assert without_fallbacks(ops) == PLAIN and timer is seconds_on_gpu
        self.captures.append(capture is not None)
        if "kernels" in self._fails or (capture is not None and "graphs" in self._fails):
            raise RuntimeError("out of memory")
        return f"kernels {len(self.captures)}"


def test_graphs_for_timing_are_gone_before_those_of_steps_are_captured(checkpoint):
    """Since torch 2.13, the end of a graph frees cuBLAS's memory for its stream: pytorch#193402."""
    timed = list[weakref.ref]()

    def capture(step: Callable[[], None], shares_memory: bool = True) -> Callable[[], None]:
        replay = lambda: step()  # noqa: E731  # an object of its own
        if shares_memory:
            assert timed and not any(each() for each in timed)
        else:
            timed.append(weakref.ref(replay))
        return replay

    use_kernels(make_llm(checkpoint), capture, timer=lambda step: 1.0)


@pytest.fixture
def fake_triton(monkeypatch):
    monkeypatch.setattr(backend_module, "triton_ops", lambda: PLAIN)
    monkeypatch.setattr(backend_module, "CudaCapture", lambda: "a capture")
    monkeypatch.setattr(backend_module, "version", lambda name: "3.6.0")


@pytest.mark.parametrize(
    ("backend", "is_eager", "fails", "captures", "description"),
    [
        ("auto", False, (), [True], "kernels: triton 3.6.0, CUDA graphs"),
        ("triton", True, (), [False], "kernels: triton 3.6.0, no graphs: enforce_eager"),
        ("torch", False, (), [], "plain operations: as requested"),
        ("auto", False, ("graphs",), [True, False], "kernels: triton 3.6.0, no graphs: RuntimeError: out of memory"),
        ("auto", False, ("kernels",), [True, False], "plain operations: RuntimeError: out of memory"),
    ],
)
def test_a_failure_falls_back_and_gives_the_reason(
    fake_triton, backend, is_eager, fails, captures, description, capsys
):
    runner, build = FakeRunner(), FakeBuild(*fails)
    choice = GpuChoice(backend, is_eager, runner, build)
    assert choice.description == description and build.captures == captures
    assert ("Traceback" in capsys.readouterr().err) == bool(fails)
    assert runner.backend == (f"kernels {len(captures)}" if choice.uses_kernels else "plain")


def cannot_run(*arguments: object) -> None:
    raise RuntimeError("out of resource: shared memory\nand more")


def test_a_kernel_that_cannot_run_is_replaced_alone(fake_triton, monkeypatch, checkpoint, expected, caplog):
    """It is tried when the engine starts, and logged in one line."""
    monkeypatch.setattr(backend_module, "triton_ops", lambda: PLAIN._replace(paged_prefill=cannot_run))
    llm, built = make_llm(checkpoint), list[TritonBackend]()
    runner = FakeRunner()

    def build(ops: Ops, capture: Capture | None, timer: Timer) -> TritonBackend:
        built.append(use_kernels(llm, None, ops=ops))
        return built[0]

    choice = GpuChoice("auto", True, runner, build)
    [record] = caplog.records
    assert record.getMessage().endswith(
        "paged_prefill, so plain operations replace it: RuntimeError: out of resource: shared memory"
    )
    assert choice.description.endswith("no graphs: enforce_eager, plain paged_prefill")
    assert outputs_of(llm, PARAMS["greedy"]) == expected("greedy") and len(caplog.records) == 1


@pytest.mark.parametrize("error", [AssertionError("rows must be contiguous"), torch.OutOfMemoryError("no memory")])
def test_other_errors_are_raised(error):
    def fails(*arguments: object) -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        with_fallbacks(PLAIN._replace(silu_and_mul=fails)).silu_and_mul(torch.ones(1, 2), torch.ones(1, 1))


def test_prefill_takes_the_rows_that_fit(checkpoint):
    """The first choice of rows cannot be launched, which is no reason to give the kernel up."""
    tried = list[int]()

    def prefill(*arguments: Any) -> None:
        tried.append(arguments[-2].rows_per_program)
        if tried[-1] == PREFILL_ROWS[0]:
            cannot_run()
        PLAIN.paged_prefill(*arguments)

    ops = with_fallbacks(PLAIN._replace(paged_prefill=prefill))
    use_kernels(make_llm(checkpoint, dtype="bfloat16"), None, ops=ops, timer=lambda step: step() or 1.0)
    assert {*tried} == {*PREFILL_ROWS} and without_fallbacks(ops) != ops
    assert tried[-1] == PREFILL_ROWS[1] and not ops.paged_prefill.has_failed


def test_an_engine_on_a_gpu_builds_the_backend(checkpoint, monkeypatch):
    builds = list[BuildBackend]()
    monkeypatch.setattr(choice_module, "GpuChoice", lambda *given: builds.append(given[3]))
    engine = make_llm(checkpoint).llm_engine
    pool = copy(engine.kv_cache)
    pool.blocks = SimpleNamespace(device=torch.device("cuda"))
    model = model_runner(engine).model
    choice_module.choose_backend(model, pool, 16, engine.max_model_len, max_num_seqs=8)
    pool.blocks = engine.kv_cache.blocks
    assert isinstance(builds[0](PLAIN, FakeCapture(), lambda step: 1.0), TritonBackend)


def test_kernels_are_left_out_on_old_gpus_unless_they_are_required(fake_triton, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in [
        ((7, 5), "the GPU has compute capability 7.5, and kernels are made for 8.0 and later"),
        ((8, 0), "enforce_eager"),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert GpuChoice("auto", True, FakeRunner(), FakeBuild()).reason == reason
        assert GpuChoice("triton", True, FakeRunner(), FakeBuild()).uses_kernels


def test_fp8_is_refused_by_gpus_that_cannot_convert_it(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_fp8()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match=re.escape("needs compute capability 8.9, got 8.6: use 'int8'")):
        check_fp8()


def test_the_docs_name_the_oldest_gpu():
    oldest = "{}.{}".format(*backend_module.OLDEST)
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"| below {oldest} |" in text and f"| {oldest} to " in text
    assert "\n| {}.{} | L4".format(*backend_module.OLDEST_WITH_FP8) in text


def test_without_triton_plain_operations_compute(monkeypatch):
    def missing():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(backend_module, "triton_ops", missing)
    choice = GpuChoice("auto", False, FakeRunner(), FakeBuild())
    assert "triton cannot be imported: No module named" in choice.description
    with pytest.raises(ValueError, match="'triton' is unavailable: triton cannot be imported"):
        GpuChoice("triton", False, FakeRunner(), FakeBuild())


def test_requiring_an_unavailable_backend_is_an_error(fake_triton):
    with pytest.raises(ValueError, match="'triton' is unavailable: RuntimeError: out of memory"):
        GpuChoice("triton", False, FakeRunner(), FakeBuild("kernels"))
    with pytest.raises(ValueError, match="'numba' is unavailable on a GPU"):
        GpuChoice("numba", False, FakeRunner(), FakeBuild())


def test_enforce_eager_drops_graphs_on_a_gpu_and_kernels_on_a_cpu(monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    assert backend_of("auto", True) == "torch" and backend_of("auto", True, is_gpu=True) == "auto"
    assert backend_of("triton", True, is_gpu=True) == backend_of("triton", True) == "triton"
