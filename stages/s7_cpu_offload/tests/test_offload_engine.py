"""The engine with two tiers: the same tokens whatever becomes of those who are preempted, and none computed twice.

The model is scripted (see scripted.py). Blocks have 4 slots. Two requests of 12 tokens that say 12 each need 6 blocks
each at last; 8 are there unless a test says otherwise, so the second one is preempted.
"""

import random

import pytest

from ..beam_search import BeamSearch, BeamSearchParams
from ..config import EngineConfig
from ..cost_model import CostModel
from ..engine import LLMEngine
from ..llama import LlamaForCausalLM
from ..offload import HostPool
from ..outputs import RequestOutput
from ..sampling import SampledToken
from ..scheduler import Scheduler, groups
from ..sequence import Sequence
from .scripted import (
    Batch,
    ScriptedEngine,
    ScriptedRunner,
    answers,
    assert_empty,
    params,
    reasons,
    run_to_the_end,
    said_alone,
    step,
)
from .tiers import LateHostPool

FIRST, SECOND = list(range(10, 22)), list(range(50, 62))
SWAP_IS_FASTER, RECOMPUTE_IS_FASTER = CostModel(1e12, 1.0), CostModel(1.0, 1e12)


class WatchedScheduler(Scheduler):
    def _swap_in(self, group: list[Sequence]) -> bool:
        is_done = super()._swap_in(group)
        assert not is_done or not any(seq.host_table for seq in group), "it would be swapped in again, for ever"
        return is_done


class TieredEngine(ScriptedEngine):
    """Its copies can be late, and fail. Its model writes to nothing that is not its own, and reads what is there."""

    host_pool: LateHostPool

    def build_host_pool(self) -> HostPool:
        return LateHostPool(self.kv_cache.blocks, super().build_host_pool().num_blocks)

    def build_scheduler(self) -> Scheduler:
        return WatchedScheduler(self.config, self.kv_cache_manager, self.prefers_swap)

    def build_model_runner(self, model: LlamaForCausalLM) -> ScriptedRunner:
        manager, size = self.kv_cache_manager, self.config.block_size

        class Careful(ScriptedRunner):
            def run(self, batch: Batch) -> list[list[SampledToken]]:
                for seq, num_tokens in batch:
                    assert manager.has_arrived(seq), "it runs only when its blocks are there"
                    end = seq.num_computed_tokens + num_tokens
                    for block in seq.block_table[seq.num_computed_tokens // size : -(-end // size)]:
                        assert manager._pool.ref_count(block) == 1, "it writes to a block that others hold"
                        assert block not in manager.prefix_cache.blocks, "it writes to a block that is cached"
                return super().run(batch)

        return Careful(self.kv_cache)


def engine_of(checkpoint, num_blocks: int = 8, preemption: str = "swap", **knobs) -> TieredEngine:
    knobs = {"watermark": 0.0, "block_size": 4, "enable_prefix_caching": False} | knobs
    num_tokens = num_blocks * knobs["block_size"]
    return TieredEngine(EngineConfig(str(checkpoint), kv_cache_tokens=num_tokens, preemption=preemption, **knobs))


def two(checkpoint, max_tokens: int = 12, n: int = 1, **knobs) -> TieredEngine:
    engine = engine_of(checkpoint, **knobs)
    sampling = params(max_tokens, n=n, temperature=1.0, seed=3) if n > 1 else params(max_tokens)
    engine.add_request("a", FIRST, sampling)
    engine.add_request("b", SECOND, sampling)
    return engine


def assert_said_alone(ended: dict[str, RequestOutput]) -> None:
    for output in ended.values():
        n = len(output.outputs)
        alone = [said_alone(output.prompt_token_ids, 12, 3 if n > 1 else None, i) for i in range(n)]
        assert answers(output) == alone and reasons(output) == ["length"] * n


def until_swapped(engine: TieredEngine) -> None:
    for _ in range(1000):
        if engine.scheduler.num_swaps:
            return
        step(engine)
    pytest.fail("nobody was swapped, or num_swaps does not count it")


def needed(ended: dict[str, RequestOutput]) -> int:
    """Tokens to compute: of a prompt once for all its samples; the last one of each is said and not computed."""
    return sum(len(o.prompt_token_ids) + sum(len(said) - 1 for said in answers(o)) for o in ended.values())


# The same tokens, and none twice


@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_each_says_what_it_says_alone_whatever_becomes_of_the_preempted(checkpoint, preemption, n, is_caching):
    engine = two(checkpoint, n=n, num_blocks=4 + 4 * n, preemption=preemption, enable_prefix_caching=is_caching)
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.num_swaps > 0) == (preemption == "swap"), "auto has measured nothing here"


