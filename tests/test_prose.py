"""READMEs name existing files, commands and names, their code runs, and their numbers are generated."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from stages.tools.chain.model import key_of
from stages.tools.prose import marks, tables
from stages.tools.prose.figures import UNITS, Figure, figure, shown
from tests.blocks import PAGES as PAGES_THAT_RUN
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
PAGES = [ROOT / "nanovllm" / "server" / "page", ROOT / "notebooks" / "page"]  # the page that plays back the pool
PROSE = [read(path) for path in FILES]

# Names of other projects that our prose may mention, and words of shell commands.
FOREIGN = {"transformers", "uv", "HF_HOME", "HF_ENDPOINT", "yarn", "longrope"}
FOREIGN |= {
    "check_embedding_ctx_length",
    "hosted_vllm",
    "OpenAIEmbeddings",
    "OpenAILike",
    "is_chat_model",
    "is_function_calling_model",
}
# Numbers with a unit that define something, or that others measured. They must be in the text word for word.
DEFINITIONS: dict[str, list[str]] = {
    "nanovllm/README.md": ["200 MB", "2.7 GB", "100 MB"],  # as pip reports them
    "stages/s1_contiguous_cache/README.md": ["64 numbers × 4 bytes"],
    "stages/bench/predict/more_beams.md": ["hold 4 times the blocks"],
    "nanovllm/docs/disk.md": ["differs by more than 2 times"],
    "tests/mutants/README.md": ["Wilson's 95% interval", "60 seconds", "6 GiB"],
}


CLAIMED: dict[str, list[str]] = {"claims.ipynb": ["92%"]}  # a text claims them


def test_prose_is_found():
    assert {"README.md", "stages/README.md", "stages/GPU.md", "models/storyteller/README.md"} <= {*NAMES}
    assert len(NOTEBOOKS) >= sum(not folder.name.startswith("more_") for folder in REPOSITORY.stages)
    for folder in REPOSITORY.stages:
        assert {folder / "README.md", folder / "DIFF.md"} <= {*FILES}


def faults_of(files: Iterable[Prose], check: Callable[[Prose], Iterable[str]]) -> dict[str, list[str]]:
    """Return the faults by file, without the files that have none."""
    faults = {str(prose.path.relative_to(ROOT)): [*check(prose)] for prose in files}
    assert len(faults) > 5, "the search must find files"
    return {name: each for name, each in faults.items() if each}


def test_links_exist():
    assert faults_of(PROSE, link_faults) == {}


def test_files_exist():
    assert faults_of(PROSE, lambda prose: file_faults(prose, REPOSITORY)) == {}


def test_commands_exist():
    assert faults_of(PROSE, lambda prose: command_faults(prose, REPOSITORY)) == {}


def test_names_exist():
    def check(prose: Prose) -> Iterable[str]:
        if prose.path.name == "from-llama-cpp.md":  # the first column of its table has llama.cpp's names
            prose = prose._replace(text=re.sub(r"^\|[^|]*\|", "|", prose.text, flags=re.MULTILINE))
        return name_faults(prose, REPOSITORY, FOREIGN)

    assert faults_of(PROSE, check) == {}


def test_measurements_are_generated():
    generated = [prose for prose in PROSE if prose.path.name == "DIFF.md"]  # chain.py check compares all of each
    assert all(prose.text.startswith("<!-- Made by `python stages/chain.py write`") for prose in generated)
    errata = [prose for prose in PROSE if prose.path.name == "errata.md"]  # test_notebook_claims.py compares it
    assert [prose.text.split(" (")[0] for prose in errata] == ["<!-- Made by `make claims`"]
    summaries = [prose for prose in PROSE if prose.path.name == "summary.md"]  # test_gpu_bench.py compares each
    others = [prose for prose in PROSE if prose not in generated + errata + summaries]
    assert faults_of(others, lambda p: number_faults(p, DEFINITIONS.get(str(p.path.relative_to(ROOT)), []))) == {}


def test_marks_of_figures_are_closed():
    assert faults_of(PROSE, mark_faults) == {}


def test_measurements_in_notebooks_are_generated():
    """Titles of pictures must not have typed numbers either."""

    def check(notebook: Prose) -> Iterable[str]:
        over_pictures = " | ".join(titles(notebook.path.read_text(encoding="utf-8")))
        yield from number_faults(notebook, CLAIMED.get(notebook.path.name, []))
        yield from mark_faults(notebook)
        yield from number_faults(Prose(ROOT / "titles", over_pictures))

    assert faults_of(map(read, NOTEBOOKS), check) == {}


def test_measurements_on_the_page_are_generated():
    """The page's numbers come from its events, and from the code."""
    files = [path for folder in PAGES for path in folder.rglob("*") if path.suffix in (".js", ".py", ".html")]
    quoted, put_in = re.compile(r"\"[^\"\n]*\"|`[^`]*`"), re.compile(r"\{[^}]*\}")
    found = {path: quoted.findall(put_in.sub("", path.read_text(encoding="utf-8"))) for path in files}
    strings = {path: [text for text in texts if " " in text] for path, texts in found.items()}
    assert sum(map(len, strings.values())) > 100
    assert [fault for path, texts in strings.items() for fault in number_faults(Prose(path, " | ".join(texts)))] == []


