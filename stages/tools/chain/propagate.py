"""An edit of an early stage, merged forward link by link: to the last stage, the branches and the package.

For each file of a link from P to N, a three-way merge:

    base     P's file as N has taken it over: at the commit before the edit, or as an earlier run has merged it
    ours     N's file
    theirs   P's file now

In the package a file of the last stage may have another name, or be split: then base and theirs are the part that
belongs in ours.

A run stops after the first link with a conflict. What it has merged is noted under .git, and is the base of the next
run, which does only what is left to do. An edit that was made in between flows forward with it.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .git import git
from .model import GAIN_FIGURES, GAIN_TEST, Chain, ChainError, Link, Package, Stage, is_free
from .parts import part

EACH_ITS_OWN = {"README.md", "DIFF.md", GAIN_TEST, GAIN_FIGURES}  # written for one stage, never propagated


@dataclass
class Progress:
    """The work that a run has done. Files are paths from the root; a content is a git blob's name, None is no file."""

    start: str  # name of the stage that was edited
    since: str  # the commit before the edit
    merged: dict[str, str | None] = field(default_factory=dict)  # file -> content of the previous stage that is in it
    originals: dict[str, str | None] = field(default_factory=dict)  # file -> its content before the run
    conflicts: list[str] = field(default_factory=list)


def begin(chain: Chain, start: Stage, since: str | None) -> Progress:
    """Return the unfinished run, or a new one. Raise ChainError if the unfinished one has other arguments."""
    progress = _unfinished(chain.root)
    if progress is None:
        commit = _commit(chain.root, since or "HEAD")
        for base in dict.fromkeys(link.before or start for link in chain.based_on(start)):
            if not git(chain.root, "ls-tree", commit, "--", f"{base.path}/").stdout:
                raise ChainError(f"{base.path} is not in {since or 'HEAD'}: commit it, or give another --since")
        return Progress(start.name, commit)
    if progress.start != start.name or (since and _commit(chain.root, since) != progress.since):
        raise ChainError(f"propagate {progress.start} is unfinished: run it again unchanged, or propagate --abort")
    return progress


def propagate(chain: Chain, progress: Progress) -> Iterator[str]:
    """Merge forward, into the branches and the package at last. Yield a line for each file that the edit reaches.

    Afterwards `progress.conflicts` names the files that stopped the run. A run stops immediately if the files of the
    last one still have conflict markers in them. Without conflicts, the run is finished and its note deleted.
    """
    if any(_has_markers(chain.root / file) for file in progress.conflicts):
        return
    progress.conflicts.clear()
    for link in chain.based_on(chain.stage(progress.start)):
        try:
            yield from _merge_link(link, progress)
        finally:
            _note(chain.root).write_text(json.dumps(asdict(progress), indent=1), encoding="utf-8")
        if progress.conflicts:
            return
    _note(chain.root).unlink(missing_ok=True)


def abort(root: Path) -> list[str]:
    """Restore every file that the unfinished run has written, and return their names."""
    progress = _unfinished(root)
    if progress is None:
        raise ChainError("no propagate is unfinished: there is nothing to abort")
    for file, content in progress.originals.items():
        _write(root / file, _load_blob(root, content))
    _note(root).unlink(missing_ok=True)
    return list(progress.originals)


def _merge_link(link: Link, progress: Progress) -> Iterator[str]:
    """Merge the previous stage's changes into `link`."""
    assert link.before, "a link has two ends"
    for file in sorted(_files_at(link.before, progress.since) | link.before.files()):
        now = _store_blob(link.root, link.before.content(file))
        for place, base, theirs in list(_edits(link, file, progress)):  # all parts are cut before one is written
            path, ours = f"{link.path}/{place}", link.content(place)
            progress.originals.setdefault(path, _store_blob(link.root, ours))
            progress.merged[path] = now
            if base == theirs:  # the edit belongs in another place of a file that is split
                continue
            done = _merge(link, path, base, ours, theirs)
            if done.startswith("CONFLICT"):
                progress.conflicts.append(path)
            yield f"{path}: {done}"


