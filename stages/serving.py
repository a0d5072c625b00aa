"""Serving 32 requests from a pool of 2,048 tokens, stage against stage: `python -m stages.serving`.

The model has 135M parameters and random weights, in bfloat16. Prompts and outputs have 16 to 256 tokens each. Stages
take turns on the same requests, a hundredth of the work at a time, each on a clock of its own: a slow spell of the
machine hits all alike. A ratio is the median of the rounds' ratios, and the least and the largest are given with it.

--pairs 7 compares two stages on the shipped checkpoint instead, as often as that, in about two minutes: there a step is
short, so what the engine does around the model weighs most.

--peers serves them with transformers too, in the same run: `generate` on one left-padded static batch of all 32, and
the continuous batching behind `generate_batch`. These are not held to the pool, so the last stage is measured once more
with a pool of 8,192. Whoever serves, only the tokens that a request asked for count. The floor is the time that reading
all weights once a step would take, at the bandwidth that the machine has at that moment. A round takes about two
minutes on two cores, with peers four; without bfloat16 instructions, in --dtype float32, five and ten.
"""

import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from stages.decode import MODEL_135M, STAGES, STORYTELLER, Reading, random_model
from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig
from stages.workload import Request, mixed_workload

POOL_TOKENS, ROOMY_TOKENS = 2048, 8192  # the second has room for all of them at once
ROUNDS, SLICES = 1, 100
Scores = dict[str, float]


class Contestant:
    """A stage that serves the requests. It runs only when it is told to; its clock stands still meanwhile."""

    def __init__(self, name: str, folder: Path, requests: list[Request], dtype: str, pool: int = POOL_TOKENS) -> None:
        stage = importlib.import_module(STAGES[name])
        self._llm = stage.LLM(folder, dtype=dtype, kv_cache_tokens=pool)
        options = {"temperature": 0.0, "ignore_eos": True}
        params = [stage.SamplingParams(max_tokens=request.num_output_tokens, **options) for request in requests]
        self._stream = self._llm.stream([request.prompt_token_ids for request in requests], params)
        self._num_tokens, self._seconds = 0, 0.0
        self._first_tokens: dict[str, float] = {}  # when each request got it

    def run_until(self, num_tokens: int) -> None:
        """Go on until so many tokens have come."""
        started = time.perf_counter()
        while self._num_tokens < num_tokens:
            output = next(self._stream)  # a token of one request
            self._num_tokens += 1
            self._first_tokens.setdefault(output.request_id, self._seconds + time.perf_counter() - started)
        self._seconds += time.perf_counter() - started

    def scores(self) -> Scores:
        """Raises if a request is not served to its end."""
        assert next(self._stream, None) is None, "there are more tokens than were asked for"
        return {
            "tokens_per_second": self._num_tokens / self._seconds,
            "seconds": self._seconds,
            "steps": self._llm.model_runner.num_steps,
            "tokens_a_step": self._num_tokens / self._llm.model_runner.num_steps,
            "tokens_computed": self._llm.model_runner.num_tokens,
            "first_token_seconds": statistics.median(self._first_tokens.values()),
        }


