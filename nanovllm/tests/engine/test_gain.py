"""The gain of the host tier: evicted blocks are loaded instead of computed again. It is counted, never timed."""

from typing import Any

import torch

from ...engine.llm_engine import LLMEngine
from ...engine.sampling_params import SamplingParams
from ...engine.sequence import Sequence
from ...llm import LLM
from .helpers import admit
from .test_offload_engine import Lost

BLOCK_SIZE = 4
PROMPTS = [[3 + (7 * i + 11 * j) % 300 for i in range(12)] for j in range(6)]
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
NUM_BLOCKS = 6 * 9  # for 36 tokens each


def llm_of(checkpoint, num_blocks: int, policy: str = "load", **knobs) -> LLM:
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_cache_tokens": num_blocks * BLOCK_SIZE, "watermark": 0.0}
    options |= {"kv_offloading_tokens": 4 * num_blocks * BLOCK_SIZE, "offload_policy": policy}
    return LLM(checkpoint, **(options | knobs))


def bytes_of(engine: LLMEngine, seq: Sequence) -> torch.Tensor:
    """Return the contents of its full blocks, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
    return engine.kv_cache.blocks[seq.block_table[: seq.num_computed_tokens // BLOCK_SIZE]].clone()


def test_bytes_are_equal_after_the_round_trip(checkpoint):
    """Preempt a sequence with 6 output tokens, let others use its blocks, and let it return to different ones."""
    engine = llm_of(checkpoint, 16).llm_engine
    engine.add_request("a", PROMPTS[0], GREEDY)
    for _ in range(6):
        engine.step()
    [seq] = engine.scheduler.running
    before, table = bytes_of(engine, seq), list(seq.block_table)
    engine.scheduler.preempt_all()
    [blocker] = engine.input_processor.process("b", list(range(63)), GREEDY)
    admit(engine.kv_cache_manager, blocker)  # all 16 blocks
    engine.kv_cache.blocks.fill_(float("nan"))
    engine.kv_cache_manager.free(blocker)
    engine.kv_cache_manager.pool.get_new_blocks(2)  # so that no table is the same as before
    engine.scheduler.schedule()
    assert seq.num_computed_tokens == 16 and seq.block_table != table
    assert torch.equal(bytes_of(engine, seq), before)


def test_hardly_a_token_is_computed_twice_in_a_third_of_the_memory(checkpoint):
    """Six requests share room for two. Without the host, nearly everything of a preempted one is lost."""
    needed = sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS)
    twice, generated = {}, {}
    for policy in ("load", "recompute"):
        llm, lost = llm_of(checkpoint, NUM_BLOCKS // 3, policy), Lost(BLOCK_SIZE)
        llm.llm_engine.observers.append(lost)
        generated[policy] = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        twice[policy] = llm.llm_engine.executor.num_tokens - needed
        assert llm.llm_engine.scheduler.num_preemptions >= 5
        if policy == "load":
            assert twice["load"] == lost.num_tokens, "a preemption costs only tokens outside of full blocks"
            assert llm.llm_engine.host_tier.num_stores_loaded > 0
    assert 5 * twice["load"] <= twice["recompute"]
    assert generated["load"] == generated["recompute"]


def test_prompts_that_do_not_fit_the_device_are_found_on_the_host(checkpoint):
    """In 12 blocks, three prompts of 40 tokens evict each other, one after the other, and then return."""
    llm = llm_of(checkpoint, 12, kv_offloading_tokens=64 * BLOCK_SIZE)
    prompts = [[3 + (7 * i + j) % 300 for i in range(40)] for j in range(3)]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    first = [llm.generate(prompt, one)[0] for prompt in prompts]
    assert llm.llm_engine.executor.num_tokens == 3 * 40
    again = [llm.generate(prompt, one)[0] for prompt in prompts]
    assert llm.llm_engine.executor.num_tokens == 3 * 40 + 3 * 4, "the last block of each, which holds the last token"
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
