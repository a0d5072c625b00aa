"""An LLM of any stage, or the package's, whose model is a script: it costs next to nothing, and notices everything.

What a token leaves in its slot depends on the token and on the slot before it, as keys and values do. The next token of
a sequence depends on all that it then reads in its slots. So a block that is lost, overwritten, shared too long, not
copied, not yet loaded or not computed again gives other tokens than said_alone().

A stage stops at the first error. The package goes on: what it does when a step, a copy or a load raises is tested here.
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

        def guarded(first: Any, *rest: Any) -> Any:
            if first != []:  # no copy cannot fail
                self.meet(operation)
            return method(first, *rest)

        setattr(owner, name, guarded)


class ScriptedRunner:
    """The methods of a ModelRunner, of a stage or of the package, on the slots of the real pool."""

    def __init__(self, llm: Any, token_class: type, faults: Faults) -> None:
        cache, self._manager, self._faults = llm.kv_cache, llm.kv_cache_manager, faults
        self._token_class = token_class
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
        reads = self._reads(batch)
        return [
            self._token_class(next_token(read.tobytes(), voice(*seq.sampling_row()[1:])), -1.0)
            if len(read) == seq.num_tokens
            else None
            for (seq, _), read in zip(batch, reads, strict=True)
        ]

    def compute(self, batch: list[tuple[Any, int]]) -> torch.Tensor:
        """For a beam search: the logits of the next token of each sequence, [num_seqs, vocab_size]."""
        seeds = [crc32(read.tobytes()) for read in self._reads(batch)]
        rows = [numpy.random.default_rng(seed).standard_normal(VOCAB_SIZE, numpy.float32) for seed in seeds]
        return torch.from_numpy(numpy.stack(rows))

    def compute_logits(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """The package's beam search asks for them in a second call."""
        return logits[rows]

    def _reads(self, batch: list[tuple[Any, int]]) -> list[numpy.ndarray]:
        """Write the next tokens of each sequence, then read all tokens of each, float32 [num_tokens] each."""
        self.batch = batch
        must(len({id(seq) for seq, _ in batch}) == len(batch) > 0, f"a batch of {batch}")
        self.num_steps += 1
        for seq, num_tokens in batch:
            self._raise_if_due(seq, len(batch))  # with what the sequences before it have written
            self._write(seq, num_tokens)
        self.num_tokens += sum(num_tokens for _, num_tokens in batch)
        return [self._read(seq, seq.num_computed_tokens + num_tokens) for seq, num_tokens in batch]

    def _raise_if_due(self, seq: Any, batch_size: int) -> None:
        sample = seq.request_id, getattr(seq, "sample_index", 0)
        if seq.num_tokens >= self._faults.poison.get(sample, 10**9):
            self._faults.raised["poison"] += 1
            raise Injected(f"poison in sample {sample}")
        try:
            self._faults.meet("run")
        except Injected:
            if batch_size == 1:  # it ends, and so do the samples that it carries
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
        if pool := getattr(self._manager, "pool", None):
            if hasattr(pool, "ref_counts"):
                must(pool.ref_counts[block] == 1, f"it writes to block {block}, held by {pool.ref_counts[block]}")
            must(block not in getattr(pool, "hashes", ()), f"it writes to block {block}, which is cached")

    def _read(self, seq: Any, num_tokens: int) -> numpy.ndarray:
        table = self._table(seq)[: -(-num_tokens // self._block_size)]
        keys, values = (plane[table].ravel()[:num_tokens] for plane in (self._keys, self._values))
        must(keys.tobytes() == values.tobytes(), "keys and values are not of the same text")
        return keys

    def _table(self, seq: Any) -> list[int]:
        return list(seq.slots) if hasattr(seq, "slots") else seq.block_table


def carried(seq: Any) -> list[Any]:
    """The samples that wait for it to compute their prompt."""
    return getattr(seq, "to_fork", [])


class LateEvent:
    """In place of a CUDA event: blocks come when it has been asked `delay` times, or somebody waits for them."""

    def __init__(self, copy: Callable[[], None], delay: int) -> None:
        self._copy: Callable[[], None] | None = copy
        self._delay = delay

    def query(self) -> bool:
        self._delay -= 1
        if self._delay < 0:
            self.synchronize()
        return self._copy is None

    def synchronize(self) -> None:
        if self._copy is not None:
            self._copy()
        self._copy = None


def load_late(tier: Any, faults: Faults) -> Callable[..., None]:
    """In place of `tier.load`: until its blocks come they hold what nobody may read, and the host's must stay."""
    load = tier.load

    def late(*details: Any) -> None:
        load(*details)
        copies = tier.loads[-1].copies
        tier._device_blocks[[copy.target for copy in copies]] = -7

        def arrive() -> None:
            for source, target in copies:
                tier._device_blocks[target].copy_(tier.blocks[source])

        tier.loads[-1].event = LateEvent(arrive, next(faults.delays))

    return late


@dataclass(frozen=True)
class Stage:
    """A stage by its module's name, and what it can do. The package is one more, the eighth."""

    name: str  # stages.s5_cow_sampling, or nanovllm

    @cached_property
    def number(self) -> int:
        return int(self.name.rpartition(".s")[2].partition("_")[0]) if "." in self.name else 8

    @cached_property
    def module(self) -> ModuleType:
        return importlib.import_module(self.name)

    has_engine = property(lambda self: self.number >= 4)
    has_samples = property(lambda self: self.number >= 5)
    has_prefix_cache = property(lambda self: self.number >= 6)
    has_tiers = property(lambda self: self.number >= 7)
    goes_on = property(lambda self: self.number == 8)  # after an error

    def build(self, folder: Path, faults: Faults, observer: Any = None, **options: Any) -> Any:
        """Its LLM on a script. `folder` is a place for config.json: there are no weights."""
        (folder / "config.json").write_text(json.dumps(CONFIG))
        llm = self._build_package(folder, options) if self.goes_on else self._build_stage(folder, observer, options)
        engine = llm.llm_engine if self.has_engine else llm
        sampler = "nanovllm.backends.torch.sampler" if self.goes_on else f"{self.name}.sampling"
        runner = ScriptedRunner(llm, importlib.import_module(sampler).SampledToken, faults)
        llm.model_runner = runner
        if self.goes_on:  # its executor is a ModelRunner, or there is no beam search
            for name in ("run", "compute", "compute_logits"):
                setattr(engine.executor, name, getattr(runner, name))
        else:
            engine.model_runner = runner
        if self.has_tiers:
            engine.host_tier.load = load_late(engine.host_tier, faults)
        faults.guard(engine.kv_cache_manager, "allocate", "allocate")
        if self.goes_on:
            faults.guard(engine.kv_cache_manager, "append_slot", "slot")
            faults.guard(engine.kv_cache, "copy_blocks", "copy")
            faults.guard(engine.host_tier, "load", "load")
            faults.guard(engine.host_tier, "store", "store")
        return llm

    def _build_stage(self, folder: Path, observer: Any, options: dict[str, Any]) -> Any:
        loader = importlib.import_module(f"{self.name}.{'engine' if self.has_engine else 'llm'}")
        with mock.patch.object(loader, "load_model", lambda *_: None):
            return self.module.LLM(folder, observer=observer, device="cpu", dtype="float32", **options)

    def _build_package(self, folder: Path, options: dict[str, Any]) -> Any:
        more = {"load_format": "dummy", "skip_tokenizer_init": True, "attention_backend": "torch"}
        return self.module.LLM(str(folder), device="cpu", dtype="float32", **more, **options)

    @property
    def operations(self) -> list[str]:
        """What can be made to raise in it."""
        return ["run", "slot", "allocate", "copy", "store", "load"] if self.goes_on else []
