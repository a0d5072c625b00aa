"""This branch's gain, counted in tokens: prompts are computed in another engine, and no longer beside decodes."""

from importlib import import_module

from ..llm import LLM
from ..prefill import serve
from ..sampling import SamplingParams
from . import gain
from .gain import LONG
from .other_engines import EngineAtOnce


def test_the_same_tokens_need_little_of_a_prompt_here(checkpoint):
    """Two prompts of 43 tokens: 40 of each are in blocks that come from the other engine."""
    said, computed = {}, {}
    for has_other in (False, True):
        llm = LLM(checkpoint, block_size=4, offload_policy="load")
        if has_other:
            other = LLM(checkpoint, block_size=4, offload_policy="load").llm_engine
            llm.llm_engine.prefill = EngineAtOnce(serve, other)
        outputs = llm.generate(LONG, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        said[has_other] = [output.outputs[0].token_ids for output in outputs]
        computed[has_other] = llm.model_runner.num_tokens
    assert said[True] == said[False]
    assert computed == {False: 2 * (43 + 15), True: 2 * (3 + 15)}


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "prompt tokens computed in steps in which others decode": 6,
        "tokens in the largest of these steps": 8,
    }
