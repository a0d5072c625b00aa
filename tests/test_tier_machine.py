"""BlockManager with a second tier under random histories, with the bytes of every block.

Loads are slow: they copy when they have been queried often enough, or when the engine waits, while the device goes on.
A sequence that is ready must always find its own computed tokens.
"""

from itertools import cycle, takewhile
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from tests.helpers import ROOT, find_stages, full
from tests.injected_faults import INJECTED_FAULTS, inject
from tests.pool_machine import PoolMachine
from tests.scripted_llm import Stage, delayed_load

STAGES = [stage for stage in map(Stage, find_stages(ROOT)) if stage.has_tiers]
DELAYS = st.sampled_from([[0], [0, 2], [5, 0, 1], [30]])
FAULTS = [fault for fault in INJECTED_FAULTS if INJECTED_FAULTS[fault].stage == 7]
SLOWEST = "loads have always arrived"  # hypothesis needs seconds to find it


class TierMachine(PoolMachine):
    @initialize(
        num_blocks=st.integers(2, 14),
        num_host_blocks=st.integers(0, 20),
        block_size=st.sampled_from([1, 2, 3, 4]),
        delays=DELAYS,
    )
    def make(self, num_blocks: int, num_host_blocks: int, block_size: int, delays: list[int]) -> None:
        kv_cache, device = self.stage.part("kv_cache"), torch.device("cpu")
        self.kv_cache = kv_cache.KVCache(self.config, num_blocks, block_size, torch.float32, device)
        self.kv_cache.blocks.fill_(-1)
        make = self.stage.part("host_tier").HostTier
        self.tier = make(self.kv_cache.blocks, num_host_blocks, self.stage.counter())
        self.tier.blocks.fill_(-2)
        self.tier.load = delayed_load(self.tier, self.kv_cache.blocks, cycle(delays))
        self.start(num_blocks, block_size, is_caching=True, tier=self.tier)

    @rule(wait=st.booleans())
    def collect(self, wait: bool) -> None:
        self.manager.collect_loads(wait)
        assert not (wait and self.tier.loads)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def store_and_load(self, data: st.DataObject) -> None:
        """Free a sequence, overwrite all free blocks, and allocate it again: a large enough host has its text."""
        seq = data.draw(st.sampled_from(self.running))
        num_cached = len(list(takewhile(lambda hit: hit is not None, self.manager.find_hits(seq))))
        self.leave(seq)
        self.manager.collect_loads(wait=True)
        evicted = self.manager.pool.get_new_blocks(self.num_free())
        self.manager.pool.free_blocks(evicted)
        self.kv_cache.blocks[evicted] = -3  # as if other sequences had written to them
        if self.allocate(seq) and self.tier.pool.num_blocks >= self.manager.num_blocks:
            assert seq.num_computed_tokens >= num_cached * self.block_size, "a text is lost from both tiers"

    def is_ready(self, seq: Any) -> bool:
        return self.manager.is_ready(seq)

    def arriving(self) -> set[int]:
        return {copy.target for load in self.tier.loads for copy in load.copies}

    def write(self, block: int, offset: int, state: int) -> None:
        self.kv_cache.blocks[block, :, :, offset] = state

    def read(self, block: int, offset: int) -> float:
        slot = self.kv_cache.blocks[block, :, :, offset].flatten()  # [num_layers * 2 * num_kv_heads * head_dim]
        return slot[0].item() if (slot == slot[0]).all() else float("nan")

    def copy(self, copied: Any) -> None:
        self.kv_cache.copy_blocks([copied])

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "manager"):
            self.manager.collect_loads(wait=True)
            self.manager.check_integrity()
            assert len(self.tier.pool.free) == self.tier.pool.num_blocks


def run(stage: Stage, num_histories: int, **options: object) -> None:
    settings_ = settings(max_examples=num_histories, stateful_step_count=40, deadline=None, **options)
    run_state_machine_as_test(lambda: TierMachine(stage), settings=settings_)


@pytest.mark.parametrize("num_histories", [20, full(80)])
@pytest.mark.parametrize("stage", STAGES, ids=[f"s{stage.number}" for stage in STAGES])
def test_random_histories(stage, num_histories):
    run(stage, num_histories)


@pytest.mark.parametrize("fault", [full(fault) if fault == SLOWEST else fault for fault in FAULTS])
def test_histories_find_injected_faults(fault, monkeypatch):
    stage = inject(INJECTED_FAULTS[fault], monkeypatch)
    with pytest.raises(AssertionError):
        run(stage, 3000, phases=[Phase.generate], derandomize=True, database=None)
