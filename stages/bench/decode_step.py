"""One decode step of any stage, measured alone: a batch with some context, one token of each sequence, again and again.
And the attention of such a step without the rest of the model.
"""

import copy
import itertools
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.bench.engines import new_sequence, part, stage
from stages.bench.models import num_parameters

SHORTEST = 128  # context of the shortest sequence of a mixed batch


class Case(NamedTuple):
    model: str  # "storyteller": its shape, with random weights and more positions | "135M"
    dtype: str
    batch: int
    context: int  # of each sequence; of the longest, if they are mixed
    is_mixed: bool = False

    @property
    def key(self) -> str:
        return f"{self.model}_{self.dtype}_{self.batch}_{self.context}" + "_mixed" * self.is_mixed

    @property
    def contexts(self) -> list[int]:
        """A mixed batch has one long context, and the others are short: as when a long text is served among chats.

        >>> Case("storyteller", "float32", batch=3, context=2000, is_mixed=True).contexts
        [2000, 128, 128]
        """
        others = min(SHORTEST, self.context) if self.is_mixed else self.context
        return [self.context] + [others] * (self.batch - 1)

    @property
    def padding(self) -> float:
        """The share of a batch padded to its longest context that is padding.

        >>> Case("storyteller", "float32", batch=2, context=256, is_mixed=True).padding
        0.25
        """
        return 1 - sum(self.contexts) / (self.batch * self.context)


class DecodeStep:
    """A stage with a batch in the middle of its decoding; a call computes one step and returns its seconds.

    There is no engine: each sequence has its slots, or its blocks, in a row.
    """

    def __init__(self, name: str, folder: Path, case: Case, block_size: int = 16, device: str = "cpu") -> None:
        self._name, self._device = name, torch.device(device)
        self._block_size = 1 if name == "s1" else block_size
        dtype, llama = getattr(torch, case.dtype), part(name, "llama")
        config = llama.ModelConfig.from_folder(folder)
        self._model = llama.load_model(folder, config, dtype, self._device)
        sizes = [-(-context // self._block_size) for context in case.contexts]  # in blocks; in stage 1 in slots
        shape = (sum(sizes),) if name == "s1" else (sum(sizes), block_size)
        self.kv_cache = part(name, "kv_cache").KVCache(config, *shape, dtype, self._device)
        for tensor in self.pool_tensors():
            tensor.fill_(0.01)  # memory that was never written does not exist yet, and is quick to read
        self.attention = self._new_attention()
        self.runner = self.new_runner(self.attention)
        inputs = part(name, "input_processor").InputProcessor(config, None, config.max_position_embeddings, seed=0)
        params = stage(name).SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self.seqs = [
            new_sequence(name, inputs, str(i), [1] * context, params) for i, context in enumerate(case.contexts)
        ]
        for seq, end, size in zip(self.seqs, itertools.accumulate(sizes), sizes, strict=True):
            assert not seq.finished, seq.error
            seq.num_computed_tokens = seq.num_tokens - 1
            if name == "s1":
                seq.slots = range(end - size, end)
            else:
                seq.block_table = list(range(end - size, end))
        self.num_kv_bytes = sum(case.contexts) * self.kv_cache.bytes_per_token
        self.num_bytes = self.num_kv_bytes + num_parameters(config) * dtype.itemsize  # a step reads as many

    def pool_tensors(self) -> list[Tensor]:
        return [self.kv_cache.k, self.kv_cache.v] if self._name == "s1" else [self.kv_cache.blocks]

    def _new_attention(self) -> Any:
        attention = part(self._name, "attention")
        if self._name == "s1":
            return attention.ContiguousAttention(self.kv_cache)
        if self._name == "s2":
            return attention.GatherAttention(self.kv_cache)
        return attention.PagedAttention(self.kv_cache, stage(self._name).EngineConfig.tile_size)

    def new_runner(self, attention: Any) -> Any:
        """Return a ModelRunner of this model that attends with `attention`."""
        sizes = () if self._name == "s1" else (self._block_size,)
        return part(self._name, "model_runner").ModelRunner(self._model, attention, *sizes, self._device)

    @property
    def batch(self) -> list[tuple[Any, int]]:
        return [(seq, 1) for seq in self.seqs]

    def __call__(self) -> float:
        started = time.perf_counter()
        self.runner.run(self.batch)
        return time.perf_counter() - started

    def scattered(self, seed: int = 0) -> "DecodeStep":
        """Return the same batch in the same pool, but with its blocks dealt out again, in random order."""
        other = copy.copy(self)
        other.seqs = [copy.copy(seq) for seq in self.seqs]
        blocks = [block for seq in self.seqs for block in seq.block_table]
        random.Random(seed).shuffle(blocks)
        dealt = iter(blocks)
        for seq in other.seqs:
            seq.block_table = list(itertools.islice(dealt, len(seq.block_table)))
        return other


class Reading:
    """A tensor that no private cache holds; a call reads it once and returns the seconds."""

    def __init__(self, num_bytes: int = 2**28) -> None:
        self._numbers = torch.ones(num_bytes // 4)
        self.num_bytes = num_bytes

    def __call__(self) -> float:
        started = time.perf_counter()
        self._numbers.sum()
        return time.perf_counter() - started


# ---- attention alone


class Recorder:
    """An attention backend in front of another one. It keeps what the last step asked of it."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.step: Any = None
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []  # of each layer: q, k, v

    def plan(self, step: Any) -> Any:
        self.step, self.asked = step, []
        attend = self.attention.plan(step)

        def recorded(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.asked.append((q, k, v))
            return attend(layer, q, k, v)

        return recorded


class AttentionAlone:
    """A stage's attention for a batch in the middle of its decoding; a call does that part of one step."""

    def __init__(self, step: DecodeStep) -> None:
        self._recorder = Recorder(step.attention)
        step.new_runner(self._recorder).run(step.batch)

    @torch.inference_mode()
    def __call__(self) -> None:
        attend = self._recorder.attention.plan(self._recorder.step)
        for layer, (q, k, v) in enumerate(self._recorder.asked):
            attend(layer, q, k, v)
