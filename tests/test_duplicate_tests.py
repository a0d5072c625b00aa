"""Tests of tests/duplicate_tests.py and of the parts of a run, on made-up stages and on the real ones."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.duplicate_tests import Case, Stage, find_copies
from tests.helpers import ROOT, find_stages, folder_of

FILES = {
    "__init__.py": '"""A stage."""\nfrom .llm import LLM\n',
    "pool.py": "SIZE = 4\n\n\nclass Pool:\n    size = SIZE\n",
    "words.py": '"""Words."""\n\n\ndef words(text):\n    return text.split()\n\n\ndef unused():\n    return 1\n',
    "llm.py": "from .pool import Pool\nfrom .words import words\n\n\nclass LLM:\n    pool = Pool\n    words = words\n",
    "tests/__init__.py": "",
    "tests/helpers.py": "from ..pool import Pool\n\n\ndef make_pool():\n    return Pool()\n",
    "tests/conftest.py": """import pytest

from .. import LLM


@pytest.fixture
def llm():
    return LLM()


@pytest.fixture(autouse=True)
def quiet():
    return None
""",
    "tests/test_a.py": """import pytest

from ..words import words
from .helpers import make_pool

TEXTS = ["a", "a b"]


@pytest.mark.parametrize("text", TEXTS)
def test_words(text):
    assert words(text)


def test_pool():
    assert make_pool().size


def test_llm(llm):
    assert llm.words


class TestAlone:
    def test_one(self):
        assert 1


@pytest.mark.full
def test_long():
    assert 1
""",
}
NAMES = ["test_words", "test_pool", "test_llm", "TestAlone", "test_long"]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Write two stages with the same files."""
    folders = [tmp_path / "stages" / name for name in ("s1_one", "s2_two")]
    for folder in folders:
        for file, text in FILES.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
    return folders


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def copies_in_second(folders: list[Path]) -> set[str]:
    tests = [Case(folder / "tests" / "test_a.py", name, name) for folder in folders for name in NAMES]
    copies = find_copies(tests, folders)
    assert not copies & {*range(len(NAMES))}, "the first stage has no copies"
    return {tests[i].name for i in copies}


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("tests/test_a.py", "assert words(text)", "assert words(text)[0]", {"test_words"}),
        ("tests/test_a.py", '"a b"', '"a b c"', {"test_words"}),
        ("tests/test_a.py", "    def test_one", "    x = 1\n\n    def test_one", {"TestAlone"}),
        ("tests/test_a.py", "TEXTS =", "print()\nTEXTS =", set(NAMES)),
        ("tests/helpers.py", "return Pool()", "return Pool", {"test_pool"}),
        ("tests/conftest.py", "return LLM()", "return LLM", {"test_llm"}),
        ("tests/conftest.py", "return None", "return 0", set(NAMES)),
        ("words.py", "text.split()", "text.split(' ')", {"test_words", "test_llm"}),
        ("words.py", "return 1", "return 2", set()),
        ("words.py", '"""Words."""', '"""A word."""', set()),
        ("pool.py", "SIZE = 4", "SIZE = 5", {"test_pool", "test_llm"}),
        ("llm.py", "pool = Pool", "pool = Pool()", {"test_llm"}),
        ("llm.py", "class LLM", "if SIZE:\n    from .words import unused as words\n\n\nclass LLM", {"test_llm"}),
        ("__init__.py", "from .llm import LLM", "from .words import words as LLM", {"test_llm"}),
    ],
)
def test_tests_that_reach_changed_code_run(folders, file, old, new, changed):
    assert copies_in_second(folders) == set(NAMES)
    edit(folders[1] / file, old, new)
    assert copies_in_second(folders) == set(NAMES) - changed


def test_imports_of_modules_and_within_functions_are_followed(folders):
    for folder in folders:
        edit(folder / "tests/test_a.py", "assert make_pool().size", "from .. import pool\n\n    assert pool.SIZE")
        edit(folder / "tests/test_a.py", "from ..words import words", "from .. import words as w\n\nwords = w.words")
    assert copies_in_second(folders) == set(NAMES)
    edit(folders[1] / "pool.py", "SIZE = 4", "SIZE = 5")
    assert copies_in_second(folders) == set(NAMES) - {"test_pool", "test_llm"}
    edit(folders[1] / "words.py", "return 1", "return 2")
    assert "test_words" not in copies_in_second(folders)


