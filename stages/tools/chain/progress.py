"""How far a propagate has come: noted under .git while it is unfinished, so that it can go on or be taken back."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .git import git
from .model import Chain, ChainError, Stage


@dataclass
class Progress:
    """What a run has done. Files are paths from the root; a content is the name of a git blob, None is no file."""

    start: str  # name of the stage that was edited
    since: str  # the commit before the edit
    merged: dict[str, str | None] = field(default_factory=dict)  # file -> content of the stage before that is in it
    originals: dict[str, str | None] = field(default_factory=dict)  # file -> its content before the run
    conflicts: list[str] = field(default_factory=list)


def begin(chain: Chain, start: Stage, since: str | None) -> Progress:
    """The unfinished run if there is one, else a new one. Raises ChainError if the unfinished one is another."""
    progress = unfinished(chain.root)
    if progress is None:
        commit = _commit(chain.root, since or "HEAD")
        for stage in chain.stages[chain.stages.index(start) : -1]:
            if not git(chain.root, "ls-tree", commit, "--", f"{stage.path}/").stdout:
                raise ChainError(f"{stage.path} is not in {since or 'HEAD'}: commit it, or give another --since")
        return Progress(start.name, commit)
    if progress.start != start.name or (since and _commit(chain.root, since) != progress.since):
        raise ChainError(f"propagate {progress.start} is unfinished: run it again as it was, or propagate --abort")
    return progress


def abort(root: Path) -> list[str]:
    """Put every file that the unfinished run has written back as it was, and name them."""
    progress = unfinished(root)
    if progress is None:
        raise ChainError("no propagate is unfinished: there is nothing to abort")
    for file, content in progress.originals.items():
        write(root / file, load_blob(root, content))
    forget(root)
    return list(progress.originals)


def unfinished(root: Path) -> Progress | None:
    """The run that waits for a conflict to be resolved."""
    note = _note(root)
    return Progress(**json.loads(note.read_text(encoding="utf-8"))) if note.exists() else None


def save(root: Path, progress: Progress) -> None:
    """Note how far the run has come."""
    _note(root).write_text(json.dumps(asdict(progress), indent=1), encoding="utf-8")


def forget(root: Path) -> None:
    """The run is finished."""
    _note(root).unlink(missing_ok=True)


def store_blob(root: Path, content: bytes | None) -> str | None:
    """Keep a content in git's store, and name it."""
    if content is None:
        return None
    return git(root, "hash-object", "-w", "--stdin", stdin=content).stdout.decode().strip()


def load_blob(root: Path, name: str | None) -> bytes | None:
    """A content by the name that store_blob gave it."""
    return None if name is None else git(root, "cat-file", "blob", name).stdout


def write(path: Path, content: bytes | None) -> None:
    """Make a file hold `content`; None deletes it."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _commit(root: Path, revision: str) -> str:
    found = git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", codes=(0, 1))
    if found.returncode:
        raise ChainError(f"git knows no revision {revision!r}")
    return found.stdout.decode().strip()


def _note(root: Path) -> Path:
    return root / git(root, "rev-parse", "--git-path", "chain-propagate.json").stdout.decode().strip()
