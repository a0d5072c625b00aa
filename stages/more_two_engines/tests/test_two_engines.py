"""Two engines: one computes prompts, the other decodes. Blocks come by their hashes, if they come at all.

The other engine is a script (other_engines.py) in all tests but the last two, which start a process.
"""

import random
from collections import Counter
from contextlib import suppress
from multiprocessing import active_children

import pytest
import torch

from ..engine import LLMEngine
from ..host_tier import HostTier
from ..llm import LLM
from ..observer import Observer
from ..outputs import RequestOutput
from ..prefill import NUM_BLOCKS, Prefilled, serve
from ..sampling import SamplingParams
from .helpers import greedy_without_cache
from .other_engines import Command, Commands, Ended, Results, ScriptedEngine, hashes_of
from .scripted import (
    BLOCK_SIZE,
    add,
    check,
    names,
    queues,
    reason,
    run,
    scripted_engine,
    step,
    steps_of,
    tokens_alone,
    tokens_of,
    tokens_of_all,
)

LONG = [ord("b")] * 43  # ten blocks that can be hit, and three tokens more


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=24, enable_prefix_caching=True)


@pytest.fixture
def other(engine) -> ScriptedEngine:
    return ScriptedEngine(engine)


def on_host(engine: LLMEngine, token_ids: list[int]) -> list[bool]:
    """Return for each block that a prompt can hit whether the host has it."""
    return [block_hash in engine.host_tier for block_hash in hashes_of(token_ids)]


# ---- receive


@pytest.fixture
def tier() -> HostTier:
    """Return a pool of three blocks on the host."""
    return HostTier(torch.randn(4, 2, 2, 4, 1, 8), 3, Observer())


def receive(tier: HostTier, *hashes: bytes) -> torch.Tensor:
    """Receive a block under each hash, and return the last one."""
    for block_hash in hashes:
        data = torch.randn(tier.blocks.shape[1:])
        tier.receive(data, block_hash)
    return data


def test_a_received_block_is_on_the_host(tier):
    data = receive(tier, b"a")
    assert b"a" in tier, "a block was received under hash a"
    [held] = tier.hold([b"a"])
    assert torch.equal(tier.blocks[held], data), "the host's block must have the bytes that were received"


def test_a_block_that_is_received_twice_is_stored_once_and_renewed(tier):
    """The host has three blocks, and blocks a, b, c, a and d are received in this order."""
    receive(tier, b"a", b"b", b"c", b"a", b"d")
    assert [each in tier for each in (b"a", b"b", b"c", b"d")] == [True, False, True, True], "d must evict b"
    tier.check_integrity()


def test_a_received_block_is_dropped_if_loads_hold_all_blocks_of_the_host(tier):
    """The host has three blocks, and all of them are held."""
    receive(tier, b"a", b"b", b"c")
    tier.hold([b"a", b"b", b"c"])
    receive(tier, b"d")
    assert b"d" not in tier


def test_a_step_receives_one_message(engine, other):
    """Ten blocks are on their way in messages of 4, 4 and 2."""
    other.deliver("b", LONG, hashes_of(LONG))
    counts = []
    for _ in range(4):
        step(engine)
        counts.append(sum(on_host(engine, LONG)))
    assert counts == [NUM_BLOCKS, 2 * NUM_BLOCKS, 10, 10], "blocks on the host after each of four steps"


def test_received_blocks_are_loaded_instead_of_computed(engine, other):
    """The ten full blocks of a prompt have arrived before it."""
    other.deliver("x", LONG, hashes_of(LONG))
    for _ in range(3):
        step(engine)
    add(engine, "b", len(LONG), max_tokens=4)
    outputs = run(engine)
    assert steps_of(engine)[0] == [("b", 3)], "40 of the 43 tokens are in blocks that have been received"
    assert tokens_of(outputs["b"]) == tokens_alone(LONG, 4)


def test_messages_are_received_while_others_run(engine, other):
    """Request a decodes while ten blocks arrive in three messages."""
    add(engine, "a", 3)
    other.deliver("x", LONG, hashes_of(LONG))
    for _ in range(3):
        assert list(step(engine)) == ["a"]
    assert all(on_host(engine, LONG))


