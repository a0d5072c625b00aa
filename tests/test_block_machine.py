"""BlockManager under any history that hypothesis can think of, in every stage that has one, against sets of blocks.

Where a stage can fork, sequences share blocks. What each writes is kept as well: a copy that is missing, wrong or too
many would show in what another reads.
"""

import importlib
from collections import Counter
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

from tests.helpers import ROOT, find_stages, folder_of, full

MAX_MODEL_LEN = 24
STAGES = [name for name in find_stages(ROOT) if (folder_of(name) / "block_manager.py").exists()]


class Pool(RuleBasedStateMachine):
    """Requests come, grow by a token and leave in any order; what finds too few blocks fails and changes nothing."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        llama, sampling, processor, self.blocks, self.pool = (
            importlib.import_module(f"{stage}.{name}")
            for name in ("llama", "sampling", "input_processor", "block_manager", "block_pool")
        )
        self.SamplingParams, self.SampledToken = sampling.SamplingParams, sampling.SampledToken
        self.can_fork = hasattr(self.blocks.BlockManager, "fork")
        self.inputs = processor.InputProcessor(llama.ModelConfig(9, 8, 8, 1, 1, 1, 8), None, MAX_MODEL_LEN, seed=0)

    @initialize(num_blocks=st.integers(1, 20), block_size=st.sampled_from([1, 2, 3, 4, 8, 32]))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.manager = self.blocks.BlockManager(num_blocks, block_size)
        self.block_size = block_size
        self.free = set(range(num_blocks))  # the pool again: the free blocks, and those of each request
        self.held: dict[str, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}  # by block and offset: the token that was written there
        self.running: list[Any] = []
        self.num_requests, self.num_tokens = 0, 1

    def request(self, prompt_len: int, max_tokens: int) -> Any:
        self.num_requests += 1
        params = self.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        made = self.inputs.process(str(self.num_requests), [1] * prompt_len, params)
        return made[0] if isinstance(made, list) else made  # from s5 on one for each sample

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
            for position in range(seq.num_computed_tokens, seq.num_tokens):
                self.slots[self.slot(seq, position)] = seq.token_ids[position]
            seq.num_computed_tokens = seq.num_tokens
            self.num_tokens += 1
            seq.append_token(self.SampledToken(self.num_tokens, 0.0))
            if seq.finished:
                self.leave(seq)

    @precondition(lambda self: self.can_fork and self.parents())
    @rule(data=st.data(), num_own=st.integers(1, 9))
    def fork(self, data: st.DataObject, num_own: int) -> None:
        """Another goes on from what one of them has computed, or from the beginning of that."""
        parent = data.draw(st.sampled_from(self.parents()))
        num_shared = data.draw(st.integers(1, min(parent.num_computed_tokens, MAX_MODEL_LEN - 2)))
        child = self.request(min(num_shared + num_own, MAX_MODEL_LEN - 1), 9)
        child.token_ids[:num_shared] = parent.token_ids[:num_shared]
        self.manager.fork(parent, child, num_shared)
        self.held[child.request_id] = self.held[parent.request_id][: -(-num_shared // self.block_size)]
        assert child.num_computed_tokens == num_shared
        self.running.append(child)

    def parents(self) -> list[Any]:
        return [seq for seq in self.running if seq.num_computed_tokens]

    @precondition(lambda self: self.can_fork and self.running)
    @rule(data=st.data())
    def ask_for_many(self, data: st.DataObject) -> None:
        """Whether there is room for some of them: as if each took what it lacks, one after the other."""
        seqs = data.draw(st.lists(st.sampled_from(self.running), unique=True))
        holders, num_lacking = self.holders(), 0
        for seq in seqs:
            num_lacking += self.num_missing(seq)
            shared = self.shared_index(seq, holders)
            if shared is not None:
                holders[seq.block_table[shared]] -= 1
                num_lacking += 1
        assert self.manager.num_blocks_to_append(*seqs) == num_lacking
        assert self.manager.can_append(*seqs) == (num_lacking <= len(self.free))

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

    def holders(self) -> Counter[int]:
        return Counter(block for blocks in self.held.values() for block in blocks)

    def num_missing(self, seq: Any) -> int:
        return -(-seq.num_tokens // self.block_size) - len(self.held.get(seq.request_id, []))

    def shared_index(self, seq: Any, holders: Counter[int]) -> int | None:
        """Where in its table is the block that it writes to next, if others hold that too."""
        mine, index = self.held.get(seq.request_id, []), seq.num_computed_tokens // self.block_size
        return index if index < len(mine) and holders[mine[index]] > 1 else None

    def slot(self, seq: Any, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size

    def takes_what_it_lacks(self, seq: Any, can: Callable, take: Callable) -> bool:
        mine, shared = self.held.get(seq.request_id, []), self.shared_index(seq, self.holders())
        num_lacking = self.num_missing(seq) + (shared is not None)
        is_enough = num_lacking <= len(self.free)
        assert bool(can(seq)) == is_enough
        if not is_enough:
            self.changes_nothing(take, seq, self.pool.NoFreeBlocks)
            return False
        copied = take(seq)
        stays = list(mine)
        if shared is not None:
            stays[shared] = seq.block_table[shared]
            assert copied == (mine[shared], stays[shared])
            self.copy(*copied)
        else:
            assert copied is None
        assert seq.block_table[: len(mine)] == stays, "what is computed stays where it is"
        new = set(seq.block_table) - set(mine)
        assert len(new) == num_lacking and self.free.issuperset(new)
        assert len(set(seq.block_table)) == len(seq.block_table)
        self.free -= new
        self.held[seq.request_id] = list(seq.block_table)
        return True

    def copy(self, source: int, target: int) -> None:
        for offset in range(self.block_size):
            if (source, offset) in self.slots:
                self.slots[target, offset] = self.slots[source, offset]

    def changes_nothing(self, operation: Callable, seq: Any, error: type[Exception]) -> None:
        before = self.manager.report(), self.manager.num_free_blocks, list(seq.block_table)
        with pytest.raises(error):
            operation(seq)
        assert (self.manager.report(), self.manager.num_free_blocks, seq.block_table) == before

    def leave(self, seq: Any) -> None:
        self.manager.free(seq)
        self.running.remove(seq)
        mine = self.held.pop(seq.request_id)
        self.free |= set(mine) - self.holders().keys()
        assert not seq.block_table
        self.changes_nothing(self.manager.free, seq, ValueError)

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == len(self.free)
        assert {seq.request_id: list(seq.block_table) for seq in self.running} == self.held
        report = self.manager.report()
        assert report.held == self.block_size * len(self.holders())
        used = {self.slot(seq, position) for seq in self.running for position in range(seq.num_computed_tokens)}
        assert report.used == len(used)
        assert report.wasted == report.held - report.used
        for seq in self.running:
            assert len(seq.block_table) * self.block_size < seq.num_tokens + self.block_size
            read = [self.slots[self.slot(seq, position)] for position in range(seq.num_computed_tokens)]
            assert read == seq.token_ids[: seq.num_computed_tokens], "another wrote there"

    def teardown(self) -> None:
        for seq in getattr(self, "running", [])[:]:
            self.leave(seq)
        if hasattr(self, "manager"):
            assert self.manager.num_free_blocks == self.manager.num_blocks


@pytest.mark.parametrize("num_histories", [30, full(150)])
@pytest.mark.parametrize("stage", STAGES)
def test_any_history(stage, num_histories):
    run_state_machine_as_test(
        lambda: Pool(stage), settings=settings(max_examples=num_histories, stateful_step_count=40, deadline=None)
    )
