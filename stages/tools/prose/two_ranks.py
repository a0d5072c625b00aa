"""Two ranks on paper: what each holds of a model, and what the all-reduces of a step take.

A step reads the weights of the layers and the head, or computes with them, whichever takes longer, and contexts are
short. The time of an all-reduce is NCCL's own estimate for two GPUs in one machine: a latency, and the bytes over the
bandwidth. Small messages have a low latency at a quarter of the bandwidth (its protocol LL), large ones all of it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.tools.prose.markdown import table

Results = dict[str, Any]  # what stages/bench/results.json holds
CONFIG = Path(__file__).resolve().parents[3] / "models" / "storyteller" / "config.json"
MEMORY, ARITHMETIC = 3.35e12, 989e12  # of an H100 (datasheet): bytes per second, and bfloat16 operations per second


class Shape(NamedTuple):
    """The dimensions of a model, and the bytes of a number."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    itemsize: int = 2

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def divided(self) -> int:
        """The bytes of the weights that are divided among the ranks."""
        attention = self.hidden_size * (2 * self.num_attention_heads * self.head_dim + 2 * self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.itemsize * self.num_hidden_layers * (attention + mlp)

    @property
    def head(self) -> int:
        return self.itemsize * self.vocab_size * self.hidden_size

    @property
    def copied(self) -> int:
        """The bytes of the weights that each rank has: the embedding, the norms and the head."""
        norms = self.itemsize * self.hidden_size * (2 * self.num_hidden_layers + 1)
        return self.head * (1 if self.tie_word_embeddings else 2) + norms

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.itemsize * self.num_hidden_layers * self.kv_size

    def held(self, num_ranks: int) -> float:
        """Return the bytes of weights on each rank."""
        return self.copied + self.divided / num_ranks

    def message(self, num_tokens: int) -> int:
        """Return the bytes that an all-reduce adds up."""
        return self.itemsize * num_tokens * self.hidden_size

    @property
    def num_all_reduces(self) -> int:
        return 2 * self.num_hidden_layers

    def step(self, num_tokens: int, num_ranks: int = 1, link: "Link | None" = None) -> float:
        """Return the seconds of a step."""
        weights = self.divided / num_ranks + self.head
        operations = 2 * num_tokens * self.divided / self.itemsize / num_ranks
        waits = self.num_all_reduces * link.all_reduce(self.message(num_tokens)) if link else 0.0
        return max(weights / MEMORY, operations / ARITHMETIC) + waits


class Link(NamedTuple):
    """A connection between two GPUs."""

    bandwidth: float  # bytes per second, in each direction
    small: float  # seconds that a small message takes at least
    large: float  # and a large one

    def all_reduce(self, num_bytes: int) -> float:
        """Return the seconds of an all-reduce between two GPUs, each of which sends and receives this many bytes.

        >>> round(1e6 * NVLINK.all_reduce(8192), 1), round(1e6 * PCIE.all_reduce(8192), 1)
        (7.9, 9.1)
        """
        return min(self.small + 4 * num_bytes / self.bandwidth, self.large + num_bytes / self.bandwidth)


# Datasheets: NVLink of an H100, and 16 lanes of PCIe 5.0. Latencies: a base and two hops, in NCCL's src/graph/tuning.cc
NVLINK = Link(450e9, 6.6e-6 + 2 * 0.6e-6, 8.4e-6 + 2 * 3.4e-6)
PCIE = Link(63e9, 6.6e-6 + 2 * 1.0e-6, 8.4e-6 + 2 * 5.7e-6)
LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = Shape(80, 8192, 28672, 64, 8, 128, 128256)
STEPS = {"1 sequence": 1, "64 sequences": 64, "a prompt of 2,048 tokens": 2048}


def storyteller() -> Shape:
    """Return the shape of the repository's model, in float32."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    return Shape(**{name: config[name] for name in Shape._fields if name in config} | {"itemsize": 4})


def facts() -> dict[str, Any]:
    """Return the numbers of the lesson's answers, for Llama 3.1 8B."""
    shape = LLAMA_8B
    seconds = {name: shape.step(num_tokens) for name, num_tokens in (("token", 1), ("prompt", 2048))}
    return {
        "all_reduces": shape.num_all_reduces,
        "message_bytes": shape.message(1),
        "held_share": shape.held(2) / shape.held(1),
        "copied_share": shape.copied / shape.held(1),
        "kv_share": 1 / 2,
        **{f"{name}_ms": 1e3 * each for name, each in seconds.items()},
        **{f"{name}_nvlink_ms": 1e3 * shape.step(n, 2, NVLINK) for name, n in (("token", 1), ("prompt", 2048))},
        **{f"{name}_pcie_ms": 1e3 * shape.step(n, 2, PCIE) for name, n in (("token", 1), ("prompt", 2048))},
    }


def holds_block(results: Results) -> str:
    """Show what a rank holds."""
    shapes = {
        "storyteller, float32": storyteller(),
        "Llama 3.1 8B, bfloat16": LLAMA_8B,
        "Llama 3.1 70B, bfloat16": LLAMA_70B,
    }
    rows = [
        [
            name,
            show_bytes(shape.held(1)),
            show_bytes(shape.held(2)),
            f"{shape.held(2) / shape.held(1):.0%}",
            f"{shape.bytes_per_token:,}",
            f"{shape.bytes_per_token // 2:,}",
        ]
        for name, shape in shapes.items()
    ]
    columns = ["weights", "on each of two ranks", "share", "bytes of KV cache per token", "on each of two ranks"]
    return table(["model", *columns], rows)


def show_bytes(size: float) -> str:
    """Return a size in a unit of the datasheets.

    >>> show_bytes(27_804_672), show_bytes(16.06e9)
    ('27.8 MB', '16.1 GB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def links_block(results: Results) -> str:
    """Show what the all-reduces of a step take, and the whole step, for Llama 3.1 8B on one H100 and on two."""
    shape, links = LLAMA_8B, (NVLINK, PCIE)
    rows = []
    for name, num_tokens in STEPS.items():
        message = shape.message(num_tokens)
        waits = [f"{1e6 * link.all_reduce(message):.0f} us" for link in links]
        steps = [shape.step(num_tokens), *(shape.step(num_tokens, 2, link) for link in links)]
        rows.append([name, f"{message:,}", *waits, *(f"{1e3 * seconds:.1f} ms" for seconds in steps)])
    columns = ["bytes of an all-reduce", "over NVLink", "over PCIe", "step, one rank", "two, NVLink", "two, PCIe"]
    inputs = (
        f"Llama 3.1 8B in bfloat16, {shape.num_all_reduces} all-reduces a step, on paper. A step reads all weights but "
        f"the embedding ({show_bytes(shape.head)}), of which it needs a row for each token. Inputs: "
        f"{MEMORY / 1e12:g} TB/s of memory and {ARITHMETIC / 1e12:g} TFLOP/s (an H100), "
        f"{NVLINK.bandwidth / 1e9:g} GB/s of NVLink and {PCIE.bandwidth / 1e9:g} GB/s of PCIe 5.0 in each direction "
        f"(datasheets), and NCCL's latencies: {1e6 * NVLINK.small:.1f} and {1e6 * PCIE.small:.1f} us for a small "
        f"message, {1e6 * NVLINK.large:.1f} and {1e6 * PCIE.large:.1f} us for a large one. A small message has a "
        "quarter of the bandwidth, and each is sent in the way that is faster for its size.\n"
    )
    return table(["a step of", *columns], rows) + "\n" + inputs


BLOCKS: dict[str, Callable[[Results], str]] = {"two_ranks_holds": holds_block, "two_ranks_links": links_block}
