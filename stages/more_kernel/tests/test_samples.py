"""n samples of a prompt: the first one computes it for all, and is forked when only the last token is left."""

import pytest

from ..llm import LLM
from ..sampling import SamplingParams
from .helpers import EOS
from .scripted import add, check, queues, reason, run, scripted_engine, step, steps_of, tokens_alone, tokens_of_all


def alone(prompt: list[int], num_tokens: int, n: int) -> list[list[int]]:
    return [tokens_alone(prompt, num_tokens, sample_index=i) for i in range(n)]


def test_samples_share_all_of_a_prompt_but_its_last_token(checkpoint):
    """Three samples of a prompt of 6 tokens: the first one computes 5 of them, and each sample the last one."""
    engine = scripted_engine(checkpoint, num_blocks=16)
    prompt = add(engine, "a", 6, max_tokens=2, n=3)
    output = run(engine)["a"]
    assert steps_of(engine) == [[("a", 5)], [("a", 1)] * 3, [("a", 1)] * 3], "5 tokens for all, then one for each"
    assert tokens_of_all(output) == alone(prompt, 2, n=3), "a sample has read keys and values that are not its own"
    assert [completion.index for completion in output.outputs] == [0, 1, 2]


def test_a_prompt_with_two_tokens_left_is_not_forked_yet(checkpoint):
    """A step has 7 tokens, and the prompt has 9."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=7)
    add(engine, "a", 9, n=2)
    step(engine)
    computed = [num_tokens for _, num_tokens in engine.scheduler.schedule().batch]
    assert computed == [1], f"two tokens are left, and one sequence computes the first for both, not {computed}"


def test_samples_of_a_prompt_of_one_token_run_in_the_step_that_admits_it(checkpoint):
    """No token has to be computed before the fork."""
    engine = scripted_engine(checkpoint, num_blocks=16)
    prompt = add(engine, "a", 1, max_tokens=3, n=3)
    assert tokens_of_all(step(engine)["a"]) == alone(prompt, 1, n=3)
    assert tokens_of_all(run(engine)["a"]) == alone(prompt, 3, n=3)


def test_a_prompt_with_samples_is_computed_in_chunks_too(checkpoint):
    """A step has 4 tokens, and the prompt has 9."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=4)
    prompt = add(engine, "a", 9, max_tokens=1, n=2)
    assert tokens_of_all(run(engine)["a"]) == alone(prompt, 1, n=2)
    assert steps_of(engine) == [[("a", 4)], [("a", 4)], [("a", 1)] * 2]


@pytest.mark.parametrize("num_tokens, num_copies", [(7, 3), (8, 3), (9, 0)])
def test_all_samples_but_one_copy_the_last_block_of_a_prompt_unless_its_last_token_begins_it(
    checkpoint, num_tokens, num_copies
):
    """Four samples of a prompt run in blocks of 4 tokens."""
    engine = scripted_engine(checkpoint, num_blocks=16)
    add(engine, "a", num_tokens, max_tokens=1, n=4)
    run(engine)
    assert engine.kv_cache.num_blocks_copied == num_copies


def test_samples_run_right_behind_the_first_one(checkpoint):
    """Request a has three samples, and b came after it."""
    engine = scripted_engine(checkpoint, num_blocks=16)
    add(engine, "a", 5, n=3)
    add(engine, "b", 3)
    step(engine)
    step(engine)
    assert queues(engine) == "a a a b run, none wait"
    assert steps_of(engine)[1] == [("a", 1), ("a", 1), ("a", 1), ("b", 1)]


