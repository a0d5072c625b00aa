"""Files that contributors and code hosts read: workflows, issue forms, pre-commit, the changelog, ARCHITECTURE.md."""

import ast
import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from nanovllm import __version__
from nanovllm.server.options import ServerOptions
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


def test_nightly_and_its_list_name_the_same_parts():
    script = (ROOT / ".ci" / "nightly").read_text()
    parts = re.findall(r"^ {4}\[(\w+)\]=", script, re.MULTILINE)
    assert {*parts} == {*re.search(r"all=\((\w[\w ]+)\)", script)[1].split()}
    files = re.findall(r"python3 (\.ci/\w+\.py)", script)
    assert len(files) > 4 and [file for file in files if not (ROOT / file).is_file()] == []


def test_first_screen_runs_chats_and_tests(monkeypatch):
    """.ci/clone_check.py runs these commands, each in a new clone. It knows what each target prints."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    clone_check = importlib.import_module("clone_check")
    targets = [target for _, target, *_ in clone_check.first_commands()]
    assert targets == ["run", "run", "chat", "test"] and {*targets} == {*clone_check.EXPECTED}


def test_devcontainer_runs_what_the_makefile_has():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert {*container} == {"name", "image", "containerEnv", "postCreateCommand", "forwardPorts"}
    assert container["forwardPorts"] == [ServerOptions().port] and "TORCH_INDEX" in container["containerEnv"]
    commands = [command.partition("<")[0] for command in container["postCreateCommand"].split(" && ")]
    assert [command.split()[1] for command in commands] == ["run", "chat"]
    assert [missing for command in commands if (missing := missing_command(command))] == []


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
