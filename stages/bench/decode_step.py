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

from stages.bench.engines import engine_of, new_sequence, stage
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
    """A stage with a batch in the middle of its decoding; a call computes one step and returns its seconds."""

    def __init__(self, name: str, folder: Path, case: Case, **options: Any) -> None:
        """`options` are EngineConfig's."""
        if name == "s1":
            options |= {"reservation": "request"}
        tokens = sum(case.contexts) + case.batch * (32 + options.get("block_size", 0))
        llm = stage(name).LLM(folder, dtype=case.dtype, kv_cache_tokens=tokens, max_num_seqs=case.batch, **options)
        self.engine = engine_of(name, llm)
        params = stage(name).SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self.seqs = [
            new_sequence(name, self.engine, str(i), [1] * context, params) for i, context in enumerate(case.contexts)
        ]
        for seq, context in zip(self.seqs, case.contexts, strict=True):
            self.engine.kv_cache_manager.allocate(seq)
            seq.num_computed_tokens = context - 1
        pool = self.engine.kv_cache
        for tensor in [pool.k, pool.v] if name == "s1" else [pool.blocks]:
            tensor.fill_(0.01)  # memory that was never written is not there yet, and quick to read
        self.num_kv_bytes = sum(case.contexts) * pool.bytes_per_token
        itemsize = getattr(torch, case.dtype).itemsize
        self.num_bytes = self.num_kv_bytes + num_parameters(llm.model_config) * itemsize  # what a step has to read

    def __call__(self) -> float:
        started = time.perf_counter()
        self.engine.model_runner.run([(seq, 1) for seq in self.seqs])
        return time.perf_counter() - started

    def scattered(self, seed: int = 0) -> "DecodeStep":
        """The same batch in the same pool, but its blocks are dealt out again, in random order."""
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
    """Stands before an engine's attention until it is told to leave, and keeps what the last step asked of it."""

    def __init__(self, engine: Any) -> None:
        self.attention = engine.model_runner._attention
        self.step: Any = None
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []  # of each layer: q, k, v
        self._runner = engine.model_runner
        self._runner._attention = self

    def leave(self) -> None:
        """Stand there no longer."""
        self._runner._attention = self.attention

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
        self._recorder = Recorder(step.engine)
        step()
        self._recorder.leave()

    @torch.inference_mode()
    def __call__(self) -> None:
        attend = self._recorder.attention.plan(self._recorder.step)
        for layer, (q, k, v) in enumerate(self._recorder.asked):
            attend(layer, q, k, v)
