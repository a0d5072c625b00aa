"""Drafts: guessed from a sequence's own text, in blocks that nobody needs, and kept as far as they are right.

The scripted model often repeats the token 5 places earlier, so many guesses are right, and many are wrong.
"""

import pytest
import torch

from ..engine import LLMEngine
from ..llm import LLM
from ..sampling import SampledToken, SamplingParams
from ..sequence import Sequence
from ..speculation import propose
from .helpers import greedy_without_cache, make_sequence, next_logits
from .scripted import add, check, names, run, scripted_engine, start, step, tokens_alone, tokens_of

# ---- propose


def test_a_draft_is_what_followed_the_last_tokens_before():
    """The last two tokens are 5 and 6, and occurred before."""
    assert propose([1, 5, 6, 7, 8, 9, 5, 6], suffix_len=2, max_tokens=8) == [7, 8, 9, 5, 6]


def test_a_draft_has_at_most_max_tokens():
    """At most 0, 1 and 2 tokens are drafted."""
    assert [propose([5, 6, 7, 8, 5, 6], 2, num_tokens) for num_tokens in (0, 1, 2)] == [[], [7], [7, 8]]


def test_the_first_occurrence_counts():
    """5 and 6 are followed by 7 first, and then by 8."""
    assert propose([5, 6, 7, 5, 6, 8, 5, 6], suffix_len=2, max_tokens=1) == [7]


def test_tokens_that_have_not_occurred_before_have_no_draft():
    """7 and 8 occur only at the end."""
    assert propose([5, 6, 7, 8], suffix_len=2, max_tokens=4) == []


@pytest.mark.parametrize("token_ids", [[5], [5, 5], [5, 6, 5]])
def test_a_text_without_room_for_an_earlier_occurrence_has_no_draft(token_ids):
    """A text is hardly longer than the three tokens to look for."""
    assert propose(token_ids, suffix_len=3, max_tokens=4) == []


def test_an_occurrence_may_overlap_the_last_tokens():
    """Three of four equal tokens are looked for."""
    assert propose([7, 7, 7, 7], suffix_len=3, max_tokens=4) == [7]


# ---- slots


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return drafting_engine(checkpoint, num_blocks=6)


def drafting_engine(checkpoint, num_blocks: int, **options) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks, **{"num_speculative_tokens": 4, "prompt_lookup_max": 2} | options)


def decoding(engine: LLMEngine, num_tokens: int) -> Sequence:
    """Return a running sequence with a slot for its last token, which is uncomputed."""
    seq = start(engine, "a", num_tokens, num_computed=num_tokens - 1)
    engine.kv_cache_manager.append_slot(seq)
    return seq


@pytest.mark.parametrize("num_tokens, num_wanted, num_blocks", [(5, 3, 2), (5, 4, 3), (8, 0, 2), (8, 1, 3), (8, 8, 4)])
def test_a_draft_gets_the_slots_of_the_last_block_and_free_blocks(engine, num_tokens, num_wanted, num_blocks):
    """Blocks have 4 slots, and the pool has blocks for any of these drafts."""
    seq = decoding(engine, num_tokens)
    assert engine.kv_cache_manager.append_draft_slots(seq, num_wanted) == num_wanted
    assert len(seq.block_table) == num_blocks


def test_a_draft_is_cut_off_where_no_block_is_free(engine):
    """The last block of a sequence has one slot left, and other sequences hold the rest of the pool."""
    decoding(engine, 16)
    seq = decoding(engine, 7)
    assert engine.kv_cache_manager.append_draft_slots(seq, 4) == 1
    assert len(seq.block_table) == 2


def test_a_draft_takes_no_block_that_a_hash_names(checkpoint):
    """Four blocks are cached, and a request could hit them. Only one is free and holds nothing."""
    engine = drafting_engine(checkpoint, num_blocks=7, enable_prefix_caching=True)
    ended = start(engine, "x", 17, num_computed=16)
    engine.kv_cache_manager.cache_blocks(ended, 16)
    engine.scheduler.remove(ended)
    seq = decoding(engine, 8)
    assert engine.kv_cache_manager.append_draft_slots(seq, 8) == 4
    assert (len(seq.block_table), len(engine.kv_cache_manager.pool.cached)) == (3, 4), "blocks of seq, cached blocks"


