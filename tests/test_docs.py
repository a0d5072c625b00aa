"""The commands in the docs run, and their options exist."""

import importlib
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest

from nanovllm.checkpoints.known import KNOWN
from nanovllm.cli.commands import nanovllm
from stages.bench.commands import bench
from tests.blocks import FENCE, PAGES, REASONS, ROOT, Block, Session, commands_in, merge_python, read_blocks

NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}
README = ROOT / "nanovllm" / "README.md"
PROGRAMS = {"cat", "cd", "curl", "docker", "echo", "git", "grep", "make", "nanovllm", "pip", "printf", "python", "vllm"}
PROGRAMS |= {".", "export", "ncu", "nsys", "serve", "smg"}
MAX_LINES = {ROOT / "README.md": 150, README: 120} | {
    README.parent / "docs" / name: 170 for name in ("python.md", "server.md")
}


def test_pages_are_short_and_their_code_is_fenced():
    for page in PAGES:
        text, name = page.read_text(encoding="utf-8"), NAMES[page]
        assert text.count("\n") <= MAX_LINES.get(page, 160), name
        fences = re.findall(r"^```(\S.*)$", text, re.MULTILINE)
        assert len(fences) == len(FENCE.findall(text)), f"{name}: a fence has a language, and at most one word after it"
        assert {block.word for block in read_blocks(page)} <= {"", "server", *REASONS}, name
        assert not re.search(r"\n\n    \S", FENCE.sub("", text)), f"{name}: indented code is run by no test"


def test_options_exist():
    for block in [block for page in PAGES for block in read_blocks(page)]:
        if block.language == "python":
            compile(block.code, str(block), "exec")
            continue
        for program, *words in commands_in(block.code):
            assert program.rpartition("/")[2] in PROGRAMS, f"{block}: unknown program {program}"
            if program == "nanovllm":
                parse(words, str(block))
            elif words[:2] == ["-m", "stages.bench"]:
                parse(words[2:], str(block), bench)


def parse(words: list[str], place: str, command: click.Command = nanovllm) -> None:
    """Parse a command line of nanovllm, or of another program, as the command does, and run nothing."""
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        result = command.get_command(click.Context(command), name)
        assert result is not None, f"{place}: there is no command {name}"
        command = result
    try:
        with suppress(click.exceptions.Exit):  # --help, for example
            command.make_context("nanovllm", words)
    except click.ClickException as error:
        raise AssertionError(f"{place}: {error.format_message()}") from None


OFTEN = ("README.md", "python.md", "server.md")  # pages whose commands run with each change, the others at night


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [page if page.name in OFTEN else pytest.param(page, marks=pytest.mark.nightly) for page in PAGES],
    ids=NAMES.get,
)
def test_blocks_run(page, tmp_path):
    with session(tmp_path) as shell:
        for block in merge_python(block for block in read_blocks(page) if block.runs):
            shell.run(block)


def session(folder: Path) -> Session:
    """Return a session where `nanovllm` is the command of this repository, computing with plain operations."""
    programs, workplace = folder / "bin", folder / "work"
    programs.mkdir()
    workplace.mkdir()
    (programs / "nanovllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m nanovllm "$@"\n')
    (programs / "nanovllm").chmod(0o755)
    return Session(
        workplace,
        PATH=os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        PYTHONPATH=str(ROOT),
        NANOVLLM_ATTENTION_BACKEND="torch",
        OMP_NUM_THREADS="1",
    )


def test_readme_says_how_much_make_chat_downloads():
    assert f"SmolLM2 135M: a file of {KNOWN['smollm2'].num_bytes / 1e6:.0f} MB" in PAGES[0].read_text(encoding="utf-8")


def test_options_that_replace_those_of_llama_cpp_exist():
    text = (README.parent / "docs" / "from-llama-cpp.md").read_text(encoding="utf-8")
    theirs, ours = zip(*re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE), strict=True)
    named = re.findall(r"`(--[a-z-]+)", " ".join(ours))
    commands = [nanovllm.get_command(click.Context(nanovllm), name) for name in ("generate", "chat", "serve")]
    options = {option for command in commands for parameter in command.params for option in parameter.opts}
    assert len(named) > 20 and {*named} <= options
    flags = [flag for cell in theirs for flag in re.findall(r"`(-[a-z-]+)", cell)]
    assert len(flags) == len({*flags}), "each option of llama.cpp has one row"


def test_every_page_of_the_docs_is_linked_from_the_quickstart():
    text = README.read_text(encoding="utf-8")
    assert all(f"(docs/{page.name})" in text for page in PAGES if page.parent.name == "docs")


# The checks find faults


@pytest.mark.parametrize("words", [["brew"], ["generate", "--temprature", "1"], ["bench", "latency", "--rounds", "x"]])
def test_wrong_command_line_is_found(words):
    with pytest.raises(AssertionError, match="page"):
        parse(words, "page")


def test_failing_block_is_found(tmp_path):
    (tmp_path / "page.md").write_text("```sh\nfalse | true\n```\n\n```sh gpu\nfalse\n```\n\n```json\n{}\n```\n")
    failing, skipped = read_blocks(tmp_path / "page.md")
    assert failing.runs and not skipped.runs
    with session(tmp_path) as shell, pytest.raises(AssertionError, match=r"page\.md, line 1: exit status 1"):
        shell.run(failing)


def test_neighboring_python_blocks_share_names(tmp_path):
    blocks = [
        Block(tmp_path / "page.md", line, "python", "", code) for line, code in ((1, "x = 2\n"), (5, "print(x)\n"))
    ]
    with session(tmp_path) as shell:
        assert [shell.run(block) for block in merge_python(blocks)] == ["2\n"]


# The nightly checks of an installation (.ci/install_check.py and .ci/bounds_check.py)


def test_every_dependency_has_a_lower_bound(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    bounds_check = importlib.import_module("bounds_check")
    names = {pin.split("==")[0] for pin in bounds_check.lower_bounds()}
    assert {"click", "pydantic", "numba", "starlette", "llguidance"} <= names and "torch" not in names


def test_nightly_runs_the_checks_of_an_installation():
    nightly = (ROOT / ".ci" / "nightly").read_text(encoding="utf-8")
    names = ("install_check", "clone_check", "other_projects", "bounds_check", "torch_check", "order_check")
    assert all(f"python3 .ci/{name}.py" in nightly for name in names)
