"""Published models in numbers, by name: what a calculator needs of them, without a file and without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The same names as in core's ModelConfig."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: str = "bfloat16"


# fmt: off
LLAMA = {  # layers, hidden, intermediate, heads, KV heads, head_dim, tokens, positions, tied
    "llama-7b":                  (32, 4096, 11008, 32, 32, 128, 32000, 2048, False),
    "llama-13b":                 (40, 5120, 13824, 40, 40, 128, 32000, 2048, False),
    "llama-30b":                 (60, 6656, 17920, 52, 52, 128, 32000, 2048, False),
    "llama-65b":                 (80, 8192, 22016, 64, 64, 128, 32000, 2048, False),
    "llama-2-7b":                (32, 4096, 11008, 32, 32, 128, 32000, 4096, False),
    "llama-2-13b":               (40, 5120, 13824, 40, 40, 128, 32000, 4096, False),
    "llama-2-70b":               (80, 8192, 28672, 64, 8, 128, 32000, 4096, False),
    "llama-3-8b":                (32, 4096, 14336, 32, 8, 128, 128256, 8192, False),
    "llama-3-70b":               (80, 8192, 28672, 64, 8, 128, 128256, 8192, False),
    "llama-3.1-8b":              (32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
    "llama-3.1-70b":             (80, 8192, 28672, 64, 8, 128, 128256, 131072, False),
    "llama-3.1-405b":            (126, 16384, 53248, 128, 8, 128, 128256, 131072, False),
    "llama-3.2-1b":              (16, 2048, 8192, 32, 8, 64, 128256, 131072, True),
    "llama-3.2-3b":              (28, 3072, 8192, 24, 8, 128, 128256, 131072, True),
    "llama-3.3-70b":             (80, 8192, 28672, 64, 8, 128, 128256, 131072, False),
    "tinyllama-1.1b":            (22, 2048, 5632, 32, 4, 64, 32000, 2048, False),
    "smollm2-135m":              (30, 576, 1536, 9, 3, 64, 49152, 8192, True),
    "smollm2-360m":              (32, 960, 2560, 15, 5, 64, 49152, 8192, True),
    "smollm2-1.7b":              (24, 2048, 8192, 32, 32, 64, 49152, 8192, True),
    "deepseek-r1-distill-llama-8b":  (32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
    "deepseek-r1-distill-llama-70b": (80, 8192, 28672, 64, 8, 128, 128256, 131072, False),
    "mistral-7b-v0.3":           (32, 4096, 14336, 32, 8, 128, 32768, 32768, False),
    "mistral-nemo-12b":          (40, 5120, 14336, 32, 8, 128, 131072, 131072, False),
    "mistral-small-24b":         (40, 5120, 32768, 32, 8, 128, 131072, 32768, False),
}
MISTRAL_7B = (32, 4096, 14336, 32, 8, 128, 32000, 32768, False)  # its first version, with a window
QWEN2 = {
    "qwen2.5-0.5b":              (24, 896, 4864, 14, 2, 64, 151936, 32768, True),
    "qwen2.5-1.5b":              (28, 1536, 8960, 12, 2, 128, 151936, 32768, True),
    "qwen2.5-3b":                (36, 2048, 11008, 16, 2, 128, 151936, 32768, True),
    "qwen2.5-7b":                (28, 3584, 18944, 28, 4, 128, 152064, 32768, False),
    "qwen2.5-14b":               (48, 5120, 13824, 40, 8, 128, 152064, 32768, False),
    "qwen2.5-32b":               (64, 5120, 27648, 40, 8, 128, 152064, 32768, False),
    "qwen2.5-72b":               (80, 8192, 29568, 64, 8, 128, 152064, 32768, False),
    "deepseek-r1-distill-qwen-1.5b": (28, 1536, 8960, 12, 2, 128, 151936, 131072, False),
    "deepseek-r1-distill-qwen-7b":   (28, 3584, 18944, 28, 4, 128, 152064, 131072, False),
    "deepseek-r1-distill-qwen-14b":  (48, 5120, 13824, 40, 8, 128, 152064, 131072, False),
    "deepseek-r1-distill-qwen-32b":  (64, 5120, 27648, 40, 8, 128, 152064, 131072, False),
}
QWEN3 = {
    "qwen3-0.6b":                (28, 1024, 3072, 16, 8, 128, 151936, 40960, True),
    "qwen3-1.7b":                (28, 2048, 6144, 16, 8, 128, 151936, 40960, True),
    "qwen3-4b":                  (36, 2560, 9728, 32, 8, 128, 151936, 40960, True),
    "qwen3-8b":                  (36, 4096, 12288, 32, 8, 128, 151936, 40960, False),
    "qwen3-14b":                 (40, 5120, 17408, 40, 8, 128, 151936, 40960, False),
    "qwen3-32b":                 (64, 5120, 25600, 64, 8, 128, 151936, 40960, False),
}
# fmt: on
SHAPES = {
    **{name: Shape(*row) for name, row in LLAMA.items()},
    "mistral-7b-v0.1": Shape(*MISTRAL_7B, sliding_window=4096),
    **{name: Shape(*row, attention_bias=True) for name, row in QWEN2.items()},
    **{name: Shape(*row, qk_norm=True) for name, row in QWEN3.items()},
}
