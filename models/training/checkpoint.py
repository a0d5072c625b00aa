"""Write a trained model as a checkpoint folder that transformers loads unchanged."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig
from stages.s1_contiguous_cache.llama.weights import parts_of


def write_checkpoint(model: LlamaForCausalLM, folder: Path) -> None:
    """Write model.safetensors (bf16), config.json, generation_config.json and tokenizer_config.json."""
    config = model.config
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():  # a tied head is listed once
        names = parts_of(name)
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        sizes = [q, kv, kv] if "qkv_proj" in name else [len(parameter) // len(names)] * len(names)
        parts = parameter.detach().to("cpu", torch.bfloat16).split(sizes)
        tensors |= {part_name: part.contiguous() for part_name, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config_json(config))
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
    write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    write_json(folder / "tokenizer_config.json", tokenizer_config_json(config))


def config_json(config: ModelConfig) -> dict[str, object]:
    """Return the contents of config.json."""
    assert config.rope_scaling is None, "rope_scaling is unsupported in training"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "torch_dtype": "bfloat16",
    }


def tokenizer_config_json(config: ModelConfig) -> dict[str, object]:
    """Return the contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
