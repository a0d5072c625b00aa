"""A checkpoint as the files of llama.cpp: GGUF in bfloat16, and llama.cpp's own quantized copies of it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

from stages.s1_contiguous_cache.llama import ModelConfig

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15, "Q5_K_M": 17}  # llama.cpp's numbers
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


def quantize_gguf(original: Path, type: str, file: Path, python: str) -> None:
    """Write a copy of a GGUF file in one of FILE_TYPES, with the llama.cpp of another interpreter."""
    command = [python, "-c", QUANTIZE, str(original), str(file), str(FILE_TYPES[type])]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        sys.exit(f"llama.cpp could not quantize {original} to {type}: {done.stderr.decode()[-300:]}")
