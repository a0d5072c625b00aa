"""Behavior that all commands share: help, options, the checkpoint, the device, and one line for each error."""

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ... import LLM, EngineConfig, SamplingParams, __version__
from ...__main__ import main
from ...cli.batch import batch
from ...cli.commands import COMMANDS, nanovllm
from ...cli.generate import MAX_MODEL_LEN, POOL_TOKENS, generate
from ...cli.stages import STAGES
from ...log import tell
from ...options.config import DEFAULTS_ON_CUDA
from ...server.options import ServerOptions
from ..testing.checkpoints import write_checkpoint
from ..testing.processes import REPOSITORY, Terminal, press_ctrl_c_again, processor_seconds, start

PACKAGE = Path(__file__).resolve().parents[2]
WITHOUT_ENGINE = [["--help"], ["--version"], [], ["stages"], *([name, "--help"] for name in COMMANDS)]


# Help


def test_help_does_not_import_torch(tmp_path):
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    code = (
        f"from {PACKAGE.name}.__main__ import main\n"
        f"assert [main(arguments) for arguments in {WITHOUT_ENGINE}] == {[0] * len(WITHOUT_ENGINE)}"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"nanovllm {__version__}\n" in done.stdout
    assert re.search("(torch|numpy) was imported", start("generate", path=tmp_path).communicate(timeout=60)[1])


@pytest.mark.nightly
def test_help_is_nearly_as_fast_as_click():
    """Compare processor time, the best of 5 in turns: other programs may be running."""
    codes = ["import click"]
    codes += [f"from {PACKAGE.name}.__main__ import main\nmain({arguments})" for arguments in WITHOUT_ENGINE]
    click, *helps = processor_seconds(*([sys.executable, "-c", code] for code in codes))
    assert max(helps) < 4 * click, (click, helps)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"nanovllm \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_is_the_default(arguments, capsys):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "generate" in out and "batch" in out and err == ""


def test_list_of_commands_repeats_the_first_line_of_their_help():
    context = nanovllm.make_context("nanovllm", ["--help"], resilient_parsing=True)
    own = {name: nanovllm.get_command(context, name).help.splitlines()[0] for name in COMMANDS}
    assert own == {name: line for name, (_, line) in COMMANDS.items()}


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_help_lists_options_with_their_defaults(command, capsys):
    assert main([command, "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "--top-p" in words and "--stop" in words and "--no-enable-prefix-caching" in words
    assert re.search(r"--block-size INTEGER [^\[]*\[default: 16\]", words) and "[auto|load|recompute]" in words


def test_help_of_generate_states_its_own_defaults(capsys):
    assert main(["generate", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    own = f"the model's own limit, which is lowered to {MAX_MODEL_LEN} unless the size of the KV cache is set"
    assert f"default: {own} --" in words
    assert f"default: {POOL_TOKENS}, or twice --max-model-len if that is more --" in words


@pytest.mark.parametrize(
    ("given", "max_model_len", "num_slots"),
    [
        ([], MAX_MODEL_LEN, POOL_TOKENS),
        (["--max-model-len", "1500"], 1500, 3000 // 16 * 16),
        (["--max-model-len", "8"], 8, POOL_TOKENS),
        (["--kv-cache-tokens", "512"], 3000, 512),
    ],
)
def test_generate_has_the_defaults_that_its_help_states(given, max_model_len, num_slots, tmp_path, run, monkeypatch):
    engines = []
    make = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda llm, **options: engines.append(llm) or make(llm, **options))
    model = write_checkpoint(tmp_path, max_position_embeddings=3000)
    assert run("generate", "the", "--max-tokens", "1", *given, model=str(model))[0] == 0
    kv_cache = engines[0].llm_engine.kv_cache
    assert (engines[0].max_model_len, kv_cache.num_blocks * kv_cache.block_size) == (max_model_len, num_slots)


def test_help_of_a_benchmark_states_its_own_defaults(capsys):
    assert main(["bench", "offload", "--help"]) == 0
    assert "(auto) choose the faster way [default: load]" in " ".join(capsys.readouterr().out.split())


def test_serve_has_an_option_for_each_field_of_its_options(capsys):
    assert main(["serve", "--help"]) == 0
    printed = capsys.readouterr().out
    names = [field.name for kind in (EngineConfig, ServerOptions) for field in fields(kind) if "help" in field.metadata]
    assert len(names) > 30 and [name for name in names if f"--{name.replace('_', '-')}" not in printed] == []


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--trust-remote-code", "--tensor-parallel-size", "1", "--swap-space", "4"], "does not exist"),
        (["--load-format", "sharded"], "load_format must be"),
        (["-tp", "1", "-pp=1", "--enable-auto-tool-choice", "--max_model_len", "32", "-O3"], "does not exist"),
        (["--generation-config", "vllm", "--disable-fastapi-docs", "--max-log-len", "10"], "does not exist"),
        (["--override-generation-config", '{"top_k": 1}', "--allowed-methods", '["*"]'], "does not exist"),
        (["--override-generation-config", "top_k=1"], "'top_k=1' is not a JSON object."),
        (["--response-role", "poet"], "response_role must be 'assistant', got 'poet'"),
        (["--return-tokens-as-token-ids"], "return_tokens_as_token_ids must be False, got True"),
        (["--tensor-paralel-size", "1"], "Did you mean"),
        (["--numa-bind"], "No such option"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_serve_takes_the_flags_of_vllm(flags, error, checkpoint, capsys):
    model = "/no/such/folder" if "exist" in error else str(checkpoint)
    assert main(["serve", model, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and error in err
    assert main(["serve", "--help"]) == 0 and f"{flags[0]} " not in capsys.readouterr().out


@pytest.mark.full
def test_number_of_ranks_has_a_short_flag(checkpoint, capsys):
    assert main(["serve", str(checkpoint), "-tp", "3"]) == 2
    assert "tensor_parallel_size must divide num_attention_heads, 4, got 3" in capsys.readouterr().err


@pytest.mark.parametrize("command", [generate, batch])
def test_options_are_the_fields_with_a_help_text(command):
    """SamplingParams.seed is missing: all requests would draw the same tokens. generate prints no logprobs."""
    of_batch = {"file", "output", "overwrite", "resume", "chat_template", "on_ray", "data_parallel_size"}
    own = {"revision", "stats", "trace"} | (of_batch if command is batch else {"prompts", "files"})
    others = {"stop", "stop_token_ids", "ignore_eos"} | ({"logprobs", "prompt_logprobs"} if command is batch else set())
    names = {f.name for kind in (EngineConfig, SamplingParams) for f in fields(kind) if "help" in f.metadata}
    assert {option.name for option in command.params} - own == names | others


@pytest.mark.parametrize("command", [generate, batch])
def test_default_options_match_the_dataclasses(command):
    ours = {"temperature", "top_p", "max_tokens", "seed"} if command is generate else set()
    ours |= {"stop", "stop_token_ids"}  # an empty tuple in place of None
    ours |= {"device", *DEFAULTS_ON_CUDA}  # None: LLM uses the GPU if there is one, and then larger steps
    defaults = {field.name: field.default for kind in (SamplingParams, EngineConfig) for field in fields(kind)}
    values = command.make_context(command.name, ["requests.jsonl"]).params
    names = {*values} & {*defaults} - ours
    assert {name: values[name] for name in names} == {name: defaults[name] for name in names}


# Errors


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["brew"], "No such command 'brew'."),
        (["generate", "--temprature", "1"], "No such option"),
        (["generate", "--max-num-seqs", "many"], "for '--max-num-seqs': 'many' is not a valid integer."),
        (["generate", "--dtype", "int8"], "Invalid value for '--dtype': 'int8' is not one of 'auto',"),
        (["batch"], "Missing argument 'FILE'."),
    ],
)
def test_misuse_is_a_one_line_error_with_status_2(arguments, error, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and error in err and err.count("\n") == 1


@pytest.mark.parametrize("file", ["", "a\0b"])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["batch"], "FILE"),
        (["batch", "a.jsonl", "--output"], "--output"),
        (["batch", "a.jsonl", "--chat-template"], "--chat-template"),
        (["batch", "a.jsonl", "--trace"], "--trace"),
        (["generate", "--file"], "--file"),
        (["generate", "--trace"], "--trace"),
        (["chat", "--chat-template"], "--chat-template"),
        (["serve", "--chat-template"], "--chat-template"),
        (["trace"], "FILE"),
        (["trace", "a.trace", "--chrome"], "--chrome"),
        (["bench", "latency", "--json"], "--json"),
        (["bench", "throughput", "--prompts"], "--prompts"),
        (["bench", "throughput", "--dataset-path"], "--dataset-path"),
        (["bench", "serve", "--dataset-path"], "--dataset-path"),
    ],
)
def test_impossible_file_name_is_a_one_line_error(arguments, name, file, capsys):
    """A shell passes an empty name for a variable that is not set."""
    assert main([*arguments, file]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: Invalid value for '{name}': {file!r} is not the name of a file.\n")


@pytest.mark.parametrize("name", ["kv_cache_memory_bytes", "kv_cache_tokens"])
def test_huge_number_is_a_one_line_error(checkpoint, name, capsys):
    assert main(["generate", "--model", str(checkpoint), "--" + name.replace("_", "-"), "9" * 23]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and f"{name} must be at least 1 and" in err


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "--kv-cache-tokens", "64"], ["batch", "a.jsonl"]])
def test_missing_default_checkpoint_is_named(arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"prompt": "a"}')
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(tmp_path / "models" / "storyteller") in err and "--model" in err


def test_missing_extra_of_the_server_is_a_one_line_error(checkpoint, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("nanovllm.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--model", str(checkpoint)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: uvicorn is not installed: pip install ") and err.count("\n") == 1


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    process = start("generate", path=tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "interrupted\n") and process.returncode == 130


def test_ctrl_c_again_prints_no_second_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    process = start("generate", path=press_ctrl_c_again(tmp_path))
    assert process.communicate(timeout=60) == ("", "interrupted\n") and process.returncode == 130


def test_ctrl_c_before_the_commands_are_imported_prints_no_traceback(tmp_path):
    """Even modules of the standard library take a moment on a busy machine."""
    (tmp_path / "logging.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    process = start("generate", path=tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


def test_sigterm_while_torch_is_imported_ends_a_server_with_status_0(tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    process = start("serve", path=tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


# The model and the device


@pytest.mark.parametrize("command", ["generate", "batch", "chat", "bench latency"])
def test_hub_model_is_fetched_at_the_given_revision(run, monkeypatch, tmp_path, command):
    def find(model, revision, overrides):
        calls.append((model, revision))
        raise ValueError("the hub cannot be reached")

    calls: list[tuple[str, str | None]] = []
    monkeypatch.setattr("nanovllm.checkpoints.hub.find_checkpoint", find)
    (tmp_path / "a.jsonl").write_text('{"prompt": "the"}')
    file = [str(tmp_path / "a.jsonl")] if command == "batch" else []
    for revision in ("v1", None):
        options = ["--revision", revision] if revision else []
        result = run(command, *file, *options, model="org/name")
        assert result == (2, "", "error: the hub cannot be reached\n")
    assert calls == [("org/name", "v1"), ("org/name", None)]


def test_engine_chooses_the_device_unless_it_is_given(run, monkeypatch):
    calls = []
    make = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda llm, *args, **options: calls.append(options) or make(llm, **options))
    assert run("generate", "the", "--max-tokens", "1")[0] == 0
    assert run("generate", "the", "--max-tokens", "1", "--device", "cpu")[0] == 0
    assert [options["device"] for options in calls] == [None, "cpu"]


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_missing_device_is_a_one_line_error(run, tmp_path, device):
    (tmp_path / "a.jsonl").write_text('{"prompt": "the"}')
    status, out, err = run("batch", str(tmp_path / "a.jsonl"), "--device", device)
    assert (status, out) == (2, "") and err.startswith(f"error: device {device!r} ")
    assert err.count("\n") == 1


def test_nan_weights_are_a_one_line_error_at_the_start(run, tmp_path):
    model = write_checkpoint(tmp_path)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * math.nan}, model / "model.safetensors")
    status, out, err = run("generate", "the", "--offload-policy", "auto", model=model)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: the model's weights are damaged, or too large for dtype float32: the logits ")


# Other output


def test_tell_starts_a_new_line_after_a_key_in_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    tell("interrupted", is_after_ctrl_c=True)
    tell("a\nb")
    assert terminal.getvalue() == "\ninterrupted\na b\n"


def test_list_of_stages_fits_on_a_screen(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert main(["stages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 100 for line in lines)
    assert len(STAGES) == 7 and [line[2] for line in lines if re.match(r"  \d  ", line)] == [*"1234567"]


@pytest.mark.skipif(not (REPOSITORY / "stages").is_dir(), reason="the stages are in the repository, not in the package")
def test_names_of_the_stages_are_their_folders():
    assert [*STAGES] == sorted(path.name for path in (REPOSITORY / "stages").glob("s[0-9]_*"))
