"""EngineConfig: every knob of the engine."""

from dataclasses import dataclass

import torch

from .checks import AT_LEAST_1, SEED, Rule, check_fields
from .flags import knob

POOL_SIZES = ("kv_cache_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization")  # one of them at most
POOL_SIZE: Rule = ("a whole number, at least 1 and below 2**63", lambda size: 1 <= size < 2**63)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RULES: dict[str, Rule] = {
    "max_model_len": AT_LEAST_1,
    "max_num_seqs": AT_LEAST_1,
    "max_num_batched_tokens": AT_LEAST_1,
    "watermark": ("0 or above and below 1", lambda share: 0 <= share < 1),
    "block_size": AT_LEAST_1,
    "kv_offloading_tokens": ("a whole number, 0 or above and below 2**63", lambda size: 0 <= size < 2**63),
    "tile_size": AT_LEAST_1,
    "kv_cache_tokens": POOL_SIZE,
    "kv_cache_memory_bytes": POOL_SIZE,
    "gpu_memory_utilization": ("above 0 and at most 1", lambda share: 0 < share <= 1),
    "seed": SEED,
}


@dataclass(frozen=True)
class EngineConfig:
    model: str = knob("models/storyteller", "checkpoint folder: config.json, *.safetensors, tokenizer.model")
    device: str = knob("cpu", "where the model and the pool are: cpu, cuda, mps")
    dtype: str = knob("auto", "auto is float32 on the CPU, elsewhere the checkpoint's", ("auto", *DTYPES))
    max_model_len: int | None = knob(None, "longest prompt + output, in tokens; default: as the model was trained for")
    max_num_seqs: int = knob(32, "most sequences that run at a time")
    max_num_batched_tokens: int = knob(512, "most tokens in a step: a longer prompt is computed in chunks")
    watermark: float = knob(0.05, "share of the blocks that admitting a sequence beside others leaves free")
    block_size: int = knob(16, "slots in a block of the KV pool")
    enable_prefix_caching: bool = knob(True, "keep computed blocks for prompts that begin alike")
    offload_policy: str = knob("auto", "whether evicted blocks come back from the host", ("auto", "load", "recompute"))
    kv_offloading_tokens: int | None = knob(None, "the host's pool in tokens; 0: none; default: KV pool's, to 4 GiB")
    tile_size: int | None = knob(None, "slots that attention reads at a time; default: 4096 on a CPU, else 16384")
    kv_cache_tokens: int | None = knob(None, "size of the KV pool in tokens (slots)")
    kv_cache_memory_bytes: int | None = knob(None, "size of the KV pool in bytes")
    gpu_memory_utilization: float | None = knob(None, "share of the GPU's memory for weights and pool (0.9 on cuda)")
    seed: int = knob(0, "what requests without a seed of their own draw theirs from")

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be, naming the knob and its value."""
        check_fields(self, RULES)
        given = [name for name in POOL_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"the pool's size was given {len(given)} times: {', '.join(given)}")

    def torch_device(self) -> torch.device:
        """Raises ValueError if this machine does not have the device."""
        try:
            device = torch.device(self.device)
            torch.ones(1, device=device).item()  # "meta" has room, but holds nothing
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ValueError(f"device {self.device!r} is not to be had here: {str(error).splitlines()[0]}") from None
        return device

    def torch_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        return torch.float32 if torch.device(self.device).type == "cpu" else DTYPES.get(checkpoint_dtype, torch.float32)

    def slots_in_a_tile(self) -> int:
        """tile_size. A GPU takes longer to start an operation than to carry it out: there tiles are few and large."""
        return self.tile_size or (4096 if torch.device(self.device).type == "cpu" else 16384)

    def longest_sequence(self, max_position_embeddings: int) -> int:
        """Return max_model_len, or the positions of the model. Raises ValueError if the model has too few."""
        if self.max_model_len is not None and self.max_model_len > max_position_embeddings:
            asked, positions = self.max_model_len, max_position_embeddings
            raise ValueError(f"max_model_len is {asked}, the model has {positions} positions")
        return self.max_model_len or max_position_embeddings
