"""nanovllm inspect: a calculator. Parameters, bytes, and how many sequences fit, from config.json alone."""

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from ..checkpoints.sizes import DTYPE_BYTES, SHAPES, Dimensions
from .common import one_line_errors
from .inspect_report import make_report, show


def show_names(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo("\n".join(SHAPES))
        context.exit()


OPTIONS = [
    click.Option(["--list"], is_flag=True, is_eager=True, expose_value=False, callback=show_names, help="known names"),
    click.Option(["--revision"], help="of a model of the hub: a branch, a tag or a commit"),
    click.Option(
        ["--dtype"],
        type=click.Choice(["auto", *DTYPE_BYTES]),
        default="auto",
        show_default=True,
        help="of weights, keys and values; auto is float32 in a machine's memory, elsewhere the model's own",
    ),
    click.Option(["--memory"], metavar="SIZE", help="such as 24GiB; default: the GPU's here, or else the machine's"),
    click.Option(
        ["--gpu-memory-utilization", "share"],
        type=float,
        default=0.9,
        show_default=True,
        help="share of the memory for weights and pool; the rest is for activations",
    ),
    click.Option(["--block-size"], type=int, default=16, show_default=True, help="slots in a block"),
    click.Option(["--max-model-len"], type=int, help="longest prompt + output; default: as the model was trained for"),
    click.Option(["--length", "lengths"], type=int, multiple=True, help="of the sequences that are to fit; several"),
    click.Option(["--bandwidth"], metavar="SIZE", help="of the memory, such as 3.35TB/s: how long a step takes then"),
    click.Option(["--json", "as_json"], is_flag=True, help="the same numbers as JSON"),
]


@click.command(params=OPTIONS)
@click.argument("model")
def inspect(model: str, revision: str | None, as_json: bool, **options: Any) -> int:
    """Say what a model needs, and what fits beside it.

    MODEL is a checkpoint folder, a config.json, a name of the hub, or a model known by its name (--list). No weights
    are read. A sequence in one piece reserves max_model_len slots; in blocks it has those that it fills.
    """
    with one_line_errors():
        report = make_report(find_model(model, revision), **options)
        click.echo(json.dumps({"model": model} | report, indent=2) if as_json else show(model, report))
    return 0


def find_model(model: str, revision: str | None) -> Dimensions:
    """Raises ValueError, with both readings, for a name that stands for nothing."""
    if not os.path.exists(model) and model.lower() in SHAPES:
        return SHAPES[model.lower()]
    if not os.path.exists(model) and "/" not in model:
        near = get_close_matches(model.lower(), SHAPES, n=1)
        hint = f"did you mean {near[0]}?" if near else "--list has those that are known"
        raise ValueError(f"there is no folder {Path(model).absolute()}, and no model known as {model}: {hint}")
    return read_config(model, revision)


def read_config(model: str, revision: str | None) -> Dimensions:
    """Of a folder, a file, or a name of the hub. It imports torch, as all that is core does."""
    from ..checkpoints.entries import Entries
    from ..checkpoints.hub import find_config
    from ..checkpoints.model_config import model_config

    path = find_config(model, revision)
    return model_config(Entries.read(path), Entries({}, path))
