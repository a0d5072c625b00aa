"""One decode step, stage against stage, by batch, context, model and dtype: `python -m stages.decode`.

A step is measured alone: each sequence has a context of the given length, and one token of each goes through the model
again and again. Stages take turns, and in between a large tensor is read once, which gives the memory's bandwidth: so
what wanders in a machine hits all alike. A ratio is the median of the rounds' ratios.
"""

import copy
import gc
import importlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from tqdm import tqdm

from models.training.checkpoint import write_checkpoint
from stages import figures
from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig

STAGES = {
    "s1": "stages.s1_contiguous_cache",
    "s2": "stages.s2_block_manager",
    "s3": "stages.s3_paged_attention",
    "s4": "stages.s4_continuous_batching",
    "s5": "stages.s5_cow_sampling",
    "s6": "stages.s6_prefix_caching",
    "s7": "stages.s7_cpu_offload",
}
STORYTELLER = figures.ROOT / "models" / "storyteller"
MODEL_135M = ModelConfig(  # the shape of SmolLM-135M
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)
LONGEST = 4096
MOST_ROUNDS, LEAST_ROUNDS, SECONDS = 25, 5, 1.5  # of a case: rounds until so much time has passed
TOLERANCE = 0.05  # a ratio that is nearer to 1 is neither a gain nor a loss


class Case(NamedTuple):
    model: str  # "storyteller": its shape, with random weights and more positions | "135M"
    dtype: str
    batch: int
    context: int

    @property
    def key(self) -> str:
        return f"{self.model}_{self.dtype}_{self.batch}_{self.context}"


BATCHES, SHORT = (1, 2, 4, 8, 16, 32), 128
CONTEXTS, MANY = (128, 512, 1000, 2000, 4000), 16
BATCHES_AND_CONTEXTS = dict.fromkeys([*((b, SHORT) for b in BATCHES), (1, 1000), *((MANY, c) for c in CONTEXTS)])
CASES = [
    *(Case("storyteller", dtype, *shape) for dtype in ("float32", "bfloat16") for shape in BATCHES_AND_CONTEXTS),
    *(Case("135M", "bfloat16", batch, context) for context in (128, 512) for batch in (1, 8, 32)),
]


