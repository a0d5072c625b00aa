"""What this stage buys: what was computed for one request is not computed for the next. Counted in tokens computed."""

from importlib import import_module

from ..llm import LLM
from ..sampling import SamplingParams
from . import gain

BLOCK_SIZE = 4
PROMPT = [3 + 7 * i % 300 for i in range(40)]


def tokens_computed(llm: LLM, prompts: list[list[int]], max_tokens: int = 1, **options) -> int:
    """How many go through the model for these requests."""
    before = llm.model_runner.num_tokens
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options))
    return llm.model_runner.num_tokens - before


def test_a_repeated_prompt_computes_one_block_or_less(checkpoint):
    llm = LLM(checkpoint, block_size=BLOCK_SIZE)
    assert [tokens_computed(llm, [PROMPT]) for _ in range(2)] == [40, 4]
    assert tokens_computed(llm, [PROMPT[:38]]) == 2


def test_a_shared_beginning_is_computed_once_for_all(checkpoint):
    """A system prompt of 32 tokens and eight questions of 6: seven times the 32 are saved."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE)
    assert [tokens_computed(llm, [PROMPT[:32] + [100 + i] * 6]) for i in range(8)] == [38] + [6] * 7


def test_a_conversation_goes_on_from_what_was_said(checkpoint):
    """Each turn brings the whole conversation. Computed are its question, the end of the last answer, its answer."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE)
    talk, computed = PROMPT[:10], []
    for turn in range(3):
        before = llm.model_runner.num_tokens
        [output] = llm.generate(talk, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        computed.append(llm.model_runner.num_tokens - before)
        talk = [*talk, *output.outputs[0].token_ids, 50 + turn, 51 + turn]
    assert computed == [10 + 5, 6 + 5, 6 + 5], "10, 18 and 26 tokens come in; 0, 12 and 20 of them are there already"


def computed_and_preempted(checkpoint, num_blocks: int, prompts: list[list[int]], **options) -> tuple[int, int]:
    """Tokens that go through the model in a pool of that size, and how many preemptions there were."""
    knobs = {"block_size": BLOCK_SIZE, "kv_cache_tokens": num_blocks * BLOCK_SIZE, "watermark": 0.0}
    llm = LLM(checkpoint, **knobs, enable_prefix_caching=options.pop("enable_prefix_caching", True))
    computed = tokens_computed(llm, prompts, **options)
    return computed, llm.llm_engine.scheduler.num_preemptions


def test_a_preempted_request_finds_what_is_left_of_its_blocks(checkpoint):
    """Two of 12 + 20 tokens need 8 blocks each, and there are 12."""
    prompts = [PROMPT[:12], PROMPT[12:24]]
    [on, times], [off, _] = (
        computed_and_preempted(checkpoint, 12, prompts, max_tokens=20, enable_prefix_caching=is_caching)
        for is_caching in (True, False)
    )
    needed = 2 * (12 + 19)
    assert times == 1 and off - needed == 24, "without a cache all that it had is computed twice"
    assert on - needed == 8, "four of its six blocks are still there"


def test_preempted_samples_find_their_prompt(checkpoint):
    """Four samples of 24 + 16 tokens. Two are preempted; the prompt's six blocks are there when they come back."""
    samples = {"max_tokens": 16, "n": 4, "seed": 0}
    [on, times], [off, _] = (
        computed_and_preempted(checkpoint, 15, [PROMPT[:24]], enable_prefix_caching=is_caching, **samples)
        for is_caching in (True, False)
    )
    needed = 23 + 4 * 16
    assert times == 2 and (off - needed, on - needed) == (60, 12)


def test_the_gain_in_figures(tmp_path):
    """They are told at the end of the exercise, beside those of the stage before."""
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "tokens computed, a prompt of 40 twice": 40 + 4,
        "tokens computed, 8 questions of 6 behind the same 32": 32 + 8 * 6,
    }