def serve_in_turns(names: list[str], folder: Path, requests: list[Request], dtype: str, bar: tqdm) -> dict[str, Scores]:
    """One round: all stages go through the work side by side."""
    contestants = {name: Contestant(name, folder, requests, dtype) for name in names}
    total = sum(request.num_output_tokens for request in requests)
    for number in range(1, SLICES + 1):
        for contestant in contestants.values():
            contestant.run_until(total * number // SLICES)
        bar.update()
    return {name: contestant.scores() for name, contestant in contestants.items()}


def measure(names: list[str], folder: Path, requests: list[Request], dtype: str, num_rounds: int) -> dict[str, Any]:
    """Each stage's medians, and the ratios of each of the others to the first."""
    with tqdm(total=SLICES * num_rounds, desc=" and ".join(names)) as bar:
        rounds = [serve_in_turns(names, folder, requests, dtype, bar) for _ in range(num_rounds)]
    medians: dict[str, Any] = {
        name: {key: statistics.median(scores[name][key] for scores in rounds) for key in rounds[0][name]}
        for name in names
    }
    for name in names[1:]:
        medians[f"{name}_over_{names[0]}"] = {"rounds": num_rounds, **ratios(rounds, names[0], name)}
    return medians


def ratios(rounds: list[dict[str, Scores]], first: str, second: str) -> Scores:
    """How many times as fast the second is as the first: the median of the rounds, the least and the largest."""
    each = [scores[second]["tokens_per_second"] / scores[first]["tokens_per_second"] for scores in rounds]
    return {"ratio": statistics.median(each), "least": min(each), "largest": max(each)}


# ---- pairs


def compare(names: list[str], folder: Path, requests: list[Request], dtype: str, num_pairs: int) -> dict[str, Any]:
    """How many times as fast the second stage is as the first, the median of the pairs. Who goes first takes turns; a
    pair before the first warms up.
    """
    pairs: list[dict[str, Scores]] = []
    with tqdm(total=SLICES * (1 + num_pairs), desc=" and ".join(names)) as bar:
        for number in range(1 + num_pairs):
            order = names if number % 2 else names[::-1]
            pairs.append(serve_in_turns(order, folder, requests, dtype, bar))
    speeds = {name: statistics.median(scores[name]["tokens_per_second"] for scores in pairs[1:]) for name in names}
    return {"pairs": num_pairs, **ratios(pairs[1:], *names), **speeds}


# ---- peers


def measure_peers(name: str, folder: Path, requests: list[Request], dtype: str) -> dict[str, Any]:
    """transformers' two ways and the stage `name` with room for all, one run each; an error stands in its place."""
    from transformers import LlamaForCausalLM as Peer

    model = Peer.from_pretrained(folder, dtype=getattr(torch, dtype))
    runs: dict[str, Callable[[], Scores]] = {
        "generate": lambda: static_batch(model, requests),
        name: lambda: serve_alone(Contestant(name, folder, requests, dtype, ROOMY_TOKENS), requests),
        "generate_batch": lambda: continuous_batching(model, requests),
    }
    results: dict[str, Any] = {}
    for which, run in tqdm(runs.items(), desc="peers"):
        try:
            results[which] = run()
        except Exception as error:  # whatever it is: it belongs to the result
            results[which] = {"error": f"{type(error).__name__}: {error}"}
    return results


def serve_alone(contestant: Contestant, requests: list[Request]) -> Scores:
    contestant.run_until(sum(request.num_output_tokens for request in requests))
    return contestant.scores()


def static_batch(model: Any, requests: list[Request]) -> Scores:
    """All prompts, padded on the left; everybody gets as many tokens as the one who asked for most."""
    width = max(len(request.prompt_token_ids) for request in requests)
    longest = max(request.num_output_tokens for request in requests)
    padded = torch.zeros(len(requests), width, dtype=torch.int64)  # [num_requests, width]
    mask = torch.zeros_like(padded)
    for row, request in enumerate(requests):
        padded[row, -len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
        mask[row, -len(request.prompt_token_ids) :] = 1
    options = {"do_sample": False, "max_new_tokens": longest, "eos_token_id": None, "pad_token_id": 0}
    started = time.perf_counter()
    tokens = model.generate(padded, attention_mask=mask, **options)
    seconds = time.perf_counter() - started
    assert tokens.shape == (len(requests), width + longest), "it stopped early"
    asked_for = sum(request.num_output_tokens for request in requests)
    return {"tokens_per_second": asked_for / seconds, "seconds": seconds, "steps": longest}


def continuous_batching(model: Any, requests: list[Request]) -> Scores:
    """The manager that `generate_batch` runs: here each request has its own length. It gets blocks for all at once, and
    its start is not counted.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = ContinuousBatchingConfig(num_blocks=2 * len(requests))  # of 256 tokens, its default
    with model.continuous_batching_context_manager(generation, continuous_batching_config=options) as manager:
        started = time.perf_counter()
        for number, request in enumerate(requests):
            manager.add_request(request.prompt_token_ids, str(number), max_new_tokens=request.num_output_tokens)
        lengths: dict[str, int] = {}
        while len(lengths) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"it ended after {len(lengths)} of {len(requests)} requests")
            if result is not None and result.is_finished():
                lengths[result.request_id] = len(result.generated_tokens)
        seconds = time.perf_counter() - started
    assert lengths == {str(i): request.num_output_tokens for i, request in enumerate(requests)}, "a length is wrong"
    return {"tokens_per_second": sum(lengths.values()) / seconds, "seconds": seconds}


def floor(dtype: str, steps: float, num_tokens: int) -> Scores:
    """What reading all weights once in each of `steps` steps takes at least."""
    reading = Reading()
    bandwidth = reading.num_bytes / statistics.median([reading() for _ in range(9)][2:])
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in LlamaForCausalLM(MODEL_135M).parameters())
    seconds = steps * num_parameters * getattr(torch, dtype).itemsize / bandwidth
    return {"bytes_per_second": bandwidth, "seconds": seconds, "tokens_per_second": num_tokens / seconds}


def served_on_storyteller(names: list[str], num_requests: int, num_pairs: int) -> dict[str, Any]:
    """Two stages in pairs, in float32."""
    requests = mixed_workload(ModelConfig.from_folder(STORYTELLER).vocab_size, num_requests)
    return compare(names, STORYTELLER, requests, "float32", num_pairs)


def served_on_135m(names: list[str], num_requests: int, dtype: str, num_rounds: int, peers: bool) -> dict[str, Any]:
    """The stages in rounds, `peers` in the same run, and the floor. A short round before the first warms up."""
    requests = mixed_workload(MODEL_135M.vocab_size, num_requests)
    num_tokens = sum(request.num_output_tokens for request in requests)
    with random_model(MODEL_135M) as folder:
        with tqdm(disable=True) as silent:
            serve_in_turns(names, folder, mixed_workload(MODEL_135M.vocab_size, 2, high=32), dtype, silent)
        results = {"output_tokens": num_tokens, **measure(names, folder, requests, dtype, num_rounds)}
        if peers:
            results["peers"] = measure_peers(names[-1], folder, requests, dtype)
    return results | {"floor": floor(dtype, results[names[-1]]["steps"], num_tokens)}


@click.command()
@click.option("--stage", "names", multiple=True, default=("s3", "s4"), show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--rounds", "num_rounds", default=ROUNDS, show_default=True)
@click.option("--requests", "num_requests", default=32, show_default=True, help="fewer for a quick look")
@click.option("--pairs", "num_pairs", type=int, help="on the shipped checkpoint, two stages against each other")
@click.option("--peers", is_flag=True, help="transformers too, on the same requests")
@click.option("--save/--no-save", default=True, help="into stages/results.json")
def main(
    names: tuple[str, ...],
    dtype: str,
    num_rounds: int,
    num_requests: int,
    num_pairs: int | None,
    peers: bool,
    save: bool,
) -> None:
    """Serve 32 requests with each stage, in turns."""
    from stages import scoreboard

    if num_pairs and len(names) != 2:
        raise click.UsageError(f"--pairs compares two stages, not {len(names)}")
    if num_pairs:
        part, dtype = f"{names[1]}_over_{names[0]}", "float32"
        results = served_on_storyteller(list(names), num_requests, num_pairs)
    else:
        part, results = "serving", served_on_135m(list(names), num_requests, dtype, num_rounds, peers)
    for key, value in results.items():
        print(key, value)
    if save:
        scoreboard.save({part: {"machine": scoreboard.machine(dtype), **results}})


if __name__ == "__main__":
    main()
