"""nanovllm bench: measure this engine, or any server. The benchmarks are in nanovllm/bench/."""

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
ResolveModel = Callable[[dict[str, Any], Any], dict[str, Any]]  # (engine options, benchmark options)


class Benchmark(NamedTuple):
    """A benchmark: a function, and the dataclass with its options and help text."""

    function: str  # "module:name"
    options: type
    takes_engine: bool = True  # whether it builds an engine, and its command has the engine's options
    engine: Mapping[str, dict[str, Any]] = MappingProxyType({})  # changes to the engine's options


OFFLOAD_OPTIONS = {  # the pool must overflow to the host
    "offload_policy": {"default": "load"},
    "kv_cache_tokens": {"help": "size of the KV cache in tokens; default: too few for two prompts"},
    "kv_offloading_tokens": {"help": "size of the host's KV cache in tokens; default: enough for several prompts"},
}
BENCHMARKS = {
    "throughput": Benchmark("nanovllm.bench.throughput:throughput", bench_options.Throughput),
    "latency": Benchmark("nanovllm.bench.throughput:latency", bench_options.Latency),
    "prefix": Benchmark("nanovllm.bench.throughput:prefix", bench_options.Prefix),
    "offload": Benchmark("nanovllm.bench.throughput:offload", bench_options.Offload, engine=OFFLOAD_OPTIONS),
    "host": Benchmark("nanovllm.bench.host:host", bench_options.Host),
    "http": Benchmark("nanovllm.bench.load:http", bench_options.Http),
    "serve": Benchmark("nanovllm.bench.load:serve_load", bench_options.ServerLoad, takes_engine=False),
}
# Benchmarks that have moved to stages/bench: {old name: new name}.
MOVED_NAMES = {name: name for name in ("speculation", "published", "paged", "routing", "launches")} | {"peers": "race"}


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure this engine (throughput, latency, prefixes, offload, the host, HTTP), and any server under load."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def command_of(name: str, benchmark: Benchmark, resolve_model: ResolveModel) -> click.Command:
    """Return the command of a benchmark. `resolve_model` returns the engine's options with a folder as the model."""
    option_fields, json_help = fields(benchmark.options), "write JSON to a file; - is standard output"
    params: list[click.Parameter] = [option(field, **settings_of(field)) for field in option_fields]
    params.append(click.Option(["--json", "json_file"], type=PATH, help=json_help))
    if benchmark.takes_engine:
        params += engine_options(**benchmark.engine)

    def run(json_file: str | None, **values: Any) -> int:
        options = benchmark.options(**{field.name: values.pop(field.name) for field in option_fields})

        def measure() -> Report:
            arguments = [options]
            if benchmark.takes_engine:
                arguments.insert(0, resolve_model(split(values)[0], options))
            if isinstance(options, bench_options.Throughput) and options.prompts:
                arguments.append([line for line in read_prompt(options.prompts).split("\n") if line.strip()])
            module, _, function = benchmark.function.partition(":")
            report: Report = getattr(import_module(module), function)(*arguments)
            return report

        report = measure_and_report(measure, json_file)
        return 1 if report["measured"].get("server", {}).get("failed") else 0

    return click.Command(name, callback=run, params=params, help=getdoc(benchmark.options))


def settings_of(field: Field[Any]) -> dict[str, Any]:
    """Return the settings of a click.Option that are in a field's metadata."""
    names = ("type", "multiple", "metavar", "envvar")
    settings = {name: field.metadata[name] for name in names if name in field.metadata}
    return settings | {"type": PATH} if settings.get("metavar") == "FILE" else settings


def measure_and_report(measure: Callable[[], Report], json_file: str | None) -> Report:
    """Measure, write the report's JSON if a file is given, and print the report as text.

    Raise click.UsageError before measuring if the file can't be written.
    """
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
    """Return a hidden command that raises an error with the benchmark's new name."""

    def run(arguments: tuple[str, ...]) -> NoReturn:
        new_command = f"python -m stages.bench {MOVED_NAMES[name]}"
        raise click.UsageError(f"nanovllm bench {name} is now: {new_command} (in a clone of the repository)")

    ignored_arguments = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(name, settings, run, [ignored_arguments], add_help_option=False, hidden=True)


for _name, _benchmark in BENCHMARKS.items():
    bench.add_command(command_of(_name, _benchmark, lambda engine, options: with_checkpoint(engine)))
for _name in MOVED_NAMES:
    bench.add_command(moved_command(_name))
