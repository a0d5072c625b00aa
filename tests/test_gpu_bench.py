"""The parts of `make gpu`, tried without a GPU: every part runs on a CPU, with a tiny model."""

import json
import shutil
import subprocess
import sys
import tarfile
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.backends.gpu.ops import PLAIN, Ops
from nanovllm.bench.report import shown
from stages.bench import ranks
from stages.bench.gpu import __main__ as command
from stages.bench.gpu import checklist, common, engine, paper, parts
from stages.bench.gpu.common import TINY, PartReport, Setup, file_of, read_results
from tests.helpers import ROOT, find_bases, folder_of

TRY = ["--device", "cpu", "--tiny"]


@pytest.fixture
def setup(tmp_path):
    return Setup(torch.device("cpu"), True, tmp_path, deadline=float("inf"))


@pytest.mark.parametrize("part", [0, 2, 3, 4, 5])
def test_part_runs_on_a_cpu_and_writes_its_results(part, tmp_path):
    assert command.main([str(part), *TRY, "--out", str(tmp_path), "--seconds", "100"]) == 0
    results = read_results(file_of(tmp_path, part))
    assert results["title"] == command.PARTS[part][0] and "a tiny model" in results["machine"]
    assert results["tables"] and all(results["tables"].values()), "a table has no row"
    assert not [row for rows in results["tables"].values() for row in rows.values() if "failed" in row]