@contextmanager
def random_model(config: ModelConfig) -> Iterator[Path]:
    """A checkpoint folder without a tokenizer: small random weights, the same for every machine."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() == 2 else torch.nn.init.ones_(parameter)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(model, Path(folder))
        yield Path(folder)


class DecodeStep:
    """A stage with a batch in the middle of its decoding; a call computes one step."""

    def __init__(self, package: str, folder: Path, case: Case, **options: Any) -> None:
        stage = importlib.import_module(package)
        if hasattr(stage.EngineConfig, "reservation"):
            options |= {"reservation": "request"}
        tokens = case.batch * (case.context + 32 + options.get("block_size", 0))
        llm = stage.LLM(folder, dtype=case.dtype, kv_cache_tokens=tokens, max_num_seqs=case.batch, **options)
        self.engine = getattr(llm, "llm_engine", llm)  # what holds the parts: until stage 4 the LLM itself
        params, prompt = stage.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), [1] * case.context
        inputs = getattr(self.engine, "input_processor", None) or self.engine.input_processor
        made = (inputs.process(str(i), prompt, params) for i in range(case.batch))
        self.seqs = [seq[0] if isinstance(seq, list) else seq for seq in made]  # from stage 5 on one for each sample
        manager = getattr(self.engine, "block_manager", None) or self.engine.kv_cache_manager
        for seq in self.seqs:
            manager.allocate(seq)
            seq.num_computed_tokens = case.context - 1
        pool = self.engine.kv_cache
        for tensor in [pool.blocks] if hasattr(pool, "blocks") else [pool.k, pool.v]:
            tensor.fill_(0.01)  # memory that was never written is not there yet, and quick to read
        self.num_kv_bytes = case.batch * case.context * pool.bytes_per_token
        weights = self.engine.model_runner._model.parameters()
        self.num_bytes = self.num_kv_bytes + sum(weight.nbytes for weight in weights)  # what a step has to read

    def __call__(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.engine.model_runner.run([(seq, 1) for seq in self.seqs])
        return time.perf_counter() - started

    def scattered(self, seed: int = 0) -> "DecodeStep":
        """The same batch in the same pool, but its blocks are dealt out again, in random order."""
        other = copy.copy(self)
        other.seqs = [copy.copy(seq) for seq in self.seqs]
        blocks = [block for seq in self.seqs for block in seq.block_table]
        random.Random(seed).shuffle(blocks)
        dealt = iter(blocks)
        for seq in other.seqs:
            seq.block_table = list(itertools.islice(dealt, len(seq.block_table)))
        return other


class Reading:
    """A tensor that no private cache holds; a call reads it once and gives the seconds."""

    def __init__(self, num_bytes: int = 2**28) -> None:
        self._numbers = torch.ones(num_bytes // 4)
        self.num_bytes = num_bytes

    def __call__(self) -> float:
        started = time.perf_counter()
        self._numbers.sum()
        return time.perf_counter() - started


def in_turn(calls: Mapping[str, Callable[[], float]]) -> list[dict[str, float]]:
    """The seconds of each call, round after round; two rounds before the first warm up. Each round has an order of its
    own, so that none always follows the same one and finds its memory in the processor's caches.
    """
    rounds: list[dict[str, float]] = []
    order, rng, started = list(calls), random.Random(0), time.perf_counter()
    while len(rounds) < 2 + LEAST_ROUNDS or (len(rounds) < 2 + MOST_ROUNDS and time.perf_counter() - started < SECONDS):
        rng.shuffle(order)
        rounds.append({name: calls[name]() for name in order})
    return rounds[2:]


def measure(case: Case, folder: Path, names: Sequence[str], reading: Reading) -> dict[str, Any]:
    """Of each stage milliseconds a step, and which share of the memory's bandwidth that is if every weight, key and
    value is read once; of each pair how many times as fast the later stage is. `moved_bytes`: where keys and values are
    read, written to a copy, and read again there.
    """
    steps = {name: DecodeStep(STAGES[name], folder, case) for name in names}
    rounds = in_turn({**steps, "read": reading})
    first = steps[names[0]]
    bandwidths = [reading.num_bytes / r["read"] for r in rounds]
    sizes = {"bytes": first.num_bytes, "moved_bytes": first.num_bytes + 2 * first.num_kv_bytes}
    result = {**case._asdict(), **sizes, "bandwidth": statistics.median(bandwidths)}
    for name in names:
        result[f"{name}_ms"] = 1000 * statistics.median(r[name] for r in rounds)
        speeds = [first.num_bytes / r[name] / bandwidth for r, bandwidth in zip(rounds, bandwidths, strict=True)]
        result[f"{name}_of_bandwidth"] = statistics.median(speeds)
    for a, b in itertools.combinations(names, 2):
        result[f"{b}_over_{a}"] = statistics.median(r[a] / r[b] for r in rounds)
    gc.collect()
    return result


def by_batch(results: Mapping[str, Mapping[str, Any]], dtype: str) -> dict[int, float]:
    """How many times as fast stage 3 is as stage 2, in batches of short contexts."""
    return {batch: results[Case("storyteller", dtype, batch, SHORT).key]["s3_over_s2"] for batch in BATCHES}


def by_context(results: Mapping[str, Mapping[str, Any]], dtype: str) -> dict[int, float]:
    """The same in a large batch, by context length."""
    return {context: results[Case("storyteller", dtype, MANY, context).key]["s3_over_s2"] for context in CONTEXTS}


def where_it_begins(ratios: Mapping[int, float]) -> str:
    """
    >>> where_it_begins({1: 0.9, 8: 1.04, 16: 1.3, 32: 1.6})
    'faster in batches of 16 and more, 1.60 times as fast in one of 32'
    >>> where_it_begins({1: 0.9, 8: 1.3, 16: 1.0})
    'not faster in a batch of 16 (1.00 times)'
    """
    behind = [batch for batch, ratio in ratios.items() if ratio < 1 + TOLERANCE]
    largest = max(ratios)
    if largest in behind:
        return f"not faster in a batch of {largest} ({ratios[largest]:.2f} times)"
    first = min(batch for batch in ratios if batch > max(behind, default=0))
    return f"faster in batches of {first} and more, {ratios[largest]:.2f} times as fast in one of {largest}"


def where_it_ends(ratios: Mapping[int, float]) -> str:
    """
    >>> where_it_ends({128: 1.6, 512: 1.2, 1000: 1.01, 2000: 0.9})
    'the gain ends between 512 and 1,000 tokens (0.90 times as fast at 2,000)'
    >>> where_it_ends({128: 1.6, 512: 1.2})
    'the gain lasts to 512 tokens and beyond (1.20 times as fast at 512)'
    """
    within, longest = [context for context, ratio in ratios.items() if ratio >= 1 + TOLERANCE], max(ratios)
    if not within:
        where = "there is no gain"
    elif longest in within:
        where = f"the gain lasts to {longest:,} tokens and beyond"
    else:
        where = f"the gain ends between {max(within):,} and {min(c for c in ratios if c > max(within)):,} tokens"
    return f"{where} ({ratios[longest]:.2f} times as fast at {longest:,})"


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Where the gain over stage 2 ends, and one sequence alone against stage 1."""
    return {
        "gain": {
            dtype: f"at {SHORT} tokens each it is {where_it_begins(by_batch(results, dtype))}; in a batch of {MANY} "
            f"{where_it_ends(by_context(results, dtype))}"
            for dtype in ("float32", "bfloat16")
        },
        "alone": {
            "storyteller": results[Case("storyteller", "float32", 1, SHORT).key]["s3_over_s1"],
            "storyteller_bfloat16": results[Case("storyteller", "bfloat16", 1, SHORT).key]["s3_over_s1"],
            "storyteller_1000": results[Case("storyteller", "float32", 1, 1000).key]["s3_over_s1"],
            "135M": results[Case("135M", "bfloat16", 1, SHORT).key]["s3_over_s1"],
        },
    }


