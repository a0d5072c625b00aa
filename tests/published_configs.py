"""config.json as publishers wrote it, for models that people use, and the same entries with small numbers."""

import json
from pathlib import Path
from typing import Any

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "use_cache": True}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}


def sizes(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    eps: float = 1e-5,
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
        "initializer_range": 0.02,
    }


def llama3(factor: float) -> dict[str, Any]:
    """Return what Llama 3.1 and 3.2 have in common."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    return {
        **{"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1},
        **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "rope_theta": 500000.0},
        **{"rope_scaling": scaling, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0"},
    }


def qwen(window: int | None, first: int, theta: float, is_tied: bool) -> dict[str, Any]:
    """Return what Qwen 2.5, Qwen 3 and models derived from them have in common. Their window is switched off."""
    return {
        **{"bos_token_id": 151643, "eos_token_id": 151645, "rope_theta": theta, "tie_word_embeddings": is_tied},
        **{"sliding_window": window, "max_window_layers": first, "use_sliding_window": False},
        **{"torch_dtype": "bfloat16", "transformers_version": "4.43.1"},
    }


LLAMA_2 = {"bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rope_scaling": None, "torch_dtype": "float16"}
OLD_MISTRAL = {"bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
SMOL = {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "tie_word_embeddings": True}
SMOL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "attention_bias": False, "torch_dtype": "bfloat16"}
NO_MROPE = {"use_mrope": False}

RUN = {  # sizes: layers, hidden, intermediate, heads, KV heads, tokens, positions, eps
    "llama-2-7b": LLAMA | sizes(32, 4096, 11008, 32, 32, 32000, 4096) | LLAMA_2 | {"tie_word_embeddings": False},
    "llama-2-70b": LLAMA | sizes(80, 8192, 28672, 64, 8, 32000, 4096) | LLAMA_2,
    "llama-3-8b": LLAMA | sizes(32, 4096, 14336, 32, 8, 128256, 8192) | llama3(8.0) | {"rope_scaling": None},
    "llama-3.1-8b": LLAMA
    | sizes(32, 4096, 14336, 32, 8, 128256, 131072)
    | llama3(8.0)
    | {"tie_word_embeddings": False},
    "llama-3.1-405b": LLAMA | sizes(126, 16384, 53248, 128, 8, 128256, 131072) | llama3(8.0),
    "llama-3.2-1b": LLAMA
    | sizes(16, 2048, 8192, 32, 8, 128256, 131072)
    | llama3(32.0)
    | {"head_dim": 64, "tie_word_embeddings": True},
    "llama-3.2-3b": LLAMA
    | sizes(28, 3072, 8192, 24, 8, 128256, 131072)
    | llama3(32.0)
    | {"head_dim": 128, "tie_word_embeddings": True},
    "tinyllama-1.1b": LLAMA | sizes(22, 2048, 5632, 32, 4, 32000, 2048) | LLAMA_2 | {"rope_theta": 10000.0},
    "smollm2-135m": LLAMA | sizes(30, 576, 1536, 9, 3, 49152, 8192) | SMOL | {"rope_theta": 100000},
    "smollm2-1.7b": LLAMA | sizes(24, 2048, 8192, 32, 32, 49152, 8192) | SMOL | {"rope_theta": 130000},
    "deepseek-r1-distill-llama-8b": LLAMA
    | sizes(32, 4096, 14336, 32, 8, 128256, 131072)
    | llama3(8.0)
    | {"eos_token_id": 128001, "tie_word_embeddings": False},
    "mistral-7b-v0.1": MISTRAL | sizes(32, 4096, 14336, 32, 8, 32000, 32768) | OLD_MISTRAL | {"sliding_window": 4096},
    "mistral-7b-v0.3": MISTRAL
    | sizes(32, 4096, 14336, 32, 8, 32768, 32768)
    | OLD_MISTRAL
    | {"sliding_window": None, "rope_theta": 1000000.0},
    "mistral-nemo-12b": MISTRAL
    | sizes(40, 5120, 14336, 32, 8, 131072, 131072)
    | OLD_MISTRAL
    | {"sliding_window": None, "rope_theta": 1000000.0, "head_dim": 128},
    "qwen2.5-0.5b": QWEN2
    | sizes(24, 896, 4864, 14, 2, 151936, 32768, 1e-6)
    | qwen(32768, 21, 1000000.0, True)
    | NO_MROPE,
    "qwen2.5-7b": QWEN2 | sizes(28, 3584, 18944, 28, 4, 152064, 32768, 1e-6) | qwen(131072, 28, 1000000.0, False),
    "qwen2.5-72b": QWEN2 | sizes(80, 8192, 29568, 64, 8, 152064, 32768, 1e-5) | qwen(131072, 80, 1000000.0, False),
    "deepseek-r1-distill-qwen-1.5b": QWEN2
    | sizes(28, 1536, 8960, 12, 2, 151936, 131072, 1e-6)
    | qwen(4096, 21, 10000, False)
    | NO_MROPE,
    "qwen3-0.6b": QWEN3
    | sizes(28, 1024, 3072, 16, 8, 151936, 40960, 1e-6)
    | qwen(None, 28, 1000000, True)
    | {"head_dim": 128, "rope_scaling": None},
    "qwen3-32b": QWEN3
    | sizes(64, 5120, 25600, 64, 8, 151936, 40960, 1e-6)
    | qwen(None, 64, 1000000, False)
    | {"head_dim": 128, "rope_scaling": None},
}
UNSUPPORTED = {  # config.json, and a part of the error
    "qwen2.5-7b, long context": (
        RUN["qwen2.5-7b"]
        | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        "rope type must be default, linear or llama3, got 'yarn'",
    ),
    "llama with dynamic rope": (
        RUN["llama-2-7b"] | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type must be default, linear or llama3, got 'dynamic'",
    ),
    "phi-3-mini": (
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072},
        "unsupported model ['Phi3ForCausalLM'] (model_type phi3); supported: LlamaForCausalLM, MistralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    "mixtral-8x7b": (
        RUN["mistral-7b-v0.3"]
        | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        "unsupported model ['MixtralForCausalLM'] (model_type mixtral)",
    ),
    "qwen3-30b-a3b": (
        RUN["qwen3-32b"] | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
        "unsupported model ['Qwen3MoeForCausalLM'] (model_type qwen3_moe)",
    ),
    "gemma-2-9b": (
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0},
        "unsupported model ['Gemma2ForCausalLM'] (model_type gemma2)",
    ),
    "smollm3-3b": (
        {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4},
        "unsupported model ['SmolLM3ForCausalLM'] (model_type smollm3)",
    ),
    "qwen2-vl-7b": (
        {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]},
        "unsupported model ['Qwen2VLForConditionalGeneration'] (model_type qwen2_vl)",
    ),
    "a reward model": (
        RUN["llama-3.1-8b"] | {"architectures": ["LlamaForSequenceClassification"]},
        "unsupported model ['LlamaForSequenceClassification'] (model_type llama)",
    ),
    "llama-2-7b-gptq in 3 bits": (
        RUN["llama-2-7b"] | {"quantization_config": {"bits": 3, "group_size": 128, "quant_method": "gptq"}},
        "quantization_config (quant_method 'gptq') is not supported",
    ),
    "qwen2.5-7b-awq": (
        RUN["qwen2.5-7b"] | {"quantization_config": {"bits": 4, "quant_method": "awq", "version": "gemm"}},
        "quantization_config (quant_method 'awq') is not supported",
    ),
    "qwen3-0.6b-fp8": (
        RUN["qwen3-0.6b"] | {"quantization_config": {"fmt": "e4m3", "quant_method": "fp8"}},
        "quantization_config (quant_method 'fp8') is not supported",
    ),
    "llama-3.1-8b-bnb-4bit": (
        RUN["llama-3.1-8b"] | {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}},
        "quantization_config (quant_method 'bitsandbytes') is not supported",
    ),
    "llama-3.1-8b-w8a8": (
        RUN["llama-3.1-8b"] | {"compression_config": {"quant_method": "compressed-tensors"}},
        "compression_config (quant_method 'compressed-tensors') is not supported",
    ),
    "qwen2 with its window on": (
        RUN["qwen2.5-7b"] | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
        "sliding_window 4096 is not implemented; it needs a max_model_len of at most 4096, got 32768",
    ),
    "mistral-7b-v0.1 with all positions": (
        RUN["mistral-7b-v0.1"],
        "sliding_window 4096 is not implemented; it needs a max_model_len of at most 4096, got 32768",
    ),
}

POSITIONS, WINDOW, VOCAB = 256, 32, 131


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same entries with small numbers, but the same number of query heads per KV head."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    few = 1 if heads // kv_heads > 8 else min(kv_heads, 2)
    made = {"num_key_value_heads": few, "num_attention_heads": heads // kv_heads * few}
    made |= {"num_hidden_layers": 2, "intermediate_size": 72, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
    made["hidden_size"] = made["num_attention_heads"] * 16
    if "head_dim" in config:
        is_odd = config["head_dim"] * heads != config["hidden_size"]
        made |= {"head_dim": 16, "hidden_size": made["hidden_size"] + 8 * is_odd}
    if scaling := config.get("rope_scaling"):
        made["rope_scaling"] = scaling | {"original_max_position_embeddings": 32}
    if config.get("sliding_window"):
        made["sliding_window"] = WINDOW
    eos = config["eos_token_id"]
    made |= {"bos_token_id": 1, "eos_token_id": [2, 3, 4][: len(eos)] if isinstance(eos, list) else 2}
    return config | made | ({"pad_token_id": 2} if "pad_token_id" in config else {})


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder
