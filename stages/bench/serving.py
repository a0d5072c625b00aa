"""Serving: stages that serve the same requests side by side.

Stage 4 against stage 3: 32 requests of 16 to 256 tokens each from a pool of 2,048, on the model of 135M parameters. A
round takes a minute and a quarter on two cores.

`peers`: transformers serves them too, in the same run: `generate` on one left-padded static batch of all 32, and the
continuous batching behind `generate_batch`. These are not held to the pool, so stage 4 is measured once more with room
for all. Only the tokens that a request asked for count. The floor is the time that reading all weights once a step
takes, at the bandwidth that the machine has at that moment.
"""

import itertools
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.bench.decode_step import Reading
from stages.bench.harness import Scores, median_scores, ratio, with_spreads
from stages.bench.models import SHAPE_135M, model_135m, num_parameters
from stages.bench.racing import Racer, race
from stages.bench.results import machine
from stages.bench.workloads import Request, mixed_workload

SMALL_POOL, ROOMY_POOL = 2048, 16384  # the second has room for all of them at once, and for what was cached before
STAGES, NUM_ROUNDS = ("s3", "s4"), 2


def measure(args: Namespace) -> dict[str, Any]:
    requests = mixed_workload(SHAPE_135M.vocab_size)
    folder, options = model_135m(), {"dtype": args.dtype, "kv_cache_tokens": SMALL_POOL}
    serve_in_rounds(STAGES, folder, mixed_workload(SHAPE_135M.vocab_size, 2, high=32), 1, options)  # warms up
    found = serve_in_rounds(STAGES, folder, requests, NUM_ROUNDS, options, "serving")
    found["peers"] = measure_peers(STAGES[-1], folder, requests, args.dtype)
    num_tokens = sum(request.num_output_tokens for request in requests)
    found["floor"] = floor(args.dtype, found[STAGES[-1]]["steps"], num_tokens)
    return {"serving": {"machine": machine(args.dtype), "output_tokens": num_tokens, **found}}


def serve_in_rounds(
    names: Sequence[str],
    folder: Path,
    requests: list[Request],
    num_rounds: int,
    options: Mapping[str, Any],
    title: str | None = None,
) -> dict[str, Any]:
    """Each stage's medians; of each the speed over that of the stage before, the median of the rounds' ratios."""
    rounds = []
    for _ in tqdm(range(num_rounds), title, disable=title is None, leave=False):
        racers = race({name: partial(Racer, name, folder, requests, **options) for name in names})
        rounds.append({name: racer.scores() for name, racer in racers.items()})
    found: dict[str, Any] = median_scores(rounds)
    speeds = [{name: scores["tokens_per_second"] for name, scores in each.items()} for each in rounds]
    for before, after in itertools.pairwise(names):
        found[f"{after}_over_{before}"] = {"rounds": num_rounds, **ratio(speeds, after, before)._asdict()}
    return found


# ---- peers


def measure_peers(name: str, folder: Path, requests: list[Request], dtype: str) -> dict[str, Any]:
    """transformers' two ways and the stage `name` with room for all; an error stands in its place."""
    from transformers import LlamaForCausalLM as Peer

    model = Peer.from_pretrained(folder, dtype=getattr(torch, dtype))
    racer = partial(Racer, name, folder, requests, dtype=dtype, kv_cache_tokens=ROOMY_POOL)
    runs: dict[str, Callable[[], Scores]] = {
        "generate": lambda: static_batch(model, requests),
        name: lambda: race({name: racer})[name].scores(),
        "generate_batch": lambda: continuous_batching(model, requests),
    }
    results: dict[str, Any] = {}
    for which, run in tqdm(runs.items(), desc="peers", leave=False):
        try:
            results[which] = with_spreads([run() for _ in range(NUM_ROUNDS)])
        except Exception as error:  # whatever it is: it belongs to the result
            results[which] = {"error": f"{type(error).__name__}: {error}"}
    return results


def static_batch(model: Any, requests: list[Request]) -> Scores:
    """All prompts, padded on the left; everybody gets as many tokens as the longest output has."""
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
    reading, weights = Reading(), num_parameters(SHAPE_135M) * getattr(torch, dtype).itemsize
    found = []
    for bandwidth in [reading.num_bytes / reading() for _ in range(9)][2:]:
        seconds = steps * weights / bandwidth
        rates = {"bytes_per_second": bandwidth, "tokens_per_second": num_tokens / seconds}
        found.append({"seconds": seconds, **rates})
    return with_spreads(found)
