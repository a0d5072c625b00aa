"""Prefix caching: the names of texts, the queue of free blocks, and what a request hits. Block size 4."""

import pytest

from ..beam_search import BeamSearchParams
from ..block_pool import BlockPool
from ..engine import LLMEngine
from ..llm import LLM
from ..observer import Observer
from ..prefix_cache import BlockHash, extend_block_hashes, hash_block_tokens
from ..sampling import SamplingParams
from .scripted import add, run, said, said_alone, said_by_all, scripted_engine, step

# The chained hash


def hashes_of(token_ids: list[int], block_size: int = 2) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size)
    return hashes


def test_each_full_block_of_a_text_has_a_hash_and_its_last_tokens_have_none():
    assert [len(hashes_of([1, 2, 3, 4, 5][:count])) for count in range(6)] == [0, 0, 1, 1, 2, 2]
    assert hashes_of([1, 2, 3, 4, 5]) == hashes_of([1, 2, 3, 4])


def test_equal_tokens_have_the_same_hash_only_after_the_same_text():
    assert hashes_of([1, 2, 7, 7])[1] == hashes_of([1, 2, 7, 7])[1]
    assert hashes_of([1, 2, 7, 7])[1] != hashes_of([1, 3, 7, 7])[1]
    assert hashes_of([7, 7, 7, 7])[0] != hashes_of([7, 7, 7, 7])[1]


def test_a_hash_is_of_token_ids_and_not_of_their_digits():
    texts = [[1, 23], [12, 3], [123], [3, 12], [1 << 31, 0], [0, 1 << 31]]
    assert len({hash_block_tokens(b"", token_ids) for token_ids in texts}) == len(texts)


def test_a_text_that_grows_keeps_the_hashes_that_it_has():
    hashes: list[BlockHash] = []
    for count in range(8):
        extend_block_hashes(hashes, [5, 6, 7, 8, 9, 10, 11][:count], block_size=2)
    assert hashes == hashes_of([5, 6, 7, 8, 9, 10, 11])


# The queue of free blocks


def pool_with(texts: dict[bytes, int]) -> BlockPool:
    """Return a pool of 6 blocks, all taken, of which some are cached."""
    pool = BlockPool(6, Observer())
    pool.get_new_blocks(6)
    for text, block in texts.items():
        pool.cache_block(block, text)
    return pool


def take_all(pool: BlockPool) -> list[int]:
    return pool.get_new_blocks(len(pool.free))


def test_cached_blocks_are_taken_after_all_others():
    pool = pool_with({b"a": 0, b"b": 3})
    for block in range(6):
        pool.free_blocks([block])
    assert take_all(pool)[4:] == [0, 3] and not pool.cached


def test_the_end_of_a_text_is_taken_before_its_beginning():
    pool = pool_with({b"a": 4, b"b": 1, b"c": 3})
    pool.free_blocks([4, 1, 3])
    assert take_all(pool) == [3, 1, 4]


def test_the_least_recently_used_text_is_taken_first():
    pool = pool_with({b"a": 0, b"b": 1, b"c": 2})
    for block in (1, 0, 2):
        pool.free_blocks([block])
    pool.touch([1])  # a hit, which ends
    pool.free_blocks([1])
    assert take_all(pool) == [0, 2, 1]


def test_a_block_that_is_hit_leaves_the_queue_and_keeps_its_text():
    pool = pool_with({b"a": 0, b"b": 1, b"c": 2})
    pool.free_blocks([0, 1, 2])
    pool.touch([1])
    assert sorted(pool.free) == [0, 2] and pool.cached[b"b"] == 1
    pool.check_integrity([1, 3, 4, 5])


def test_a_block_that_is_taken_forgets_its_text_and_can_get_another_one():
    pool = pool_with({b"a": 0})
    pool.free_blocks([0])
    assert pool.get_new_blocks(1) == [0] and b"a" not in pool.cached
    pool.cache_block(0, b"b")
    assert pool.cached == {b"b": 0}


def test_of_two_blocks_with_one_text_the_first_stays_in_the_cache():
    pool = pool_with({b"a": 0})
    pool.cache_block(1, b"a")
    assert pool.cached == {b"a": 0}
    pool.free_blocks([0, 1])
    assert take_all(pool) == [1, 0]


# Hits


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=16, enable_prefix_caching=True)


def computed(engine: LLMEngine, prompt: list[int], max_tokens: int = 1, n: int = 1) -> int:
    """Return how many tokens go through the model for a request. It must say what it says alone."""
    before = engine.model_runner.num_tokens
    engine.add_request("x", prompt, SamplingParams(max_tokens=max_tokens, n=n, seed=0))
    output = run(engine)["x"]
    assert said_by_all(output) == [said_alone(prompt, max_tokens, sample_index=i) for i in range(n)]
    return engine.model_runner.num_tokens - before


TEXT = list(range(10, 26))  # four blocks


def test_a_text_is_found_in_whole_blocks(engine):
    assert [computed(engine, TEXT[:14]), computed(engine, TEXT[:14]), computed(engine, TEXT)] == [14, 2, 4]


@pytest.mark.parametrize("num_tokens, num_computed", [(8, 4), (9, 1), (4, 4), (5, 1), (3, 3)])
def test_the_last_token_of_a_prompt_is_always_computed(engine, num_tokens, num_computed):
    computed(engine, TEXT)
    assert computed(engine, TEXT[:num_tokens]) == num_computed


def test_equal_tokens_after_a_different_beginning_are_not_found(engine):
    computed(engine, TEXT)
    assert computed(engine, [9, *TEXT[1:]]) == 16 and computed(engine, TEXT[4:]) == 12


