"""Stage 5: what samples of one prompt share, what they copy, and what beams hold."""

import statistics
import time
from pathlib import Path
from typing import Any

from notebooks import forks
from notebooks.forks import Ask
from stages import s4_continuous_batching as s4
from stages import s5_cow_sampling as s5
from stages.predict.common import Answer, with_answers

POOL, BLOCK, ROUNDS = 8192, 16, 3
PROMPT, ALIGNED, OUTPUT, N, WIDTH = 200, 208, 64, 8, 4
STORY = "Once upon a time there was a princess"


def answers(model: Path) -> dict[str, Any]:
    of_200, of_208 = counted(model, PROMPT), counted(model, ALIGNED)
    beams = beams_of(model)
    numbers = {"of_200": of_200, "of_208": of_208, "beams": beams, "runs": timed(model)}
    return with_answers(numbers, [about_copies(of_200, of_208), about_blocks(of_200), about_beams(beams)])


def about_copies(of_200: dict[str, Any], of_208: dict[str, Any]) -> Answer:
    partial, aligned = of_200["samples"]["copied"], of_208["samples"]["copied"]
    return Answer(
        f"{N} samples of a prompt of {PROMPT} tokens, in blocks of {BLOCK}. How many blocks are copied? And of a "
        f"prompt of {ALIGNED} tokens?",
        f"{partial}, and {aligned}. {PROMPT} tokens end in the middle of a block, which all {N} want to write to: each "
        f"copies it first but the last, who then holds it alone. {ALIGNED} tokens fill their blocks, and nobody writes "
        "to a full block.",
    )


def about_blocks(of_200: dict[str, Any]) -> Answer:
    alone, samples, requests = (of_200[name]["blocks"] for name in ("alone", "samples", "requests"))
    return Answer(
        f"One sample of that prompt of {PROMPT} tokens, with {OUTPUT} tokens of output, holds {alone} blocks in the "
        f"end. How many do {N} samples hold?",
        f"{samples}, {samples / alone:.1f} times as many; {N} requests with the same prompt hold {requests}. The "
        f"{PROMPT // BLOCK} full blocks of the prompt are there once; of all others each has its own.",
    )


def about_beams(beams: dict[str, Any]) -> Answer:
    return Answer(
        f'A beam search of width {WIDTH} goes on from "{STORY}" by {beams["output_tokens"]} tokens. Does it hold '
        f"{WIDTH} times the blocks of one sequence?",
        f"{beams['blocks']} at most, where one sequence holds {beams['alone']}: {beams['ratio']:.1f} times as many. "
        "Beams that survive come from one parent a few tokens back, and all before that they share. It copies "
        f"{beams['blocks_copied']} blocks in {beams['steps']} steps: when two go on from one beam, both write to its "
        "last block.",
    )


def counted(model: Path, num_prompt_tokens: int) -> dict[str, dict[str, int]]:
    """Blocks held at most, blocks copied and tokens computed: of one sample, of N, of as many requests."""
    asks = {
        "alone": [Ask(num_prompt_tokens, OUTPUT)],
        "samples": [Ask(num_prompt_tokens, OUTPUT, N)],
        "requests": [Ask(num_prompt_tokens, OUTPUT)] * N,
    }
    found = {}
    for name, asked in asks.items():
        engine = forks.WithoutModel(model=str(model), kv_cache_tokens=POOL)
        moments = forks.serve(engine, *asked)
        found[name] = {
            "blocks": forks.blocks_at_most(moments),
            "copied": engine.kv_cache.num_blocks_copied,
            "tokens_computed": engine.model_runner.num_tokens,
        }
    return found


def beams_of(model: Path) -> dict[str, Any]:
    """A beam search, and one sequence with as many tokens."""
    alone, beams = search(model, STORY, 1)["blocks"], search(model, STORY, WIDTH)
    return {**beams, "alone": alone, "ratio": beams["blocks"] / alone, "output_tokens": OUTPUT}


def search(model: Path, prompt: str | list[int], width: int) -> dict[str, int]:
    llm = s5.LLM(model, dtype="float32", kv_cache_tokens=POOL)
    params = s5.BeamSearchParams(beam_width=width, max_tokens=OUTPUT, ignore_eos=True)
    beams = forks.WatchedBeams(llm.llm_engine, params)
    beams.run("beams", prompt)
    return {
        "steps": llm.model_runner.num_steps,
        "tokens_computed": llm.model_runner.num_tokens,
        "blocks": max(len(step.ref_counts) for step in beams.steps),
        "blocks_copied": llm.kv_cache.num_blocks_copied,
    }


def timed(model: Path) -> dict[str, Any]:
    """N outputs of one prompt: as requests of stage 4, and as samples. Medians of rounds, in turns; and beams."""
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": OUTPUT, "ignore_eos": True}
    prompt = prompt_of(PROMPT)
    llms = {stage: stage.LLM(model, dtype="float32", kv_cache_tokens=POOL) for stage in (s4, s5)}
    rounds = []
    for _ in range(1 + ROUNDS):
        seeds = [s4.SamplingParams(seed=seed, **options) for seed in range(N)]
        samples = [s5.SamplingParams(n=N, seed=0, **options)]
        requests = one_run(llms[s4], [prompt] * N, seeds)
        rounds.append({"requests": requests, "samples": one_run(llms[s5], [prompt], samples)})
    found = {
        name: {key: statistics.median(run[name][key] for run in rounds[1:]) for key in rounds[1][name]}
        for name in rounds[1]
    }
    gain = found["samples"]["tokens_per_second"] / found["requests"]["tokens_per_second"]
    return {**found, "beams": search(model, prompt, WIDTH), "gain": gain}


def prompt_of(num_tokens: int) -> list[int]:
    return [3 + i for i in range(num_tokens)]


def one_run(llm: Any, prompts: list[list[int]], params: list[Any]) -> dict[str, float]:
    """Tokens a second, time to first token, and what it took of the pool."""
    runner, cache = llm.model_runner, llm.kv_cache
    before = runner.num_steps, runner.num_tokens, getattr(cache, "num_blocks_copied", 0)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    found = {
        "steps": runner.num_steps - before[0],
        "tokens_computed": runner.num_tokens - before[1],
        "tokens_per_second": N * OUTPUT / seconds,
        "first_token_seconds": statistics.median(o.metrics.first_token_time for o in outputs) - started,
        "blocks": llm.peak.held // BLOCK,
    }
    copied = {"blocks_copied": cache.num_blocks_copied - before[2]} if hasattr(cache, "num_blocks_copied") else {}
    return found | copied
