"""BlockManager under any history that hypothesis can think of, in every stage that has one, against sets of blocks."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
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

from tests.helpers import ROOT, find_stages, folder_of

MAX_MODEL_LEN = 24
STAGES = [name for name in find_stages(ROOT) if (folder_of(name) / "block_manager.py").exists()]


class Pool(RuleBasedStateMachine):
    """Requests come, grow by a token and leave in any order; what finds too few blocks fails and changes nothing."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        llama, sampling, processor, self.blocks = (
            importlib.import_module(f"{stage}.{name}")
            for name in ("llama", "sampling", "input_processor", "block_manager")
        )
        self.SamplingParams, self.SampledToken = sampling.SamplingParams, sampling.SampledToken
        self.inputs = processor.InputProcessor(llama.ModelConfig(9, 8, 8, 1, 1, 1, 8), None, MAX_MODEL_LEN, seed=0)

    @initialize(num_blocks=st.integers(1, 20), block_size=st.sampled_from([1, 2, 3, 4, 8, 32]))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.manager = self.blocks.BlockManager(num_blocks, block_size)
        self.block_size = block_size
        self.free = set(range(num_blocks))  # the pool again: the free blocks, and those of each request
        self.held: dict[str, set[int]] = {}
        self.running: list[Any] = []
        self.num_requests = 0

    def request(self, prompt_len: int, max_tokens: int) -> Any:
        self.num_requests += 1
        params = self.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.inputs.process(str(self.num_requests), [1] * prompt_len, params)

    @rule(prompt_len=st.integers(1, MAX_MODEL_LEN - 1), max_tokens=st.integers(1, MAX_MODEL_LEN))
    def arrive(self, prompt_len: int, max_tokens: int) -> None:
        seq = self.request(prompt_len, max_tokens)
        if self.takes_what_it_lacks(seq, self.manager.can_allocate, self.manager.allocate):
            self.running.append(seq)
        else:
            assert not seq.block_table

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A slot for its last token and one token more, as the engine does it; a request that has ended leaves."""
        seq = data.draw(st.sampled_from(self.running))
        if self.takes_what_it_lacks(seq, self.manager.can_append, self.manager.append_slot):
            seq.num_computed_tokens = seq.num_tokens
            seq.append_token(self.SampledToken(1, 0.0))
            if seq.finished:
                self.leave(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back_what_is_not_held(self, data: st.DataObject) -> None:
        """A request that never came, and one that is gone or has the name of one that runs."""
        seq = data.draw(st.sampled_from(self.running))
        stranger = self.request(1, 1)
        for request_id in (stranger.request_id, seq.request_id):
            stranger.request_id = request_id
            self.changes_nothing(self.manager.free, stranger, ValueError)

    def takes_what_it_lacks(self, seq: Any, can: Callable, take: Callable) -> bool:
        mine = self.held.get(seq.request_id, set())
        num_lacking = -(-seq.num_tokens // self.block_size) - len(mine)
        is_enough = num_lacking <= len(self.free)
        assert bool(can(seq)) == is_enough
        if not is_enough:
            self.changes_nothing(take, seq, self.blocks.NoFreeBlocks)
            return False
        before = list(seq.block_table)
        take(seq)
        new = seq.block_table[len(before) :]
        assert seq.block_table[: len(before)] == before, "what is computed stays where it is"
        assert len(new) == len(set(new)) == num_lacking and self.free.issuperset(new)
        self.free -= set(new)
        self.held[seq.request_id] = mine | set(new)
        return True

    def changes_nothing(self, operation: Callable, seq: Any, error: type[Exception]) -> None:
        before = self.manager.report(), self.manager.num_free_blocks, list(seq.block_table)
        with pytest.raises(error):
            operation(seq)
        assert (self.manager.report(), self.manager.num_free_blocks, seq.block_table) == before

    def leave(self, seq: Any) -> None:
        self.manager.free(seq)
        self.running.remove(seq)
        self.free |= self.held.pop(seq.request_id)
        assert not seq.block_table
        self.changes_nothing(self.manager.free, seq, ValueError)

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == len(self.free)
        assert {seq.request_id: set(seq.block_table) for seq in self.running} == self.held
        report = self.manager.report()
        assert report.held == self.block_size * sum(map(len, self.held.values()))
        assert report.used == sum(seq.num_computed_tokens for seq in self.running)
        assert report.wasted == report.held - report.used
        for seq in self.running:
            assert len(seq.block_table) * self.block_size < seq.num_tokens + self.block_size

    def teardown(self) -> None:
        for seq in getattr(self, "running", [])[:]:
            self.leave(seq)
        if hasattr(self, "manager"):
            assert self.manager.num_free_blocks == self.manager.num_blocks


@pytest.mark.parametrize("stage", STAGES)
def test_any_history(stage):
    run_state_machine_as_test(
        lambda: Pool(stage), settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
