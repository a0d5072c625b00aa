"""What a model needs of a memory: its parameters, the bytes of its weights, and what is left for keys and values.

Nothing here imports torch: a model is core's ModelConfig, or a Shape of shapes.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .shapes import Shape

if TYPE_CHECKING:
    from ..llama import ModelConfig

Dimensions: TypeAlias = "ModelConfig | Shape"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameters(model: Dimensions) -> dict[str, int]:
    """How many parameters each part has.

    >>> from .shapes import SHAPES
    >>> parts = parameters(SHAPES["llama-2-7b"])
    >>> parts["attention"] == 32 * 4 * 4096**2, parts["MLP"] == 32 * 3 * 4096 * 11008, parts["norms"] == 65 * 4096
    (True, True, True)
    >>> parts["embedding"] == parts["head"] == 32000 * 4096, sum(parts.values())
    (True, 6738415616)
    """
    hidden, inner, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    attention = (2 * q + 2 * kv) * hidden  # q and o, k and v
    biases = model.attention_bias * (q + 2 * kv) + model.attention_output_bias * hidden
    mlp = 3 * hidden * inner + model.mlp_bias * (2 * inner + hidden)  # gate, up and down
    norms = 2 * hidden + model.qk_norm * 2 * model.head_dim
    return {
        "embedding": model.vocab_size * hidden,
        "attention": layers * (attention + biases),
        "MLP": layers * mlp,
        "norms": layers * norms + hidden,
        "head": 0 if model.tie_word_embeddings else model.vocab_size * hidden,
    }


def kv_bytes_per_token(model: Dimensions, itemsize: int) -> int:
    """A key and a value for each KV head of each layer.

    >>> from .shapes import SHAPES
    >>> kv_bytes_per_token(SHAPES["llama-2-7b"], 2), kv_bytes_per_token(SHAPES["llama-3.1-405b"], 2)
    (524288, 516096)
    """
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


@dataclass(frozen=True)
class Fit:
    """A model in a memory: the weights, and a pool of blocks in the rest of what it may take.

    >>> from .shapes import SHAPES
    >>> fit = Fit(SHAPES["llama-2-7b"], itemsize=2, room=24 * 2**30, block_size=16, max_model_len=4096)
    >>> fit.weight_bytes, fit.block_bytes, fit.num_blocks, fit.num_slots
    (13476831232, 8388608, 1465, 23440)

    In one piece a sequence has all slots that it might come to need, 4,096; in blocks it has those that it fills.

    >>> fit.contiguous, fit.paged(4096), fit.paged(256), fit.paged(257)
    (5, 5, 91, 86)
    """

    model: Dimensions
    itemsize: int  # bytes of a weight, a key or a value
    room: int  # bytes for weights and pool
    block_size: int
    max_model_len: int

    @property
    def weight_bytes(self) -> int:
        return sum(parameters(self.model).values()) * self.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_size * kv_bytes_per_token(self.model, self.itemsize)

    @property
    def num_blocks(self) -> int:
        return max(self.room - self.weight_bytes, 0) // self.block_bytes

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def contiguous(self) -> int:
        """How many sequences fit if each reserves max_model_len slots in one piece."""
        return self.num_slots // self.max_model_len

    def paged(self, length: int) -> int:
        """How many sequences of `length` tokens fit in blocks: the biggest batch."""
        return self.num_blocks // -(-length // self.block_size)

    def step_bytes(self, batch: int, length: int) -> int:
        """What a step must read that adds a token to each sequence of a batch: weights, keys and values.

        Of an embedding that is no head it reads a row a token, which is next to nothing.
        """
        parts = parameters(self.model)
        read = sum(parts.values()) - (0 if self.model.tie_word_embeddings else parts["embedding"])
        return read * self.itemsize + batch * length * kv_bytes_per_token(self.model, self.itemsize)
