"""Random requests on kernels, with everything that must hold checked after each step.

    python -m tests.soak --kernels --requests 20000 --seed 0        rounds of 100 requests on a tiny random model
    python -m tests.soak --kernels --seed 0 --round 123             one round again

A round has an engine with kernels whose pool is too small for what it serves: sequences are preempted, blocks are
evicted, stored and loaded. Requests come at any time, are aborted, fork, begin alike; kernels raise. Each request's
tokens must begin the plain engine's, and be all of them if it ended by itself. float32 sums in another order may choose
another token where two are as good as equal: at most one in 1,000, and only where the logits say so.
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

import torch
from tqdm import tqdm

from nanovllm import EngineArgs, LLMEngine, SamplingParams
from nanovllm.backends.cpu import matmul, model, sampler, step_attention
from nanovllm.backends.cpu.decode_step import DecodeRunner
from nanovllm.backends.torch.attention import AttentionMetadata
from nanovllm.tests.helpers import write_checkpoint

ROUND = 100  # requests
VOCAB_SIZE = 320
SHAPES = (  # head_dim 6, 20, 24; the first one's weights cannot be packed
    {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 24, "intermediate_size": 33},
    {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 60, "intermediate_size": 64},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 192, "intermediate_size": 96},
)
SHARES = (0.02, 0.002, 1e-9)  # of the calls of a kernel that raise
MARGIN = 1e-3  # of the logits' standard deviation
EACH_DIFFERENCE = 1000  # tokens: so many must be equal for one that is not
MAX_GROWTH = 64 * 2**20  # bytes that a process may have gained in the second half of its rounds
TOLD = ["tokens", "aborted", "raised", "failed", "preempted", "blocks loaded", "near ties"]


class Injected(RuntimeError):
    """What a kernel raises here."""


@dataclass
class Asked:
    """One request of a round."""

    prompt: list[int]
    params: SamplingParams
    comes: int  # in this step of the round
    goes: int | None  # is aborted so many steps later
    found: list[list[int]] = field(default_factory=list)  # tokens of each sample
    reasons: list[str | None] = field(default_factory=list)  # of each sample's end
    expected: list[list[int]] = field(default_factory=list)


def random_requests(rng: random.Random, count: int) -> list[Asked]:
    """Prompts of 1 to 90 tokens, a third of them with one of three beginnings."""
    shared = [[rng.randrange(3, VOCAB_SIZE) for _ in range(60)] for _ in range(3)]
    asked, step = [], 0
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
        asked.append(Asked(prompt, params, step, rng.randint(0, 12) if rng.random() < 0.15 else None))
    return asked


def engine_for(model: Path, backend: str, rng: random.Random | None = None) -> LLMEngine:
    """The plain one has room for all; the one with kernels has little, if `rng` is given."""
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
    """Before or after a kernel, in this share of the calls of each."""
    places = [(DecodeRunner, "run"), (model, "add_and_norm"), (model, "silu_and_mul"), (step_attention, "attend_step")]
    places += [(matmul, "packed_linear"), (sampler, "find_peaks"), (sampler, "join_chunks")]
    real = {place: getattr(*place) for place in places}

    def wrapped(function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            moment = rng.random() / share
            if moment < 0.5:
                counts["raised"] += 1
                raise Injected("before a kernel")
            result = function(*arguments)
            if moment < 1:
                counts["raised"] += 1
                raise Injected("after a kernel")
            return result

        return call

    try:
        for where, name in places:
            setattr(where, name, wrapped(real[where, name]))
        yield
    finally:
        for (where, name), function in real.items():
            setattr(where, name, function)


def serve(engine: LLMEngine, asked: list[Asked], counts: Counter[str]) -> None:
    """All of them, with check_integrity() after each step. Then nothing may be left."""
    manager, step, waiting, going = engine.kv_cache_manager, 0, list(enumerate(asked)), {}
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1].comes <= step:
            number, request = waiting.pop(0)
            engine.add_request(str(number), request.prompt, request.params)
            if request.goes is not None:
                going[number] = step + request.goes
        for number in [number for number, end in going.items() if end <= step]:
            del going[number]
            output = engine.abort_request(str(number))
            if output is not None:
                counts["aborted"] += 1
                note(asked[number], output)
        for output in engine.step():
            note(asked[int(output.request_id)], output)
        manager.check_integrity()
        step += 1
    counts["steps"] += step
    assert manager.num_free_blocks == manager.num_blocks, f"{manager.num_blocks - manager.num_free_blocks} blocks leak"


def note(request: Asked, output) -> None:
    request.found = [list(sample.token_ids) for sample in output.outputs]
    request.reasons = [sample.finish_reason for sample in output.outputs]


def expect(engine: LLMEngine, asked: list[Asked]) -> None:
    """The plain engine's tokens of all, served at once."""
    for number, request in enumerate(asked):
        engine.add_request(str(number), request.prompt, request.params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            asked[int(output.request_id)].expected = [list(sample.token_ids) for sample in output.outputs]


def compare(engine: LLMEngine, asked: list[Asked], counts: Counter[str]) -> None:
    for number, request in enumerate(asked):
        assert len(request.found) in (0, len(request.expected)), f"request {number}: {len(request.found)} samples"
        samples = zip(request.found, request.expected, request.reasons, strict=False)
        for i, (found, expected, reason) in enumerate(samples):
            counts["tokens"] += len(found)
            counts["failed"] += reason == "error"
            told = f"request {number}, sample {i}: {len(found)} of {len(expected)} tokens, {reason}"
            assert len(found) == len(expected) if reason == "length" else len(found) <= len(expected), told
            other = next((at for at, token in enumerate(found) if token != expected[at]), None)
            if other is not None:
                counts["near ties"] += 1
                check_tie(engine, request, expected[:other], found[other], expected[other], told)


def check_tie(engine: LLMEngine, request: Asked, before: list[int], found: int, expected: int, told: str) -> None:
    """Two tokens may change places if their logits are as good as equal. Sampled ones: see the count of them."""
    if request.params.temperature:
        return
    logits = plain_logits(engine, request.prompt + before)
    margin = float((logits[expected] - logits[found]).abs() / logits.std())
    assert margin < MARGIN, f"{told}: token {found} after {len(before)}, not {expected}, margin {margin:.2g}"


def plain_logits(engine: LLMEngine, token_ids: list[int]) -> torch.Tensor:
    """After all of them, computed at once on a pool that serves nobody. float32 [vocab_size]"""
    backend, size = engine.executor.backend, engine.config.block_size
    blocks = -(-len(token_ids) // size)
    where = torch.arange(len(token_ids))
    table, new = torch.arange(blocks)[None], torch.arange(blocks)
    step = AttentionMetadata([0, len(where)], [len(where)], table, where, new)
    return backend.compute_logits(backend.forward(torch.tensor(token_ids), where, step)[-1:])[0].float()


def play_round(model: Path, plain: LLMEngine, seed: int, number: int, count: int, counts: Counter[str]) -> None:
    rng = random.Random(f"{seed} {number}")
    asked, engine = random_requests(rng, count), engine_for(model, "numba", rng)
    with raising(rng, SHARES[number // len(SHAPES) % len(SHARES)], counts):
        serve(engine, asked, counts)
    assert engine.kernels.uses_kernels
    stats = engine.stats()
    counts["preempted"] += stats.preemptions
    counts["blocks loaded"] += engine.host_tier.num_blocks_loaded
    counts["requests"] += count
    expect(plain, asked)
    compare(plain, asked, counts)


def memory() -> int:
    """Bytes of this process. Where the system does not say, 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def soak(args: argparse.Namespace) -> tuple[Counter[str], str | None]:
    """Counts, and what went wrong."""
    counts, sizes = Counter[str](), []
    rounds = range(-(-args.requests // ROUND)) if args.round is None else [args.round]
    with tempfile.TemporaryDirectory() as folder:
        models = [Path(folder) / str(i) for i in range(len(SHAPES))]
        for path, shape in zip(models, SHAPES, strict=True):
            path.mkdir()
            write_checkpoint(path, max_position_embeddings=160, **shape)
        plain = [engine_for(path, "torch") for path in models]
        for number in tqdm(rounds, unit=" rounds", disable=None):
            kind = number % len(SHAPES)
            try:
                play_round(models[kind], plain[kind], args.seed, number, min(ROUND, args.requests), counts)
            except Exception as error:
                return counts, f"round {number}: {type(error).__name__}: {error}"
            gc.collect()  # an engine is a cycle
            sizes.append(memory())
    counts["KiB gained"] = (sizes[-1] - sizes[len(sizes) // 2]) // 1024
    if counts["near ties"] * EACH_DIFFERENCE > max(counts["tokens"], EACH_DIFFERENCE):
        return counts, f"{counts['near ties']} of {counts['tokens']} tokens differ"
    if counts["KiB gained"] * 1024 > MAX_GROWTH:
        return counts, f"the process has grown by {counts['KiB gained']:,} KiB"
    return counts, None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.soak --kernels", description=__doc__.partition("\n")[0])
    made.add_argument("--requests", type=int, default=20_000)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--round", type=int, help="play this one only")
    made.add_argument("--threads", type=int, default=2, help="workers of a kernel (default: %(default)s)")
    return made


def main(argv: list[str]) -> int:
    args, before = parser().parse_args(argv), torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        counts, fault = soak(args)
    finally:
        torch.set_num_threads(before)
    told = ", ".join(f"{counts[what]:,} {what}" for what in TOLD)
    print(f"{counts['requests']:,} requests in {counts['steps']:,} steps: {told}; {counts['KiB gained']:,} KiB gained")
    print(f"seed {args.seed}: {fault or 'no fault'}")
    return 1 if fault else 0
