"""What a user of the package finds: its names, its command, and one line for whatever goes wrong in it."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from .. import EngineConfig, SamplingParams, __version__
from ..__main__ import main
from ..cli.batch import batch
from ..cli.commands import COMMANDS, nanovllm
from ..cli.generate import generate
from ..engine.checks import knobs
from .helpers import start

TOO_LONG = "9" * 23
PACKAGE = Path(__file__).resolve().parents[1]


def test_the_public_names_are_there():
    package = import_module("..", __package__)
    assert {"LLM", "SamplingParams", "LLMEngine", "EngineConfig", "RequestOutput"} <= {*package.__all__}
    assert all(getattr(package, name) for name in package.__all__) and {*package.__all__} <= {*dir(package)}
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        package.LMM  # noqa: B018


@pytest.mark.full
def test_the_engine_works_from_any_folder(checkpoint, tmp_path):
    code = (
        f"from {PACKAGE.name} import LLM, SamplingParams\n"
        f"(output,) = LLM({str(checkpoint)!r}).generate('the fox', SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "import sys\n"
        "print(len(output.outputs[0].token_ids), 'huggingface_hub' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("3 False\n", ""), "a folder needs no hub"


# The command


NEEDS_NO_ENGINE = [["--help"], ["--version"], [], ["stages"], *([name, "--help"] for name in COMMANDS)]


def test_what_needs_no_engine_waits_for_none(tmp_path):
    """In place of torch and numpy there are modules that cannot be imported."""
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    code = (
        f"from {PACKAGE.name}.__main__ import main\n"
        f"assert [main(arguments) for arguments in {NEEDS_NO_ENGINE}] == {[0] * len(NEEDS_NO_ENGINE)}"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(PACKAGE.parent)))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"nanovllm {__version__}\n" in done.stdout
    assert re.search("(torch|numpy) was imported", start("generate", path=tmp_path).communicate(timeout=60)[1])


@pytest.mark.full
@pytest.mark.parametrize("arguments", NEEDS_NO_ENGINE, ids=" ".join)
def test_what_needs_no_engine_is_there_at_once(arguments):
    """It takes 0.05 s; importing torch 1.2 s. The best of three: other programs may run."""

    def seconds() -> float:
        before = os.times()
        assert start(*arguments).wait() == 0
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.3


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"nanovllm \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_the_list_of_commands_says_of_each_what_its_own_help_says():
    context = nanovllm.make_context("nanovllm", ["--help"], resilient_parsing=True)
    own = {name: nanovllm.get_command(context, name).help.splitlines()[0] for name in COMMANDS}
    assert own == {name: says for name, (_, says) in COMMANDS.items()}


def test_ctrl_c_while_torch_is_imported_ends_it_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    process = start("generate", path=tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "interrupted\n") and process.returncode == 130


def test_sigterm_while_torch_is_imported_is_no_failure_of_a_server(tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    process = start("serve", path=tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 0


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_there_is_help(arguments, capsys):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "generate" in out and "batch" in out and err == ""


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_help_has_the_options_with_their_defaults(command, capsys):
    assert main([command, "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "--top-p" in words and "--stop" in words and "--no-enable-prefix-caching" in words
    assert re.search(r"--block-size INTEGER [^\[]*\[default: 16\]", words) and "[auto|load|recompute]" in words


@pytest.mark.parametrize("command", [generate, batch])
def test_every_knob_is_an_option(command):
    """But not SamplingParams.seed: every request would draw the same. And generate shows no logprobs."""
    own = {"file", "output", "overwrite", "resume", "chat_template"} if command is batch else {"prompts", "files"}
    own |= {"revision", "stats", "trace"}
    asked = {"stop", "stop_token_ids", "ignore_eos"} | ({"logprobs", "prompt_logprobs"} if command is batch else set())
    names = {field.name for kind in (EngineConfig, SamplingParams) for field in knobs(kind)}
    assert {option.name for option in command.params} - own == names | asked


@pytest.mark.parametrize("command", [generate, batch])
def test_an_option_left_out_is_as_in_python(command):
    ours = {"temperature", "top_p", "max_tokens"} if command is generate else set()
    ours |= {"stop", "stop_token_ids"}  # several times, or not at all
    ours |= {"device"}  # as LLM: the GPU where there is one
    defaults = {field.name: field.default for kind in (SamplingParams, EngineConfig) for field in fields(kind)}
    values = command.make_context(command.name, ["requests.jsonl"]).params
    names = {*values} & {*defaults} - ours
    assert {name: values[name] for name in names} == {name: defaults[name] for name in names}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["brew"], "No such command 'brew'."),
        (["generate", "--temprature", "1"], "No such option"),
        (["generate", "--max-tokens", "many"], "Invalid value for '--max-tokens': 'many' is not a valid integer."),
        (["generate", "--dtype", "int8"], "Invalid value for '--dtype': 'int8' is not one of 'auto',"),
        (["batch"], "Missing argument 'FILE'."),
    ],
)
def test_a_mistake_in_the_command_is_one_line(arguments, error, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and error in err and err.count("\n") == 1


@pytest.mark.parametrize("knob", ["kv_cache_memory_bytes", "kv_cache_tokens"])
def test_a_pool_that_cannot_be_is_one_line(checkpoint, knob, capsys):
    flag = "--" + knob.replace("_", "-")
    assert main(["generate", "--model", str(checkpoint), flag, TOO_LONG]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and f"{knob} must be a whole number, at least 1 and below 2**63" in err


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "--kv-cache-tokens", "64"], ["batch", "a.jsonl"]])
def test_elsewhere_the_folder_that_was_looked_for_is_named(arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"prompt": "a"}')
    assert main(arguments) == 2
    folder = tmp_path / "models" / "storyteller"
    says = f"error: there is no folder {folder}: name a checkpoint, LLM(model=...) or --model\n"
    assert capsys.readouterr() == ("", says)
