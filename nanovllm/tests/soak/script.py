"""A scripted model that costs next to nothing and notices everything.

The contents of a token's slot depend on the token and on the slot before it, as keys and values do. The next token of a
sequence depends on everything that it reads in its slots. So a block that is lost, overwritten, shared too long, not
copied, not yet loaded or not computed again gives other tokens than generated_alone().
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import torch

from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ...llm import LLM
from ...llm_engine import LLMEngine
from ...requests.tokens import SampledToken, StepOutput
from ...tiers.host_tier import HostTier
from ..testing.sequences import holders

VOCAB_SIZE = 90
PRIME = 16_777_213  # states stay below this, so that float32 represents them exactly
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
OPERATIONS = ("run", "slot", "allocate", "copy", "store", "load")  # operations that can be made to raise


class Injected(RuntimeError):
    """An error that a plan has planted."""


class BrokenRule(BaseException):
    """A broken invariant. No `except Exception` of the engine hides it."""


def must(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenRule(broken)


# The script


def read_on(state: int, token_id: int) -> int:
    """Return the contents of the slot of `token_id`, after a slot with `state`, which is 0 at the start of a text."""
    return (state * 1_000_003 + token_id + 1) % PRIME


def voice(seed: int, sample_index: int, position: int) -> int:
    """Return the noise of a sample at a position.

    One third of the seeds give all samples the same noise, one third until the next multiple of 8, and one third never,
    so samples have much, little or nothing in common.
    """
    alike = (True, position % 8 > 0, False)[seed % 3]
    return crc32(b"%d,%d,%d" % (seed, 0 if alike else sample_index, position))


def next_token(states: bytes, noise: int) -> int:
    """Return the token after a text, given the float32 states of all its tokens."""
    return crc32(states, noise) % VOCAB_SIZE


def generated_alone(prompt: list[int], max_tokens: int, seed: int, sample_index: int) -> list[int]:
    """Return the output of a sample that runs alone with unlimited memory."""
    states, state = array("f"), 0
    for token_id in prompt:
        states.append(state := read_on(state, token_id))
    generated: list[int] = []
    for position in range(len(prompt), len(prompt) + max_tokens):
        generated.append(next_token(states.tobytes(), voice(seed, sample_index, position)))
        states.append(state := read_on(state, generated[-1]))
    return generated


# Faults


@dataclass
class Faults:
    """The planted errors, and the delays of loads."""

    delays: Iterator[int] = field(default_factory=lambda: cycle([0]))  # for each load, how often it is polled in vain
    armed: dict[str, int] = field(default_factory=dict)  # by operation: successes before the fault
    calls: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    poison: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # by sample: the number of tokens at which it raises
    struck: set[tuple[str, int]] = field(
        default_factory=set
    )  # samples that raised alone although they are not poisoned

    def arm(self, operation: str, after: int) -> None:
        self.armed[operation] = after

    def meet(self, operation: str) -> None:
        """Raise Injected if it is this operation's turn."""
        self.calls[operation] += 1
        if operation in self.armed:
            self.armed[operation] -= 1
            if self.armed[operation] < 0:
                del self.armed[operation]
                self.raised[operation] += 1
                raise Injected(operation)

    def guard(self, owner: object, name: str, operation: str) -> None:
        """Let this method of `owner` raise, and do nothing, when it is its turn."""
        method = getattr(owner, name)

        def guarded(*details: Any) -> Any:
            if details[0] != []:  # an empty copy cannot fail
                self.meet(operation)
            return method(*details)

        setattr(owner, name, guarded)


