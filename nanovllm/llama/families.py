"""The families of checkpoints that the model runs, and what would make a checkpoint another model.

All four are one architecture with small differences. Whatever else changes what is computed is refused, by its name.
"""

from typing import Any, NamedTuple

from .entries import Entries, brief


class Family(NamedTuple):
    architecture: str  # its name in transformers
    left_out: dict[str, Any]  # what an entry is that config.json leaves out, as in transformers
    always: dict[str, Any]  # what an entry is whatever config.json says
    output_bias: bool = True  # attention_bias is one of o, too
    qk_norm: bool = False


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
    "qwen2": Family("Qwen2ForCausalLM", QWEN, {"attention_bias": True, "mlp_bias": False}, output_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", {**QWEN, "head_dim": 128}, {"mlp_bias": False}, qk_norm=True),
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


def find_family(config: Entries) -> Family:
    """The family of a config.json. Raises ValueError, naming what was found, for any other."""
    model_type, architectures = config.text("model_type", "llama"), config.values.get("architectures")
    family = FAMILIES.get(model_type)
    if family is None or (architectures and architectures != [family.architecture]):
        runs = ", ".join(family.architecture for family in FAMILIES.values())
        found = f"{brief(architectures)} (model_type {model_type})"
        raise ValueError(f"{config.path}: this engine runs {runs}, the folder has {found}")
    return family


def check_implemented(config: Entries) -> None:
    """Raises ValueError, naming the entry and its value, for one that asks for what the model does not compute."""
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
    """The most tokens that a token sees in some layer, itself counted; None if it sees all before it in each."""
    has_window = config.flag("use_sliding_window", True)
    first_layer = config.integer("max_window_layers", default=0, least=0)
    if "sliding_window" not in config or not has_window or first_layer >= num_layers:
        return None
    return config.integer("sliding_window")
