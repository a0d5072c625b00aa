"""The tools of the chain: on a made-up chain of three small stages in its own repository, and on the real one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from stages.chain import ROOT, main
from stages.tools.chain import ChainError, added_lines, load
from stages.tools.chain.diffs import diff_md
from stages.tools.chain.lines import code_lines, optional_lines
from stages.tools.exercise.functions import find
from stages.tools.exercise.proof import proof_faults
from stages.tools.exercise.report import Place, Report
from stages.tools.exercise.variants import variant_faults, variants_file
from tests.helpers import full

POOL_1 = '''"""One pool."""


class Pool:
    """Slots in one piece."""

    def __init__(self, size: int) -> None:
        self.free = list(range(size))

    def take(self, count: int) -> list[int]:
        """Take `count` slots."""
        return [self.free.pop() for _ in range(count)]

    def size(self) -> int:
        return len(self.free)
'''
POOL_2 = '''"""One pool, all or nothing."""

from functools import lru_cache


class Pool:
    """Slots in one piece."""

    def __init__(self, size: int) -> None:
        self.free = list(range(size))

    def take(self, count: int) -> list[int]:  # [count]
        """Take `count` slots, or none."""
        # all or nothing
        if count > len(self.free):
            return []
        return [self.free.pop() for _ in range(count)]

    def size(self) -> int:
        return len(self.free)

    class Report:
        @staticmethod
        @lru_cache
        def line(
            used: int,  # slots
            of: int = 8,
        ) -> str:  # for people
            """One line."""
            # a comment of the solution
            return f"{used} of {of}"


def twice(count: int) -> int: return 2 * count
'''
TESTS_2 = """from ..pool import Pool, twice


def test_take():
    '''Three of two are none.'''
    assert Pool(2).take(3) == [], "none is taken"


def test_line():
    '''One of eight slots is used.'''
    assert Pool.Report.line(1) == "1 of 8"


def test_twice():
    '''Two twice are four.'''
    assert twice(2) == 4
"""
GAIN_2 = """from ..pool import Pool


def test_gain():
    pool = Pool(2)
    pool.take(3)
    assert pool.size() == 2
"""
BOX = "SIDES = 6\n"
MAIN = '"""The command."""\n\nfrom .pool import Pool\n\nprint(Pool(8).size())\n'
TOML = """
stages = ["s1_pool", "s2_all_or_nothing", "s3_server"]

[s1]
lesson = ["pool.py"]
tries = ["another pool", "another size"]
files = [
    { new = "pool.py", why = "the pool" },
    { new = "__main__.py", why = "the command" },
    { new = "old.py", why = "soon gone" },
    { new = "shape/box.py", why = "a shape" },
]

[s2]
budget = 16
files = [
    { changed = "pool.py", why = "take all or nothing" },
    { removed = "old.py", why = "not needed" },
]

[[s2.steps]]
title = "Take all or nothing"
functions = ["pool.py:Pool.take"]
tests = ["tests/test_pool.py::test_take"]
works = "Slots are taken, all or none."
hints = ["Count first.", "Compare count with len(self.free)."]
minutes = 10

[[s2.steps]]
title = "Say it in a line"
functions = ["pool.py:Pool.Report.line"]
tests = ["tests/test_pool.py::test_line"]
works = "It is said."
hints = ["An f-string.", "Of both numbers."]
minutes = 5

[[s2.steps]]
title = "Twice"
functions = ["pool.py:twice"]
tests = ["tests/test_pool.py::test_twice"]
works = "All is twice."
hints = ["Two times.", "2 * count"]
minutes = 1

[s3]
budget = 7
optional = { files = ["extra.py"], budget = 1 }
files = [
    { new = "server.py", why = "a server" },
    { new = "extra.py", why = "and more" },
]
"""
STEP_3 = """
[[s3.steps]]
title = "Part {0}"
functions = ["server.py:{0}"]
tests = ["tests/test_gain.py::test_{0}"]
works = "It is there."
hints = ["One number.", "The one of the test."]
minutes = 1
"""
TOML += "".join(STEP_3.format(name) for name in ("port", "host", "both"))
PACKAGE = """
[package]
folder = "../final"
files = [
    { changed = "serving/http.py", why = "another port" },
    { changed = "engine/pool.py", why = "says how many are free" },
    { changed = "engine/twice.py", why = "a function of pool.py, here in a file of its own" },
    { removed = "__main__.py", why = "cli.py takes its place" },
]

[package.paths]
"shape/" = "shapes/"
"server.py" = "serving/http.py"
"pool.py" = ["engine/pool.py", "engine/twice.py"]
"*" = "engine/"
"""
TOML += PACKAGE
SERVER = """def port() -> int:
    return 8000


def host() -> str:
    return "::1"


def both() -> str:
    return host() + str(port())
"""
GAIN_3 = """from ..server import both, host, port


def test_port():
    assert port() == 8000


def test_host():
    assert host() == "::1"


def test_both():
    assert both() == "::18000"
"""
FIGURES = '''"""The gain in figures."""


def before(engine, folder):
    return _count(engine)


def now(engine, folder):
    return _count(engine)


def _count(engine):
    pool = engine.Pool(2)
    try:
        pool.take(3)
    except IndexError:
        pass
    return {"slots left": pool.size()}
'''
ADD = "\n        'Add.'\n\n        def twice(count): return count + count\n"
VARIANTS = """class Step1:
    class right_asks_first:
        'Count, then take.'

        class Pool:
            def take(self, count):
                if len(self.free) < count:
                    return []
                taken, self.free = self.free[:count], self.free[count:]
                return taken

    class right_gives_back:
        'Take, and undo.'

        class Pool:
            def take(self, count):
                taken = []
                try:
                    for _ in range(count):
                        taken.append(self.free.pop())
                except IndexError:
                    self.free += taken
                    return []
                return taken

    class wrong_takes_what_is_there:
        'Take as many as there are.'
        red = "none is taken"

        class Pool:
            def take(self, count):
                return [self.free.pop() for _ in range(min(count, len(self.free)))]

    class wrong_never_ends:
        'Wait for room.'
        red = "is there an infinite loop?"

        class Pool:
            def take(self, count):
                while count > len(self.free):
                    pass


class Step2:
    class right_format:
        'Another way to format.'

        class Pool:
            class Report:
                def line(used, of=8):
                    return "{} of {}".format(used, of)

    class right_join:
        'Join the two.'

        class Pool:
            class Report:
                def line(used, of=8):
                    return " of ".join([str(used), str(of)])

    class wrong_order:
        'Swap the two.'
        red = "8 of 1"

        class Pool:
            class Report:
                def line(used, of=8):
                    return f"{of} of {used}"

    class wrong_name:
        'Use an unknown name.'
        red = "NameError: name 'total' is not defined"

        class Pool:
            class Report:
                def line(used, of=8):
                    return f"{used} of {total}"


class Step3:
    class right_add:
        'Add.'

        def twice(count): return count + count

    class right_shift:
        'Shift.'

        def twice(count): return count << 1

    class wrong_square:
        'Square.'
        red = "assert 8 == 4"

        def twice(count): return count**3

    class wrong_forgets_to_return:
        'Return nothing.'
        red = "assert None == 4"

        def twice(count): 2 * count
