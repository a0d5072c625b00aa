"""What stage 6's notebook and measurements are made with: counted by hand, and against the engine itself."""

import doctest

import pytest

pytest.importorskip("matplotlib")

from notebooks import as_told, pictures_s6, prefixes
from notebooks.prefixes import Ask, WithoutModel
from stages import s6_prefix_caching as s6
from stages import sharing
from stages.predict import s6 as predicted
from stages.s6_prefix_caching.llama import Tokenizer
from stages.s6_prefix_caching.prefix_cache import CachedBlocks, PrefixCache
from stages.workload import mixed_workload
from tests.helpers import ROOT

MODEL = ROOT / "models" / "storyteller"


def engine(num_blocks: int, order: type[CachedBlocks] = CachedBlocks, **options) -> WithoutModel:
    return WithoutModel(order, model=str(MODEL), block_size=4, kv_cache_tokens=4 * num_blocks, **options)


def text(start: int, num_blocks: int) -> list[int]:
    """Of so many full blocks and one token more."""
    return [start + i for i in range(4 * num_blocks + 1)]


def found(counter: WithoutModel, *texts: list[int]) -> list[int]:
    served = prefixes.serve(counter, [Ask(i, tokens, 1) for i, tokens in enumerate(texts)])
    counter.kv_cache_manager.check_integrity()
    return [one.num_cached_tokens for one in served]


def test_a_talk_goes_on_from_its_answer():
    served = prefixes.serve(engine(16), [Ask(0, text(3, 2), 4), Ask(1, text(100, 1), 1), Ask(0, [50, 51], 1)])
    assert [one.num_prompt_tokens for one in served] == [9, 5, 9 + 4 + 2]
    assert [one.num_cached_tokens for one in served] == [0, 0, 12]  # of the answer the last token was not computed
    assert prefixes.hit_rate(served) == 12 / 29


FIRST_TO_GO = [(CachedBlocks, 12), (prefixes.HeadFirst, 0), (prefixes.FirstInFirstOut, 0)]


@pytest.mark.parametrize(("order", "again"), FIRST_TO_GO)
def test_who_is_evicted_first(order, again):
    """A pool of 6 blocks: a text of 4 and a token; another of 2 and a token takes two free blocks, and evicts one."""
    assert found(engine(6, order), text(3, 4), text(100, 2), text(3, 4)) == [0, 0, again]


def test_lru_keeps_what_was_used_and_fifo_does_not():
    """7 blocks: two texts of 2 blocks, the first again; then one of 4 needs 5 blocks and evicts two."""
    order = [text(3, 2), text(100, 2), text(3, 2), text(200, 4), text(3, 2)]
    assert found(engine(7), *order) == [0, 0, 8, 0, 8]
    assert found(engine(7, prefixes.HeadFirst), *order) == [0, 0, 8, 0, 8]
    assert found(engine(7, prefixes.FirstInFirstOut), *order) == [0, 0, 8, 0, 0]


def test_without_a_model_the_same_is_found():
    asks = [Ask(i % 2, [3 + i % 2 + j for j in range(20)], 6) for i in range(6)]
    options = {"model": str(MODEL), "block_size": 4, "kv_cache_tokens": 160, "dtype": "float32"}
    with_model = prefixes.serve(prefixes.WithCache(PrefixCache(4), **options), asks)
    without = prefixes.serve(WithoutModel(**options), asks)
    assert [one.num_cached_tokens for one in with_model] == [one.num_cached_tokens for one in without]


def test_traffic_is_of_words_and_fits_into_the_model():
    traffic = prefixes.kinds(prefixes.Reader(ROOT, Tokenizer(MODEL)))
    counter = WithoutModel(model=str(MODEL), kv_cache_tokens=2**16)
    for asks in traffic.values():
        longest = max(one.num_prompt_tokens for one in prefixes.serve(counter, asks))
        assert longest + max(ask.num_output_tokens for ask in asks) <= counter.max_model_len


def test_the_texts_allocator_has_its_faults_and_stage_6_does_not():
    last, computed, freed, held = as_told.cases(block_size=4)
    assert (last.told[0], last.ours) == ("2", "3")
    assert (computed.told[0], computed.ours) == ("8", "0")
    assert (freed.told[0], freed.ours) == ("8", "0")
    assert "still holds" in held.told and "1 blocks are needed, 0 are free" in held.ours


def test_only_who_believes_a_hash_says_something_else():
    stories = as_told.three_stories(Tokenizer(MODEL), size=16)
    third = {}
    for name, cache in as_told.hashes(16).items():
        teller = prefixes.WithCache(cache, model=str(MODEL), dtype="float32", kv_cache_tokens=1024)
        *_, third[name] = prefixes.serve(teller, [Ask(i, story, 12) for i, story in enumerate(stories)])
    wrong = {name for name, one in third.items() if one.answer != third["none"].answer}
    assert wrong == {name for name in third if "believed" in name} != set()
    assert [one.num_cached_tokens for one in third.values()] == [0, 16, 32, 16, 16]


def test_a_tree_has_all_cached_blocks_and_a_row_for_each_end():
    counter = engine(16)
    found(counter, text(3, 3), [*text(3, 3)[:8], *text(100, 1)], text(200, 1))
    nodes = pictures_s6.tree(list(counter.kv_cache_manager.prefix_cache.blocks._cached.values()))
    assert [(node.depth, node.row) for node in nodes] == [(0, 0), (1, 0), (2, 0), (2, 1), (0, 2)]


def test_the_lessons_answers_are_counted():
    numbers = predicted.answers(MODEL)
    assert numbers["repeated"] == {"512": 16, "513": 1}
    assert numbers["changed"] == {"first": 0.0, "middle": 0.5, "last": 496 / 512}
    assert numbers["twice"] == {"at_once": 400, "a_step_later": 208, "samples": 200}


def test_sharing_is_measured_on_the_same_requests():
    prompts = sharing.shared_prompts(4096, prefix=64, tail=8, count=6)
    shared = sharing.measure_shared(MODEL, prompts, "float32")
    assert (shared["tokens_on"], shared["tokens_off"]) == (5 * 8, 5 * 72)
    assert 0 < shared["median_on_seconds"] < shared["median_off_seconds"] <= shared["last_off_seconds"]
    rounds = [mixed_workload(4096, 4, high=32, seed=seed) for seed in (0, 1)]
    unshared = sharing.measure_unshared(MODEL, rounds, "float32")
    tokens = sum(len(r.prompt_token_ids) + r.num_output_tokens - 1 for requests in rounds for r in requests)
    assert unshared["tokens_computed"] == tokens and unshared["ratio"] > 0


def test_a_clock_counts_steps_and_nothing_else():
    clocked = sharing.Clocked(MODEL, True, 256, "float32")
    clocked.add("a", [3] * 8, max_tokens=2)
    assert clocked.seconds == 0 and clocked.steps(5) == clocked.seconds > clocked.waits["a"] > 0
    assert not clocked.engine.has_unfinished_requests()
    assert isinstance(clocked.engine, s6.LLMEngine)


@pytest.mark.parametrize("module", [prefixes, pictures_s6, sharing], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0
