"""This stage's gain, counted in tokens through the model: later requests reuse what earlier ones have computed."""

from importlib import import_module

from ..llm import LLM
from ..sampling import SamplingParams
from . import gain
from .gain import PROMPT

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_a_turn_of_a_conversation_computes_only_what_is_new(checkpoint):
    """Each turn repeats the conversation so far: prompts of 10, 18 and 26 tokens, 0, 12 and 20 of which are cached."""
    llm, prompt, computed = LLM(checkpoint, block_size=4), PROMPT[:10], []
    for turn in range(3):
        before = llm.model_runner.num_tokens
        [output] = llm.generate(prompt, GREEDY)
        computed.append(llm.model_runner.num_tokens - before)
        prompt = [*prompt, *output.outputs[0].token_ids, 50 + turn, 51 + turn]
    assert computed == [10 + 5, 6 + 5, 6 + 5]


def test_a_preempted_request_computes_only_what_was_evicted(checkpoint):
    """Two requests of 12 + 20 tokens need 8 blocks each, and the pool has 12. Without a cache, 24 tokens come twice."""
    computed = []
    for is_enabled in (False, True):
        options = {"kv_cache_tokens": 12 * 4, "watermark": 0.0, "enable_prefix_caching": is_enabled}
        llm = LLM(checkpoint, block_size=4, **options)
        llm.generate([PROMPT[:12], PROMPT[12:24]], SamplingParams(max_tokens=20, ignore_eos=True))
        assert llm.llm_engine.scheduler.num_preemptions == 1
        computed.append(llm.model_runner.num_tokens - 2 * (12 + 19))
    assert computed == [24, 8], "four of its six blocks are still cached"


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "tokens computed, a prompt of 40 tokens twice": 40 + 4,
        "tokens computed, 8 questions of 6 tokens after the same 32": 32 + 8 * 6,
    }