def test_generated_text_is_found_like_a_prompt(engine):
    computed(engine, TEXT[:5], max_tokens=8)
    assert computed(engine, [*TEXT[:5], *said_alone(TEXT[:5], 8), 9]) == 14 - 12


def test_only_computed_blocks_are_found(checkpoint):
    """The first request has computed 5 of its 16 tokens when the second one arrives: one block."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=5, enable_prefix_caching=True)
    engine.add_request("a", TEXT, SamplingParams(max_tokens=1, seed=0))
    step(engine)
    [seq] = engine.input_processor.process("b", TEXT, SamplingParams())
    assert len(engine.kv_cache_manager.find_hits(seq)) == 1


def test_requests_that_run_together_share_the_blocks_of_their_beginning(engine):
    add(engine, "a", 9)
    step(engine)
    add(engine, "a2", 11)
    step(engine)
    first, second = engine.scheduler.running
    assert first.block_table[:2] == second.block_table[:2] and engine.model_runner.steps[1] == [("a", 1), ("a2", 3)]
    assert engine.kv_cache_manager.num_free_blocks == 16 - 4


def test_equal_prompts_that_arrive_in_one_step_are_both_computed_and_only_one_stays_in_the_cache(engine):
    prompts = [add(engine, name, 9, max_tokens=1) for name in ("a", "a2")]
    outputs = run(engine)
    assert engine.model_runner.steps == [[("a", 9), ("a2", 9)]]
    assert [said(output) for output in outputs.values()] == [said_alone(prompt, 1) for prompt in prompts]
    assert len(engine.kv_cache_manager.pool.cached) == 2


def test_a_held_hit_needs_no_room_and_an_idle_one_is_a_free_block(checkpoint):
    """5 blocks: while the first request holds 3, the second one needs 1 beside its two hits."""
    engine = scripted_engine(checkpoint, num_blocks=5, enable_prefix_caching=True)
    manager = engine.kv_cache_manager
    engine.add_request("a", TEXT[:9], SamplingParams(max_tokens=2, seed=0))
    step(engine)
    [seq] = engine.input_processor.process("b", TEXT[:12], SamplingParams())
    assert manager.num_needed(seq, manager.find_hits(seq)) == 1
    run(engine)
    assert len(manager.find_hits(seq)) == 2 and manager.num_needed(seq, manager.find_hits(seq)) == 3


def test_the_rest_of_a_prompt_does_not_evict_what_the_prompt_has_just_hit(checkpoint):
    """All 4 blocks are needed, and two of them are idle hits."""
    engine = scripted_engine(checkpoint, num_blocks=4, enable_prefix_caching=True)
    computed(engine, TEXT[:8])
    assert computed(engine, TEXT) == 8


def test_a_preempted_request_finds_the_blocks_that_are_left(checkpoint):
    """Of its three blocks two are full. The older request takes the third, and the end of the text stays cached."""
    engine = scripted_engine(checkpoint, num_blocks=5, enable_prefix_caching=True)
    prompts = {name: add(engine, name, num_tokens, max_tokens=4) for name, num_tokens in (("a", 7), ("b", 9))}
    outputs = run(engine)
    assert engine.scheduler.num_preemptions == 1
    assert engine.model_runner.steps[-2:] == [[("b", 3)], [("b", 1)]]
    assert [said(outputs[name]) for name in "ab"] == [said_alone(prompts[name], 4) for name in "ab"]


def test_tokens_of_each_admission_and_how_many_of_them_were_cached_are_counted(engine):
    for num_tokens in (14, 14, 9):
        computed(engine, TEXT[:num_tokens])
    stats = engine.kv_cache_manager.prefix_cache_stats
    assert (stats.queries, stats.hits) == (14 + 14 + 9, 12 + 8)


def test_without_the_option_nothing_is_found(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16, enable_prefix_caching=False)
    assert [computed(engine, TEXT) for _ in range(2)] == [16, 16]


def test_samples_of_a_cached_prompt_run_in_the_step_that_admits_it(engine):
    """Two of its blocks are cached, and only the last of 9 tokens is left: each sample computes it."""
    assert computed(engine, TEXT[:9], n=2) == 8 + 2
    num_steps = len(engine.model_runner.steps)
    assert computed(engine, TEXT[:9], n=2) == 2
    assert len(engine.model_runner.steps) == num_steps + 1


def test_two_equal_beam_searches_hit_the_cache_the_second_time(checkpoint):
    """Of a prompt of 13 tokens 12 are cached then. Each beam computes 5 more."""
    llm, params = LLM(checkpoint, block_size=4), BeamSearchParams(2, 6, ignore_eos=True)
    outputs, counts = [], [llm.model_runner.num_tokens]
    for _ in range(2):
        outputs += llm.beam_search(TEXT[:13], params)
        counts.append(llm.model_runner.num_tokens)
    assert [counts[1] - counts[0], counts[2] - counts[1]] == [13 + 2 * 5, 1 + 2 * 5]
    assert llm.kv_cache_manager.prefix_cache_stats.hits == 12
    assert said_by_all(outputs[0]) == said_by_all(outputs[1])


def test_a_beam_search_and_a_request_find_what_the_other_one_has_computed(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    llm.generate(TEXT[:9], SamplingParams(max_tokens=1))
    [output] = llm.beam_search(TEXT, BeamSearchParams(1, 10, ignore_eos=True))
    assert llm.kv_cache_manager.prefix_cache_stats.hits == 8
    llm.generate([*TEXT, *said(output)], SamplingParams(max_tokens=1))
    assert llm.kv_cache_manager.prefix_cache_stats.hits == 8 + 24
