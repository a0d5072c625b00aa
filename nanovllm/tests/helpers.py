"""A tiny random Llama as a checkpoint folder, and the command in a process of its own."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceTrainer
from torch import Tensor

from ..backends.torch.model_runner import ModelRunner
from ..engine.llm_engine import LLMEngine

SENTENCES = [
    "Once upon a time there was a little rabbit.",
    "The little rabbit and the old fox sat in the wood.",
    "And that is the end of the story, said the fox.",
]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
REPOSITORY = Path(__file__).resolve().parents[2]

OPTIONS = {"offload_policy": "load"}  # so that nothing is measured at the start
UNMEASURED = ("--offload-policy", "load")


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write a random Llama with 64 positions, 320 tokens and a tokenizer. `changes` apply to its config.json."""
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(train_tokenizer())
    save_file(random_tensors(config), folder / "model.safetensors")
    return folder


def train_tokenizer() -> bytes:
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 10),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def random_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        linears = {
            "q_proj": (hidden, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, hidden),
        }
        shapes |= {f"model.layers.{i}.self_attn.{name}": shape for name, shape in linears.items()}
        linears = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= {f"model.layers.{i}.mlp.{name}": shape for name, shape in linears.items()}
        shapes |= {f"model.layers.{i}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    return {f"{name}.weight": random_tensor(name, shape, generator) for name, shape in shapes.items()}


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    return noise if "embed" in name else noise * 1.5 * shape[-1] ** -0.5


def model_runner(engine: LLMEngine) -> ModelRunner:
    """Return the ModelRunner of an engine without a custom executor."""
    assert isinstance(engine.executor, ModelRunner)
    return engine.executor


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def let_others_run() -> None:
    """Pause, so that a fault in other threads has time to show. A correct program passes without it, too."""
    time.sleep(0.02)


def num_calls(function: Callable[[], Any]) -> int:
    """Return how many calls of Python functions and builtins a call of `function` takes."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def num_lines(function: Callable[[], Any]) -> int:
    """Return how many lines of Python a call of `function` runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def processor_seconds(*commands: list[str], rounds: int = 5) -> list[float]:
    """Return the least processor time of each command. They run in turns, since other programs may be running."""

    def seconds(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return [min(times) for times in zip(*([seconds(c) for c in commands] for _ in range(rounds)), strict=True)]


def start(
    *arguments: str, path: Path | str = "", closed: str = "", env: dict[str, str] | None = None, **pipes: Any
) -> subprocess.Popen[str]:
    """Start `python -m nanovllm` in a process of its own.

    Modules in the folder `path` take precedence over installed ones. The stream named by `closed` is closed.
    """
    package = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", package.name, *arguments]
    if closed:
        redirection = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}[closed]
        command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    paths = os.pathsep.join(map(str, filter(None, (path, package.parent))))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | (env or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.Popen(command, env=environment, text=True, **pipes)


PRESS_AGAIN = """
import io, os, signal, sys
class Stderr(io.TextIOWrapper):
    def write(self, text):
        super().write(text)
        self.flush()
        if "interrupted" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return len(text)
sys.stderr = Stderr(sys.stderr.buffer)
"""


def press_ctrl_c_again(path: Path) -> Path:
    """Make processes with this path press Ctrl-C once more as soon as they have printed that they are interrupted."""
    (path / "sitecustomize.py").write_text(PRESS_AGAIN)
    return path


def documented_whys() -> set[tuple[str, str]]:
    """Return a (kind of event, why) pair for each reason that EVENTS.md lists."""
    text = (Path(__file__).parents[1] / "trace" / "EVENTS.md").read_text(encoding="utf-8")
    held_up = re.findall(r"^\| ([a-z]+) \|", text.partition("In held_up,")[2].partition("## ")[0], re.MULTILINE)
    listed = re.findall(r"^\| (\w+) \|.*why: (.*?)\. ", text, re.MULTILINE)
    return {("held_up", why) for why in held_up[1:]} | {
        (kind, why) for kind, whys in listed for why in re.findall(r'"([a-z ]+)"', whys)
    }
