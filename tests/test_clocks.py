"""No test of `make test` or .ci/run depends on a clock (tests/clocks.py)."""

import pytest

from tests.clocks import find_clocks
from tests.helpers import ROOT

FOLDERS = ("tests", "stages", "models", "nanovllm", "notebooks")
NIGHTLY = ("clients", "cluster", "server/storm", "soak")  # folders under nanovllm/tests that only .ci/nightly runs

FOUND = {
    "a duration": "start = time.monotonic()\nassert time.monotonic() - start < 2",
    "a long duration": "start = time.perf_counter()\nassert time.perf_counter() - start < 600",
    "a difference with a name": "a = time.process_time()\nb = time.process_time() - a\nassert b < 0.5",
    "a ratio": "times = median(time.perf_counter_ns() for _ in range(3)), 5\nassert times[0] < 2 * times[1]",
    "an attribute": "self.start = loop.time()\nif loop.time() > self.start + 2:\n    pytest.fail()",
    "a date": "assert output.created <= datetime.now()",
    "processor time": "before = resource.getrusage(resource.RUSAGE_SELF)\nassert before.ru_utime < 2",
    "a helper": "def seconds():\n    return time.time() - START\n\ndef test_a():\n    assert seconds() < 2",
    "a short deadline": "end = time.monotonic() + 20\nwhile time.monotonic() < end:\n    pass",
    "a deadline with a constant": "SECONDS = 20\nassert time.monotonic() < time.monotonic() + SECONDS",
    "join": "thread.join(5)",
    "timeout": "process.communicate(timeout=30)",
    "wait_for": "await asyncio.wait_for(task, 10)",
    "asyncio.timeout": "async with asyncio.timeout(5.0):\n    pass",
    "result": "future.result(2 * 10)",
    "an option": "inside(checkpoint, header_timeout=0.2)",
    "an option in a dictionary": "QUICK = {'body_timeout': 0.3}",
    "a caller's limit": (
        "def until(holds, seconds=60):\n    end = time.monotonic() + seconds\n    while not holds():\n"
        "        assert time.monotonic() < end\n\ndef test_a():\n    until(is_ready, 5)"
    ),
    "a default limit": (
        "def until(holds, seconds=5):\n    end = time.monotonic() + seconds\n    while not holds():\n"
        "        assert time.monotonic() < end"
    ),
    "a sleep": "server.stop()\ntime.sleep(0.2)\nassert server.is_over",
    "a number of polls": "for _ in range(50):\n    time.sleep(0.1)",
    "a sleep in a lambda": "while not is_over():\n    Thread(target=lambda: time.sleep(1)).start()",
    "a browser's sleep": "page.wait_for_timeout(500)",
    "a script": "SCRIPT = '''\nimport time\nstart = time.time()\nassert time.time() - start < 5\n'''",
    "a script's sleep": "start('import time; time.sleep(2); print(1)')",
    "a clock of the page": "page.evaluate('() => performance.now()')",
    "only one parameter is nightly": (
        "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.nightly)])\n"
        "def test_a(n):\n    thread.join(5)"
    ),
}
ALLOWED = {
    "a guard": "end = time.monotonic() + 60\nwhile not is_up():\n    assert time.monotonic() < end\n    time.sleep(1)",
    "a guard with a constant": "SECONDS = 2 * 60\nassert time.monotonic() < time.monotonic() + SECONDS",
    "a helper's guard": (
        "def until(holds, seconds=60):\n    end = time.monotonic() + seconds\n    while not holds():\n"
        "        assert time.monotonic() < end\n\ndef test_a():\n    until(is_ready)\n    until(is_ready, 300)"
    ),
    "limits": "thread.join(60)\nprocess.wait(timeout=300)\nwith asyncio.timeout(None):\n    event.wait()",
    "no waiting": "future.result(timeout=0)\nawait asyncio.sleep(0)",
    "text": "', '.join(names)\nassert 'time.sleep(5)' in text",
    "a docstring": 'def test_a():\n    """import time; time.sleep(5)"""',
    "a fake clock": "clock = FakeClock()\nclock.forward(5)\nassert engine.time() == clock.seconds == 5",
    "a name": "assert name(1) == f'{time.time_ns()}'",
    "a file's age": "then = time.time() - 100 * 86400\nos.utime(folder, (then, then))",
    "a child that the test ends": "start('import time; time.sleep(60)')",
    "a nightly test": "@pytest.mark.nightly\n@pytest.mark.parametrize('n', [1])\ndef test_a(n):\n    thread.join(5)",
    "a nightly class": "@pytest.mark.nightly\nclass TestSpeed:\n    def test_a(self):\n        thread.join(5)",
    "a nightly file": "pytestmark = [pytest.mark.anyio, pytest.mark.nightly]\n\ndef test_a():\n    thread.join(5)",
    "stress": "def let_others_run():\n    time.sleep(0.02)",
}


@pytest.mark.parametrize("name", FOUND)
def test_clock_is_found(name):
    assert find_clocks({"a.py": FOUND[name]}) != []


@pytest.mark.parametrize("name", ALLOWED)
def test_guard_or_fake_clock_is_allowed(name):
    assert find_clocks({"a.py": ALLOWED[name]}) == []


def test_finding_names_the_line():
    helper = "import time\n\n\ndef seconds():\n    return time.time()\n"
    test = "from helper import seconds\n\n\ndef test_a():\n    assert seconds() < 5\n"
    assert [*map(str, find_clocks({"helper.py": helper, "test_a.py": test}))] == [
        "test_a.py:5: compares a clock: seconds() < 5"
    ]


def test_no_test_depends_on_a_clock():
    """Search all files: parsing them takes seconds."""
    folders = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    files = {str(path.relative_to(ROOT)): path for path in folders if is_of_tests(path.relative_to(ROOT).parts)}
    left_out = (*(f"nanovllm/tests/{name}/" for name in NIGHTLY), "tests/mutants/", "tests/test_clocks.py")
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items() if not name.startswith(left_out)}
    assert len(sources) > 200
    sources = {name: text for text, name in {text: name for name, text in sources.items()}.items()}  # without copies
    assert [str(finding) for finding in find_clocks(sources)] == []


def is_of_tests(parts: tuple[str, ...]) -> bool:
    return "tests" in parts[:-1] or parts[-1].startswith(("test_", "conftest"))