def test_code_that_reads_its_own_path_is_never_a_copy(folders):
    for folder in folders:
        edit(folder / "words.py", "return text.split()", "return __file__")
    assert copies_in_second(folders) == set(NAMES) - {"test_words", "test_llm"}


def test_copy_of_any_earlier_stage_counts(folders, tmp_path):
    third = shutil.copytree(folders[0], tmp_path / "stages" / "s3_three")
    edit(folders[1] / "pool.py", "SIZE = 4", "SIZE = 5")
    tests = [Case(folder / "tests" / "test_a.py", "test_pool", "test_pool") for folder in (*folders, third)]
    assert find_copies(tests, [*folders, third]) == {2}
    assert find_copies(tests[2:], [*folders, third]) == set(), "the original is not in this run"


# The parts of a run


@pytest.fixture
def repository(folders: list[Path], tmp_path: Path) -> Path:
    """Put the two stages into a repository with this one's conftest.py."""
    (tmp_path / "tests").mkdir()
    for file in ("conftest.py", "tests/duplicate_tests.py", "tests/helpers.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    (folders[0] / "pool.py").write_text(
        FILES["pool.py"] + '\n\ndef double(n):\n    """Twice.\n\n    >>> double(2)\n    4\n    """\n    return 2 * n\n'
    )
    shutil.copy(folders[0] / "pool.py", folders[1])
    edit(folders[1] / "llm.py", "pool = Pool", "pool = Pool()")
    (folders[0] / "tests" / "test_b.py").write_text(
        "import pytest\n\n\n@pytest.mark.nightly\ndef test_a_million(): ...\n"
    )
    return tmp_path


def run_pytest(repository: Path, *arguments: str) -> tuple[set[str], str]:
    """Return the node ids that passed, and the whole output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=no", "stages", *arguments]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^PASSED (\S+)", done.stdout, re.M)), done.stdout


@pytest.mark.full
@pytest.mark.parametrize("processes", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["one", "two"])
def test_parts_add_up_to_all_tests(repository, processes):
    """Each stage has 6 tests and an example. In the second stage, only test_llm is not a copy. Two tests are long."""
    if processes:
        pytest.importorskip("xdist")
    quick, output = run_pytest(repository, *processes)
    rest, _ = run_pytest(repository, "--part", "rest", *processes)
    nightly, _ = run_pytest(repository, "--part", "nightly", *processes)
    everything, _ = run_pytest(repository, "--part", "all", *processes)
    assert nightly == {"stages/s1_one/tests/test_b.py::test_a_million"}
    assert len(everything) == len(quick) + len(rest) + 1 == 15 and quick | rest | nightly == everything
    assert {test for test in quick if "s2_two" in test} == {"stages/s2_two/tests/test_a.py::test_llm"}
    (line,) = re.findall("^left out: .*", output, re.M)
    assert line == "left out: 6 copies of an earlier stage's tests, 2 long. make test-all, or --part all, runs them."


def test_copies_run_without_their_originals(repository):
    shutil.rmtree(repository / "stages" / "s1_one" / "tests")
    passed, output = run_pytest(repository)
    assert len([test for test in passed if "s2_two" in test]) == 5, output


# The real stages


def cases_of(folder: Path, file: str) -> list[Case]:
    path = folder / "tests" / file
    functions = [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return [Case(path, name, name) for name in functions if name.startswith("test_")]


def test_model_is_tested_once_and_the_engine_in_each_stage():
    folders = [folder_of(name) for name in find_stages(ROOT)]
    model = [test for folder in folders[:3] for test in cases_of(folder, "test_model.py")]
    engine = [test for folder in folders[-2:] for test in cases_of(folder, "test_engine.py")]
    assert find_copies(model, folders) == {*range(len(model) // 3, len(model))}
    assert find_copies(engine, folders) == set()


def test_fixtures_and_their_dependencies_are_reached():
    stage = Stage(folder_of(find_stages(ROOT)[0]))
    reached = stage.reached_by(stage.folder / "tests" / "test_text.py", cases_of(stage.folder, "test_text.py")[0].name)
    assert {"llama/tokenizer.py", "tests/conftest.py"} <= {each.file for each in reached}
