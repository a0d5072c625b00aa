"""What the product's notebook is made with: all ways give the same tokens, the traces are the kernels' own."""

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

from nanovllm.core.online_softmax import attend_part, attend_part_reference
from nanovllm.kernels import choice
from nanovllm.kernels.attention import PART
from notebooks.helpers import apart, pictures, taking, timelines, ways
from notebooks.helpers import nanovllm as helpers
from notebooks.helpers.roofline import LOOKS
from notebooks.helpers.timelines import PHASES
from notebooks.helpers.ways import WAYS, DecodeStep
from tests.helpers import ROOT, STORYTELLER


@pytest.fixture(scope="module")
def step():
    return DecodeStep(STORYTELLER, "float32", max_rows=5, context=40)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.full), 4, 5])
def test_all_ways_give_the_same_tokens_and_leave_the_engine_as_it_was(step, rows):
    runner = step.engine.model_runner
    before = runner._model.model, runner._attention, runner._few, dict(runner._model.named_modules())
    found = {way: step.tokens(way, rows) for way in step.ways(rows)}
    assert len(found) == 5 and len(set(map(tuple, found.values()))) == 1, found
    assert (runner._model.model, runner._attention, runner._few) == before[:3]
    assert dict(runner._model.named_modules()) == before[3]


def test_the_floor_counts_the_weights_and_the_slots(step):
    of_weights = 4 * sum(parameter.numel() for parameter in step._runner._model.parameters())
    cache = step.llm.kv_cache
    a_slot = cache.blocks[0].nbytes // cache.block_size
    assert step.num_bytes(3) - of_weights == 3 * 41 * a_slot


@pytest.mark.full
def test_plain_operations_are_told_in_order_and_are_one_core_s(step):
    spans = timelines.plain_timeline(step)
    assert all(span.start <= span.end <= after.start + 1 for span, after in pairwise(spans))
    linears = [span for span in spans if span.name == "aten::linear"]
    assert len(linears) == 4 * step.llm.model_config.num_hidden_layers + 1
    assert {timelines.kind_of(span.name) for span in spans} == set(timelines.KINDS)


def test_phases_of_a_compiled_step_are_seen_in_order(step):
    spans = timelines.compiled_timeline(step, num_steps=1)
    assert [span.name for span in spans] == [*PHASES] * step.llm.model_config.num_hidden_layers + ["logits"]
    assert spans[0].start == 0 and all(span.start <= span.end == after.start for span, after in pairwise(spans))
    assert spans[-1].end > spans[-1].start


@pytest.mark.parametrize("rows, meeting", [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_a_weight_is_read_once_for_up_to_four_rows(rows, meeting):
    generator = np.random.default_rng(0)
    weight, x = (generator.normal(size=size).astype(np.float32) for size in (80, (rows, 80)))
    out, did = apart.trace_products(weight, x)
    assert np.allclose(out, x @ weight, atol=1e-5)
    assert did.count("weight") == 80 // 16 and did.count("x") == did.count("fma") == meeting * 80 // 16


def test_what_is_known_after_a_part_is_what_the_twin_knows_of_these_keys():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(count, 64, generator=generator) for count in (2, 2 * PART + 80, 2 * PART + 80))
    parts = apart.attend_in_parts(q / 8, k, v)
    assert [part.num_keys for part in parts] == [PART, 2 * PART, len(k)]
    for part in parts:
        keys, values = k[None, None, : part.num_keys], v[None, None, : part.num_keys]
        for attend in (attend_part, attend_part_reference):
            twin = attend(q[None, None], keys, values)
            assert np.allclose(part.peaks + np.log(part.sums), twin.lse, atol=1e-5)
            assert np.allclose(part.out / part.sums[:, None], twin.out[0, 0], atol=1e-5)


@pytest.mark.parametrize("late", [0, 5, None])
def test_each_piece_is_taken_once_and_by_main_where_nobody_helps(late):
    pieces = taking.take_turns(torch.randn(64, 32), 8, late)
    assert [piece.number for piece in pieces] == list(range(8))
    assert all(piece.start <= piece.end for piece in pieces)
    assert all(piece.worker == 0 for piece in pieces[:late])
    assert min(piece.start for piece in pieces) == 0


@pytest.mark.parametrize("name", ["ways", "roofline", "nanovllm", "timelines", "apart", "taking"])
def test_examples_in_docstrings(name):
    assert doctest.testmod(import_module(f"notebooks.helpers.{name}")).failed == 0


@pytest.mark.full
def test_without_numba_the_notebook_shows_plain_operations(monkeypatch):
    shown = []
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    monkeypatch.setattr(pictures, "display", shown.append)
    for module in (choice, ways, helpers):
        monkeypatch.setattr(module, "lack", lambda: "numba is not installed")
    names = {}
    for cell in nbformat.read(ROOT / "notebooks/nanovllm.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "nanovllm.ipynb", "exec"), names)
    assert "numba is not installed" in shown[0].data
    assert sum(type(what).__name__ == "SVG" for what in shown) == 3 and "one call" not in "".join(
        what.data for what in shown
    )


def test_each_way_has_its_look():
    assert (*LOOKS,) == WAYS
