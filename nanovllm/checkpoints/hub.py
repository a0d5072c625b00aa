"""Find a checkpoint: a folder, or a model on the Hugging Face Hub, which is downloaded into the Hub's cache.

Start with find_checkpoint(). For folders in other formats (pickles, adapters), it raises an error that says what to do.
huggingface_hub reads the environment as usual: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

import fnmatch
import logging
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .entries import shards_of
from .gguf import TABLE_NAME, unpack
from .known import KNOWN, find_known
from .model_config import read_model_config

DEFAULT_MODEL = "models/storyteller"  # EngineConfig.model's default: a folder of the repository, not a name on the Hub
HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
GGUF_ON_HUB = re.compile(rf"({HUB_NAME.pattern}):([\w./-]+\.gguf)", re.ASCII)
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
METADATA_FILES = [  # all files but the weights; the names match only in the top folder, so nothing in "original/"
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
    INDEX_FILE,
]


def find_checkpoint(
    model: str | Path, revision: str | None = None, hf_overrides: Mapping[str, Any] | None = None, **options: Any
) -> Path:
    """Return the folder of a checkpoint. `model` is a folder, or ORG/NAME on the Hub, downloaded if necessary.

    `model` can also be a GGUF file, ORG/NAME:FILE.gguf on the Hub (see gguf.py), or a known name such as "smollm2".

    `revision` is a branch, a tag or a commit on the Hub; `options` are cache_dir and token, which default to the
    environment's. For a folder, they have no effect, and the network is not used. `hf_overrides` replaces entries of
    config.json, which is checked before weights are downloaded.

    Raise ValueError with one line that says what to do.
    """
    if path := local_path(model, revision, **options):
        check_format(path)
        return path
    return download(hub_repository(model, revision, **options), hf_overrides)


def find_tokenizer(model: str | Path, revision: str | None = None, **options: Any) -> Path:
    """Return a folder with a model's tokenizer. Download no weights, except as part of a GGUF file."""
    if path := local_path(model, revision, **options):
        return path
    repository = hub_repository(model, revision, **options)
    with one_line_errors(repository):
        return repository.snapshot(METADATA_FILES)


def find_config(model: str | Path, revision: str | None = None) -> Path:
    """Return the path of config.json, for a folder, a name on the Hub or the file itself."""
    if path := local_path(model, revision):
        return path / "config.json" if path.is_dir() else path
    repository = hub_repository(model, revision)
    with one_line_errors(repository):
        return repository.snapshot(["config.json"]) / "config.json"


def local_path(model: str | Path, revision: str | None, **options: Any) -> Path | None:
    """Return the path `model` if it exists, or else None. For a GGUF file, on disk or on the Hub, return its folder.

    Raise ValueError for a GGUF file that does not exist.
    """
    path, hub_match, sampling = Path(model), GGUF_ON_HUB.fullmatch(str(model)), dict[str, float]()
    if hub_match and not os.path.exists(path):
        name, file_name = hub_match.groups()
        repository = hub_repository(name, revision, **options)
        with one_line_errors(repository):
            path = repository.snapshot([file_name]) / file_name
        if not path.exists():
            raise ValueError(f"{name} on the Hub has no {file_name}")
    if (known := KNOWN.get(str(model))) and not os.path.exists(path):
        path, sampling = find_known(str(model), known), known.sampling
    if not os.path.exists(path):  # path.exists() would raise for a NUL character
        if path.suffix == ".gguf":
            raise ValueError(f"the file {path.absolute()} does not exist")
        return None
    return unpack(path, sampling) if path.suffix == ".gguf" and path.is_file() else path


# A folder

