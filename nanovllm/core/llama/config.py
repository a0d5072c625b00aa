"""ModelConfig: what a checkpoint folder's config.json says of the model's shape."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches its rotary angles to a longer context (Llama 3.1's rule, or a plain division)."""

    rope_type: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float | None = None  # these three for llama3 only
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True)
class ModelConfig:
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
    attention_bias: bool = False  # on q, k, v and o
    mlp_bias: bool = False
    dtype: str = "float32"  # of the weights in the file
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json; end-of-text ids come from generation_config.json first, as in transformers.

        Raises ValueError, naming the file and the entry, for a folder that holds no Llama.
        """
        path = Path(folder) / "config.json"
        generation = read_json_if_any(path.with_name("generation_config.json"))
        return cls.from_dict(read_json(path), generation, source=path)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any], source: Path) -> "ModelConfig":
        """`raw` is config.json, `generation` is generation_config.json; `source` is named in errors."""
        check_architecture(raw, source)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        shape = {name: positive_int(raw, name, source) for name in sizes}
        kv_heads, head_dim = read_heads(raw, shape["num_attention_heads"], shape["hidden_size"], source)
        positions = positive_int(raw, "max_position_embeddings", source, default=cls.max_position_embeddings)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        return cls(
            **shape,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rms_norm_eps=raw.get("rms_norm_eps", cls.rms_norm_eps),
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or cls.rope_theta,
            rope_scaling=read_rope_scaling(rope, source),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            dtype=raw.get("dtype") or raw.get("torch_dtype") or cls.dtype,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=read_eos(generation) or read_eos(raw),
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming the file, if there is none."""
    if not path.exists():
        raise ValueError(f"{path.parent} is not a checkpoint folder: it has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def check_architecture(raw: dict[str, Any], source: Path) -> None:
    model_type = raw.get("model_type", "llama")
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if model_type != "llama" or "LlamaForCausalLM" not in architectures:
        raise ValueError(f"{source}: this engine runs LlamaForCausalLM, the folder has {architectures} ({model_type})")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act must be silu, not {raw['hidden_act']}")


def positive_int(raw: dict[str, Any], name: str, source: Path, default: int | None = None) -> int:
    """`default` is for an entry that is null or not there."""
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: {name} must be a positive whole number, not {value!r}")
    return value


def read_heads(raw: dict[str, Any], heads: int, hidden_size: int, source: Path) -> tuple[int, int]:
    """num_key_value_heads and head_dim, which may be null or left out."""
    kv_heads = positive_int(raw, "num_key_value_heads", source, default=heads)
    if heads % kv_heads:
        raise ValueError(f"{source}: {heads} attention heads do not divide into {kv_heads} key-value heads")
    head_dim = positive_int(raw, "head_dim", source, default=hidden_size // heads)
    if head_dim % 2:
        raise ValueError(f"{source}: head_dim must be even, since a head is turned in pairs, not {head_dim}")
    return kv_heads, head_dim


def read_eos(raw: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id is one id, a list of them, null or not there."""
    eos = raw.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def read_rope_scaling(rope: dict[str, Any], source: Path) -> RopeScaling | None:
    """`rope` is rope_parameters (transformers 5) or rope_scaling (before); the type is rope_type or type."""
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return None
    names = ["factor"]
    if rope_type == "llama3":
        names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    elif rope_type != "linear":
        raise ValueError(f"{source}: rope type {rope_type!r} is not one of default, linear, llama3")
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"{source}: rope type {rope_type!r} needs {', '.join(missing)}")
    return RopeScaling(rope_type, **{name: rope[name] for name in names})
