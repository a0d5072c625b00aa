"""Plant small faults in the code, one at a time, and see which tests notice: `make mutants`.

    python -m tests.mutants                          the sample, in about 40 minutes; writes README.md's report
    python -m tests.mutants --resume                 the rest, after an interrupted run
    python -m tests.mutants --survivors              the rest, and the mutants that survived
    python -m tests.mutants --night                  another slice each day, as .ci/nightly does
    python -m tests.mutants --file block_pool        all mutants of the sample in files with this in their name
    python -m tests.mutants --id 1f2e3d4c5b          one mutant: prints its diff and the tests that ran
    python -m tests.mutants --kernels                faults of the CPU kernels, planted by hand (kernels.toml)

The sample's results are in results.json, beside this file. build/mutants/survivors.md has the diff of each survivor.
"""

import argparse
import difflib
import fcntl
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from tests.mutants import kernels, sample
from tests.mutants.copies import ROOT, copy_repository
from tests.mutants.mutations import Mutant, Source
from tests.mutants.report import Result, describe_score, insert, page, score, survivors, table, wilson

BUILD = ROOT / "build" / "mutants"
PAGE, RESULTS = Path(__file__).parent / "README.md", Path(__file__).parent / "results.json"
GOAL = 0.95
LEAST = 0.80  # of a night's slice, whose equivalent mutants nobody has judged
BASELINE_SECONDS = 900.0  # a guard, for the tests of one file with their lines traced


class Worker:
    """A worker process in a copy of the repository."""

    def __init__(self, folder: Path) -> None:
        copy_repository(folder)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder)}
        command = [sys.executable, "-m", "tests.mutants.worker"]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout, "pipes"
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker died")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Run:
    """One run: baselines of all test files, then mutants, on a few workers."""

    def __init__(self, targets: list[sample.Target], num_workers: int, folder: Path) -> None:
        self.targets = {target.file: target for target in targets}
        self.workers = []
        for index in range(num_workers):
            (folder / str(index)).mkdir()
            self.workers.append(Worker(folder / str(index)))
        self.baselines: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, Source] = {}
        self.lock = Lock()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def spread(self, tasks: list[Any], work: Any, until: float = float("inf")) -> None:
        """Call work(worker, task) for each task, on all workers. Start none after the time `until`."""
        todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for task in tasks:
            todo.put(task)
        errors: list[BaseException] = []

        def serve(worker: Worker) -> None:
            while not errors and time.monotonic() < until:
                try:
                    work(worker, todo.get_nowait())
                except queue.Empty:
                    return
                except BaseException as error:
                    errors.append(error)

        threads = [Thread(target=serve, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # in short waits, so that Ctrl-C works
        if errors:
            raise errors[0]

    def take_baselines(self, files: list[str]) -> None:
        """Run each test file without mutations. Exit if a test fails."""

        def baseline(worker: Worker, file: str) -> None:
            result = worker.run(
                file=file, text=None, files=[file], trace=sorted(self.targets), timeout=BASELINE_SECONDS
            )
            report = result["report"]
            if report and report["failures"]:  # a test with a clock, perhaps: lines are traced slowly
                result = worker.run(
                    file=file, text=None, files=[file], tests=report["failures"], timeout=BASELINE_SECONDS
                )
                again = result["report"]
                report = again and report | {key: again[key] for key in ("status", "failures", "error")}
            if result["ended"] != "exit" or report is None or report["status"] not in (0, 5):
                error = report["error"] if report else result
                raise RuntimeError(f"{file} fails without a mutation ({result['ended']}): {error}")
            with self.lock:
                self.baselines[file] = report
            print(f"{file}: {report['ran']} tests, {result['seconds']:.1f} s", flush=True)

        self.spread(files, baseline)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach a mutant's lines: the files that need least time first."""
        target = self.targets[mutant.file]
        chosen: list[tuple[float, list[str]]] = []
        for file in target.tests:
            baseline = self.baselines[file]
            lines = baseline["lines"].get(mutant.file, {})
            reaching = {
                test for line in range(mutant.reach[0], mutant.reach[1] + 1) for test in lines.get(str(line), ())
            }
            tests = [
                test for test in baseline["seconds"] if "" in reaching or file in target.always or test in reaching
            ]
            if tests:
                chosen.append((sum(baseline["seconds"][test] for test in tests), tests))
        return [test for _, tests in sorted(chosen) for test in tests]

    def test(self, worker: Worker, mutant: Mutant) -> Result:
        """Test one mutant."""
        if mutant.file not in self._sources:
            self._sources[mutant.file] = Source(mutant.file, (ROOT / mutant.file).read_text(encoding="utf-8"))
        source = self._sources[mutant.file]
        if (text := source.apply(mutant)) is None:
            return Result(mutant, "no program", "")
        diff = diff_of(mutant, source.text, text)
        tests = self.tests_of(mutant)
        if not tests:
            return Result(mutant, "survived", diff)
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        seconds = sum(self.baselines[test.split("::")[0]]["seconds"][test] for test in tests)
        result = worker.run(file=mutant.file, text=text, files=files, tests=tests, timeout=60 + 3 * seconds)
        report = result["report"]
        if result["ended"] != "exit":
            return Result(mutant, "timed out", diff, result["ended"], 0, result["seconds"])
        if report is None:
            return Result(mutant, "killed", diff, "the test process died", 0, result["seconds"])
        status = "survived" if report["status"] in (0, 5) else "killed"
        return Result(mutant, status, diff, (report["failures"] or [""])[0], report["ran"], result["seconds"])


def diff_of(mutant: Mutant, old: str, new: str) -> str:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), mutant.file, mutant.file, lineterm="", n=2))
    return "\n".join(lines[2:])


