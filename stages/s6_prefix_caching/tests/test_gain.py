"""This stage's gain, counted in tokens through the model: what one request has computed, the next one does not."""

from importlib import import_module

from ..llm import LLM
from ..sampling import SamplingParams
from . import gain
from .gain import PROMPT

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_a_conversation_goes_on_from_what_was_said(checkpoint):
    """Each turn brings the whole conversation: 10, 18 and 26 tokens, of which 0, 12 and 20 are cached."""
    llm, talk, computed = LLM(checkpoint, block_size=4), PROMPT[:10], []
    for turn in range(3):
        before = llm.model_runner.num_tokens
        [output] = llm.generate(talk, GREEDY)
        computed.append(llm.model_runner.num_tokens - before)
        talk = [*talk, *output.outputs[0].token_ids, 50 + turn, 51 + turn]
    assert computed == [10 + 5, 6 + 5, 6 + 5]


def test_a_preempted_request_computes_only_what_is_lost(checkpoint):
    """Two requests of 12 + 20 tokens need 8 blocks each, and there are 12."""
    computed = []
    for is_enabled in (False, True):
        options = {"kv_cache_tokens": 12 * 4, "watermark": 0.0, "enable_prefix_caching": is_enabled}
        llm = LLM(checkpoint, block_size=4, **options)
        llm.generate([PROMPT[:12], PROMPT[12:24]], SamplingParams(max_tokens=20, ignore_eos=True))
        assert llm.llm_engine.scheduler.num_preemptions == 1
        computed.append(llm.model_runner.num_tokens - 2 * (12 + 19))
    assert computed == [24, 8], "four of its six blocks are still there"


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "tokens computed, a prompt of 40 twice": 40 + 4,
        "tokens computed, 8 questions of 6 behind the same 32": 32 + 8 * 6,
    }
