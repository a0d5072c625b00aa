"""Helpers of the package's notebook: all ways of a step give the same tokens, and launches are counted correctly."""

import doctest
from importlib import import_module
from itertools import pairwise

import pytest
import torch

pytest.importorskip("nbformat")
pytest.importorskip("matplotlib")
pytest.importorskip("numba")

import nbformat

from nanovllm.backends.cpu import backend
from notebooks.helpers import gpu, pictures
from notebooks.helpers import nanovllm as helpers
from notebooks.helpers.nanovllm import LOOKS, DecodeStep, Flip, Rounded
from stages.bench import models
from tests.helpers import ROOT, STORYTELLER


@pytest.fixture(scope="module")
def step():
    return DecodeStep(STORYTELLER, "float32", max_rows=5, context=40)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_all_ways_give_the_same_tokens_and_restore_the_engine(step, rows):
    runner = step.engine.executor
    before = runner.backend
    tokens = {way: step.tokens(way, rows) for way in step.ways}
    assert [*tokens] == [*LOOKS] and len(set(map(tuple, tokens.values()))) == 1, tokens
    assert runner.backend is before


def test_a_group_in_4_bits_has_a_weight_that_stands_out():
    group = helpers.widest_group(STORYTELLER)
    assert group.weights.shape == group.q.shape == (32,) and {0, 15} <= {*group.q.tolist()}
    assert (group.dequantized - group.weights).abs().max() <= 0.6 * group.scale
    assert group.weights.abs().max() > 4 * group.weights.abs().median()


@pytest.mark.nightly
def test_a_quantized_step_reads_fewer_bytes():
    step = DecodeStep(STORYTELLER, "float32", max_rows=2, context=40, quantization="int4")
    assert step.ways == [helpers.KERNELS] and len(step.tokens(helpers.KERNELS, 2)) == 2
    assert step.num_bytes(1) < 0.3 * 4 * models.num_parameters(step.llm.model_config)


@pytest.fixture(scope="module")
def rounding():
    return helpers.RoundingModel(STORYTELLER)


def test_a_flip_changes_one_input_by_a_step_and_the_tokens_behind_it(rounding):
    text, flip = [1, 403, 88, 9, 300, 12], Flip(linear=2, token=3, number=40)
    plain, again, flipped = rounding.run(text), rounding.run(text), rounding.run(text, flip=flip)
    assert plain.logits.equal(again.logits) and len(plain.inputs) == 4 * 8 + 1
    changed = (plain.inputs[2] != flipped.inputs[2]).nonzero().tolist()
    assert changed == [[3, 40]] and plain.steps[2].equal(flipped.steps[2])
    a_step = plain.inputs[2][3, 32:64].abs().max() / 127  # of this group of 32 numbers
    assert torch.isclose((flipped.inputs[2] - plain.inputs[2])[3, 40].abs(), a_step)
    assert plain.logits[:3].equal(flipped.logits[:3]) and not (plain.logits[3:] == flipped.logits[3:]).all(1).any()
    assert helpers.spread(plain, flipped)[:2] == [0.0, 0.0] and min(helpers.spread(plain, flipped)[2:]) > 0


def test_orders_of_adding_differ_in_the_last_digits_alone(rounding):
    text = [1, 403, 88, 9, 300, 12]
    one, halves = (rounding.run(text, pieces, rounds=False) for pieces in (1, 2))
    assert 0 < max(helpers.spread(one, halves)) < 1e-5 and one.inputs[0].equal(halves.inputs[0])
    difference = (rounding.run(text).logits - one.logits).abs().max() / one.logits.abs().max()
    assert 1e-4 < difference < 0.1, "8 bits are coarser than float32, and fine enough"


def test_flips_are_those_of_the_first_layer_that_has_some():
    def run(*steps, logits=((1.0, 0.0), (0.0, 1.0))):
        steps = [torch.tensor(each) for each in steps]
        return Rounded(steps, steps, torch.tensor(logits))

    one = run([[0.4, 1.0]], [[1.4999, 2.0], [3.0, 4.5001]], [[0.0]])
    other = run([[0.41, 1.0]], [[1.5001, 2.0], [3.0, 4.4999]], [[5.0]], logits=((2.0, 0.0), (1.0, 0.0)))
    assert helpers.flips_between(one, other) == [Flip(1, 0, 0), Flip(1, 1, 1)]
    assert helpers.flips_between(one, one) == [] and helpers.changed_tokens(one, other) == [1]