@pytest.mark.parametrize("budget", [4, 7, 512])
@pytest.mark.parametrize(("n", "num_blocks"), [(1, 8), (2, 11), (3, 13)])
def test_under_swap_no_token_is_computed_twice(checkpoint, n, num_blocks, budget):
    engine = two(checkpoint, n=n, num_blocks=num_blocks, max_num_batched_tokens=budget)
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.scheduler.num_swaps == engine.scheduler.num_preemptions > 0
    assert engine.model_runner.num_tokens == needed(ended)
    assert engine.host_pool.stored.num_blocks == engine.host_pool.loaded.num_blocks > 0


def test_under_recompute_tokens_are_computed_twice_and_none_is_copied(checkpoint):
    engine = two(checkpoint, preemption="recompute")
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.model_runner.num_tokens > needed(ended)
    assert engine.host_pool.stored.num_blocks == engine.scheduler.num_swaps == 0


@pytest.mark.parametrize(("speeds", "swaps"), [(SWAP_IS_FASTER, True), (RECOMPUTE_IS_FASTER, False)])
def test_under_auto_the_faster_one_is_taken(checkpoint, speeds, swaps):
    engine = two(checkpoint, preemption="auto")
    engine.cost_model = speeds
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.scheduler.num_preemptions > 0 and (engine.scheduler.num_swaps > 0) == swaps
    assert (engine.model_runner.num_tokens == needed(ended)) == swaps


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_weighed_is_what_would_move_against_what_would_be_computed(checkpoint, n):
    """3 samples that share a prompt of 12 and said 1 and 2 more: 3 blocks and 3 of their own; 12 tokens and 3 x 1."""
    engine = engine_of(checkpoint, num_blocks=16)
    asked: list[tuple[int, int]] = []
    engine.scheduler._prefers_swap = lambda *what: bool(asked.append(what))
    engine.add_request("a", FIRST, params(12, n=n, temperature=1.0, seed=1))
    for _ in range(2):
        step(engine)
    engine.scheduler._preempt(list(engine.scheduler.running))
    [(num_blocks, num_tokens)] = asked
    shared = {tuple(said[:1]) for said in answers(engine.abort_request("a"))}
    assert num_blocks == 3 + n
    assert num_tokens == 12 + len(shared), "those that said the same share that too"


def test_a_chunk_of_a_prompt_that_was_preempted_is_not_computed_again(checkpoint):
    """b has computed some of its prompt when a needs the room."""
    engine = engine_of(checkpoint, num_blocks=11, max_num_batched_tokens=3)
    engine.add_request("a", FIRST, params(12))
    for _ in range(8):
        step(engine)
    engine.add_request("b", [*SECOND, *FIRST], params(12))
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.scheduler.num_swaps > 0 and engine.model_runner.num_tokens == needed(ended)


def test_followers_of_a_prompt_that_is_not_done_wait_with_their_leader(checkpoint):
    engine = engine_of(checkpoint, num_blocks=16, max_num_batched_tokens=5)
    engine.add_request("a", FIRST, params(12, n=3, temperature=1.0, seed=3))
    step(engine)
    engine.scheduler._preempt(list(engine.scheduler.running))
    assert [len(seq.host_table) for seq in engine.scheduler.waiting] == [2, 0, 0]
    assert len(engine.scheduler.waiting[0].followers) == 2
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.model_runner.num_tokens == needed(ended)


# Who comes back when