def test_a_step_does_not_wait_while_another_request_decodes(engine, other, monkeypatch):
    """Request a decodes, and the prompt of b is computed by the other engine."""
    add(engine, "a", 3)
    step(engine)
    monkeypatch.setattr(engine, "_unqueued", {"b": []})
    step(engine)
    assert other.num_waits == 0, "the step waited for b's blocks, and a could have decoded"


def test_a_step_without_a_message_goes_on(engine, other):
    """Nothing has been asked for, so no step waits."""
    assert step(engine) == {}
    prompt = add(engine, "a", 3)
    assert tokens_of(run(engine)["a"]) == tokens_alone(prompt, 8)
    assert other.num_waits == 0


def test_the_last_message_of_an_unknown_request_queues_nothing(engine, other):
    """The blocks are of a request that is not here."""
    other.deliver("gone", LONG, hashes_of(LONG))
    for _ in range(3):
        step(engine)
    assert queues(engine) == "none run, none wait" and all(on_host(engine, LONG))


# ---- serve


def ask(request_id: str, token_ids: list[int], start: int = 0) -> Command:
    """Return the command that asks for the blocks of a prompt from block `start` on."""
    return request_id, token_ids, hashes_of(token_ids)[start:]


def abort(request_id: str) -> Command:
    return request_id, [], []


def served(engine: LLMEngine, *commands: Command | None) -> list[Prefilled]:
    """Return the messages of the other engine, which has these commands and then no more."""
    results = Results()
    with suppress(Ended):
        serve(engine, Commands(*commands), results)
    check(engine)
    return [*results.messages]


def texts_of(messages: list[Prefilled]) -> list[list[int]]:
    """Return the ids of the tokens in each block that was sent, in the order of sending."""
    return [block[0, 0, :, 0, 0].int().tolist() for message in messages for block in message.blocks]


def blocks_of(token_ids: list[int]) -> list[list[int]]:
    return [token_ids[i : i + BLOCK_SIZE] for i in range(0, len(token_ids) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE)]


TEXT = list(range(7, 50))  # 43 tokens, all different


def test_a_prompt_is_answered_with_its_blocks_from_the_last_one_to_the_first(engine):
    messages = served(engine, ask("b", TEXT))
    hashes = [each for message in messages for each in message.hashes]
    assert hashes == hashes_of(TEXT)[::-1], "ten blocks are wanted, and the last one is sent first"
    assert texts_of(messages) == blocks_of(TEXT)[::-1], "each block has the keys and values of its own tokens"


def test_a_message_is_small_and_the_last_one_names_the_request(engine):
    """Ten blocks are wanted."""
    messages = served(engine, ask("b", TEXT))
    assert [len(message.hashes) for message in messages] == [NUM_BLOCKS, NUM_BLOCKS, 2]
    assert [message.request_id for message in messages] == [None, None, "b"]


def test_only_wanted_blocks_are_sent(engine):
    """The first 8 of ten blocks are not wanted."""
    messages = served(engine, ask("b", TEXT, start=8))
    assert texts_of(messages) == blocks_of(TEXT)[:7:-1]


def test_blocks_that_are_cached_there_are_sent_too(engine):
    """The second prompt begins with blocks of the first one."""
    messages = served(engine, ask("b", TEXT), ask("c", TEXT[:23] + [5] * 10), None)
    assert len(messages) == 3 + 2
    assert texts_of(messages[3:]) == blocks_of(TEXT[:23] + [5] * 10)[::-1]


def test_commands_that_are_there_are_read_before_a_step(engine):
    served(engine, ask("b", TEXT[:9]), ask("c", TEXT[9:18]))
    assert steps_of(engine) == [[("b", 9), ("c", 9)]], "both prompts fit into one step"


def test_a_prompt_that_comes_while_another_is_computed_is_answered(checkpoint):
    """A step has 16 tokens, so the first prompt takes three steps. The second one comes after the first step."""
    engine = scripted_engine(checkpoint, num_blocks=24, enable_prefix_caching=True, max_num_batched_tokens=16)
    messages = served(engine, ask("b", TEXT), None, ask("c", [5] * 9))
    assert [each.request_id for each in messages if each.request_id] == ["b", "c"]