CONVERTER = (  # a program that converts pickles in the folder sys.argv[1] to safetensors
    "import glob, sys, torch; from safetensors.torch import save_file; save_file({name: weight.contiguous().clone() "
    "for file in glob.glob(glob.escape(sys.argv[1]) + '/pytorch_model*.bin') "
    "for name, weight in torch.load(file, map_location='cpu', weights_only=True).items()}, "
    "sys.argv[1] + '/model.safetensors', {'format': 'pt'})"
)
DOWNLOAD_INSTEAD = "download the safetensors version of this model instead"
OTHER_FORMATS = {  # pattern of file names: the format, and what the user can do. The first match counts
    "adapter_config.json": "an adapter and not a full model: merge it into its base model and save the result",
    "*.gguf": "llama.cpp's GGUF format: name the file, as in FOLDER/FILE.gguf or ORG/NAME:FILE.gguf",
    "consolidated*": "the publisher's own format: download the version for transformers instead",
    "tf_model.h5": f"TensorFlow's format: {DOWNLOAD_INSTEAD}",
    "flax_model.msgpack": f"Flax's format: {DOWNLOAD_INSTEAD}",
    "*.onnx": f"the ONNX format: {DOWNLOAD_INSTEAD}",
    "*.safetensors": f"but no {INDEX_FILE} that lists it, and no {WEIGHTS_FILE}",
    "*.pt": f"a pickle: {DOWNLOAD_INSTEAD}",
    "*.pth": f"a pickle: {DOWNLOAD_INSTEAD}",
}


def check_format(path: Path) -> None:
    """Raise ValueError unless `path` is a folder with weights in safetensors or from a GGUF file.

    The error says what `path` is instead.
    """
    if path.is_file() and path.suffix == ".safetensors":
        raise ValueError(f"{path} is a single file of a checkpoint: pass the folder that contains it")
    if path.is_file():
        formats = (f": it is {text}" for pattern, text in OTHER_FORMATS.items() if fnmatch.fnmatch(path.name, pattern))
        raise ValueError(f"{path} is a file, not a checkpoint folder{next(formats, '')}")
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if problem := find_problem(names):
        if "config.json" in names:
            read_model_config(path)  # report an unsupported architecture first
        command = f': convert it with: python -c "{CONVERTER}" {shlex.quote(str(path))}' if has_pickle(names) else ""
        raise ValueError(f"{path} {problem}{command}")


def find_problem(names: list[str]) -> str | None:
    """Return the end of a sentence "FOLDER ..." that says why these files are not a checkpoint, or None if they are.

    >>> find_problem(["config.json", "model.safetensors", "pytorch_model.bin"])
    >>> find_problem(["config.json", "pytorch_model.bin"])
    'has its weights in pytorch_model.bin, a pickle, and no safetensors'
    """
    if not {WEIGHTS_FILE, INDEX_FILE, TABLE_NAME}.isdisjoint(names):
        return None
    if not names:
        return "is not a checkpoint folder: it is empty"
    if has_pickle(names):
        return "has its weights in pytorch_model.bin, a pickle, and no safetensors"
    for pattern, text in OTHER_FORMATS.items():
        if matches := fnmatch.filter(names, pattern):
            return f"has {matches[0]}, {text}"
    return f"is not a checkpoint folder: it has no {WEIGHTS_FILE} and no {INDEX_FILE}"


def has_pickle(names: list[str]) -> bool:
    """Return whether the weights are in pytorch_model.bin, as one file or in shards."""
    return bool(fnmatch.filter(names, "pytorch_model*.bin*"))


# The Hub

PROGRESS_DELAY = 0.5  # seconds until a progress bar appears