"""
STAGE_1 = {
    "__init__.py": '"""One."""\n\nfrom .pool import Pool\n',
    "__main__.py": MAIN,
    "pool.py": POOL_1,
    "old.py": "x = 1\n",
    "shape/box.py": BOX,
    "README.md": "One.\n",
}
STAGE_2 = {
    "__init__.py": '"""Two."""\n\nfrom .pool import Pool\n',
    "__main__.py": MAIN,
    "pool.py": POOL_2,
    "shape/box.py": BOX,
    "README.md": "Two.\n",
    "tests/__init__.py": "",
    "tests/test_pool.py": TESTS_2,
    "tests/test_gain.py": GAIN_2,
    "tests/gain.py": FIGURES,
}
STAGE_3 = STAGE_2 | {
    "__init__.py": '"""Three."""\n',
    "server.py": SERVER,
    "extra.py": "x = 1\n",
    "tests/test_gain.py": GAIN_3,
}
POOL_FINAL = POOL_2.split("\n\ndef twice")[0].replace("        return len(", "        # free\n        return len(")
TWICE_FINAL = '"""Numbers."""\n\n\ndef twice(count: int) -> int: return 2 * count\n'
FINAL = {
    "__init__.py": '"""The package."""\n',
    "engine/__init__.py": "",
    "engine/pool.py": POOL_FINAL,
    "engine/twice.py": TWICE_FINAL,
    "engine/extra.py": "x = 1\n",
    "engine/disk.py": "new = True\n",
    "serving/http.py": SERVER.replace("8000", "80"),
    "shapes/box.py": BOX,
    "cli.py": "new = True\n",
    "metrics/counters.py": "new = True\n",
}
CHAIN = {
    "stages/chain.toml": TOML,
    ".gitignore": "/exercises/\n",
    "tests/exercises/s2.py": VARIANTS,
    **{f"stages/s1_pool/{file}": text for file, text in STAGE_1.items()},
    **{f"stages/s2_all_or_nothing/{file}": text for file, text in STAGE_2.items()},
    **{f"stages/s3_server/{file}": text for file, text in STAGE_3.items()},
    **{f"final/{file}": text for file, text in FINAL.items()},
}
S1, S2, S3 = "stages/s1_pool", "stages/s2_all_or_nothing", "stages/s3_server"
FIRST_STEPS = "".join(
    f"""
[[s1.steps]]
title = "{name.capitalize().replace("_", " ")}"
functions = ["pool.py:Pool.{name}"]
tests = ["tests/test_pool.py::test_{name}"]
works = "It is there."
hints = ["One line.", "That of the test."]
minutes = 1
"""
    for name in ("take", "give_back", "size")
)
GIVE_BACK = '''    def give_back(self, slots: list[int]) -> None:
        """Give slots back."""
        self.free += slots

'''
FIRST_TESTS = {
    "__init__.py": "",
    "test_pool.py": """from ..pool import Pool


def test_take():
    assert Pool(2).take(2) == [1, 0]


def test_give_back():
    pool = Pool(2)
    pool.give_back(pool.take(1))
    assert pool.free == [0, 1]


def test_size():
    assert Pool(2).size() == 2
""",
    "test_gain.py": """from ..pool import Pool


def test_gain():
    assert Pool(2).size() == 2
""",
    "gain.py": '''"""The gain in figures."""

BEFORE = "no pool"


def before(engine, folder):
    return {"slots left": 0}


def now(engine, folder):
    return {"slots left": engine.Pool(2).size()}
''',
}
MORE = "stages/more_server"
BRANCH = """
[more_server]
after = "s2"
budget = 6
files = [{ new = "server.py", why = "a server without stage 3" }]
"""
BRANCH += "".join(STEP_3.replace("s3", "more_server").format(name) for name in ("port", "host", "both"))


def git(root: Path, *arguments: str) -> None:
    """Run git in a made-up repository, without the user's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "n", f"GIT_{who}_EMAIL": "n@example.org"}
    subprocess.run(["git", *arguments], cwd=root, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="session")
def made_up_chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chain")
    for file, text in CHAIN.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    git(root, "init", "-q")
    assert main(["write"], root) == 0
    git(root, "add", ".")
    git(root, "commit", "-qm", "chain")
    return root


@pytest.fixture(autouse=True)
def no_other_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove git's variables, which a git hook that runs the tests would set."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def root(made_up_chain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_up_chain, tmp_path / "repository"))


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def chain(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command on the made-up chain and returns its exit status and output."""

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main(arguments, root)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


class TestCheck:
    def test_made_up_chain_passes(self, chain: Run) -> None:
        assert chain("check") == (0, "stages are as chain.toml says: s1, s2, s3, final\n")

    @pytest.mark.parametrize(
        ("file", "old", "new", "fault"),
        [
            (f"{S2}/__main__.py", "8", "9", "/__main__.py differs from the previous stage but is not declared changed"),
            (f"{S2}/extra.py", "", "x = 1\n", f"{S2}/extra.py is new but not declared"),
            (f"{S2}/old.py", "", "x = 1\n", f"{S2}/old.py is declared removed but still exists"),
            (f"{S2}/pool.py", POOL_2, POOL_1, "/pool.py is declared changed but is the same as in the previous stage"),
            (f"{S2}/server.py", "", "x = 1\n", f"{S3}/server.py is declared new but is in the previous stage"),
            (f"{S3}/server.py", "8000", "8000\n", f"{S3}/DIFF.md is not current: run python stages/chain.py write"),
            (f"{S3}/server.py", "\n\n\n", "\na = 1\n", f"{S3} adds 8 lines of code; its budget is 7"),
            (f"{S3}/server.py", "8000", "(", f"{S3}/server.py: not a Python file"),
            (f"{S3}/extra.py", "1", "1\ny = 2", f"{S3} adds 2 optional lines of code (extra.py); their budget is 1"),
            ("stages/chain.toml", '["extra.py"]', '["server.py"]', f"{S3}: its optional files (server.py) are not the"),
            ("stages/chain.toml", '["pool.py"]', '["old.py"]', f"{S1}: the files of its lesson (old.py) are not"),
            (f"{S2}/tests/gain.py", FIGURES, "", f"{S2}/tests/gain.py is missing"),
            (f"{S2}/DIFF.md", "take all", "Take all", f"{S2}/DIFF.md is not current: run python stages/chain.py write"),
            (f"{S2}/tests/test_pool.py", "test_twice", "test_2", "3: there is no test tests/test_pool.py::test_twice"),
            (f"{S2}/pool.py", "def take", "def took", f"{S2}, step 1: pool.py:Pool.take does not exist"),
            ("stages/chain.toml", "Pool.take", "Pool.size", "step 1: pool.py:Pool.size is the same as in the"),
            ("stages/chain.toml", "Pool.take", "Pool.__init__", f"{S2}, step 1: pool.py:Pool.__init__ is always given"),
            ("stages/chain.toml", "old.py", "older.py", f"{S1}/older.py is declared new but does not exist"),
            ("stages/chain.toml", "old.py", "older.py", f"{S1}/old.py is new but not declared"),
            ("stages/chain.toml", "old.py", "older.py", f"{S2}/old.py is missing but not declared removed"),
            (
                f"{S3}/tests/test_gain.py",
                "test_both",
                "test_all",
                "step 3: there is no test tests/test_gain.py::test_both",
            ),
            ("stages/s9_secret/pool.py", "", "", "stages/s9_secret is not in chain.toml"),
        ],
    )
    def test_fault_is_reported(self, chain: Run, root: Path, file: str, old: str, new: str, fault: str) -> None:
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).touch()
        edit(root, file, old, new)
        status, printed = chain("check")
        assert status == 1
        assert fault in printed

    def test_all_faults_are_reported(self, chain: Run, root: Path) -> None:
        edit(root, f"{S2}/__main__.py", "8", "9")
        (root / f"{S2}/extra.py").write_text("x = 1\n")
        (root / f"{S3}/server.py").unlink()
        status, printed = chain("check")
        assert status == 1
        assert all(f"{file} " in printed for file in (f"{S2}/__main__.py", f"{S2}/extra.py", f"{S3}/server.py"))

    def test_tests_and_prose_may_differ(self, chain: Run, root: Path) -> None:
        for file in ("tests/test_more.py", "README.md", "__init__.py", "tests/test_pool.py"):
            with (root / S2 / file).open("a") as stream:
                stream.write("# more\n")
        assert chain("check")[0] == 0

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("budget = 16", "budgets = 16", "chain.toml: [s2] needs 'budget'"),
            ("budget = 16", "budget = '16'", "chain.toml: [s2]: 'budget' must be of type int"),
            (", budget = 1 }", " }", "chain.toml: [s3] optional needs 'budget'"),
            ('["Count first.", ', "[", "chain.toml: [s2] step 1 needs two hints, a nudge and the approach; it has 1"),
            ('"../final"', "1", "chain.toml: [package]: 'folder' must be of type str"),
            ('"../final"', '"../last"', "chain.toml: the folder of the package is missing: last"),
            ('why = "another port"', 'why = " "', "chain.toml: [package] files, entry 1 has an empty why"),
            ('{ changed = "serving', '{ new = "serving', "[package] files, entry 1 needs one of changed, removed"),
            ('"*" = "engine/"', '"*" = "engine"', "[package.paths] '*' must be one folder, ending in a slash"),
            ('"serving/http.py"\n', '"serving/"\n', "[package.paths] 'server.py' must be a file or a list of files"),
            ('{ new = "pool.py"', '{ now = "pool.py"', "[s1] files, entry 1 needs one of new, changed, removed"),
            ("pool.py:twice", "twice", "chain.toml: [s2] step 3: 'twice' is not of the form"),
            ("[s1]", "[s0]", "chain.toml: each stage needs one table, and each table one stage: check [s1]"),
            ("s1_pool", "s1_pond", "chain.toml: the folder of stage 's1_pond' is missing: stages/s1_pond"),
            ("stages = [", "stages = ", "chain.toml: "),
        ],
    )
    def test_invalid_toml_is_reported_in_one_line(
        self, chain: Run, root: Path, old: str, new: str, message: str
    ) -> None:
        edit(root, "stages/chain.toml", old, new)
        status, printed = chain("check")
        assert (status, printed.count("\n")) == (2, 1)
        assert message in printed

    def test_single_stage_passes_with_a_note(self, chain: Run, root: Path) -> None:
        first = TOML.split("[s2]")[0].replace(', "s2_all_or_nothing", "s3_server"', "")
        (root / "stages/chain.toml").write_text(first)
        shutil.rmtree(root / S2)
        shutil.rmtree(root / S3)
        status, printed = chain("check", "--exercises")
        assert status == 0
        assert "s1 is the only stage" in printed


class TestSize:
    def test_comments_and_docstrings_do_not_count(self) -> None:
        source = (
            '"""Doc."""\nclass A:\n    """Doc.\n\n    More.\n    """\n\n    # why\n    x = """\n# text\n\n"""  # why\n'
        )
        assert code_lines(source) == ["class A:", '    x = """', "# text", '"""']

    def test_added_lines_of_a_stage(self, root: Path) -> None:
        first, second, last = load(root).stages
        assert added_lines(first) == 2 + 7 + 1 + 1  # __main__.py, pool.py, old.py, shape/box.py
        assert added_lines(second) == 12
        assert (added_lines(last), optional_lines(last)) == (6, 1)

    def test_new_comments_add_no_lines(self, root: Path) -> None:
        edit(root, f"{S3}/__main__.py", "\nprint", "# why\n\nprint")
        assert added_lines(load(root).stages[2]) == 6

    def test_optional_lines_are_counted_separately(self, chain: Run) -> None:
        assert [line.split() for line in chain("size")[1].splitlines()[2:]] == [
            ["s3_server", "6", "of", "7", "lines,", "1", "file"],
            ["optional", "1", "of", "1", "lines,", "1", "file"],
        ]