def test_who_is_away_comes_back_before_a_new_one_starts(checkpoint):
    engine = two(checkpoint)
    until_swapped(engine)
    engine.add_request("c", [7], params(3))
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["b", "c"]
    while engine.scheduler.waiting:
        assert engine.scheduler.waiting[0].request_id == "b" or "b" in {s.request_id for s in engine.scheduler.running}
        step(engine)
    ended = run_to_the_end(engine)
    assert ended["c"].finished


def test_it_comes_back_only_when_the_blocks_of_its_next_tokens_are_there_too(checkpoint):
    engine = two(checkpoint)
    until_swapped(engine)
    waiting = engine.scheduler.waiting[0]
    while waiting.host_table:
        num_needed = -(-waiting.num_tokens // 4)
        num_free = engine.kv_cache_manager.num_free_blocks
        step(engine)
        assert bool(waiting.host_table) or num_free >= num_needed
    assert engine.kv_cache_manager.num_blocks - engine.kv_cache_manager.num_free_blocks >= len(waiting.block_table)
    step(engine)
    assert ("b", 1) in engine.model_runner.steps[-1], "and goes on at once"
    run_to_the_end(engine)


def test_beside_others_it_leaves_the_watermark_free(checkpoint):
    engine = engine_of(checkpoint, num_blocks=10, watermark=0.3)
    engine.add_request("a", FIRST[:3], params(20))
    engine.add_request("b", SECOND, params(12))
    for _ in range(2):
        step(engine)
    engine.scheduler._preempt([engine.scheduler.running[-1]])
    engine.kv_cache_manager._pool.get_new_blocks(3)
    assert engine.kv_cache_manager.num_free_blocks == 6  # b needs 4, 3 are to be left
    engine.scheduler.schedule()
    assert len(engine.scheduler.waiting) == 1
    engine.abort_request("a")
    engine.scheduler.schedule()
    assert not engine.scheduler.waiting, "alone it needs to leave none"


def test_it_needs_seats(checkpoint):
    engine = engine_of(checkpoint, num_blocks=40, max_num_seqs=2)
    engine.add_request("a", FIRST, params(12, n=2, temperature=1.0, seed=3))
    for _ in range(3):
        step(engine)
    engine.scheduler._preempt(list(engine.scheduler.running))
    engine.scheduler.running.append(engine.scheduler.waiting[0])  # a seat is taken
    group = list(engine.scheduler.waiting)
    assert not engine.scheduler._swap_in(group) and list(engine.scheduler.waiting) == group
    engine.scheduler.running.clear()
    assert engine.scheduler._swap_in(group) and engine.scheduler.running == group


# A host without room, and copies that fail


@pytest.mark.parametrize("swap_space_tokens", [0, 4, 8])
def test_a_full_host_falls_back_to_recompute(checkpoint, swap_space_tokens):
    engine = two(checkpoint, swap_space_tokens=swap_space_tokens)
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.scheduler.num_preemptions > 0 == engine.scheduler.num_swaps
    assert engine.model_runner.num_tokens > needed(ended)


def test_stores_that_fail_fall_back_to_recompute(checkpoint):
    engine = two(checkpoint)
    engine.host_pool.fails = lambda: True
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.scheduler.num_preemptions > 0 == engine.scheduler.num_swaps


@pytest.mark.parametrize("n", [1, 3])
def test_a_load_that_fails_means_to_start_over(checkpoint, n):
    engine = two(checkpoint, n=n, num_blocks=6 + 4 * n)
    until_swapped(engine)
    engine.host_pool.fails = lambda: True
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.model_runner.num_tokens > needed(ended) - sum(len(s) - 1 for s in answers(ended["a"]))
    assert engine.host_pool.loaded.num_blocks == 0


def test_one_that_outgrew_the_pool_while_it_was_away_starts_over_and_fails_with_both_numbers(checkpoint):
    engine = engine_of(checkpoint, num_blocks=4)
    engine.add_request("a", FIRST, params(12))
    for _ in range(5):
        step(engine)
    engine.scheduler._preempt(list(engine.scheduler.running))
    [seq] = engine.scheduler.waiting
    assert seq.host_table and seq.num_tokens == 17
    ended = run_to_the_end(engine)
    assert ended["a"].error == "17 tokens need 5 blocks, the pool has 4"


def test_a_block_that_is_yet_to_be_copied_is_not_moved(checkpoint):
    """Its bytes are not there yet. The group is computed again."""
    engine = engine_of(checkpoint, num_blocks=16)
    engine.add_request("a", FIRST[:10], params(12, n=2, temperature=1.0, seed=3))
    step(engine)
    engine.scheduler._take_slots(engine.scheduler.schedule())
    assert engine.scheduler.copies
    group = list(engine.scheduler.running)
    assert not engine.scheduler._swap_out(group)
    engine.scheduler.copies.clear()
    assert engine.scheduler._swap_out(group)


# Copies that take their time


def test_a_step_in_which_nobody_is_ready_waits_for_the_copies(checkpoint):
    """Alone and away: it is brought back in one step, and runs in the next one."""
    engine = engine_of(checkpoint)
    engine.add_request("a", FIRST, params(3))
    step(engine)
    engine.scheduler._preempt(list(engine.scheduler.running))
    engine.host_pool.is_late = lambda: True
    assert step(engine) == {} and not engine.host_pool.begun, "it waited"
    assert list(step(engine)) == ["a"]
    run_to_the_end(engine)


def test_who_finds_no_room_but_what_is_being_stored_waits_and_does_not_start_over(checkpoint):
    """Alone, with 4 of 6 blocks: they are held until they are stored, and 2 are not enough to come back to."""
    engine = engine_of(checkpoint, num_blocks=6)
    engine.add_request("a", FIRST, params(12))
    for _ in range(2):
        step(engine)
    engine.host_pool.is_late = lambda: True
    engine.scheduler._preempt(list(engine.scheduler.running))
    ended = run_to_the_end(engine)
    assert_said_alone(ended)
    assert engine.model_runner.num_tokens == needed(ended)


def test_others_run_while_one_is_on_its_way(checkpoint):
    engine = two(checkpoint, num_blocks=16)
    for _ in range(2):
        step(engine)
    engine.scheduler._preempt([engine.scheduler.running[-1]])
    engine.host_pool.is_late = lambda: True
    for _ in range(3):
        assert list(step(engine)) == ["a"]
        assert engine.host_pool.begun, "nobody waits"
    engine.host_pool.finish()
    assert list(step(engine)) == ["a", "b"]
    assert_said_alone(run_to_the_end(engine))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_nobody_else_is_preempted_while_blocks_are_on_their_way_out(checkpoint, n):
    """Three requests; one is stored, slowly: the one that waits for its room does not chase the other one out too."""
    engine = engine_of(checkpoint, num_blocks=15)
    engine.host_pool.is_late = lambda: True
    for name, prompt in (("a", FIRST), ("b", SECOND), ("c", list(range(80, 92)))):
        engine.add_request(name, prompt, params(12))
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        was_storing, before = engine.kv_cache_manager.is_storing, engine.scheduler.num_preemptions
        outputs = step(engine)
        ended |= {name: output for name, output in outputs.items() if output.finished}
        assert not was_storing or engine.scheduler.num_preemptions == before
        if n == 1:
            engine.host_pool.finish()
        elif engine.scheduler.num_preemptions % n:
            engine.kv_cache_manager.collect(wait=True)
    assert_said_alone(ended)
    assert engine.scheduler.num_swaps > 0 and engine.model_runner.num_tokens == needed(ended)
    assert_empty(engine)


def test_samples_that_find_no_room_while_others_are_stored_write_to_nothing_that_they_share(checkpoint):
    """They have slots for their tokens, but in a block of both: they wait for one of their own."""
    engine = engine_of(checkpoint, num_blocks=7)
    engine.add_request("a", FIRST[:10], params(6, n=2, temperature=1.0, seed=3))
    engine.add_request("b", SECOND, params(6))
    step(engine)
    engine.host_pool.is_late = lambda: True
    ended = run_to_the_end(engine)
    assert answers(ended["a"]) == [said_alone(FIRST[:10], 6, 3, i) for i in range(2)]
    assert answers(ended["b"]) == [said_alone(SECOND, 6)]
    assert engine.scheduler.num_swaps > 0


def test_who_is_swapped_does_not_come_straight_back_to_the_blocks_that_another_waits_for(checkpoint):
    """a's four samples need 3 blocks; 2 are free, and b's is being stored. In these 2 there is room for b."""
    engine = engine_of(checkpoint, num_blocks=5)
    engine.add_request("a", FIRST[:6], params(3, n=4, temperature=1.0, seed=3))
    engine.add_request("b", SECOND[:3], params(3))
    step(engine)
    engine.host_pool.is_late = lambda: True
    step(engine)
    assert engine.scheduler.num_swaps == 1 and [seq.request_id for seq in engine.scheduler.running] == ["a"] * 4
    ended = run_to_the_end(engine)
    assert answers(ended["a"]) == [said_alone(FIRST[:6], 3, 3, i) for i in range(4)]
    assert answers(ended["b"]) == [said_alone(SECOND[:3], 3)]


def test_who_waits_for_blocks_that_are_being_stored_is_not_overtaken(checkpoint):
    """As above, beside one that runs all the time, and the store takes two steps: b has to wait for both of them."""
    engine = engine_of(checkpoint, num_blocks=6)
    engine.add_request("first", [1], params(6))
    engine.add_request("a", FIRST[:6], params(3, n=4, temperature=1.0, seed=3))
    engine.add_request("b", SECOND[:3], params(3))
    step(engine)
    engine.host_pool.is_late = lambda: True
    assert list(step(engine)) == ["first"] and engine.kv_cache_manager.is_storing
    assert list(step(engine)) == ["first"] and engine.scheduler.waiting[0].request_id == "b"
    engine.host_pool.finish()
    assert list(step(engine)) == ["first", "a"] and engine.scheduler.num_swaps == 1
    assert answers(run_to_the_end(engine)["b"]) == [said_alone(SECOND[:3], 3)]


def test_the_beginning_of_a_prompt_that_is_on_the_host_is_loaded_and_not_computed(checkpoint):
    engine = engine_of(checkpoint, enable_prefix_caching=True)
    for number, prompt in enumerate([FIRST * 2, SECOND * 2, FIRST * 2]):
        engine.add_request(str(number), prompt, params(2))
        before = engine.model_runner.num_tokens
        engine.host_pool.is_late = lambda: True
        ended = run_to_the_end(engine)
        assert answers(ended[str(number)]) == [said_alone(prompt, 2)]
    assert engine.model_runner.num_tokens - before == 4 + 1 and ended["2"].num_cached_tokens == 20
    assert 4 * engine.host_pool.loaded.num_blocks == engine.kv_cache_manager.prefix_cache.stats.restored > 0


class LateModelEngine(LLMEngine):
    """A real model; copies are late."""

    def build_host_pool(self) -> HostPool:
        pool = LateHostPool(self.kv_cache.blocks, 32)
        pool.is_late = lambda: True
        return pool


def test_a_beam_search_waits_for_the_beginning_of_its_prompt(checkpoint):
    config = EngineConfig(str(checkpoint), block_size=4, kv_cache_tokens=44, preemption="swap")
    engine = LateModelEngine(config)
    search = BeamSearch(engine, BeamSearchParams(beam_width=2, max_tokens=3))
    first = search.run("a", FIRST)
    engine.add_request("b", FIRST, params(2))
    run_to_the_end(engine)
    search.run("c", SECOND * 3)  # takes all blocks, and leaves them free: what comes next evicts nobody
    engine.kv_cache.blocks[engine.kv_cache_manager._pool._free] = 9.0  # whatever others left there
    assert answers(search.run("d", FIRST)) == answers(first)
    assert engine.host_pool.loaded.num_blocks > 0
    assert_empty(engine)


# Aborts


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("state", ["running", "leaving", "away", "arriving", "back"])
def test_abort_frees_everything_on_both_tiers(checkpoint, state, n):
    engine = engine_of(checkpoint, num_blocks=16)
    sampling = params(12, n=n, temperature=1.0, seed=3)
    engine.add_request("a", FIRST, sampling)
    for _ in range(3):
        step(engine)
    if state in ("leaving", "arriving"):
        engine.host_pool.is_late = lambda: True
    if state != "running":
        engine.scheduler._preempt(list(engine.scheduler.running))
    if state in ("arriving", "back"):
        engine.host_pool.finish()
        engine.scheduler.schedule()
    engine.scheduler.copies.clear()
    is_away = state in ("leaving", "away")
    assert is_away == any(seq.host_table for seq in engine._requests["a"])
    assert (state in ("leaving", "arriving")) == engine.kv_cache_manager.is_copying
    output = engine.abort_request("a")
    assert output is not None and reasons(output) == ["abort"] * n
    assert engine.abort_request("a") is None
    assert_empty(engine)
    engine.add_request("b", SECOND, params(12))
    assert_said_alone(run_to_the_end(engine))


# Any history


def any_engine(checkpoint, rng: random.Random) -> TieredEngine:
    """A pool, a host and budgets of any size, copies of any kind."""
    size = rng.choice([1, 2, 4, 4, 4])
    engine = engine_of(
        checkpoint,
        num_blocks=rng.randrange(4, 60) // size + 3,
        preemption=rng.choice(["swap", "swap", "auto", "recompute"]),
        swap_space_tokens=rng.choice([None, None, 0, 8, 20, 100]),
        block_size=size,
        max_num_seqs=rng.choice([3, 4, 32]),
        max_num_batched_tokens=rng.choice([1, 3, 7, 100]),
        watermark=rng.choice([0.0, 0.0, 0.2]),
        enable_prefix_caching=rng.random() < 0.5,
    )
    late, failing = rng.choice([0.0, 0.5, 1.0]), rng.choice([0.0, 0.0, 0.3])
    engine.host_pool.is_late = lambda: rng.random() < late
    engine.host_pool.fails = lambda: rng.random() < failing
    if engine.config.preemption == "auto":
        engine.cost_model = rng.choice([SWAP_IS_FASTER, RECOMPUTE_IS_FASTER, CostModel(2 * 256 * 100, 99.0)])
    return engine


def anything_happens(engine: TieredEngine, rng: random.Random, number: int) -> None:
    """A request of up to three samples comes; perhaps one is aborted, or preempted though there is room."""
    prompt = [10 + rng.randrange(2) for _ in range(rng.randrange(1, 16))]
    sampling = params(rng.randrange(1, 20), n=rng.randrange(1, 4), temperature=1.0, seed=7)
    try:
        engine.add_request(str(number), prompt, sampling)
    except ValueError as error:
        assert "the prompt needs" in str(error)
    if rng.random() < 0.15:
        engine.abort_request(str(rng.randrange(number + 1)))
        engine.kv_cache_manager.check_integrity()
    if rng.random() < 0.2 and engine.scheduler.running and not engine.scheduler.copies:
        *_, victim = groups(engine.scheduler.running)
        engine.scheduler._preempt(victim)


def check(outputs: dict[str, RequestOutput]) -> int:
    """How many of them have ended. Each says what it says alone."""
    for output in outputs.values():
        for completion in output.outputs:
            said = completion.token_ids
            assert said == said_alone(output.prompt_token_ids, len(said), 7, completion.index)
    return sum(output.finished for output in outputs.values())


@pytest.mark.parametrize("seed", range(60))
def test_in_any_history_each_says_what_it_says_alone(checkpoint, seed):
    rng = random.Random(seed)
    engine = any_engine(checkpoint, rng)
    num_ended = 0
    for number in range(25):
        anything_happens(engine, rng, number)
        num_ended += sum(check(step(engine)) for _ in range(rng.randrange(6)))
        if rng.random() < 0.5:
            engine.host_pool.finish()
    for _ in range(3000):
        if engine.has_unfinished_requests():
            num_ended += check(step(engine))
    assert num_ended > 0
    assert_empty(engine)
