"""One decode step of any stage: a batch with some context, and one token of each sequence.

DecodeStep repeats it, AttentionAlone repeats its attention without the rest of the model, and measure() fills the
decode table: stages 1 to 3 against each other, in turns, in the cases that lessons and claims speak of. A mixed batch
has one long context and many short ones: stage 3 pads all of them to the longest, a tile at a time.
"""

import copy
import gc
import itertools
import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.bench.harness import Rounds, Scores, ratios, seconds_of, with_spreads
from stages.bench.engines import new_sequence, part, stage
from stages.bench.models import model_135m, num_parameters, storyteller_of
from stages.bench.steady import until_steady

SHORTEST = 128  # context of the shortest sequence of a mixed batch
ATTENTION = {"s1": "ContiguousAttention", "s2": "GatherAttention"}  # later stages have PagedAttention


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
        tile_size = () if name in ATTENTION else (stage(name).EngineConfig.tile_size,)
        attention = getattr(part(name, "attention"), ATTENTION.get(name, "PagedAttention"))
        self.attention = attention(self.kv_cache, *tile_size)
        self.runner = self.new_runner(self.attention)
        inputs = part(name, "input_processor").InputProcessor(config, None, config.max_position_embeddings, seed=0)
        params = stage(name).SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self.seqs = list[Any]()
        for context, end, size in zip(case.contexts, itertools.accumulate(sizes), sizes, strict=True):
            seq = new_sequence(name, inputs, str(len(self.seqs)), [1] * context, params)
            assert not seq.finished, seq.error
            seq.num_computed_tokens = seq.num_tokens - 1
            slots = range(end - size, end)
            if name == "s1":
                seq.slots = slots
            else:
                seq.block_table = list(slots)
            self.seqs.append(seq)
        self.num_kv_bytes = sum(case.contexts) * self.kv_cache.bytes_per_token
        self.num_bytes = self.num_kv_bytes + num_parameters(config) * dtype.itemsize  # read in each step

    def pool_tensors(self) -> list[Tensor]:
        """Return the memory of the pool."""
        return [self.kv_cache.k, self.kv_cache.v] if self._name == "s1" else [self.kv_cache.blocks]

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


# ---- the decode table

LONGEST = 4096
STAGES = ("s1", "s2", "s3")
TURNS = 20, 80  # of a case, at least and at most
SHAPES = [*((batch, SHORTEST) for batch in (1, 8, 32)), (1, 1000), (8, 512), (16, 4000)]
CASES = [
    *(Case("storyteller", "float32", *shape) for shape in SHAPES),
    Case("storyteller", "float32", 16, 4000, is_mixed=True),
    Case("135M", "bfloat16", 1, SHORTEST),
]


def measure(args: Namespace) -> dict[str, Any]:
    """Measure all cases. About a minute."""
    folders = {"storyteller": storyteller_of(LONGEST), "135M": model_135m()}
    cases = {case.key: measure_case(case, folders[case.model], STAGES) for case in tqdm(CASES, "decode steps")}
    return {"decode": {"cases": cases}}


def measure_case(
    case: Case, folder: Path, names: Sequence[str], device: str = "cpu", turns: tuple[int, int] = TURNS
) -> dict[str, Any]:
    """Return each stage's milliseconds per step, and how many times as fast the later stage of each pair is."""
    gc.collect()  # frees the previous case, whose parts refer to each other
    steps = {name: DecodeStep(name, folder, case, device=device) for name in names}
    pairs = {f"{b}_over_{a}": (a, b) for a, b in itertools.combinations(names, 2)}

    def speeds(rounds: Rounds[str]) -> Scores:
        return ratios(rounds, pairs)

    rounds, num_turns = until_steady(steps, speeds, least=turns[0], most=turns[1], warm_ups=2)
    result = {**case._asdict(), "turns": num_turns, **speeds(rounds)}
    result |= with_spreads([{f"{name}_ms": 1000 * each[name] for name in names} for each in rounds])
    if device.startswith("cuda"):
        result |= {f"{name}_extra_bytes": extra_bytes(step, device) for name, step in steps.items()}
    return result


def extra_bytes(step: DecodeStep, device: str) -> int:
    """Return the most memory that a step uses besides weights and pool, on a CUDA device."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before