class TestDiff:
    def test_diff_is_in_reading_order_with_reasons(self, chain: Run) -> None:
        status, printed = chain("diff", "2")
        marks = ["pool.py, changed", "take all", "+        # all", "old.py, removed", "not needed", "-x = 1"]
        assert status == 0
        places = [printed.index(mark, printed.index("===")) for mark in marks]
        assert places == sorted(places)
        assert "\033" not in printed
        assert "\033[32m+" in chain("diff", "s2", "--color")[1]

    def test_diff_begins_with_its_contents_and_can_show_one_file(self, chain: Run) -> None:
        printed = chain("diff", "2")[1]
        assert "  1. pool.py  changed, +22 -3  take all or nothing\n  2. old.py   removed, 1 line" in printed
        assert 'One file alone: make diff STAGE=2 ARGS="--file pool.py"' in printed
        status, printed = chain("diff", "2", "--file", "old.py")
        assert status == 0 and printed.startswith("=== 2 of 2: old.py, removed ====") and "pool.py" not in printed
        assert chain("diff", "2", "--file", "x") == (2, "chain: s2 does not change 'x'; it changes pool.py, old.py\n")

    def test_diff_of_the_first_stage_shows_its_lesson(self, chain: Run) -> None:
        printed = chain("diff", "1")[1]
        marks = ["1. pool.py ", "Skip on first reading:", "2. __main__.py", "=== 1 of 4: pool.py, new", "class Pool:"]
        places = [printed.index(mark) for mark in marks]
        assert places == sorted(places) and "=== 2 of 4" not in printed
        assert "print(Pool(8).size())" in chain("diff", "1", "--file", "__main__.py")[1]

    def test_terminal_uses_the_readers_pager(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("GIT_PAGER", f"cat > {tmp_path}/paged")
        assert main(["diff", "2"], root) == 0
        assert "\033[32m+" in (tmp_path / "paged").read_text() and capsys.readouterr().out == ""
        for pager in ("cat", "no-such-pager"):
            monkeypatch.setenv("GIT_PAGER", pager)
            assert main(["diff", "2"], root) == 0
            assert "=== 2 of 2: old.py" in capsys.readouterr().out

    def test_diff_md(self, chain: Run, root: Path) -> None:
        first = (root / S1 / "DIFF.md").read_text()
        assert "\n## 1. [pool.py](pool.py): new, 15 lines\n\nthe pool\n\n<details><summary>pool.py in full" in first
        assert "## Skip on first reading\n\n2. [__main__.py](__main__.py), 5 lines: the command\n" in first
        second = (root / S2 / "DIFF.md").read_text()
        assert "## 1. [pool.py](pool.py): changed, +22 -3\n\ntake all or nothing\n\n```diff\n@@" in second
        assert second.endswith("## 2. old.py: removed, 1 line\n\nnot needed\n")
        third = (root / S3 / "DIFF.md").read_text()
        assert f"```python\n{SERVER}```\n\n</details>\n" in third, "a new file is there in full"
        assert "6 lines of code are added" in third and "docstrings), and 1 more in the optional half" in third
        assert "## 2. [extra.py](extra.py): new, optional, 1 line\n\nand more\n" in third
        assert "2 of 2: extra.py, new, optional =" in chain("diff", "3")[1]

    def test_fence_is_longer_than_those_in_the_text(self, root: Path) -> None:
        edit(root, f"{S3}/extra.py", "x = 1", 'x = "```"')
        assert '````python\nx = "```"\n````' in diff_md(load(root).stages[2])

    def test_diff_md_does_not_depend_on_git_settings(self, chain: Run, root: Path) -> None:
        for setting in ("diff.noprefix true", "diff.context 9", "color.ui always", "diff.suppressBlankEmpty true"):
            git(root, "config", *setting.split())
        assert chain("check")[0] == 0


class TestFunctions:
    @pytest.mark.parametrize("name", ["Pool.take", "Pool.Report.line", "twice", "Pool.__init__"])
    def test_cutting_a_function_loses_nothing(self, name: str) -> None:
        function = find(POOL_2, name)
        assert function is not None
        assert function.above + function.head + function.body + function.below == POOL_2

    def test_missing_functions(self) -> None:
        assert find(POOL_2, "Pool.line") is None
        with pytest.raises(ChainError, match="2 functions are called f"):
            find("def f(): pass\ndef f(): pass\n", "f")

    @pytest.mark.parametrize(
        "source",
        [
            "def f(g=lambda: 0, h={1: 2}) -> dict[str, int]:  # shape\n    # why\n    return 1\n",
            "def f(\n    x: int,\n): return x\n",
            'def f():\n    """Doc.\n\n    More."""\n\n    return """\nleft\n"""\n',
        ],
    )
    def test_body_can_be_replaced(self, source: str) -> None:
        function = find(source, "f")
        assert function is not None
        assert "return" not in function.head
        space: dict[str, Callable[..., object]] = {}
        exec(function.with_body("    return 'new'\n"), space)
        assert space["f"](*([0] if "x: int" in source else [])) == "new"
        exec(function.with_body(function.body_at("    ")), space)
        assert space["f"](*([1] if "x: int" in source else [])) in (1, "\nleft\n")


class TestExercise:
    def test_exercise_opens_its_functions_and_keeps_the_rest(self, chain: Run, root: Path) -> None:
        status, printed = chain("exercise", "2")
        assert status == 0
        assert "3 steps, about 16 minutes" in printed
        assert "step 1, 10 min: Take all or nothing\n      pool.py: Pool.take\n" in printed
        assert "make check STAGE=2\n" in printed and 'make exercise STAGE=2 ARGS="--reveal Pool.take"\n' in printed
        pool = (root / "exercises/s2/pool.py").read_text()
        opened = '''    def take(self, count: int) -> list[int]:  # [count]
        """Take `count` slots, or none."""
        # EXERCISE step 1: Take all or nothing
        return [self.free.pop() for _ in range(count)]

    def size'''
        assert opened in pool
        new = '''            """One line."""
            # EXERCISE step 2: Say it in a line
            raise NotImplementedError("step 2, Say it in a line: tests/test_pool.py::test_line")


def twice(count: int) -> int:
    # EXERCISE step 3: Twice
    raise NotImplementedError("step 3, Twice: tests/test_pool.py::test_twice")
'''
        assert pool.endswith(new)
        assert (root / "exercises/s2/__main__.py").read_text() == MAIN
        assert not (root / "exercises/s2/DIFF.md").exists()

    def test_exercise_runs(self, chain: Run, root: Path) -> None:
        chain("exercise", "2")
        command = [sys.executable, "-m", "exercises.s2"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        assert done.stdout == "8\n"

    def test_later_step_begins_with_earlier_steps_solved(self, chain: Run, root: Path) -> None:
        chain("exercise", "s2", "--step", "3")
        solved, twice = POOL_2.split("def twice")
        assert (root / "exercises/s2/pool.py").read_text().startswith(solved)
        assert twice not in (root / "exercises/s2/pool.py").read_text()

    def test_work_of_the_learner_is_not_overwritten(self, chain: Run, root: Path) -> None:
        chain("exercise", "2")
        assert chain("exercise", "2", "--step", "2")[0] == 0  # unchanged, so it may be replaced
        edit(root, "exercises/s2/pool.py", "raise NotImplementedError", "return")
        mine = (root / "exercises/s2/pool.py").read_text()
        for step, at in (("", 2), ("1", 1), ("3", 3)):  # print how to go on; without a number, from the current step
            status, printed = chain("exercise", "2", *(["--step", step] if step else []))
            assert status == 0 and "Your work in exercises/s2 stays as it is" in printed
            assert f"Look for EXERCISE step {at} in exercises/s2/pool.py." in printed
        assert (root / "exercises/s2/pool.py").read_text() == mine
        assert chain("exercise", "2", "--force")[0] == 0
        assert (root / "exercises/s2/pool.py").read_text() != mine

    def test_unknown_folder_counts_as_work(self, chain: Run, root: Path) -> None:
        (root / "exercises/s2").mkdir(parents=True)
        (root / "exercises/s2/pool.py").write_text("mine\n")
        assert "stays as it is" in chain("exercise", "2")[1]
        assert (root / "exercises/s2/pool.py").read_text() == "mine\n"

    def test_hints_and_solutions_write_nothing(self, chain: Run, root: Path) -> None:
        assert chain("exercise", "2", "--step", "2", "--hint") == (0, "step 2, Say it in a line: An f-string.\n")
        assert chain("exercise", "2", "--step", "2", "--hint", "2")[1].endswith(": Of both numbers.\n")
        for name in ("twice", "pool.py:twice"):
            solution = f"# {S2}/pool.py\ndef twice(count: int) -> int: return 2 * count\n"
            assert chain("exercise", "2", "--reveal", name) == (0, solution)
        assert "@lru_cache" in chain("exercise", "2", "--reveal", "Report.line")[1]
        assert not (root / "exercises").exists()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["7"], "there is no stage '7'; there are: s1, s2, s3"),
            (["2", "--step", "4"], "there is no step 4: s2 has steps 1 to 3"),
            (["2", "--reveal", "size"], "none of the exercise's functions is called 'size': pool.py:Pool.take"),
        ],
    )
    def test_misuse_is_reported_in_one_line(self, chain: Run, arguments: list[str], message: str) -> None:
        status, printed = chain("exercise", *arguments)
        assert (status, printed.count("\n")) == (2, 1)
        assert message in printed


