"""Write a Llama checkpoint as a GGUF file for llama.cpp: python to_gguf.py FOLDER FILE.gguf float32

It needs numpy and gguf, and nothing of nanovllm. The file has weights and no tokenizer: prompts are token ids.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {  # there -> in a GGUF file
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[3] not in ("float32", "bfloat16"):
        sys.exit("usage: python to_gguf.py FOLDER FILE.gguf float32|bfloat16")
    try:
        write(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


def write(folder: Path, file: str, dtype: str) -> None:
    """Raises ValueError for a checkpoint that has more than this writes."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    types = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
    files = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config)
    writer.add_file_type(files[dtype])
    for name, tensor in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            tensor = interleaved(tensor, len(tensor) // head_dim(config))
        if tensor.ndim == 1 or dtype == "float32":  # norms stay in float32 in any file
            writer.add_tensor(gguf_name(name), tensor)
        else:
            writer.add_tensor(gguf_name(name), bfloat16_bytes(tensor), raw_dtype=types[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] not in ("llama", "mistral"):
        raise ValueError(f"model_type {config['model_type']!r}: this writes llama and mistral")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope scaling is not written: {rope}")
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def gguf_name(name: str) -> str:
    """
    >>> gguf_name("model.layers.3.mlp.up_proj.weight"), gguf_name("lm_head.weight")
    ('blk.3.ffn_up.weight', 'output.weight')
    """
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    layer = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    short = NAMES.get(".".join(parts[2:] if layer else parts))
    if short is None or not name.endswith(".weight"):
        raise ValueError(f"tensor {name} is not one of a Llama without biases")
    return f"{layer}{short}.weight"


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All weights, in float32. A safetensors file: the length of its header, the header in JSON, then the bytes."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            yield name, as_float32(data[8 + length :][start:end], entry["dtype"]).reshape(entry["shape"])


def as_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    types = {"F32": np.float32, "F16": np.float16}
    if dtype not in types:
        raise ValueError(f"weights of type {dtype} are not read: F32, F16 and BF16 are")
    return data.view(types[dtype]).astype(np.float32)


def bfloat16_bytes(tensor: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, to the even one of two. float32 [rows, columns] -> uint8 [rows, 2 * columns]"""
    bits = np.ascontiguousarray(tensor).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).view(np.uint8)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in another order: llama.cpp rotates neighbours, a checkpoint the two halves of a head.

    weight [heads * head_dim, hidden_size], likewise out

    >>> interleaved(np.arange(8).reshape(8, 1), heads=2).ravel().tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])  # [heads, 2, head_dim / 2, hidden_size]
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


if __name__ == "__main__":
    main()
