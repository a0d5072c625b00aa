"""Where a checkpoint lies: a folder is taken as it is, and the files of a name of the hub are fetched into its cache.

The cache, the token and offline mode are those of huggingface_hub: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..core.llama import ModelConfig
from ..core.llama.entries import Entries, read_json
from .forms import INDEX, WEIGHTS, check_form, why_refused

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
    import huggingface_hub as hub  # here: a folder needs none of it

    with one_line(name, revision, missing):
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=FILES))
    if (folder / "config.json").exists():
        ModelConfig.from_folder(folder)  # another architecture is told before its weights are fetched
    commit, weights = folder.name, weight_files(folder)
    with one_line(name, revision, missing):  # the weights come last: where they are, all is
        hub.snapshot_download(name, revision=commit, allow_patterns=weights)
        for file in weights:
            if (folder / file).exists() and not is_whole(folder / file):
                hub.hf_hub_download(name, file, revision=commit, force_download=True)
    absent = [file for file in weights if not (folder / file).exists()]
    if absent:
        raise ValueError(f"{name} on the hub {why_absent(name, commit, absent[0])}")
    return folder


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
    import huggingface_hub as hub

    with one_line(name, commit, f"{name} has no {file} in the cache"):
        files = hub.HfApi().list_repo_files(name, revision=commit)
    top = [path for path in files if "/" not in path and path != ".gitattributes"]
    why = why_refused(top) or f"has no {file}, which its {INDEX} names"
    if "pytorch_model.bin" in why:
        why += f": hf download {name} --local-dir FOLDER fetches that, and --model FOLDER says how to convert it"
    return why


@contextmanager
def one_line(name: str, revision: str | None, missing: str) -> Iterator[None]:
    """Whatever the hub or the way to it raises becomes a ValueError of one line; its warnings are not shown."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise ValueError(what_to_do(error, name, revision, missing)) from None
    finally:
        logger.setLevel(level)


def what_to_do(error: Exception, name: str, revision: str | None, missing: str) -> str:
    """`missing` says that there is no folder of that name."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on {constants.ENDPOINT}/{name}, and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} on the hub has no revision {revision!r}: name a branch, a tag or a whole commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{missing}, and the hub has no model {name}, or it is private: then set HF_TOKEN to your token"
    if isinstance(error, errors.HFValidationError):
        return f"{missing}, and {name!r} is no name of the hub: {first_line(error)}"
    if status in (401, 403):
        return f"the hub refuses {name} (status {status}): set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        cache = f"{constants.HF_HUB_CACHE} has no whole copy of the hub's {name}"
        if constants.HF_HUB_OFFLINE:
            return f"{missing}, and {cache}: unset HF_HUB_OFFLINE to fetch it"
        cause = error.__cause__ or error
        return f"{missing}, {cache}, and {constants.ENDPOINT} cannot be reached ({first_line(cause)}): try again"
    return f"{name} could not be fetched from {constants.ENDPOINT} ({first_line(error)}): try again"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