def test_keys_have_one_format():
    pieces = [piece for each in marks.sentences().values() for piece in each]
    assert list(form_faults(pieces, marks.known(ROOT))) == []


def timed(part, path=""):
    """Yield each timed figure of results.json: its key, and the dict that holds it."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from timed(value, f"{path}{name}.")
        elif f"{name}_spread" in part:
            yield f"{path}{name}", part


def whole_prose(number: float, least: float, largest: float, is_chosen: Callable[[str], bool]) -> str:
    """Return all sentences and tables, as if each timed figure that is chosen had this number and this range."""
    results = json.loads(json.dumps(marks.known(ROOT)))
    chosen = [(key, part) for key, part in timed(results) if is_chosen(key.split(".")[-1])]
    assert len(chosen) > 20
    for key, part in chosen:
        name = key.split(".")[-1]
        part |= {name: number, f"{name}_spread": [least, largest]}
    pieces = [piece for each in marks.sentences().values() for piece in each]
    texts = [shown(results, *place) for piece in pieces for place in marks.parse(piece)[1]]
    texts += [block(results) for name, block in tables.BLOCKS.items() if not name.startswith("run")]  # commands' output
    return re.sub(r"[\s|]+", " ", " ".join(texts)).replace(",", "")


def test_timed_figures_have_their_range_wherever_they_are_written():
    """Sentences, answers and tables are written anew, with one wide range for all."""
    text = whole_prose(5432.5, 4321.5, 6543.5, lambda name: True)
    numbers = re.findall(r"\b543[23][\d.]*", text)
    words = r"(?: (?:s|ms|times as long|times the speed|times sooner))?"
    ranges = re.findall(rf"\b543[23][\d.]*{words} \(432[12][\d.]* to 654[34][\d.]*\)", text)
    assert len(numbers) == len(ranges) > 100


def test_ratios_that_may_be_1_are_written_as_the_same():
    text = whole_prose(5432.5, 0.25, 6543.5, lambda name: not UNITS.fullmatch(name))
    assert not re.search(r"\b543[23]", text), "the ratio"
    ranges = len(re.findall(r" to 654[34]", text))
    assert len(re.findall(r"the same(?: time| speed)? \(0[.\d]* to 654[34]", text)) == ranges > 20


def test_pages_show_the_ranges_of_results_json():
    """Read from the pages themselves, without the function that writes them."""
    wide = 0
    for path, pieces in marks.sentences().items():
        text = path.read_text(encoding="utf-8")
        for pattern, places in map(marks.parse, pieces):
            match = pattern.search(text)
            for (key, spec), written in zip(places, match.groups(), strict=True):
                value, form = figure(marks.known(ROOT), key), spec.split(" ")[0]
                if isinstance(value, Figure) and value.largest - value.least > 0.1 * value.value:
                    wide += 1
                    assert f"({value.least:{form}} to {value.largest:{form}}" in " ".join(written.split()), key
                if isinstance(value, Figure) and not UNITS.fullmatch(key.split(".")[-1]):
                    is_same = value.least <= 1 <= value.largest or f"{value.value:{form}}" == f"{1:{form}}"
                    assert ("the same" in " ".join(written.split())) == is_same, key
    assert wide > 0


def test_ratio_without_words_is_refused():
    results = {"a": {"gain": 1.3, "gain_spread": [0.9, 1.5], "ms": 1.3, "ms_spread": [0.9, 1.5], "steps": 3}}
    with pytest.raises(ValueError, match=r"a\.gain is a ratio, and may be 1: its format must have words, as one of"):
        shown(results, "a.gain", ".2f")
    assert shown(results, "a.ms", ".1f") == "1.3 (0.9 to 1.5)" and shown(results, "a.steps", "") == "3"


def test_figures_are_current():
    assert marks.stale(ROOT) == [], "run python -m stages.tools.prose to update them"


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="no Makefile")
def test_targets_of_the_makefile_exist():
    assert REPOSITORY.targets >= {"run", "test", "diff", "exercise"}
    for target in REPOSITORY.targets:
        command = ["make", "-n", target, f"PY={sys.executable}", "STAGE=1", "TEXT=models"]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0, target


# Python in prose runs. tests/test_docs.py runs all commands of PAGES_THAT_RUN.


def snippets() -> list[tuple[str, str]]:
    files = [path for path in FILES if path not in PAGES_THAT_RUN]
    blocks = [(str(path.relative_to(ROOT)), block) for path in files for block in read(path).code_blocks]
    return [(name, block) for name, block in blocks if re.match(r"(from|import) \w", block)]


SNIPPETS = snippets()


@pytest.mark.parametrize(("name", "code"), SNIPPETS, ids=[name for name, _ in SNIPPETS])
@pytest.mark.full
def test_python_in_prose_runs(name, code, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(code, name, "exec"), {})


# The glossary


def glossary() -> list[tuple[str, str]]:
    """Return the terms, and the stage that introduces each."""
    text = (ROOT / "stages" / "README.md").read_text(encoding="utf-8").split("## Glossary")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [(term, row[-1]) for row in rows[2:] for term in row[0].split(", ")]


def test_terms_of_the_glossary_are_in_the_code():
    """A term with an underscore must be a name in its stage's code; any other term must be in its text."""
    present = {key_of(path.name): path for path in REPOSITORY.stages}
    terms = glossary()
    assert len(terms) > 15 and {stage for _, stage in terms} <= {*present}
    assert len({term for term, _ in terms}) == len(terms), "a term is listed twice"
    stages = {stage for _, stage in terms} & {*present}
    files = {stage: [path for path in present[stage].rglob("*") if path.suffix in (".py", ".md")] for stage in stages}
    texts = {stage: " ".join(path.read_text(encoding="utf-8") for path in files[stage]).lower() for stage in stages}
    code = {
        stage: [path.read_text(encoding="utf-8") for path in files[stage] if path.suffix == ".py"] for stage in stages
    }
    names = {stage: set().union(*map(names_in, code[stage])) for stage in stages}
    for term, stage in terms:
        if stage not in present:
            continue
        if "_" in term:
            assert names[stage] & {term, term + "s"}, f"{term} is not a name in {stage}"
        else:
            text = texts[stage]
            pattern = r"\s+".join(map(re.escape, term.lower().split()))
            assert re.search(pattern, text), f"{stage} does not mention {term!r}"


