"""This stage's gain, counted in tokens through the model: blocks that have left the device are not computed again."""

from importlib import import_module

from ..llm import LLM
from ..sampling import SamplingParams
from . import gain
from .gain import BLOCK_SIZE, MAX_TOKENS, PROMPTS


def test_hardly_a_token_is_computed_twice_in_a_third_of_the_memory(checkpoint):
    """Six requests need 9 blocks each. A preempted one recomputes only the tokens after its last full block."""
    computed, said = {}, {}
    for policy in ("load", "recompute"):
        options = {"offload_policy": policy, "kv_offloading_tokens": 288, "watermark": 0.0}
        llm = LLM(checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=18 * BLOCK_SIZE, **options)
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
        said[policy] = [output.outputs[0].token_ids for output in outputs]
        computed[policy] = llm.model_runner.num_tokens - 6 * (12 + MAX_TOKENS - 1)
        assert llm.llm_engine.scheduler.num_preemptions >= 5
    assert said["load"] == said["recompute"]
    assert 5 * computed["load"] <= computed["recompute"]


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "tokens computed twice, 6 requests in a third of the memory": 0,
        "tokens computed twice, 3 prompts that come again": 12,
    }
