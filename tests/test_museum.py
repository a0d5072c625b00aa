"""The museum: every fault fits into its stage, tests that know it find it, and the tests to start with find none."""

import pytest

from stages.tools import museum
from stages.tools.chain import ChainError, load
from stages.tools.museum import HEALTHY, START, Fault, address, catalog, faults, red, visit
from tests.helpers import ROOT, full

CHAIN, EXHIBITS = load(ROOT), faults()
ROOMS = list(dict.fromkeys(fault.stage for fault in EXHIBITS))


def room_of(key: str) -> list[Fault]:
    return [fault for fault in EXHIBITS if fault.stage == key]


def test_enough_faults_of_each_project_are_shown():
    assert len(EXHIBITS) >= 8 and len({fault.name for fault in EXHIBITS}) == len(EXHIBITS)
    assert {fault.project for fault in EXHIBITS} == {"vLLM", "SGLang", "llama.cpp", "LMCache"}
    assert ROOMS == ["s4", "s5", "s6", "s7"]
    assert all(fault.threads and fault.was.endswith(".") and fault.history.endswith(".") for fault in EXHIBITS)


@pytest.mark.parametrize("key", [*map(full, ROOMS[:-2]), "s6", full("s7")])
def test_each_fault_is_found_by_the_test_of_its_name_and_by_no_test_to_start_with(key):
    stage, here = CHAIN.stage(key), room_of(key)
    reports = visit(stage, here, (ROOT / "tests" / "museum" / f"{key}.py").read_text(encoding="utf-8"))
    assert reports[HEALTHY] and red(reports[HEALTHY]) == []
    assert {fault.name for fault in here if f"test_{fault.version}" not in red(reports[fault.version])} == set()
    cached = ", enable_prefix_caching=True" if key in ("s6", "s7") else ""
    start = visit(stage, here, START.format(number=stage.number, options=cached))
    assert all(each for each in start.values()) and {name: red(each) for name, each in start.items() if red(each)} == {}


def test_a_fault_that_does_not_fit_is_named():
    fault = EXHIBITS[0]._replace(edits=(EXHIBITS[0].edits[0]._replace(old="nowhere"),))
    with pytest.raises(ChainError, match=f"{fault.name}: stages/s4_continuous_batching/.* has 0 places for 'nowhere'"):
        fault.plant(CHAIN.stage("s4"))


def test_the_catalog_has_all_rooms_and_threads():
    text = "\n".join(catalog(CHAIN, EXHIBITS))
    for fault in EXHIBITS:
        assert f"{fault.name}, {fault.project}: " in text and address(fault.threads[0]) in text
    assert "make museum STAGE=7" in text


@pytest.fixture
def museum_at(tmp_path, monkeypatch):
    """Return a function that runs the command with a folder of its own for exercises."""
    for folder in ("stages", "nanovllm"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: museum.main(arguments, tmp_path)


def test_a_visit_writes_tests_and_then_says_what_they_find(museum_at, tmp_path, capsys):
    assert museum_at("5") == 0
    assert "exercises/museum/s5.py is ready" in capsys.readouterr().out
    file = tmp_path / "exercises" / "museum" / "s5.py"
    assert museum_at("5") == 0
    out = capsys.readouterr().out
    assert "one-of-n, vLLM: not found" in out and "--hint one-of-n" in out
    file.write_text((ROOT / "tests" / "museum" / "s5.py").read_text(encoding="utf-8"), encoding="utf-8")
    assert museum_at("5") == 0
    out = capsys.readouterr().out
    assert "one-of-n, vLLM: found by test_one_of_n" in out and "Nothing is left to find in this room." in out


def test_a_test_that_is_red_on_the_stage_itself_is_shown(museum_at, tmp_path, capsys):
    museum_at("5")
    (tmp_path / "exercises" / "museum" / "s5.py").write_text("def test_all_is_lost():\n    assert False\n")
    assert museum_at("5") == 1
    assert "All is lost." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("9",), "there is no stage '9'"),
        (("1",), "stage 1 has no room; there are: s4, s5, s6, s7"),
        (("--hint", "x"), "there is no exhibit 'x'; there are: counted-short, half-reset"),
    ],
)
def test_misuse_is_one_line(museum_at, capsys, arguments, message):
    assert museum_at(*arguments) == 2
    assert message in capsys.readouterr().err


def test_hints_and_faults_are_shown_on_demand(museum_at, capsys):
    assert museum_at("--hint", "one-of-n") == 0
    assert "its client hangs up" in " ".join(capsys.readouterr().out.split())
    assert museum_at("5", "--reveal", "one-of-n") == 0
    assert "+        for seq in samples[:1]:" in capsys.readouterr().out
