"""ModelConfig: what a checkpoint folder's config.json says of the model's shape."""

from dataclasses import dataclass
from pathlib import Path

from .entries import Entries, read_json, read_json_if_any
from .families import check_implemented, find_family, read_window

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
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm on each head of q and k, before they are turned
    sliding_window: int | None = None  # tokens that a token sees; load_model() refuses a shorter one than max_model_len
    dtype: str = "float32"  # of the weights in the file
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json; end-of-text ids come from generation_config.json first, as in transformers.

        Raises ValueError, naming the file and the entry, for a model that this engine does not run.
        """
        path = Path(folder) / "config.json"
        generation = path.with_name("generation_config.json")
        return cls.from_entries(Entries(read_json(path), path), Entries(read_json_if_any(generation), generation))

    @classmethod
    def from_entries(cls, config: Entries, generation: Entries) -> "ModelConfig":
        """`config` is config.json, `generation` is generation_config.json."""
        family = find_family(config)
        config = Entries({**family.left_out, **config.values, **family.always}, config.path)
        check_implemented(config)
        sizes = {name: config.integer(name, most=most) for name, most in MAX_SIZES.items()}
        kv_heads, head_dim = read_heads(config, sizes["num_attention_heads"], sizes["hidden_size"])
        rope_theta, rope_scaling = read_rope(config, cls.rope_theta)
        attention_bias = config.flag("attention_bias", False)
        generation_eos, eos = read_eos(generation), read_eos(config)
        return cls(
            **sizes,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=config.integer(
                "max_position_embeddings", cls.max_position_embeddings, most=MAX_POSITIONS
            ),
            rms_norm_eps=config.number("rms_norm_eps", cls.rms_norm_eps),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            attention_bias=attention_bias,
            attention_output_bias=attention_bias and family.output_bias,
            mlp_bias=config.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
            sliding_window=read_window(config, sizes["num_hidden_layers"]),
            dtype=config.text("dtype", config.text("torch_dtype", cls.dtype)),
            bos_token_id=config.integer("bos_token_id", least=0) if "bos_token_id" in config else None,
            eos_token_ids=generation_eos or eos,
        )


def read_heads(config: Entries, heads: int, hidden_size: int) -> tuple[int, int]:
    """num_key_value_heads and head_dim, which may be null or left out."""
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"{config.path}: {heads} attention heads do not divide into {kv_heads} key-value heads")
    head_dim = config.integer("head_dim", default=hidden_size // heads, most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise ValueError(f"{config.path}: head_dim must be even, since a head is turned in pairs, not {head_dim}")
    return kv_heads, head_dim


def read_eos(config: Entries) -> tuple[int, ...]:
    """eos_token_id is one id, a list of them, null or not there."""
    if "eos_token_id" not in config:
        return ()
    eos = config.values["eos_token_id"]
    ids = eos if isinstance(eos, list) else [eos]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise config.error("eos_token_id", "a token id, or a list of them")
    return tuple(ids)


def read_rope(config: Entries, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Theta and the scaling: of rope_scaling (before transformers 5) or rope_parameters, in which theta may be, too."""
    rope = config.entries("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise ValueError(f"{config.path}: {rope.within[:-1]} of each layer type must be those of all")
    if rope.values.get("partial_rotary_factor", 1) != 1:
        raise rope.error("partial_rotary_factor", "1")
    if rope_type == "default":
        return theta, None
    if rope_type not in ("linear", "llama3"):
        raise ValueError(f"{config.path}: rope type {rope_type!r} is not one of default, linear, llama3")
    return theta, read_rope_scaling(rope, rope_type)


def read_rope_scaling(rope: Entries, rope_type: str) -> RopeScaling:
    names = ["factor"]
    if rope_type == "llama3":
        names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"{rope.path}: rope type {rope_type!r} needs {', '.join(missing)}")
    factor = rope.number("factor")
    if rope_type == "linear":
        return RopeScaling(rope_type, factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ValueError(f"{rope.path}: low_freq_factor must be less than high_freq_factor, not {low} and {high}")
    return RopeScaling(rope_type, factor, low, high, rope.integer("original_max_position_embeddings"))
