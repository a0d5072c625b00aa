"""Helpers of stage 5's notebook, compared with runs drawn by hand."""

import pytest

pytest.importorskip("matplotlib")

from notebooks.helpers import s5 as helpers
from notebooks.helpers.s5 import Ask, Moment
from stages import s5_cow_sampling as s5
from stages.bench.engines import without_model
from stages.s5_cow_sampling.kv_cache import BlockCopy
from tests.helpers import STORYTELLER

OPTIONS = {"model": str(STORYTELLER), "block_size": 4, "kv_cache_tokens": 256}


def test_shared_blocks_count_once_and_copies_at_their_step():
    """3 samples fork from a prompt of 2 blocks. Two of them copy the second block, and token 9 needs a third block."""
    moments = helpers.serve(OPTIONS, Ask(6, 5, n=3))
    in_two_blocks = [Moment(4, 2), Moment(4, 0), Moment(4, 0)]
    assert moments == [Moment(2, 0), *in_two_blocks, Moment(7, 0), Moment(7, 0)]
    assert helpers.peak_blocks(moments) == 7


def test_requests_share_nothing_and_new_blocks_are_not_copied():
    assert helpers.serve(OPTIONS, Ask(5, 2), Ask(5, 2)) == [Moment(4, 0), Moment(4, 0)]
    assert helpers.serve(OPTIONS, Ask(5, 2, n=3))[1:] == [Moment(4, 0), Moment(4, 0)]


def test_cost_measurements_restore_the_pool_or_copy_blocks():
    engine = without_model("s5", **OPTIONS)
    parent, child = (engine.input_processor.process(name, [1] * 6, s5.SamplingParams())[0] for name in "ab")
    engine.kv_cache_manager.allocate(parent)
    parent.num_computed_tokens = 5
    helpers.fork_and_free(engine.kv_cache_manager, parent, child)
    engine.kv_cache_manager.check_integrity()
    engine.kv_cache.blocks[1:3] = 1.0
    helpers.copy_and_wait(engine.kv_cache, [BlockCopy(1, 3), BlockCopy(2, 4)])
    assert (engine.kv_cache.blocks[3:5] == 1).all() and engine.kv_cache.num_blocks_copied == 2
