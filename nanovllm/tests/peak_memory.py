"""The peak memory of an engine: `python -m nanovllm.tests.peak_memory` measures each dtype and backend for the docs.

Each engine runs in a process of its own, which first runs a tiny engine, so that libraries and kernels are loaded
before the measurement starts. Pages of mapped files count, too.
"""

import gc
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from .. import LLM, SamplingParams
from ..checkpoints.model_config import read_model_config
from ..checkpoints.weights import checkpoint_tensors
from ..llama import LlamaForCausalLM
from ..llama.weights import NoInit
from ..options.config import QUANTIZATIONS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BLOCK = re.compile(r"(?<=<!-- memory -->\n).*?(?=<!-- /memory -->)", re.DOTALL)
MODULE = __spec__.name if __spec__ else ""
MAX_RATIO = 1.25  # of the peak without the pool to the weights
NUM_PROMPTS = 8
BACKENDS, DTYPES = ("torch", "numba"), ("bfloat16", "float32")

TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SMALL = TINY | {  # 26M weights
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 7,
}
QWEN = TINY | {  # 494M weights, the dimensions of Qwen 2.5 0.5B
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}


class Peak(NamedTuple):
    """The memory of an engine, in bytes, and its tokens."""

    weights: int
    pool: int
    peak: int  # above the process before it loaded the weights
    token_ids: list[list[int]]

    @property
    def ratio(self) -> float:
        return (self.peak - self.pool) / self.weights


def write_random_checkpoint(folder: Path, entries: dict[str, Any]) -> Path:
    """Write a checkpoint with this config.json and random bfloat16 weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries))
    config = read_model_config(folder)
    with torch.device("meta"), NoInit():
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    parts = [part for name, tensor in parameters.items() for part in checkpoint_tensors(name, tensor.shape, config)]
    torch.manual_seed(0)
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in parts}
    for name, tensor in tensors.items():
        if not name.endswith("norm.weight"):
            tensor.normal_(std=0.05)
    save_file(tensors, folder / "model.safetensors")
    return folder


def measure(folder: Path, tiny: Path, dtype: str, backend: str, prompt_len: int) -> Peak:
    """Measure an engine in this process."""
    serve(tiny, dtype, backend, 4)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_of("VmHWM")
    llm, token_ids = serve(folder, dtype, backend, prompt_len)
    peak, engine = status_of("VmHWM") - before, llm.llm_engine
    weights = sum(parameter.nbytes for parameter in engine.executor.model.parameters())
    return Peak(weights, engine.kv_cache.blocks.nbytes, peak, token_ids)


def serve(folder: Path, dtype: str, backend: str, prompt_len: int) -> tuple[LLM, list[list[int]]]:
    """Return an engine that has computed prompts in one step, then decoded a few tokens, and its tokens."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "offload_policy": "recompute",
        "max_num_batched_tokens": 8192,
    }
    num_tokens = NUM_PROMPTS * (prompt_len + 32)  # the whole pool is used
    if dtype in QUANTIZATIONS:
        options["quantization"], dtype = dtype, "bfloat16"
    llm = LLM(folder, dtype=dtype, attention_backend=backend, kv_cache_tokens=num_tokens, **options)
    prompts = [[3 + (17 * i + j * j) % 300 for j in range(prompt_len)] for i in range(NUM_PROMPTS)]
    params = [SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True) for i in range(NUM_PROMPTS)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return llm, [list(output.outputs[0].token_ids) for output in outputs]


def status_of(name: str) -> int:
    """Return an entry of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def command(folder: Path, tiny: Path, dtype: str, backend: str, prompt_len: int) -> list[str]:
    """Return the command that prints a Peak as JSON."""
    return [sys.executable, "-m", MODULE, str(folder), str(tiny), dtype, backend, str(prompt_len)]


def table() -> str:
    """Measure all backends and dtypes, and return a table for the docs."""
    lines = [
        "| backend | dtype | weights | pool | peak | (peak - pool) / weights |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        write = f"import sys; from {MODULE} import *; write_random_checkpoint(Path(sys.argv[1]), QWEN)"
        subprocess.run([sys.executable, "-c", write, f"{name}/qwen"], check=True)  # it needs 1 GB itself
        tiny = write_random_checkpoint(Path(name, "tiny"), TINY)
        for backend in BACKENDS:
            for dtype in DTYPES:
                print(f"{backend}, {dtype}", file=sys.stderr)
                subprocess.check_output(command(tiny, tiny, dtype, backend, 4))  # compiles kernels, once per machine
                done = subprocess.check_output(command(Path(name, "qwen"), tiny, dtype, backend, 256))
                peak = Peak(*json.loads(done))
                sizes = " | ".join(f"{size / 1e9:.2f} GB" for size in peak[:3])
                lines.append(f"| {backend} | {dtype} | {sizes} | {peak.ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))))
    else:
        measured = table()
        PAGE.write_text(BLOCK.sub(lambda _: measured, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
