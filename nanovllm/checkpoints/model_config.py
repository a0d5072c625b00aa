"""config.json and generation_config.json: the shape of a model, its end-of-text tokens and its recommended sampling.

Llama, Mistral, Qwen 2.5 and Qwen 3 share one architecture with small differences. An entry that requires a different
model raises an error that names the entry, before any weights are read. ModelConfig itself, in llama/, does not check
values.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..llama import ModelConfig
from .entries import Entries, shorten
from .packed import Scheme

REQUIRED_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class Family(NamedTuple):
    """The models of one model_type: their architecture, and how transformers treats their config.json."""

    architecture: str
    defaults: dict[str, Any]  # values of missing entries
    overrides: dict[str, Any]  # values of entries that transformers ignores


MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
MISTRAL_OVERRIDES = {  # every layer has a sliding window, and no entry turns it off
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {  # by model_type; Qwen 2.5 is qwen2
    "llama": Family("LlamaForCausalLM", {}, {}),
    "mistral": Family("MistralForCausalLM", MISTRAL_DEFAULTS, MISTRAL_OVERRIDES),
    "qwen2": Family("Qwen2ForCausalLM", QWEN_DEFAULTS, {"attention_bias": True, "mlp_bias": False}),
    "qwen3": Family("Qwen3ForCausalLM", {**QWEN_DEFAULTS, "head_dim": 128}, {"mlp_bias": False}),
}

ROPE_ENTRIES = ("rope_scaling", "rope_parameters")  # the name before transformers 5, and the name since
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {  # the values that an entry may have besides null
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), ()),
    **dict.fromkeys(("attention_multiplier", "scale_depth", "query_pre_attn_scalar", "clip_qkv"), ()),
    **dict.fromkeys(("per_layer_config", "attention_chunk_size"), ()),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "scale_emb"), (1,)),
    **dict.fromkeys(("rope_interleaved", "use_qk_norm", "qk_layernorm", "alibi"), (False,)),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual"), (False,)),
    **dict.fromkeys(("use_bidirectional_attention", "is_encoder_decoder"), (False,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 1)),
}


def read_model_config(folder: str | Path, hf_overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the model config of a folder. eos_token_id in generation_config.json takes precedence, as in transformers.

    `hf_overrides` replaces entries of config.json. Raise ValueError, naming the file and the entry, for a model that
    is not supported.
    """
    config = overridden(Entries.read(Path(folder) / "config.json"), hf_overrides or {})
    return model_config(config, Entries.read_if_exists(Path(folder) / "generation_config.json"))


def overridden(config: Entries, overrides: Mapping[str, Any]) -> Entries:
    """Return config.json's entries with `overrides` applied. rope_theta is kept unless the overrides set a new one.

    >>> config = Entries({"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}, Path())
    >>> overridden(config, {"rope_parameters": {"rope_type": "default"}}).values
    {'rope_scaling': None, 'rope_parameters': {'rope_type': 'default'}, 'rope_theta': 500000.0}
    """
    if not overrides:
        return config
    values, path = {**config.values, **overrides}, Path(f"{config.path} with hf_overrides")
    rope = config.values.get("rope_scaling") or config.values.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    values["rope_theta"] = overrides.get("rope_theta", theta or config.values.get("rope_theta"))
    if not overrides.keys().isdisjoint(ROPE_ENTRIES):
        rope = next((overrides[name] for name in ROPE_ENTRIES if overrides.get(name)), None)
    elif isinstance(rope, dict):
        rope = {name: value for name, value in rope.items() if name != "rope_theta"}
    return Entries({**values, "rope_scaling": None, "rope_parameters": rope}, path)


def model_config(config: Entries, generation: Entries) -> ModelConfig:
    """Return the model config from the entries of config.json and generation_config.json.

    Raise ValueError, naming the file and the entry, for a model that is not supported.
    """
    model_type, family = find_family(config)
    config = Entries({**family.defaults, **config.values, **family.overrides}, config.path)
    check_implemented(config)
    sizes = {name: config.integer(name) for name in REQUIRED_SIZES}
    generation_eos, eos = read_eos(generation), read_eos(config)
    entries = {
        "model_type": model_type,
        **sizes,
        **read_heads(config, sizes["num_attention_heads"], sizes["hidden_size"]),
        "max_position_embeddings": config.integer("max_position_embeddings", ModelConfig.max_position_embeddings),
        "rms_norm_eps": config.number("rms_norm_eps", ModelConfig.rms_norm_eps),
        "rope_parameters": read_rope(config),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
        "attention_bias": config.flag("attention_bias", False),
        "mlp_bias": config.flag("mlp_bias", False),
        "sliding_window": read_window(config, sizes["num_hidden_layers"]),
        "dtype": config.text("dtype", config.text("torch_dtype", ModelConfig.dtype)),
        "bos_token_id": config.integer("bos_token_id", minimum=0) if "bos_token_id" in config else None,
        "eos_token_id": [*(generation_eos or eos)],
    }
    return ModelConfig.from_entries({name: value for name, value in entries.items() if value is not None}, {})


def find_family(config: Entries) -> tuple[str, Family]:
    """Return the model_type and its Family. Raise ValueError if the model_type or architecture is not supported."""
    model_type, architectures = config.text("model_type", "llama"), config.values.get("architectures")
    family = FAMILIES.get(model_type)
    if family is None or (architectures and architectures != [family.architecture]):
        supported = ", ".join(family.architecture for family in FAMILIES.values())
        name = f"{shorten(architectures)} (model_type {model_type})"
        raise ValueError(f"{config.path}: unsupported model {name}; supported: {supported}")
    return model_type, family