def test_a_budget_smaller_than_the_samples_serves_them_in_turn(checkpoint):
    """A step has 2 tokens, and five samples decode."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=2)
    prompt = add(engine, "a", 3, max_tokens=4, n=5)
    assert tokens_of_all(run(engine)["a"]) == alone(prompt, 4, n=5)
    assert max(len(batch) for batch in steps_of(engine)) == 2


def test_samples_that_are_not_forked_yet_keep_their_seats(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=4)
    add(engine, "a", 9, n=3)
    add(engine, "b", 1, n=2)
    add(engine, "c", 1)
    for _ in range(3):
        step(engine)
    assert queues(engine) == "a a a run, b c wait"


@pytest.mark.parametrize("num_blocks, is_admitted", [(5, True), (4, False)])
def test_samples_admitted_beside_others_leave_a_block_free_for_each_but_the_first(checkpoint, num_blocks, is_admitted):
    """Sequence a takes one block, b's prompt takes 2, and each of b's two other samples will need one of its own."""
    engine = scripted_engine(checkpoint, num_blocks=num_blocks)
    add(engine, "a", 4)
    add(engine, "b", 5, n=3)
    step(engine)
    assert queues(engine) == ("a b run, none wait" if is_admitted else "a run, b wait")


def test_more_samples_than_seats_run_in_groups(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_seqs=2)
    prompt = add(engine, "a", 5, max_tokens=3, n=5)
    assert tokens_of_all(run(engine)["a"]) == alone(prompt, 3, n=5)
    assert max(len(batch) for batch in steps_of(engine)) == 2


def test_a_preempted_sample_comes_back_alone_and_goes_on_with_its_own_tokens(checkpoint):
    """Prompts of 8 tokens and 8 more: 4 blocks for each of 3 samples, and there are 7."""
    engine = scripted_engine(checkpoint, num_blocks=7)
    prompt = add(engine, "a", 8, max_tokens=8, n=3)
    assert tokens_of_all(run(engine)["a"]) == alone(prompt, 8, n=3)
    assert engine.scheduler.num_preemptions > 0


def test_a_request_finishes_with_its_last_sample_and_each_sample_frees_its_blocks(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16)
    prompt = [7] * 5
    stops = [tokens_alone(prompt, 4, sample_index=i)[3 - i] for i in range(3)]
    engine.add_request("a", prompt, SamplingParams(n=3, seed=0, max_tokens=4, stop_token_ids=stops[1:]))
    outputs, running = [], []
    while engine.has_unfinished_requests():
        outputs += step(engine).values()
        running.append(len(engine.scheduler.running))
    assert running == [1, 3, 2, 1, 0]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert [len(completion.token_ids) for completion in outputs[-1].outputs] == [4, 3, 2]


@pytest.mark.parametrize("num_steps", range(4))
def test_an_abort_ends_all_samples_before_and_after_the_fork(checkpoint, num_steps):
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_seqs=3, max_num_batched_tokens=4)
    prompt = add(engine, "a", 7, n=4)
    for _ in range(num_steps):
        step(engine)
    output = engine.abort_request("a")
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4
    for i, tokens in enumerate(tokens_of_all(output)):
        assert tokens == tokens_alone(prompt, len(tokens), sample_index=i), f"sample {i} has other tokens than alone"
    check(engine)
    assert run(engine) == {}


def test_a_prompt_larger_than_the_pool_ends_all_its_samples_with_an_error(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=2)
    add(engine, "a", 9, n=3)
    output = run(engine)["a"]
    assert {completion.finish_reason for completion in output.outputs} == {"error"} and "3 blocks" in output.error


def test_a_sample_that_outgrows_the_pool_does_not_touch_the_output_of_others(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=2)
    prompt = add(engine, "a", 6, max_tokens=20, n=2)
    output = run(engine)["a"]
    assert reason(output) == "error" and tokens_of_all(output) == alone(prompt, 3, n=2)


def test_sample_ends_at_eos_and_shows_its_whole_text(scripted, tokenizer):
    """A stop string holds back text that may begin it, as long as the output may go on."""
    ids = [*tokenizer.encode("fox"), EOS]
    params = SamplingParams(temperature=0.0, max_tokens=len(ids) + 1, stop="x!")
    [completion] = scripted([*ids, 7]).generate([[1, 5]], params)[0].outputs
    assert (completion.token_ids, completion.finish_reason) == (ids, "stop")
    assert completion.text.strip() == "fox"


def test_samples_differ_unless_the_temperature_is_0(checkpoint):
    llm = LLM(checkpoint)
    for options, is_greedy in (({}, False), ({"temperature": 0.0}, True)):
        [output] = llm.generate([[1, 5, 6]], SamplingParams(n=4, max_tokens=4, ignore_eos=True, seed=0, **options))
        assert (len({tuple(each.token_ids) for each in output.outputs}) == 1) == is_greedy


@pytest.mark.parametrize(
    "params",
    [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}, {"max_tokens": 0}],
    ids=str,
)
def test_impossible_parameter_is_named_with_its_value(params):
    ((name, value),) = params.items()
    with pytest.raises(ValueError, match=f"^{name} must be .+ not {value}$"):
        SamplingParams(**params)


def test_n_below_1_is_a_value_error():
    with pytest.raises(ValueError, match="0"):
        SamplingParams(n=0)


@pytest.mark.parametrize("num_blocks, budget", [(50, 512), (50, 3), (12, 512), (12, 3)])
def test_samples_do_not_depend_on_chunks_or_preemption(checkpoint, num_blocks, budget):
    """A real model: sample i has the same 12 tokens, whatever n is."""
    options = {"kv_cache_tokens": num_blocks * 4, "max_num_batched_tokens": budget, "watermark": 0.0}
    params = [SamplingParams(n=n, seed=5, temperature=1.2, max_tokens=12, ignore_eos=True) for n in (1, 8)]
    [one] = tokens_of_all(LLM(checkpoint, block_size=4).generate(list(range(3, 13)), params[0])[0])
    expected = tokens_of_all(LLM(checkpoint, block_size=4).generate(list(range(3, 13)), params[1])[0])
    llm = LLM(checkpoint, block_size=4, max_model_len=48, **options)
    assert tokens_of_all(llm.generate(list(range(3, 13)), params[1])[0]) == expected
    assert expected[0] == one and len(set(map(tuple, expected))) == 8
    assert (llm.llm_engine.scheduler.num_preemptions > 0) == (num_blocks == 12)
