"""An edit of an early stage, merged forward link by link to the last stage. For maintainers.

For each file of a link from P to N, a three-way merge:

    base     what N has in it of P's file: P's file at the commit before the edit, or what a run has merged since
    ours     N's file
    theirs   P's file now

A run stops behind the first link with a conflict. What is merged by then is noted, and is the base of the next run:
that one does only what is left to do, and an edit that was made in between flows forward with it.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from .copy import renew_copy
from .git import git
from .model import GAIN_TEST, Chain, Stage
from .progress import Progress, forget, load_blob, save, store_blob, write

EACH_ITS_OWN = {"README.md", "DIFF.md", GAIN_TEST}  # written for one stage, never propagated


def propagate(chain: Chain, progress: Progress) -> Iterator[str]:
    """Merge forward, at last into the copy; yields a line for each file that the edit reaches.

    Afterwards `progress.conflicts` names the files that stopped the run: at once, if those of the last run still
    have conflict markers in them. If there are none the run is finished and forgotten.
    """
    if any(_has_markers(chain.root / file) for file in progress.conflicts):
        return
    progress.conflicts.clear()
    names = [stage.name for stage in chain.stages]
    for stage in chain.stages[names.index(progress.start) + 1 :]:
        try:
            yield from _merge_link(stage, progress)
        finally:
            save(chain.root, progress)
        if progress.conflicts:
            return
    forget(chain.root)
    yield from renew_copy(chain)


def _merge_link(stage: Stage, progress: Progress) -> Iterator[str]:
    """Bring into `stage` what changed in the stage before it."""
    assert stage.before, "a link has two ends"
    for file in sorted((_files_at(stage.before, progress.since) | stage.before.files()) - EACH_ITS_OWN):
        path = f"{stage.path}/{file}"
        if path in progress.merged:
            base = load_blob(stage.root, progress.merged[path])
        else:
            base = _content_at(stage.before, progress.since, file)
        theirs, ours = _read(stage.before.folder / file), _read(stage.folder / file)
        if base != theirs:
            progress.originals.setdefault(path, store_blob(stage.root, ours))
            progress.merged[path] = store_blob(stage.root, theirs)
            done = _merge(stage.root, path, base, ours, theirs)
            if done.startswith("CONFLICT"):
                progress.conflicts.append(path)
            yield f"{path}: {done}"


def _merge(root: Path, path: str, base: bytes | None, ours: bytes | None, theirs: bytes | None) -> str:
    """Merge one file; says in a few words what was done. None is no file."""
    if ours == theirs:
        return "the same already"
    if ours == base:
        write(root / path, theirs)
        return "deleted" if theirs is None else "copied" if base is None else "follows"
    if ours is None:
        return "left out: this stage has no such file"
    if theirs is None:
        return "CONFLICT: deleted in the stage before and changed in this one; delete it or keep it"
    merged, is_clean = _merge_texts(root, path, base or b"", ours, theirs)
    write(root / path, merged)
    return "merged" if is_clean else "CONFLICT: marked in the file"


def _merge_texts(root: Path, path: str, base: bytes, ours: bytes, theirs: bytes) -> tuple[bytes, bool]:
    """The merged text, and whether it is free of conflicts."""
    with tempfile.TemporaryDirectory() as temporary:
        sides = [Path(temporary) / name for name in ("ours", "base", "theirs")]
        for side, text in zip(sides, (ours, base, theirs), strict=True):
            side.write_bytes(text)
        labels = ["-L", path, "-L", "the stage before, as it was", "-L", "the stage before, now"]
        done = git(root, "merge-file", "-p", *labels, *map(str, sides), codes=range(128))
    return done.stdout, done.returncode == 0


def _files_at(stage: Stage, commit: str) -> set[str]:
    """The files that a stage had at a commit, relative to it."""
    listed = git(stage.root, "ls-tree", "-r", "-z", "--name-only", commit, "--", f"{stage.path}/").stdout.decode()
    return {path.removeprefix(f"{stage.path}/") for path in listed.split("\0") if path}


def _content_at(stage: Stage, commit: str, file: str) -> bytes | None:
    shown = git(stage.root, "cat-file", "blob", f"{commit}:./{stage.path}/{file}", codes=(0, 128))
    return shown.stdout if shown.returncode == 0 else None


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _has_markers(path: Path) -> bool:
    return any(line.startswith((b"<<<<<<< ", b">>>>>>> ")) for line in (_read(path) or b"").splitlines())
