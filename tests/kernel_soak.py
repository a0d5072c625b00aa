"""Random requests on kernels, with checks after each step.

    python -m tests.soak --kernels --requests 20000 --seed 0        rounds of 100 requests on a tiny random model
    python -m tests.soak --kernels --seed 0 --round 123             one round again

Each round has an engine with kernels and a pool that is too small for its requests, so sequences are preempted, and
blocks are evicted, stored and loaded. Requests arrive at any time, are aborted, fork and share prefixes, and kernels
raise. Each request's tokens must be a prefix of the plain engine's, and all of them if it finished normally. float32
sums in a different order may break a tie differently, but for at most one token in 1,000.
"""

import argparse
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

from nanovllm import EngineArgs, LLMEngine, SamplingParams
from nanovllm.backends.cpu.runner import StepRunner
from nanovllm.tests.testing.checkpoints import write_checkpoint

ROUND_SIZE = 100  # requests
VOCAB_SIZE = 320
SHAPES = (  # head_dim 6, 20, 24
    {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 24, "intermediate_size": 33},
    {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 60, "intermediate_size": 64},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 192, "intermediate_size": 96},
)
SHARES = (0.02, 0.002, 1e-9)  # the shares of kernel calls that raise
MARGIN = 1e-3  # of the logits' standard deviation
TOKENS_PER_DIFFERENCE = 1000  # at most one in this many tokens may differ
MAX_GROWTH = 64 * 2**20  # bytes that the process may gain in the second half of its rounds
COUNTS = ["tokens", "aborted", "raised", "failed", "preempted", "blocks loaded", "near ties"]


class InjectedError(RuntimeError):
    """The error that kernels raise in this soak."""


