"""What the pages say of vLLM, SGLang and other projects: the table that .ci/other_projects.py checks has all of it."""

import importlib
import re
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers import ROOT

TABLE = tomllib.loads((ROOT / ".ci" / "other_projects.toml").read_text(encoding="utf-8"))
LESSONS = sorted([*ROOT.glob("stages/s*/README.md"), *ROOT.glob("stages/more_*/README.md")])
PAGES = [*LESSONS, *(ROOT / "stages" / name for name in ("VLLM.md", "NEXT.md", "LEFT_OUT.md", "SCALE.md"))]
OURS = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|\*\*", re.DOTALL)  # code, addresses and bold type aren't theirs
PATH = re.compile(r"(?<![\w*])\*((?:\w+/)+[\w.]+|\w+\.py)\*")
NAME = re.compile(r"\w+(?=\(\))|\b[A-Z]+[a-z]+[A-Z]\w*|\b[A-Z]{2,}[a-z]\w*|\b\w*[^\W_]_\w+|\b_\w+")
WORDS = {
    "DistServe",
    "FlashAttention",
    "FlashInfer",
    "GiB",
    "HiCache",
    "LoRA",
    "MLPs",
    "MoE",
    "NanoFlow",
    "PagedAttention",
    "PyTorch",
}
WORDS |= {"SGLang", "flashinfer_backend", "gate_up"}  # a name, the end of a path, and a name of ours
WORDS |= {"context_lens"}  # vLLM has several


def their_part(page: Path) -> str:
    """Return what a page says in words that aren't this project's names."""
    text = page.read_text(encoding="utf-8")
    if page in LESSONS:
        text = text.partition("\n## In vLLM and SGLang today\n")[2].partition("\n## ")[0]
    elif page.name == "SCALE.md":
        text = text.partition("\n## The same in vLLM and SGLang\n")[2]
    assert text, page
    return OURS.sub(" ", text)


def paths_and_names(text: str) -> tuple[set[str], set[str]]:
    """Return the paths and the names of other projects in a text.

    >>> paths, names = paths_and_names("KVCacheBlock in *a/b.py*, free() and _f, not *this*")
    >>> paths, sorted(names)
    ({'a/b.py'}, ['KVCacheBlock', '_f', 'free'])
    """
    return {*PATH.findall(text)}, {*NAME.findall(PATH.sub(" ", text))}


def test_every_name_on_a_page_is_in_the_table_and_no_other():
    files = {path: names for project in TABLE.values() for path, names in project.get("files", {}).items()}
    known = {name for names in files.values() for name in names}
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for page in PAGES:
        paths, names = paths_and_names(their_part(page))
        lost = {path for path in paths if not any(f"/{each}".endswith(f"/{path}") for each in files)}
        assert (lost, names - known - WORDS) == (set(), set()), f"{page}: not in .ci/other_projects.toml"
    all_text = "\n".join(texts.values())
    assert {name for name in known if not re.search(rf"\b{name}\b", all_text)} == set(), "names that no page mentions"
    unused = {path for path, names in files.items() if not names and path.rpartition("/")[2] not in all_text}
    assert unused == set(), "paths that no page mentions"


def test_statements_are_those_of_a_page():
    pages = [ROOT / "README.md", ROOT / "nanovllm" / "docs" / "same-answer.md", *PAGES]
    text = " ".join(" ".join(page.read_text(encoding="utf-8") for page in pages).split())
    said = [each["page"] for project in TABLE.values() for each in project.get("lines", [])]
    assert len(said) > 15 and [each for each in said if each not in text] == []


def test_pages_name_the_version_that_is_checked():
    versions = {project["title"]: project["version"] for project in TABLE.values() if "version" in project}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for title, version in versions.items():
            assert {*re.findall(rf"\b{title} (\d+\.\d+\.\d+)", text)} == {version}, f"{page}: {title}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## How it compares\n")[2]
    compared = re.search(r"^The tables compare (.*?)\.$", readme, re.MULTILINE | re.DOTALL)[1]
    for project in (each for each in TABLE.values() if each["title"] in compared):
        version = f"at {project['commit'][:7]}" if "commit" in project else project["version"]
        assert f"{project['title']} {version}" in " ".join(compared.split())


# The check itself, on a project of its own


@pytest.fixture
def other_projects(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return importlib.import_module("other_projects")


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "other-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("other/pool.py", "class Pool:\n    def touch(self): self.free = evict(1)  # was: steal\n")
    return path


@pytest.mark.parametrize(
    ("part", "holds"),
    [
        ({"files": {"other/pool.py": ["Pool", "touch", "free"], "other": []}}, True),
        ({"files": {"other/pool.py": ["evict"]}}, False),
        ({"files": {"other/pool.py": ["steal"]}}, False),
        ({"files": {"other/queue.py": []}}, False),
        ({"files": {"oth": []}}, False),
        ({"lines": [{"page": "it evicts", "file": "other/pool.py", "line": "evict(1)"}]}, True),
        ({"lines": [{"page": "it evicts two", "file": "other/pool.py", "line": "evict(2)"}]}, False),
        ({"lines": [{"page": "gone", "file": "other/pool.py", "without": "swap"}]}, True),
        ({"lines": [{"page": "gone", "file": "other/pool.py", "without": "evict"}]}, False),
        ({"lines": [{"page": "gone", "file": "other/queue.py", "without": "swap"}]}, False),
    ],
)
def test_check_finds_what_is_no_longer_so(other_projects, source, part: dict[str, Any], holds):
    project = {"version": "1.2"} | part
    read = other_projects.get("other", project, source.parent, source)
    assert all(held for _, held in other_projects.check(project, read)) == holds


def test_another_version_is_not_checked(other_projects, source):
    with pytest.raises(ValueError, match="not version"):
        other_projects.get("other", {"version": "1.3"}, source.parent, source)
