"""Write a Llama checkpoint as a GGUF file for llama.cpp: python to_gguf.py FOLDER FILE.gguf float32.

It needs torch, safetensors and gguf, but not nanovllm. The file has no tokenizer: prompts are token ids.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


def main() -> None:
    """Run the command."""
    if len(sys.argv) != 4 or sys.argv[3] not in ("float32", "bfloat16"):
        sys.exit("usage: python to_gguf.py FOLDER FILE.gguf float32|bfloat16")
    try:
        write(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


def write(folder: Path, file: str, dtype: str) -> None:
    """Write the file. Raise ValueError for anything other than a Llama without biases."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config)
    is_half = dtype == "bfloat16"
    kind = gguf.GGMLQuantizationType.BF16 if is_half else gguf.GGMLQuantizationType.F32
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if is_half else gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if (known := names.get_name(name, try_suffixes=(".weight",))) is None:
            raise ValueError(f"a GGUF file of a Llama has no place for the tensor {name}")
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            tensor = interleaved(tensor, len(tensor) // head_dim(config))
        if tensor.ndim == 1:  # norms are float32 in every file
            writer.add_tensor(known, tensor.numpy())
        else:
            writer.add_tensor(known, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: dict[str, Any]) -> None:
    """Write the shape of the model. Raise ValueError if it is unsupported."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] not in ("llama", "mistral"):
        raise ValueError(f"model_type must be llama or mistral, got {config['model_type']!r}")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope scaling is unsupported, got {rope}")
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
    """Return the size of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each weight, and the weight in float32."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no dict
                yield name, weights.get_tensor(name).float()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: llama.cpp rotates neighbors, while a checkpoint rotates the two halves of a head.

    weight [heads * head_dim, hidden_size], as the result

    >>> import torch
    >>> interleaved(torch.arange(8).reshape(8, 1), heads=2).ravel().tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])  # [heads, 2, head_dim / 2, hidden_size]
    return halves.transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
