"""The table of clients in the docs shows each program of clients.toml, with its version and all of its functions."""

import re

import pytest

from .servers import ANSWERS, FAMILIES, script
from .table import HEAD, PAGE, PROGRAMS, Client, Result, clients, reason, render, row, rows_of, words_of

CLIENTS = clients()
HARNESS = {"conftest.py", "run.py", "run.mjs"}


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_program_has_a_section():
    files = {path.name for path in PROGRAMS.iterdir() if path.suffix in (".py", ".mjs")} - HARNESS
    assert files == {client.program for client in CLIENTS} and len(files) >= 12
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_versions_are_pinned_and_functions_are_found(client):
    assert re.fullmatch(r"\d+(\.\d+)+", client.version)
    assert client.functions and client.server in {*FAMILIES, "storyteller"}


def test_table_shows_every_program_with_its_version_and_functions(page):
    rows = rows_of(page)
    assert [(name, version) for name, version, *_ in rows] == [(client.name, client.version) for client in CLIENTS]
    for client, (_, _, works, fails) in zip(CLIENTS, rows, strict=True):
        failing = [each.partition(" (")[0] for each in fails.split("; ") if each]
        assert {*works.split(", "), *failing} - {""} == {words_of(function) for function in client.functions}


def test_row_separates_what_works_from_what_fails():
    client = Client("a", "openai_python.py", ["a==1.2"], "qwen3")
    results = [Result("try_chat", None), Result("try_tools", "ValueError: x | y\nmore"), Result("try_named_tool", None)]
    assert row(client, results) == "| a | 1.2 | chat, named tool | tools (ValueError: x / y) |\n"
    assert reason("x" * 1000) == "x" * 200


def test_new_rows_replace_only_the_table(page):
    changed = render(page, ["| a | 1 | b | |\n"])
    assert rows_of(changed) == [["a", "1", "b", ""]]
    assert render(changed, [f"| {' | '.join(cells)} |\n" for cells in rows_of(page)]).split() == page.split()
    assert page.count(HEAD) == 1


def test_part_of_a_program_runs_only_the_functions_with_its_word():
    parts = [client for client in CLIENTS if client.only]
    for client in parts:
        whole = next(each for each in CLIENTS if each.program == client.program and not each.only)
        assert client.functions == [name for name in whole.functions if client.only in name] != whole.functions
    assert {client.server for client in parts} == {"llama3", "mistral"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_has_the_format_of_its_family(family):
    texts = script(FAMILIES[family])
    assert texts.keys() == ANSWERS.keys()
    mark = {"qwen3": "<tool_call>", "llama3": '"parameters"', "mistral": "[TOOL_CALLS]"}[family]
    assert mark in texts["What is the weather in Paris?"] and mark not in texts["Jason is 25 years old."]


def test_no_question_is_part_of_another():
    assert [(a, b) for a in ANSWERS for b in ANSWERS if a != b and a in b] == []