SOLUTIONS = {
    "take": "        return [self.free.pop() for _ in range(count)] if count <= len(self.free) else []\n",
    "line": '            return f"{used} of {of}"\n',
    "twice": "    return count + count\n",
}


def solve(root: Path, name: str, body: str | None = None) -> None:
    """Write a function of exercises/s2, like a learner."""
    file = root / "exercises/s2/pool.py"
    function = find(file.read_text(), {"take": "Pool.take", "line": "Pool.Report.line"}.get(name, name))
    assert function is not None
    file.write_text(function.with_body(SOLUTIONS[name] if body is None else body))


class TestExerciseCheck:
    """exercise --check, which `make check` runs."""

    @pytest.fixture
    def check(self, root: Path, capfd: pytest.CaptureFixture[str]) -> Run:
        """Return a function that runs a check and returns its output, including that of its subprocesses."""

        def run(*arguments: str) -> tuple[int, str]:
            capfd.readouterr()
            status = main(["exercise", "2", "--check", *arguments], root)
            printed = capfd.readouterr()
            return status, printed.out + printed.err

        main(["exercise", "2"], root)
        return run

    def test_red_test_prints_the_expectation_the_place_and_help(self, check: Run) -> None:
        status, printed = check()
        assert status == 1
        assert printed.startswith("Step 1 of 3 is red: Take all or nothing.\n0 of 1 tests are green.")
        for words in (
            "  the test   tests/test_pool.py::test_take\n  expected   Take.\n             Three of two are none.\n",
            "  result     IndexError: pop from empty list\n",
            "  asked in   tests/test_pool.py, line 6: assert Pool(2).take(3)",
            "  your code  pool.py, line 15, Pool.take: return [self.free.pop() for _ in range(count)]",
            "make check STAGE=2\n",
            'make exercise STAGE=2 ARGS="--reveal Pool.take"\n',
        ):
            assert words in printed

    def test_line_outside_of_the_exercise_is_called_given_code(self) -> None:
        """The learner has not written it, and the fault is elsewhere."""
        step, take = (
            Place(f"{name}.py", 9, function, "...")
            for name, function in [("engine", "Engine.step"), ("pool", "Pool.take")]
        )
        for calls, words in (
            ((step,), "  given code engine.py, line 9"),
            ((step, take, step), "  your code  pool.py, line 9"),
        ):
            report = Report("tests/test_pool.py::test_take", "failed", calls=calls).within(["Pool.take"])
            assert any(line.startswith(words) for line in report.lines())

    def test_message_of_an_assert_is_printed(self, check: Run, root: Path) -> None:
        solve(root, "take", "        return [1]\n")
        assert "  because    none is taken\n  result     assert [1] == []\n" in check()[1]

    def test_green_step_prints_what_works_and_the_next_command(self, check: Run, root: Path) -> None:
        solve(root, "take")
        status, printed = check()
        assert status == 0
        assert printed.startswith(
            "Step 1 of 3 is green (tests: 1): Take all or nothing.\nWhat works now: Slots are taken, all or none.\n\n"
            "Next: step 2, about 5 minutes: Say it in a line.\nLook for EXERCISE step 2 in exercises/s2/pool.py.\n"
        )
        assert main(["exercise", "2", "--hint"], root) == 0, "the step is remembered"

    def test_unwritten_function_is_named(self, check: Run, root: Path) -> None:
        solve(root, "take")
        solve(root, "twice")  # the third step, before the second
        printed = check("--step", "2")[1]
        assert "  result     Pool.Report.line is not written yet: pool.py, line 28\n" in printed

    @pytest.mark.full
    def test_earlier_step_that_turns_red_comes_first(self, check: Run, root: Path) -> None:
        solve(root, "line")
        assert check()[1].startswith("Step 1 of 3 is red")

    def test_syntax_error_is_located(self, check: Run, root: Path) -> None:
        solve(root, "take", "        if (\n")
        status, printed = check()
        assert status == 1 and printed.startswith("exercises/s2/pool.py, line 14, is not Python yet: ")

    @pytest.mark.full
    def test_broken_import_is_reported(self, check: Run, root: Path) -> None:
        edit(root, "exercises/s2/pool.py", "def twice", "def thrice")
        printed = check()[1]
        assert "  result     ImportError: cannot import name 'twice'" in printed

    @pytest.mark.full
    def test_endless_loop_is_stopped(self, check: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECONDS_FOR_A_TEST", "1")
        solve(root, "take", "        while True:\n            pass\n")
        assert "did not finish within 1 seconds: is there an infinite loop?" in check()[1]

    @pytest.mark.parametrize(
        ("old", "new", "counts"),
        [
            full("Slots", "The slots", "2 of 3 tests are green. The first red one:"),
            full("return [self.free.pop() for _ in range(count)]", "while True: pass", "0 of 3 tests are green, and 2"),
            ("def twice", "def thrice", "0 of 3 tests are green, and 3 did not run. The first red one:"),
        ],
        ids=["one is red", "one never ends", "none can be imported"],
    )
    def test_total_is_what_the_step_has_whichever_tests_can_run(
        self, check: Run, root: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, counts: str
    ) -> None:
        monkeypatch.setenv("SECONDS_FOR_A_TEST", "1")
        for name in ("line", "twice"):
            solve(root, name)
        tests = ", ".join(f'"tests/test_pool.py::test_{name}"' for name in ("take", "line", "twice"))
        edit(root, "stages/chain.toml", 'tests = ["tests/test_pool.py::test_take"]', f"tests = [{tests}]")
        edit(root, "exercises/s2/pool.py", old, new)
        assert counts in check("--step", "1")[1]

    def test_last_step_prints_a_story_and_the_gain(self, check: Run, root: Path) -> None:
        for name in SOLUTIONS:
            solve(root, name)
        status, printed = check()
        assert status == 0
        assert "Step 3 of 3 is green" in printed and "What works now: All is twice." in printed
        assert "A story from your code; every stage writes the same one:\n\n8\n" in printed
        assert "              stage 1  your code\n  slots left        0          2\n" in printed
        assert "Next:  make diff STAGE=2" in printed and "another story" not in printed

    def test_a_story_that_the_stage_does_not_tell_is_shown_beside_its_own(self, check: Run, root: Path) -> None:
        """No test is red: a kernel with a race, for example, is right as plain Python."""
        for name in SOLUTIONS:
            solve(root, name)
        edit(root, "exercises/s2/__main__.py", "8", "9")
        status, printed = check()
        assert status == 0 and "this is another story" in printed
        assert "every stage writes the same one:\n\n9\n" in printed and f"{S2} writes:\n\n8\n" in printed

    def test_asked_is_the_test_and_not_its_helper(self, check: Run, root: Path) -> None:
        edit(
            root,
            "exercises/s2/tests/test_pool.py",
            "    assert Pool(2).take(3)",
            "    raises(Pool(2).take(3))\n    assert Pool(2).take(3)",
        )
        with open(root / "exercises/s2/tests/test_pool.py", "a") as file:
            file.write("\n\ndef raises(taken):\n    raise AssertionError('none are taken')\n")
        solve(root, "take")
        printed = check()[1]
        assert "none are taken" in printed
        assert "  asked in   tests/test_pool.py, line 6: raises(Pool(2).take(3))" in printed

    def test_gain_must_be_green_too(self, check: Run, root: Path) -> None:
        for name in SOLUTIONS:
            solve(root, name)
        solve(root, "take", "        return [] if count > 2 and self.free.pop() else [1]\n")
        status, printed = check()
        assert status == 1
        assert "The steps are green, but a test of the gain is red." in printed and "expected   Gain." in printed

    def test_missing_exercise_is_reported_in_one_line(self, chain: Run) -> None:
        message = "chain: there is no exercises/s2 yet: make exercise STAGE=2 writes it\n"
        assert chain("exercise", "2", "--check") == (2, message)
        tries = "s1_pool has no exercise. Try these on a copy:\n  1. another pool\n  2. another size\n"
        for flags in ([], ["--check"]):
            assert chain("exercise", "1", *flags) == (0, tries)

    def test_outdated_body_is_shown_as_a_comment(self, chain: Run, root: Path) -> None:
        edit(root, f"{S1}/pool.py", "return [self.free", "self.peak = 1\n        return [self.free")
        chain("exercise", "2")
        body = (root / "exercises/s2/pool.py").read_text().split("step 1: Take all or nothing\n")[1]
        assert body.startswith(
            "        # The previous stage used names that this stage does not have: self.peak\n"
            "        #     self.peak = 1\n        #     return [self.free.pop() for _ in range(count)]\n"
            '        raise NotImplementedError("step 1, '
        )


class TestProof:
    @pytest.mark.full
    def test_steps_are_red_before_and_green_after(self, chain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECONDS_FOR_A_TEST", "5")  # one of the mistakes never ends
        assert chain("check", "--exercises") == (0, "stages and exercises are as chain.toml says: s1, s2, s3, final\n")

    def test_wrong_colors_are_reported(self, root: Path) -> None:
        edit(root, f"{S2}/tests/test_pool.py", "== []", "or True")
        edit(root, f"{S2}/tests/test_pool.py", 'assert Pool.Report.line(1) == "1 of 8"', "assert twice(1) == 2")
        edit(root, f"{S2}/tests/test_gain.py", "pool.take(3)", "pass")
        assert proof_faults(load(root).stages[1]) == [
            f"{S2}: tests/test_gain.py is not red with 0 steps solved",
            f"{S2}: tests/test_pool.py::test_line is not green with 2 steps solved",
        ]

    def test_tests_that_cannot_run_are_a_fault(self, root: Path) -> None:
        edit(root, f"{S2}/tests/test_pool.py", "from ..pool", "from ..pond")
        found = proof_faults(load(root).stages[1])
        assert len(found) == 4
        assert all("tests/test_pool.py cannot be imported: ModuleNotFoundError" in fault for fault in found)


class TestVariants:
    """Solutions and mistakes, which tests/exercises/sN.py keeps for each step."""

    @pytest.fixture(autouse=True)
    def no_long_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECONDS_FOR_A_TEST", "1")

    def test_solutions_are_green_and_mistakes_are_red(self, chain: Run) -> None:
        assert chain("check", "--exercises", "s2") == (0, "exercises are as chain.toml says: s2\n")

    @pytest.mark.parametrize(
        ("old", "new", "fault"),
        [
            (
                "count > len(self.free):\n                    pass",
                "count > 9: pass",
                "does not say 'is there an infinite",
            ),
            ("2 * count\n", "return 2 * count\n", "wrong_forgets_to_return: all tests of step 3 are green (1)"),
            ("count << 1", "count << 2", "Step3.right_shift: tests/test_pool.py::test_twice is red:"),
            (
                "class Step1:\n    class right_asks",
                "class Step1:\n    class asks",
                "Step1.asks_first must be called right_... or",
            ),
            ("        'Shift.'\n", "", "Step3.right_shift has no docstring"),
            (
                "def twice(count): return count << 1",
                "def thrice(count): return 3",
                "right_shift replaces thrice; up to its step there are Pool.R",
            ),
            (
                '        red = "8 of 1"\n',
                "",
                "Step2.wrong_order: a wrong_ variant has a `red`, and a right_ one has none",
            ),
            (f"    class right_add:{ADD}", "", "Step3 has 1 right_ variants, and needs 2"),
            ("'Shift.'\n", "'Shift.'\n        unseen = 'x'\n", "right_shift: only a wrong_ variant can be `unseen`"),
            ("class Step3", "class Step4", "Step4 is not a step: s2 has Step1, Step2, Step3"),
            ("return count << 1", "return (", "was never closed"),
        ],
    )
    @pytest.mark.full
    def test_fault_is_reported(self, root: Path, old: str, new: str, fault: str) -> None:
        edit(root, "tests/exercises/s2.py", old, new)
        [found] = variant_faults(load(root).stages[1])
        assert found.startswith("tests/exercises/s2.py: ") and fault in found

    @pytest.mark.full
    def test_mistake_needs_a_red_test_with_words(self, root: Path) -> None:
        edit(root, f"{S2}/tests/test_pool.py", "    '''Two twice are four.'''\n", "")
        found = variant_faults(load(root).stages[1])
        assert len(found) == 2 and all("needs a docstring, or a message in words" in fault for fault in found)

    @pytest.mark.full
    def test_solution_needs_the_gain_too(self, root: Path) -> None:
        edit(root, f"{S2}/tests/test_gain.py", "pool.size() == 2", "pool.free == [0, 1]")
        [found] = variant_faults(load(root).stages[1])
        assert "Step1.right_gives_back: tests/test_gain.py::test_gain is red:" in found


class TestPropagate:
    def test_fix_reaches_the_last_stage(self, chain: Run, root: Path) -> None:
        edit(root, f"{S1}/__main__.py", "8", "9")  # the same in all stages
        edit(root, f"{S1}/pool.py", "range(size)", "range(1, size)")  # in a file that s2 changes elsewhere
        edit(root, f"{S1}/README.md", "One", "1")
        (root / f"{S1}/tests").mkdir()
        (root / f"{S1}/tests/test_fix.py").write_text("def test_fix(): pass\n")
        status, printed = chain("propagate", "s1")
        assert (status, printed.splitlines()) == (
            0,
            [
                *[f"{S2}/{line}" for line in ("__main__.py: follows", "pool.py: merged", "tests/test_fix.py: copied")],
                *[f"{S3}/{line}" for line in ("__main__.py: follows", "pool.py: follows", "tests/test_fix.py: copied")],
                "final/engine/__main__.py: left out: final has no such file",
                "final/engine/pool.py: merged",
                "Next: python stages/chain.py write, then check.",
            ],
        )
        assert (root / f"{S3}/pool.py").read_text() == POOL_2.replace("range(size)", "range(1, size)")
        assert (root / f"{S2}/README.md").read_text() == "Two.\n"
        assert chain("write")[0] == chain("check")[0] == 0
        assert chain("propagate", "s1")[0] == 0, "merging again changes nothing"
        assert (root / f"{S3}/pool.py").read_text() == POOL_2.replace("range(size)", "range(1, size)")

    def test_files_are_added_and_deleted(self, chain: Run, root: Path) -> None:
        (root / f"{S1}/__main__.py").unlink()
        edit(root, f"{S1}/old.py", "1", "2")  # s2 does not have it
        status, printed = chain("propagate", "s1")
        assert status == 0
        assert f"{S2}/__main__.py: deleted\n{S2}/old.py: left out: s2_all_or_nothing has no such file\n" in printed
        assert not (root / f"{S3}/__main__.py").exists()

    def test_committed_edit_needs_since(self, chain: Run, root: Path) -> None:
        edit(root, f"{S2}/__main__.py", "8", "9")
        git(root, "commit", "-qam", "edit")
        assert chain("propagate", "s2") == (0, "nothing to propagate\n")
        assert chain("propagate", "s2", "--since", "HEAD~1")[0] == 0
        assert "9" in (root / f"{S3}/__main__.py").read_text()

    def test_conflict_is_marked_and_resumed(self, chain: Run, root: Path) -> None:
        edit(root, f"{S1}/__main__.py", "8", "9")
        edit(root, f"{S1}/pool.py", "for _ in range(count)]", "for _ in range(max(count, 0))]")
        edit(root, f"{S1}/pool.py", "`count` slots", "`count` slots, the last first")
        status, printed = chain("propagate", "s1")
        assert status == 1
        assert f"conflict in {S2}/pool.py: resolve it" in printed
        assert "<<<<<<< " in (root / f"{S2}/pool.py").read_text()
        assert "9" in (root / f"{S2}/__main__.py").read_text()
        assert "8" in (root / f"{S3}/__main__.py").read_text(), "it stopped behind the link"

        status, printed = chain("propagate", "s1")
        assert status == 1, "nothing is resolved yet"
        assert chain("propagate", "s2")[1].startswith("chain: propagate s1_pool is unfinished")
        assert chain("propagate", "s1", "--since", "HEAD~0")[0] == 1

        resolved = POOL_2.replace("or none", "or none, the first first")
        (root / f"{S2}/pool.py").write_text(resolved)
        edit(root, f"{S1}/__main__.py", "9", "10")  # one more edit on the way
        status, printed = chain("propagate", "s1")
        assert (status, printed.splitlines()) == (
            0,
            [
                f"{S2}/__main__.py: follows",
                f"{S3}/__main__.py: follows",
                f"{S3}/pool.py: follows",
                "final/engine/__main__.py: left out: final has no such file",
                "final/engine/pool.py: merged",
                "Next: python stages/chain.py write, then check.",
            ],
        )
        assert (root / f"{S2}/pool.py").read_text() == (root / f"{S3}/pool.py").read_text() == resolved
        assert "10" in (root / f"{S3}/__main__.py").read_text()
        assert chain("propagate", "--abort") == (2, "chain: no propagate is unfinished: there is nothing to abort\n")

    def test_deletion_of_a_changed_file_is_a_conflict(self, chain: Run, root: Path) -> None:
        (root / f"{S1}/pool.py").unlink()
        status, printed = chain("propagate", "s1")
        assert status == 1
        assert f"{S2}/pool.py: CONFLICT: deleted in the previous stage and changed in s2_all_or_nothing" in printed
        assert (root / f"{S2}/pool.py").read_text() == POOL_2
        assert chain("propagate", "s1")[0] == 0, "run again: it is kept"
        assert (root / f"{S3}/pool.py").read_text() == POOL_2

    def test_abort_restores_all_files(self, chain: Run, root: Path) -> None:
        edit(root, f"{S1}/__main__.py", "8", "9")
        edit(root, f"{S1}/pool.py", "Take `count` slots.", "Take some.")
        (root / f"{S1}/new.py").write_text("x = 1\n")
        assert chain("propagate", "s1")[0] == 1
        assert (root / f"{S2}/new.py").exists()
        assert chain("propagate", "--abort")[0] == 0
        assert (root / f"{S2}/pool.py").read_text() == POOL_2
        assert (root / f"{S2}/__main__.py").read_text() == MAIN
        assert not (root / f"{S2}/new.py").exists()
        assert "9" in (root / f"{S1}/__main__.py").read_text(), "the edit itself stays"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "propagate which stage?"),
            (["s1", "--since", "nowhere"], "git knows no revision 'nowhere'"),
            (["s8"], "there is no stage 's8'"),
        ],
    )
    def test_misuse_is_reported_in_one_line(self, chain: Run, arguments: list[str], message: str) -> None:
        status, printed = chain("propagate", *arguments)
        assert (status, printed.count("\n")) == (2, 1)
        assert message in printed

    def test_uncommitted_stage_has_no_base(self, chain: Run, root: Path) -> None:
        git(root, "mv", S2, "stages/s2_blocks")
        edit(root, "stages/chain.toml", "s2_all_or_nothing", "s2_blocks")
        assert chain("propagate", "s1")[1].startswith("chain: stages/s2_blocks is not in HEAD: commit it")


