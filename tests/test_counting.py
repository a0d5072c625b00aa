"""The counters in stages/bench/counting.py, and the recorder of decode_step.py."""

import torch

from notebooks.helpers.allocations import Allocations
from stages.bench import counting
from stages.bench.decode_step import Recorder


def test_new_tensors_are_counted_but_not_views_and_in_place_operations():
    given = torch.zeros(4)
    with Allocations() as made:
        given.add_(1), given[1:], given + given
    assert made.sizes == [16]


def test_peak_bytes_are_held_at_one_moment():
    one, two = (counting.peak_bytes(lambda n=n: [torch.ones(1024) for _ in range(n)]) for n in (1, 2))
    in_turn = counting.peak_bytes(lambda: [torch.ones(1024).sum().item() for _ in range(8)])
    assert 4096 <= one < 4608 and 8192 <= two < 8704 and 4096 <= in_turn < 4608


def test_operations_are_counted():
    x = torch.ones(4)
    with counting.Operations() as done:
        (x + x) * x
    assert done.count == 2


def test_recorder_keeps_the_inputs_of_the_last_step():
    class Attention:
        def plan(self, step):
            return lambda layer, q, k, v: q + step

    recorder = Recorder(Attention())
    q, k, v = torch.rand(3, 4, 2), torch.rand(3, 2, 2), torch.rand(3, 2, 2)
    for step in (1, 2):
        assert recorder.plan(step)(0, q, k, v).equal(q + step)
    assert recorder.inputs == [(q, k, v)] and recorder.step == 2
