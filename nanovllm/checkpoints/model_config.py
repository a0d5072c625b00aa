"""read_model_config: config.json, each entry checked, as the ModelConfig of llama/.

Four families of checkpoints are one architecture with small differences. An entry that would make a checkpoint another
model is refused by its name, before a weight is read.
"""

from pathlib import Path
from typing import Any, NamedTuple

from ..llama import ModelConfig
from .entries import Entries, brief, read_json, read_json_if_any

# Far beyond any model: a slip in config.json is an error at once, and not hours of building layers.
MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "num_hidden_layers": 1000,
    "num_attention_heads": 2**12,
}
MAX_HEAD_DIM = 2**10
MAX_POSITIONS = 2**24


class Family(NamedTuple):
    architecture: str  # its name in transformers
    defaults: dict[str, Any]  # of entries that config.json leaves out, as in transformers
    always: dict[str, Any]  # entries whose value in config.json has no effect


MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
MISTRAL_ALWAYS = {  # its window has no switch, and is that of all layers
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {  # by model_type; qwen2 is Qwen 2.5, too
    "llama": Family("LlamaForCausalLM", {}, {}),
    "mistral": Family("MistralForCausalLM", MISTRAL, MISTRAL_ALWAYS),
    "qwen2": Family("Qwen2ForCausalLM", QWEN, {"attention_bias": True, "mlp_bias": False}),
    "qwen3": Family("Qwen3ForCausalLM", {**QWEN, "head_dim": 128}, {"mlp_bias": False}),
}

IMPLEMENTED: dict[str, tuple[Any, ...]] = {  # entry: the values that it may have beside null
    "hidden_act": ("silu", "swish"),
    "per_layer_config": (),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logits_soft_cap": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "attention_multiplier": (),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "query_pre_attn_scalar": (),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
}


def read_model_config(folder: str | Path) -> ModelConfig:
    """Return the model of a folder. End-of-text ids come from generation_config.json first, as in transformers.

    Raise ValueError, naming the file and the entry, for a model that this engine does not run.
    """
    path = Path(folder) / "config.json"
    generation = path.with_name("generation_config.json")
    return model_config(Entries(read_json(path), path), Entries(read_json_if_any(generation), generation))


def model_config(config: Entries, generation: Entries) -> ModelConfig:
    """Return the model of the entries of config.json and generation_config.json."""
    model_type, family = find_family(config)
    config = Entries({**family.defaults, **config.values, **family.always}, config.path)
    check_implemented(config)
    sizes = {name: config.integer(name, most=most) for name, most in MAX_SIZES.items()}
    generation_eos, eos = read_eos(generation), read_eos(config)
    entries = {
        "model_type": model_type,
        **sizes,
        **read_heads(config, sizes["num_attention_heads"], sizes["hidden_size"]),
        "max_position_embeddings": config.integer(
            "max_position_embeddings", ModelConfig.max_position_embeddings, most=MAX_POSITIONS
        ),
        "rms_norm_eps": config.number("rms_norm_eps", ModelConfig.rms_norm_eps),
        "rope_parameters": read_rope(config),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
        "attention_bias": config.flag("attention_bias", False),
        "mlp_bias": config.flag("mlp_bias", False),
        "sliding_window": read_window(config, sizes["num_hidden_layers"]),
        "dtype": config.text("dtype", config.text("torch_dtype", ModelConfig.dtype)),
        "bos_token_id": config.integer("bos_token_id", least=0) if "bos_token_id" in config else None,
        "eos_token_id": [*(generation_eos or eos)],
    }
    return ModelConfig.from_entries({name: value for name, value in entries.items() if value is not None}, {})


def read_heads(config: Entries, heads: int, hidden_size: int) -> dict[str, int]:
    """Return num_key_value_heads and head_dim, which may be null or left out."""
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"{config.path}: {heads} attention heads do not divide into {kv_heads} key-value heads")
    head_dim = config.integer("head_dim", default=hidden_size // heads, most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise ValueError(f"{config.path}: head_dim must be even, since a head is turned in pairs, not {head_dim}")
    return {"num_key_value_heads": kv_heads, "head_dim": head_dim}


def read_rope(config: Entries) -> dict[str, Any]:
    """Return the entries of rope_scaling (before transformers 5) or rope_parameters, theta among them."""
    rope = config.entries("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    theta = rope.number("rope_theta", config.number("rope_theta", ModelConfig.rope_theta))
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise ValueError(f"{config.path}: {rope.within[:-1]} of each layer type must be those of all")
    if rope.values.get("partial_rotary_factor", 1) != 1:
        raise rope.error("partial_rotary_factor", "1")
    if rope_type not in ("default", "linear", "llama3"):
        raise ValueError(f"{config.path}: rope type {rope_type!r} is not one of default, linear, llama3")
    scaling = {} if rope_type == "default" else read_rope_scaling(rope, rope_type)
    return {"rope_type": rope_type, "rope_theta": theta, **scaling}


def read_rope_scaling(rope: Entries, rope_type: str) -> dict[str, Any]:
    """Return the fields of RopeScaling."""
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
        raise ValueError(f"{rope.path}: low_freq_factor must be less than high_freq_factor, not {low} and {high}")
    original = rope.integer("original_max_position_embeddings")
    return dict(zip(names, (factor, low, high, original), strict=True))


def read_eos(config: Entries) -> tuple[int, ...]:
    """Return the ids of eos_token_id, which is one id, a list of them, null or left out."""
    if "eos_token_id" not in config:
        return ()
    eos = config.values["eos_token_id"]
    ids = eos if isinstance(eos, list) else [eos]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise config.error("eos_token_id", "a token id, or a list of them")
    return tuple(ids)


def find_family(config: Entries) -> tuple[str, Family]:
    """Return the model_type and family of a config.json. Raise ValueError, naming both, for any other."""
    model_type, architectures = config.text("model_type", "llama"), config.values.get("architectures")
    family = FAMILIES.get(model_type)
    if family is None or (architectures and architectures != [family.architecture]):
        runs = ", ".join(family.architecture for family in FAMILIES.values())
        found = f"{brief(architectures)} (model_type {model_type})"
        raise ValueError(f"{config.path}: this engine runs {runs}, the folder has {found}")
    return model_type, family


def check_implemented(config: Entries) -> None:
    """Raise ValueError, naming the entry and its value, for one that the model does not compute."""
    for name in ("quantization_config", "compression_config"):
        if name in config:
            method = config.entries(name).values.get("quant_method")
            raise ValueError(
                f"{config.path}: {name} (quant_method {brief(method)}): quantized weights are not run here"
            )
    for name, values in IMPLEMENTED.items():
        if name in config and config.values[name] not in values:
            raise config.error(name, str(values[0]).lower() if values else "null")
    layer_types = config.values.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise config.error("layer_types", "a list")
    others = sorted({brief(kind) for kind in layer_types} - {"'full_attention'"})
    if others:
        raise ValueError(f"{config.path}: layer_types must all be full_attention, not {', '.join(others)}")


def read_window(config: Entries, num_layers: int) -> int | None:
    """Return how many tokens a token sees in some layer, itself counted; None if it sees all before it in each."""
    has_window = config.flag("use_sliding_window", True)
    first_layer = config.integer("max_window_layers", default=0, least=0)
    if "sliding_window" not in config or not has_window or first_layer >= num_layers:
        return None
    return config.integer("sliding_window")