def line(result: Mapping[str, Any], names: Sequence[str]) -> str:
    """A case in a line: milliseconds, ratios, bytes, shares of the bandwidth."""
    shape = "{model:>11} {dtype:>8} batch {batch:>2} context {context:>4}".format(**result)
    times = "  ".join(f"{name} {result[f'{name}_ms']:6.1f} ms" for name in names)
    ratios = "  ".join(f"{b}/{a} {result[f'{b}_over_{a}']:.2f}" for a, b in itertools.combinations(names, 2))
    shares = "  ".join(f"{name} {result[f'{name}_of_bandwidth']:4.0%}" for name in names)
    size = "{:5.0f} MB ({:.0f} with a copy) at {:.0f} GB/s".format(
        result["bytes"] / 1e6, result["moved_bytes"] / 1e6, result["bandwidth"] / 1e9
    )
    return f"{shape}   {times}   {ratios}   {size}: {shares}"


def measure_all(cases: Sequence[Case] = CASES, names: Sequence[str] = ("s1", "s2", "s3")) -> dict[str, Any]:
    """Each case by its key."""
    results: dict[str, Any] = {}
    shape = replace(ModelConfig.from_folder(STORYTELLER), max_position_embeddings=LONGEST)
    with random_model(shape) as storyteller, random_model(MODEL_135M) as larger:
        folders, reading = {"storyteller": storyteller, "135M": larger}, Reading()
        for case in tqdm(cases, "decode steps"):
            results[case.key] = measure(case, folders[case.model], names, reading)
            tqdm.write(line(results[case.key], names))
    return results


def everything() -> dict[str, Any]:
    """All cases and what they come to: what results.json holds under "decode". Prints both."""
    cases = measure_all()
    words = summary(cases)
    for dtype, text in words["gain"].items():
        print(f"{dtype}, stage 3 against stage 2: {text}")
    print("one sequence, stage 3 over stage 1:", ", ".join(f"{k} {ratio:.2f}" for k, ratio in words["alone"].items()))
    return {"cases": cases, **words}


@click.command()
@click.option("--stage", "names", multiple=True, help="s1, s2, ...: only these, and save nothing")
@click.option("--case", "keys", multiple=True, help="model_dtype_batch_context: only these, and save nothing")
@click.option("--save/--no-save", default=True, help="into stages/results.json")
def main(names: tuple[str, ...], keys: tuple[str, ...], save: bool) -> None:
    """Measure one decode step of stages 1 to 3 against each other."""
    from stages import scoreboard

    if names or keys:
        chosen = [case for case in CASES if not keys or case.key in keys]
        measure_all(chosen, names or ("s1", "s2", "s3"))
        return
    results = everything()
    if save:
        scoreboard.save({"machine": scoreboard.machine(), "decode": results})


if __name__ == "__main__":
    main()
