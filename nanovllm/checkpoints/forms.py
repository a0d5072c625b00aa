"""Weights that are not read, each told by its name: pickles, GGUF, adapters, a publisher's own format."""

import shlex
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from .model_config import read_model_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONVERT = (
    "import glob, sys, torch; from safetensors.torch import save_file; save_file({name: weight.contiguous().clone() "
    "for file in glob.glob(glob.escape(sys.argv[1]) + '/pytorch_model*.bin') "
    "for name, weight in torch.load(file, map_location='cpu', weights_only=True).items()}, "
    "sys.argv[1] + '/model.safetensors', {'format': 'pt'})"
)
OTHER_FORMS = {  # pattern of a file's name: what it is, and what to do; the first that fits is told
    "adapter_config.json": "an adapter, not a whole model: merge it into its base model, and save that",
    "*.gguf": "GGUF, llama.cpp's format: take the same model's safetensors",
    "consolidated*": "its publisher's own format: take the same model's safetensors in transformers' format",
    "tf_model.h5": "TensorFlow's format: take the same model's safetensors",
    "flax_model.msgpack": "Flax's format: take the same model's safetensors",
    "*.onnx": "ONNX: take the same model's safetensors",
    "*.safetensors": f"but no {INDEX} that lists it, and no {WEIGHTS}",
    "*.pt": "a pickle: take the same model's safetensors",
    "*.pth": "a pickle: take the same model's safetensors",
}


def check_form(path: Path) -> None:
    """Raise ValueError, naming the form of `path`, unless it is a folder with safetensors weights."""
    if path.is_file() and path.suffix == ".safetensors":
        raise ValueError(f"{path} is one file of a checkpoint: name its folder")
    if path.is_file():
        what = next((f", {what}" for form, what in OTHER_FORMS.items() if fnmatch(path.name, form)), "")
        raise ValueError(f"{path} is a file, not a checkpoint's folder{what}")
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if why := why_refused(names):
        if "config.json" in names:
            read_model_config(path)  # another architecture need not be converted
        command = f": convert it with: {convert_command(path)}" if has_pickle(names) else ""
        raise ValueError(f"{path} {why}{command}")


def why_refused(names: Iterable[str]) -> str | None:
    """Return the end of "FOLDER ..." if these files hold no safetensors weights; None if they do.

    >>> why_refused(["config.json", "model.safetensors", "pytorch_model.bin"])
    >>> why_refused(["model-q4.gguf"])
    "has model-q4.gguf, GGUF, llama.cpp's format: take the same model's safetensors"
    """
    names = list(names)
    if WEIGHTS in names or INDEX in names:
        return None
    if not names:
        return "is not a checkpoint folder: it is empty"
    if has_pickle(names):
        return "has its weights as pytorch_model.bin, a pickle, and no safetensors"
    for form, what in OTHER_FORMS.items():
        for name in names:
            if fnmatch(name, form):
                return f"has {name}, {what}"
    return f"is not a checkpoint folder: it has no {WEIGHTS} and no {INDEX}"


def has_pickle(names: Iterable[str]) -> bool:
    return any(fnmatch(name, "pytorch_model*.bin*") for name in names)


def convert_command(folder: Path) -> str:
    """Return a command that writes model.safetensors beside the pytorch_model.bin, whole or in shards."""
    return f'python -c "{CONVERT}" {shlex.quote(str(folder))}'