@pytest.mark.nightly
def test_all_parts_run_in_processes_of_their_own(tmp_path):
    assert command.main([*TRY, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "summary.md").read_text()
    assert "failed" not in text and text.count("\nMeasured on cpu, ") == len(command.PARTS)
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        names = {*archive.getnames()}
    assert {"summary.md", *(f"part{part}.{end}" for part in command.PARTS for end in ("json", "log"))} == names


@pytest.mark.full
def test_missing_device_is_a_one_line_error(tmp_path, capsys):
    assert command.main(["2", "--device", "cuda:99", "--out", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert out.startswith("device 'cuda:99' is unavailable: ") and out.count("\n") == 1


def test_parts_share_the_time_of_one_call(tmp_path, monkeypatch):
    """Part 0 takes less than its share, and leaves the rest to the others."""
    clock, given = [0.0], dict[int, float]()

    def measure(number, args, seconds):
        given[number] = seconds
        clock[0] += 50 if number == 0 else seconds
        return 0

    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(command, "measure", measure)
    assert command.main(["0", "6", "7", "8", "9", "--within", "450", "--out", str(tmp_path)]) == 0
    assert given == {0: 90, 6: 100, 7: 100, 8: 100, 9: 100}
    assert command.main(["0", "6", "--out", str(tmp_path)]) == 0
    assert (given[0], given[6]) == (command.PARTS[0][1], command.PARTS[6][1])


def test_invalid_part_is_named(capsys):
    with pytest.raises(SystemExit):
        command.parse(["11"])
    assert "PART must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, got 11" in capsys.readouterr().err


# Counters


def test_counters_are_read_from_what_ncu_prints():
    metrics = ",".join(f'"{metric}"' for metric in parts.METRICS.values())
    rows = ['"","","%","%"', '"0","attend_queries","10.0","90.0"', '"1","attend_queries","14.0","92.0"']
    output = "\n".join(["==PROF== Connected", f'"ID","Kernel Name",{metrics}', *rows, "==PROF== Disconnected"])
    assert parts.read_counters(output) == {"L2 hits": 12.0, "of the memory's bandwidth": 91.0}
    with pytest.raises(ValueError, match="ncu counted nothing: ==ERROR== no permission"):
        parts.read_counters("==ERROR== no permission")


# Reports


def fail() -> dict:
    raise RuntimeError("no such kernel")


def test_failed_case_shows_its_traceback_and_the_next_one_follows(setup, capsys):
    rows = PartReport(setup, 2, "steps").table("a", {"one": fail, "two": lambda: {"ms": 2.0}})
    assert rows["two"] == {"ms": 2.0} and "no such kernel" in rows["one"]["failed"]
    assert "in fail" in capsys.readouterr().err
    assert read_results(file_of(setup.out, 2))["tables"]["a"] == rows


STUCK = """
import sys, time, torch
from pathlib import Path
from stages.bench.gpu import common
from stages.bench.gpu.common import PartReport, Setup
common.CASE_SECONDS = 0.5
setup = Setup(torch.device("cpu"), True, Path(sys.argv[1]), float("inf"))
def wait_for_ever():
    time.sleep(100)
PartReport(setup, 2, "steps").table("a", {"one": lambda: {"ms": 1.0}, "two": wait_for_ever})
"""


@pytest.mark.full
def test_stuck_case_shows_its_stack_and_another_process_goes_on(setup, tmp_path):
    done = subprocess.run([sys.executable, "-c", STUCK, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "wait_for_ever" in done.stderr and "one: ms 1" in done.stdout
    rows = PartReport(setup, 2, "steps").table("a", {"one": fail, "two": fail, "three": lambda: {"ms": 3.0}})
    assert rows == {"one": {"ms": 1.0}, "two": {"failed": "it did not end"}, "three": {"ms": 3.0}}


def test_part_goes_on_after_a_crash_as_long_as_new_cases_begin(tmp_path, monkeypatch):
    processes = iter([({"a": {}}, -11), ({"a": {}, "b": {}}, -11), ({"a": {}, "b": {}}, -11), ({}, 0)])

    def run(*_, **__):
        rows, status = next(processes)
        results = {"title": "t", "machine": "m", "notes": [], "tables": {"x": rows}}
        file_of(tmp_path, 2).write_text(json.dumps(results))
        return status, ""

    monkeypatch.setattr(command, "run", run)
    assert command.main(["2", *TRY, "--out", str(tmp_path)]) == 1
    assert next(processes) == ({}, 0), "it must give up once a process begins nothing"


def test_case_without_time_is_named(setup):
    rows = PartReport(setup._replace(deadline=0.0), 2, "steps").table("a", {"batch 8": fail})
    assert rows == {"batch 8": {"failed": "no time left"}}


# Commands


def test_command_that_does_not_end_is_killed_with_its_children_and_its_output_is_kept(monkeypatch, capsys):
    code = "import subprocess; print('first', flush=True); subprocess.run(['sleep', '100'])"
    timers = []

    class Timer:
        """A timer whose time is up when the command has printed something."""

        def __init__(self, seconds, function, arguments):
            self.fire = lambda: function(*arguments)

        def start(self):
            timers.append(self)

        def cancel(self):
            pass

    class Log(StringIO):
        def flush(self):
            for timer in timers:
                timer.fire()

    monkeypatch.setattr(common.threading, "Timer", Timer)
    status, output = common.run([sys.executable, "-c", code], 0.5, log := Log())
    assert status < 0 and output == log.getvalue() == capsys.readouterr().out == "first\n"


REPORT = {"measured": {"nanovllm": {"step ms": 2.0}}, "says": ["a note"]}
REPORT |= {"machine": {"dtype": "bfloat16"}, "settings": {"rounds": 3}}
SAID = {"dtype": {"nanovllm": "bfloat16"}, "rounds": {"nanovllm": 3}}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (f"import json; json.dump({REPORT}, open(sys.argv[-1], 'w'))", SAID | {"step ms": {"nanovllm": 2.0}}),
        ("sys.exit('error: no memory')", {"failed": {"exit status": 1, "last line": "error: no memory"}}),
    ],
    ids=["finished", "failed"],
)
def test_bench_runs_in_a_process_and_its_errors_are_reported(code, expected, setup, monkeypatch):
    real, commands = common.run, []

    def instead(command, *more, **options):
        commands.append(command)
        return real([command[0], "-c", f"import sys; {code}", *command[1:]], *more, **options)

    monkeypatch.setattr(engine, "run", instead)
    report = PartReport(setup, 6, "decode")
    engine.run_bench(setup, report, "race")
    assert commands[0][1:3] == ["-m", "stages.bench"] and commands[0][3:6] == ["race", "--device", "cpu"]
    assert report.results["tables"] == {"python -m stages.bench race": expected}
    engine.run_bench(setup._replace(deadline=0.0), report, "paged")
    assert report.results["tables"]["python -m stages.bench paged"]["failed"]["last line"] == "no time left"


def test_every_bench_of_a_part_is_a_valid_command():
    from stages.bench.commands import bench

    for benches in [*engine.FULL.values(), *engine.TINY.values()]:
        for each in benches:
            name, *flags = each.split()
            bench.commands[name].make_context(name, [*flags, "--device", "cpu", "--json", "-"])
    assert engine.FULL.keys() == engine.TINY.keys() == {6, 7, 8, 9}


def is_copy(file: str) -> bool:
    """Return whether a branch's file is one of its base."""
    _, branch, *rest = Path(file).parts
    original = folder_of(find_bases(ROOT)[f"stages.{branch}"]).joinpath(*rest)
    return original.exists() and original.read_bytes() == (ROOT / file).read_bytes()


def test_files_with_gpu_tests_need_few_packages():
    files = engine.gpu_tests()
    named = {path.name for path in files}
    assert {"test_contract.py", "test_host_tier.py", "test_same_tokens.py"} <= named and len(files) > 10
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not [name for name in ("hypothesis", "numba", "matplotlib", "nbformat") if f"import {name}" in text], (
            path
        )
    marked = subprocess.run(
        ["grep", "-rlE", "--include=test_*.py", "^@?(gpu|pytest.mark.gpu)", "stages"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    own = {
        ROOT / line for line in marked.stdout.splitlines() if not (line.startswith("stages/more_") and is_copy(line))
    }
    assert own <= {*files}


@pytest.mark.parametrize(
    "line",
    ["tests/test_a.py::test_b[one two] FAILED  [ 5%]", "[gw3] [ 12%] FAILED tests/test_a.py::test_b"],
)
def test_outcomes_are_read_from_each_line(line):
    matches = engine.OUTCOME.finditer(f"collected 3 items\n{line}\nE   FAILED to launch")
    assert [(match[1], match[0]) for match in matches] == [("FAILED", line)]


# Ranks


@pytest.mark.full
def test_page_about_ranks_says_what_each_rank_holds_and_waits_for():
    text = (ROOT / "stages" / "SCALE.md").read_text(encoding="utf-8")
    *counted, _, _ = ranks.compare(ranks.parse(["--device", "cpu", "--rounds", "1"])).items()
    assert len(counted) == 3
    for name, numbers in counted:
        assert f"\n{name}: {shown(numbers)}\n" in text


# The checklist


def test_checklist_has_every_kernel_and_finds_a_wrong_one(setup, monkeypatch):
    def wrong(out, **arguments):
        PLAIN.gemv(out=out, **arguments)
        out[0, 0] += 1

    monkeypatch.setattr(checklist, "triton_ops", lambda: PLAIN._replace(gemv=wrong))
    names = [*checklist.kernel_arguments(setup)]
    assert {name.split(",")[0] for name in names} == {*Ops._fields}
    for name in names:
        if name.startswith("gemv"):
            with pytest.raises(AssertionError, match="not close"):
                checklist.compare_kernel(setup, name)
        else:
            assert checklist.compare_kernel(setup, name)["difference"] == 0


def test_too_many_different_sequences_are_an_error():
    assert checklist.count_different([[1], [2]] * 20, [[1], [2]] * 19 + [[1], [3]]) == {"different": "1 of 40"}
    with pytest.raises(ValueError, match="2 of 4"):
        checklist.count_different([[1], [2]] * 2, [[1], [3]] * 2)


def test_table_on_paper_is_current_and_its_shares_are_of_the_floor(tmp_path):
    assert paper.BLOCK.findall(paper.PAGE.read_text()) == [paper.table()]
    work = paper.works()["1 sequence, 7B (part 6)"]
    weights, keys_and_values = 2 * (6738415616 - 32000 * 4096), paper.CONTEXT * 524288
    assert work.num_bytes == weights + keys_and_values
    results = shutil.copytree(paper.RESULTS, tmp_path / "h100")
    common.write_summary(results, command.PARTS)
    assert (results / "summary.md").read_text() == (paper.RESULTS / "summary.md").read_text()


def test_copies_that_wait_for_steps_are_an_error():
    overlap, wait = ([{"decode": 5.0, "load": 4.0, "both": both}] for both in (5.2, 8.6))
    assert parts.check_hidden(overlap, True)["hidden"] == pytest.approx(0.95)
    assert parts.check_hidden(wait, False)["hidden"] == pytest.approx(0.1), "a CPU hides nothing"
    with pytest.raises(ValueError, match=r"0\.10 of the shorter one is hidden"):
        parts.check_hidden(wait, True)


def test_each_row_of_the_checklist_says_its_dtype_and_its_spread(setup, monkeypatch):
    monkeypatch.setattr(checklist, "triton_ops", lambda: PLAIN)
    rows = [checklist.compare_kernel(setup, "gemv, one row"), checklist.compare_sampler(setup, "greedy")]
    rows.append(checklist.compare_engine(setup, "graphs"))
    for row in rows:
        assert row["dtype"] == "float32" and [name for name in row if name.endswith("_spread")]
        assert row.get("calls", row.get("steps")) > 0


def test_operations_of_a_step_are_counted():
    shape = TINY  # hidden 16, 4 heads of 8, 2 kv heads, mlp 32, 2 layers, vocabulary 64
    layer = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 3 * 16 * 32
    norms = 5 * shape.hidden_size
    decode = parts.operations_of("tiny", batch=3, context=10, count=1)
    assert decode == 3 * (2 * (2 * layer + norms) + 2 * 16 * 64 + 4 * 2 * 4 * 8 * 10)
    prefill = parts.operations_of("tiny", batch=1, context=4, count=4)
    assert prefill == 4 * 2 * (2 * layer + norms) + 2 * 16 * 64 + 4 * 2 * 4 * 8 * (1 + 2 + 3 + 4)
