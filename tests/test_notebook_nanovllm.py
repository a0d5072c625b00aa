"""Helpers of the package's notebook: all backends give the same tokens, and the traces come from the kernels."""

import doctest
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("nbformat")
pytest.importorskip("matplotlib")
pytest.importorskip("numba")

import nbformat

from nanovllm.backends.cpu import backend
from nanovllm.backends.cpu.attention import TILE
from nanovllm.backends.torch.online_softmax import attend_part, attend_part_reference
from notebooks.helpers import apart, launches, paged, pictures, taking, timelines, ways
from notebooks.helpers import nanovllm as helpers
from notebooks.helpers.roofline import LOOKS
from notebooks.helpers.timelines import PHASES
from notebooks.helpers.ways import WAYS, DecodeStep
from tests.helpers import ROOT, STORYTELLER


@pytest.fixture(scope="module")
def step():
    return DecodeStep(STORYTELLER, "float32", max_rows=5, context=40)


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_all_ways_give_the_same_tokens_and_restore_the_engine(step, rows):
    runner = step.engine.executor
    before = runner.model.model, runner.backend, dict(runner.model.named_modules())
    tokens = {way: step.tokens(way, rows) for way in step.ways(rows)}
    assert len(tokens) == 5 and len(set(map(tuple, tokens.values()))) == 1, tokens
    assert (runner.model.model, runner.backend) == before[:2]
    assert dict(runner.model.named_modules()) == before[2]


@pytest.mark.full
def test_floor_counts_weights_and_slots(step):
    of_weights = 4 * sum(parameter.numel() for parameter in step.runner.model.parameters())
    cache = step.llm.llm_engine.kv_cache
    a_slot = cache.blocks[0].nbytes // cache.block_size
    assert step.num_bytes(3) - of_weights == 3 * 41 * a_slot


@pytest.mark.full
def test_plain_operations_are_recorded_in_order_on_one_core(step):
    spans = timelines.plain_timeline(step)
    assert all(span.start <= span.end <= after.start + 1 for span, after in pairwise(spans))
    linears = [span for span in spans if span.name == "aten::linear"]
    assert len(linears) == 4 * step.llm.model_config.num_hidden_layers + 1
    assert {timelines.kind_of(span.name) for span in spans} == set(timelines.KINDS)


@pytest.mark.full
def test_phases_of_a_compiled_step_are_in_order(step):
    spans = timelines.compiled_timeline(step, num_steps=1)
    assert [span.name for span in spans] == [*PHASES] * step.llm.model_config.num_hidden_layers + ["logits"]
    assert spans[0].start == 0 and all(span.start <= span.end == after.start for span, after in pairwise(spans))
    assert spans[-1].end > spans[-1].start


