"""What this stage buys: what was computed for one request is not computed for the next. Counted in tokens computed."""

from ..llm import LLM
from ..sampling import SamplingParams

BLOCK_SIZE = 4
PROMPT = [3 + 7 * i % 300 for i in range(40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def tokens_computed(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> int:
    """How many go through the model for this request."""
    before = llm.model_runner.num_tokens
    llm.generate(prompt, params)
    return llm.model_runner.num_tokens - before


def test_a_repeated_prompt_computes_one_block_or_less(checkpoint):
    llm = LLM(checkpoint, block_size=BLOCK_SIZE)
    assert tokens_computed(llm, PROMPT) == 40
    assert tokens_computed(llm, PROMPT) == 4
    assert tokens_computed(llm, PROMPT[:38]) == 2


def test_a_shared_beginning_is_computed_once_for_all(checkpoint):
    """A system prompt of 32 tokens and eight questions of 6: seven times the 32 are saved."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE)
    computed = [tokens_computed(llm, PROMPT[:32] + [100 + i] * 6) for i in range(8)]
    assert computed == [38] + [6] * 7


def test_a_conversation_goes_on_from_what_was_said(checkpoint):
    """Each turn brings the whole conversation, and computes its own question and the last answer's last tokens."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE)
    conversation, computed = PROMPT[:10], []
    for turn in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        before = llm.model_runner.num_tokens
        [output] = llm.generate(conversation, params)
        computed.append(llm.model_runner.num_tokens - before)
        conversation = [*conversation, *output.outputs[0].token_ids, 50 + turn, 51 + turn]
    assert computed == [10 + 5, 6 + 5, 6 + 5], "10, 18 and 26 tokens come in; 12 and 20 of them are there already"


def test_a_preempted_request_finds_its_own_blocks(checkpoint):
    """The second of two is preempted by the first one's growth; when it comes back, most of it is still there."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=12 * BLOCK_SIZE, watermark=0.0)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([PROMPT[:12], PROMPT[12:24]], params)
    num_needed = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs)
    assert llm.llm_engine.scheduler.num_preemptions > 0
    off = LLM(
        checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=12 * BLOCK_SIZE, watermark=0.0, enable_prefix_caching=False
    )
    assert [o.outputs[0].token_ids for o in off.generate([PROMPT[:12], PROMPT[12:24]], params)] == [
        o.outputs[0].token_ids for o in outputs
    ]
    assert num_needed < llm.model_runner.num_tokens < off.model_runner.num_tokens
