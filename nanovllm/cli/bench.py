"""nanovllm bench: measure this engine, or any server. The benchmarks are in ../bench."""

import json
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import click

from ..bench import bench_options
from .click_options import PATH, engine_options, option, split, usage_errors, with_checkpoint
from .terminal import read_prompt

Report = dict[str, Any]
WithModel = Callable[[dict[str, Any], Any], dict[str, Any]]


class Benchmark(NamedTuple):
    """A benchmark: a function, and the dataclass with its options and help text."""

    function: str  # module:name
    options: type
    takes_engine: bool = True
    engine: Mapping[str, dict[str, Any]] = MappingProxyType({})  # overrides for engine options, by name


OFFLOAD = {  # its pool must overflow to the host
    "offload_policy": {"default": "load"},
    "kv_cache_tokens": {"help": "size of the KV cache in tokens; default: too few for two prompts"},
    "kv_offloading_tokens": {"help": "size of the host's KV cache in tokens; default: enough for several prompts"},
}
BENCHMARKS = {
    "throughput": Benchmark("nanovllm.bench.throughput:throughput", bench_options.Throughput),
    "latency": Benchmark("nanovllm.bench.throughput:latency", bench_options.Latency),
    "prefix": Benchmark("nanovllm.bench.throughput:prefix", bench_options.Prefix),
    "offload": Benchmark("nanovllm.bench.throughput:offload", bench_options.Offload, engine=OFFLOAD),
    "http": Benchmark("nanovllm.bench.load:http", bench_options.Http),
    "serve": Benchmark("nanovllm.bench.load:serve_load", bench_options.ServerLoad, takes_engine=False),
}
# Benchmarks that have moved to stages/bench: {old name: new name}.
MOVED = {name: name for name in ("speculation", "published", "paged", "routing", "launches")} | {"peers": "race"}


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure this engine (throughput, latency, the prefix cache, offload, HTTP), and any server under load."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def command_of(name: str, benchmark: Benchmark, with_model: WithModel) -> click.Command:
    """Return the command of a benchmark. `with_model` returns the engine's options with the folder of its model."""
    option_fields, json_help = fields(benchmark.options), "write JSON to a file; - is standard output"
    params: list[click.Parameter] = [option(each, **settings_of(each)) for each in option_fields]
    params.append(click.Option(["--json", "json_file"], type=PATH, help=json_help))
    if benchmark.takes_engine:
        params += engine_options(**benchmark.engine)

    def run(json_file: str | None, **values: Any) -> int:
        options = benchmark.options(**{each.name: values.pop(each.name) for each in option_fields})

        def measure() -> Report:
            arguments = [options]
            if benchmark.takes_engine:
                arguments.insert(0, with_model(split(values)[0], options))
            if isinstance(options, bench_options.Throughput) and options.prompts:
                arguments.append([line for line in read_prompt(options.prompts).split("\n") if line.strip()])
            module, _, function = benchmark.function.partition(":")
            report: Report = getattr(import_module(module), function)(*arguments)
            return report

        report = show(measure, json_file)
        return 1 if report["measured"].get("server", {}).get("failed") else 0

    return click.Command(name, callback=run, params=params, help=getdoc(benchmark.options))


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


def moved_command(name: str) -> click.Command:
    """Return a hidden command that fails with the benchmark's new name."""

    def run(arguments: tuple[str, ...]) -> NoReturn:
        new = f"python -m stages.bench {MOVED[name]}"
        raise click.UsageError(f"nanovllm bench {name} is now: {new} (in a clone of the repository)")

    rest = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(name, settings, run, [rest], add_help_option=False, hidden=True)


for _name, _benchmark in BENCHMARKS.items():
    bench.add_command(command_of(_name, _benchmark, lambda engine, options: with_checkpoint(engine)))
for _name in MOVED:
    bench.add_command(moved_command(_name))