def test_blocks_that_only_a_draft_has_needed_are_given_back(engine):
    """A draft takes two blocks, and is wrong from its first token on."""
    seq = decoding(engine, 8)
    table = list(seq.block_table)
    engine.kv_cache_manager.append_draft_slots(seq, 8)
    engine.kv_cache_manager.trim(seq)
    assert (seq.block_table, engine.kv_cache_manager.num_free_blocks) == (table, 4)
    engine.kv_cache_manager.check_integrity()


def test_accepted_tokens_keep_their_blocks(engine):
    """A draft takes two blocks, and two of its tokens are right."""
    seq = decoding(engine, 8)
    engine.kv_cache_manager.append_draft_slots(seq, 8)
    table = list(seq.block_table)
    seq.token_ids += [7, 7]
    engine.kv_cache_manager.trim(seq)
    assert seq.block_table == table[:3]


def test_observer_hears_which_blocks_a_draft_takes_and_gives_back(engine, monkeypatch):
    """A draft takes one block, and gives it back once."""
    told: list[tuple] = []
    seq = decoding(engine, 8)
    monkeypatch.setattr(engine.observer, "tell", lambda kind, *details: told.append((kind, *details[1:])))
    engine.kv_cache_manager.append_draft_slots(seq, 4)
    block = seq.block_table[-1]
    engine.kv_cache_manager.trim(seq)
    engine.kv_cache_manager.trim(seq)
    assert told == [("grow", None), ("trim", [block])]


# ---- drafts in a step


def draft_of(engine: LLMEngine, token_ids: list[int], num_computed: int, max_num_tokens: int = 64) -> tuple[int, list]:
    """Schedule a step of a sequence. Return how many tokens it computes, and the draft."""
    seq = start(engine, "a", len(token_ids), num_computed)
    seq.token_ids, seq.max_num_tokens = list(token_ids), max_num_tokens
    [(_, num_tokens)] = engine.scheduler.schedule().batch
    return num_tokens, seq.draft_token_ids


REPEATED = [5, 6, 7, 8, 9, 5, 6]


def test_a_step_computes_the_draft_with_the_last_token(engine):
    """One token of a text that repeats itself is uncomputed."""
    assert draft_of(engine, REPEATED, num_computed=6) == (5, [7, 8, 9, 5])


def test_a_prompt_that_a_step_completes_has_a_draft(engine):
    """Five tokens of a prompt are left, and the step has room for them."""
    assert draft_of(engine, REPEATED, num_computed=2) == (5 + 4, [7, 8, 9, 5])


def test_a_prompt_that_a_step_does_not_complete_has_none(checkpoint):
    """Five tokens of a prompt are left, and the step has room for 4."""
    engine = drafting_engine(checkpoint, num_blocks=6, max_num_batched_tokens=4)
    assert draft_of(engine, REPEATED, num_computed=2) == (4, [])


def test_a_draft_gets_what_is_left_of_the_budget(checkpoint):
    """A step has 3 tokens, and one of them is the last token of the text."""
    engine = drafting_engine(checkpoint, num_blocks=6, max_num_batched_tokens=3)
    assert draft_of(engine, REPEATED, num_computed=6) == (3, [7, 8])


def test_a_draft_leaves_room_for_the_token_after_it(engine):
    """A sequence of 7 tokens may have 10. The step brings one more than it guesses."""
    assert draft_of(engine, REPEATED, num_computed=6, max_num_tokens=10) == (3, [7, 8])


def test_no_sequence_waits_for_the_draft_of_another(checkpoint):
    """The step has room for 10 tokens: one of a, the prompt of b, and then one guess."""
    engine = drafting_engine(checkpoint, num_blocks=6, max_num_batched_tokens=10)
    seq = start(engine, "a", 7, num_computed=6)
    seq.token_ids = list(REPEATED)
    add(engine, "b", 8)
    output = engine.scheduler.schedule()
    assert {seq.request_id: num_tokens for seq, num_tokens in output.batch} == {"a": 1 + 1, "b": 8}


# ---- rows of logits


def test_the_last_token_and_each_token_of_the_draft_have_logits(checkpoint, model):
    """One sequence has two guesses, and the other none."""
    llm = LLM(checkpoint, block_size=4)
    texts, drafts = [[1, 5, 9, 44], [1, 300]], [[7, 8], []]
    seqs = [make_sequence(str(i), 1, max_tokens=8) for i in range(2)]
    for seq, text, draft in zip(seqs, texts, drafts, strict=True):
        seq.token_ids, seq.draft_token_ids = list(text), draft
        llm.kv_cache_manager.allocate(seq, [])
        llm.kv_cache_manager.append_draft_slots(seq, len(draft))
    logits = llm.model_runner.compute_logits([(seqs[0], 6), (seqs[1], 2)])
    ends = [[1, 5, 9, 44], [1, 5, 9, 44, 7], [1, 5, 9, 44, 7, 8], [1, 300]]
    assert torch.allclose(logits, torch.stack([next_logits(model, text) for text in ends]), atol=1e-4)


