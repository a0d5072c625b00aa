"""Stage 6: what of a prompt is computed again, what one word changes, and which blocks a request hits. All counted."""

from pathlib import Path
from typing import Any

from stages.bench.engines import by_sample, without_model
from stages.bench.predict import s5
from stages.bench.predict.common import Answer, Shown, serve, with_answers
from stages.bench.racing import sampling_params
from stages.bench.workloads import Request, even_prompt

LENGTH, SHORT = 512, 200  # tokens of a prompt


def answers(model: Path) -> dict[str, Any]:
    repeated = {str(length): asked_again(model, even_prompt(length)) for length in (LENGTH, LENGTH + 1)}
    changed = {name: share_found(model, position) for name, position in CHANGES.items()}
    twice = {"at_once": two_requests(model, 0), "a_step_later": two_requests(model, 1), "samples": two_samples(model)}
    preempted = {name: s5.one_is_preempted(model, name) for name in ("s5", "s6")}
    numbers = {"repeated": repeated, "changed": changed, "twice": twice, "preempted": preempted}
    show = Shown("predict.s6", numbers)
    return with_answers(numbers, [about_again(show), about_a_word(show), about_two(show), about_preemption(show)])


CHANGES = {"first": 0, "middle": LENGTH // 2, "last": LENGTH - 1}  # which token of the prompt is another


def about_again(show: Shown) -> Answer:
    exact, more = (show(f"repeated.{length}") for length in (LENGTH, LENGTH + 1))
    return Answer(
        f"A prompt of {LENGTH} tokens is served, and then it comes again. How many tokens of it are computed the "
        f"second time, in blocks of 16? And of one of {LENGTH + 1}?",
        f"{exact}, and {more}. Its last token must go through the model, for its logits say what comes next. And a "
        f"block is taken over whole or not at all: of {LENGTH} tokens the last block is computed again, the last "
        f"token's; of {LENGTH + 1} the last token is in a block that is not full.",
    )


def about_a_word(show: Shown) -> Answer:
    first, middle, last = (show(f"changed.{which}", ".0%") for which in CHANGES)
    return Answer(
        f"One token of those {LENGTH} is another: the first, one in the middle, or the last. Which share of the prompt "
        "is found?",
        f"{first}, {middle}, and {last}. Keys and values of a token "
        "depend on all before it. So what changes from request to request belongs at the end: a date at the top of a "
        "system prompt costs all of it, every day.",
    )


def about_two(show: Shown) -> Answer:
    at_once, later, samples = (show(f"twice.{how}") for how in ("at_once", "a_step_later", "samples"))
    return Answer(
        f"Two requests with the same prompt of {SHORT} tokens come at once. How many tokens of prompts are computed? "
        "If the second comes a step later? If they are two samples of one request?",
        f"{at_once}, {later}, {samples}. A block is found once it is computed, and "
        "both are computed in the same step. Samples of one request need no cache: one is forked from the other, and "
        "only the last token of the prompt is computed for each.",
    )


def about_preemption(show: Shown) -> Answer:
    before, now = (show(f"preempted.{name}.computed_twice") for name in ("s5", "s6"))
    return Answer(
        f"{s5.N} samples of a prompt of {s5.PROMPT} tokens have a pool of {show('preempted.s6.pool_blocks')} blocks, "
        f"one less than they need in the end. In stage 5 the last is preempted, and computes {before} tokens again. "
        "And in stage 6?",
        f"{now}. The prompt's full blocks are held by the others, and its own are idle until somebody takes them: it "
        "finds what is left of them when it comes back.",
    )


def engine_for(model: Path) -> Any:
    return without_model("s6", by_sample, model=str(model), kv_cache_tokens=8192)


def asked_again(model: Path, prompt: list[int]) -> int:
    """Tokens that go through the model for a prompt that was served before."""
    engine = engine_for(model)
    serve("s6", engine, "first", Request(prompt, 1))
    before = engine.model_runner.num_tokens
    serve("s6", engine, "again", Request(prompt, 1))
    return engine.model_runner.num_tokens - before


def share_found(model: Path, position: int) -> float:
    """Of a prompt of which one token differs from one that was served before."""
    engine, prompt = engine_for(model), even_prompt(LENGTH)
    serve("s6", engine, "first", Request(prompt, 1))
    before = engine.kv_cache_manager.prefix_cache_stats.hits
    serve("s6", engine, "other", Request([*prompt[:position], 2000, *prompt[position + 1 :]], 1))
    return (engine.kv_cache_manager.prefix_cache_stats.hits - before) / LENGTH


def two_requests(model: Path, steps_between: int) -> int:
    """Tokens of prompts that are computed for two requests with the same one."""
    engine, request = engine_for(model), Request(even_prompt(SHORT), 8)
    params = sampling_params("s6", request)
    engine.add_request("first", request.prompt_token_ids, params)
    for _ in range(steps_between):
        engine.step()
    engine.add_request("second", request.prompt_token_ids, params)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.model_runner.num_tokens - 2 * (request.num_output_tokens - 1)


def two_samples(model: Path) -> int:
    """The same for two samples of one request."""
    engine = engine_for(model)
    serve("s6", engine, "both", Request(even_prompt(SHORT), 1, n=2))
    return engine.model_runner.num_tokens
