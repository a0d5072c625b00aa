"""Files that contributors and code hosts read: workflows, issue forms, pre-commit, the changelog, ARCHITECTURE.md."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import yaml

from nanovllm import __version__
from tests.helpers import ROOT

YAML_FILES = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"])
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def missing_command(command: str) -> str | None:
    """Return what a command needs and the repository does not have, or None.

    >>> missing_command("make no-such-target"), missing_command("make lint"), missing_command(".ci/no_such_file")
    ('make target no-such-target', None, '.ci/no_such_file')
    """
    program, *arguments = command.split()
    if program == "make":
        return next((f"make target {each}" for each in arguments if "=" not in each and each not in TARGETS), None)
    if program.endswith("python"):
        return None if arguments[:1] == ["-m"] and arguments[1] in ("ruff", "mypy", "pytest") else command
    return None if os.access(ROOT / program, os.X_OK) and (ROOT / program).is_file() else program


def test_yaml_files_are_valid():
    assert [path for path in YAML_FILES if not isinstance(load(path), dict)] == []


def test_commands_of_workflows_exist():
    steps = {
        workflow.name: [step for job in load(workflow)["jobs"].values() for step in job["steps"]]
        for workflow in (ROOT / ".github" / "workflows").glob("*.yml")
    }
    commands = {name: [step["run"] for step in each if "run" in step] for name, each in steps.items()}
    assert commands == {
        "book.yml": ["make book"],
        "ci.yml": ["make lint", ".ci/run"],
        "nightly.yml": [".ci/nightly"],
    }
    assert [missing for each in commands.values() for command in each if (missing := missing_command(command))] == []
    versions = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert "3.11" in versions and all(isinstance(version, str) for version in versions), "3.10 would be the number 3.1"


def test_commands_of_pre_commit_exist():
    hooks = [hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {"ruff-check", "ruff-format", "lint"} == {hook["id"] for hook in hooks}
    assert [missing for hook in hooks if (missing := missing_command(hook["entry"]))] == []


def test_issue_forms_have_what_github_requires():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = load(path)
        if path.name == "config.yml":
            continue
        assert form["name"] and form["description"] and form["body"], path.name
        assert all(field["attributes"]["label"] for field in form["body"]), path.name
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len({*ids}), path.name


def test_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(version for version in versions if version != "Unreleased") == __version__


# ARCHITECTURE.md


def names_of(path: Path) -> set[str]:
    """Return the classes, functions, methods (Class.method) and attributes that a module defines."""
    names: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names.add(prefix + node.name)
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(prefix + node.target.id)

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


def places(text: str) -> list[tuple[str, str]]:
    """Return the (file, name) pairs of a page, written as `name` ([file.py](path/to/file.py)).

    >>> places("`Scheduler.schedule` ([scheduler.py](nanovllm/engine/scheduler.py))")
    [('nanovllm/engine/scheduler.py', 'Scheduler.schedule')]
    """
    return [(path, name) for name, path in re.findall(r"`([\w.]+)(?:\(\))?`\s+\(\[[\w.]+\]\(([\w/.]+\.py)\)\)", text)]


def test_architecture_names_functions_that_exist():
    pairs = places(ARCHITECTURE)
    assert len(pairs) > 20
    known = {path: names_of(ROOT / path) for path in {path for path, _ in pairs}}
    assert [(path, name) for path, name in pairs if name not in known[path]] == []


def test_diagram_of_architecture_names_functions_that_exist():
    diagram = ARCHITECTURE.split("```mermaid\n")[1].split("```")[0]
    known = {name for path in (ROOT / "nanovllm").rglob("*.py") if "tests" not in path.parts for name in names_of(path)}
    named = re.findall(r"\b[A-Za-z]\w*\.[a-z_]\w*", diagram)
    assert len(named) > 5 and [name for name in named if name not in known] == []
