"""An LLM of any stage whose model is a script: it costs next to nothing, and notices everything.

What a token leaves in its slot depends on the token and on what is in the slot before it, as keys and values do. What
a sequence says next depends on all that it then reads in its slots. So a block that is lost, overwritten, shared too
long, not copied, not yet loaded or not computed again gives other tokens than said_alone().
"""

import importlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from zlib import crc32

import numpy
import torch

VOCAB_SIZE = 90
PRIME = 16_777_213  # the states are below it: float32 has each of them exactly
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


class Injected(RuntimeError):
    """What the script was told to raise."""


class BrokenRule(BaseException):
    """The engine did what it never may. No `except Exception` of the engine hides it."""


def must(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenRule(broken)


# What the script says


def read_on(state: int, token_id: int) -> int:
    """What `token_id` leaves in its slot; `state` is in the slot before, 0 at the beginning of a text."""
    return (state * 1_000_003 + token_id + 1) % PRIME


def voice(seed: int, sample_index: int, position: int) -> int:
    """The noise of a sample at a position. One third of the seeds draw alike for all samples, one third until the
    next multiple of 8, and one third never: samples share much, little or nothing of what they say."""
    alike = (True, position % 8 > 0, False)[seed % 3]
    return crc32(b"%d,%d,%d" % (seed, 0 if alike else sample_index, position))


def next_token(states: bytes, noise: int) -> int:
    """`states`: float32, of all tokens so far."""
    return crc32(states, noise) % VOCAB_SIZE


def said_alone(prompt: list[int], max_tokens: int, seed: int, sample_index: int) -> list[int]:
    """What a sample says if nobody else is there and memory has no end."""
    states, state = array("f"), 0
    for token_id in prompt:
        states.append(state := read_on(state, token_id))
    said: list[int] = []
    for position in range(len(prompt), len(prompt) + max_tokens):
        said.append(next_token(states.tobytes(), voice(seed, sample_index, position)))
        states.append(state := read_on(state, said[-1]))
    return said


# What goes wrong


@dataclass
class Faults:
    """What raises, once each, and how late loads are."""

    delays: Iterator[int] = field(default_factory=lambda: cycle([0]))  # of each load: how often it is asked in vain
    armed: dict[str, int] = field(default_factory=dict)  # by operation: how often it still goes well
    calls: Counter[str] = field(default_factory=Counter)  # of each operation that may raise
    raised: Counter[str] = field(default_factory=Counter)
    poison: dict[tuple[str, int], int] = field(default_factory=dict)  # of a sample: the number of tokens that raises
    struck: set[tuple[str, int]] = field(default_factory=set)  # samples that raised alone though nothing ailed them

    def arm(self, operation: str, after: int) -> None:
        self.armed[operation] = after

    def meet(self, operation: str) -> None:
        """Raises Injected if it is the turn of this one."""
        self.calls[operation] += 1
        if operation in self.armed:
            self.armed[operation] -= 1
            if self.armed[operation] < 0:
                del self.armed[operation]
                self.raised[operation] += 1
                raise Injected(operation)

    def guard(self, owner: object, name: str, operation: str) -> None:
        """From now on this method of `owner` raises, and does nothing, when it is its turn."""
        method = getattr(owner, name)

        def guarded(argument: Any) -> Any:
            if argument:  # no copy cannot fail
                self.meet(operation)
            return method(argument)

        setattr(owner, name, guarded)


class ScriptedRunner:
    """ModelRunner's methods, on the slots of the real pool."""

    def __init__(self, llm: Any, faults: Faults) -> None:
        cache, self._manager, self._faults = llm.kv_cache, llm.kv_cache_manager, faults
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
        self.batch: list[tuple[Any, int]] = []  # of the last step

    def run(self, batch: list[tuple[Any, int]]) -> list[Any]:
        reads, _ = self.compute(batch)
        return [
            self._token_class(next_token(read.tobytes(), voice(*seq.sampling_row()[1:])), -1.0)
            if len(read) == seq.num_tokens
            else None
            for (seq, _), read in zip(batch, reads, strict=True)
        ]

    def compute(self, batch: list[tuple[Any, int]]) -> tuple[list[numpy.ndarray], None]:
        """Write the next tokens of each sequence, then read all tokens of each, float32 [num_tokens] each."""
        self.batch = batch
        must(len({id(seq) for seq, _ in batch}) == len(batch) > 0, f"a batch of {batch}")
        self.num_steps += 1
        for seq, num_tokens in batch:
            self._raise_what_is_due(seq, len(batch))  # with what the sequences before it have written
            self._write(seq, num_tokens)
        self.num_tokens += sum(num_tokens for _, num_tokens in batch)
        return [self._read(seq, seq.num_computed_tokens + num_tokens) for seq, num_tokens in batch], None

    def compute_logits(self, reads: list[numpy.ndarray], step: None, seqs: list[int]) -> torch.Tensor:
        """Of the token after each of these texts: [len(seqs), vocab_size]"""
        seeds = [crc32(reads[i].tobytes()) for i in seqs]
        rows = [numpy.random.default_rng(seed).standard_normal(VOCAB_SIZE, numpy.float32) for seed in seeds]
        return torch.from_numpy(numpy.stack(rows))

    def _raise_what_is_due(self, seq: Any, batch_size: int) -> None:
        sample = seq.request_id, getattr(seq, "sample_index", 0)
        if seq.num_tokens >= self._faults.poison.get(sample, 10**9):
            self._faults.raised["poison"] += 1
            raise Injected(f"poison in sample {sample}")
        try:
            self._faults.meet("run")
        except Injected:
            if batch_size == 1:  # it ends, and whoever it carries
                self._faults.struck |= {sample, *((o.request_id, o.sample_index) for o in carried(seq))}
            raise

    def _write(self, seq: Any, num_tokens: int) -> None:
        start, table, size = seq.num_computed_tokens, self._table(seq), self._block_size
        must(0 < num_tokens <= seq.num_tokens - start, f"{num_tokens} tokens of {seq.num_tokens}, {start} computed")
        must(num_tokens < seq.num_tokens - start or not carried(seq), "the last token of a prompt that is to be forked")
        must(seq in self._manager._holders, "it runs and holds nothing")
        state = int(self._keys[table[(start - 1) // size], (start - 1) % size]) if start else 0
        for position in range(start, start + num_tokens):
            block, offset = table[position // size], position % size
            if offset == 0 or position == start:
                self._check_may_write(block)
            state = read_on(state, seq.token_ids[position])
            self._keys[block, offset] = self._values[block, offset] = state

    def _check_may_write(self, block: int) -> None:
        if pool := getattr(self._manager, "_pool", None):
            if hasattr(pool, "ref_counts"):
                must(pool.ref_counts[block] == 1, f"it writes to block {block}, held by {pool.ref_counts[block]}")
            must(block not in getattr(pool, "_hashes", ()), f"it writes to block {block}, which is cached")

    def _read(self, seq: Any, num_tokens: int) -> numpy.ndarray:
        table = self._table(seq)[: -(-num_tokens // self._block_size)]
        keys, values = (plane[table].ravel()[:num_tokens] for plane in (self._keys, self._values))
        must(keys.tobytes() == values.tobytes(), "keys and values are not of the same text")
        return keys

    def _table(self, seq: Any) -> list[int]:
        return list(range(seq.slots.start, seq.slots.end)) if hasattr(seq, "slots") else seq.block_table


def carried(seq: Any) -> list[Any]:
    """The samples that wait for it to compute their prompt."""
    return getattr(seq, "to_fork", [])


class LateLoad:
    """Blocks on their way: they come when it has been asked `delay` times, or somebody waits. Until then they hold
    what nobody may read, and what is on the host must stay."""

    def __init__(self, host: Any, copies: list[Any], delay: int) -> None:
        self.sources, self.targets = [copy.source for copy in copies], {copy.target for copy in copies}
        self._host, self._copies, self._delay = host, copies, delay
        host._device_blocks[[copy.target for copy in copies]] = -7

    def has_arrived(self) -> bool:
        self._delay -= 1
        if self._delay < 0:
            self.wait()
        return not self._copies

    def wait(self) -> None:
        for source, target in self._copies:
            self._host._device_blocks[target].copy_(self._host.blocks[source])
        self._copies = []


def load_late(host: Any, faults: Faults) -> Callable[[list[Any]], LateLoad]:
    """In place of `host.load`."""

    def load(copies: list[Any]) -> LateLoad:
        host.num_blocks_loaded += len(copies)
        return LateLoad(host, copies, next(faults.delays))

    return load


@dataclass(frozen=True)
class Stage:
    """A stage by its module's name, and what it can do."""

    name: str  # stages.s5_cow_sampling

    @cached_property
    def number(self) -> int:
        return int(self.name.rpartition(".s")[2].partition("_")[0])

    @cached_property
    def module(self) -> ModuleType:
        return importlib.import_module(self.name)

    has_engine = property(lambda self: self.number >= 4)
    has_samples = property(lambda self: self.number >= 5)
    has_prefix_cache = property(lambda self: self.number >= 6)
    has_tiers = property(lambda self: self.number >= 7)

    def build(self, folder: Path, faults: Faults, **options: Any) -> Any:
        """Its LLM on a script. `folder` is a place for config.json: there are no weights."""
        (folder / "config.json").write_text(json.dumps(CONFIG))
        loader = importlib.import_module(f"{self.name}.{'engine' if self.has_engine else 'llm'}")
        with mock.patch.object(loader, "load_model", lambda *_: None):
            llm = self.module.LLM(folder, device="cpu", dtype="float32", **options)
        llm.model_runner = ScriptedRunner(llm, faults)
        faults.guard(llm.kv_cache_manager, "append_slot", "slot")
        if self.has_engine:
            llm.llm_engine.model_runner = llm.model_runner
            faults.guard(llm.kv_cache_manager, "allocate", "allocate")
        if self.has_samples:
            faults.guard(llm.kv_cache, "copy_blocks", "copy")
        if self.has_tiers:
            host = llm.llm_engine.host_kv_cache
            host.load = load_late(host, faults)
            faults.guard(host, "load", "load")
            faults.guard(host, "store", "store")
        return llm

    @property
    def operations(self) -> list[str]:
        """What can be made to raise in it."""
        later = [("allocate", self.has_engine), ("copy", self.has_samples)]
        later += [("store", self.has_tiers), ("load", self.has_tiers)]
        return ["run", "slot", *(operation for operation, is_there in later if is_there)]
