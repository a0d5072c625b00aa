"""ModelConfig: the shape of a model, from the config.json of its checkpoint."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # Qwen 2.5 is qwen2
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeScaling:
    """Parameters that scale rotary angles for a longer context, by the rule of Llama 3.1.

    The linear rule sets only `factor`. The original context is then 0, so all frequencies count as low, and are divided
    by `factor`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, with transformers' names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of q, k and v
    attention_output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm on each head of q and k, before rotation
    sliding_window: int | None = None  # number of tokens that a token attends to; None: all
    dtype: str = "float32"  # of the weights in the file
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json, and end-of-text tokens from generation_config.json if there is one.

        Raise ValueError if there is no config.json, or if the engine does not support the model.
        """
        path = Path(folder) / "config.json"
        if not path.exists():
            raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json")
        return cls.from_entries(read_entries(path), read_entries(path.with_name("generation_config.json")))

    @classmethod
    def from_entries(cls, config: dict[str, Any], generation: dict[str, Any]) -> "ModelConfig":
        """Return the config from the entries of config.json and generation_config.json that are not null.

        Raise ValueError if the engine does not support the model.
        """
        family, heads = config.get("model_type"), config["num_attention_heads"]
        rope = config.get("rope_scaling") or config.get("rope_parameters", {})  # before and since transformers 5
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if family not in MODEL_TYPES or rope_type not in ROPE_TYPES or "quantization_config" in config:
            found = {"model_type": family, "rope_type": rope_type, "quantized": "quantization_config" in config}
            raise ValueError(f"unsupported model: {found}; supported: {MODEL_TYPES}, {ROPE_TYPES}, not quantized")
        scaling = RopeScaling(**named_like_fields(rope, RopeScaling)) if rope_type != "default" else None
        has_bias = config.get("attention_bias", False) and family in ("llama", "qwen3")
        eos = generation.get("eos_token_id", config.get("eos_token_id", []))  # one id, or a list
        given = {
            "num_key_value_heads": config.get("num_key_value_heads", heads),
            "head_dim": config.get("head_dim", config["hidden_size"] // heads),
            "rope_theta": rope.get("rope_theta", config.get("rope_theta", cls.rope_theta)),
            "rope_scaling": scaling,
            "attention_bias": has_bias or family == "qwen2",
            "attention_output_bias": has_bias,
            "mlp_bias": config.get("mlp_bias", False) and family == "llama",
            "qk_norm": family == "qwen3",
            "sliding_window": config.get("sliding_window") if config.get("use_sliding_window", True) else None,
            "dtype": config.get("dtype", config.get("torch_dtype", cls.dtype)),
            "eos_token_ids": tuple(eos) if isinstance(eos, list) else (eos,),
        }
        return cls(**named_like_fields(config, cls) | given)

    @property
    def max_context_len(self) -> int:
        """The longest text, in tokens. A sliding window limits it, because attention here covers all earlier tokens."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


def read_entries(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file that are not null. A file that does not exist has none."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: value for name, value in entries.items() if value is not None}


def named_like_fields(entries: dict[str, Any], dataclass: type) -> dict[str, Any]:
    """Return the entries whose names are fields of `dataclass`."""
    return {field.name: entries[field.name] for field in fields(dataclass) if field.name in entries}
