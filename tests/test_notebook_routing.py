"""Helpers of the notebook on routing: a run on a few engines, and the cost of typical steps."""

import doctest

import pytest

pytest.importorskip("matplotlib")

from notebooks.helpers import routing as helpers
from stages.bench.routing import ROUTERS, StepCost


def test_docstring_examples():
    assert doctest.testmod(helpers).failed == 0


def test_cached_tokens_cost_neither_their_computation_nor_reads_of_their_own():
    whole, cached, batch, one = helpers.steps_ms(StepCost(fixed=0.0, per_token=0.001, per_read=0.0)).values()
    assert [whole, cached, batch, one] == pytest.approx([288, 32, 8, 1])
    whole, cached, batch, one = helpers.steps_ms(StepCost(fixed=0.0, per_token=0.0, per_read=0.001)).values()
    assert whole - cached == pytest.approx(256 * 257 // 2) and batch == pytest.approx(8 * one)


@pytest.mark.full
def test_run_has_a_line_for_each_router():
    routed = helpers.Routed([1, 2], num_requests=3, output_len=4)
    assert {line.label for line in routed.series("hit_rate")} == {*ROUTERS} == {*helpers.LOOKS}
    assert all([*line.x] == [1, 2] for line in routed.series("ttft_ms", "p99"))
    assert sorted(line.shift[1] for line in routed.series("copies")) == [-9, 0, 9]
    assert routed.of("round robin", 2)["copies"] >= 1