# The checks find faults in a made-up repository


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


def prose_of(made_up: Repository, text: str) -> Prose:
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
def test_dead_links_are_found(made_up, text, faults):
    assert len(list(link_faults(prose_of(made_up, text)))) == faults


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
def test_missing_files_are_found(made_up, text, faults):
    assert len(list(file_faults(prose_of(made_up, text), made_up))) == faults


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
def test_missing_commands_are_found(made_up, text, faults):
    assert len(list(command_faults(prose_of(made_up, text), made_up))) == faults


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
def test_missing_names_are_found(made_up, text, faults):
    assert len(list(name_faults(prose_of(made_up, text), made_up, {"torch"}))) == faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("a block of 16 tokens, 1,024 slots, stage 3, section 2.5, 2019, four times, `8 GiB`, A100 systems", 0),
        ("A wait of\n<!-- figures: x -->\n12 ms\n<!-- /figures -->\n", 0),
        ("```\n12 ms\n```\n\nSo:\n\n    12 ms\n\n", 0),
        ("it takes 12 ms", 1),
        ("12ms, 3.5x, 40%, 1,234 tok/s, 2 GiB, 37 times, 10 tokens/s, 3\nseconds", 8),
        ("a pool of 8 GiB", 0),
    ],
)
def test_typed_numbers_are_found(made_up, text, faults):
    allowed = ["a pool of 8 GiB"] if "a pool" in text else []
    assert len(list(number_faults(prose_of(made_up, text), allowed))) == faults


