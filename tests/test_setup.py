"""make, .ci/setup_env.py and `python -m stages`, without installing anything."""

import doctest
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import stages.__main__ as launcher

ROOT = Path(__file__).resolve().parent.parent
needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run make as in a new shell, without the variables of a `make test` that runs these tests."""
    env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(["make", *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def arguments_of(tmp_path: Path, *arguments: str) -> list[str]:
    """Return the arguments that a target passes to its interpreter. PY is a program that prints them."""
    (tmp_path / "show.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    return json.loads(make(*arguments, f"PY={sys.executable} {tmp_path / 'show.py'}").stdout)


# make


@needs_make
def test_help_describes_every_target():
    targets = " ".join(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)).split()
    lines = dict(re.findall(r"^make ([\w-]+) +(\S.*)$", make("help").stdout, re.M))
    assert list(lines) == [target for target in targets if target != "FORCE"]


PROMPTS = ['It\'s "so"', "$5 for $(x) or ${y}, $$ `z`", "a # b \\ c; d", "42", "-- no", "a\nb"]


@needs_make
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_need_no_escaping(tmp_path, prompt):
    assert arguments_of(tmp_path, "run", "STAGE=1", f"PROMPT={prompt}") == ["-m", "stages", "1", "--", prompt]


@needs_make
def test_run_passes_on_the_stage_and_options(tmp_path):
    assert arguments_of(tmp_path, "run", "STAGE=3", "ARGS=--device cuda") == ["-m", "stages", "3", "--device", "cuda"]
    dry = make("-n", "run", "PY=python3", "STAGE=3", "PROMPT=A fox").stdout
    assert dry.split() == ["python3", "-m", "stages", "3", "${PROMPT:+--", '"$PROMPT"}']


@needs_make
def test_ci_runs_both_parts_of_the_tests(tmp_path):
    """tests/test_duplicate_tests.py checks that the parts add up to all tests."""
    quick, everything = (arguments_of(tmp_path, target, "ARGS=-x") for target in ("test", "test-all"))
    assert quick[:2] == ["-m", "pytest"] and quick[-1] == "-x" and "--part" not in quick
    assert everything[-3:] == ["--part", "all", "-x"]
    assert arguments_of(tmp_path, "test-all", "PART=rest")[-2:] == ["--part", "rest"]
    commands = re.findall(r"^ *make .* (test.*) ", (ROOT / ".ci" / "run").read_text(), re.M)
    assert commands == ["test", "test-triton", "test-all PART=rest"]


@needs_make
def test_run_without_a_stage_runs_the_package(tmp_path):
    assert arguments_of(tmp_path, "run") == ["-m", "nanovllm", "generate"]
    arguments = arguments_of(tmp_path, "run", "PROMPT=A fox", "ARGS=--n 2")
    assert arguments == ["-m", "nanovllm", "generate", "--n", "2", "--", "A fox"]


@needs_make
def test_serve_serves_the_storyteller(tmp_path):
    served = ["models/storyteller", "--chat-template", "plain"]
    assert arguments_of(tmp_path, "serve", "ARGS=--port 0") == ["-m", "nanovllm", "serve", *served, "--port", "0"]


@needs_make
def test_diff_takes_the_package_as_a_stage():
    assert make("-n", "diff", "STAGE=nanovllm", "PY=python3").stdout.split()[-2:] == ["diff", "nanovllm"]


@needs_make
def test_check_passes_on_the_step_and_succeeds_if_tests_fail(tmp_path):
    expected = ["stages/chain.py", "exercise", "2", "--check", "--step", "3"]
    assert arguments_of(tmp_path, "check", "STAGE=2", "STEP=3") == expected
    for status, make_status in ((1, 0), (2, 2)):
        (tmp_path / "end.py").write_text(f"raise SystemExit({status})")
        assert make("check", "STAGE=2", f"PY={sys.executable} {tmp_path / 'end.py'}").returncode == make_status


@needs_make
def test_notebook_passes_on_the_stage(tmp_path):
    expected = ["-m", "notebooks.lab", "3", "--no-browser"]
    assert arguments_of(tmp_path, "notebook", "STAGE=3", "ARGS=--no-browser") == expected


@needs_make
def test_train_accepts_a_folder_name_with_spaces(tmp_path):
    assert arguments_of(tmp_path, "train", "TEXT=../my texts")[-1] == "../my texts"


REQUIRED = [(target, "STAGE=3") for target in ("diff", "exercise", "check", "play", "notebook")]
REQUIRED += [("train", "TEXT=folder")]


@needs_make
@pytest.mark.parametrize(("target", "variable"), REQUIRED)
def test_a_target_names_its_missing_variable(target, variable):
    done = make("-n", target, "PY=python3")
    assert done.returncode and f"make {target} {variable}" in done.stderr and len(done.stderr.splitlines()) == 1


@needs_make
def test_targets_install_only_when_needed(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    installs = lambda target: "setup_env.py" in make("-n", target, "PYTHON=python3", cwd=tmp_path).stdout  # noqa: E731
    assert installs("run"), "there is no .venv yet"

    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(shutil.which("true"))
    assert installs("run"), "without a stamp, the install was interrupted"

    (tmp_path / ".venv/.with-core").touch()
    assert not installs("run") and installs("test")

    for changed in ("pyproject.toml", "constraints.txt"):
        os.utime(tmp_path / changed, (2e9, 2e9))
        assert installs("run")
        os.utime(tmp_path / changed, (1e9, 1e9))
    assert not installs("run")

    (tmp_path / ".venv/bin/python").unlink()
    (tmp_path / ".venv/bin/python").symlink_to(tmp_path / "missing")
    assert installs("run"), "the interpreter of .venv is missing"
    assert "setup_env.py" not in make("-n", "run", "PY=python3", cwd=tmp_path).stdout


# .ci/setup_env.py


def load_setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / ".ci" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Setup:
    """The script, recording its commands instead of running them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.module = load_setup_env()
        self.commands: list[list[str]] = []
        self.module.VENV, self.module.PYTHON, self.module.TORCH_INDEX = folder, folder / "bin/python", ""
        self.module.pip_settings = lambda: ["find-links"]
        self.module.query = lambda python, code: ""  # numba is installed, too
        self.module.run = self.module.run_pip = lambda *command: self.commands.append([str(part) for part in command])
        monkeypatch.setattr(self.module.shutil, "which", lambda name: f"/bin/{name}")

    def has_torch(self, version: str, folder: Path) -> None:
        self.module.find_torch = lambda python: self.module.Torch(version, folder)

    def has_torch_after_install(self) -> None:
        self.module.find_torch = lambda python: self.module.Torch("2.13.0", self.module.VENV) if self.commands else None