@pytest.mark.parametrize("rows, meeting", [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_weights_are_read_once_for_up_to_four_rows(rows, meeting):
    generator = np.random.default_rng(0)
    weight, x = (generator.normal(size=size).astype(np.float32) for size in (80, (rows, 80)))
    out, did = apart.trace_products(weight, x)
    assert np.allclose(out, x @ weight, atol=1e-5)
    assert did.count("weight") == 80 // 16 and did.count("x") == did.count("fma") == meeting * 80 // 16


def test_attention_after_each_part_equals_the_reference_on_its_keys():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(count, 64, generator=generator) for count in (2, 2 * TILE + 80, 2 * TILE + 80))
    parts = apart.attend_in_parts(q / 8, k, v)
    assert [part.num_keys for part in parts] == [TILE, 2 * TILE, len(k)]
    for part in parts:
        keys, values = k[None, None, : part.num_keys], v[None, None, : part.num_keys]
        for attend in (attend_part, attend_part_reference):
            twin = attend(q[None, None], keys, values)
            assert np.allclose(part.peaks + np.log(part.sums), twin.lse, atol=1e-5)
            assert np.allclose(part.out / part.sums[:, None], twin.out[0, 0], atol=1e-5)


@pytest.mark.parametrize("late", [0, 5, None])
def test_each_piece_is_taken_once(late):
    pieces = taking.take_turns(torch.randn(64, 32), 8, late)
    assert [piece.number for piece in pieces] == list(range(8))
    assert all(piece.start <= piece.end for piece in pieces)
    assert all(piece.worker == 0 for piece in pieces[:late])
    assert min(piece.start for piece in pieces) == 0


@pytest.fixture(scope="module")
def stories():
    return paged.tell_stories(STORYTELLER, 40)


def test_merged_splits_equal_the_reference(stories):
    calls, tokens = paged.asked_of(stories)
    assert len(calls) == stories.model_config.num_hidden_layers and len(tokens) == 3
    for row, one in enumerate(calls[:3]):
        parts = [part for _, part in paged.parts_of(one, row)]
        shares = torch.stack([part.lse.flatten() for part in parts]).softmax(0)  # [splits, num_heads]
        outs = torch.stack([part.out.flatten(0, 2) for part in parts])  # [splits, num_heads, head_dim]
        assert torch.allclose((shares[..., None] * outs).sum(0), one.out[row], atol=1e-5)


@pytest.mark.parametrize(("context_len", "num_splits"), [(1, 1), (64, 3), (65, 3), (1000, 7), (300, 128)])
def test_splits_read_each_key_once(context_len, num_splits):
    spans = paged.spans_of_splits(context_len, num_splits, 64)
    assert [at for span in spans for at in range(*span)] == list(range(context_len))


@pytest.mark.full
def test_cpu_kernel_equals_the_reference(step, stories):
    calls, _ = paged.asked_of(stories)
    assert paged.furthest([paged.by_numba(stories, call) for call in calls], calls) < 1e-5


def test_launches_are_operations_or_kernels_or_one_graph(stories):
    plain, kernels, graph = (launches.count_step(stories, way) for way in launches.WAYS)
    layers = stories.model_config.num_hidden_layers
    assert [launch.name for launch in graph] == ["copy_", "graph"]
    assert [launch.name for launch in launches.layer_of(kernels, 1)] == [
        *("mm", "rotate_and_write", "paged_decode", "merge_splits", "mm"),
        *("add_rms_norm", "mm", "silu_and_mul", "mm", "add_rms_norm"),
    ]
    for step in (plain, kernels):
        assert sum(launch.kind == "linear" for launch in step) == 4 * layers + 1  # and the logits
        assert launches.layer_of(step, 1) == launches.layer_of(step, layers - 2)
    assert not {"view", "transpose", "unflatten", "new_empty"} & {launch.name for launch in plain}


def test_views_launch_nothing():
    x = torch.ones(4, 4)
    with launches.Launches() as seen:
        (x[1:].to(torch.float32) + 1).flatten()
        x.t().flatten()
        x.add_(1)
        torch.empty(3)
    assert [launch.name for launch in seen.found] == ["add", "clone", "add_"]


def test_static_bytes_match_a_runner(stories):
    counted = launches.static_bytes(stories.model_config, 4, stories.llm_engine.max_model_len)
    seen = launches.Launches()
    with paged.runner_of(stories, seen.ops(), seen.capture) as runner:
        graphs = runner.backend._graphs
        workspaces = [*graphs._decode_workspaces.values(), graphs._likeliest_workspace]
        hidden, logits, likeliest = graphs._outputs
        expected = [launches.nbytes(graphs.inputs.device.values()), graphs.inputs.block_tables.nbytes]
        expected += [sum(launches.nbytes(vars(workspace).values()) for workspace in workspaces)]
        expected += [(hidden.nbytes + logits.nbytes) // 2 + likeliest.nbytes]  # here they are float32
    assert [*counted.values()] == expected


@pytest.mark.parametrize("name", ["ways", "roofline", "nanovllm", "timelines", "apart", "taking", "paged", "launches"])
def test_docstring_examples(name):
    assert doctest.testmod(import_module(f"notebooks.helpers.{name}")).failed == 0


@pytest.mark.full
def test_notebook_without_numba_shows_plain_operations(monkeypatch):
    shown = []
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    monkeypatch.setattr(pictures, "display", shown.append)
    for module in (backend, ways, helpers):
        monkeypatch.setattr(module, "missing_requirement", lambda: "numba is not installed")
    names = {}
    for cell in nbformat.read(ROOT / "notebooks/nanovllm.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "nanovllm.ipynb", "exec"), names)
    assert "numba is not installed" in shown[0].data
    assert sum(type(what).__name__ == "SVG" for what in shown) == 6 and "one call" not in "".join(
        what.data for what in shown
    )


def test_each_way_has_a_look():
    assert (*LOOKS,) == WAYS
