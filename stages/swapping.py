"""What it is worth to keep a preempted request's blocks on the host: `python -m stages.swapping`.

Stage 7 with its three policies, "recompute", "swap" and "auto", on the same requests and from the same pool, which has
room for about a third of what all would hold in the end. The model has 135M parameters and random weights; there is no
prefix cache, which would find some of the lost blocks again. The policies take turns, a hundredth of the work at a
time, each on a clock of its own; who goes first changes from slice to slice.

Two loads, of long prompts and shorter outputs. `usual`: admission leaves the watermark's blocks free, as by default, so
preemption is rare. `crowded`: it leaves none, two samples of each prompt share its blocks, and the pool has room for
three of the requests as they begin but not as they end; outputs have lengths for which most is preempted, looked for
among some thousands of loads. How many tokens are computed twice is counted, not measured.

Two to five minutes on two cores that have nothing else to do.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import click
from tqdm import tqdm

from stages import s7_cpu_offload as s7
from stages.decode import MODEL_135M, random_model
from stages.workload import Request, mixed_workload

POLICIES = ("recompute", "swap", "auto")
CONTEXT, BLOCK_SIZE, SLICES = 512, 16, 100


class Load(NamedTuple):
    """Requests that are all there at once, of CONTEXT tokens a sample in the end; outputs have lengths of their own."""

    num_requests: int
    n: int  # samples of each
    least_output: int
    spread: int  # lengths of outputs are `stride` apart, in a range of so many
    stride: int
    pool_tokens: int
    watermark: float

    @property
    def options(self) -> dict[str, Any]:
        """EngineConfig's, but for the model."""
        pools = {"kv_cache_tokens": self.pool_tokens, "swap_space_tokens": self.num_requests * self.n * CONTEXT}
        return {"block_size": BLOCK_SIZE, "watermark": self.watermark, "enable_prefix_caching": False, **pools}

    @property
    def num_tokens(self) -> int:
        """What all hold in the end; the samples of a request share its prompt."""
        return sum(len(prompt) + self.n * output for prompt, output in self.requests)

    @property
    def requests(self) -> list[Request]:
        """
        >>> load = Load(3, n=1, least_output=100, spread=32, stride=20, pool_tokens=512, watermark=0.0)
        >>> [(len(prompt), output) for prompt, output in load.requests]
        [(412, 100), (392, 120), (404, 108)]
        """
        texts = mixed_workload(MODEL_135M.vocab_size, self.num_requests, CONTEXT, CONTEXT)
        outputs = [self.least_output + number * self.stride % self.spread for number in range(self.num_requests)]
        return [Request(text.prompt_token_ids[:-output], output) for text, output in zip(texts, outputs, strict=True)]


LOADS = {
    "usual": Load(12, 1, 64, 64, 7, 1872, 0.05),
    "crowded": Load(9, 2, 20, 10, 7, 1584, 0.0),
}


class Contestant:
    """An engine with one of the policies. It runs only when it is told to; its clock stands still meanwhile."""

    def __init__(self, folder: Path, policy: str, load: Load, dtype: str) -> None:
        self.engine = s7.LLM(folder, dtype=dtype, preemption=policy, **load.options).llm_engine
        self.seconds, self.num_tokens, self._num_needed = 0.0, 0, 0
        self._so_far: dict[str, int] = {}  # tokens of each request
        for number, request in enumerate(load.requests):
            params = s7.SamplingParams(n=load.n, seed=0, max_tokens=request.num_output_tokens, ignore_eos=True)
            self.engine.add_request(str(number), request.prompt_token_ids, params)
            self._num_needed += len(request.prompt_token_ids) + load.n * (request.num_output_tokens - 1)

    def run_until(self, num_tokens: int) -> None:
        """Go on until so many tokens have come."""
        started = time.perf_counter()
        while self.num_tokens < num_tokens and self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            self._so_far |= {o.request_id: sum(len(sample.token_ids) for sample in o.outputs) for o in outputs}
            self.num_tokens = sum(self._so_far.values())
        self.seconds += time.perf_counter() - started

    def scores(self) -> dict[str, Any]:
        engine, host = self.engine, self.engine.host_pool
        assert host is not None and not engine.has_unfinished_requests(), "it was not served to its end"
        return {
            "tokens_per_second": self.num_tokens / self.seconds,
            "seconds": self.seconds,
            "steps": engine.model_runner.num_steps,
            "tokens_computed": engine.model_runner.num_tokens,
            "computed_twice": engine.model_runner.num_tokens - self._num_needed,
            "preemptions": engine.scheduler.num_preemptions,
            "swaps": engine.scheduler.num_swaps,
            "blocks_swapped": host.stored.num_blocks + host.loaded.num_blocks,
            "swap_seconds": host.stored.seconds + host.loaded.seconds,
        }


def serve_in_turns(folder: Path, load: Load, dtype: str, bar: tqdm) -> dict[str, Any]:
    """Each policy's scores, and how many times as fast "auto" is as "recompute", and as the better of the other two."""
    contestants = {policy: Contestant(folder, policy, load, dtype) for policy in POLICIES}
    total, order = load.n * sum(request.num_output_tokens for request in load.requests), list(POLICIES)
    for number in range(1, SLICES + 1):
        for policy in order:
            contestants[policy].run_until(total * number // SLICES)
        order.append(order.pop(0))
        bar.update()
    scores: dict[str, Any] = {policy: contestant.scores() for policy, contestant in contestants.items()}
    speeds = {policy: scores[policy]["tokens_per_second"] for policy in POLICIES}
    cost_model = contestants["auto"].engine.cost_model
    assert cost_model is not None, "auto has two speeds to go by"
    return scores | {
        "requests": load.num_requests,
        "pool_tokens": load.pool_tokens,
        "share": load.pool_tokens / load.num_tokens,
        "auto_over_recompute": speeds["auto"] / speeds["recompute"],
        "auto_over_best": speeds["auto"] / max(speeds["recompute"], speeds["swap"]),
        "bytes_per_second": cost_model.bytes_per_second,
        "prefill_tokens_per_second": cost_model.tokens_per_second,
    }


@click.command()
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--load", "names", multiple=True, type=click.Choice(list(LOADS)), default=tuple(LOADS), show_default=True)
@click.option("--save/--no-save", default=True, help="into stages/results.json")
def main(dtype: str, names: tuple[str, ...], save: bool) -> None:
    """Measure stage 7 under its three policies."""
    from stages import scoreboard

    results: dict[str, Any] = {"machine": scoreboard.machine(dtype)}
    with random_model(MODEL_135M) as folder, tqdm(total=SLICES * len(names), desc=", ".join(POLICIES)) as bar:
        for name in names:
            results[name] = serve_in_turns(folder, LOADS[name], dtype, bar)
    for key, value in results.items():
        print(key, value)
    if save:
        scoreboard.save({"swapping": results})


if __name__ == "__main__":
    main()
