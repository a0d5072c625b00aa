"""What notebooks 1 to 3 are made with, and what all of them draw with: by hand, on pools of a few slots."""

import doctest
from importlib import import_module

import pytest

pytest.importorskip("matplotlib")

import torch

from notebooks.helpers import pictures, s1, s2, s3, size
from stages.bench.claims import FirstInFirstOut
from stages.s2_block_manager.block_pool import BlockPool
from stages.s2_block_manager.kv_cache import PoolReport
from stages.s2_block_manager.llama import ModelConfig

from .counted import Counter, Seq


@pytest.mark.parametrize("name", ["pictures", *(f"s{number}" for number in range(1, 8))])
def test_examples_in_docstrings(name):
    assert doctest.testmod(import_module(f"notebooks.helpers.{name}")).failed == 0


def test_one_variable_makes_loads_small(monkeypatch):
    monkeypatch.delenv("NOTEBOOKS_QUICK", raising=False)
    assert size(1500, 10) == 1500
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    assert size(1500, 10) == 10


def test_one_picture_is_the_same_bytes_every_time():
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


def test_tracks_follow_a_holder_and_tell_the_next_one_apart():
    reports = {1: Piece((0, 2, 1)), 2: Piece((0, 2, 2)), 3: Piece((0, 2, 1), (2, 2, 1)), 4: Piece()}
    assert sorted(s1.tracks(reports)) == [(0, 2, 1, [1, 2]), (0, 2, 3, [1]), (2, 2, 3, [1])]


def test_holes_are_what_no_piece_covers():
    assert s1.holes_of(Piece((1, 1, 0), (2, 1, 0))) == [(0, 1), (3, 1)]
    assert s1.holes_of(Piece()) == [(0, 4)]
    assert s1.holes_of(Piece((0, 4, 4))) == []


def test_churn_frees_what_it_allocated():
    manager = Counter(10)
    fits = list(s1.churn(manager, (Seq(1, 3) for _ in range(9)), [0, 0, 0, 1, 1, 0], seed=0))
    assert fits == [True, True, False, True, True, True]
    assert manager.held == 4


def test_first_in_first_out_is_the_other_order():
    for pool, expected in ((BlockPool(3), [0]), (FirstInFirstOut(3), [1])):
        pool.free_blocks(pool.get_new_blocks(1))
        assert pool.get_new_blocks(1) == expected and pool.num_free_blocks == 2


def test_a_pool_in_blocks_is_drawn_as_pieces():
    report = PoolReport(4, block_size=4, promised=0, tables=(((3, 0), 5), ((1,), 4)))
    assert s2.as_pieces(report) == (16, ((0, 4, 1), (4, 4, 4), (12, 4, 4)))


def test_a_sequence_is_followed_while_it_grows_by_one_slot_a_step():
    tables = [(((1,), 3), ((0,), 1)), (((1,), 4), ((0,), 1)), (((1, 2), 5),)]
    steps = list(s2.follow([PoolReport(4, 4, 0, step) for step in tables]))
    assert [[holder.number for holder in step] for step in steps] == [[0, 1], [0, 2], [0]]
    assert steps[2][0].slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert s2.square(steps[1], 256, followed=0, tiles=True).shape == (16, 256, 3)


def test_looks_back_is_what_the_last_token_asks():
    q, k, v = torch.rand(3, 4, 2), torch.rand(3, 2, 2), torch.rand(3, 2, 2)
    looks = s3.looks_back([(q, k, v)])
    assert set(looks) == {(0, head) for head in range(4)}
    assert looks[0, 3][0].equal(q[None, None, -1, 3:4].transpose(2, 3).reshape(1, 1, 1, 2))
    assert looks[0, 3][1].equal(k[:, 1][None, None]) and looks[0, 3][2].shape == (1, 1, 3, 2)


def test_the_work_of_a_step_by_hand():
    """One layer, hidden 4, one head of 4, MLP of 8, vocabulary of 10: 4 x 16 + 3 x 32 weights, and 40 of the head."""
    model = ModelConfig(10, 4, 8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=4)
    decode = s3.work(model, [(1, 5), (1, 3)], itemsize=4)
    assert decode.operations == 2 * 2 * 160 + 4 * 4 * (5 + 3) + 2 * 2 * 40
    assert decode.num_bytes == 4 * (160 + 2 * 4 * (5 + 3) + 40)
    prefill = s3.work(model, [(3, 3)], itemsize=4)
    assert prefill.operations == 3 * 2 * 160 + 4 * 4 * (1 + 2 + 3) + 2 * 40