@dataclass(frozen=True)
class Repository:
    """A model on the Hugging Face Hub."""

    name: str  # ORG/NAME
    revision: str | None = None
    cache_dir: str | Path | None = None  # default: huggingface_hub's, in HF_HOME
    token: str | bool | None = None  # default: HF_TOKEN, or the one from `hf auth login`

    def snapshot(self, patterns: list[str]) -> Path:
        """Download the files that match `patterns` and are not in the cache. Return their folder, named by commit."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import tqdm

        bars: list[Any] = []

        class DownloadBar(tqdm):
            """A progress bar that appears only in a terminal, and only if the download takes a while."""

            def __init__(self, *args: Any, **options: Any) -> None:
                # the base class has no type annotations
                super().__init__(*args, **{"disable": None, "delay": PROGRESS_DELAY, **options})  # type: ignore[no-untyped-call]
                bars.append(self)

            def display(self, *args: Any, **options: Any) -> None:
                if time.time() - self.start_t > PROGRESS_DELAY:
                    super().display(*args, **options)

        folder = snapshot_download(
            self.name,
            revision=self.revision,
            cache_dir=self.cache_dir,
            token=self.token,
            allow_patterns=patterns,
            tqdm_class=DownloadBar,
        )
        for bar in bars:
            bar.close()  # otherwise some bars reappear when the process exits
        return Path(folder)


def hub_repository(model: str | Path, revision: str | None, **options: Any) -> Repository:
    """Return the Repository for a name on the Hub. Raise ValueError if `model` is not of the form ORG/NAME."""
    folder_error = f"the folder {Path(model).absolute()} does not exist"
    if str(model) == DEFAULT_MODEL:
        known = next(iter(KNOWN))
        raise ValueError(f"{folder_error}: name a checkpoint with --model or LLM(model=...); {known} is a small one")
    if not isinstance(model, str) or not HUB_NAME.fullmatch(model):
        raise ValueError(f"{folder_error}, and {str(model)!r} is not a name on the Hub, which looks like ORG/NAME")
    return Repository(model, revision, **options)


def download(repository: Repository, hf_overrides: Mapping[str, Any] | None = None) -> Path:
    """Return the folder of a complete checkpoint. Download the files that are not in the cache.

    Raise ValueError if the model is not supported or if the repository lacks weights.
    """
    with one_line_errors(repository):
        folder = repository.snapshot(METADATA_FILES)
    if (folder / "config.json").exists():
        read_model_config(folder, hf_overrides)  # raises for unsupported models, before the download
    weights = weight_files(folder)
    repository = replace(repository, revision=folder.name)  # stay on this commit even if another one is pushed
    with one_line_errors(repository):  # weights come last, so that a folder with weights is complete
        repository.snapshot(weights)
    missing = [name for name in weights if not (folder / name).exists()]
    if missing:
        from huggingface_hub import HfApi

        with one_line_errors(repository):
            files = HfApi(token=repository.token).list_repo_files(repository.name, revision=repository.revision)
        raise ValueError(f"{repository.name} on the Hub {explain_missing(files, missing[0], repository.name)}")
    return folder


def weight_files(folder: Path) -> list[str]:
    """Return the names of the shards in the index or, without an index, of the single weights file."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [WEIGHTS_FILE]
    return sorted({*shards_of(index).values()})


def explain_missing(files: list[str], missing_file: str, name: str) -> str:
    """Return the end of a sentence "NAME on the Hub ..." that says why `files` do not include `missing_file`."""
    problem = find_problem([path for path in files if "/" not in path and path != ".gitattributes"])
    if problem and "pytorch_model.bin" in problem:
        problem += f": download it with `hf download {name} --local-dir FOLDER`; --model FOLDER shows how to convert it"
    return problem or f"has no {missing_file}, although its {INDEX_FILE} lists it"


@contextmanager
def one_line_errors(repository: Repository) -> Iterator[None]:
    """Turn any error of the Hub or the network into a ValueError of one line, and hide the Hub's warnings."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise ValueError(explain_error(error, repository)) from None
    finally:
        logger.setLevel(level)


def explain_error(error: Exception, repository: Repository) -> str:
    """Return one line that says what went wrong and what the user can do."""
    from huggingface_hub import constants, errors

    name, cause = repository.name, error.__cause__ or error
    folder_error = f"the folder {Path(name).absolute()} does not exist"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} on the Hub has no revision {repository.revision!r}: use a branch, a tag or a full commit hash"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{folder_error}, and the Hub has no model {name}; if it is private, set HF_TOKEN to your token"
    if status_of(cause) in (401, 403):
        return f"the Hub denies access to {name} (status {status_of(cause)}): set HF_TOKEN to a token with access"
    no_copy = f"{folder_error}, and {repository.cache_dir or constants.HF_HUB_CACHE} has no complete copy of {name}"
    if constants.HF_HUB_OFFLINE:
        return f"{no_copy}: unset HF_HUB_OFFLINE to download it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{no_copy}, and {constants.ENDPOINT} cannot be reached ({first_line(cause)}): try again"
    return f"{name} cannot be downloaded from {constants.ENDPOINT} ({first_line(error)}): try again"


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, if it has one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def first_line(error: BaseException) -> str:
    r"""Return the HTTP status of an error, or else its type and the first line of its text.

    >>> first_line(ConnectionError("refused\nfor the third time"))
    'ConnectionError: refused'
    """
    status = status_of(error)
    return f"status {status}" if status else f"{type(error).__name__}: {error}".splitlines()[0][:200]