def test_an_aborted_prompt_is_neither_computed_nor_answered(checkpoint):
    """A step has 16 tokens. The abort comes after two steps."""
    engine = scripted_engine(checkpoint, num_blocks=24, enable_prefix_caching=True, max_num_batched_tokens=16)
    messages = served(engine, ask("b", TEXT), None, None, abort("b"), ask("c", [5] * 9))
    assert [message.request_id for message in messages] == ["c"]
    assert engine.model_runner.num_tokens == 2 * 16 + 9, "two steps for b, and then c alone"


def test_an_abort_of_an_answered_prompt_changes_nothing(engine):
    """Aborts come for an answered prompt, and for one that was never sent."""
    messages = served(engine, ask("b", TEXT), None, abort("b"), abort("never seen"), ask("c", [5] * 9))
    assert [each.request_id for each in messages if each.request_id] == ["b", "c"]


def test_a_prompt_that_cannot_be_computed_is_answered_without_blocks(checkpoint):
    """The prompt has 43 tokens, and the pool has room for 24."""
    engine = scripted_engine(checkpoint, num_blocks=6, enable_prefix_caching=True)
    [message] = served(engine, ask("b", TEXT))
    assert (message.hashes, len(message.blocks), message.request_id) == ([], 0, "b")


# ---- add_request and abort_request


def test_a_request_is_queued_when_its_blocks_have_arrived(engine, other):
    """A prompt has 18 tokens, and the other engine answers with four blocks."""
    prompt = add(engine, "b", 18)
    assert other.prompts == {"b": (prompt, hashes_of(prompt))} and queues(engine) == "none run, none wait"
    other.answer("b")
    outputs = run(engine)
    assert steps_of(engine)[0] == [("b", 2)], "16 of the 18 tokens have been computed by the other engine"
    assert tokens_of(outputs["b"]) == tokens_alone(prompt, 8)


def test_others_decode_while_the_other_engine_computes_a_prompt(engine, other):
    """Request a runs here, and the prompt of b is computed there."""
    first = add(engine, "a", 3, max_tokens=12)
    prompt = add(engine, "b", len(LONG))
    for _ in range(5):
        ran = list(step(engine))
        assert ran == ["a"], f"a could decode while b's blocks are on their way, and {ran} ran: did _receive() wait?"
    other.answer("b")
    outputs = run(engine)
    assert steps_of(engine)[1:7] == [[("a", 1)]] * 6 and steps_of(engine)[7] == [("a", 1), ("b", 3)]
    assert [tokens_of(outputs[name]) for name in "ab"] == [tokens_alone(first, 12), tokens_alone(prompt, 8)]
    assert other.num_waits == 0, "a step that has work must not wait for the other engine"


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_a_prompt_without_a_block_that_can_be_hit_is_queued_at_once(engine, other, num_tokens):
    """The last token must be computed here, so a block is full if there are 5 tokens."""
    add(engine, "a", num_tokens)
    add(engine, "b", 5)
    assert [*other.prompts] == ["b"] and queues(engine) == "none run, a wait"


def test_a_prompt_whose_blocks_are_here_is_queued_at_once(engine, other):
    """The same prompt comes twice."""
    prompt = add(engine, "b", 18, max_tokens=1)
    run(engine)
    engine.add_request("again", prompt, SamplingParams(max_tokens=1, seed=0))
    assert (other.num_sent, queues(engine)) == (1, "none run, again wait")


def test_only_missing_blocks_are_asked_for(engine, other):
    """The first 3 of 10 blocks are here: those of an earlier request."""
    add(engine, "b", 13, max_tokens=1)
    run(engine)
    engine.add_request("c", LONG, SamplingParams(max_tokens=4, seed=0))
    assert other.prompts["c"] == (LONG, hashes_of(LONG)[3:])
    assert tokens_of(run(engine)["c"]) == tokens_alone(LONG, 4)
    assert ("c", 3) in steps_of(engine)[-4]


def test_samples_wait_for_one_answer(checkpoint):
    """Five samples, and two can run at a time: three of them begin with the prompt."""
    engine = scripted_engine(checkpoint, num_blocks=24, enable_prefix_caching=True, max_num_seqs=2)
    other = ScriptedEngine(engine)
    prompt = add(engine, "b", 18, max_tokens=3, n=5)
    outputs = run(engine)
    assert tokens_of_all(outputs["b"]) == [tokens_alone(prompt, 3, sample_index=i) for i in range(5)]
    assert other.num_sent == 1
    prompts = [num_tokens for batch in steps_of(engine) for _, num_tokens in batch if num_tokens > 1]
    assert prompts == [2], "16 tokens come in blocks, and the fifth sample is alone: it computes the other two at once"


