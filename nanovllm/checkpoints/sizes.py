"""Estimate the memory that a model needs: its parameters, the bytes of its weights, and the space left for KV cache.

A model is a ModelConfig or one of SHAPES, the dimensions of published models. Nothing here imports torch.
"""

import math
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..host_memory import host_memory


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model, under ModelConfig's names."""

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
LLAMA = {  # layers, hidden, intermediate, heads, KV heads, head_dim, vocabulary, positions, tied: the fields of Shape
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
MISTRAL_7B = (32, 4096, 14336, 32, 8, 128, 32000, 32768, False)  # the first version, which has a sliding window
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


SIZE_PATTERN = re.compile(r"(\d{1,15})(\.\d{1,15})?(?:([kKmMgGtT])|(?i: *([kmgt]?)(i?)b)(?:/s)?)?", re.ASCII)


def parse_size(text: str) -> int:
    """Return the number of bytes or tokens that a string such as "24GiB" or "4k" stands for, or raise ValueError.

    A suffix of one letter works as in vLLM 0.32: 1k is 1,000, and 1K is 1,024. An uppercase letter allows no fraction.
    With a B, case does not matter: 1 kB and 1 KB are 1,000, and 1 KiB is 1,024.

    >>> parse_size("4096"), parse_size("1k"), parse_size("1K"), parse_size("25.6k")
    (4096, 1000, 1024, 25600)
    >>> parse_size("24GiB"), parse_size("80 GB"), parse_size("4.8TB/s")
    (25769803776, 80000000000, 4800000000000)
    """
    if match := SIZE_PATTERN.fullmatch(text.strip()):
        number, fraction, letter, prefix, binary = match.groups("")
        base, power = 1024 if binary or letter.isupper() else 1000, " kmgt".index((letter or prefix or " ").lower())
        factor = int(base**power)
        if not (binary and not prefix) and not (fraction and (factor == 1 or letter.isupper())):
            return round(float(number + fraction) * factor) if fraction else int(number) * factor
    raise ValueError(f"{text!r} is not a size such as 4096, 4k (4,000), 4K (4,096), 80GB or 24GiB")


def show_bytes(size: float) -> str:
    """Return a number of bytes in a readable unit.

    >>> show_bytes(25769803776), show_bytes(524288), show_bytes(100)
    ('24.0 GiB', '512.0 KiB', '100 bytes')
    """
    if size < 1024:
        return f"{size:,.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def show_seconds(seconds: float) -> str:
    """Return a duration in milliseconds or seconds.

    >>> show_seconds(0.0041), show_seconds(2.5)
    ('4.1 ms', '2.5 s')
    """
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


class Memory(NamedTuple):
    """The memory that a model should fit in."""

    size: int  # bytes
    source: str  # "this GPU", "this machine", or "given" by the user
    is_gpu: bool


def find_memory() -> Memory:
    """Return the memory of the first GPU, or of this machine if it has none."""
    gpu = gpu_bytes()
    return Memory(gpu, "this GPU", True) if gpu else Memory(host_memory().total, "this machine", False)


def gpu_bytes() -> int | None:
    """Return the memory of the first GPU that nvidia-smi lists, or None."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=10)
        return int(result.stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


if TYPE_CHECKING:
    from ..llama import ModelConfig

Dimensions: TypeAlias = "ModelConfig | Shape"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameters(model: Dimensions) -> dict[str, int]:
    """Return the number of parameters of each part of a model.

    >>> from .sizes import SHAPES
    >>> parts = parameters(SHAPES["llama-2-7b"])
    >>> parts["attention"] == 32 * 4 * 4096**2, parts["MLP"] == 32 * 3 * 4096 * 11008, parts["norms"] == 65 * 4096
    (True, True, True)
    >>> parts["embedding"] == parts["head"] == 32000 * 4096, sum(parts.values())
    (True, 6738415616)
    """
    hidden, intermediate, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    attention = (2 * q + 2 * kv) * hidden  # q and o, k and v
    biases = model.attention_bias * (q + 2 * kv) + model.attention_output_bias * hidden
    mlp = 3 * hidden * intermediate + model.mlp_bias * (2 * intermediate + hidden)  # gate, up and down
    norms = 2 * hidden + model.qk_norm * 2 * model.head_dim
    return {
        "embedding": model.vocab_size * hidden,
        "attention": layers * (attention + biases),
        "MLP": layers * mlp,
        "norms": layers * norms + hidden,
        "head": 0 if model.tie_word_embeddings else model.vocab_size * hidden,
    }


def weight_bits(model: Dimensions, quantization: str | None, itemsize: int) -> float:
    """Return the average number of bits per weight, including the scales and minima of 4-bit weights.

    With `quantization` "int8" or "int4", the head and an embedding that is tied to it take 8 bits per weight. The
    norms and an untied embedding take `itemsize` bytes per weight, as do all weights without quantization.

    >>> from .sizes import SHAPES
    >>> [round(weight_bits(SHAPES["llama-2-7b"], name, 2), 2) for name in ("int8", "int4")]
    [8.16, 5.27]
    """
    parts = parameters(model)
    bits = dict.fromkeys(parts, 8.0 * itemsize)
    if quantization is None:
        return bits["norms"]
    bits["head"] = 8.0
    bits |= dict.fromkeys(("attention", "MLP"), 8.0 if quantization == "int8" else 5.0)
    if model.tie_word_embeddings:
        bits["embedding"] = 8.0
    return sum(parts[name] * bits[name] for name in parts) / sum(parts.values())


def kv_bytes_per_token(model: Dimensions, itemsize: int, kv_cache_dtype: str = "auto") -> int:
    """Return the bytes of one token's keys and values in all layers. In int8, each head's key and value has a scale.

    >>> from .sizes import SHAPES
    >>> [kv_bytes_per_token(SHAPES["llama-2-7b"], 2, each) for each in ("auto", "int8", "fp8")]
    [524288, 270336, 262144]
    """
    size = {"int8": model.head_dim + 4, "fp8": model.head_dim}.get(kv_cache_dtype, model.head_dim * itemsize)
    return 2 * model.num_hidden_layers * model.num_key_value_heads * size


@dataclass(frozen=True)
class Fit:
    """A model in limited memory: its weights, and a pool of KV cache blocks in the rest.

    >>> from .sizes import SHAPES
    >>> fit = Fit(SHAPES["llama-2-7b"], itemsize=2, room=24 * 2**30, block_size=16, max_model_len=4096)
    >>> fit.weight_bytes, fit.block_bytes, fit.num_blocks, fit.num_slots
    (13476831232, 8388608, 1465, 23440)

    A contiguous cache reserves the 4,096 slots that a sequence could ever need. Blocks take only the slots in use.

    >>> fit.contiguous, fit.paged(4096), fit.paged(256), fit.paged(257)
    (5, 5, 91, 86)

    Quantized weights leave more room for the pool.

    >>> from dataclasses import replace
    >>> replace(fit, weight_bits=4).weight_bytes, replace(fit, weight_bits=4).num_blocks
    (3369207808, 2670)
    """

    model: Dimensions
    itemsize: int  # bytes per number in keys, values and weights, unless the last two fields override it
    room: int  # bytes for the weights and the pool together
    block_size: int
    max_model_len: int
    weight_bits: float | None = None  # of a quantized checkpoint
    kv_cache_dtype: str = "auto"

    @property
    def weight_bytes(self) -> int:
        return self._bytes_of(sum(parameters(self.model).values()))

    def _bytes_of(self, num_weights: int) -> int:
        """Return the bytes that `num_weights` weights take, rounded up."""
        return math.ceil(num_weights * (self.weight_bits or 8 * self.itemsize) / 8)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        return kv_bytes_per_token(self.model, self.itemsize, self.kv_cache_dtype)

    @property
    def num_blocks(self) -> int:
        return max(self.room - self.weight_bytes, 0) // self.block_bytes

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def contiguous(self) -> int:
        """The number of sequences that fit if each reserves max_model_len contiguous slots."""
        return self.num_slots // self.max_model_len

    def paged(self, length: int) -> int:
        """Return how many sequences of `length` tokens fit in the blocks: the largest batch."""
        return self.num_blocks // -(-length // self.block_size)

    def step_bytes(self, batch: int, length: int) -> int:
        """Return the bytes that a decode step of `batch` sequences of `length` tokens reads: weights, keys and values.

        An untied embedding does not count, because a step reads only one row of it per token.
        """
        parts = parameters(self.model)
        num_read = sum(parts.values()) - (0 if self.model.tie_word_embeddings else parts["embedding"])
        return self._bytes_of(num_read) + batch * length * self.slot_bytes
