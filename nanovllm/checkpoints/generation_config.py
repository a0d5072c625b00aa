"""Sampling parameters that a checkpoint recommends: its generation_config.json, read as vLLM 0.32 reads it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .entries import Entries, read_json, read_json_if_any
from .model_config import read_eos

NAMES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("temperature", "top_k", "top_p", "min_p", "max_new_tokens"),
)
OF_CONFIG_JSON = ("min_p", "max_new_tokens")  # what of an older config.json transformers takes for the same


def default_sampling_params(
    folder: str | Path, generation_config: str | Path = "auto", override: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return fields of SamplingParams for a request that brings none; max_new_tokens is max_tokens.

    "auto": those of the checkpoint in `folder`; "vllm": none; or those of another folder. `override` comes on top.
    do_sample has no effect, as in vLLM: a temperature counts without it. Raise ValueError, naming file and entry.
    """
    entries = {} if generation_config == "vllm" else recommended(Path(folder), generation_config)
    entries |= {name: value for name, value in (override or {}).items() if name in NAMES}
    given = {name: value for name, value in entries.items() if value is not None}
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    return given


def recommended(folder: Path, generation_config: str | Path) -> dict[str, Any]:
    if generation_config != "auto":
        folder = Path(generation_config)
        if not folder.is_dir():
            raise ValueError(f"generation_config must be auto, vllm or a folder, not {str(generation_config)!r}")
    path = folder / "generation_config.json"
    names: tuple[str, ...] = NAMES
    if not path.exists():
        path, names = folder / "config.json", OF_CONFIG_JSON
    entries = Entries(read_json(path), path)
    for name in names:
        value = entries.values.get(name)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise entries.error(name, "a number")
    return {name: entries.values.get(name) for name in names}


def eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Return the end-of-text ids of a folder: of generation_config.json, or else of config.json."""
    paths = [Path(folder) / name for name in ("generation_config.json", "config.json")]
    generation, config = (Entries(read_json_if_any(path), path) for path in paths)
    return read_eos(generation) or read_eos(config)
