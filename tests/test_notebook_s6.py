"""What stage 6's notebook is made with: counted by hand, and against the engine itself."""

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
    """Of so many full blocks and one token more."""
    return [start + i for i in range(4 * num_blocks + 1)]


def found(counter, *texts: list[int]) -> list[int]:
    served = helpers.serve(counter, [Ask(i, tokens, 1) for i, tokens in enumerate(texts)])
    counter.kv_cache_manager.check_integrity()
    return [one.num_cached_tokens for one in served]


def test_a_talk_goes_on_from_its_answer():
    served = helpers.serve(engine(16), [Ask(0, text(3, 2), 4), Ask(1, text(100, 1), 1), Ask(0, [50, 51], 1)])
    assert [one.num_prompt_tokens for one in served] == [9, 5, 9 + 4 + 2]
    assert [one.num_cached_tokens for one in served] == [0, 0, 12]  # of the answer the last token was not computed
    assert helpers.hit_rate(served) == 12 / 29


def test_an_engine_that_forgets_computes_all_again():
    counter, asks = engine(16), [Ask(0, text(3, 2), 1)]
    found = [helpers.serve(counter, asks)[0].num_cached_tokens for _ in range(2)]
    helpers.forget(counter)
    assert [*found, helpers.serve(counter, asks)[0].num_cached_tokens] == [0, 8, 0]
    assert counter.kv_cache_manager.prefix_cache_stats.queries == 9


FIRST_TO_GO = [(BlockPool, 12), (helpers.HeadFirst, 0), (helpers.FirstInFirstOut, 0)]


@pytest.mark.parametrize(("order", "again"), FIRST_TO_GO)
def test_who_is_evicted_first(order, again):
    """A pool of 6 blocks: a text of 4 and a token; another of 2 and a token takes two free blocks, and evicts one."""
    assert found(engine(6, order), text(3, 4), text(100, 2), text(3, 4)) == [0, 0, again]


def test_lru_keeps_what_was_used_and_fifo_does_not():
    """7 blocks: two texts of 2 blocks, the first again; then one of 4 needs 5 blocks and evicts two."""
    order = [text(3, 2), text(100, 2), text(3, 2), text(200, 4), text(3, 2)]
    assert found(engine(7), *order) == [0, 0, 8, 0, 8]
    assert found(engine(7, helpers.HeadFirst), *order) == [0, 0, 8, 0, 8]
    assert found(engine(7, helpers.FirstInFirstOut), *order) == [0, 0, 8, 0, 0]


def test_traffic_is_of_words_and_fits_into_the_model():
    traffic = helpers.kinds(helpers.Reader(ROOT, Tokenizer(STORYTELLER)), count=4)
    counter = without_model("s6", model=str(STORYTELLER), kv_cache_tokens=2**14)
    for asks in traffic.values():
        longest = max(one.num_prompt_tokens for one in helpers.serve(counter, asks))
        assert longest + max(ask.num_output_tokens for ask in asks) <= counter.max_model_len


def test_only_a_hash_of_own_tokens_says_something_else():
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


def test_a_tree_has_all_cached_blocks_and_a_row_for_each_end():
    counter, texts = engine(16), [text(3, 3), [*text(3, 3)[:8], *text(100, 1)], text(200, 1)]
    found(counter, *texts)
    nodes = helpers.tree(texts, 4, counter.kv_cache_manager.pool.cached)
    assert [(node.depth, node.row) for node in nodes] == [(0, 0), (1, 0), (2, 0), (2, 1), (0, 2)]
    assert [node.token_ids for node in nodes if not node.depth] == [(3, 4, 5, 6), (200, 201, 202, 203)]
