"""The tool of `make mutants`: its sample, its mutants, its score and its page. tests/mutants/ holds it."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from datetime import date, timedelta

import pytest

from tests.helpers import ROOT
from tests.mutants import kernels, sample
from tests.mutants.copies import copy_repository
from tests.mutants.mutations import Mutant, Source
from tests.mutants.report import Result, insert, page, score, wilson

HERE = ROOT / "tests" / "mutants"
EQUIVALENT = {each.id for each in sample.read_equivalents()}
FILE = "nanovllm/engine/example.py"
CODE = '''
import logging

LIMIT = 100

def first(numbers: list[int | None], limit: int = 3) -> int | None:
    """Return the first number above a limit."""
    assert limit > 0, "a limit"
    for number in numbers:
        if number is not None and number > limit:
            logging.info("found %d", number + 1)
            return number
    raise ValueError(f"no number above {limit + 1}")
'''


def mutant(file=FILE, operator="AddNot", line="if a:", nth=0) -> Mutant:
    return Mutant(file, "f", operator, line, nth, 0, 1, (1, 1))


# The mutants


@pytest.fixture
def mutants():
    pytest.importorskip("cosmic_ray", reason="make mutants installs it")
    return Source(FILE, CODE).mutants()


def test_mutants_change_behavior_and_nothing_else(mutants):
    found = {(each.operator, each.line) for each in mutants}
    assert ("ReplaceComparisonOperator_Gt_GtE", "if number is not None and number > limit:") in found
    assert ("ZeroIterationForLoop", "for number in numbers:") in found
    lines = {each.line for each in mutants}
    assert not any(part in line for line in lines for part in ("logging", "assert", "LIMIT"))
    changed = [each for each in mutants if each.line.startswith(("def ", "raise "))]
    assert {each.operator for each in changed} == {"NumberReplacer", "DeleteStatement"}, "no type, and no wording"


def test_each_mutant_is_another_program(mutants):
    source = Source(FILE, CODE)
    texts = [source.apply(each) for each in mutants]
    assert None not in texts and CODE not in texts and len({*texts}) == len(mutants) > 8


def test_deleted_statement_leaves_the_rest(mutants):
    deletion = next(each for each in mutants if each.operator == "DeleteStatement")
    assert Source(FILE, CODE).apply(deletion) == CODE.replace(
        'raise ValueError(f"no number above {limit + 1}")', "pass"
    )


def test_functions_of_an_earlier_stage_have_no_mutants(mutants):
    assert mutants and Source(FILE, CODE).mutants(unchanged=frozenset({"first"})) == []


def test_ids_survive_edits_elsewhere(mutants):
    edited = (
        "# a new comment\n"
        + CODE.replace("first number", "next number")
        + "\n\ndef other() -> int:\n    return 1 + 1\n"
    )
    ids = {each.id for each in mutants}
    assert len(ids) == len(mutants)
    assert ids < {each.id for each in Source(FILE, edited).mutants()}


# The sample


def test_order_depends_on_the_seed_and_each_id_alone():
    some = [mutant(line=f"if a > {number}:") for number in range(50)]
    order = sample.ranked(some, 44)
    assert order == sample.ranked(some[::-1], 44) != sample.ranked(some, 45)
    others = [mutant(line=f"if b > {number}:") for number in range(50)]
    assert [each for each in sample.ranked(some + others, 44) if each in some] == order


def test_nights_go_through_all_mutants_outside_of_the_sample():
    days = [date(2026, 11, 28) + timedelta(days) for days in range(11)]
    parts = [sample.slice_of(day, 7000, 420) for day in days]
    assert sorted(number for part in parts for number in part) == [*range(420, 7000)]
    assert sample.slice_of(days[0] + timedelta(11), 7000, 420) == parts[0]


def test_targets_exist_and_each_file_is_mutated_once():
    targets = sample.read_targets(ROOT)
    files = [target.file for target in targets]
    assert len({*files}) == len(files) > 60
    assert {"nanovllm/engine/scheduler.py", "stages/s7_cpu_offload/cost_model.py"} < {*files}
    assert not any("/llama/" in file or "s1_" in file for file in files)
    assert all({*target.always} <= {*target.tests} for target in targets)
    assert sample.settings()["sample"] >= 400


def test_equivalent_mutants_have_a_reason_and_lines_that_exist():
    listed = sample.read_equivalents()
    assert len({each.id for each in listed}) == len(listed)
    for each in listed:
        functions = Source(each.file, (ROOT / each.file).read_text(encoding="utf-8")).functions
        text = (
            functions[each.function] if each.function in functions else (ROOT / each.file).read_text(encoding="utf-8")
        )
        assert each.line in [line.strip() for line in text.splitlines()], f"{each.id}: its line has changed"
        assert len(each.reason) > 20 and each.change, each.id


# The score and the page


def test_score_leaves_out_equivalent_mutants_and_counts_timeouts():
    statuses = ["killed", "killed", "timed out", "survived", "equivalent"]
    assert score(Result(mutant(), status, "") for status in statuses) == (3, 4)


@pytest.mark.parametrize(("hits", "count"), [(380, 400), (0, 10), (10, 10), (1, 3)])
def test_interval_has_the_bounds_that_wilson_defines(hits, count):
    """The bounds are the two shares p from which hits / count is 1.96 standard deviations away."""
    for bound in wilson(hits, count):
        assert (hits / count - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / count, abs=1e-12)
    low, high = wilson(hits, count)
    assert low < high and low - 1e-12 <= hits / count <= high + 1e-12


def test_page_has_the_counts_of_each_file_and_its_survivors():
    results = [
        Result(mutant(), "killed", ""),
        Result(mutant(line="if b:"), "survived", "-a\n+b"),
        Result(mutant("stages/s4_x/engine.py"), "timed out", ""),
        Result(mutant("stages/s4_x/scheduler.py"), "equivalent", ""),
    ]
    text = page(results, 7000, 44, "2026-11-28")
    assert "2 of 3 mutants killed" in text and "7,000" in text
    assert f"| {FILE} | 2 | 1 | 0 | 1 | 0 |" in text and "| stages/s4_x | 2 | 0 | 1 | 0 | 1 |" in text
    assert results[1].mutant.id in text and results[0].mutant.id not in text


def test_new_report_replaces_the_old_one():
    text = "# A page\n\n<!-- mutants -->\n\nold\n<!-- /mutants -->\nThe end.\n"
    newer = insert(insert(text, "mutants", "new"), "mutants", "newer")
    assert newer == "# A page\n\n<!-- mutants -->\n\nnewer\n<!-- /mutants -->\nThe end.\n"


def test_page_has_the_counts_of_the_stored_results():
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    judged = Counter(status for id, (status, _) in results.items() if id not in EQUIVALENT)
    text = (HERE / "README.md").read_text(encoding="utf-8")
    killed, count = judged["killed"] + judged["timed out"], judged.total() - judged["no program"]
    assert f"{killed} of {count} mutants killed: {killed / count:.1%}" in text
    assert all(f"`{id}`" in text or id in EQUIVALENT for id, (status, _) in results.items() if status == "survived")


# The CPU kernels' faults


def test_faults_of_kernels_have_their_place_and_a_test():
    faults = kernels.read_faults()
    assert len({each.fault for each in faults}) == len(faults) >= 20
    for each in faults:
        text = (ROOT / kernels.KERNELS / each.file).read_text(encoding="utf-8")
        assert kernels.plant(each, text) != text
        file, test = re.split(r"::|\[", each.test)[:2]
        assert f"def {test}(" in (ROOT / kernels.TESTS / file).read_text(encoding="utf-8")


@pytest.mark.full
def test_faults_of_kernels_name_tests_that_run():
    tests = {f"{kernels.TESTS}/{each.test}" for each in kernels.read_faults()}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--part", "all", "-m", "not nightly", *tests]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert {each for each in tests if each not in found} == set()


@pytest.mark.nightly  # some compile all kernels
@pytest.mark.parametrize("fault", [each for each in kernels.read_faults() if "invariance" in each.test])
def test_a_fault_that_makes_bits_depend_on_company_is_noticed(fault, tmp_path):
    copy_repository(tmp_path)
    path = tmp_path / kernels.KERNELS / fault.file
    path.write_text(kernels.plant(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
    assert kernels.judge(*kernels.run_test(tmp_path, fault.test))[0] == kernels.NOTICED


def test_page_lists_the_faults_of_kernels():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert all(f"| {each.file} | {each.fault} | `test_" in page for each in kernels.read_faults())


def test_only_a_failed_assertion_notices_a_fault():
    assert kernels.judge(0, "4 passed") == (kernels.SURVIVED, "")
    failed = "FAILED nanovllm/tests/cpu/test_a.py::test_b[dtype0] - AssertionError: Tensor-likes are not close!"
    assert kernels.judge(1, failed) == (kernels.NOTICED, "test_b[dtype0]")
    for status, output in ((1, failed.replace("AssertionError", "TypingError")), (2, ""), (-11, "")):
        with pytest.raises(RuntimeError, match="no assertion failed"):
            kernels.judge(status, output)


# The worker


@pytest.mark.full  # it imports all libraries
def test_worker_kills_a_mutant_and_restores_its_file(tmp_path):
    (tmp_path / "code.py").write_text("def double(number):\n    return number * 2\n")
    test = "from code import double\n\ndef test_double():\n    assert double(3) == 6\n\ndef test_other():\n    pass\n"
    (tmp_path / "test_code.py").write_text("import sys\nsys.modules.pop('code', None)\n" + test)
    jobs = [
        {"file": "code.py", "text": None, "files": ["test_code.py"], "trace": ["code.py"], "timeout": 60},
        {
            "file": "code.py",
            "text": "def double(number):\n    return number * 3\n",
            "files": ["test_code.py"],
            "timeout": 60,
        },
        {"file": "code.py", "text": "while True: pass\n", "files": ["test_code.py"], "timeout": 5},
    ]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.worker"],
        cwd=tmp_path, env=environment, input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    baseline, killed, endless = [json.loads(line) for line in done.stdout.splitlines()]
    assert baseline["report"]["failures"] == [] and baseline["report"]["lines"]["code.py"]["2"] == [
        "test_code.py::test_double"
    ]
    assert killed["report"]["failures"] == ["test_code.py::test_double"]
    assert endless["ended"] == "timeout"
    assert "number * 2" in (tmp_path / "code.py").read_text()
