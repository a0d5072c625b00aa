"""What this stage buys: what had to leave the device is brought back and not computed again. Counted, never timed."""

import torch

from ..engine import LLMEngine
from ..llm import LLM
from ..sampling import SamplingParams

BLOCK_SIZE = 4
PROMPT = [3 + 7 * i % 300 for i in range(40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
THREE = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)


def small(checkpoint, num_blocks: int, **knobs) -> LLM:
    knobs = {"enable_prefix_caching": False, "watermark": 0.0} | knobs
    return LLM(checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=num_blocks * BLOCK_SIZE, **knobs)


def bytes_of(engine: LLMEngine, request_id: str) -> list[torch.Tensor]:
    """Of each sample, what it has computed. [num_computed_tokens, num_layers, 2, num_kv_heads, head_dim]"""
    seqs = [seq for seq in engine.scheduler.running if seq.request_id == request_id]
    slots = [engine.kv_cache.blocks[seq.block_table].transpose(1, 3).flatten(0, 1) for seq in seqs]
    return [rows[: seq.num_computed_tokens].clone() for rows, seq in zip(slots, seqs, strict=True)]


def test_bytes_are_equal_after_the_round_trip(checkpoint):
    """A group of three is preempted when it has said 5 tokens; others use its blocks, and it comes back elsewhere."""
    engine = small(checkpoint, 16, preemption="swap").llm_engine
    engine.add_request("a", PROMPT[:10], THREE)
    for _ in range(5):
        engine.step()
    before, tables = bytes_of(engine, "a"), [list(seq.block_table) for seq in engine.scheduler.running]
    engine.scheduler._preempt(list(engine.scheduler.running))
    assert engine.kv_cache_manager.num_free_blocks == 16
    [blocker] = engine.input_processor.process("b", [9], GREEDY)
    engine.kv_cache_manager.allocate(blocker)  # so that no table is what it was
    engine.kv_cache.blocks.fill_(float("nan"))
    engine.scheduler.schedule()
    assert not engine.scheduler.waiting and [seq.block_table for seq in engine.scheduler.running] != tables
    after = bytes_of(engine, "a")
    assert [len(rows) for rows in after] == [14, 14, 14]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_no_token_is_computed_twice_under_swap(checkpoint):
    """Two requests of three samples outgrow the pool; the second one goes to the host and comes back."""
    llm = small(checkpoint, 21, preemption="swap")
    outputs = llm.generate([PROMPT[:12], PROMPT[12:24]], THREE)
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_swaps == scheduler.num_preemptions > 0
    assert llm.model_runner.num_tokens == 2 * (12 + 3 * 19), "each prompt once, and of each sample all but its last"
    enough = small(checkpoint, 100).generate([PROMPT[:12], PROMPT[12:24]], THREE)
    for said, expected in zip(outputs, enough, strict=True):
        assert [each.token_ids for each in said.outputs] == [each.token_ids for each in expected.outputs]


def test_what_is_shared_is_copied_once(checkpoint):
    """A prompt of 12 tokens and three samples that have said 5: 3 blocks of all, and 1 of each."""
    engine = small(checkpoint, 16, preemption="swap").llm_engine
    engine.add_request("a", PROMPT[:12], THREE)
    for _ in range(5):
        engine.step()
    engine.scheduler._preempt(list(engine.scheduler.running))
    assert engine.host_pool.stored.num_blocks == 3 + 3
    engine.scheduler.schedule()
    assert engine.host_pool.loaded.num_blocks == 3 + 3


def test_a_prompt_evicted_from_a_small_device_pool_is_found_on_the_host(checkpoint):
    """12 blocks: three prompts of 40 tokens, one after the other, drive each other out; then they come again."""
    llm = small(checkpoint, 12, swap_space_tokens=64 * BLOCK_SIZE, enable_prefix_caching=True, preemption="swap")
    prompts = [PROMPT, PROMPT[1:] + [3], PROMPT[2:] + [3, 4]]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    first = [llm.generate(prompt, one)[0] for prompt in prompts]
    assert llm.model_runner.num_tokens == 3 * 40
    again = [llm.generate(prompt, one)[0] for prompt in prompts]
    assert llm.model_runner.num_tokens == 3 * 40 + 3 * 4, "the last block of each, which the last token is in"
    assert [output.num_cached_tokens for output in again] == [36] * 3
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