def test_outdated_allowed_numbers_are_found(made_up):
    assert len(list(number_faults(prose_of(made_up, "nothing"), ["200 MB"]))) == 1


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("<!-- figures: a -->\n1\n<!-- /figures -->\n", 0),
        ("<!-- figures: a -->\n1\n", 1),
        ("1<!-- /figures -->\n", 1),
    ],
)
def test_open_marks_are_found(made_up, text, faults):
    assert len(list(mark_faults(prose_of(made_up, text)))) == faults


def test_keys_in_two_formats_are_found():
    results = {"a": {"b": 4.25, "c": 4}}
    assert list(form_faults(["puts {a.b:.1f} tokens", "and {a.b:.1f} or {a.c}"], results)) == []
    assert len(list(form_faults(["puts {a.b:.1f} tokens", "and {a.b:.0f}"], results))) == 1


def fill(text: str, piece: str) -> str:
    results = {"a": {"gain": 4.25, "count": 1200, "machine": "2 cores (x86)", "ms": 30, "ms_spread": [20, 40]}}
    results["b"] = {"gain": 1.3, "gain_spread": [0.9, 1.5]}
    return marks.fill_in(text, [piece], lambda key, spec: shown(results, key, spec))


@pytest.mark.parametrize(
    ("text", "piece", "filled"),
    [
        ("takes\n3,000 s, 12% of it", "takes {a.gain:.1f} s, {a.gain:.0%} of", "takes\n4.2 s, 425% of it"),
        ("It has 7.", "has {a.count:,}.", "It has 1,200."),
        ("runs (on 1 core (arm)).", "(on {a.machine}).", "runs (on 2 cores (x86))."),
        ("<!-- figures: x -->\n3 s\n<!-- /figures -->\n5 s", "{a.count} s", None),
        ("waits 7 ms", "waits {a.ms:.0f} ms", "waits 30 (20 to 40) ms"),
        ("waits 30 (20\nto 40) ms", "waits {a.ms:.0f} ms", "waits 30 (20\nto 40) ms"),
        ("waits 3 (2\nto 4) ms", "waits {a.ms:.0f} ms", "waits 30 (20 to 40) ms"),
        (
            "runs at 2.0 times\nthe speed.",
            "at {b.gain:.1f times the speed}.",
            "runs at the same speed (0.9 to 1.5 times).",
        ),
        (
            "at 2.0 times the speed (1.9 to 2.4)",
            "at {b.gain:.1f times the speed}",
            "at the same speed (0.9 to 1.5 times)",
        ),
        ("at the same\nspeed.", "at {b.gain:.1f times the speed}.", "at the same speed (0.9 to 1.5 times)."),
    ],
)
def test_numbers_of_a_sentence_are_filled_in(text, piece, filled):
    assert fill(text, piece) == (filled or text.replace("5 s", "1200 s"))


@pytest.mark.parametrize("text", ["3 seconds", "3 s and 4 s", "<!-- figures: x -->\n3 s\n<!-- /figures -->\n"])
def test_missing_or_ambiguous_sentence_is_refused(text):
    with pytest.raises(LookupError, match=r"'{a.count} s,?' in .*numbers.toml must occur once, and occurs [02] times"):
        fill(text, "{a.count} s" + "," * ("seconds" in text))


def test_error_names_the_file_and_the_sentence(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("It takes 3 s.")
    monkeypatch.setattr(marks, "known", lambda root: {})
    for piece, message in (("needs {a} s", "README.md: 'needs {a} s'"), ("takes {a} s", "README.md: .* has no a")):
        monkeypatch.setattr(marks, "sentences", lambda root, piece=piece: {tmp_path / "README.md": [piece]})
        with pytest.raises(ValueError, match=message):
            marks.render(tmp_path / "README.md", tmp_path)


def test_files_of_numbers_exist():
    assert {*marks.sentences()} <= {*marks.prose_files(ROOT)}
