"""The benchmarks of `python -m stages.bench` that measure the package, each with the options of a dataclass."""

from typing import Any

import click

from nanovllm.bench.bench_options import Latency, Prefix, Throughput
from nanovllm.cli.bench import Benchmark, command_of
from nanovllm.cli.click_options import with_checkpoint
from nanovllm.options.config import EngineConfig
from stages.bench.options import PUBLISHED_SHAPE, Launches, Paged, Peers, Published, Routing, Speculation

MODEL = "checkpoint folder, or a model on the hub"
MODEL_OR_SHAPE = {
    "model": {"default": None, "help": f"{MODEL}; default: {EngineConfig.model}, unless --shape is given"}
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "model": {"default": None, "help": f"{MODEL}, instead of --shape"},
    "max_model_len": {"help": "longest prompt plus output, in tokens; default: 4096, or the model's limit if lower"},
    "max_num_seqs": {"default": 256, "help": "most sequences that run at once"},
    "max_num_batched_tokens": {"default": 16384, "help": "most tokens in a step"},
}
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
SPECULATION = MODEL_OR_SHAPE | {"speculative_config": {"default": DRAFTS}}
ROUTING: dict[str, dict[str, Any]] = {
    "kv_cache_tokens": {"default": 4096, "help": "size of an engine's KV cache in tokens"},
    "seed": {"help": "seed of prefixes, lengths and arrivals"},
}
BENCHMARKS = {
    "race": Benchmark("stages.bench.peers:peers", Peers, engine=MODEL_OR_SHAPE),
    "throughput": Benchmark("stages.bench.with_transformers:throughput", Throughput),
    "latency": Benchmark("stages.bench.with_transformers:latency", Latency),
    "prefix": Benchmark("stages.bench.with_transformers:prefix", Prefix),
    "published": Benchmark("stages.bench.with_transformers:published", Published, engine=PUBLISHED),
    "speculation": Benchmark("stages.bench.speculation:speculation", Speculation, engine=SPECULATION),
    "routing": Benchmark("stages.bench.routing:routing", Routing, engine=ROUTING),
    "paged": Benchmark("stages.bench.paged:paged", Paged, takes_engine=False),
    "launches": Benchmark("stages.bench.launches:launches", Launches, engine=MODEL_OR_SHAPE),
}


def with_model(engine: dict[str, Any], options: Any) -> dict[str, Any]:
    """Return the engine's options with a folder as the model: a checkpoint, or a shape with random weights.

    Raise ValueError if both are given, or if the checkpoint is missing.
    """
    shape: str | None = vars(options).get("shape")
    if shape is not None and engine["model"] is not None:
        raise ValueError(f"--shape {shape} and --model {engine['model']} must not both be set")
    if shape is None and engine["model"] is None and isinstance(options, Published):
        shape = PUBLISHED_SHAPE
    if shape is None:
        return with_checkpoint(engine | {"model": engine["model"] or EngineConfig.model})
    from stages.bench.models import folder_of_shape

    random_weights = {"model": str(folder_of_shape(shape)), "load_format": "dummy", "skip_tokenizer_init": True}
    return {key: value for key, value in engine.items() if key != "revision"} | random_weights


COMMANDS = {name: command_of(name, benchmark, with_model) for name, benchmark in BENCHMARKS.items()}
bench = click.Group("python -m stages.bench", COMMANDS)
