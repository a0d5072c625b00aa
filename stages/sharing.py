"""What a shared prefix saves, and what looking for one costs where nobody shares: `python -m stages.sharing`.

Stage 6 with its prefix cache on and off, in one run; the model has 135M parameters and random weights, in bfloat16.

Shared: a request with a prefix of 512 tokens and a tail of 32 is served; when its first token is there, 31 more come
with the same prefix and tails of their own. The time to first token of these 31 is the sum of the engine's steps until
then. The engine without the cache has the most to do, so the other serves them before, in the middle and after.

Unshared: 16 requests of random tokens, which have nothing in common, twice; in the second round most of the pool is
full of blocks of the first, and new ones evict them. Both engines take the same steps in turn, and 16 steps make a pair
of times: in so many each sequence fills one block. The ratio is the median of the pairs' ratios.

About a minute and a half on two cores that have nothing else to do.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from stages import s6_prefix_caching as s6
from stages.decode import MODEL_135M, random_model
from stages.workload import Request, mixed_workload

PREFIX, TAIL, FOLLOWERS = 512, 32, 31
ROUNDS, TURNS_A_PAIR = 2, 8  # twice: nobody is always first


class Clocked:
    """An engine whose clock runs only while it steps; when each request came, and when its first token did."""

    def __init__(self, folder: Path, is_caching: bool, num_tokens: int, dtype: str) -> None:
        options: dict[str, Any] = {"dtype": dtype, "kv_cache_tokens": num_tokens}
        self.llm = s6.LLM(folder, enable_prefix_caching=is_caching, **options)
        self.engine = self.llm.llm_engine
        self.seconds, self.waits = 0.0, dict[str, float]()
        self._arrived: dict[str, float] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._arrived[request_id] = self.seconds
        params = s6.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(request_id, prompt, params)

    def step(self) -> float:
        """Seconds that it took."""
        started = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        for output in outputs:
            self.waits.setdefault(output.request_id, self.seconds - self._arrived[output.request_id])
        return seconds

    def steps(self, most: int) -> float:
        """Seconds of so many steps, or of fewer if nobody is left."""
        return sum(self.step() for _ in range(most) if self.engine.has_unfinished_requests())


# ---- shared


def shared_prompts(vocab_size: int, prefix: int, tail: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts that begin with the same `prefix` tokens and go on with `tail` of their own.

    >>> a, b = shared_prompts(4096, prefix=3, tail=2, count=2)
    >>> (a[:3] == b[:3], a[3:] == b[3:], len(a))
    (True, False, 5)
    """
    rng = random.Random(seed)
    first = [rng.randrange(3, vocab_size) for _ in range(prefix)]
    return [first + [rng.randrange(3, vocab_size) for _ in range(tail)] for _ in range(count)]


def arrive(clocked: Clocked, prompts: list[list[int]]) -> None:
    """The first is served; then the others are there, all at once. A token each."""
    clocked.llm.reset_prefix_cache()
    clocked.waits.clear()
    clocked.add("0", prompts[0], max_tokens=1)
    while clocked.engine.has_unfinished_requests():
        clocked.step()
    for number, prompt in enumerate(prompts[1:], start=1):
        clocked.add(str(number), prompt, max_tokens=1)


def waits_of_followers(clocked: Clocked) -> dict[str, float]:
    """Seconds to the first token, of those that came after the first."""
    waits = [wait for request_id, wait in clocked.waits.items() if request_id != "0"]
    return {"median": statistics.median(waits), "last": max(waits)}


