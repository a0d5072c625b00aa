"""This branch's gain, counted in slots: each context is read once, where it is, to its own end."""

from importlib import import_module

from .. import paged_kernel
from ..llm import LLM
from ..sampling import SamplingParams
from . import gain
from .gain import PROMPTS
from .uncompiled import uncompiled


def test_the_same_tokens_need_no_copies(checkpoint, monkeypatch):
    said, copies = {}, {}
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for has_kernel in (True, False):
        llm = LLM(checkpoint, block_size=4, enable_kernel=has_kernel, offload_policy="recompute")
        read, blocks_read = llm.kv_cache.read, []
        monkeypatch.setattr(llm.kv_cache, "read", lambda *args, r=read, b=blocks_read: b.append(args) or r(*args))
        with uncompiled(paged_kernel):
            said[has_kernel] = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
        copies[has_kernel] = len(blocks_read)
    assert said[True] == said[False]
    assert copies[True] == 0 < copies[False]


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "slots copied": 0,
        "slots that attention reads": 48 + 7 * 4,
    }
