"""The block manager of two tiers under any history that hypothesis can think of, with the bytes of every block.

Sequences come, hit what is cached, are forked, grow, are swapped out and in, and end in any state. Copies are late:
they read and write when they are done, in the order in which they were begun, while the device goes on; and some fail.
What a sequence has computed is there whenever it has arrived, and whoever fails has changed nothing.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.helpers import ROOT, find_stages, folder_of, full

STAGES = [name for name in find_stages(ROOT) if (folder_of(name) / "tiered_block_manager.py").exists()]
MAX_MODEL_LEN = 40
NUM_LAYERS = 2


class LateTransfer:
    def __init__(self, begun: "list[LateTransfer]", copy: Callable[[], Any]) -> None:
        self.begun, self.copy = begun, copy
        begun.append(self)

    def is_done(self) -> bool:
        return self not in self.begun

    def wait(self) -> None:
        while not self.is_done():
            self.begun.pop(0).copy()

    hold_back_compute = wait


def late(host_pool: type) -> type:
    class LateHostPool(host_pool):  # type: ignore[misc]
        begun: list[LateTransfer]
        is_failing = False

        def _copy(self, *what: Any) -> LateTransfer:
            if self.is_failing:
                raise RuntimeError("the copy failed")
            copy = super()._copy
            return LateTransfer(self.begun, lambda: copy(*what))

    return LateHostPool


class Tiers(RuleBasedStateMachine):
    def __init__(self, stage: str) -> None:
        super().__init__()
        parts = ("llama", "sampling", "input_processor", "kv_cache", "offload", "prefix_cache")
        llama, sampling, processor, self.kv, self.offload, self.prefix = (
            importlib.import_module(f"{stage}.{part}") for part in parts
        )
        self.tiered = importlib.import_module(f"{stage}.tiered_block_manager")
        self.NoFreeBlocks = importlib.import_module(f"{stage}.block_pool").NoFreeBlocks
        self.SamplingParams, self.config = sampling.SamplingParams, llama.ModelConfig(9, 8, 8, NUM_LAYERS, 1, 1, 8)
        self.inputs = processor.InputProcessor(self.config, None, MAX_MODEL_LEN, seed=0)

    @initialize(
        num_blocks=st.integers(2, 14),
        num_host_blocks=st.integers(0, 14),
        block_size=st.sampled_from([1, 2, 3, 4]),
        is_caching=st.booleans(),
    )
    def make(self, num_blocks: int, num_host_blocks: int, block_size: int, is_caching: bool) -> None:
        cpu = torch.device("cpu")
        self.kv_cache = self.kv.KVCache(self.config, num_blocks, block_size, torch.float32, cpu)
        self.kv_cache.blocks.fill_(float("nan"))
        self.host = late(self.offload.HostPool)(self.kv_cache.blocks, num_host_blocks)
        self.host.begun = []
        cache = self.prefix.PrefixCache(block_size) if is_caching else None
        self.manager = self.tiered.TieredBlockManager(num_blocks, block_size, cache, self.host)
        self.block_size, self.num_host_blocks = block_size, num_host_blocks
        self.here: list[list[Any]] = []  # groups
        self.away: list[list[Any]] = []
        self.num_requests = 0

    def request(self, token_ids: list[int]) -> Any:
        self.num_requests += 1
        [seq] = self.inputs.process(str(self.num_requests), token_ids, self.SamplingParams(max_tokens=8))
        return seq

    # What an engine does

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def arrive(self, token_ids: list[int]) -> None:
        """Two tokens only: many texts begin alike."""
        seq = self.request(token_ids)
        if self.manager.can_allocate(seq):
            self.manager.allocate(seq)
            self.here.append([seq])
            assert seq.num_computed_tokens < seq.num_tokens <= len(seq.block_table) * self.block_size
        else:
            self.fails_and_changes_nothing(self.NoFreeBlocks, self.manager.allocate, seq)
            assert seq.block_table == [] and seq.num_computed_tokens == 0

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute_a_chunk(self, data: st.DataObject, num_tokens: int) -> None:
        seq = data.draw(st.sampled_from(self.computing()))
        self.compute(seq, min(num_tokens, seq.num_uncomputed_tokens - 1))

    @precondition(lambda self: self.here)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=3, max_size=3), forks=st.booleans())
    def step(self, data: st.DataObject, tokens: list[int], forks: bool) -> None:
        """Each of a group computes what it has left, in blocks of its own, and gets a token; a lone one may fork."""
        group = data.draw(st.sampled_from(self.here))
        if not all(map(self.manager.has_arrived, group)) or not self.manager.can_append(*group):
            return
        copies = [copy for seq in group if (copy := self.manager.append_slot(seq))]
        self.kv_cache.copy_blocks({copy.target: copy.source for copy in copies})
        assert all(map(self.manager.is_ready, group))
        for seq in group:
            self.compute(seq, seq.num_uncomputed_tokens)
        if forks and len(group) == 1:
            for _ in range(2):
                child = self.request(group[0].token_ids)
                self.manager.fork(group[0], child, group[0].num_tokens)
                group.append(child)
        for seq, token_id in zip(group, tokens, strict=False):
            seq.token_ids.append(token_id)
        if group[0].num_tokens > MAX_MODEL_LEN - 2:
            self.end_here(group)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.here))
        lengths = [-(-seq.num_computed_tokens // self.block_size) for seq in group]
        tables = [seq.block_table[:length] for seq, length in zip(group, lengths, strict=True)]
        count = len(set().union(*tables))
        assert self.manager.num_blocks_to_swap(group) == count
        if not count:
            return
        if count > self.manager._host.num_free:
            self.fails_and_changes_nothing(self.NoFreeBlocks, self.manager.swap_out, group)
        elif self.host.is_failing:
            self.fails_and_loses_nothing(self.manager.swap_out, group)
        else:
            self.manager.swap_out(group)
            self.here.remove(group)
            self.away.append(group)
            assert not any(seq.block_table for seq in group)
            assert len({block for seq in group for block in seq.host_table}) == count

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.away))
        if len({block for seq in group for block in seq.host_table}) > self.manager.num_free_blocks:
            assert not self.manager.can_swap_in(group)
            self.fails_and_changes_nothing(self.NoFreeBlocks, self.manager.swap_in, group)
        elif self.host.is_failing:
            self.fails_and_loses_nothing(self.manager.swap_in, group)
        else:
            can_go_on = self.manager.can_swap_in(group)
            self.manager.swap_in(group)
            self.away.remove(group)
            self.here.append(group)
            assert not any(seq.host_table for seq in group)
            assert not can_go_on or self.manager.can_append(*group)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def abort_here(self, data: st.DataObject) -> None:
        self.end_here(data.draw(st.sampled_from(self.here)))

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def abort_away(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.away))
        self.away.remove(group)
        for seq in group:
            self.manager.drop(seq)
            assert seq.host_table == []

    # What copies do

    @precondition(lambda self: self.host.begun)
    @rule(count=st.integers(1, 3))
    def copies_are_done(self, count: int) -> None:
        self.host.begun[min(count, len(self.host.begun)) - 1].wait()

    @rule(wait=st.booleans())
    def collect(self, wait: bool) -> None:
        self.manager.collect(wait)
        assert not (wait and self.manager.is_copying)
        assert self.host.begun or not self.manager.is_copying

    @rule(are_failing=st.booleans())
    def copies_fail_from_now_on(self, are_failing: bool) -> None:
        self.host.is_failing = are_failing

    @rule()
    def reset(self) -> None:
        can = not self.here and not self.away and not self.manager.is_copying
        assert self.manager.reset_prefix_cache() == can
        assert not can or not self.manager.prefix_cache._index

    # The model

    def computing(self) -> list[Any]:
        """Those that may run and have more than one token to compute."""
        seqs = [seq for group in self.here for seq in group]
        return [seq for seq in seqs if seq.num_uncomputed_tokens > 1 and self.manager.is_ready(seq)]

    def compute(self, seq: Any, num_tokens: int) -> None:
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            block = seq.block_table[position // self.block_size]
            assert self.manager._pool.ref_count(block) == 1 and block not in self.manager.prefix_cache.blocks
            self.kv_cache.blocks[block, :, :, position % self.block_size] = bytes_of(seq.token_ids[: position + 1])
        seq.num_computed_tokens += num_tokens
        self.manager.cache_blocks(seq)

    def end_here(self, group: list[Any]) -> None:
        self.here.remove(group)
        for seq in group:
            self.manager.free(seq)
            assert seq.block_table == []

    def state(self) -> Any:
        pools = [(list(pool._free), list(pool._ref_counts)) for pool in (self.manager._pool, self.manager._host)]
        tables = [(list(seq.block_table), list(seq.host_table)) for g in self.here + self.away for seq in g]
        cache = self.manager.prefix_cache
        return pools, tables, list(cache.blocks._idle), list(cache.host_blocks._idle), self.manager.report()

    def fails_and_changes_nothing(self, error: type[Exception], operation: Callable, what: Any) -> None:
        before = self.state()
        with pytest.raises(error):
            operation(what)
        assert self.state() == before

    def fails_and_loses_nothing(self, operation: Callable, what: Any) -> None:
        """To make room it may have evicted a text: all else is as it was."""
        before = self.state()[1], self.manager.num_free_blocks, self.manager._host.num_free
        with pytest.raises(RuntimeError, match="the copy failed"):
            operation(what)
        assert (self.state()[1], self.manager.num_free_blocks, self.manager._host.num_free) == before

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for seq in (seq for group in self.here for seq in group if self.manager.has_arrived(seq)):
            for position in range(seq.num_computed_tokens):
                block, offset = seq.block_table[position // self.block_size], position % self.block_size
                found = self.kv_cache.blocks[block, :, :, offset]
                assert (found == bytes_of(seq.token_ids[: position + 1])).all(), "what it computed is not there"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for group in [*self.here]:
            self.end_here(group)
        for seq in (seq for group in self.away for seq in group):
            self.manager.drop(seq)
        self.manager.collect(wait=True)
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager._host.num_free == self.num_host_blocks
        assert self.manager.reset_prefix_cache()


def bytes_of(token_ids: list[int]) -> float:
    """Of the last of these tokens and all before: a whole number that float32 has exactly."""
    text = 0
    for token_id in token_ids:
        text = (text * 1_000_003 + token_id + 1) % 16_777_213
    return float(text)


@pytest.mark.parametrize("num_histories", [30, full(150)])
@pytest.mark.parametrize("stage", STAGES)
def test_any_history(stage, num_histories):
    run_state_machine_as_test(
        lambda: Tiers(stage), settings=settings(max_examples=num_histories, stateful_step_count=50, deadline=None)
    )