class TestPackage:
    """The last link, from the last stage to the package, where files have other names."""

    @pytest.mark.parametrize(
        ("file", "old", "new", "fault"),
        [
            (
                "final/engine/extra.py",
                "1",
                "2",
                f"engine/extra.py differs from {S3}/extra.py but is not declared changed",
            ),
            (f"{S3}/extra.py", "1", "2", f"engine/extra.py differs from {S3}/extra.py but is not declared changed"),
            ("final/shapes/box.py", "6", "4", f"shapes/box.py differs from {S3}/shape/box.py but is not declared"),
            ("final/shapes/ball.py", "", "", f"final/shapes/ball.py is not in {S3}/shape/"),
            ("final/serving/http.py", "80", "8000", f"http.py is declared changed but is the same as {S3}/server.py"),
            ("final/engine/__main__.py", "", "", f"{S3}/__main__.py is declared removed, and final/engine/__main__.py"),
            ("stages/chain.toml", '"__main__.py", why = "c', '"main.py", why = "c', f"{S3}/main.py does not exist"),
            (
                "stages/chain.toml",
                '"__main__.py", why = "c',
                '"main.py", why = "c',
                "final/engine/__main__.py is missing",
            ),
            (
                "stages/chain.toml",
                "http.py",
                "https.py",
                "final/serving/https.py is declared changed but does not exist",
            ),
            ("stages/chain.toml", '"engine/twice.py"]', '"twice.py"]', f"paths gives no file of {S3} this place"),
            ("stages/chain.toml", '"*" = "engine/"', "", f"{S3}/extra.py has no place in [package.paths]"),
            ("stages/chain.toml", '"server.py" =', '"servers.py" =', f"names 'servers.py', which {S3} does not have"),
            ("stages/chain.toml", '"shape/" =', '"form/" =', f"names 'form/', which {S3} does not have"),
            ("stages/chain.toml", '"engine/pool.py", why', '"engine/twice.py", why', "twice.py is declared 2 times"),
        ],
    )
    def test_fault_is_reported(self, chain: Run, root: Path, file: str, old: str, new: str, fault: str) -> None:
        (root / file).touch()
        edit(root, file, old, new)
        status, printed = chain("check")
        assert status == 1
        assert fault in printed

    def test_is_optional(self, chain: Run, root: Path) -> None:
        edit(root, "stages/chain.toml", PACKAGE, "")
        assert chain("check") == (0, "stages are as chain.toml says: s1, s2, s3\n")
        assert chain("diff", "final")[0] == 2

    def test_its_own_files_and_free_files_may_differ(self, chain: Run, root: Path) -> None:
        (root / "final/engine/more.py").touch()
        (root / f"{S3}/tests/test_more.py").touch()
        edit(root, f"{S3}/__init__.py", "Three", "3")
        assert chain("check")[0] == 0

    def test_diff_follows_renamed_paths_in_reading_order(self, chain: Run) -> None:
        status, printed = chain("diff", "final")
        assert status == 0
        assert "final: what changes from s3_server, 4 files\n" in printed
        assert "2 more files of s3_server are the same, byte for byte." in printed
        assert "New in final, and not shown: cli.py, engine/disk.py, metrics/." in printed
        marks = [
            "=== 1 of 4: server.py -> serving/http.py, changed ",
            "    another port\n\n@@ -1,5 +1,5 @@\n def port() -> int:\n-    return 8000\n+    return 80\n",
            "=== 2 of 4: engine/pool.py, changed ",
            "+        # free\n",
            "=== 3 of 4: pool.py -> engine/twice.py, changed ",
            "=== 4 of 4: __main__.py, removed ",
            "-print(Pool(8).size())\n",
        ]
        places = [printed.index(mark) for mark in marks]
        assert places == sorted(places)

    def test_parts_of_a_split_file_are_compared(self, chain: Run) -> None:
        pool, twice = (chain("diff", "final", "--file", file)[1] for file in ("engine/pool.py", "twice.py"))
        assert "twice" not in pool.split("\n", 1)[1]
        assert "class Pool" not in twice and "return 2 * count" in twice
        assert '-"""One pool, all or nothing."""' in twice and '+"""Numbers."""' in twice

    def test_diff_accepts_a_name_from_the_stage(self, chain: Run) -> None:
        assert chain("diff", "final", "--file", "server.py") == chain("diff", "final", "--file", "serving/http.py")
        assert (
            "final does not change 'x'; it changes serving/http.py, engine/" in chain("diff", "final", "--file", "x")[1]
        )

    def test_has_no_exercise(self, chain: Run) -> None:
        assert chain("exercise", "final") == (2, "chain: there is no stage 'final'; there are: s1, s2, s3\n")

    def test_fix_of_the_last_stage_is_merged(self, chain: Run, root: Path) -> None:
        edit(root, f"{S3}/extra.py", "1", "2")
        edit(root, f"{S3}/server.py", '"::1"', '"::"')
        edit(root, f"{S3}/pool.py", "2 * count", "count + count")
        (root / f"{S3}/fresh.py").write_text("x = 1\n")
        edit(root, f"{S3}/README.md", "Two", "2")
        (root / f"{S3}/tests/test_fix.py").touch()
        status, printed = chain("propagate", "s3")
        assert (status, printed.splitlines()) == (
            0,
            [
                "final/engine/extra.py: follows",
                "final/engine/fresh.py: copied",
                "final/engine/twice.py: merged",
                "final/serving/http.py: merged",
                "Next: python stages/chain.py write, then check.",
            ],
        )
        assert (root / "final/serving/http.py").read_text() == SERVER.replace("8000", "80").replace("::1", "::")
        assert (root / "final/engine/twice.py").read_text() == TWICE_FINAL.replace("2 * count", "count + count")
        assert (root / "final/engine/pool.py").read_text() == POOL_FINAL
        assert not (root / "final/README.md").exists() and not (root / "final/engine/tests").exists()

    def test_new_function_follows_its_neighbor(self, chain: Run, root: Path) -> None:
        (root / f"{S3}/pool.py").write_text(POOL_2 + "\n\ndef thrice(count: int) -> int: return 3 * count\n")
        edit(root, f"{S3}/pool.py", "range(size)", "range(1, size)")
        status, printed = chain("propagate", "s3")
        assert status == 0
        assert "final/engine/pool.py: merged\nfinal/engine/twice.py: merged\n" in printed
        assert "thrice" in (root / "final/engine/twice.py").read_text()
        assert (root / "final/engine/pool.py").read_text() == POOL_FINAL.replace("range(size)", "range(1, size)")

    def test_conflict_is_marked_and_resumed(self, chain: Run, root: Path) -> None:
        edit(root, "final/engine/pool.py", "range(size)", "range(size, 0, -1)")
        edit(root, f"{S1}/pool.py", "range(size)", "range(1, size)")
        edit(root, f"{S3}/pool.py", "2 * count", "count + count")
        edit(root, f"{S3}/server.py", "8000", "8001")
        edit(root, f"{S1}/__main__.py", "8", "9")
        status, printed = chain("propagate", "s1")
        assert status == 1
        assert [line for line in printed.splitlines() if "final/" in line] == [
            "final/engine/__main__.py: left out: final has no such file",
            "final/engine/pool.py: CONFLICT: marked in the file",
            "final/engine/twice.py: merged",
            "final/serving/http.py: CONFLICT: marked in the file",
            *[
                f"conflict in final/{file}: resolve it and run the same command again, or propagate --abort"
                for file in ("engine/pool.py", "serving/http.py")
            ],
        ]
        assert "<<<<<<< final/serving/http.py\n    return 80\n" in (root / "final/serving/http.py").read_text()
        assert chain("propagate", "s1")[0] == 1, "nothing is resolved yet"

        (root / "final/engine/pool.py").write_text(POOL_FINAL.replace("range(size)", "range(size, 1, -1)"))
        (root / "final/serving/http.py").write_text(SERVER.replace("8000", "81"))
        assert chain("propagate", "s1") == (0, "nothing to propagate\n")
        assert "count + count" in (root / "final/engine/twice.py").read_text()
        assert (root / "final/serving/http.py").read_text() == SERVER.replace("8000", "81")

    def test_abort_restores_its_files(self, chain: Run, root: Path) -> None:
        edit(root, f"{S3}/extra.py", "1", "2")
        edit(root, f"{S3}/server.py", "8000", "8001")
        assert chain("propagate", "s3")[0] == 1
        assert chain("propagate", "--abort")[0] == 0
        assert (root / "final/engine/extra.py").read_text() == "x = 1\n"
        assert (root / "final/serving/http.py").read_text() == FINAL["serving/http.py"]


