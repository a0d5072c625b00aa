"""Helpers of stage 6's notebook, compared with counts by hand and with the engine."""

import pytest

pytest.importorskip("matplotlib")

from notebooks.helpers import s6 as helpers
from notebooks.helpers.s6 import Ask
from stages import s6_prefix_caching as s6
from stages.bench.engines import without_model
from stages.s6_prefix_caching.block_pool import BlockPool
from stages.s6_prefix_caching.llama import Tokenizer
from tests.helpers import ROOT, STORYTELLER


def engine(num_blocks: int, order: type[BlockPool] = BlockPool, **options):
    return helpers.evicting(order, model=str(STORYTELLER), block_size=4, kv_cache_tokens=4 * num_blocks, **options)


def text(start: int, num_blocks: int) -> list[int]:
    """Return the tokens of `num_blocks` full blocks, and one more."""
    return [start + i for i in range(4 * num_blocks + 1)]


def cached_tokens(counter, *texts: list[int]) -> list[int]:
    served = helpers.serve(counter, [Ask(i, tokens, 1) for i, tokens in enumerate(texts)])
    counter.kv_cache_manager.check_integrity()
    return [one.num_cached_tokens for one in served]


def test_conversation_continues_from_its_answer():
    served = helpers.serve(engine(16), [Ask(0, text(3, 2), 4), Ask(1, text(100, 1), 1), Ask(0, [50, 51], 1)])
    assert [one.num_prompt_tokens for one in served] == [9, 5, 9 + 4 + 2]
    assert [one.num_cached_tokens for one in served] == [0, 0, 12]  # the last token of the answer was not computed
    assert helpers.hit_rate(served) == 12 / 29


def test_engine_that_forgets_recomputes_everything():
    counter, asks = engine(16), [Ask(0, text(3, 2), 1)]
    hits = [helpers.serve(counter, asks)[0].num_cached_tokens for _ in range(2)]
    helpers.forget(counter)
    assert [*hits, helpers.serve(counter, asks)[0].num_cached_tokens] == [0, 8, 0]
    assert counter.kv_cache_manager.prefix_cache_stats.queries == 9


FIRST_TO_GO = [(BlockPool, 12), (helpers.HeadFirst, 0), (helpers.FirstInFirstOut, 0)]


@pytest.mark.parametrize(("order", "again"), FIRST_TO_GO)
def test_order_of_eviction(order, again):
    """In a pool of 6 blocks, the second text takes two free blocks and evicts one of the first text's."""
    assert cached_tokens(engine(6, order), text(3, 4), text(100, 2), text(3, 4)) == [0, 0, again]


def test_lru_keeps_used_blocks_and_fifo_does_not():
    """In a pool of 7 blocks, the fourth text needs 5 blocks and evicts two."""
    order = [text(3, 2), text(100, 2), text(3, 2), text(200, 4), text(3, 2)]
    assert cached_tokens(engine(7), *order) == [0, 0, 8, 0, 8]
    assert cached_tokens(engine(7, helpers.HeadFirst), *order) == [0, 0, 8, 0, 8]
    assert cached_tokens(engine(7, helpers.FirstInFirstOut), *order) == [0, 0, 8, 0, 0]


def test_traffic_fits_into_the_model():
    traffic = helpers.kinds(helpers.Reader(ROOT, Tokenizer(STORYTELLER)), count=4)
    counter = without_model("s6", model=str(STORYTELLER), kv_cache_tokens=2**14)
    for asks in traffic.values():
        longest = max(one.num_prompt_tokens for one in helpers.serve(counter, asks))
        assert longest + max(ask.num_output_tokens for ask in asks) <= counter.max_model_len


def test_only_hashes_without_prefix_change_the_answer():
    stories = helpers.three_stories(Tokenizer(STORYTELLER), size=16)
    asks, third = [Ask(i, story, 8) for i, story in enumerate(stories)], {}
    for name, hash_block_tokens in {"none": helpers.CHAINED, **helpers.HASHES}.items():
        options = {"model": str(STORYTELLER), "dtype": "float32", "kv_cache_tokens": 1024}
        teller = s6.LLM(**options, enable_prefix_caching=name != "none").llm_engine
        with helpers.hashed_by(hash_block_tokens):
            *_, third[name] = helpers.serve(teller, asks)
    none, chained, own = third.values()
    assert [one.num_cached_tokens for one in third.values()] == [0, 16, 32]
    assert chained.answer == none.answer != own.answer


def test_tree_has_all_cached_blocks_and_a_row_per_branch():
    counter, texts = engine(16), [text(3, 3), [*text(3, 3)[:8], *text(100, 1)], text(200, 1)]
    cached_tokens(counter, *texts)
    nodes = helpers.tree(texts, 4, counter.kv_cache_manager.pool.cached)
    assert [(node.depth, node.row) for node in nodes] == [(0, 0), (1, 0), (2, 0), (2, 1), (0, 2)]
    assert [node.token_ids for node in nodes if not node.depth] == [(3, 4, 5, 6), (200, 201, 202, 203)]
