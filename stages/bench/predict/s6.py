"""Stage 6: what of a prompt is computed again, what one word changes, and who may hit whose blocks. All counted."""

from pathlib import Path
from typing import Any

from notebooks.prefixes import WithoutModel
from stages import s6_prefix_caching as s6
from stages.predict.common import Answer, with_answers

LENGTH, SHORT = 512, 200  # tokens of a prompt


def answers(model: Path) -> dict[str, Any]:
    repeated = {str(length): asked_again(model, prompt_of(length)) for length in (LENGTH, LENGTH + 1)}
    changed = {name: share_found(model, position) for name, position in CHANGES.items()}
    twice = {"at_once": two_requests(model, 0), "a_step_later": two_requests(model, 1), "samples": two_samples(model)}
    entries = [about_again(repeated), about_a_word(changed), about_two(twice)]
    return with_answers({"repeated": repeated, "changed": changed, "twice": twice}, entries)


CHANGES = {"first": 0, "middle": LENGTH // 2, "last": LENGTH - 1}  # which token of the prompt is another


def about_again(repeated: dict[str, int]) -> Answer:
    exact, more = repeated[str(LENGTH)], repeated[str(LENGTH + 1)]
    return Answer(
        f"A prompt of {LENGTH} tokens is served, and then it comes again. How many tokens of it are computed the "
        f"second time, in blocks of 16? And of one of {LENGTH + 1}?",
        f"{exact}, and {more}. Its last token must go through the model, for its logits say what comes next. And a "
        f"block is taken over whole or not at all: of {LENGTH} tokens the last block is computed again, the last "
        f"token's; of {LENGTH + 1} the last token is in a block that is not full.",
    )


def about_a_word(changed: dict[str, float]) -> Answer:
    return Answer(
        f"One token of those {LENGTH} is another: the first, one in the middle, or the last. Which share of the prompt "
        "is found?",
        f"{changed['first']:.0%}, {changed['middle']:.0%}, and {changed['last']:.0%}. Keys and values of a token "
        "depend on all before it. So what changes from request to request belongs at the end: a date at the top of a "
        "system prompt costs all of it, every day.",
    )


def about_two(twice: dict[str, int]) -> Answer:
    return Answer(
        f"Two requests with the same prompt of {SHORT} tokens come at once. How many tokens of prompts are computed? "
        "If the second comes a step later? If they are two samples of one request?",
        f"{twice['at_once']}, {twice['a_step_later']}, {twice['samples']}. A block is found once it is computed, and "
        "both are computed in the same step. Samples of one request need no cache: one is forked from the other.",
    )


def prompt_of(length: int) -> list[int]:
    return [3 + i for i in range(length)]


def engine_for(model: Path) -> WithoutModel:
    return WithoutModel(model=str(model), kv_cache_tokens=8192)


def asked_again(model: Path, prompt: list[int]) -> int:
    """Tokens that go through the model for a prompt that was served before."""
    engine = engine_for(model)
    serve(engine, "first", prompt)
    before = engine.model_runner.num_tokens
    serve(engine, "again", prompt)
    return engine.model_runner.num_tokens - before


def share_found(model: Path, position: int) -> float:
    """Of a prompt of which one token differs from one that was served before."""
    engine, prompt = engine_for(model), prompt_of(LENGTH)
    serve(engine, "first", prompt)
    other = [*prompt[:position], 2000, *prompt[position + 1 :]]
    return serve(engine, "other", other).num_cached_tokens / LENGTH


def two_requests(model: Path, steps_between: int) -> int:
    """Tokens of prompts that are computed for two requests with the same one."""
    engine, params = engine_for(model), s6.SamplingParams(max_tokens=8, ignore_eos=True)
    engine.add_request("first", prompt_of(SHORT), params)
    for _ in range(steps_between):
        engine.step()
    engine.add_request("second", prompt_of(SHORT), params)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.model_runner.num_tokens - 2 * (params.max_tokens - 1)


def two_samples(model: Path) -> int:
    """The same for two samples of one request."""
    engine = engine_for(model)
    serve(engine, "both", prompt_of(SHORT), n=2)
    return engine.model_runner.num_tokens


def serve(engine: WithoutModel, request_id: str, prompt: list[int], n: int = 1) -> s6.RequestOutput:
    """Until its first token, which is its last."""
    engine.add_request(request_id, prompt, s6.SamplingParams(max_tokens=1, n=n))
    outputs: list[s6.RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[0]
