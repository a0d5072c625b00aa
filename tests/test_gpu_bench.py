"""The parts of `make gpu`, tried without a GPU: every part runs on a CPU, with a tiny model."""

import json
import subprocess
import time

import pytest
import torch

from stages.bench.gpu import __main__ as command
from stages.bench.gpu import engine, parts
from stages.bench.gpu.common import TINY, PartReport, Setup
from tests.helpers import ROOT


@pytest.fixture
def setup(tmp_path):
    return Setup(torch.device("cpu"), True, tmp_path, deadline=float("inf"))


@pytest.mark.parametrize("part", [2, 3, 4, 5, *(pytest.param(part, marks=pytest.mark.full) for part in (6, 7, 8, 9))])
def test_part_runs_on_a_cpu_and_writes_its_results(part, tmp_path, capsys):
    assert command.main([str(part), "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / f"part{part}.json").read_text())
    assert result["title"] == command.PARTS[part][0] and "a tiny model" in result["machine"]
    assert result["tables"] and all(result["tables"].values()), "a table has no row"
    assert (tmp_path / f"part{part}.md").read_text().startswith(f"# Part {part}: ")
    assert f"part{part}.json and " in capsys.readouterr().out


@pytest.mark.full
def test_tests_marked_gpu_run_in_a_process(tmp_path):
    assert command.main(["1", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    tables = json.loads((tmp_path / "part1.json").read_text())["tables"]
    for title in ("Tests marked gpu", "Tests of the GPU's kernels"):
        [counts] = tables[title]
        assert counts.pop("skipped") > 0 and counts.keys() <= {"deselected"}


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
    assert {ROOT / line for line in marked.stdout.splitlines() if line.endswith(".py")} <= {*files}


def test_missing_device_is_a_one_line_error(capsys):
    assert command.main(["2", "--device", "cuda:99"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("device 'cuda:99' is unavailable: ") and err.count("\n") == 1


def test_invalid_part_is_named(capsys):
    with pytest.raises(SystemExit):
        command.parse(["10"])
    assert "PART must be one of 1, 2, 3, 4, 5, 6, 7, 8, 9, got 10" in capsys.readouterr().err


def test_case_without_time_is_named(setup):
    report = PartReport(setup._replace(deadline=0.0), 2, "steps")
    assert not report.has_time("batch 8")
    report.write()
    assert "Left out, because there was no time: batch 8." in (setup.out / "part2.md").read_text()
    assert PartReport(setup, 2, "steps").has_time("batch 8")


REPORT = {"measured": {"nanovllm": {"step ms": 2.0}}}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (f"import json; json.dump({REPORT}, open(sys.argv[-1], 'w')); print('the table')", "```text\nthe table\n```"),
        ("sys.exit('error: no memory')", "\nexit status 1: error: no memory"),
        (
            "import time; print('peer: 9 tokens a second', file=sys.stderr, flush=True); time.sleep(60)",
            "\nstopped after 1 seconds: peer: 9 tokens a second",
        ),
    ],
    ids=["finished", "failed", "late"],
)
def test_bench_runs_in_a_process_and_its_errors_are_reported(code, expected, setup, monkeypatch, capsys):
    real, commands = subprocess.run, []

    def instead(command, **options):
        commands.append(command)
        return real([command[0], "-c", f"import sys; {code}", *command[1:]], **options)

    monkeypatch.setattr(engine.subprocess, "run", instead)
    report = PartReport(setup, 6, "decode")
    late = 0 if "sleep" in code else 60
    engine.run_bench(setup._replace(deadline=time.perf_counter() + late), report, "peers")
    assert expected in capsys.readouterr().out
    assert commands[0][1:4] == ["-m", "nanovllm", "bench"] and commands[0][4:7] == ["peers", "--device", "cpu"]
    assert report.results["tables"] == ({"peers": REPORT["measured"]} if "json" in code else {})


def test_every_bench_of_a_part_is_a_valid_command():
    from nanovllm.cli.bench import bench

    for benches in [*engine.FULL.values(), *engine.TINY.values()]:
        for each in benches:
            name, *flags = each.split()
            bench.commands[name].make_context(name, [*flags, "--device", "cpu", "--json", "-"])
    assert engine.FULL.keys() == engine.TINY.keys() == {6, 7, 8, 9}


def test_operations_of_a_step_are_counted():
    shape = TINY  # hidden 16, 4 heads of 8, 2 kv heads, mlp 32, 2 layers, vocabulary 64
    layer = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 3 * 16 * 32
    norms = 5 * shape.hidden_size
    decode = parts.operations_of("tiny", batch=3, context=10, count=1)
    assert decode == 3 * (2 * (2 * layer + norms) + 2 * 16 * 64 + 4 * 2 * 4 * 8 * 10)
    prefill = parts.operations_of("tiny", batch=1, context=4, count=4)
    assert prefill == 4 * 2 * (2 * layer + norms) + 2 * 16 * 64 + 4 * 2 * 4 * 8 * (1 + 2 + 3 + 4)
