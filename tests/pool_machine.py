"""A state machine of BlockManager in any stage: sequences arrive, compute, fork, grow and leave, in any order.

Slots keep what each sequence computes, so a missing or wrong copy, or a hit of another text, shows in what a sequence
reads. A model keeps the blocks of each sequence a second time, as plain lists.
"""

from collections import Counter
from typing import Any

import numpy
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scripted_llm import Stage, next_state

MAX_MODEL_LEN = 24
BLOCK_SIZES = [1, 2, 3, 4, 8, 32]
TOKENS = st.integers(0, 1)  # only two, so that many texts share a prefix


def is_running(machine: "PoolMachine") -> bool:
    return bool(machine.running)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.SamplingParams, self.SampledToken = stage.module.SamplingParams, stage.part("sampling").SampledToken
        self.config = stage.part("llama").ModelConfig(9, 2, 2, 1, 1, 1, 2)
        self.inputs = stage.part("input_processor").InputProcessor(self.config, None, MAX_MODEL_LEN, seed=0)

    @initialize(num_blocks=st.integers(1, 20), block_size=st.sampled_from(BLOCK_SIZES), is_caching=st.booleans())
    def make(self, num_blocks: int, block_size: int, is_caching: bool) -> None:
        self.start(num_blocks, block_size, is_caching)
        self.slots = numpy.full((num_blocks, block_size), -1.0)

    def start(self, num_blocks: int, block_size: int, is_caching: bool, tier: Any = None) -> None:
        self.block_size, self.is_caching = block_size, is_caching and self.stage.has_prefix_cache
        options = {"enable_caching": is_caching} if self.stage.has_prefix_cache else {}
        if self.stage.has_tiers:
            options["tier"] = tier or self.empty_tier(block_size)
        self.observer = self.stage.counter()
        make = self.stage.part("block_manager").BlockManager
        self.manager = make(num_blocks, block_size, observer=self.observer, **options)
        self.held: dict[Any, list[int]] = {}  # the model: the blocks of each sequence
        self.running: list[Any] = []
        self.num_requests = 0

    # The engine's operations

    @rule(token_ids=st.lists(TOKENS, min_size=1, max_size=MAX_MODEL_LEN - 1), max_tokens=st.integers(1, MAX_MODEL_LEN))
    def arrive(self, token_ids: list[int], max_tokens: int) -> None:
        self.allocate(self.request(token_ids, max_tokens))

    @precondition(is_running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute_a_chunk(self, data: st.DataObject, num_tokens: int) -> None:
        seq = data.draw(st.sampled_from(self.running))
        if seq.num_uncomputed_tokens > 1 and self.is_ready(seq):
            self.compute(seq, min(num_tokens, seq.num_uncomputed_tokens - 1))

    @precondition(is_running)
    @rule(data=st.data(), token_id=TOKENS)
    def decode(self, data: st.DataObject, token_id: int) -> None:
        """Compute a sequence's last token and append another one. A finished sequence leaves."""
        seq = data.draw(st.sampled_from(self.running))
        if not self.is_ready(seq) or not self.append_slot(seq):
            return
        self.compute(seq, seq.num_uncomputed_tokens)
        seq.append_token(self.SampledToken(token_id, 0.0))
        if seq.finished:
            self.leave(seq)

    @precondition(lambda self: self.running and self.stage.has_samples)
    @rule(data=st.data(), token_id=TOKENS)
    def fork(self, data: st.DataObject, token_id: int) -> None:
        """Fork a sequence: the child shares its computed tokens, and goes on with its own."""
        parent = data.draw(st.sampled_from(self.running))
        if parent.num_uncomputed_tokens > 1 or not self.is_ready(parent):
            return
        child = self.request([*parent.token_ids[:-1], token_id], 9)
        self.manager.fork(parent, child)
        num_shared = -(-parent.num_computed_tokens // self.block_size)
        self.held[child] = self.held[parent][:num_shared]
        self.running.append(child)
        assert child.num_computed_tokens == parent.num_computed_tokens

    @precondition(is_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Preempt a sequence and admit it again. With a cache, it must find its cached blocks."""
        seq = data.draw(st.sampled_from(self.running))
        num_cached = self.num_cached(seq)
        self.leave(seq)
        seq.num_computed_tokens = 0
        if self.allocate(seq):
            assert seq.num_computed_tokens == num_cached * self.block_size, "a text is lost"

    @precondition(is_running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.running)))

    # The operations with their expected effects

    def allocate(self, seq: Any) -> bool:
        num_blocks, holders = -(-seq.num_tokens // self.block_size), self.holders()
        hits = [self.manager.find_hits(seq)] if self.stage.has_prefix_cache else []
        if not self.has_room(seq, num_blocks, hits):
            return False
        self.manager.allocate(seq, *hits)
        assert len(set(seq.block_table)) == len(seq.block_table) == num_blocks
        assert seq.num_computed_tokens % self.block_size == 0 and seq.num_computed_tokens < seq.num_tokens
        fresh = seq.block_table[seq.num_computed_tokens // self.block_size :]
        assert not holders.keys() & set(fresh), "another sequence holds a block that this one will write to"
        self.held[seq] = list(seq.block_table)
        self.running.append(seq)
        return True

    def has_room(self, seq: Any, num_blocks: int, hits: list[Any]) -> bool:
        """Return True if the manager can allocate. Up to stage 3 it promises blocks for a sequence's full length."""
        if not self.stage.has_engine:
            promised = sum(-(-other.max_num_tokens // self.block_size) for other in self.running)
            is_promised = promised - (-seq.max_num_tokens // self.block_size) <= self.manager.num_blocks
            assert self.manager.can_promise(seq) == is_promised
            return is_promised
        held = self.holders().keys() | self.arriving()
        needed = num_blocks - sum(block in held for blocks in hits for block in blocks)  # None is a hit on the host
        assert self.manager.num_needed(seq, *hits) == needed
        return needed <= self.num_free()

    def num_free(self) -> int:
        return len(self.manager.pool.free)

    def num_full(self, seq: Any) -> int:
        return seq.num_computed_tokens // self.block_size

    def num_cached(self, seq: Any) -> int:
        """Return the number of its blocks in the index.

        Its own blocks are not indexed if another sequence had computed the same text before; that one's block may have
        been evicted since.
        """
        return len(self.manager.find_hits(seq)) if self.stage.has_prefix_cache else 0

    def is_ready(self, seq: Any) -> bool:
        return True

    def append_slot(self, seq: Any) -> bool:
        """Append a slot. Return False if no block is free."""
        mine, holders = self.held[seq], self.holders()
        is_new = seq.num_tokens > len(mine) * self.block_size
        is_shared = not is_new and seq.num_uncomputed_tokens == 1 and holders[mine[-1]] > 1
        is_enough = not (is_new or is_shared) or self.num_free() > 0
        if seq.num_uncomputed_tokens > 1 and not is_new:
            return True  # its slots were allocated with its prompt
        assert is_enough or self.stage.has_engine, "a promised block is missing"
        if self.stage.has_engine:
            assert self.manager.can_append(seq) == is_enough
        if not is_enough:
            return False
        copied = self.manager.append_slot(seq)
        last = seq.block_table[-1]
        assert (last in holders) == (not (is_new or is_shared)), "the last block must be its own or a free one"
        assert seq.block_table == ([*mine, last] if is_new else [*mine[:-1], last]), "the other blocks must stay"
        assert copied == ((mine[-1], last) if is_shared else None)
        if copied:
            self.copy(copied)
        self.held[seq] = list(seq.block_table)
        return True

    def compute(self, seq: Any, num_tokens: int) -> None:
        holders = self.holders()
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            block = seq.block_table[position // self.block_size]
            assert holders[block] == 1, f"block {block} is written, but has {holders[block]} holders"
            self.write(block, position % self.block_size, state_of(seq.token_ids[: position + 1]))
        seq.num_computed_tokens += num_tokens
        if self.stage.has_prefix_cache:
            self.manager.cache_blocks(seq, num_tokens)
        if self.is_caching:
            filled = range((seq.num_computed_tokens - num_tokens) // self.block_size, self.num_full(seq))
            cached = self.manager.pool.cached
            assert all(seq.block_hashes[i] in cached for i in filled), "a full block is not cached"

    def leave(self, seq: Any) -> None:
        self.manager.free(seq)
        self.running.remove(seq)
        del self.held[seq]
        assert seq.block_table == []

    def empty_tier(self, block_size: int) -> Any:
        """Return a tier of size 0."""
        kv_cache = self.stage.part("kv_cache").KVCache(self.config, 1, block_size, torch.float32, torch.device("cpu"))
        return self.stage.part("host_tier").HostTier(kv_cache.blocks, 0, self.stage.counter())

    # The model of the pool

    def request(self, token_ids: list[int], max_tokens: int) -> Any:
        self.num_requests += 1
        params = self.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        made = self.inputs.process(str(self.num_requests), token_ids, params)
        return made[0] if self.stage.has_samples else made

    def holders(self) -> Counter[int]:
        return Counter(block for blocks in self.held.values() for block in blocks)

    def arriving(self) -> set[int]:
        """Return the blocks that a load holds."""
        return set()

    def write(self, block: int, offset: int, state: int) -> None:
        self.slots[block, offset] = state

    def read(self, block: int, offset: int) -> float:
        return self.slots[block, offset]

    def copy(self, copied: Any) -> None:
        self.slots[copied.target] = self.slots[copied.source]

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert {seq: list(seq.block_table) for seq in self.running} == self.held
        holders = self.holders()
        assert self.num_free() == self.manager.num_blocks - len(holders.keys() | self.arriving())
        report = self.manager.report()
        assert report.held == self.block_size * len(holders) == report.used + report.wasted
        used = set()
        for seq in filter(self.is_ready, self.running):
            state = 0
            for position in range(seq.num_computed_tokens):
                at = seq.block_table[position // self.block_size], position % self.block_size
                state = next_state(state, seq.token_ids[position])
                assert self.read(*at) == state, f"token {position} of {seq.request_id} is missing"
                used.add(at)
        assert report.used >= len(used)

    def teardown(self) -> None:
        for seq in getattr(self, "running", [])[:]:
            self.leave(seq)
        if hasattr(self, "manager"):
            assert self.num_free() == self.manager.num_blocks - len(self.arriving())
            events = self.observer.counts
            assert not self.stage.has_engine or events["admit"] + events["fork"] == events["free"]


def state_of(token_ids: list[int]) -> int:
    """Return the value that the last of these tokens writes to its slot."""
    state = 0
    for token_id in token_ids:
        state = next_state(state, token_id)
    return state