class TestFirstStage:
    """A first stage with an exercise: no stage is before it, so all of its functions are new."""

    @pytest.fixture(autouse=True)
    def exercise_of_the_first_stage(self, root: Path) -> None:
        edit(root, "stages/chain.toml", "\n[s2]\n", f"{FIRST_STEPS}\n[s2]\n")
        for file, text in FIRST_TESTS.items():
            (root / S1 / "tests").mkdir(exist_ok=True)
            (root / S1 / "tests" / file).write_text(text)
        edit(root, f"{S1}/pool.py", "    def size", f"{GIVE_BACK}    def size")
        assert main(["write"], root) == 0

    def test_its_steps_are_proved_like_those_of_a_later_stage(self, chain: Run) -> None:
        assert chain("check") == (0, "stages are as chain.toml says: s1, s2, s3, final\n")
        assert chain("check", "--exercises", "s1") == (0, "exercises are as chain.toml says: s1\n")

    def test_its_functions_are_all_open(self, chain: Run, root: Path) -> None:
        status, printed = chain("exercise", "1")
        assert status == 0 and "3 steps, about 3 minutes" in printed and "make check STAGE=1\n" in printed
        pool = (root / "exercises/s1/pool.py").read_text()
        assert 'raise NotImplementedError("step 1, Take: tests/test_pool.py::test_take")' in pool
        assert "self.free.pop()" not in pool and pool.count("NotImplementedError") == 3
        assert "class Pool" in chain("diff", "1")[1]

    @pytest.mark.parametrize(
        ("old", "new", "fault"),
        [
            ("pool.py:Pool.take", "pool.py:Pool.took", f"{S1}, step 1: pool.py:Pool.took does not exist"),
            ("pool.py:Pool.give_back", "pool.py:Pool.__init__", f"{S1}, step 2: pool.py:Pool.__init__ is always given"),
            (FIRST_STEPS[FIRST_STEPS.rindex("\n[[") :], "", f"{S1}: its exercise has 2 steps, and should have 3 to 5"),
        ],
    )
    def test_fault_is_reported(self, chain: Run, root: Path, old: str, new: str, fault: str) -> None:
        text = (root / "stages/chain.toml").read_text()
        first, rest = text.split("\n[s2]\n")
        assert old in first
        (root / "stages/chain.toml").write_text(first.replace(old, new) + "\n[s2]\n" + rest)
        status, printed = chain("check")
        assert status == 1 and fault in printed

    def test_last_step_prints_the_gain_and_then_the_experiments(
        self, root: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        main(["exercise", "1"], root)
        shutil.copyfile(root / f"{S1}/pool.py", root / "exercises/s1/pool.py")
        capfd.readouterr()
        assert main(["exercise", "1", "--check"], root) == 0
        printed = capfd.readouterr().out
        assert "Step 3 of 3 is green" in printed and "A story from your code" in printed
        assert "              no pool  your code\n  slots left        0          2\n" in printed
        assert f"Next:  diff -u exercises/s1 {S1}      compare with how" in printed
        assert printed.endswith("Then try these on your copy:\n  1. another pool\n  2. another size\n")


class TestBranch:
    """A branch after s2: s3 and the package don't know it."""

    @pytest.fixture(autouse=True)
    def branch(self, chain: Run, root: Path) -> None:
        for file, text in (STAGE_2 | {"server.py": SERVER, "tests/test_gain.py": GAIN_3}).items():
            (root / MORE / file).parent.mkdir(parents=True, exist_ok=True)
            (root / MORE / file).write_text(text)
        edit(root, "stages/chain.toml", '"s3_server"]', '"s3_server"]\nbranches = ["more_server"]')
        edit(root, "stages/chain.toml", "\n[package]\n", f"{BRANCH}\n[package]\n")
        assert chain("write")[0] == 0
        git(root, "add", ".")
        git(root, "commit", "-qm", "a branch")

    def test_is_checked_like_a_stage(self, chain: Run, root: Path) -> None:
        assert chain("check") == (0, "stages are as chain.toml says: s1, s2, s3, more_server, final\n")
        edit(root, f"{MORE}/__main__.py", "8", "9")
        status, printed = chain("check")
        fault = f"{MORE}/__main__.py differs from the previous stage but is not declared changed"
        assert (status, printed.splitlines()[0]) == (1, fault)

    def test_a_folder_that_is_not_declared_is_reported(self, chain: Run, root: Path) -> None:
        (root / "stages/more_and_more").mkdir()
        assert chain("check")[1].startswith("stages/more_and_more is not in chain.toml\n")

    @pytest.mark.parametrize(
        ("old", "new", "fault"),
        [
            (
                'after = "s2"',
                'after = "s9"',
                "chain: chain.toml: [more_server] after must be one of s1, s2, s3, got 's9'",
            ),
            ('after = "s2"', "", "chain: chain.toml: [more_server] after must be one of s1, s2, s3, got None"),
            ('branches = ["more_server"]', 'branches = ["s4_server"]', "chain: chain.toml: each stage needs one table"),
        ],
    )
    def test_invalid_toml_is_reported_in_one_line(self, chain: Run, root: Path, old: str, new: str, fault: str) -> None:
        edit(root, "stages/chain.toml", old, new)
        status, printed = chain("check")
        assert status == 2 and printed.startswith(fault) and printed.count("\n") == 1

    def test_diff_and_exercise_compare_with_its_base(self, chain: Run, root: Path) -> None:
        assert "more_server: what changes from s2_all_or_nothing, 1 files" in chain("diff", "more_server")[1]
        status, printed = chain("exercise", "more_server")
        assert status == 0 and "make check STAGE=more_server" in printed
        assert "NotImplementedError" in (root / "exercises/more_server/server.py").read_text()

    def test_may_have_experiments_instead_of_an_exercise(self, chain: Run, root: Path) -> None:
        edit(root, "stages/chain.toml", BRANCH[BRANCH.index("\n[[") :], 'tries = ["another port", "no port"]\n')
        for file in ("tests/gain.py", "tests/test_gain.py"):
            (root / MORE / file).unlink()
        assert chain("check") == (0, "stages are as chain.toml says: s1, s2, s3, more_server, final\n")
        assert chain("check", "--exercises", "more_server") == (0, "exercises are as chain.toml says: more_server\n")
        tries = "more_server has no exercise. Try these on a copy:\n  1. another port\n  2. no port\n"
        for flags in ([], ["--check"]):
            assert chain("exercise", "more_server", *flags) == (0, tries)

    @pytest.mark.parametrize(
        ("old", "new", "fault"),
        [
            ('after = "s2"', 'after = "s2"\ntries = ["a port"]', f"{MORE} has tries and steps: it needs one of them\n"),
            (BRANCH[BRANCH.index("\n[[") :], "", f"{MORE}: its exercise has 0 steps, and should have 3 to 5\n"),
            ("[s2]", '[s2]\ntries = ["a pool"]', "chain: chain.toml: [s2] has the unknown key 'tries'"),
        ],
    )
    def test_experiments_are_for_branches_without_an_exercise(
        self, chain: Run, root: Path, old: str, new: str, fault: str
    ) -> None:
        edit(root, "stages/chain.toml", old, new)
        status, printed = chain("check")
        assert status > 0 and printed.startswith(fault)

    def test_edits_of_its_base_reach_it_and_those_of_others_do_not(self, chain: Run, root: Path) -> None:
        edit(root, f"{S1}/__main__.py", "8", "9")
        printed = chain("propagate", "s1")[1]
        assert f"{S2}/__main__.py: follows" in printed and f"{MORE}/__main__.py: follows" in printed
        assert "9" in (root / MORE / "__main__.py").read_text()
        git(root, "commit", "-qam", "edit")
        edit(root, f"{S3}/server.py", "::1", "::2")
        printed = chain("propagate", "s3")[1]
        assert "final/serving/http.py" in printed and MORE not in printed
        assert chain("propagate", "more_server") == (0, "nothing to propagate\n")


def test_missing_git_is_reported_in_one_line(chain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert chain("diff", "2") == (2, "chain: git is not installed, or not on the PATH\n")


EXERCISES = [stage.key for stage in load(ROOT).lessons if stage.steps]


class TestTheRealChain:
    def test_check_passes_from_any_folder_without_installs(self, tmp_path: Path) -> None:
        command = [sys.executable, "-I", "-S", str(ROOT / "stages/chain.py"), "check"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.nightly
    @pytest.mark.parametrize("key", EXERCISES)
    def test_exercises_are_red_before_each_step_and_green_after_it(self, key: str) -> None:
        """Leave out the finished exercise: it is the stage itself, whose tests run anyway."""
        stage = load(ROOT).stage(key)
        assert stage.steps and proof_faults(stage, finished=False) == []

    @pytest.mark.nightly
    @pytest.mark.parametrize("key", EXERCISES)
    def test_solutions_are_green_and_mistakes_are_red(self, key: str) -> None:
        faults = variant_faults(load(ROOT).stage(key))
        assert not faults, "\n\n".join(faults)

    def test_each_exercise_has_solutions_and_mistakes(self) -> None:
        missing = [variants_file(stage) for stage in load(ROOT).lessons if stage.steps]
        assert [file for file in missing if not (ROOT / file).is_file()] == []

    @pytest.mark.parametrize("key", [*EXERCISES[:2], *map(full, EXERCISES[2:])])
    def test_gain_compares_with_the_previous_stage(self, key: str, tmp_path: Path) -> None:
        stage = load(ROOT).stage(key)
        before, now = (import_module(each.path.replace("/", ".")) for each in (stage.before or stage, stage))
        gain = import_module(f"{now.__name__}.tests.gain")
        old, new = gain.before(before, tmp_path), gain.now(now, tmp_path)
        assert old.keys() == new.keys()
        gains = new.keys() - getattr(gain, "COSTS", ())
        assert all(new[what] <= old[what] for what in gains) and any(2 * new[what] < old[what] for what in gains)

    def test_exercises_take_45_to_75_minutes(self) -> None:
        minutes = {stage.key: stage.minutes for stage in load(ROOT).lessons if stage.steps}
        assert {key: each for key, each in minutes.items() if not 45 <= each <= 75} == {}

    def test_exercises_are_ignored_by_git(self) -> None:
        assert "/exercises/" in (ROOT / ".gitignore").read_text().splitlines()