def groups(todo: list[Mutant], targets: dict[str, sample.Target]) -> list[tuple[tuple[str, ...], list[Mutant]]]:
    """Return the mutants that have the same test files together, in the order of targets.toml."""
    together: dict[tuple[str, ...], list[Mutant]] = {target.tests: [] for target in targets.values()}
    for mutant in todo:
        together[targets[mutant.file].tests].append(mutant)
    return [(tests, group) for tests, group in together.items() if group]


def load_results() -> dict[str, list[str]]:
    """Return the status of each mutant of earlier runs by id, and the test that killed it."""
    results: dict[str, list[str]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return results


def save_result(result: Result, ids: set[str]) -> None:
    """Add a result to those of the sample in the file, which another run may be writing to."""
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = load_results() | {result.mutant.id: [result.status, result.by]}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(ids & {*results}))
        temporary = BUILD / "results.tmp"
        temporary.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        temporary.replace(RESULTS)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--resume", action="store_true", help="only mutants without a result")
    parser.add_argument("--survivors", action="store_true", help="only mutants without a result, or that survived")
    parser.add_argument("--night", action="store_true", help="a slice outside of the sample, chosen by today's date")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after this time")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes; the default is 2")
    parser.add_argument("--file", default="", help="a part of the file's name")
    parser.add_argument("--id", default="", help="one mutant, of the sample or not")
    parser.add_argument("--report", action="store_true", help="test nothing, and write the page from stored results")
    parser.add_argument("--kernels", action="store_true", help="the faults of kernels.toml, in the CPU kernels")
    options = parser.parse_args()
    if options.kernels:
        return min(1, kernels.main(options.workers, PAGE))
    until = time.monotonic() + 60 * options.minutes
    settings, targets = sample.settings(), sample.read_targets(ROOT)
    seed, size = settings["seed"], settings["sample"]
    population = sample.ranked(sample.all_mutants(ROOT, targets), seed)
    equivalents = {each.id for each in sample.read_equivalents()}
    if options.id:
        chosen = [mutant for mutant in population if mutant.id == options.id]
    elif options.night:
        part = sample.slice_of(date.today(), len(population), size)
        chosen = population[part.start : part.stop]
    else:
        chosen = population[:size]
    is_sample, ids = not options.night and not options.id, {mutant.id for mutant in chosen}
    earlier = load_results() if is_sample else {}
    results = {
        mutant.id: Result(mutant, earlier[mutant.id][0], "", earlier[mutant.id][1])
        for mutant in chosen
        if mutant.id in earlier
    }
    if is_sample:
        results |= {mutant.id: Result(mutant, "equivalent", "") for mutant in chosen if mutant.id in equivalents}
    todo = [] if options.report else [mutant for mutant in chosen if options.file in mutant.file]
    todo = [mutant for mutant in todo if not is_sample or mutant.id not in equivalents]
    if options.survivors or options.resume:
        again = {"survived"} if options.survivors else set()
        todo = [mutant for mutant in todo if mutant.id not in results or results[mutant.id].status in again]
    print(f"{len(todo)} mutants, from {len(population):,} of {len(targets)} files", flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(prefix="nanovllm-mutants-") as folder:
        run = Run(targets, options.workers if todo else 0, Path(folder))
        try:

            def test(worker: Worker, mutant: Mutant) -> None:
                if options.resume and (other := load_results().get(mutant.id)):  # of a run beside this one
                    results[mutant.id] = Result(mutant, other[0], "", other[1])
                    return
                result = run.test(worker, mutant)
                with run.lock:
                    results[mutant.id] = result
                    if is_sample:
                        save_result(result, ids)
                    (BUILD / "survivors.md").write_text(survivors(list(results.values())), encoding="utf-8")
                by = result.by or f"{result.ran} tests"
                where = f"{mutant.file}:{mutant.lineno} {mutant.id}"
                print(f"{result.status:9} {where} {result.seconds:5.1f} s  {by}", flush=True)
                if options.id:
                    print(result.diff)

            for tests, group in groups(todo, run.targets):
                if time.monotonic() < until:
                    run.take_baselines([file for file in tests if file not in run.baselines])
                    run.spread(group, test, until)
        finally:
            run.close()

    listed = [result for result in results.values() if result.status != "no program"]
    print(table(listed), describe_score(listed), sep="\n")
    if options.id:
        return 0
    killed, count = score(listed)
    if options.night:
        return 0 if wilson(killed, count)[1] >= LEAST else 1
    rest = f"{len(chosen) - len(results)} of its mutants are not tested yet. " if len(results) < len(chosen) else ""
    generated = page(listed, len(population), seed, date.today().isoformat(), rest)
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), "mutants", generated), encoding="utf-8")
    return 0 if count and killed / count >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
