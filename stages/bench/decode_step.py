"""A single decode step of any stage, repeated: a batch with some context, and one token of each sequence.

AttentionAlone is the attention of such a step, without the rest of the model.
"""

import copy
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.bench.harness import seconds_of
from stages.bench.engines import new_sequence, part, stage
from stages.bench.models import num_parameters

SHORTEST = 128  # context of the shortest sequence of a mixed batch


class Case(NamedTuple):
    """A batch: its model, its dtype, and its contexts."""

    model: str  # "storyteller": its shape, with random weights and more positions | "135M"
    dtype: str
    batch: int
    context: int  # of each sequence; of the longest one, if they are mixed
    is_mixed: bool = False

    @property
    def key(self) -> str:
        return f"{self.model}_{self.dtype}_{self.batch}_{self.context}" + "_mixed" * self.is_mixed

    @property
    def contexts(self) -> list[int]:
        """The context of each sequence. In a mixed batch, one is long and the others are short, like chats.

        >>> Case("storyteller", "float32", batch=3, context=2000, is_mixed=True).contexts
        [2000, 128, 128]
        """
        others = min(SHORTEST, self.context) if self.is_mixed else self.context
        return [self.context] + [others] * (self.batch - 1)

    @property
    def padding(self) -> float:
        """The share of padding in a batch that is padded to its longest context.

        >>> Case("storyteller", "float32", batch=2, context=256, is_mixed=True).padding
        0.25
        """
        return 1 - sum(self.contexts) / (self.batch * self.context)


class DecodeStep:
    """A stage with a batch in the middle of decoding. A call computes one step and returns its seconds.

    There is no engine: the slots or blocks of each sequence are in a row.
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
            tensor.fill_(0.01)  # untouched memory has no physical pages yet, and reading it is too fast
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
        self.num_bytes = self.num_kv_bytes + num_parameters(config) * dtype.itemsize  # read in each step

    def pool_tensors(self) -> list[Tensor]:
        """Return the memory of the pool."""
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

    def __call__(self) -> float:
        return seconds_of(self.computing(1))

    def computing(self, count: int) -> Callable[[], object]:
        """Return a call that computes the last `count` tokens of each sequence: a prefill, if these are all."""
        for seq in self.seqs:
            seq.num_computed_tokens = seq.num_tokens - count
        return partial(self.runner.run, [(seq, count) for seq in self.seqs])

    def scattered(self) -> "DecodeStep":
        """Return the same batch in the same pool, with its blocks reassigned in random order."""
        other = copy.copy(self)
        other.seqs = [copy.copy(seq) for seq in self.seqs]
        blocks = [block for seq in self.seqs for block in seq.block_table]
        random.Random(0).shuffle(blocks)
        dealt = iter(blocks)
        for seq in other.seqs:
            seq.block_table = list(itertools.islice(dealt, len(seq.block_table)))
        return other


# ---- attention alone


class Recorder:
    """An attention backend that wraps another one and keeps the inputs of the last step."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.step: Any = None
        self.inputs: list[tuple[Tensor, Tensor, Tensor]] = []  # q, k and v of each layer

    def plan(self, step: Any) -> Any:
        """Return the other backend's `attend`, with its inputs recorded."""
        self.step, self.inputs = step, []
        attend = self.attention.plan(step)

        def recorded(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.inputs.append((q, k, v))
            out: Tensor = attend(layer, q, k, v)
            return out

        return recorded


class AttentionAlone:
    """A stage's attention for a batch in the middle of decoding. A call computes the attention of one step."""

    def __init__(self, step: DecodeStep) -> None:
        self._recorder = Recorder(step.attention)
        step.new_runner(self._recorder).run([(seq, 1) for seq in step.seqs])

    @torch.inference_mode()
    def __call__(self) -> None:
        attend = self._recorder.attention.plan(self._recorder.step)
        for layer, (q, k, v) in enumerate(self._recorder.inputs):
            attend(layer, q, k, v)
