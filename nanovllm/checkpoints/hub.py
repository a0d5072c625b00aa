"""Where a checkpoint lies: a folder is taken as it is, and the files of a name of the hub are fetched into its cache.

The cache, the token and offline mode are those of huggingface_hub: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.
"""

import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..core.llama import ModelConfig
from ..core.llama.entries import Entries, read_json
from .forms import INDEX, WEIGHTS, check_form, why_refused
from .hub_errors import one_line

SHIPPED = "models/storyteller"  # the default of EngineConfig.model: a folder of the repository, and no name of the hub
HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
FILES = [  # what is read beside the weights, of the top folder alone: no "original/..."
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    INDEX,
]


def find_checkpoint(model: str | Path, revision: str | None = None) -> Path:
    """The folder of the checkpoint `model`: a folder, or a name of the hub, ORG/NAME, fetched if it is not here.

    `revision` is a branch, a tag or a commit of the hub. A folder has none, and touches no network. Raises ValueError
    with one line that says what to do.
    """
    path = Path(model)
    if os.path.exists(path):  # unlike path.exists(), it never raises
        check_form(path)
        return path
    missing = f"there is no folder {path.absolute()}"
    if str(model) == SHIPPED:
        raise ValueError(f"{missing}: name another checkpoint")
    if not isinstance(model, str) or not HUB_NAME.fullmatch(model):
        raise ValueError(f"{missing}, and {str(model)!r} is no name of the hub, which is ORG/NAME")
    return fetch(model, revision, missing)


def fetch(name: str, revision: str | None, missing: str) -> Path:
    """The hub's `name` as a whole folder of the cache: what is there already is not fetched again."""
    with one_line(name, revision, missing):
        folder = snapshot(name, revision, FILES)
    if (folder / "config.json").exists():
        ModelConfig.from_folder(folder)  # another architecture is told before its weights are fetched
    weights = weight_files(folder)
    with one_line(name, revision, missing):  # the weights come last: where they are, all is
        snapshot(name, folder.name, weights)
        fetch_torn_again(name, folder, weights)
    absent = [file for file in weights if not (folder / file).exists()]
    if absent:
        raise ValueError(f"{name} on the hub {why_absent(name, folder.name, absent[0])}")
    return folder


def snapshot(name: str, revision: str | None, files: list[str]) -> Path:
    """The folder of the cache with these files, if the hub's `name` has them. Its name is the commit."""
    from huggingface_hub import snapshot_download  # here: a folder needs none of it
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """In a terminal only, and not for what is there at once."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"disable": None, "delay": 0.5, **options})

    return Path(snapshot_download(name, revision=revision, allow_patterns=files, tqdm_class=Bar))


def fetch_torn_again(name: str, folder: Path, files: list[str]) -> None:
    from huggingface_hub import hf_hub_download

    for file in files:
        if (folder / file).exists() and not is_whole(folder / file):
            hf_hub_download(name, file, revision=folder.name, force_download=True)


def weight_files(folder: Path) -> list[str]:
    """The shards that the index names, or the one file."""
    index = folder / INDEX
    if not index.exists():
        return [WEIGHTS]
    weight_map = Entries(read_json(index), index).entries("weight_map")
    return sorted({weight_map.text(tensor) for tensor in weight_map.values})


def is_whole(path: Path) -> bool:
    """Whether the file ends where its header says."""
    try:
        safe_open(path, framework="numpy")
    except SafetensorError:
        return False
    return True


def why_absent(name: str, commit: str, file: str) -> str:
    """What completes "NAME on the hub ..." where it has no such file."""
    from huggingface_hub import HfApi

    with one_line(name, commit, f"{name} has no {file} in the cache"):
        files = HfApi().list_repo_files(name, revision=commit)
    top = [path for path in files if "/" not in path and path != ".gitattributes"]
    why = why_refused(top) or f"has no {file}, which its {INDEX} names"
    if "pytorch_model.bin" in why:
        why += f": hf download {name} --local-dir FOLDER fetches that, and --model FOLDER says how to convert it"
    return why
