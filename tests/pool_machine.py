"""A state machine of BlockManager in any stage: sequences come, compute, are forked, grow and leave, in any order.

What each computes is kept in its slots: a copy that is missing, wrong or too many shows in what another reads, and so
does a hit of another text. Who holds which blocks is kept a second time, as plain lists.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scripted import Stage, read_on

MAX_MODEL_LEN = 24
BLOCK_SIZES = [1, 2, 3, 4, 8, 32]
TOKENS = st.integers(0, 1)  # two only: many texts begin alike


def is_running(machine: "PoolMachine") -> bool:
    return bool(machine.running)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        llama, sampling, processor, self.blocks, self.pool = (
            importlib.import_module(f"{stage.name}.{name}")
            for name in ("llama", "sampling", "input_processor", "block_manager", "block_pool")
        )
        self.SamplingParams, self.SampledToken = sampling.SamplingParams, sampling.SampledToken
        self.config = llama.ModelConfig(9, 2, 2, 1, 1, 1, 2)
        self.inputs = processor.InputProcessor(self.config, None, MAX_MODEL_LEN, seed=0)

    @initialize(num_blocks=st.integers(1, 20), block_size=st.sampled_from(BLOCK_SIZES), is_caching=st.booleans())
    def make(self, num_blocks: int, block_size: int, is_caching: bool) -> None:
        self.start(num_blocks, block_size, is_caching)
        self.slots = numpy.full((num_blocks, block_size), -1.0)

    def start(self, num_blocks: int, block_size: int, is_caching: bool, **tiers: Any) -> None:
        self.block_size, self.is_caching = block_size, is_caching and self.stage.has_prefix_cache
        caching = {"enable_prefix_caching": is_caching} if self.stage.has_prefix_cache else {}
        self.manager = self.blocks.BlockManager(num_blocks, block_size, **caching, **tiers)
        self.held: dict[Any, list[int]] = {}  # once more: the blocks of each sequence
        self.running: list[Any] = []
        self.num_requests = 0

    # What an engine does

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
        """A slot for its last token, and a token more; a request that has ended leaves."""
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
        """Another shares what one of them has computed, and goes on with a token of its own."""
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
        """It leaves and comes back at once: with a cache, it finds what it had computed."""
        seq = data.draw(st.sampled_from(self.running))
        num_full = min(seq.num_computed_tokens, seq.num_tokens - 1) // self.block_size
        self.leave(seq)
        seq.num_computed_tokens = 0
        if self.allocate(seq) and self.is_caching:
            assert seq.num_computed_tokens >= num_full * self.block_size, "what it had computed is not found"

    @precondition(is_running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.stage.has_prefix_cache)
    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (not self.running)

    @precondition(is_running)
    @rule(data=st.data())
    def give_back_what_is_not_held(self, data: st.DataObject) -> None:
        """A request that never came, and one that has the name of one that runs."""
        seq = data.draw(st.sampled_from(self.running))
        stranger = self.request([1], 1)
        for request_id in (stranger.request_id, seq.request_id):
            stranger.request_id = request_id
            self.changes_nothing(lambda: self.manager.free(stranger), ValueError)

    # With what must come of it

    def allocate(self, seq: Any) -> bool:
        num_blocks, holders = -(-seq.num_tokens // self.block_size), self.holders()
        num_held = sum(block in holders for block in self.hits_here(seq))
        is_enough = num_blocks - num_held <= self.manager.num_free_blocks
        assert self.manager.can_allocate(seq) == is_enough
        if not is_enough:
            self.changes_nothing(lambda: self.manager.allocate(seq), self.pool.NoFreeBlocks)
            assert not seq.block_table and not seq.num_computed_tokens
            return False
        self.manager.allocate(seq)
        assert len(set(seq.block_table)) == len(seq.block_table) == num_blocks
        assert seq.num_computed_tokens % self.block_size == 0 and seq.num_computed_tokens < seq.num_tokens
        fresh = seq.block_table[seq.num_computed_tokens // self.block_size :]
        assert not holders.keys() & set(fresh), "a block that others hold, and that it will write to"
        self.held[seq] = list(seq.block_table)
        self.running.append(seq)
        return True

    def hits_here(self, seq: Any) -> list[int]:
        """The blocks of this tier that it would hit."""
        return self.manager.find_hits(seq) if self.stage.has_prefix_cache else []

    def is_ready(self, seq: Any) -> bool:
        return True

    def append_slot(self, seq: Any) -> bool:
        """Returns False if there is no block for it."""
        mine, holders = self.held[seq], self.holders()
        is_new = seq.num_tokens > len(mine) * self.block_size
        is_shared = not is_new and seq.num_uncomputed_tokens == 1 and holders[mine[-1]] > 1
        is_enough = not (is_new or is_shared) or self.manager.num_free_blocks > 0
        if seq.num_uncomputed_tokens > 1 and not is_new:
            return True  # its slots were allocated with its prompt
        assert self.manager.can_append(seq) == is_enough
        if not is_enough:
            self.changes_nothing(lambda: self.manager.append_slot(seq), self.pool.NoFreeBlocks)
            return False
        copied = self.manager.append_slot(seq)
        last = seq.block_table[-1]
        assert (last in holders) == (not (is_new or is_shared)), "a block of its own, or one that nobody held"
        assert seq.block_table == ([*mine, last] if is_new else [*mine[:-1], last]), "what is computed stays"
        assert copied == ((mine[-1], last) if is_shared else None)
        if copied:
            self.copy(copied)
        self.held[seq] = list(seq.block_table)
        return True

    def compute(self, seq: Any, num_tokens: int) -> None:
        holders = self.holders()
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            block = seq.block_table[position // self.block_size]
            assert holders[block] == 1, f"block {block} is written, and {holders[block]} hold it"
            self.write(block, position % self.block_size, state_of(seq.token_ids[: position + 1]))
        seq.num_computed_tokens += num_tokens
        if self.stage.has_prefix_cache:
            self.manager.cache_blocks(seq, num_tokens)

    def leave(self, seq: Any) -> None:
        self.manager.free(seq)
        self.running.remove(seq)
        del self.held[seq]
        assert seq.block_table == []
        self.changes_nothing(lambda: self.manager.free(seq), ValueError)

    def changes_nothing(self, operation: Callable[[], Any], error: type[Exception]) -> None:
        before = self.state()
        with pytest.raises(error):
            operation()
        assert self.state() == before

    def state(self) -> Any:
        pool = self.manager._pool
        return self.manager.report(), sorted(pool._free), self.manager.num_free_blocks

    # The pool, once more

    def request(self, token_ids: list[int], max_tokens: int) -> Any:
        self.num_requests += 1
        params = self.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        made = self.inputs.process(str(self.num_requests), token_ids, params)
        return made[0] if self.stage.has_samples else made

    def holders(self) -> Counter[int]:
        return Counter(block for blocks in self.held.values() for block in blocks)

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
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(holders)
        report = self.manager.report()
        assert report.held == self.block_size * len(holders) == report.used + report.wasted
        used = set()
        for seq in filter(self.is_ready, self.running):
            state = 0
            for position in range(seq.num_computed_tokens):
                at = seq.block_table[position // self.block_size], position % self.block_size
                state = read_on(state, seq.token_ids[position])
                assert self.read(*at) == state, f"token {position} of {seq.request_id} is not there"
                used.add(at)
        assert report.used >= len(used)

    def teardown(self) -> None:
        for seq in getattr(self, "running", [])[:]:
            self.leave(seq)
        if hasattr(self, "manager"):
            assert self.manager.num_free_blocks == self.manager.num_blocks
            assert not self.stage.has_prefix_cache or self.manager.reset_prefix_cache()


def state_of(token_ids: list[int]) -> int:
    """What the last of these tokens leaves in its slot."""
    state = 0
    for token_id in token_ids:
        state = read_on(state, token_id)
    return state
