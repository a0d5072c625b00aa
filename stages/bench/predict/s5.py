"""Stage 5: what samples of one prompt share, what they copy, what a preempted one computes again, what beams hold."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from stages.bench.engines import by_sample, stage, without_model
from stages.bench.harness import median_scores, ratio, seconds_of, take_turns
from stages.bench.predict.common import Answer, Shown, llm_of, with_answers
from stages.bench.racing import computed_twice, serve
from stages.bench.workloads import Request, even_prompt

POOL, BLOCK, ROUNDS = 8192, 16, 3
PROMPT, ALIGNED, OUTPUT, N, WIDTH = 200, 208, 64, 8, 4
STORY = "Once upon a time there was a princess"


def answers(model: Path) -> dict[str, Any]:
    counts = {f"of_{length}": counted(model, length) for length in (PROMPT, ALIGNED, ALIGNED + 1)}
    preempted, beams = one_is_preempted(model), beams_of(model)
    numbers = {**counts, "preempted": preempted, "beams": beams, "runs": timed(model)}
    show = Shown("predict.s5", numbers)
    entries = [about_copies(show), about_blocks(show, counts["of_200"]), about_preemption(show), about_beams(show)]
    return with_answers(numbers, entries)


def about_copies(show: Shown) -> Answer:
    copies = [show(f"of_{length}.samples.copied") for length in (PROMPT, ALIGNED, ALIGNED + 1)]
    return Answer(
        f"{N} samples of a prompt of {PROMPT} tokens, in blocks of {BLOCK}. How many blocks are copied? Of a prompt of "
        f"{ALIGNED} tokens? Of {ALIGNED + 1}?",
        f"{copies[0]}, {copies[1]} and {copies[2]}. The prompt is forked when one token of it is left, and each sample "
        f"computes that one by itself. Token {PROMPT} goes into a block that all {N} hold: each copies it first but "
        f"the last, which then holds it alone. So does token {ALIGNED}, the last of its block. Token {ALIGNED + 1} "
        "begins a block, and there is nothing to copy.",
    )


def about_blocks(show: Shown, of_200: dict[str, Any]) -> Answer:
    alone, samples, requests = (show(f"of_200.{name}.blocks", ",") for name in ("alone", "samples", "requests"))
    times = of_200["samples"]["blocks"] / of_200["alone"]["blocks"]
    return Answer(
        f"One sample of that prompt of {PROMPT} tokens, with {OUTPUT} tokens of output, holds {alone} blocks in the "
        f"end. How many do {N} samples hold?",
        f"{samples}, {times:.1f} times as many; {N} requests with the same prompt hold {requests}. The "
        f"{PROMPT // BLOCK} full blocks of the prompt are there once; of all others each has its own.",
    )


def about_preemption(show: Shown) -> Answer:
    return Answer(
        f"Those {N} samples have a pool of {show('preempted.pool_blocks')} blocks, one less than they need in the "
        "end. What is computed again?",
        f"{show('preempted.computed_twice')} tokens: the last sample is preempted, and when it comes back it computes "
        f"all that it had by itself, the {PROMPT} tokens of the prompt among them, though the others hold them. After "
        "the fork it is a sequence like any other, and nobody knows any more that they began alike.",
    )


def about_beams(show: Shown) -> Answer:
    return Answer(
        f'A beam search of width {WIDTH} goes on from "{STORY}" by {OUTPUT} tokens. Does it hold '
        f"{WIDTH} times the blocks of one sequence?",
        f"{show('beams.blocks')} at most, where one sequence holds {show('beams.alone')}: "
        f"{show('beams.ratio', '.1f')} times as many. Beams that survive come from one parent a few tokens back, and "
        f"all before that they share. It copies {show('beams.blocks_copied')} blocks in {show('beams.steps')} steps: "
        "when two go on from one beam, both write to its last block.",
    )


# ---- counted


def counted(model: Path, num_prompt_tokens: int) -> dict[str, dict[str, int]]:
    """Blocks held at most, blocks copied and tokens computed: of one sample, of N, of as many requests."""
    asked = {
        "alone": [Request(even_prompt(num_prompt_tokens), OUTPUT)],
        "samples": [Request(even_prompt(num_prompt_tokens), OUTPUT, N)],
        "requests": [Request(even_prompt(num_prompt_tokens), OUTPUT)] * N,
    }
    return {name: served(model, requests) for name, requests in asked.items()}


def served(model: Path, requests: list[Request], pool: int = POOL, name: str = "s5") -> dict[str, int]:
    """All are there at once, in an engine of stage `name` without a model."""
    engine = without_model(name, by_sample, model=str(model), kv_cache_tokens=pool, block_size=BLOCK)
    serve(name, engine, requests)
    return {
        "blocks": engine.kv_cache_manager.peak.held // BLOCK,
        "copied": engine.kv_cache.num_blocks_copied,
        "preemptions": engine.scheduler.num_preemptions,
        "tokens_computed": engine.model_runner.num_tokens,
    }


def one_is_preempted(model: Path, name: str = "s5") -> dict[str, int]:
    """N samples in a pool of one block less than they hold in the end. (Stage 6 is asked the same.)"""
    request = Request(even_prompt(PROMPT), OUTPUT, N)
    num_blocks = served(model, [request])["blocks"] - 1
    found = served(model, [request], BLOCK * num_blocks, name)
    assert found["preemptions"] == 1, f"{found['preemptions']} preemptions"
    twice = computed_twice(name, found["tokens_computed"], [request])
    return {"pool_blocks": num_blocks, "computed_twice": twice}


def beams_of(model: Path) -> dict[str, Any]:
    """A beam search, and one sequence with as many tokens."""
    alone, beams = search(model, STORY, 1)["blocks"], search(model, STORY, WIDTH)
    return {**beams, "alone": alone, "ratio": beams["blocks"] / alone, "output_tokens": OUTPUT}


def search(model: Path, prompt: str | list[int], width: int) -> dict[str, int]:
    llm = llm_of("s5", model, kv_cache_tokens=POOL)
    llm.beam_search([prompt], stage("s5").BeamSearchParams(beam_width=width, max_tokens=OUTPUT, ignore_eos=True))
    return {
        "steps": llm.model_runner.num_steps,
        "tokens_computed": llm.model_runner.num_tokens,
        "blocks": llm.peak.held // BLOCK,
        "blocks_copied": llm.kv_cache.num_blocks_copied,
    }


# ---- timed


def timed(model: Path) -> dict[str, Any]:
    """N outputs of one prompt: as requests of stage 4, and as samples, in turns; and beams."""
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": OUTPUT, "ignore_eos": True}
    seeds = [stage("s4").SamplingParams(seed=seed, **options) for seed in range(N)]
    samples = [stage("s5").SamplingParams(n=N, seed=0, **options)]
    prompt = even_prompt(PROMPT)
    calls = {
        "requests": partial(one_run, llm_of("s4", model, kv_cache_tokens=POOL), [prompt] * N, seeds),
        "samples": partial(one_run, llm_of("s5", model, kv_cache_tokens=POOL), [prompt], samples),
    }
    rounds = take_turns(calls, ROUNDS)
    speeds = [{name: scores["tokens_per_second"] for name, scores in each.items()} for each in rounds]
    copied = {"blocks_copied": counted(model, PROMPT)["samples"]["copied"]}
    found: dict[str, Any] = median_scores(rounds)
    found["samples"] |= copied
    gain = ratio(speeds, "samples", "requests").named("gain")
    return {**found, "beams": search(model, prompt, WIDTH), **gain}


def one_run(llm: Any, prompts: list[list[int]], params: list[Any]) -> dict[str, float]:
    """Tokens a second, time to first token, and what it took of the pool."""
    steps, tokens = llm.model_runner.num_steps, llm.model_runner.num_tokens
    outputs: list[Any] = []
    seconds = seconds_of(lambda: outputs.extend(llm.generate(prompts, params)))
    waits = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
    return {
        "steps": llm.model_runner.num_steps - steps,
        "tokens_computed": llm.model_runner.num_tokens - tokens,
        "tokens_per_second": N * OUTPUT / seconds,
        "first_token_seconds": statistics.median(waits),
        "blocks": llm.peak.held // BLOCK,
    }