@pytest.mark.full
def test_kernels_give_one_answer_alone_and_beside_others():
    prompts = ["Once upon a time", "The fox said", "Long ago, a king"]
    alone, beside = helpers.alone_and_beside(STORYTELLER, "numba", prompts, 6)
    assert alone == beside and len(alone) == 6 and len(set(alone)) == 6


@pytest.mark.full
def test_floor_counts_weights_and_slots(step):
    of_weights = 4 * sum(parameter.numel() for parameter in step.runner.model.parameters())
    cache = step.llm.llm_engine.kv_cache
    a_slot = cache.blocks[0].nbytes // cache.block_size
    assert step.num_bytes(3) - of_weights == 3 * 41 * a_slot


@pytest.mark.full
def test_plain_operations_are_recorded_in_order_on_one_core(step):
    spans = helpers.profile_plain(step)
    assert all(span.start <= span.end <= after.start + 1 for span, after in pairwise(spans))
    linears = [span for span in spans if span.name == "aten::linear"]
    assert len(linears) == 4 * step.llm.model_config.num_hidden_layers + 1
    assert {span.kind for span in spans} == {*helpers.KINDS}


@pytest.fixture(scope="module")
def stories():
    return gpu.three_stories(STORYTELLER, 40)


def test_merged_splits_equal_the_reference(stories):
    calls, tokens = gpu.record_calls(stories)
    assert len(calls) == stories.model_config.num_hidden_layers and len(tokens) == 3
    for row, one in enumerate(calls[:3]):
        parts = [part for _, part in gpu.attend_splits(one, row)]
        shares = torch.stack([part.lse.flatten() for part in parts]).softmax(0)  # [splits, num_heads]
        outs = torch.stack([part.out.flatten(0, 2) for part in parts])  # [splits, num_heads, head_dim]
        assert torch.allclose((shares[..., None] * outs).sum(0), one.out[row], atol=1e-5)


@pytest.mark.parametrize(("context_len", "num_splits"), [(1, 1), (64, 3), (65, 3), (1000, 7), (300, 128)])
def test_splits_read_each_key_once(context_len, num_splits):
    spans = gpu.spans_of_splits(context_len, num_splits, 64)
    assert [at for span in spans for at in range(*span)] == list(range(context_len))


def test_launches_are_operations_or_kernels_or_one_graph(stories):
    plain, kernels, graph = (gpu.count_step(stories, way) for way in gpu.WAYS)
    layers = stories.model_config.num_hidden_layers
    assert [launch.name for launch in graph] == ["copy_", "graph"]
    assert [launch.name for launch in gpu.layer_of(kernels, 1)] == [
        *("mm", "rotate_and_write", "paged_decode", "merge_splits", "mm"),
        *("add_rms_norm", "mm", "silu_and_mul", "mm", "add_rms_norm"),
    ]
    for step in (plain, kernels):
        assert sum(launch.kind == "linear" for launch in step) == 4 * layers + 1  # and the logits
        assert gpu.layer_of(step, 1) == gpu.layer_of(step, layers - 2)
    assert not {"view", "transpose", "unflatten", "new_empty"} & {launch.name for launch in plain}


def test_views_launch_nothing():
    x = torch.ones(4, 4)
    with gpu.Launches() as launches:
        (x[1:].to(torch.float32) + 1).flatten()
        x.t().flatten()
        x.add_(1)
        torch.empty(3)
    assert [launch.name for launch in launches.seen] == ["add", "clone", "add_"]


@pytest.mark.parametrize("name", ["nanovllm", "gpu"])
def test_docstring_examples(name):
    assert doctest.testmod(import_module(f"notebooks.helpers.{name}")).failed == 0


@pytest.mark.nightly
def test_notebook_without_numba_shows_plain_operations(monkeypatch):
    shown = []
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    monkeypatch.setattr(pictures, "display", shown.append)
    for module in (backend, helpers):
        monkeypatch.setattr(module, "missing_requirement", lambda: "numba is not installed")
    names = {}
    for cell in nbformat.read(ROOT / "notebooks/nanovllm.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "nanovllm.ipynb", "exec"), names)
    assert "numba is not installed" in shown[0].data
    assert sum(type(what).__name__ == "SVG" for what in shown) == 7 and "one compiled call" not in "".join(
        what.data for what in shown
    )