@pytest.fixture
def setup(tmp_path, monkeypatch) -> Setup:
    return Setup(tmp_path, monkeypatch)


def test_a_missing_torch_is_installed_as_pinned(setup, tmp_path):
    setup.has_torch_after_install()
    setup.module.install("core")
    (command,) = setup.commands
    assert command[1:7] == ["-m", "pip", "install", "-c", str(tmp_path / "constraints.txt"), "torch"]
    assert (tmp_path / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
    assert (tmp_path / ".with-core").exists()


def test_torch_index_applies_to_torch_alone(setup):
    setup.has_torch_after_install()
    setup.module.TORCH_INDEX = "https://example.org/cpu"
    setup.module.install("core")
    first, second = setup.commands
    assert first[6:] == ["--no-deps", "--index-url", "https://example.org/cpu", "torch"]
    assert "--index-url" not in second and "sentencepiece" in " ".join(second)


def test_an_installed_torch_is_kept(setup, tmp_path, capsys):
    setup.has_torch("2.11.0+cu130", Path("/usr/lib/python3/site-packages"))
    setup.module.install("test")
    (command,) = setup.commands
    assert not any(part.startswith("torch") for part in command)
    pins = (tmp_path / "constraints.txt").read_text()
    assert "\ntorch==" not in pins and "\npytest==" in pins, "all but torch is as pinned"
    assert "torch 2.11.0+cu130 is already installed" in capsys.readouterr().out


def test_an_old_torch_is_ignored(setup):
    answers = {"2.10.1": None, "2.11.0a0+git1": "2.11.0a0+git1", "2.13.0+cpu": "2.13.0+cpu", "3.0": "3.0"}
    for version, expected in answers.items():
        answer = f"a warning\n{version}\n/x/site-packages/torch/__init__.py"
        setup.module.query = lambda python, code, answer=answer: answer
        torch = setup.module.find_torch("python3")
        assert (torch and torch.version) == expected


def test_uv_is_preferred_if_pip_has_no_settings_of_its_own(setup):
    setup.has_torch_after_install()
    setup.module.pip_settings = lambda: []
    setup.module.install("core")
    assert setup.commands[0][:3] == ["/bin/uv", "pip", "install"]


@pytest.mark.parametrize("has_wheel", [True, False])
def test_numba_is_installed_only_as_a_wheel(setup, tmp_path, capsys, has_wheel):
    tried: list[list] = []
    setup.has_torch("2.13.0", tmp_path)
    setup.module.query = lambda python, code: None if code == "import numba" else ""
    setup.module.succeeds = lambda *command: tried.append(list(command)) or has_wheel
    setup.module.install("core")
    [command] = tried
    assert command[-3:-1] == ["--only-binary", ":all:"] and command[-1].startswith("numba>=")
    assert ("There is no wheel for Python" in capsys.readouterr().out) == (not has_wheel)
    assert (tmp_path / ".with-core").exists() and len(setup.commands) == 1


def test_a_failed_install_of_numba_is_not_an_error(setup, tmp_path):
    setup.module.query = lambda python, code: None
    setup.module.install_kernels([sys.executable, "-c", "import sys; sys.exit(1)"], ["numba>=0.68"])
    assert not setup.commands


def test_a_failed_install_leaves_no_stamp(setup, tmp_path):
    setup.has_torch_after_install()
    setup.module.run_pip = lambda *command: sys.exit("stopped")
    with pytest.raises(SystemExit):
        setup.module.install("core")
    assert not list(tmp_path.glob(".with-*"))


PIP_OUTPUT = """Looking in indexes: https://example.org/simple
WARNING: Location 'file:///nowhere/' is ignored: it is neither a file nor a directory.
Collecting torch==2.13.0
  Downloading torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl.metadata (29 kB)
  Downloading https://example.org/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (190.1 MB)
Progress 262144 of 199334512
Progress 199334512 of 199334512
Collecting tqdm>=4.60
  Using cached tqdm-4.70.1-py3-none-any.whl (78 kB)
Requirement already satisfied: numpy in ./lib (2.4.6)
Processing /wheels/iniconfig-2.3.1-py3-none-any.whl (from pytest)
  Downloading antlr-4.9.3.tar.gz (117 kB)
Installing collected packages: tqdm, torch
"""
SUMMARY = """  torch 2.13.0+cpu, 190.1 MB
  tqdm 4.70.1, 78 kB
  iniconfig 2.3.1
  antlr 4.9.3, 117 kB
installing...
"""


def run_fake_pip(tmp_path: Path, status: int) -> None:
    """Run run_pip() with a program that prints PIP_OUTPUT and exits with `status`."""
    module = load_setup_env()
    module.query = lambda python, code: "26.3"
    (tmp_path / "pip.py").write_text(f"import sys\nprint({PIP_OUTPUT!r}, *sys.argv[1:])\nsys.exit({status})")
    module.run_pip(sys.executable, str(tmp_path / "pip.py"), "install")


def test_pips_output_is_summarized_in_a_line_per_package(tmp_path, capsys):
    run_fake_pip(tmp_path, status=0)
    assert capsys.readouterr().out == SUMMARY


def test_a_failed_pip_prints_its_whole_output(tmp_path, capsys):
    with pytest.raises(SystemExit, match="setup: failed"):
        run_fake_pip(tmp_path, status=1)
    output = capsys.readouterr().out
    assert "WARNING: Location" in output and "install --progress-bar raw" in output and "Progress" not in output


def test_terminals_show_pips_progress(setup, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert setup.module.summarize("Progress 1 of 4\n") == "\r     25%"
    assert setup.module.summarize("Progress 4 of 4\n").strip() == ""
    assert doctest.testmod(setup.module).failed == 0


@pytest.mark.parametrize(("platform", "text"), [("linux", "make run TORCH_INDEX=https://"), ("darwin", "110 MB")])
def test_the_size_of_torch_is_printed_before_the_install(setup, monkeypatch, platform, text):
    setup.module.pip_settings = lambda: []
    monkeypatch.setattr(setup.module.sys, "platform", platform)
    assert text in setup.module.describe(None, "2.13.0")


def test_pins_satisfy_pyproject():
    """Each requirement of the core and of the extras for tests and lint is pinned to a version in its range."""
    packaging = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = project["dependencies"] + [each for name in ("test", "lint", "book", "mutants") for each in extras[name]]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for each in map(packaging.Requirement, required):
        [version] = {pins[name] for name in pins if name.replace("_", "-") == each.name.replace("_", "-")}
        assert each.specifier.contains(version), f"{each} and the pin {version}"
    assert project["requires-python"] == ">=3.11"


# python -m stages


def test_an_unknown_stage_is_an_error_in_one_line():
    done = subprocess.run([sys.executable, "-m", "stages", "99"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(r"stage must be one of 1 \(s1_contiguous_cache\).*, got 99\n", done.stderr)


def test_find_stages_sorts_by_number(tmp_path):
    for name in ("s10_ten", "s2_two", "s1_one", "sx_no", "scoreboard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").touch()
    (tmp_path / "s3_not_yet").mkdir()
    assert launcher.find_stages(tmp_path) == {1: "s1_one", 2: "s2_two", 10: "s10_ten"}


def test_pick_accepts_a_number_or_a_name():
    present = {1: "s1_one", 2: "s2_two"}
    for name in ("1", "s1", "s1_one"):
        assert launcher.pick([name, "A fox"], present) == ("s1_one", ["A fox"])
    assert launcher.pick(["--", "1"], present) == ("s2_two", ["--", "1"])
    assert doctest.testmod(launcher).failed == 0


def test_missing_library_is_reported_in_one_line(monkeypatch, capsys):
    def missing(module: str) -> None:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(launcher, "import_module", missing)
    assert launcher.main(["more_kernel"]) == 2
    printed = capsys.readouterr().err
    assert "numba is not installed" in printed and "`pip install numba`" in printed and printed.count("\n") == 1


@pytest.mark.parametrize("command", [["stages.s1_contiguous_cache"], ["stages", "1"]], ids=" ".join)
def test_ctrl_c_during_the_import_of_torch_prints_one_line(tmp_path, command):
    """A fake torch interrupts itself and swallows the exception, as the real one does while it imports numpy."""
    (tmp_path / "torch.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
