"""Checkpoint folders of published shapes: a config.json alone, for engines that make random weights."""

import atexit
import json
import shutil
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

from ...checkpoints.sizes import SHAPES, Shape

IN_THE_FAMILY = ("attention_bias", "attention_output_bias", "qk_norm")  # a model's type says so


@cache
def folder_of_shape(name: str) -> Path:
    """A folder that is gone when the process ends. `name`: one of SHAPES."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = Path(made, name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries(SHAPES[name])))
    return folder


def entries(shape: Shape) -> dict[str, object]:
    """Of a config.json, as transformers and this engine read it."""
    given = {key: value for key, value in asdict(shape).items() if key not in IN_THE_FAMILY and value is not None}
    kind, architecture = family(shape)
    return given | {"model_type": kind, "architectures": [f"{architecture}ForCausalLM"], "eos_token_id": 2}


def family(shape: Shape) -> tuple[str, str]:
    """
    >>> family(SHAPES["qwen3-0.6b"]), family(SHAPES["mistral-7b-v0.3"]), family(SHAPES["mistral-7b-v0.1"])
    (('qwen3', 'Qwen3'), ('llama', 'Llama'), ('mistral', 'Mistral'))
    """
    if shape.qk_norm:
        return "qwen3", "Qwen3"
    if shape.attention_bias:
        return "qwen2", "Qwen2"
    return ("mistral", "Mistral") if shape.sliding_window else ("llama", "Llama")
