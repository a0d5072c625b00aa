"""What the commands share: their flags, the engine that these ask for, and the line about its pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .config import EngineConfig
from .flags import Flag, flags, knobs
from .kv_cache import PoolReport
from .llm import LLM
from .sampling import SamplingParams

SAMPLING, ENGINE = "Sampling", "Engine"  # titles in the help


def sampling_flags(**defaults: Any) -> list[click.Parameter]:
    """The fields of SamplingParams; but a seed is the engine's, or every request would draw the same."""
    return [
        *flags(SamplingParams, SAMPLING, **defaults),
        Flag("--stop", SAMPLING, multiple=True, help="a text that ends an output; may be given several times"),
        Flag("--stop-token-ids", SAMPLING, type=int, multiple=True, help="a token that ends an output; likewise"),
        Flag("--ignore-eos", SAMPLING, is_flag=True, help="go on after the token that ends a text"),
    ]


def engine_flags() -> list[click.Parameter]:
    return flags(EngineConfig, ENGINE)


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all flags into those of the engine and those of SamplingParams."""
    engine = {option.name: values[option.name] for option in knobs(EngineConfig)}
    return engine, {name: value for name, value in values.items() if name not in engine}


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """What the caller did wrong ends the command with one line and exit status 2."""
    try:
        yield
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    except (ValueError, RecursionError) as error:
        raise click.UsageError(str(error)) from None


def build_llm(engine: dict[str, Any]) -> LLM:
    """Raises ValueError for a bad value or checkpoint."""
    find_checkpoint(engine["model"])
    return LLM(**engine)


def find_checkpoint(model: str) -> None:
    """Raises ValueError if there is no such folder: the default's path is that of this repository."""
    if not Path(model).is_dir():
        raise ValueError(f"there is no folder {Path(model).absolute()}: name a checkpoint with --model")


def pool_line(pool: PoolReport) -> str:
    """What a run took of the pool when most of it was used."""
    share = pool.used / max(pool.held, 1)
    return (
        f"KV slots: {pool.held:,} of {pool.num_slots:,} reserved, {pool.used:,} used ({share:.0%}) |{pool.strip(32)}|"
    )
