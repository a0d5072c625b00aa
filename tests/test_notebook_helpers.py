"""Helpers of the notebooks of stages 1 to 3, and the drawing functions of all notebooks, on pools of a few slots."""

import doctest
import itertools
from importlib import import_module

import pytest

pytest.importorskip("matplotlib")

import torch
from matplotlib.colors import to_rgb
from torch.nn import functional as F

from notebooks.helpers import pictures, s1, s2, s3, size, timing
from stages.bench.replay import Holder
from stages.bench.texts.pools import FirstInFirstOut
from stages.s2_block_manager.block_pool import BlockPool
from stages.s2_block_manager.llama import ModelConfig
from stages.s3_paged_attention.online_softmax import merge_attn_states


@pytest.mark.parametrize("name", ["pictures", *(f"s{number}" for number in range(1, 8))])
def test_docstring_examples(name):
    assert doctest.testmod(import_module(f"notebooks.helpers.{name}")).failed == 0


def test_notebooks_quick_makes_loads_small(monkeypatch):
    monkeypatch.delenv("NOTEBOOKS_QUICK", raising=False)
    assert size(1500, 10) == 1500
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    assert size(1500, 10) == 10


def test_calls_are_timed_in_turns_or_many_in_a_row():
    clock = itertools.count()
    times = timing.milliseconds({name: lambda: next(clock) for name in "ab"}, rounds=2)
    assert {*times} == {"a", "b"} and min(times.values()) > 0 and next(clock) == 6, "the first round warms up"
    assert 0 < timing.microseconds(lambda: next(clock), times=10, rounds=2) < 1000 and next(clock) == 27


def test_pictures_are_reproducible():
    def draw():
        fig, (ax,) = pictures.figure("A finding", height=2.0)
        pictures.lines(ax, [pictures.Line([1, 2, 3], [1.0, 4.0, 9.0], "squares")], x="n", y="n²")
        return pictures.svg(fig)

    pictures.style()
    assert draw() == draw()
    assert draw().startswith("<svg") and "<title>A finding</title>" in draw()


class Piece:
    """A pool of four slots in which one sequence holds a piece."""

    def __init__(self, *pieces):
        self.num_slots, self.pieces = 4, pieces


def test_tracks_follow_one_holder_each():
    reports = {1: Piece((0, 2, 1)), 2: Piece((0, 2, 2)), 3: Piece((0, 2, 1), (2, 2, 1)), 4: Piece()}
    assert sorted(s1.tracks(reports)) == [(0, 2, 1, [1, 2]), (0, 2, 3, [1]), (2, 2, 3, [1])]


def test_holes_are_the_slots_without_a_piece():
    assert s1.holes_of(Piece((1, 1, 0), (2, 1, 0))) == [(0, 1), (3, 1)]
    assert s1.holes_of(Piece()) == [(0, 4)]
    assert s1.holes_of(Piece((0, 4, 4))) == []


def test_first_in_first_out_takes_the_oldest_block():
    for pool, expected in ((BlockPool(3), [0]), (FirstInFirstOut(3), [1])):
        pool.free_blocks(pool.get_new_blocks(1))
        assert pool.get_new_blocks(1) == expected and len(pool.free) == 2


def test_square_shows_the_places_of_blocks():
    """A sequence in blocks 2 and 0 with 17 tokens: block 2 is full, and block 0 has one."""
    image = s2.square([Holder("0", (2, 0), 17), Holder("1", (1,), 1)], 512, followed="0")
    assert image.shape == (32, 512, 3)
    followed = (image[1] == to_rgb(pictures.ACCENT)).all(1)
    assert followed.nonzero()[0].tolist() == [*range(33, 48)], "all slots but the edges of the blocks"
    slots = s2.slots_of(Holder("0", (2, 0), 17))
    assert slots.tolist() == [*range(32, 48), *range(16)]
    assert s2.slots_of(Holder("0", range(3, 5), 1)).tolist() == [3, 4]


def test_merged_parts_equal_full_attention():
    q, k, v = torch.rand(1, 1, 1, 8), torch.rand(1, 1, 5, 8), torch.rand(1, 1, 5, 8)
    merged = merge_attn_states(s3.attend(q, k[:, :, :2], v[:, :, :2]), s3.attend(q, k[:, :, 2:], v[:, :, 2:]))
    torch.testing.assert_close(merged.out[0], F.scaled_dot_product_attention(q, k, v))


def test_looks_back_takes_the_query_of_the_last_token():
    q, k, v = torch.rand(3, 4, 2), torch.rand(3, 2, 2), torch.rand(3, 2, 2)
    looks = s3.looks_back([(q, k, v)])
    assert set(looks) == {(0, head) for head in range(4)}
    assert looks[0, 3][0].equal(q[None, None, -1, 3:4].transpose(2, 3).reshape(1, 1, 1, 2))
    assert looks[0, 3][1].equal(k[:, 1][None, None]) and looks[0, 3][2].shape == (1, 1, 3, 2)


def test_work_of_a_step():
    """One layer, hidden 4, one head of 4, MLP of 8, vocabulary of 10: 4 x 16 + 3 x 32 weights, and 40 of the head."""
    model = ModelConfig(10, 4, 8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=4)
    decode = s3.work(model, [(1, 5), (1, 3)], itemsize=4)
    assert decode.operations == 2 * 2 * 160 + 4 * 4 * (5 + 3) + 2 * 2 * 40
    assert decode.num_bytes == 4 * (160 + 2 * 4 * (5 + 3) + 40)
    prefill = s3.work(model, [(3, 3)], itemsize=4)
    assert prefill.operations == 3 * 2 * 160 + 4 * 4 * (1 + 2 + 3) + 2 * 40