def test_a_prompt_is_computed_here_if_the_other_engine_has_enough(checkpoint):
    """At most max_num_seqs prompts are sent and not answered."""
    engine = scripted_engine(checkpoint, num_blocks=24, enable_prefix_caching=True, max_num_seqs=2)
    other = ScriptedEngine(engine)
    prompts = {name: add(engine, name, 18, max_tokens=2) for name in "bcd"}
    assert [*other.prompts] == ["b", "c"] and queues(engine) == "none run, d wait"
    outputs = step(engine) | step(engine)
    assert tokens_of(outputs["d"]) == tokens_alone(prompts["d"], 2) and other.num_waits == 0
    other.answer("b")
    outputs = step(engine)
    prompts["e"] = add(engine, "e", 18, max_tokens=2)
    assert [*other.prompts] == ["c", "e"], "there is room again"
    outputs = run(engine)
    assert {name: tokens_of(outputs[name]) for name in "bce"} == {
        name: tokens_alone(prompts[name], 2) for name in "bce"
    }


def test_the_engine_waits_for_an_answer_if_it_has_nothing_else_to_do(engine, other):
    """One request has arrived, and its prompt has been sent."""
    prompt = add(engine, "b", 18, max_tokens=1)
    output = step(engine)["b"]
    assert (tokens_of(output), other.num_waits) == (tokens_alone(prompt, 1), 1)


def test_a_refused_request_does_not_wait_for_an_answer_to_another(engine, other):
    """The prompt of b has been sent, and the other prompt is empty."""
    add(engine, "b", 18)
    engine.add_request("bad", [])
    assert reason(step(engine)["bad"]) == "error"
    assert [*other.prompts] == ["b"] and other.num_waits == 0


def test_an_abort_reaches_the_other_engine(engine, other):
    """Request b is aborted while the other engine computes its prompt."""
    add(engine, "b", 18)
    output = engine.abort_request("b")
    assert (reason(output), other.aborted, other.prompts) == ("abort", ["b"], {})
    assert not engine.has_unfinished_requests() and step(engine) == {} and other.num_waits == 0


def test_an_answer_that_crosses_an_abort_is_kept_for_the_next_request(engine, other):
    """The blocks of b are on their way when it is aborted."""
    prompt = add(engine, "b", 18, max_tokens=1)
    other.answer("b")
    engine.abort_request("b")
    step(engine)
    assert all(on_host(engine, prompt)) and queues(engine) == "none run, none wait"
    add(engine, "b", 18, max_tokens=1)
    assert tokens_of(step(engine)["b"]) == tokens_alone(prompt, 1)
    assert other.num_sent == 1, "the blocks are here already"


def test_an_aborted_request_makes_room_for_another_prompt(checkpoint):
    """One prompt may be sent at a time."""
    engine = scripted_engine(checkpoint, num_blocks=24, enable_prefix_caching=True, max_num_seqs=1)
    other = ScriptedEngine(engine)
    add(engine, "b", 18)
    engine.abort_request("b")
    add(engine, "c", 18)
    assert [*other.prompts] == ["c"]


def test_an_abort_of_a_queued_request_is_not_sent(engine, other):
    """Request b runs here already when it is aborted."""
    add(engine, "b", 18)
    step(engine)
    assert other.num_sent == 1 and queues(engine) == "b run, none wait"
    engine.abort_request("b")
    assert other.aborted == [] and engine.kv_cache_manager.num_free_blocks == 24


def test_a_request_that_is_larger_than_the_pool_ends_with_an_error(checkpoint):
    """The other engine has sent no block of it."""
    engine = scripted_engine(checkpoint, num_blocks=6, enable_prefix_caching=True)
    other = ScriptedEngine(engine)
    add(engine, "b", len(LONG))
    other.refuse("b")
    assert reason(step(engine)["b"]) == "error"
    check(engine)


