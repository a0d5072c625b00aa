"""An LLM of any stage with a scripted model: it is fast, and its output depends on every slot.

The value that a token writes to its slot depends on the token and on the value in the slot before, like keys and values
do. The next token depends on all slots of the sequence. So a block that is lost, overwritten, shared too long, not
copied, not yet loaded or not recomputed changes the tokens that tokens_alone() predicts.
"""

import importlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from zlib import crc32

import numpy
import torch

from nanovllm.tests.testing.sequences import holders
from tests.helpers import ROOT, find_bases

VOCAB_SIZE = 90
PRIME = 16_777_213  # slot values are below it, so float32 represents each of them exactly
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


class InjectedError(RuntimeError):
    """An error that a test injects."""


class BrokenRule(BaseException):
    """The engine broke a rule. It is a BaseException, so no `except Exception` hides it."""


def must(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenRule(broken)


# The script


def next_state(state: int, token_id: int) -> int:
    """Return the value that `token_id` writes to its slot. `state` is the value in the slot before, or 0."""
    return (state * 1_000_003 + token_id + 1) % PRIME


def noise_at(seed: int, sample_index: int, position: int) -> int:
    """Return the noise of a sample at a position.

    A third of the seeds give all samples of a request the same noise, another third only up to the next multiple of 8,
    and the rest never.
    """
    is_shared = (True, position % 8 > 0, False)[seed % 3]
    return crc32(b"%d,%d,%d" % (seed, 0 if is_shared else sample_index, position))


def next_token(states: bytes, noise: int) -> int:
    """Return the token that follows. `states` are the float32 slot values of all tokens so far."""
    return crc32(states, noise) % VOCAB_SIZE


def tokens_alone(prompt: list[int], max_tokens: int, seed: int, sample_index: int) -> list[int]:
    """Return the output of a sample that runs alone with unlimited memory."""
    states, state = array("f"), 0
    for token_id in prompt:
        states.append(state := next_state(state, token_id))
    output: list[int] = []
    for position in range(len(prompt), len(prompt) + max_tokens):
        output.append(next_token(states.tobytes(), noise_at(seed, sample_index, position)))
        states.append(state := next_state(state, output[-1]))
    return output


# The model


class ScriptedRunner:
    """A ModelRunner that runs the script on the slots of the real pool."""

    def __init__(self, llm: Any) -> None:
        cache, self._manager = llm.kv_cache, llm.kv_cache_manager
        self._token_class = importlib.import_module(f"{type(llm).__module__.rpartition('.')[0]}.sampling").SampledToken
        for pool in [cache.blocks] if hasattr(cache, "blocks") else [cache.k, cache.v]:
            pool.fill_(-1)
        if hasattr(cache, "blocks"):  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
            pool = cache.blocks.numpy()
            self._keys, self._values = pool[:, 0, 0, :, 0, 0], pool[:, -1, -1, :, -1, -1]  # [num_blocks, block_size]
        else:  # stage 1: every slot is a block of one, [num_slots, 1]
            self._keys, self._values = cache.k.numpy()[0, :, 0, :1], cache.v.numpy()[-1, :, -1, -1:]
        self._block_size = self._keys.shape[1]
        self.num_steps = self.num_tokens = 0
        self.raises_after: int | None = None  # the number of steps before one raises
        self.num_raised = 0
        self.batch: list[tuple[Any, int]] = []  # the last step's

    def run(self, batch: list[tuple[Any, int]]) -> list[Any]:
        return [
            self._token_class(next_token(read.tobytes(), noise_at(*seq.sampling_row()[1:])), -1.0)
            if len(read) == seq.num_tokens
            else None
            for (seq, _), read in zip(batch, self._compute(batch), strict=True)
        ]

    def compute_logits(self, batch: list[tuple[Any, int]]) -> torch.Tensor:
        """Return the logits after each text, [num_seqs, vocab_size]."""
        seeds = [crc32(read.tobytes()) for read in self._compute(batch)]
        rows = [numpy.random.default_rng(seed).standard_normal(VOCAB_SIZE, numpy.float32) for seed in seeds]
        return torch.from_numpy(numpy.stack(rows))

    def _compute(self, batch: list[tuple[Any, int]]) -> list[numpy.ndarray]:
        """Write the next tokens of each sequence, and then read all its tokens: float32 [num_tokens] per sequence."""
        self.batch = batch
        must(len({id(seq) for seq, _ in batch}) == len(batch) > 0, f"a batch of {batch}")
        self.num_steps += 1
        for i, (seq, num_tokens) in enumerate(batch):
            if i == len(batch) - 1:
                self._raise_if_due()  # after the other sequences have written
            self._write(seq, num_tokens)
        self.num_tokens += sum(num_tokens for _, num_tokens in batch)
        return [self._read(seq, seq.num_computed_tokens + num_tokens) for seq, num_tokens in batch]

    def _raise_if_due(self) -> None:
        if self.raises_after is not None:
            self.raises_after -= 1
            if self.raises_after < 0:
                self.raises_after = None
                self.num_raised += 1
                raise InjectedError("a step of the model")

    def _write(self, seq: Any, num_tokens: int) -> None:
        start, table, size = seq.num_computed_tokens, table_of(seq), self._block_size
        must(0 < num_tokens <= seq.num_tokens - start, f"{num_tokens} tokens of {seq.num_tokens}, {start} computed")
        must(
            num_tokens < seq.num_tokens - start or not waiting_samples(seq),
            "samples still wait for the last token of this prompt",
        )
        must(seq in holders(self._manager), "a running sequence holds no slots")
        state = int(self._keys[table[(start - 1) // size], (start - 1) % size]) if start else 0
        for position in range(start, start + num_tokens):
            block, offset = table[position // size], position % size
            if offset == 0 or position == start:
                self._check_may_write(block)
            state = next_state(state, seq.token_ids[position])
            self._keys[block, offset] = self._values[block, offset] = state

    def _check_may_write(self, block: int) -> None:
        if pool := getattr(self._manager, "pool", None):
            if hasattr(pool, "ref_counts"):
                must(pool.ref_counts[block] == 1, f"block {block} is written, but has {pool.ref_counts[block]} holders")
            must(block not in getattr(pool, "hashes", ()), f"block {block} is written, but is cached")

    def _read(self, seq: Any, num_tokens: int) -> numpy.ndarray:
        table = table_of(seq)[: -(-num_tokens // self._block_size)]
        keys, values = (plane[table].ravel()[:num_tokens] for plane in (self._keys, self._values))
        must(keys.tobytes() == values.tobytes(), "keys and values belong to different texts")
        return keys


def table_of(seq: Any) -> list[int]:
    """Return the blocks of a sequence in order, or its slots in stage 1."""
    return list(seq.slots) if hasattr(seq, "slots") else seq.block_table


def waiting_samples(seq: Any) -> list[Any]:
    """Return the samples that wait for `seq` to compute their prompt."""
    return getattr(seq, "to_fork", [])


class DelayedLoad:
    """The event of a load that arrives after `delay` queries, or when the engine waits for it.

    Until then, no sequence may read its targets, and its sources on the host must not change.
    """

    def __init__(self, device: torch.Tensor, host: torch.Tensor, copies: list[Any], delay: int) -> None:
        self._device, self._host, self._copies, self._delay = device, host, copies, delay
        device[[copy.target for copy in copies]] = -7

    def query(self) -> bool:
        self._delay -= 1
        if self._delay < 0:
            self.synchronize()
        return not self._copies

    def synchronize(self) -> None:
        for source, target in self._copies:
            self._device[target].copy_(self._host[source])
        self._copies = []


def delayed_load(tier: Any, device: torch.Tensor, delays: Iterator[int]) -> Callable[[list[Any]], None]:
    """Return a replacement for `tier.load`. `device` is KVCache.blocks."""
    make = importlib.import_module(type(tier).__module__).Load

    def load(copies: list[Any]) -> None:
        tier.loads.append(make(copies, DelayedLoad(device, tier.blocks, copies, next(delays))))
        tier.num_blocks_loaded += len(copies)

    return load


# The stages


@dataclass(frozen=True)
class Stage:
    """A stage or a branch, by its module's name, and its features."""

    name: str  # stages.s5_cow_sampling, stages.more_beams

    @property
    def key(self) -> str:
        """The short name: s5, more_beams."""
        name = self.name.rpartition(".")[2]
        return name if name.startswith("more_") else name.partition("_")[0]

    @cached_property
    def number(self) -> int:
        """The number of the stage, or of a branch's base."""
        stage = find_bases(ROOT).get(self.name, self.name)
        return int(stage.rpartition(".s")[2].partition("_")[0])

    @cached_property
    def module(self) -> ModuleType:
        return importlib.import_module(self.name)

    def part(self, name: str) -> ModuleType:
        """Return a module of the stage."""
        return importlib.import_module(f"{self.name}.{name}")

    has_engine = property(lambda self: self.number >= 4)
    has_samples = property(lambda self: self.number >= 5)
    has_beams = property(lambda self: hasattr(self.module, "BeamSearchParams"))
    has_prefix_cache = property(lambda self: self.number >= 6)
    has_tiers = property(lambda self: self.number >= 7)

    def counter(self) -> Any:
        """Return an observer that counts the stage's events by kind in `counts`."""

        class Counting(self.part("observer").Observer):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.counts = Counter[str]()

            def tell(self, kind: str, *details: Any) -> None:
                self.counts[kind] += 1

        return Counting()

    def build(self, folder: Path, observer: Any, delays: Iterable[int] = (0,), **options: Any) -> Any:
        """Return the stage's LLM with a scripted model. `folder` gets a config.json, but no weights.

        `delays` has, for each load in turn, the number of queries before it arrives.
        """
        (folder / "config.json").write_text(json.dumps(CONFIG))
        with mock.patch.object(self.part("engine" if self.has_engine else "llm"), "load_model", lambda *_: None):
            llm = self.module.LLM(folder, observer, device="cpu", dtype="float32", **options)
        llm.model_runner = ScriptedRunner(llm)
        if self.has_engine:
            llm.llm_engine.model_runner = llm.model_runner
        if self.has_tiers:
            tier = llm.llm_engine.host_tier
            tier.load = delayed_load(tier, llm.kv_cache.blocks, cycle(delays))
        return llm