def check_implemented(config: Entries) -> None:
    """Raise ValueError, naming the entry and its value, for the first value in config.json that is not supported."""
    Scheme.read(config)
    for name, values in SUPPORTED_VALUES.items():
        if name in config and config.values[name] not in values:
            raise config.error(name, str(values[0]).lower() if values else "null")
    layer_types = config.values.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise config.error("layer_types", "a list")
    unsupported = sorted({shorten(layer_type) for layer_type in layer_types} - {"'full_attention'"})
    if unsupported:
        raise ValueError(f"{config.path}: layer_types must all be full_attention, got {', '.join(unsupported)}")


def read_heads(config: Entries, num_heads: int, hidden_size: int) -> dict[str, int]:
    """Return num_key_value_heads and head_dim, whose defaults are derived from `num_heads` and `hidden_size`."""
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{config.path}: {num_heads} attention heads do not divide into {num_kv_heads} key-value heads"
        )
    head_dim = config.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"{config.path}: head_dim must be even, because RoPE rotates pairs, got {head_dim}")
    return {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def read_rope(config: Entries) -> dict[str, Any]:
    """Return the entries of rope_parameters (rope_scaling before transformers 5), including rope_theta."""
    rope = config.entries("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    theta = rope.number("rope_theta", config.number("rope_theta", ModelConfig.rope_theta))
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise ValueError(f"{config.path}: {rope.prefix[:-1]} must be the same for all layer types")
    if rope.values.get("partial_rotary_factor", 1) != 1:
        raise rope.error("partial_rotary_factor", "1")
    if rope_type not in ("default", "linear", "llama3"):
        raise ValueError(f"{config.path}: rope type must be default, linear or llama3, got {rope_type!r}")
    scaling = {} if rope_type == "default" else read_rope_scaling(rope, rope_type)
    return {"rope_type": rope_type, "rope_theta": theta, **scaling}


def read_rope_scaling(rope: Entries, rope_type: str) -> dict[str, Any]:
    """Return the fields of RopeScaling. Raise ValueError if one is missing or invalid."""
    names = ["factor"]
    if rope_type == "llama3":
        names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"{rope.path}: rope type {rope_type!r} needs {', '.join(missing)}")
    factor = rope.number("factor")
    if rope_type == "linear":
        return {"factor": factor}
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ValueError(f"{rope.path}: low_freq_factor must be less than high_freq_factor, got {low} and {high}")
    original = rope.integer("original_max_position_embeddings")
    return dict(zip(names, (factor, low, high, original), strict=True))


def read_window(config: Entries, num_layers: int) -> int | None:
    """Return the sliding window: how many tokens a token attends to, including itself. None if no layer has one."""
    use_window = config.flag("use_sliding_window", True)
    first_layer = config.integer("max_window_layers", default=0, minimum=0)
    if "sliding_window" not in config or not use_window or first_layer >= num_layers:
        return None
    return config.integer("sliding_window")


# End-of-text tokens


def eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Return the end-of-text ids in a folder's generation_config.json or, if it has none, in its config.json."""
    names = ("generation_config.json", "config.json")
    generation, config = (Entries.read_if_exists(Path(folder) / name) for name in names)
    return read_eos(generation) or read_eos(config)


def read_eos(config: Entries) -> tuple[int, ...]:
    """Return the ids of eos_token_id, which is one id, a list of ids, null or missing."""
    if "eos_token_id" not in config:
        return ()
    eos = config.values["eos_token_id"]
    ids = eos if isinstance(eos, list) else [eos]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise config.error("eos_token_id", "a token id or a list of token ids")
    return tuple(ids)


# Recommended sampling parameters, as vLLM 0.32 reads them

RECOMMENDED_NAMES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("temperature", "top_k", "top_p", "min_p", "max_new_tokens"),
)
RECOMMENDED_IN_CONFIG = ("min_p", "max_new_tokens")  # transformers also accepts these in an old config.json


def default_sampling_params(
    folder: str | Path, generation_config: str | Path = "auto", override: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return values of SamplingParams fields, for requests that do not set them. max_new_tokens is renamed max_tokens.

    `generation_config` is "auto" (the checkpoint in `folder`), "vllm" (no recommendations) or another folder.
    `override` takes precedence. As in vLLM, do_sample is ignored: a temperature applies even without it. Raise
    ValueError, naming the file and the entry, for a value that is not a number.
    """
    entries = {} if generation_config == "vllm" else read_recommended(Path(folder), generation_config)
    entries |= {name: value for name, value in (override or {}).items() if name in RECOMMENDED_NAMES}
    params = {name: value for name, value in entries.items() if value is not None}
    if "max_new_tokens" in params:
        params["max_tokens"] = params.pop("max_new_tokens")
    return params


def read_recommended(folder: Path, generation_config: str | Path) -> dict[str, Any]:
    """Return the recommended values by name, with None for missing ones. `generation_config` is "auto" or a folder."""
    if generation_config != "auto":
        folder = Path(generation_config)
        if not folder.is_dir():
            raise ValueError(f"generation_config must be auto, vllm or a folder, got {str(generation_config)!r}")
    path = folder / "generation_config.json"
    names: tuple[str, ...] = RECOMMENDED_NAMES
    if not path.exists():
        path, names = folder / "config.json", RECOMMENDED_IN_CONFIG
    entries = Entries.read(path)
    for name in names:
        value = entries.values.get(name)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise entries.error(name, "a number")
    return {name: entries.values.get(name) for name in names}
