"""Every notebook runs, is committed with its outputs, defines no engine logic, and asks before it answers.

tests/test_prose.py compares their numbers: those of a lesson with results.json, and none is typed.
"""

import ast
import html
import re
import resource
import shutil
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

from notebooks import __main__ as command  # noqa: E402
from notebooks.helpers import pictures  # noqa: E402

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
DEFINES = {"s1_contiguous_cache": {"attend", "next_token"}}  # a model without a cache
SHOWS_WITH = {"nanovllm": "numba"}  # some cells show nothing without it
MAX_BYTES, MAX_LINES = 300_000, 33
MAX_SECONDS = 80  # 40 on the machine that measured the figures; another one may take twice as long
THREADS = {"nanovllm": 2, "beyond": 2}  # threads that compute and spin: each of them uses processor time

VERDICT = re.compile(  # words of a title that answers, where it should name what is drawn
    r"\b(is|are|has|have|cannot|not|more|less|fewer|faster|wrong|takes?|holds?|needs?|gives?|pays?|makes?|finds?|costs|"
    r"comes?|leaves?|wins?|cuts?|reach(es)?|decides?)\b"
)

each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
QUICK = {"s1_contiguous_cache", "claims"}


def read(path):
    return nbformat.read(path, as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path):
    return "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def test_every_stage_has_a_notebook():
    stages = {path.parent.name for path in (ROOT / "stages").glob("s*_*/__main__.py")}
    assert stages | {"claims", "nanovllm", "beyond", "routing"} == {path.stem for path in PATHS}


def shown_kinds(notebook):
    """Return the kind of each output: a picture or a text."""
    kinds = [sorted(output.data) for output in outputs(notebook) if output.output_type == "display_data"]
    return ["SVG" if "image/svg+xml" in kind else "Markdown" for kind in kinds]


@pytest.mark.full
@each_notebook
def test_runs_top_to_bottom_with_small_loads(path, monkeypatch):
    """Run the cells in this process, which saves starting a kernel."""
    pytest.importorskip(SHOWS_WITH.get(path.stem, "torch"))
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    shown = []
    monkeypatch.setattr(pictures, "display", lambda what: shown.append(type(what).__name__))
    names = {}
    for cell in code_cells(path):
        exec(compile(cell.source, path.name, "exec"), names)
    assert shown == shown_kinds(read(path)), "the committed outputs come from another version"


def seconds_of_children() -> float:
    """Return the processor time of this process's finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.nightly
@each_notebook
def test_runs_top_to_bottom(path, tmp_path):
    """Run a copy in full, from the root of the repository.

    The limit is on processor time, because other tests may run at the same time.
    """
    pytest.importorskip(SHOWS_WITH.get(path.stem, "torch"))
    copy = shutil.copy(path, tmp_path)
    notebook, start = read(copy), seconds_of_children()
    command.execute(notebook, cwd=ROOT)
    seconds = seconds_of_children() - start
    assert seconds > 1, "the notebook's process was not measured"
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    most = MAX_SECONDS * THREADS.get(path.stem, 1)
    assert seconds < most, f"{path.name} took {seconds:.0f} s, the limit is {most} s"
    assert shown_kinds(notebook) == shown_kinds(read(path)), "the committed outputs come from another version"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.full if path.stem in QUICK else pytest.mark.nightly)
        for path in PATHS
    ],
)
def test_starts_in_its_own_folder(path):
    """`make notebooks` and jupyter run notebooks there, so the first cell must find the repository."""
    notebook = read(path)
    first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells = notebook.cells[: first + 1]
    command.execute(notebook, cwd=FOLDER)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]


@each_notebook
def test_is_committed_with_outputs(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run top to bottom"
    assert {output.output_type for output in outputs(read(path))} == {"display_data"}
    assert path.stat().st_size < MAX_BYTES, f"{path.stat().st_size:,} bytes, the limit is {MAX_BYTES:,}"


@each_notebook
def test_pictures_are_static(path):
    kinds = {kind for output in outputs(read(path)) for kind in output.data}
    assert kinds <= {"text/plain", "text/markdown", "image/svg+xml", "image/png"}
    svgs = ["".join(o.data["image/svg+xml"]) for o in outputs(read(path)) if "image/svg+xml" in o.data]
    assert svgs and all(svg.startswith("<svg") and "<title>" in svg for svg in svgs)
    assert not [svg for svg in svgs if re.search(r"<script|<style|<metadata|dc:date", svg)]


@each_notebook
def test_reveals_nothing_about_the_machine(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not [cell for cell in notebook.cells if cell.cell_type != "code" and cell.metadata]
    text = path.read_text(encoding="utf-8")
    assert str(Path.home()) not in text and str(ROOT) not in text


@each_notebook
def test_code_is_folded(path):
    """Jupyter lab folds the code, and shows the outputs."""
    assert all(cell.metadata == command.FOLDED for cell in code_cells(path))


@each_notebook
def test_defines_no_engine_logic(path):
    tree = ast.parse("\n".join(cell.source for cell in code_cells(path)))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    assert {node.name for node in ast.walk(tree) if isinstance(node, kinds)} == DEFINES.get(path.stem, set())


@each_notebook
def test_cells_are_short(path):
    long = [cell.source.splitlines()[0] for cell in code_cells(path) if len(cell.source.splitlines()) > MAX_LINES]
    assert not long, f"cells of more than {MAX_LINES} lines begin with {long}"


@each_notebook
def test_has_predictions(path):
    assert len(re.findall(r"\*\*Predict:\*\*", prose(path))) >= 3


@pytest.mark.parametrize("path", [path for path in PATHS if path.stem != "claims"], ids=lambda path: path.stem)
def test_title_below_a_prediction_does_not_answer_it(path):
    """A code host shows pictures at once. claims.ipynb is left out, because its titles are verdicts on claims."""
    cells = read(path).cells
    first = next(i for i, cell in enumerate(cells) if "**Predict:**" in cell.source)
    answers = [cell for cell in cells[first:] if cell.cell_type == "code"]
    faults = [fault for cell in answers for fault in title_faults(cell.source, titles_of(cell))]
    assert sum(len(titles_of(cell)) for cell in answers) >= 3 and not faults, faults


def titles_of(cell):
    svgs = ["".join(output.get("data", {}).get("image/svg+xml", "")) for output in cell.outputs]
    return [html.unescape(title) for svg in svgs for title in re.findall(r"<title>(.*?)</title>", svg)]


def title_faults(source, titles):
    """Return the titles that have a value in them, so that the cell doesn't spell them out, or a verdict."""
    literals = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return [title for title in titles if title not in literals or VERDICT.search(title)]


def test_titles_that_answer_are_found():
    computed, typed = 'figure(f"{4} blocks of {16} slots")', 'figure("Blocks hold more", "Blocks, by size")'
    assert title_faults(computed, ["4 blocks of 16 slots"]) == ["4 blocks of 16 slots"]
    assert title_faults(typed, ["Blocks hold more", "Blocks, by size"]) == ["Blocks hold more"]


@each_notebook
def test_lessons_numbers_are_not_in_outputs(path):
    """`python -m stages.tools.prose` brings those in Markdown cells up to date. Only a run does so for outputs."""
    sources = "\n".join(cell.source for cell in code_cells(path))
    assert not re.findall(r"lesson's number|bench\.results|import .*\bresults\b", sources)
    assert "lesson's number" not in str(outputs(read(path)))


def test_unknown_name_is_reported_in_one_line(capsys):
    assert command.main(["s99"]) == 2
    assert capsys.readouterr().err == "no notebook begins with s99\n"
