"""nanovllm bench: measure this engine, its server, and other engines. The benchmarks are in ../bench."""

import json
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from ..bench import bench_options
from ..options.config import EngineConfig
from .click_options import PATH, engine_options, option, split, usage_errors, with_checkpoint
from .terminal import read_prompt

Report = dict[str, Any]


class Benchmark(NamedTuple):
    """A command: a function of ../bench, with the options and the help of a dataclass."""

    function: str  # module:name
    options: type
    takes_engine: bool = True
    engine: Mapping[str, dict[str, Any]] = MappingProxyType({})  # other defaults and help texts of engine options


MODEL = "checkpoint folder, or a model on the hub"
MODEL_OR_SHAPE = {
    "model": {"default": None, "help": f"{MODEL}; default: {EngineConfig.model}, unless --shape is given"}
}
OFFLOAD = {  # its engine needs a pool that overflows to the host
    "offload_policy": {"default": "load"},
    "kv_cache_tokens": {"help": "size of the KV cache in tokens; default: too few for two prompts"},
    "kv_offloading_tokens": {"help": "size of the host's KV cache in tokens; default: enough for several prompts"},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "model": {"default": None, "help": f"{MODEL}, instead of --shape"},
    "max_model_len": {"help": "longest prompt plus output, in tokens; default: 4096, or the model's limit if lower"},
    "max_num_seqs": {"default": 256, "help": "most sequences that run at once"},
    "max_num_batched_tokens": {"default": 16384, "help": "most tokens in a step"},
}
SPECULATION = MODEL_OR_SHAPE | {
    "speculative_config": {
        "default": '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    }
}
ROUTING: dict[str, dict[str, Any]] = {
    "kv_cache_tokens": {"default": 4096, "help": "size of an engine's KV cache in tokens"},
    "seed": {"help": "seed of prefixes, lengths and arrivals"},
}
BENCHMARKS = {
    "throughput": Benchmark("throughput:throughput", bench_options.Throughput),
    "latency": Benchmark("throughput:latency", bench_options.Latency),
    "prefix": Benchmark("throughput:prefix", bench_options.Prefix),
    "offload": Benchmark("throughput:offload", bench_options.Offload, engine=OFFLOAD),
    "speculation": Benchmark("speculation:speculation", bench_options.Speculation, engine=SPECULATION),
    "http": Benchmark("load:http", bench_options.Http),
    "serve": Benchmark("load:serve_load", bench_options.ServerLoad, takes_engine=False),
    "peers": Benchmark("peers:peers", bench_options.Peers, engine=MODEL_OR_SHAPE),
    "published": Benchmark("throughput:published", bench_options.Published, engine=PUBLISHED),
    "paged": Benchmark("paged:paged", bench_options.Paged, takes_engine=False),
    "routing": Benchmark("routing:routing", bench_options.Routing, engine=ROUTING),
    "launches": Benchmark("launches:launches", bench_options.Launches, engine=MODEL_OR_SHAPE),
}


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure this engine (throughput, latency, the prefix cache, offload, HTTP, routing), and other engines too."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def command_of(name: str, benchmark: Benchmark) -> click.Command:
    """Return the command of a benchmark."""
    names, to_json = fields(benchmark.options), "write JSON to a file; - is standard output"
    given: list[click.Parameter] = [option(each, **settings_of(each)) for each in names]
    given.append(click.Option(["--json", "json_file"], type=PATH, help=to_json))
    if benchmark.takes_engine:
        given += engine_options(**benchmark.engine)

    def run(json_file: str | None, **values: Any) -> int:
        chosen = benchmark.options(**{each.name: values.pop(each.name) for each in names})

        def measure() -> Report:
            arguments = [chosen]
            if benchmark.takes_engine:
                arguments.insert(0, with_model(split(values)[0], chosen))
            if isinstance(chosen, bench_options.Throughput) and chosen.prompts:
                arguments.append([line for line in read_prompt(chosen.prompts).split("\n") if line.strip()])
            module, _, function = benchmark.function.partition(":")
            report: Report = getattr(import_module(f"...bench.{module}", __name__), function)(*arguments)
            return report

        report = show(measure, json_file)
        return 1 if report["measured"].get("server", {}).get("failed") else 0

    return click.Command(name, callback=run, params=given, help=getdoc(benchmark.options))


def settings_of(field: Field[Any]) -> dict[str, Any]:
    """Return click's settings from the metadata of a field."""
    names = ("type", "multiple", "metavar", "envvar")
    settings = {name: field.metadata[name] for name in names if name in field.metadata}
    return settings | {"type": PATH} if settings.get("metavar") == "FILE" else settings


def show(measure: Callable[[], Report], json_file: str | None) -> Report:
    """Measure, print the report and write its JSON. Fail before measuring if the file can't be written."""
    with usage_errors():
        if json_file not in (None, "-"):
            Path(json_file).open("a").close()
        report = measure()
    from ..bench.report import text

    if json_file:
        with click.open_file(json_file, "w", encoding="utf-8") as file:  # "-" is standard output
            file.write(json.dumps(report, indent=2) + "\n")
    click.echo(text(report), err=json_file == "-")
    return report


def with_model(engine: dict[str, Any], options: Any) -> dict[str, Any]:
    """Return the engine's options with a folder as the model: a checkpoint, or a shape with random weights.

    Raise ValueError if both are given, or if the checkpoint is missing.
    """
    shape: str | None = getattr(options, "shape", None)
    if shape is not None and engine["model"] is not None:
        raise ValueError(f"--shape {shape} and --model {engine['model']} must not both be set")
    if shape is None and engine["model"] is None and isinstance(options, bench_options.Published):
        shape = bench_options.PUBLISHED_SHAPE
    if shape is None:
        return with_checkpoint(engine | {"model": engine["model"] or EngineConfig.model})
    from ..bench.engine import folder_of_shape

    random_weights = {"model": str(folder_of_shape(shape)), "load_format": "dummy", "skip_tokenizer_init": True}
    return {key: value for key, value in engine.items() if key != "revision"} | random_weights


for _name, _benchmark in BENCHMARKS.items():
    bench.add_command(command_of(_name, _benchmark))