def _edits(link: Link, file: str, progress: Progress) -> Iterator[tuple[str, bytes | None, bytes | None]]:
    """Yield each place in `link` that an edit of the previous stage belongs in, with its base and its theirs."""
    assert link.before, "a link has two ends"
    theirs = link.before.content(file)
    for place in _places(link, file):
        path = f"{link.path}/{place}"
        if path in progress.merged:
            base = _load_blob(link.root, progress.merged[path])
        else:
            base = _content_at(link.before, progress.since, file)
        if base != theirs:
            yield place, _part(link, file, place, base), _part(link, file, place, theirs)


def _places(link: Link, file: str) -> tuple[str, ...]:
    """Return the files of `link` into which a file of the previous stage is merged."""
    if isinstance(link, Package):
        return () if is_free(file) else link.places(file)
    return () if file in EACH_ITS_OWN else (file,)


def _part(link: Link, file: str, place: str, content: bytes | None) -> bytes | None:
    if content is None or not isinstance(link, Package):
        return content
    return part(link, file, place, content.decode()).encode()


def _merge(link: Link, path: str, base: bytes | None, ours: bytes | None, theirs: bytes | None) -> str:
    """Merge one file, and return a few words about the result. None is no file."""
    if ours == theirs:
        return "the same already"
    if ours == base:
        _write(link.root / path, theirs)
        return "deleted" if theirs is None else "copied" if base is None else "follows"
    if ours is None:
        return f"left out: {link.name} has no such file"
    if theirs is None:
        return f"CONFLICT: deleted in the previous stage and changed in {link.name}; delete it or keep it"
    merged, is_clean = _merge_texts(link.root, path, base or b"", ours, theirs)
    _write(link.root / path, merged)
    return "merged" if is_clean else "CONFLICT: marked in the file"


def _merge_texts(root: Path, path: str, base: bytes, ours: bytes, theirs: bytes) -> tuple[bytes, bool]:
    """Return the merged text, and True if it is free of conflicts."""
    with tempfile.TemporaryDirectory() as temporary:
        sides = [Path(temporary) / name for name in ("ours", "base", "theirs")]
        for side, text in zip(sides, (ours, base, theirs), strict=True):
            side.write_bytes(text)
        labels = ["-L", path, "-L", "the previous stage, before the edit", "-L", "the previous stage, now"]
        done = git(root, "merge-file", "-p", *labels, *map(str, sides), codes=range(128))
    return done.stdout, done.returncode == 0


def _unfinished(root: Path) -> Progress | None:
    note = _note(root)
    return Progress(**json.loads(note.read_text(encoding="utf-8"))) if note.exists() else None


def _note(root: Path) -> Path:
    return root / git(root, "rev-parse", "--git-path", "chain-propagate.json").stdout.decode().strip()


def _commit(root: Path, revision: str) -> str:
    done = git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", codes=(0, 1))
    if done.returncode:
        raise ChainError(f"git knows no revision {revision!r}")
    return done.stdout.decode().strip()


def _files_at(stage: Stage, commit: str) -> set[str]:
    """Return the files that a stage had at a commit, relative to it."""
    listed = git(stage.root, "ls-tree", "-r", "-z", "--name-only", commit, "--", f"{stage.path}/").stdout.decode()
    return {path.removeprefix(f"{stage.path}/") for path in listed.split("\0") if path}


def _content_at(stage: Stage, commit: str, file: str) -> bytes | None:
    shown = git(stage.root, "cat-file", "blob", f"{commit}:./{stage.path}/{file}", codes=(0, 128))
    return shown.stdout if shown.returncode == 0 else None


def _store_blob(root: Path, content: bytes | None) -> str | None:
    """Store a content in git's object store, and return its name."""
    if content is None:
        return None
    return git(root, "hash-object", "-w", "--stdin", stdin=content).stdout.decode().strip()


def _load_blob(root: Path, name: str | None) -> bytes | None:
    return None if name is None else git(root, "cat-file", "blob", name).stdout


def _write(path: Path, content: bytes | None) -> None:
    """Make a file hold `content`; None deletes it."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _has_markers(path: Path) -> bool:
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return any(line.startswith((b"<<<<<<< ", b">>>>>>> ")) for line in lines)
