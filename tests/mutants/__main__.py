"""Plant small faults in the code, one at a time, and see which tests notice: `make mutants`.

    python -m tests.mutants                          the sample, in about 40 minutes; writes README.md's report
    python -m tests.mutants --survivors              only the mutants that survived the last run
    python -m tests.mutants --night                  another slice each day, as .ci/nightly does
    python -m tests.mutants --file block_pool        all mutants of the sample in files with this in their name
    python -m tests.mutants --id 1f2e3d4c5b          one mutant: prints its diff and the tests that ran

Results are in build/mutants/: results.json, and survivors.md with the diff of each survivor.
"""

import argparse
import difflib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from tests.mutants import sample
from tests.mutants.mutations import Mutant, Source
from tests.mutants.report import Result, describe_score, insert, page, score, survivors, table, wilson

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
PAGE = Path(__file__).parent / "README.md"
GOAL = 0.95
LEAST = 0.80  # of a night's slice, whose equivalent mutants nobody has judged
Prepared = tuple[Mutant, str, str]  # with its text and its diff
BASELINE_SECONDS = 900.0  # a guard, for the tests of one file with their lines traced


class Worker:
    """A worker process in a copy of the repository."""

    def __init__(self, folder: Path) -> None:
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for file in filter(None, files.split("\0")):
            if (ROOT / file).is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, folder / file)
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
        self._lock = Lock()

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
            with self._lock:
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

    def test(self, worker: Worker, mutant: Mutant, text: str, diff: str) -> Result:
        """Test one mutant."""
        tests = self.tests_of(mutant)
        if not tests:
            return Result(mutant, "survived", diff)
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        seconds = sum(
            self.baselines[file]["seconds"][test]
            for file in files
            for test in tests
            if test in self.baselines[file]["seconds"]
        )
        result = worker.run(file=mutant.file, text=text, files=files, tests=tests, timeout=60 + 5 * seconds)
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


def prepare(mutants: list[Mutant], count: int, part: str = "") -> list[Prepared]:
    """Return the first `count` mutants that are programs of their own, each with its text and diff.

    Those in files without `part` in their name count, and are left out.
    """
    num_others = 0
    sources: dict[str, Source] = {}
    prepared: list[Prepared] = []
    for mutant in mutants:
        if len(prepared) + num_others == count:
            break
        if part not in mutant.file:
            num_others += 1
            continue
        if mutant.file not in sources:
            sources[mutant.file] = Source(mutant.file, (ROOT / mutant.file).read_text(encoding="utf-8"))
        if (text := sources[mutant.file].apply(mutant)) is not None:
            prepared.append((mutant, text, diff_of(mutant, sources[mutant.file].text, text)))
    return prepared


def groups(todo: list[Prepared], targets: dict[str, sample.Target]) -> list[tuple[tuple[str, ...], list[Prepared]]]:
    """Return the mutants that have the same test files together, in the order of targets.toml."""
    together: dict[tuple[str, ...], list[Prepared]] = {target.tests: [] for target in targets.values()}
    for each in todo:
        together[targets[each[0].file].tests].append(each)
    return [(tests, group) for tests, group in together.items() if group]


def load_results() -> dict[str, Result]:
    """Return the results of earlier runs by id."""
    path = BUILD / "results.json"
    if not path.exists():
        return {}
    return {
        key: Result(Mutant(*each[0]), *each[1:]) for key, each in json.loads(path.read_text(encoding="utf-8")).items()
    }


def save_results(results: dict[str, Result]) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    temporary = BUILD / "results.tmp"
    temporary.write_text(json.dumps(results), encoding="utf-8")
    temporary.rename(BUILD / "results.json")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--survivors", action="store_true", help="only mutants that survived the last run, or are new")
    parser.add_argument("--night", action="store_true", help="a slice outside of the sample, chosen by today's date")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after this time")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes; the default is 2")
    parser.add_argument("--file", default="", help="a part of the file's name")
    parser.add_argument("--id", default="", help="one mutant, of the sample or not")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    settings, targets = sample.settings(), sample.read_targets(ROOT)
    seed, size = settings["seed"], settings["sample"]
    population = sample.ranked(sample.all_mutants(ROOT, targets), seed)
    equivalents = {each.id for each in sample.read_equivalents()}
    if options.id:
        chosen = prepare([mutant for mutant in population if mutant.id == options.id], 1)
        print(*(diff for _, _, diff in chosen), sep="\n", flush=True)
    elif options.night:
        part = sample.slice_of(date.today(), len(population), size)
        chosen = prepare(population[part.start : part.stop], len(part))
    else:
        chosen = prepare(population, size, options.file)
    earlier = {} if options.night or options.id else load_results()
    results = {mutant.id: earlier[mutant.id] for mutant, _, _ in chosen if mutant.id in earlier}
    todo = [each for each in chosen if options.night or each[0].id not in equivalents]
    if options.survivors:
        todo = [each for each in todo if each[0].id not in results or results[each[0].id].status == "survived"]
    for mutant, _, diff in chosen:
        if mutant.id in equivalents and not options.night:
            results[mutant.id] = Result(mutant, "equivalent", diff)
    print(f"{len(todo)} mutants, from {len(population):,} of {len(targets)} files", flush=True)

    with tempfile.TemporaryDirectory(prefix="nanovllm-mutants-") as folder:
        run = Run(targets, options.workers, Path(folder))
        try:

            def test(worker: Worker, task: Prepared) -> None:
                result = run.test(worker, *task)
                with run._lock:
                    results[result.mutant.id] = result
                    if not options.night and not options.id:
                        save_results(results)
                    (BUILD / "survivors.md").write_text(survivors(list(results.values())), encoding="utf-8")
                mutant = result.mutant
                by = result.by or f"{result.ran} tests"
                print(
                    f"{result.status:9} {mutant.file}:{mutant.lineno} {mutant.id} {result.seconds:5.1f} s  {by}",
                    flush=True,
                )

            BUILD.mkdir(parents=True, exist_ok=True)
            for tests, group in groups(todo, run.targets):
                if time.monotonic() < until:
                    run.take_baselines([file for file in tests if file not in run.baselines])
                    run.spread(group, test, until)
        finally:
            run.close()

    listed = list(results.values())
    print(table(listed), describe_score(listed), sep="\n")
    if options.id:
        return 0
    killed, count = score(listed)
    if options.night:
        return 0 if wilson(killed, count)[1] >= LEAST else 1
    if len(listed) == size:
        generated = page(listed, len(population), seed, date.today().isoformat())
        PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), generated), encoding="utf-8")
    return 0 if count and killed / count >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
