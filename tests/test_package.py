"""The package as users have it: installed with pip, and run from any folder."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.helpers import PACKAGE, ROOT, STORYTELLER

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_entry_point_exists():
    assert list(PROJECT["scripts"]) == [PACKAGE]
    module, _, function = PROJECT["scripts"][PACKAGE].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_readme_lists_every_folder_dependency_and_extra():
    readme = (ROOT / PACKAGE / "README.md").read_text(encoding="utf-8")
    folders = {path.parent for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert all(f"`{folder.name}/`" in readme for folder in folders)
    install = readme.split("## Install\n")[1].split("\n## ")[0]
    packages = [re.split("[>=<]", each)[0] for each in PROJECT["dependencies"]]
    table = " ".join(line for line in install.splitlines() if line.startswith("|"))
    assert all(re.search(rf"\b{package}\b", table) for package in packages)
    assert all(f'".[{extra}]"' in install for extra in PROJECT["optional-dependencies"])
    titles = re.findall("^## (.+)$", readme, flags=re.MULTILINE)
    first = ["Install", "Write a script", "Use the command", "Start a server", "Where to go next"]
    assert titles[: len(first)] == first, "the order in which a newcomer needs them"


def has_setuptools() -> bool:
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package without its dependencies. Return the folder that pip installed it into."""
    if not importlib.util.find_spec("pip") or not has_setuptools():
        pytest.skip("installing without a network needs pip and the setuptools version in pyproject.toml")
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"  # a copy, because a build leaves files behind
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(folder / "site")]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.full
def test_installs_the_package_without_tests(installed):
    expected = {path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py") if "tests" not in path.parts}
    assert {path.relative_to(installed) for path in installed.rglob("*.py")} == expected
    assert all((installed / path).read_bytes() == (ROOT / path).read_bytes() for path in expected)


@pytest.mark.full
def test_installs_the_page_and_type_information(installed):
    assert (installed / PACKAGE / "py.typed").is_file()
    page = Path(PACKAGE, "server", "page")
    names = {path.name for path in (ROOT / page).iterdir()}
    assert "index.html" in names and {path.name for path in (installed / page).iterdir()} == names


@pytest.mark.full
def test_installed_command_works_in_any_folder(installed, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(installed / "bin" / PACKAGE), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = run("generate", "A fox")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"the folder {tmp_path}/models/storyteller does not exist" in done.stderr
    done = run("generate", "A fox", "--model", str(STORYTELLER), "--max-tokens", "4", "--offload-policy", "load")
    assert done.returncode == 0 and done.stdout.startswith("A fox"), done.stderr
    assert list(tmp_path.iterdir()) == []
