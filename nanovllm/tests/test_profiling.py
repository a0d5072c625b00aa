"""start_profile() and stop_profile(): the parts of a step in a profiler's timeline, and the recipe for a GPU."""

import ast
import asyncio
import json
import re
from pathlib import Path

import pytest

from .. import LLM, AsyncLLM, SamplingParams
from ..options.engine_args import EngineArgs
from .testing.engines import OPTIONS

PACKAGE = Path(__file__).parents[1]
PARTS = {"schedule", "launch", "sample", "update"}
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of traces, which the profiler creates."""
    return tmp_path / "profile"


@pytest.fixture
def llm(checkpoint: Path, folder: Path) -> LLM:
    return LLM(checkpoint, profiler_config={"profiler": "torch", "torch_profiler_dir": str(folder)}, **OPTIONS)


def ranges(trace: Path) -> list[tuple[str, float, float]]:
    """Return the name, start and end of each part of a step in a trace, in order."""
    events = json.loads(trace.read_text())["traceEvents"]
    named = [event for event in events if event.get("name") in PARTS and event.get("cat") == "user_annotation"]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in named), key=lambda part: part[1])


def test_trace_names_the_parts_of_ten_steps(llm, folder):
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))  # before the profile: not in the trace
    llm.start_profile("ten")
    llm.generate([[5, 6, 7], [8, 9]], TEN)
    llm.stop_profile()
    [trace] = folder.iterdir()
    parts = ranges(trace)
    assert trace.name.startswith("ten.")
    assert [name for name, _, _ in parts] == ["schedule", "launch", "sample", "update"] * 10
    for step in range(0, 40, 4):
        schedule, launch, sample, update = ((start, end) for _, start, end in parts[step : step + 4])
        assert schedule[1] <= launch[0] <= sample[0] <= sample[1] <= launch[1] <= update[0], "sample is part of launch"


def test_each_profile_has_a_trace_of_its_own(llm, folder):
    for _ in range(2):
        llm.start_profile()
        llm.generate([[5]], SamplingParams(max_tokens=1, ignore_eos=True))
        llm.stop_profile()
    assert [len(ranges(trace)) for trace in folder.iterdir()] == [4, 4]


def test_profiled_tokens_are_the_same(llm, checkpoint):
    llm.start_profile()
    try:
        profiled = llm.generate([[5, 6, 7]], TEN)
    finally:
        llm.stop_profile()
    [plain] = LLM(checkpoint, **OPTIONS).generate([[5, 6, 7]], TEN)
    assert profiled[0].outputs[0].token_ids == plain.outputs[0].token_ids


def test_async_engine_records_too(checkpoint, folder):
    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(
            EngineArgs(checkpoint, profiler_config={"profiler": "torch", "torch_profiler_dir": str(folder)}, **OPTIONS)
        )
        try:
            await engine.start_profile()
            async for _ in engine.generate([5, 6, 7], TEN, "0"):
                pass
            await engine.stop_profile()
        finally:
            engine.shutdown()

    asyncio.run(serve())
    [trace] = folder.iterdir()
    assert len(ranges(trace)) == 40


def test_start_and_stop_alternate(llm, checkpoint):
    with pytest.raises(ValueError, match="no profile is being recorded"):
        llm.stop_profile()
    llm.start_profile()
    try:
        with pytest.raises(ValueError, match="a profile is being recorded"):
            llm.start_profile()
    finally:
        llm.stop_profile()
    with pytest.raises(ValueError, match="profiler_config, got None"):
        LLM(checkpoint, **OPTIONS).start_profile()


def test_cuda_profiler_needs_a_gpu(checkpoint, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    llm = LLM(checkpoint, profiler_config={"profiler": "cuda"}, **OPTIONS)
    with pytest.raises(ValueError, match="needs a GPU"):
        llm.start_profile()
    assert len(llm.generate([[5]], TEN)[0].outputs[0].token_ids) == 10


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"profiler": "nsys"},
        {"profiler": "torch"},
        {"profiler": "torch", "torch_profiler_dir": ""},
        {"profiler": "cuda", "torch_profiler_dir": "profile"},
        "cuda",
    ],
)
def test_other_configs_are_rejected(config):
    with pytest.raises(ValueError, match=r"profiler_config must be .* got"):
        EngineArgs(profiler_config=config)


# The recipe for a GPU


def names_of_kernels() -> set[str]:
    """Return backends/gpu's functions that are launched: `merge_splits[grid](...)`, `launch(attend_split, ...)`."""
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / "backends" / "gpu").glob("*_kernels.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    compiled = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and "jit" in decorators(node)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    launched = [call.func.value for call in calls if isinstance(call.func, ast.Subscript)]
    launched += [call.args[0] for call in calls if ast.unparse(call.func) == "launch"]
    return compiled & {value.id for value in launched if isinstance(value, ast.Name)}


def decorators(function: ast.FunctionDef) -> str:
    return " ".join(map(ast.unparse, function.decorator_list))


def test_ncu_of_the_docs_records_the_attention_kernels():
    text = (PACKAGE / "docs" / "tracing.md").read_text()
    [pattern] = re.findall(r'^ncu .*--kernel-name "?regex:([^" ]+)', text, re.MULTILINE)
    kernels = names_of_kernels()
    assert len(kernels) >= 9, "the kernels were found"
    matching = {name for name in kernels if re.search(pattern, name)}
    assert matching == {name for name in kernels if name.startswith("attend_") or name == "merge_splits"}
    assert "--profile-from-start off" in text and "--capture-range cudaProfilerApi" in text
