"""Race the package against vLLM, llama.cpp and transformers: `make peers VLLM=PYTHON LLAMA=PYTHON`.

Three models have random weights of the storyteller's shape and of two published ones, because a step's time depends on
shapes alone. Each is written for transformers and vLLM, as a GGUF file in bfloat16, and as llama.cpp's own quantized
copies of that file. `nanovllm bench peers` races all engines, and notebooks/peers.json gets a report for each model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

from nanovllm.__main__ import main as nanovllm
from stages.bench.models import published, random_model, storyteller_of
from stages.s1_contiguous_cache.llama import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "notebooks/peers.json"
MAX_LEN = 4608
FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # llama.cpp's numbers
JOBS = "--rounds 2 --jobs mixed,1,2,4,16 --prompts 512,4000"
BUSY = f"{JOBS} --busy-jobs mixed,1"  # not with 1.1B, which would take longer than all else
MODELS = {"7M": ("storyteller", BUSY), "135M": ("smollm2-135m", BUSY), "1.1B": ("tinyllama-1.1b", JOBS)}
QUANTIZE = """
import sys, llama_cpp
source, target, number = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(number)
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


def write_gguf(folder: Path, file: Path) -> None:
    """Write a Llama checkpoint as llama.cpp's converter does, in bfloat16 and without a tokenizer."""
    from gguf import MODEL_ARCH, GGUFWriter, LlamaFileType, get_tensor_name_map, quantize
    from gguf import GGMLQuantizationType as Type

    config, writer = ModelConfig.from_folder(folder), GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # it is no mapping
            tensor = tensors.get_tensor(name).float()
            if count := heads.get(name.split(".")[-2]):  # llama.cpp rotates neighbors instead of halves
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            type = Type.BF16 if tensor.dim() == 2 else Type.F32
            data = quantize(np.ascontiguousarray(tensor.numpy()), type)
            writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_files(folder: Path, python: str, parent: Path) -> Iterator[tuple[str, Path]]:
    """Write the model as GGUF in each type, and yield the type's name and the file."""
    original = parent / "BF16.gguf"
    write_gguf(folder, original)
    yield "BF16", original
    for name, number in FILE_TYPES.items():
        file = parent / f"{name}.gguf"
        done = subprocess.run([python, "-c", QUANTIZE, str(original), str(file), str(number)], capture_output=True)
        if done.returncode:
            sys.exit(f"llama.cpp could not quantize {folder.name} to {name}: {done.stderr.decode()[-300:]}")
        yield name, file


def race(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Race all engines with a model, and return the report."""
    shape, jobs = MODELS[name]
    folder = storyteller_of(MAX_LEN) if shape == "storyteller" else random_model(published(shape, MAX_LEN))
    with tempfile.TemporaryDirectory() as parent:
        peers = [f"vllm={args.vllm}"] if args.vllm else []
        if args.llama:
            peers += [
                f"llama.cpp:{each}={args.llama},{file}" for each, file in llama_files(folder, args.llama, Path(parent))
            ]
        report = Path(parent, "report.json")
        command = ["bench", "peers", "--model", str(folder), "--dtype", "bfloat16", "--formats", "int8,int4"]
        command += ["--max-model-len", str(MAX_LEN), "--json", str(report), *(args.jobs or jobs.split())]
        if status := nanovllm(command + [part for peer in peers for part in ("--peer", peer)]):
            sys.exit(status)
        return json.loads(report.read_text()) | {"model": name}


def main(argv: Sequence[str] | None = None) -> None:
    """Race the models, and write the report after each one."""
    parser = argparse.ArgumentParser(prog="python -m stages.bench.race", description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="default: all")
    parser.add_argument("--out", type=Path, default=REPORT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("jobs", nargs="*", metavar="-- --jobs 1", help="other options for nanovllm bench peers")
    args = parser.parse_args(argv)
    reports = []
    for name in args.models:
        reports.append(race(name, args))
        args.out.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