def measure_shared(folder: Path, prompts: list[list[int]], dtype: str) -> dict[str, Any]:
    """TTFT in seconds with the cache on and off, and how many times shorter it is with it."""
    room = sum(map(len, prompts)) + 32 * len(prompts)
    on, off = (Clocked(folder, is_caching, room, dtype) for is_caching in (True, False))
    num_steps = -(-sum(map(len, prompts[1:])) // off.llm.config.max_num_batched_tokens)
    with_cache = []
    for clocked in (on, off):  # warms up: memory that was never written is not there yet
        arrive(clocked, prompts[:2])
        clocked.steps(num_steps)
    arrive(off, prompts)
    before = off.llm.model_runner.num_tokens
    for part in tqdm(range(3), "a shared prefix"):
        arrive(on, prompts)
        tokens_on = on.llm.model_runner.num_tokens
        on.steps(num_steps)
        with_cache.append(waits_of_followers(on))
        if part < 2:
            off.steps(num_steps // 2 + 1)
    tokens = {"on": on.llm.model_runner.num_tokens - tokens_on, "off": off.llm.model_runner.num_tokens - before}
    seconds_on = {name: statistics.median(waits[name] for waits in with_cache) for name in ("median", "last")}
    seconds_off = waits_of_followers(off)
    assert not off.engine.has_unfinished_requests(), "steps are missing"
    return {
        **{f"{name}_on_seconds": seconds for name, seconds in seconds_on.items()},
        **{f"{name}_off_seconds": seconds for name, seconds in seconds_off.items()},
        "times_shorter": seconds_off["median"] / seconds_on["median"],
        "tokens_on": tokens["on"],
        "tokens_off": tokens["off"],
    }


# ---- unshared


def measure_unshared(folder: Path, rounds: list[list[Request]], dtype: str) -> dict[str, Any]:
    """How many times the tokens a second the engine with the cache gives, and how many blocks it evicted."""
    room = max(sum(len(r.prompt_token_ids) + r.num_output_tokens + 32 for r in requests) for requests in rounds)
    clocks = {name: Clocked(folder, is_caching, room, dtype) for name, is_caching in (("on", True), ("off", False))}
    pairs, names, seen = list[dict[str, float]](), list(clocks), 0
    for number, requests in enumerate(tqdm(rounds, "nothing shared")):
        for clocked in clocks.values():
            for i, request in enumerate(requests):
                clocked.add(f"{number}-{i}", request.prompt_token_ids, request.num_output_tokens)
        while clocks["on"].engine.has_unfinished_requests():
            steps = [{name: clocks[name].steps(1) for name in order} for order in TURNS_A_PAIR * (names, names[::-1])]
            pairs.append({name: sum(step[name] for step in steps) for name in names})
        seen += sum((len(r.prompt_token_ids) + r.num_output_tokens - 1) // 16 for r in requests)
    tokens = {name: clocked.llm.model_runner.num_tokens for name, clocked in clocks.items()}
    assert tokens["on"] == tokens["off"], f"nothing is shared, but tokens computed are {tokens}"
    manager = clocks["on"].llm.kv_cache_manager
    return {
        "ratio": statistics.median(pair["off"] / pair["on"] for pair in pairs),
        "pairs": len(pairs),
        "evicted": seen - manager.prefix_cache.blocks.num_idle,
        "tokens_computed": tokens["on"],
        **{f"tokens_per_second_{name}": sum_of(rounds) / clocked.seconds for name, clocked in clocks.items()},
    }


def sum_of(rounds: list[list[Request]]) -> int:
    return sum(request.num_output_tokens for requests in rounds for request in requests)


@click.command()
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--save/--no-save", default=True, help="into stages/results.json")
def main(dtype: str, save: bool) -> None:
    """Measure stage 6 with its prefix cache on and off."""
    from stages import scoreboard

    vocab_size = MODEL_135M.vocab_size
    rounds = [mixed_workload(vocab_size, 16, high=128, seed=seed) for seed in range(ROUNDS)]
    with random_model(MODEL_135M) as folder:
        results = {
            "machine": scoreboard.machine(dtype),
            "shared": measure_shared(folder, shared_prompts(vocab_size, PREFIX, TAIL, 1 + FOLLOWERS), dtype),
            "unshared": measure_unshared(folder, rounds, dtype),
        }
    for name in ("shared", "unshared"):
        print(name, results[name])
    if save:
        scoreboard.save({"sharing": results})


if __name__ == "__main__":
    main()
