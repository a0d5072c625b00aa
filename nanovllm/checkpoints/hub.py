"""Where a checkpoint is: a folder is taken as it is; the files of a name on the hub are fetched into its cache.

The cache, the token and offline mode are those of huggingface_hub: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.
"""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .entries import Entries, read_json
from .forms import INDEX, WEIGHTS, check_form, why_refused
from .model_config import read_model_config

MIN_SECONDS = 0.5  # before there is a progress bar


@dataclass(frozen=True)
class Repository:
    name: str  # ORG/NAME
    revision: str | None = None
    cache_dir: str | Path | None = None  # None: that of huggingface_hub, HF_HOME
    token: str | bool | None = None  # None: HF_TOKEN, or that of `hf auth login`

    @property
    def cache(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE)

    def snapshot(self, files: list[str]) -> Path:
        """Return the folder of the cache with these files, if the repository has them. Its name is the commit."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm

        bars: list[tqdm] = []

        class Bar(tqdm):
            """In a terminal only, and not for what is there at once."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{"disable": None, "delay": MIN_SECONDS, **options})
                bars.append(self)

            def display(self, *args: Any, **options: Any) -> None:
                if time.time() - self.start_t > MIN_SECONDS:
                    super().display(*args, **options)

        folder = snapshot_download(**self._where, allow_patterns=files, tqdm_class=Bar)
        for bar in bars:
            bar.close()  # or some are shown once more when the process ends
        return Path(folder)

    def fetch_again(self, file: str) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(filename=file, force_download=True, **self._where)

    def files(self) -> list[str]:
        from huggingface_hub import HfApi

        return HfApi(token=self.token).list_repo_files(self.name, revision=self.revision)

    @property
    def _where(self) -> dict[str, Any]:
        return {"repo_id": self.name, "revision": self.revision, "cache_dir": self.cache_dir, "token": self.token}


@contextmanager
def one_line(found: Repository) -> Iterator[None]:
    """Turn any error of the hub, or of the way to it, into a ValueError of one line; hide its warnings."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise ValueError(what_to_do(error, found)) from None
    finally:
        logger.setLevel(level)


def what_to_do(error: Exception, found: Repository) -> str:
    """Return the line of an error."""
    from huggingface_hub import constants, errors

    name, missing, cause = found.name, f"there is no folder {Path(found.name).absolute()}", error.__cause__ or error
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on {constants.ENDPOINT}/{name}, and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} on the hub has no revision {found.revision!r}: name a branch, a tag or a whole commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{missing}, and the hub has no model {name}, or it is private: then set HF_TOKEN to your token"
    if isinstance(error, errors.HFValidationError):
        return f"{missing}, and {name!r} is no name of the hub: {first_line(error)}"
    if status_of(cause) in (401, 403):
        return f"the hub refuses {name} (status {status_of(cause)}): set HF_TOKEN to a token that may read it"
    no_copy = f"{missing}, and {found.cache} has no whole copy of the hub's {name}"
    if constants.HF_HUB_OFFLINE:
        return f"{no_copy}: unset HF_HUB_OFFLINE to fetch it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{no_copy}, and {constants.ENDPOINT} cannot be reached ({first_line(cause)}): try again"
    return f"{name} could not be fetched from {constants.ENDPOINT} ({first_line(error)}): try again"


def status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def first_line(error: BaseException) -> str:
    """Return an error in one line.

    >>> first_line(ConnectionError("refused\\nfor the third time"))
    'ConnectionError: refused'
    """
    status = status_of(error)
    return f"status {status}" if status else f"{type(error).__name__}: {error}".splitlines()[0][:200]


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


def find_checkpoint(model: str | Path, revision: str | None = None, **options: Any) -> Path:
    """Return the folder of a checkpoint: a folder, or a name on the hub, ORG/NAME, fetched if it is not here.

    `revision` is a branch, a tag or a commit of the hub, `options` are cache_dir and token, if not those of the
    environment. A folder has none of them, and touches no network. Raise ValueError with one line that says what to
    do.
    """
    path = Path(model)
    if os.path.exists(path):  # unlike path.exists(), it never raises
        check_form(path)
        return path
    return fetch(repository(model, revision, **options))


def find_tokenizer(model: str | Path, revision: str | None = None, **options: Any) -> Path:
    """Return a folder from which the tokenizer alone is read: no weights are fetched."""
    path = Path(model)
    if os.path.exists(path):
        return path
    found = repository(model, revision, **options)
    with one_line(found):
        return found.snapshot(FILES)


def find_config(model: str | Path, revision: str | None = None) -> Path:
    """Return the config.json of a folder or of a name on the hub, or the file itself."""
    path = Path(model)
    if os.path.exists(path):
        return path / "config.json" if path.is_dir() else path
    found = repository(model, revision)
    with one_line(found):
        return found.snapshot(["config.json"]) / "config.json"


def repository(model: str | Path, revision: str | None, **options: Any) -> Repository:
    """Return the repository of a name on the hub. Raise ValueError if `model` is neither a folder nor a name."""
    missing = f"there is no folder {Path(model).absolute()}"
    if str(model) == SHIPPED:
        raise ValueError(f"{missing}: name a checkpoint, LLM(model=...) or --model")
    if not isinstance(model, str) or not HUB_NAME.fullmatch(model):
        raise ValueError(f"{missing}, and {str(model)!r} is no name of the hub, which is ORG/NAME")
    return Repository(model, revision, **options)


def fetch(found: Repository) -> Path:
    """Fetch the files that the cache does not have, and return the whole folder."""
    with one_line(found):
        folder = found.snapshot(FILES)
    if (folder / "config.json").exists():
        read_model_config(folder)  # another architecture is told before its weights are fetched
    weights = weight_files(folder)
    found = replace(found, revision=folder.name)  # the same commit, whatever is pushed meanwhile
    with one_line(found):  # the weights come last: where they are, all is
        found.snapshot(weights)
        for file in weights:
            if (folder / file).exists() and not is_whole(folder / file):
                found.fetch_again(file)
    absent = [file for file in weights if not (folder / file).exists()]
    if absent:
        with one_line(found):
            files = found.files()
        raise ValueError(f"{found.name} on the hub {why_absent(files, absent[0], found.name)}")
    return folder


def weight_files(folder: Path) -> list[str]:
    """Return the shards that the index names, or the one file."""
    index = folder / INDEX
    if not index.exists():
        return [WEIGHTS]
    weight_map = Entries(read_json(index), index).entries("weight_map")
    return sorted({weight_map.text(tensor) for tensor in weight_map.values})


def is_whole(path: Path) -> bool:
    """Return whether the file ends where its header says."""
    try:
        safe_open(path, framework="numpy")
    except SafetensorError:
        return False
    return True


def why_absent(files: list[str], absent: str, name: str) -> str:
    """Return the end of "NAME on the hub ..." for one that has only these files."""
    why = why_refused(path for path in files if "/" not in path and path != ".gitattributes")
    if why and "pytorch_model.bin" in why:
        why += f": hf download {name} --local-dir FOLDER fetches that, and --model FOLDER says how to convert it"
    return why or f"has no {absent}, which its {INDEX} names"