def test_each_row_draws_with_the_noise_of_its_own_position(checkpoint):
    """A draft of the tokens that a seed draws one by one is right to its end."""
    llm, params = LLM(checkpoint), SamplingParams(temperature=1.5, max_tokens=5, seed=3, ignore_eos=True)
    plain, drafting = (llm.llm_engine.input_processor.process(name, [1, 5], params)[0] for name in "ab")
    for seq in (plain, drafting):
        llm.kv_cache_manager.allocate(seq, [])
    while not plain.finished:
        llm.kv_cache_manager.append_slot(plain)
        [[token]] = llm.model_runner.run([(plain, plain.num_uncomputed_tokens)])
        plain.num_computed_tokens = plain.num_tokens
        plain.append_token(token)
    drafting.draft_token_ids = plain.token_ids[2:6]
    llm.kv_cache_manager.append_draft_slots(drafting, 4)
    [tokens] = llm.model_runner.run([(drafting, 2 + 4)])
    assert [token.token_id for token in tokens] == plain.token_ids[2:]


def test_a_sequence_with_more_tokens_to_compute_gets_none(checkpoint):
    """Two of three tokens of a prompt are computed, and all of another one."""
    llm = LLM(checkpoint)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    seqs = [llm.llm_engine.input_processor.process(name, [1, 5, 9], greedy)[0] for name in "ab"]
    for seq in seqs:
        llm.kv_cache_manager.allocate(seq, [])
    tokens = llm.model_runner.run([(seqs[0], 2), (seqs[1], 3)])
    assert list(map(len, tokens)) == [0, 1]


# ---- accepted tokens


def sampled(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(token_id, -1.0) for token_id in token_ids]


@pytest.mark.parametrize(
    ("tokens", "num_accepted"), [((9, 9, 9, 9), 0), ((7, 9, 9, 9), 1), ((7, 8, 9, 4), 2), ((7, 8, 5, 4), 3)]
)
def test_tokens_are_appended_up_to_the_first_wrong_guess(tokens, num_accepted):
    """The draft is 7, 8 and 5."""
    seq = make_sequence("a", 4, max_tokens=8)
    seq.draft_token_ids = [7, 8, 5]
    assert seq.append_tokens(sampled(*tokens)) == num_accepted
    assert seq.token_ids[4:] == list(tokens[: num_accepted + 1]), "accepted guesses, and the token after them"
    assert seq.draft_token_ids == [] and seq.cumulative_logprob == -(num_accepted + 1)


def test_a_stop_token_within_a_right_draft_ends_the_sequence():
    """The draft is 7, 2 and 5, all of it is right, and 2 is a stop token."""
    seq = make_sequence("a", 4, max_tokens=8)
    seq.draft_token_ids, seq.stop_token_ids = [7, 2, 5], {2}
    seq.append_tokens(sampled(7, 2, 5, 6))
    assert (seq.token_ids[4:], seq.finish_reason) == ([7, 2], "stop")


def test_a_sequence_that_is_not_complete_gets_no_token():
    """A chunk of a prompt has sampled nothing."""
    seq = make_sequence("a", 4, max_tokens=8)
    assert seq.append_tokens([]) == 0 and seq.num_tokens == 4


def test_wrong_guesses_are_not_computed_and_hold_nothing(engine):
    """After each step, a sequence has one uncomputed token, and blocks for its tokens only."""
    prompt, outputs = add(engine, "a", 8, max_tokens=12), {}
    while engine.has_unfinished_requests():
        outputs |= step(engine)  # checks the lengths of block tables
        assert all(seq.num_uncomputed_tokens == 1 and not seq.draft_token_ids for seq in engine.scheduler.running)
    assert tokens_of(outputs["a"]) == tokens_alone(prompt, 12)
    right, drafted = engine.num_accepted_tokens, engine.num_draft_tokens
    assert 0 < right < drafted, f"some guesses are right: num_accepted_tokens {right} of num_draft_tokens {drafted}"