class Script:
    """The methods of a ModelRunner, on the slots of the real pool."""

    def __init__(self, engine: LLMEngine, faults: Faults) -> None:
        engine.kv_cache.blocks.fill_(-1)
        pool = engine.kv_cache.blocks.numpy()  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        self._keys, self._values = pool[:, 0, 0, :, 0, 0], pool[:, -1, -1, :, -1, -1]  # [num_blocks, block_size]
        self._manager, self._faults = engine.kv_cache_manager, faults
        self._block_size = engine.config.block_size
        self.num_steps = self.num_tokens = 0
        self.batch: list[Scheduled] = []  # of the last step

    def run(self, batch: list[Scheduled]) -> StepOutput:
        return StepOutput.of(
            self._sample(seq, read) if len(read) == seq.num_tokens_with_placeholders else None
            for (seq, _), read in zip(batch, self._read_all(batch), strict=True)
        )

    def _sample(self, seq: Sequence, read: numpy.ndarray) -> SampledToken:
        seq.placeholder_id = next_token(read.tobytes(), voice(*seq.sampling_row()[1:]))
        return SampledToken(seq.placeholder_id, -1.0)

    def compute(self, batch: list[Scheduled]) -> torch.Tensor:
        """Return the logits of each sequence's next token, [num_seqs, vocab_size], for a beam search."""
        seeds = [crc32(read.tobytes()) for read in self._read_all(batch)]
        rows = [numpy.random.default_rng(seed).standard_normal(VOCAB_SIZE, numpy.float32) for seed in seeds]
        return torch.from_numpy(numpy.stack(rows))

    def compute_logits(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return logits[rows]

    def _read_all(self, batch: list[Scheduled]) -> list[numpy.ndarray]:
        """Write the next tokens of each sequence, then return all its tokens as read, float32 [num_tokens] each."""
        self.batch = batch
        must(len({id(seq) for seq, _ in batch}) == len(batch) > 0, f"a batch of {batch}")
        self.num_steps += 1
        for seq, num_tokens in batch:
            self._raise_if_due(seq, len(batch))  # after the writes of the sequences before it
            self._write(seq, num_tokens)
        self.num_tokens += sum(num_tokens for _, num_tokens in batch)
        return [self._read(seq, seq.num_launched_tokens + num_tokens) for seq, num_tokens in batch]

    def _raise_if_due(self, seq: Sequence, batch_size: int) -> None:
        sample = seq.request_id, seq.sample_index
        if seq.num_tokens_with_placeholders >= self._faults.poison.get(sample, 10**9):
            self._faults.raised["poison"] += 1
            raise Injected(f"poison in sample {sample}")
        try:
            self._faults.meet("run")
        except Injected:
            if batch_size == 1:  # it ends, and so do the samples that it carries
                self._faults.struck |= {(each.request_id, each.sample_index) for each in [seq, *seq.to_fork]}
            raise

    def _write(self, seq: Sequence, num_tokens: int) -> None:
        start, table, size = seq.num_launched_tokens, seq.block_table, self._block_size
        left = seq.num_uncomputed_tokens
        must(0 < num_tokens <= left, f"{num_tokens} tokens of {seq.num_tokens}, {start} computed")
        must(num_tokens < left or not seq.to_fork, "the last token of a prompt that is to be forked")
        must(seq in holders(self._manager), "it runs and holds nothing")
        state = int(self._keys[table[(start - 1) // size], (start - 1) % size]) if start else 0
        for position, token_id in enumerate(seq.input_ids(num_tokens), start):
            block, offset = table[position // size], position % size
            if offset == 0 or position == start:
                count = self._manager.pool.ref_counts[block]
                must(count == 1, f"it writes to block {block}, which {count} hold")
                must(block not in self._manager.pool.hashes, f"it writes to block {block}, which is cached")
            state = read_on(state, token_id)
            self._keys[block, offset] = self._values[block, offset] = state

    def _read(self, seq: Sequence, num_tokens: int) -> numpy.ndarray:
        table = seq.block_table[: -(-num_tokens // self._block_size)]
        keys, values = (plane[table].ravel()[:num_tokens] for plane in (self._keys, self._values))
        must(keys.tobytes() == values.tobytes(), "keys and values are not of the same text")
        return keys


class LateEvent:
    """A stand-in for a CUDA event: blocks arrive after `delay` polls, or when something waits."""

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


def load_late(tier: HostTier, device_blocks: torch.Tensor, delays: Iterator[int]) -> Callable[..., None]:
    """Return a stand-in for `tier.load`. Until its blocks arrive, nothing may read their targets."""
    load = tier.load

    def late(*details: Any) -> None:
        load(*details)
        copies = tier.loads[-1].copies
        device_blocks[[copy.target for copy in copies]] = -7

        def arrive() -> None:
            for source, target in copies:
                device_blocks[target].copy_(tier.blocks[source])

        tier.loads[-1].event = LateEvent(arrive, next(delays))  # type: ignore[assignment]

    return late


def scripted_llm(folder: Path, faults: Faults, **options: Any) -> tuple[LLM, Script]:
    """Return an LLM with a scripted model. `folder` is a place for config.json: there are no weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "attention_backend": "torch"}
    llm = LLM(str(folder), device="cpu", dtype="float32", **model, **options)
    engine = llm.llm_engine
    script = Script(engine, faults)
    for name in ("run", "compute", "compute_logits"):
        setattr(engine.executor, name, getattr(script, name))
    engine.host_tier.load = load_late(engine.host_tier, engine.kv_cache.blocks, faults.delays)  # type: ignore
    faults.guard(engine.kv_cache_manager, "append_slot", "slot")
    faults.guard(engine.kv_cache_manager, "allocate", "allocate")
    faults.guard(engine.kv_cache, "copy_blocks", "copy")
    faults.guard(engine.host_tier, "load", "load")
    faults.guard(engine.host_tier, "store", "store")
    return llm, script
