"""Check what the pages say of other projects: `python3 .ci/other_projects.py`.

other_projects.toml names each file, name and line of another project that a page relies on, and the version that was
read. This program gets that version, a wheel from the package index or a commit by git, and looks each of them up.
Projects that can't be downloaded count as skipped. `--source vllm=FILE.whl --source nano-vllm=FOLDER` uses a wheel or a
clone that you have. The last line is "N passed, N failed, N skipped".

tests/test_other_projects.py compares the table with the pages, so neither can change alone.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".toml")
Read = Callable[[str], str | None]  # a path of the project -> its text, "" for a folder, or None if it isn't there
TIMEOUT = 600  # seconds for a download


def defined_names(text: str) -> set[str]:
    r"""Return the names that a Python file defines: classes, functions, parameters, variables, attributes, keys.

    >>> sorted(defined_names("class A:\n    def f(self, b): self.c = {'d': e}"))
    ['A', 'b', 'c', 'd', 'f', 'self']
    """
    names = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.arg(arg=name) | ast.Constant(value=str(name)):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def check(project: dict[str, Any], read: Read) -> Iterator[tuple[str, bool]]:
    """Yield each statement of the table about a project, and whether it holds."""
    for path, names in project.get("files", {}).items():
        text = read(path)
        yield path, text is not None
        defined = defined_names(text) if text and names else set()
        for name in names:
            yield f"{path} defines {name}", name in defined
    for each in project.get("lines", []):
        text = read(each["file"]) or ""
        if "line" in each:
            yield f"{each['file']} says {each['line']!r}: {each['page']}", each["line"] in text
        else:
            yield f"{each['file']} has no {each['without']}: {each['page']}", bool(text) and each["without"] not in text


def read_wheel(wheel: zipfile.ZipFile, path: str) -> str | None:
    if any(name.startswith(f"{path}/") for name in wheel.namelist()):
        return ""
    return wheel.read(path).decode() if path in wheel.namelist() else None


def read_commit(folder: Path, commit: str, path: str) -> str | None:
    done = subprocess.run(["git", "-C", folder, "show", f"{commit}:{path}"], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def get(name: str, project: dict[str, Any], folder: Path, source: Path | None) -> Read:
    """Return a reader of a project's files.

    Raise OSError or SubprocessError if they can't be downloaded, and ValueError for a source that isn't them.
    """
    if "commit" in project:
        if source is None:
            source = folder
            git = partial(subprocess.run, check=True, timeout=TIMEOUT, env=os.environ | {"GIT_TERMINAL_PROMPT": "0"})
            git(["git", "init", "--quiet", "--bare", source])
            git(["git", "-C", source, "fetch", "--quiet", "--depth=1", project["repository"], project["commit"]])
        if subprocess.run(["git", "-C", source, "cat-file", "-e", project["commit"]], capture_output=True).returncode:
            raise ValueError(f"{source} does not have commit {project['commit']}")
        return cache(partial(read_commit, source, project["commit"]))
    if source is None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([*pip, f"{name}=={project['version']}"], check=True, timeout=TIMEOUT)
        (source,) = folder.glob("*.whl")
    if f"-{project['version']}-" not in source.name:
        raise ValueError(f"{source} is not version {project['version']}")
    return cache(partial(read_wheel, zipfile.ZipFile(source)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", action="append", default=[], help="PROJECT=PATH of a wheel or a clone")
    sources = dict(each.split("=", 1) for each in parser.parse_args().source)
    passed = failed = skipped = 0
    for name, project in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        with tempfile.TemporaryDirectory(prefix="nanovllm-other-") as folder:
            try:
                read = get(name, project, Path(folder), Path(sources[name]) if name in sources else None)
            except (OSError, subprocess.SubprocessError) as error:
                num_statements = len([*check(project, lambda path: None)])
                print(f"{name}: {num_statements} statements not checked: {error}", flush=True)
                skipped += num_statements
                continue
            except (ValueError, zipfile.BadZipFile) as error:
                failed += 1
                print(f"{name}: {error}", flush=True)
                continue
            for statement, holds in check(project, read):
                passed, failed = passed + holds, failed + (not holds)
                if not holds:
                    print(f"{name} {project.get('version', project.get('commit'))}: not so: {statement}", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