def test_right_guesses_save_steps(engine):
    """Each step appends one token, and those of its draft that were right."""
    add(engine, "a", 6, max_tokens=12)
    run(engine)
    assert len(engine.model_runner.steps) == 12 - engine.num_accepted_tokens


def test_accepted_blocks_are_cached_with_the_hashes_of_their_tokens(checkpoint):
    """The next request hits what the first one has computed, drafted or not."""
    engine = drafting_engine(checkpoint, num_blocks=16, enable_prefix_caching=True)
    prompt = add(engine, "a", 6, max_tokens=20)
    text = prompt + tokens_of(run(engine)["a"])
    engine.add_request("b", text, SamplingParams(max_tokens=1, seed=0))
    assert tokens_of(run(engine)["b"]) == tokens_alone(text, 1)
    assert engine.kv_cache_manager.prefix_cache_stats.hits == 24 and engine.num_accepted_tokens > 0


def test_samples_of_one_prompt_draft_for_themselves(checkpoint):
    """Each of three samples has the tokens that it has alone."""
    engine = drafting_engine(checkpoint, num_blocks=20)
    prompt = add(engine, "a", 6, max_tokens=12, n=3)
    samples = run(engine)["a"].outputs
    assert [sample.token_ids for sample in samples] == [tokens_alone(prompt, 12, sample_index=i) for i in range(3)]
    assert engine.num_accepted_tokens > 0


def test_drafts_preempt_no_sequence(checkpoint):
    """In a pool that is full to the last block, the same requests are preempted with and without drafts."""
    counts: dict[int, int] = {}
    for num_drafted in (0, 4):
        engine = drafting_engine(checkpoint, num_blocks=8, num_speculative_tokens=num_drafted)
        prompts = {name: add(engine, name, 7, max_tokens=12) for name in "abc"}
        outputs = run(engine)
        assert {name: tokens_of(outputs[name]) for name in prompts} == {
            name: tokens_alone(prompt, 12) for name, prompt in prompts.items()
        }
        counts[num_drafted] = engine.scheduler.num_preemptions
    assert 0 < counts[4] <= counts[0]


def test_observer_hears_what_became_of_each_draft(engine, monkeypatch):
    told: list[tuple] = []
    monkeypatch.setattr(engine.observer, "tell", lambda *event: told.append(event))
    add(engine, "a", 6, max_tokens=12)
    run(engine)
    drafts = [(drafted, accepted) for kind, *details in told if kind == "verify" for _, drafted, accepted in [details]]
    counts = engine.num_draft_tokens, engine.num_accepted_tokens
    assert tuple(map(sum, zip(*drafts, strict=True))) == counts and 0 < counts[1] < counts[0]


# ---- a real model

PROMPTS = [[1, 5, 9], [1, 300, 301, 302, 303], list(range(3, 15)) * 2]


def test_greedy_tokens_are_those_of_the_model(checkpoint, model):
    """The model itself runs, and each guess that it makes too is kept."""
    llm = LLM(checkpoint, block_size=4, prompt_lookup_max=1)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == [
        greedy_without_cache(model, prompt, 24) for prompt in PROMPTS
    ]
    assert llm.llm_engine.num_accepted_tokens > 0


def test_seeded_tokens_are_the_same_with_and_without_drafts(checkpoint):
    """The model itself runs with drafts of 0, 1 and 4 tokens."""
    params = [SamplingParams(n=2, temperature=0.7, seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
    outputs = {
        num: LLM(checkpoint, num_speculative_tokens=num, prompt_lookup_max=1).generate(PROMPTS, params)
        for num in (0, 1, 4)
    }
    said = {num: [[each.token_ids for each in one.outputs] for one in all] for num, all in outputs.items()}
    assert said[0] == said[1] == said[4]


def test_a_negative_number_of_guesses_is_an_error(checkpoint):
    with pytest.raises(ValueError, match="num_speculative_tokens must be 0 or above, not -1"):
        LLM(checkpoint, num_speculative_tokens=-1)
    with pytest.raises(ValueError, match="prompt_lookup_max must be at least 1, not 0"):
        LLM(checkpoint, prompt_lookup_max=0)


def test_an_aborted_request_leaves_nothing_of_its_draft(engine):
    add(engine, "a", 6, max_tokens=30)
    for _ in range(3):
        step(engine)
    engine.abort_request("a")
    check(engine)
    assert names(engine.scheduler.running) == "" and engine.kv_cache_manager.num_free_blocks == 6
