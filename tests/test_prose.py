"""Prose is tested: what a README names exists, what it says to type works, and no number in it was typed by hand."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.prose import (
    Prose,
    Repository,
    command_faults,
    file_faults,
    find_prose,
    form_faults,
    link_faults,
    mark_faults,
    name_faults,
    names_in,
    number_faults,
    read,
    titles,
)

REPOSITORY = Repository(ROOT)
FILES = find_prose(ROOT)
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
NOTEBOOKS = find_prose(ROOT, ".ipynb")
PAGES = [ROOT / "nanovllm" / "server" / "page", ROOT / "notebooks" / "page"]  # what the page that plays a pool says
every_file = pytest.mark.parametrize("prose", [read(path) for path in FILES], ids=NAMES)
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])

# Names of others that our prose may say, and words of shell commands.
FOREIGN = {"transformers", "uv", "HF_HOME", "HF_ENDPOINT", "yarn", "longrope"}
# Numbers with a unit that define something, or that somebody else measured; they are looked for word by word.
DEFINITIONS: dict[str, list[str]] = {
    "stages/s1_contiguous_cache/README.md": ["64 numbers × 4 bytes", "Which matrices are read 8 times"],
}


# What a title of a picture may say in figures: a setting, or a claim that it answers.
IN_TITLES = ("1% left free", "not 4 times", "64 GB/s", "2 GB/s")


def claimed() -> dict[str, tuple[str, ...]]:
    """What cells of prose quote from elsewhere without a mark, by notebook: tests/test_notebooks.py may list it."""
    tree = ast.parse((ROOT / "tests" / "test_notebooks.py").read_text(encoding="utf-8"))
    named = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CLAIMED"]
    return eval(compile(ast.Expression(named[0].value), "CLAIMED", "eval")) if named else {}


def test_prose_is_found():
    assert {"README.md", "stages/README.md", "stages/GPU.md", "models/storyteller/README.md"} <= {*NAMES}
    assert len(NOTEBOOKS) >= len(REPOSITORY.stages)
    for folder in REPOSITORY.stages:
        assert {folder / "README.md", folder / "DIFF.md"} <= {*FILES}


@every_file
def test_links_lead_somewhere(prose):
    assert list(link_faults(prose)) == []


@every_file
def test_files_exist(prose):
    assert list(file_faults(prose, REPOSITORY)) == []


@every_file
def test_commands_exist(prose):
    assert list(command_faults(prose, REPOSITORY)) == []


@every_file
def test_names_exist(prose):
    assert list(name_faults(prose, REPOSITORY, FOREIGN)) == []


@every_file
def test_no_measurement_was_typed(prose):
    if prose.path.name == "DIFF.md":
        assert prose.text.startswith("<!-- Made by `python stages/chain.py write`")  # chain.py check compares all of it
        return
    assert list(number_faults(prose, DEFINITIONS.get(str(prose.path.relative_to(ROOT)), []))) == []


@every_file
def test_marks_of_figures_close(prose):
    assert list(mark_faults(prose)) == []


@every_notebook
def test_no_measurement_was_typed_in_a_notebook(path):
    """Nor in the title of a picture: a figure is put in by the cell that has it."""
    assert list(number_faults(read(path), claimed().get(path.stem, ()))) == []
    assert list(mark_faults(read(path))) == []
    over_pictures = " | ".join(titles(path.read_text(encoding="utf-8")))
    for text in IN_TITLES:
        over_pictures = over_pictures.replace(text, " ")
    assert list(number_faults(Prose(path, over_pictures))) == []


def test_no_measurement_was_typed_for_the_page():
    """What it says comes from its events, and from the code."""
    files = [path for folder in PAGES for path in folder.rglob("*") if path.suffix in (".js", ".py", ".html")]
    with_spaces, put_in = re.compile(r"\"[^\"\n]* [^\"\n]*\"|`[^`]* [^`]*`"), re.compile(r"\{[^}]*\}")
    strings = {path: with_spaces.findall(put_in.sub("", path.read_text(encoding="utf-8"))) for path in files}
    assert sum(map(len, strings.values())) > 100
    assert [fault for path, found in strings.items() for fault in number_faults(Prose(path, " | ".join(found)))] == []


def test_a_key_is_shown_in_one_form():
    assert list(form_faults(read(path) for path in [*FILES, *NOTEBOOKS])) == []


def test_figures_are_current():
    from stages.tools.prose import marks

    assert marks.stale(ROOT) == [], "python -m stages.tools.prose brings them up to date"


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="no Makefile")
def test_make_knows_the_targets_that_are_read_from_its_file():
    assert REPOSITORY.targets >= {"run", "test", "diff", "exercise"}
    for target in REPOSITORY.targets:
        command = ["make", "-n", target, f"PY={sys.executable}", "STAGE=1", "TEXT=models"]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0, target


# Python in prose runs


def snippets() -> list[tuple[str, str]]:
    blocks = [(str(path.relative_to(ROOT)), block) for path in FILES for block in read(path).code_blocks]
    return [(name, block) for name, block in blocks if re.match(r"(from|import) \w", block)]


@pytest.mark.parametrize(("name", "code"), snippets(), ids=[name for name, _ in snippets()])
def test_python_in_prose_runs(name, code, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(code, name, "exec"), {})


# The glossary


def glossary() -> list[tuple[str, str]]:
    """Terms and the stage that has them first."""
    text = (ROOT / "stages" / "README.md").read_text(encoding="utf-8").split("## Glossary")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [(term, row[-1]) for row in rows[2:] for term in row[0].split(", ")]


def test_terms_of_the_glossary_are_those_of_the_code():
    """A name with an underscore is a name in the code of its stage; any other term stands in its text."""
    present = {path.name.split("_")[0]: path for path in REPOSITORY.stages}
    terms = glossary()
    assert len(terms) > 15 and {stage for _, stage in terms} <= {f"s{n}" for n in range(1, 8)}
    assert len({term for term, _ in terms}) == len(terms), "a term twice"
    for term, stage in terms:
        if stage not in present:
            continue
        files = [path for path in present[stage].rglob("*") if path.suffix in (".py", ".md")]
        if "_" in term:
            names = {name for path in files if path.suffix == ".py" for name in names_in(path)}
            assert names & {term, term + "s"}, f"{term} is no name in {stage}"
        else:
            text = " ".join(path.read_text(encoding="utf-8") for path in files).lower()
            pattern = r"\s+".join(map(re.escape, term.lower().split()))
            assert re.search(pattern, text), f"{stage} does not say {term!r}"


# The checks find what they are for: on a made-up repository


POOL = '''class Pool:
    """Not a_docstring_name."""
    def take(self, max_tokens):
        self.free = "first-fit"
'''


@pytest.fixture
def made_up(tmp_path: Path) -> Repository:
    for name, text in {
        "Makefile": "run: x\n\tpython\nhelp:\n",
        "stages/chain.py": 'parser.add_argument("--force")\n',
        "stages/s1_one/__init__.py": "",
        "stages/s1_one/__main__.py": "",
        "stages/__main__.py": "",
        "nanovllm/cli/commands.py": 'COMMANDS = {"batch": ...}',
        "stages/s1_one/pool.py": POOL,
        "stages/s1_one/llama/model.py": "class Model:\n    def run(self): ...\n",
        "README.md": "# A title, so\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Repository(tmp_path)


def says(made_up: Repository, text: str) -> Prose:
    return Prose(made_up.root / "README.md", text)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[a](stages/chain.py), [b](#a-title-so), [c](https://example.org/x), [d](README.md#a-title-so)", 0),
        ("[a](stages/gone.py)", 1),
        ("![a](pool.svg)", 1),
        ("[a](README.md#another)", 1),
    ],
)
def test_a_dead_link_is_found(made_up, text, faults):
    assert len(list(link_faults(says(made_up, text)))) == faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("`stages/chain.py`, `pool.py`, `llama/model.py`, `llama/`, `.venv`, `stages/s*_*`, `*.py`", 0),
        ("`stages/gone.py`", 1),
        ("`gone.py` and `*.safetensors`", 2),
        ("`lama/`", 1),
        ("`stages/gone`", 1),
    ],
)
def test_a_missing_file_is_found(made_up, text, faults):
    assert len(list(file_faults(says(made_up, text), made_up))) == faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("```console\n$ make run STAGE=1\n$ python -m stages.s1_one --force\n```\n", 0),
        ("```\npython stages/chain.py # --gone\ngit log --gone\npython -m stages 1\n```\n", 0),
        ('`make run PROMPT="do not"`, `python -m pytest`, `make`, `python3 stages/chain.py --force`', 0),
        ("Type `nanovllm batch --force`, `nanovllm`", 0),
        ("Type `nanovllm brew`, `nanovllm batch --farce`", 2),
        ("Type `python3 stages/chain.py --no-force`", 0),
        ("```console\n$ make fun STAGE=1\n```\n", 1),
        ("Type:\n\n    make fun\n\nThen look.", 1),
        ("Type `make fun`", 1),
        ("```\npython -m stages.gone\n.venv/bin/python stages/gone.py\n```\n", 2),
        ("```\npython -m stages.s1_one --farce\n```\n", 1),
        ("```\npython -m stages 2\n```\n", 1),
    ],
)
def test_a_command_that_is_not_there_is_found(made_up, text, faults):
    assert len(list(command_faults(says(made_up, text), made_up))) == faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ('`Pool.take`, `Pool.take(max_tokens=4)`, `max_tokens`, `--max-tokens`, `"first-fit"`, `torch`', 0),
        ("`self.free`, `max_tokens=4`, `make run`, `python -m gone_name`, `pool.py`", 0),
        ("```\ngone_name\n```\n", 0),
        ("`gone_name`", 1),
        ("`Pool.give`", 1),
        ("`Pool.run`", 1),
        ("`pool.gone()`", 1),
        ("`a_docstring_name`", 1),
    ],
)
def test_a_name_that_is_not_there_is_found(made_up, text, faults):
    assert len(list(name_faults(says(made_up, text), made_up, {"torch"}))) == faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("a block of 16 tokens, 1,024 slots, stage 3, section 2.5, 2019, four times, `8 GiB`, A100 systems", 0),
        ("<!-- said -->833,000 operations/s<!-- / -->, says a text; <!-- said -->20-38%<!-- / -->", 0),
        ("<!-- n: a.b:.1f -->4.2<!-- / --> ms and\n<!-- figures: x -->\n12 ms\n<!-- /figures -->\n", 0),
        ("```\n12 ms\n```\n\nSo:\n\n    12 ms\n\n", 0),
        ("it takes 12 ms", 1),
        ("12ms, 3.5x, 40%, 1,234 tok/s, 2 GiB, 37 times, 10 tokens/s, 3\nseconds", 8),
        ("a pool of 8 GiB", 0),
    ],
)
def test_a_typed_number_is_found(made_up, text, faults):
    allowed = ["a pool of 8 GiB"] if "a pool" in text else []
    assert len(list(number_faults(says(made_up, text), allowed))) == faults


def test_an_allowed_number_that_is_gone_is_found(made_up):
    assert len(list(number_faults(says(made_up, "nothing"), ["200 MB"]))) == 1


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("<!-- n: a -->1<!-- / --> and <!-- n: b:.1f -->2<!-- / -->", 0),
        ("<!-- n: a -->1 and <!-- n: b -->2<!-- / -->", 1),
        ("<!-- said -->1<!-- / --> and <!-- said -->2", 1),
        ("<!-- figures: a -->\n1\n", 1),
        ("1<!-- /figures -->\n", 1),
    ],
)
def test_an_open_mark_is_found(made_up, text, faults):
    assert len(list(mark_faults(says(made_up, text)))) == faults


@pytest.mark.parametrize(
    ("texts", "faults"),
    [
        (["<!-- n: a.b:.1f -->4.2<!-- / -->", "<!-- n: a.b:.1f -->4.2<!-- / --> and <!-- n: a.c -->4<!-- / -->"], 0),
        (["<!-- n: a.b:.1f -->4.2<!-- / -->", "<!-- n: a.b:.0f -->4<!-- / -->"], 1),
    ],
)
def test_a_key_in_two_forms_is_found(made_up, texts, faults):
    assert len(list(form_faults(says(made_up, text) for text in texts))) == faults


def test_marks_in_a_notebook_are_filled_in_and_nothing_else_changes(tmp_path, monkeypatch):
    from stages.tools.prose import marks

    monkeypatch.setattr(marks, "known", lambda root: {"a": {"gain": 4.25}})
    mark = "<!-- n: a.gain:.1f -->{}<!-- / -->"
    cell = {"cell_type": "markdown", "source": ["é\n", f"It is {mark.format('0')} times.\n"]}
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [cell]}, indent=1, ensure_ascii=False), encoding="utf-8")
    assert marks.render(path, tmp_path) == path.read_text("utf-8").replace(mark.format("0"), mark.format("4.2"))
    assert read(path).text == f"é\nIt is {mark.format('0')} times.\n\n"
    assert list(number_faults(read(path))) == []