@dataclass
class Request:
    """A request of a round."""

    prompt: list[int]
    params: SamplingParams
    arrival: int  # a step of the round
    aborted_after: int | None  # steps
    outputs: list[list[int]] = field(default_factory=list)  # the tokens of each sample
    reasons: list[str | None] = field(default_factory=list)  # the finish_reason of each sample
    expected: list[list[int]] = field(default_factory=list)


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Return requests with prompts of 1 to 90 tokens. A third of them share one of three prefixes."""
    shared = [[rng.randrange(3, VOCAB_SIZE) for _ in range(60)] for _ in range(3)]
    requests, step = [], 0
    for number in range(count):
        begin = rng.choice(shared)[: rng.randint(0, 60)] if rng.random() < 0.4 else []
        prompt = begin + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 2, 5, rng.randint(1, 30))))]
        is_sampled = rng.random() < 0.4
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, 9, rng.randint(1, 30))),
            temperature=rng.choice((0.7, 1.0)) if is_sampled else 0,
            top_p=rng.choice((1.0, 0.9)),
            n=rng.choice((1, 2, 3)) if is_sampled else 1,
            seed=number,
            ignore_eos=True,
        )
        step += rng.choice((0, 0, 0, 1, 4))
        requests.append(Request(prompt, params, step, rng.randint(0, 12) if rng.random() < 0.15 else None))
    return requests


def engine_for(model: Path, backend: str, rng: random.Random | None = None) -> LLMEngine:
    """Return an engine: with a small pool and random options if `rng` is given, else with room for all requests."""
    options = {"kv_cache_tokens": 32_768, "max_num_seqs": 32, "enable_prefix_caching": False}
    if rng is not None:
        options = {
            "block_size": rng.choice((3, 4, 8, 16)),
            "kv_cache_tokens": rng.choice((126, 160, 2000)),
            "kv_offloading_tokens": rng.choice((0, 200, 1000)),
            "max_num_seqs": rng.choice((3, 5, 12, 40)),
            "max_num_batched_tokens": rng.choice((7, 33, 128)),
            "offload_policy": "load",
        }
    return LLMEngine.from_engine_args(
        EngineArgs(model=model, attention_backend=backend, skip_tokenizer_init=True, dtype="float32", **options)
    )


@contextmanager
def raising(rng: random.Random, share: float, counts: Counter[str]) -> Iterator[None]:
    """Make each kernel raise in this share of its calls, before or after it runs."""
    places = [(StepRunner, "run"), (StepRunner, "compute_logits"), (StepRunner, "find_likeliest")]
    real = {place: getattr(*place) for place in places}

    def wrapped(function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            moment = rng.random() / share
            if moment < 0.5:
                counts["raised"] += 1
                raise InjectedError("before a kernel")
            result = function(*arguments)
            if moment < 1:
                counts["raised"] += 1
                raise InjectedError("after a kernel")
            return result

        return call

    try:
        for where, name in places:
            setattr(where, name, wrapped(real[where, name]))
        yield
    finally:
        for (where, name), function in real.items():
            setattr(where, name, function)


def serve(engine: LLMEngine, requests: list[Request], counts: Counter[str]) -> None:
    """Serve all requests, with check_integrity() after each step. At the end, no block may be in use."""
    manager, step, waiting, leaving = engine.kv_cache_manager, 0, list(enumerate(requests)), {}
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1].arrival <= step:
            number, request = waiting.pop(0)
            engine.add_request(str(number), request.prompt, request.params)
            if request.aborted_after is not None:
                leaving[number] = step + request.aborted_after
        for number in [number for number, end in leaving.items() if end <= step]:
            del leaving[number]
            output = engine.abort_request(str(number))
            if output is not None:
                counts["aborted"] += 1
                record(requests[number], output)
        for output in engine.step():
            record(requests[int(output.request_id)], output)
        manager.check_integrity()
        step += 1
    counts["steps"] += step
    assert manager.num_free_blocks == manager.num_blocks, (
        f"{manager.num_blocks - manager.num_free_blocks} blocks leaked"
    )


def record(request: Request, output) -> None:
    request.outputs = [list(sample.token_ids) for sample in output.outputs]
    request.reasons = [sample.finish_reason for sample in output.outputs]


def expect(engine: LLMEngine, requests: list[Request]) -> None:
    """Serve all requests at once with the plain engine, and record the expected tokens."""
    for number, request in enumerate(requests):
        engine.add_request(str(number), request.prompt, request.params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            requests[int(output.request_id)].expected = [list(sample.token_ids) for sample in output.outputs]


def compare(engine: LLMEngine, requests: list[Request], counts: Counter[str]) -> None:
    for number, request in enumerate(requests):
        assert len(request.outputs) in (0, len(request.expected)), f"request {number}: {len(request.outputs)} samples"
        samples = zip(request.outputs, request.expected, request.reasons, strict=False)
        for i, (output, expected, reason) in enumerate(samples):
            counts["tokens"] += len(output)
            counts["failed"] += reason == "error"
            sample = f"request {number}, sample {i}: {len(output)} of {len(expected)} tokens, {reason}"
            assert len(output) == len(expected) if reason == "length" else len(output) <= len(expected), sample
            first = next((i for i, token in enumerate(output) if token != expected[i]), None)
            if first is not None:
                counts["near ties"] += 1
                check_tie(engine, request, expected[:first], output[first], expected[first], sample)


def check_tie(engine: LLMEngine, request: Request, before: list[int], token: int, expected: int, sample: str) -> None:
    """Check that the logits of two greedy tokens are nearly equal. For sampled tokens, only their number is limited."""
    if request.params.temperature:
        return
    logits = plain_logits(engine, request.prompt + before)
    margin = float((logits[expected] - logits[token]).abs() / logits.std())
    assert margin < MARGIN, f"{sample}: token {token} after {len(before)}, not {expected}, margin {margin:.2g}"


def plain_logits(engine: LLMEngine, token_ids: list[int]) -> torch.Tensor:
    """Return the logits after these tokens, computed at once on an idle engine's pool. float32 [vocab_size]."""
    table = list(range(-(-len(token_ids) // engine.config.block_size)))
    seq = SimpleNamespace(num_computed_tokens=0, token_ids=token_ids, block_table=table)
    return engine.executor.next_logits([(seq, len(token_ids))])[0].float()


def play_round(model: Path, plain: LLMEngine, seed: int, number: int, count: int, counts: Counter[str]) -> None:
    rng = random.Random(f"{seed} {number}")
    requests, engine = random_requests(rng, count), engine_for(model, "numba", rng)
    with raising(rng, SHARES[number // len(SHAPES) % len(SHARES)], counts):
        serve(engine, requests, counts)
    assert engine.kernels.uses_kernels
    stats = engine.stats()
    counts["preempted"] += stats.preemptions
    counts["blocks loaded"] += engine.host_tier.num_blocks_loaded
    counts["requests"] += count
    expect(plain, requests)
    compare(plain, requests, counts)


def memory() -> int:
    """Return the resident bytes of this process, or 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def soak(args: argparse.Namespace) -> tuple[Counter[str], str | None]:
    """Play all rounds. Return the counts, and the first fault if there is one."""
    counts, sizes = Counter[str](), []
    rounds = range(-(-args.requests // ROUND_SIZE)) if args.round is None else [args.round]
    with tempfile.TemporaryDirectory() as folder:
        models = [Path(folder) / str(i) for i in range(len(SHAPES))]
        for path, shape in zip(models, SHAPES, strict=True):
            path.mkdir()
            write_checkpoint(path, max_position_embeddings=160, **shape)
        plain = [engine_for(path, "torch") for path in models]
        for number in tqdm(rounds, unit=" rounds", disable=None):
            kind = number % len(SHAPES)
            try:
                play_round(models[kind], plain[kind], args.seed, number, min(ROUND_SIZE, args.requests), counts)
            except Exception as error:
                return counts, f"round {number}: {type(error).__name__}: {error}"
            gc.collect()  # an engine has reference cycles
            sizes.append(memory())
    counts["KiB gained"] = (sizes[-1] - sizes[len(sizes) // 2]) // 1024
    if counts["near ties"] * TOKENS_PER_DIFFERENCE > max(counts["tokens"], TOKENS_PER_DIFFERENCE):
        return counts, f"{counts['near ties']} of {counts['tokens']} tokens differ"
    if counts["KiB gained"] * 1024 > MAX_GROWTH:
        return counts, f"the process grew by {counts['KiB gained']:,} KiB"
    return counts, None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak --kernels", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="play only this round")
    parser.add_argument("--threads", type=int, default=2, help="threads of a kernel (default: %(default)s)")
    return parser


def main(argv: list[str]) -> int:
    args, before = make_parser().parse_args(argv), torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        counts, fault = soak(args)
    finally:
        torch.set_num_threads(before)
    rest = ", ".join(f"{counts[name]:,} {name}" for name in COUNTS)
    print(f"{counts['requests']:,} requests in {counts['steps']:,} steps: {rest}; {counts['KiB gained']:,} KiB gained")
    print(f"seed {args.seed}: {fault or 'no fault'}")
    return 1 if fault else 0
