"""Formats of checkpoints: errors about other formats and about unsupported models."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .. import LLM, SamplingParams
from ..checkpoints.hub import check_format
from .testing.checkpoints import CONFIG, random_tensors, write_checkpoint
from .testing.engines import OPTIONS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def error_of(path: Path) -> str:
    """Return the error of LLM, which is a single line and the same as check_format()'s."""
    with pytest.raises(ValueError) as raised:
        LLM(path, **OPTIONS)
    with pytest.raises(ValueError, match=re.escape(str(raised.value))):
        check_format(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ([], " is not a checkpoint folder: it is empty"),
        (["README.md"], " is not a checkpoint folder: it has no model.safetensors and no model.safetensors.index.json"),
        (
            ["a-Q4_K_M.gguf"],
            " has a-Q4_K_M.gguf, llama.cpp's GGUF format: name the file, as in FOLDER/FILE.gguf or ORG/NAME:FILE.gguf",
        ),
        (["consolidated.00.pth", "params.json"], " has consolidated.00.pth, the publisher's own format: download"),
        (["consolidated.safetensors"], " has consolidated.safetensors, the publisher's own format: download"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            " has adapter_config.json, an adapter and not a full model",
        ),
        (["adapter_config.json", "adapter_model.bin"], " has adapter_config.json, an adapter and not a full model"),
        (["tf_model.h5"], " has tf_model.h5, TensorFlow's format: download the safetensors"),
        (["flax_model.msgpack"], " has flax_model.msgpack, Flax's format"),
        (["model.onnx"], " has model.onnx, the ONNX format: download"),
        (["model.pt"], " has model.pt, a pickle: download"),
        (
            ["model-00001-of-00002.safetensors"],
            "safetensors, but no model.safetensors.index.json that lists it, and no",
        ),
        (
            ["pytorch_model.bin"],
            " has its weights in pytorch_model.bin, a pickle, and no safetensors: convert it with: py",
        ),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], " has its weights in pytorch_model.bin"),
    ],
)
@pytest.mark.parametrize("has_config", [False, True])
def test_error_names_the_format_of_another_folder(tmp_path, files, error, has_config):
    for name in files:
        (tmp_path / name).write_bytes(b"any")
    if has_config and files:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    message = error_of(tmp_path)
    assert message.startswith(str(tmp_path)) and error in message


def test_error_asks_for_the_folder_of_a_file(tmp_path):
    folder = write_checkpoint(tmp_path)
    weights = folder / "model.safetensors"
    assert error_of(weights) == f"{weights} is a single file of a checkpoint: pass the folder that contains it"
    assert error_of(folder / "config.json") == f"{folder}/config.json is a file, not a checkpoint folder"
    (folder / "model.onnx").touch()
    error = f"{folder}/model.onnx is a file, not a checkpoint folder: it is the ONNX format"
    assert error_of(folder / "model.onnx").startswith(error)


def test_safetensors_win_over_other_formats(tmp_path):
    folder = write_checkpoint(tmp_path)
    for name in ("pytorch_model.bin", "adapter_config.json", "a.gguf", "consolidated.00.pth"):
        (folder / name).write_bytes(b"any")
    assert LLM(folder, **OPTIONS).generate([[1, 300]], GREEDY)[0].error is None


# The command that converts pickles


def as_pickles(folder: Path, num_shards: int, is_tied: bool) -> None:
    """Save the weights as pytorch_model.bin, transposed in memory and with a tied head that shares its storage."""
    tensors = {name: tensor.t().contiguous().t() for name, tensor in load_file(folder / "model.safetensors").items()}
    if is_tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    (folder / "model.safetensors").unlink()
    for i in range(num_shards):
        shard = dict([*tensors.items()][i::num_shards])
        name = "pytorch_model.bin" if num_shards == 1 else f"pytorch_model-{i + 1:05}-of-{num_shards:05}.bin"
        torch.save(shard, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text("{}")


def run_in_a_shell(command: str) -> None:
    subprocess.run(command.replace("python", shlex.quote(sys.executable), 1), shell=True, check=True, timeout=60)


def run_here(command: str) -> None:
    """Run the command in this process, split like in a shell."""
    python, dash_c, code, *arguments = shlex.split(command)
    assert (python, dash_c) == ("python", "-c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", *arguments])
        exec(code, {})


@pytest.mark.parametrize("run", [run_here, pytest.param(run_in_a_shell, marks=pytest.mark.full)])
@pytest.mark.parametrize(("num_shards", "is_tied"), [(3, True), (1, False)])
def test_suggested_command_converts_pickles(tmp_path, num_shards, is_tied, run):
    folder = tmp_path / "it's a [folder] of $HOME"
    folder.mkdir()
    write_checkpoint(folder, tie_word_embeddings=is_tied)
    expected = LLM(folder, **OPTIONS).generate([[1, 300]], GREEDY)[0].outputs[0].token_ids
    as_pickles(folder, num_shards, is_tied)
    command = error_of(folder).split("convert it with: ")[1]
    run(command)
    assert LLM(folder, **OPTIONS).generate([[1, 300]], GREEDY)[0].outputs[0].token_ids == expected


# Unsupported models

UNSUPPORTED = [
    (
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
        "unsupported model ['Gemma2ForCausalLM'] (model_ty",
    ),
    (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config (quant_method 'awq') is not supported",
    ),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type must be default, linear or llama3, got 'yarn'"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
    ({"num_local_experts": 8}, "num_local_experts must be 0, got 8"),
    ({"sliding_window": 8}, "sliding_window 8 is not implemented; it needs a max_model_len of at most 8, got 64"),
]


@pytest.mark.parametrize(("entries", "error"), UNSUPPORTED)
@pytest.mark.parametrize("weights", ["invalid", "folder", "missing", "pickle", "shards"])
def test_unsupported_model_is_rejected_before_its_weights_are_read(tmp_path, entries, error, weights):
    folder = write_checkpoint(tmp_path, **entries)
    path = folder / "model.safetensors"
    path.unlink()
    if weights == "invalid":
        path.write_bytes(b"\xff" * 100)
    elif weights == "folder":
        path.mkdir()
    elif weights == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"\xff" * 100)
    elif weights == "shards":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": 5}')
    if "sliding_window" in entries and weights in ("missing", "pickle"):
        return  # with a shorter max_model_len this config.json is fine, so the error is about the weights
    with pytest.raises(ValueError) as raised:
        LLM(folder, **OPTIONS)
    assert str(raised.value).startswith(f"{folder / 'config.json'}: ") and error in str(raised.value)


# Memory

PEAK = """
import sys, threading, time
import torch
from {package}.checkpoints.model_config import read_model_config
from {package}.checkpoints.weights import load_model

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous())

config, done, before = read_model_config(sys.argv[1]), threading.Event(), anonymous()
peak = [before]
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], config, getattr(torch, sys.argv[2]), torch.device("cpu"), 64)
done.set()
watcher.join()
print(max(peak[0], anonymous()) - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports anonymous memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_memory_for_the_weights_and_one_more_tensor(tmp_path, dtype):
    """Pages of a mapped file do not count: they belong to the page cache, which can drop them."""
    config = CONFIG | {"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 8192, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    package = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", PEAK.format(package=package.name), str(tmp_path), dtype]
    environment = {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    largest = max(tensor.numel() for tensor in tensors.values()) * (4 if dtype == "float32" else 2)
    assert weights > 60 * 2**20 and peak < weights + largest + 6 * 2**20  # for the modules and for torch itself
