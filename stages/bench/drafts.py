"""The drafts table: what guesses gain, text by text, and what wrong ones cost, batch by batch. Of more_speculation.

`texts`: the storyteller writes with and without drafts, in turns, one request at a time. Greedy stories; the same ones
after a prompt that has them already, as in an edit; and stories that are sampled.

`batches`: a decode step in which every sequence has a draft of NUM_GUESSES tokens, against one without drafts. If all
guesses are wrong, that is what they cost. If a step brings more tokens a sequence than that, they pay.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Scores, ratio, seconds_of, with_spreads
from stages.bench.engines import stage
from stages.bench.models import STORYTELLER, model_135m
from stages.bench.results import machine
from stages.bench.steady import until_steady
from stages.bench.workloads import even_prompt

BRANCH = "more_speculation"
BEGINNINGS = ("Once upon a time", "The King had three sons")
OUTPUT, LEAST_TURNS, MOST_TURNS = 120, 10, 20
TEXTS = ("greedy", "again", "sampled")
NUM_GUESSES, CONTEXT, BLOCK_SIZE, BATCHES = 4, 128, 16, (1, 4, 16, 32)


def measure(args: Namespace) -> dict[str, Any]:
    """Measure both parts."""
    texts = {name: measure_text(name) for name in TEXTS}
    models = {"storyteller": STORYTELLER, "135M": model_135m()}
    batches = {
        name: {str(batch): measure_batch(folder, args.dtype, batch, name) for batch in BATCHES}
        for name, folder in models.items()
    }
    return {"drafts": {"machine": machine(args.dtype), "texts": texts, "batches": batches}}


def engine_of(folder: Path, num_guesses: int, dtype: str = "float32", **options: Any) -> Any:
    """Return an LLM of the branch that caches nothing, so that each round does the same work."""
    options |= {"dtype": dtype, "enable_prefix_caching": False, "num_speculative_tokens": num_guesses}
    return stage(BRANCH).LLM(folder, block_size=BLOCK_SIZE, **options)


def compare(calls: Mapping[str, Callable[[], float]], name: str, title: str) -> Scores:
    """Return how many times as long the first call takes as the second, under `name`, and the milliseconds of both."""
    first, second = calls
    rounds, turns = until_steady(
        calls, lambda rounds: ratio(rounds, first, second).named(name), least=LEAST_TURNS, most=MOST_TURNS, title=title
    )
    times = with_spreads([{f"{key}_ms": 1000 * each[key] for key in each} for each in rounds])
    return times | ratio(rounds, first, second).named(name) | {"turns": turns}


# ---- what guesses gain


def measure_text(name: str) -> dict[str, Any]:
    """Return the tokens a step and what became of the guesses, and the speed with drafts over that without."""
    params = partial(stage(BRANCH).SamplingParams, max_tokens=OUTPUT, ignore_eos=True)
    greedy = params(temperature=0.0)
    llms = {"without": engine_of(STORYTELLER, 0), "with": engine_of(STORYTELLER, NUM_GUESSES)}
    prompts: list[Any] = [llms["with"].tokenizer.encode(beginning) for beginning in BEGINNINGS]
    if name == "again":
        stories = write(llms["without"], prompts, greedy)
        prompts = [prompt + story + prompt for prompt, story in zip(prompts, stories, strict=True)]
    chosen = params(temperature=0.8, seed=0) if name == "sampled" else greedy
    before, told = counts(llms["with"]), write(llms["with"], prompts, chosen)
    steps, drafted, accepted = (now - then for now, then in zip(counts(llms["with"]), before, strict=True))
    assert told == write(llms["without"], prompts, chosen), "drafts have changed the tokens"
    calls = {key: partial(seconds_of, partial(write, llm, prompts[:1], chosen)) for key, llm in llms.items()}
    guesses = {"tokens_a_step": len(prompts) * OUTPUT / steps, "drafted": drafted, "accepted": accepted}
    return guesses | compare(calls, "ratio", name)


def write(llm: Any, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    """Return the output of each prompt. They run one after the other."""
    return [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]


def counts(llm: Any) -> tuple[int, int, int]:
    """Return the steps since the start, the guesses, and those that were right."""
    engine = llm.llm_engine
    return llm.model_runner.num_steps, engine.num_draft_tokens, engine.num_accepted_tokens


# ---- what wrong guesses cost


def measure_batch(folder: Path, dtype: str, batch: int, name: str) -> dict[str, Any]:
    """Return the milliseconds of a decode step with and without guesses, and their ratio."""
    calls = {key: decode_step(folder, dtype, batch, num) for key, num in (("guesses", NUM_GUESSES), ("plain", 0))}
    return dict(compare(calls, "cost", f"{name}, {batch} sequences that guess"))


def decode_step(folder: Path, dtype: str, batch: int, num_guesses: int) -> Callable[[], float]:
    """Return a function that computes the same decode step again and again, and returns its seconds.

    Whether the guesses are right makes no difference to its time.
    """
    llm = engine_of(folder, 0, dtype, kv_cache_tokens=batch * (CONTEXT + 4 * BLOCK_SIZE))
    engine, manager = llm.llm_engine, llm.kv_cache_manager
    params = stage(BRANCH).SamplingParams(temperature=0.0, max_tokens=2 * BLOCK_SIZE, ignore_eos=True)
    for number in range(batch):
        engine.add_request(str(number), even_prompt(CONTEXT), params)
    while engine.scheduler.waiting or any(seq.num_uncomputed_tokens > 1 for seq in engine.scheduler.running):
        engine.step()
    for seq in engine.scheduler.running:
        manager.append_slot(seq)
        seq.draft_token_ids = [3] * num_guesses
        assert manager.append_draft_slots(seq, num_guesses) == num_guesses
    steps = [(seq, 1 + num_guesses) for seq in engine.scheduler.running]
    assert len(steps) == batch
    return partial(seconds_of, partial(llm.model_runner.run, steps))
