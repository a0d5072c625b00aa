"""Stage 1's SlotManager under random histories, compared with a model that keeps one name per slot."""

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

from stages.s1_contiguous_cache.input_processor import InputProcessor
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.observer import Observer
from stages.s1_contiguous_cache.sampling import SampledToken, SamplingParams
from stages.s1_contiguous_cache.sequence import Sequence
from stages.s1_contiguous_cache.slot_manager import SlotManager
from tests.helpers import full

MAX_MODEL_LEN = 12
SHAPE = ModelConfig(9, 8, 8, 1, 1, 1, 8)


class Pool(RuleBasedStateMachine):
    """Requests arrive, grow by a token, and leave in any order, under either reservation."""

    @initialize(num_slots=st.integers(1, 60), reservation=st.sampled_from(["max_model_len", "request"]))
    def make(self, num_slots: int, reservation: str) -> None:
        self.manager = SlotManager(num_slots, reservation, MAX_MODEL_LEN, Observer())
        self.inputs = InputProcessor(SHAPE, None, MAX_MODEL_LEN, seed=0)
        self.slots: list[str | None] = [None] * num_slots  # the model: the holder of each slot
        self.running: list[Sequence] = []
        self.num_requests = 0

    @rule(prompt_len=st.integers(1, MAX_MODEL_LEN - 1), max_tokens=st.integers(1, MAX_MODEL_LEN))
    def arrive(self, prompt_len: int, max_tokens: int) -> None:
        seq = self.inputs.process(str(self.num_requests), [1] * prompt_len, SamplingParams(max_tokens=max_tokens))
        self.num_requests += 1
        size = self.manager.num_reserved(seq)
        fits = [at for at in range(len(self.slots)) if self.slots[at : at + size] == [None] * size]
        assert self.manager.can_allocate(seq) == bool(fits)
        if not fits:
            return
        self.manager.allocate(seq)
        assert seq.slots == range(fits[0], fits[0] + size), "first fit"
        self.slots[fits[0] : fits[0] + size] = [seq.request_id] * size
        self.running.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Append a token to a sequence, as the engine does. A finished sequence leaves."""
        seq = data.draw(st.sampled_from(self.running))
        seq.num_computed_tokens = seq.num_tokens
        seq.append_token(SampledToken(1, 0.0))
        if seq.finished:
            self.leave(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.running)))

    def leave(self, seq: Sequence) -> None:
        self.manager.free(seq)
        self.running.remove(seq)
        self.slots = [None if holder == seq.request_id else holder for holder in self.slots]

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        report = self.manager.report()
        assert report.held == sum(holder is not None for holder in self.slots)
        assert report.used == sum(seq.num_computed_tokens for seq in self.running) <= report.promised <= report.held
        assert report.wasted == report.held - report.used
        free = [[slot for slot in range(len(self.slots)) if slot in piece] for piece in self.manager.free_ranges()]
        assert [slot for piece in free for slot in piece] == [i for i, name in enumerate(self.slots) if name is None]
        assert report.largest_free == max(map(len, free), default=0)

    def teardown(self) -> None:
        for seq in getattr(self, "running", [])[:]:
            self.leave(seq)
        if hasattr(self, "manager"):
            report = self.manager.report()
            assert (report.held, report.largest_free) == (0, report.num_slots)


@pytest.mark.parametrize("num_histories", [20, full(80)])
def test_random_histories(num_histories):
    run_state_machine_as_test(
        Pool, settings=settings(max_examples=num_histories, stateful_step_count=40, deadline=None)
    )