def test_blocks_that_the_host_has_no_room_for_are_computed_here(checkpoint):
    """The host keeps 4 of 10 blocks. Those at the beginning of the prompt are worth most."""
    engine = scripted_engine(checkpoint, num_blocks=24, enable_prefix_caching=True, kv_offloading_tokens=16)
    ScriptedEngine(engine)
    add(engine, "b", len(LONG), max_tokens=2)
    outputs = run(engine)
    assert tokens_of(outputs["b"]) == tokens_alone(LONG, 2)
    assert steps_of(engine)[0] == [("b", len(LONG) - 16)]


def test_a_preempted_request_returns_without_the_other_engine(checkpoint):
    """Two requests outgrow a pool of 7 blocks."""
    engine = scripted_engine(checkpoint, num_blocks=7, enable_prefix_caching=True)
    other = ScriptedEngine(engine)
    prompts = {name: add(engine, name, 9, max_tokens=14) for name in "bc"}
    for name in "bc":
        other.answer(name)
    outputs = run(engine)
    assert engine.scheduler.num_preemptions > 0 and other.num_sent == 2
    assert {name: tokens_of(outputs[name]) for name in "bc"} == {
        name: tokens_alone(prompt, 14) for name, prompt in prompts.items()
    }


@pytest.mark.parametrize(
    "options", [{"enable_prefix_caching": False}, {"kv_offloading_tokens": 0}, {"offload_policy": "recompute"}], ids=str
)
def test_blocks_need_a_place_to_arrive(checkpoint, options):
    with pytest.raises(ValueError, match="disaggregated_prefill"):
        LLM(checkpoint, disaggregated_prefill=True, **options)


# ---- the dead process


def test_requests_of_a_dead_process_are_computed_here(engine, other):
    """Request a runs when the process dies, and b and c wait for an answer."""
    prompts = {name: add(engine, name, num_tokens) for name, num_tokens in (("a", 3), ("b", 43), ("c", 18))}
    step(engine)
    other.is_dead = True
    outputs = step(engine) | run(engine)
    assert {name: tokens_of(outputs[name]) for name in "abc"} == {
        name: tokens_alone(prompt, 8) for name, prompt in prompts.items()
    }
    assert steps_of(engine)[1] == [("a", 1), ("b", 43), ("c", 18)], "both prompts are queued in the next step"
    assert engine.prefill is None and other.is_closed


def test_a_wait_for_an_answer_ends_if_the_process_dies(engine, other):
    """Nothing else can run."""
    prompt = add(engine, "b", 18, max_tokens=1)
    other.is_dead = True
    assert tokens_of(run(engine)["b"]) == tokens_alone(prompt, 1)
    assert steps_of(engine) == [[("b", 18)]]


def test_messages_that_a_process_has_sent_before_its_death_count(engine, other):
    """The answer is on its way when the process dies."""
    add(engine, "b", 18, max_tokens=1)
    other.answer("b")
    other.is_dead = True
    run(engine)
    assert steps_of(engine) == [[("b", 2)]]
    step(engine)
    assert engine.prefill is None


def test_the_engine_goes_on_without_the_other_one(engine, other):
    """The process is dead before the first request comes."""
    other.is_dead = True
    step(engine)
    prompt = add(engine, "b", 18, max_tokens=2)
    engine.add_request("c", prompt, SamplingParams(max_tokens=2, seed=0))
    engine.abort_request("c")
    assert tokens_of(run(engine)["b"]) == tokens_alone(prompt, 2) and other.num_sent == 0


def test_close_ends_the_other_process_and_loses_no_request(engine, other):
    """Two requests wait for an answer."""
    prompts = {name: add(engine, name, 18) for name in "bc"}
    engine.close()
    assert other.is_closed
    outputs = run(engine)
    assert {name: tokens_of(outputs[name]) for name in "bc"} == {
        name: tokens_alone(prompt, 8) for name, prompt in prompts.items()
    }
    engine.close()


def test_close_of_an_engine_that_is_alone_does_nothing(engine):
    """No process was started."""
    add(engine, "b", 18)
    engine.close()
    assert queues(engine) == "none run, b wait"


# ---- histories


@pytest.mark.parametrize("seed", range(2))
def test_any_history_with_another_engine_loses_nothing(checkpoint, seed):
    rng, counts = random.Random(seed), Counter[str]()
    for _ in range(12):
        options = {"max_num_seqs": rng.choice([1, 2, 8]), "kv_offloading_tokens": rng.choice([16, 64, 400])}
        options |= {"max_num_batched_tokens": rng.choice([3, 7, 30]), "enable_prefix_caching": True}
        engine = scripted_engine(checkpoint, rng.randint(4, 16), **options)
        other = ScriptedEngine(engine)
        counts.update(play(engine, other, rng))
        counts["sent"] += other.num_sent
        counts["aborted there"] += len(other.aborted)
        counts["died"] += other.is_closed
        counts["loaded"] += engine.host_tier.num_blocks_loaded
        counts["preemptions"] += engine.scheduler.num_preemptions
    kinds = ("length", "abort", "error", "sent", "aborted there", "loaded", "preemptions", "died")
    assert min(counts[kind] for kind in kinds) >= 3, f"too few: {counts}"


def play(engine: LLMEngine, other: ScriptedEngine, rng: random.Random) -> list[str]:
    """Play a history to its end, check each output, and return the finish reasons."""
    prompts: dict[str, list[int]] = {}
    finished: dict[str, RequestOutput] = {}
    dies = rng.randrange(200)  # or not, in 100 steps
    for i in range(100):
        draw = rng.random()
        other.is_dead |= i == dies
        if other.prompts and rng.random() < 0.2:
            other.answer(rng.choice([*other.prompts]))
        if draw < 0.2:
            num_tokens, n = rng.choice([3, 9, rng.randint(1, 40)]), rng.choice([1, 1, 2, 5])
            prompts[str(i)] = add(engine, str(i), num_tokens, rng.choice([1, 5, 20]), n=n)
        elif draw < 0.27 and prompts:
            request_id = rng.choice(list(prompts))
            output = engine.abort_request(request_id)
            assert (output is None) == (request_id in finished)
            finished |= {request_id: output} if output else {}
        elif engine.has_unfinished_requests():
            finished |= play_step(engine)
    while engine.has_unfinished_requests():
        finished |= play_step(engine)
    assert finished.keys() == prompts.keys(), "a request was lost"
    assert names([*engine.scheduler.running, *engine.scheduler.waiting]) == ""
    assert engine.kv_cache_manager.num_free_blocks == engine.kv_cache_manager.num_blocks
    samples = [(name, sample) for name, output in finished.items() for sample in output.outputs]
    for name, sample in samples:
        expected = tokens_alone(prompts[name], len(sample.token_ids), sample_index=sample.index)
        assert sample.token_ids == expected, f"sample {sample.index} of {name} has other tokens than alone"
    return [sample.finish_reason for _, sample in samples]


def play_step(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs = engine.step()
    engine.kv_cache_manager.check_integrity()
    return {output.request_id: output for output in outputs if output.finished}


# ---- a real process

PROMPTS = [[3 + (7 * i + 11 * j) % 300 for i in range(size)] for j, size in enumerate((21, 43, 3, 37))]


def test_a_real_process_computes_prompts_and_may_die(checkpoint, model):
    """Two prompts are computed there. It is killed, and the last prompt is computed here."""
    expected = [greedy_without_cache(model, prompt, 8) for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    others = active_children()
    llm = LLM(checkpoint, block_size=4, disaggregated_prefill=True)
    [process] = [child for child in active_children() if child not in others]
    outputs = llm.generate(PROMPTS[:3], greedy)
    assert [tokens_of(output) for output in outputs] == expected[:3]
    assert llm.model_runner.num_tokens == (1 + 7) + (3 + 7) + (3 + 7), "20 and 40 tokens are computed there"
    process.kill()
    process.join()
    assert tokens_of(*llm.generate(PROMPTS[3:], greedy)) == expected[3]
    assert llm.model_runner.num_tokens == 28 + 37 + 7


def test_close_leaves_no_process(checkpoint):
    others = active_children()
    llm = LLM(checkpoint, block_size=4, disaggregated_prefill=True)
    [process] = [child for child in active_children() if child not in others]
    llm.close()
    process.join()
    assert not process.is_alive()


def test_an_engine_that_is_gone_leaves_no_process(checkpoint):
    others = active_children()
    llm = LLM(checkpoint, block_size=4, disaggregated_prefill=True)
    [process] = [child for child in active_children() if child not in others]
    del llm
    process.join()
    assert not process.is_alive()
