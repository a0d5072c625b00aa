"""The Executor: overlapping steps, several rows of logits per sequence, and a step that raises.

The stand-in runs no model. It keeps tokens in slots, as a model keeps keys and values, and each sampled token depends
on all tokens that it reads there, so a lost or overwritten block changes the output.
"""

import gc
import random
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from zlib import crc32

import pytest
import torch

from ...backends.torch.attention import PagedAttention
from ...backends.torch.model_runner import ModelRunner
from ...engine.block_manager import BlockManager
from ...engine.executor import Executor, Pending, Scheduled
from ...engine.kv_cache import KVCache
from ...engine.observer import Observer
from ...engine.scheduler import Scheduler
from ...engine.sequence import Sequence
from ...options.config import EngineConfig
from ...requests.tokens import NO_TOKEN, SampledToken, StepOutput
from ...tiers.host_tier import HostTier
from ..testing.sequences import make_sequence

BLOCK_SIZE = 4
IN_FLIGHT = -1  # stands for a token that has not been read yet


def next_token(token_ids: list[int]) -> int:
    assert IN_FLIGHT not in token_ids
    return crc32(repr(token_ids).encode()) % 320


def generated(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class Row(NamedTuple):
    """An item of a step, with everything that the executor will need of its sequence."""

    seq: Sequence
    writes: list[tuple[int, int, int]]  # slot, token id, position
    context: list[int] | None  # slots to read, or None if no token is sampled


class Lagging:
    """A Pending whose step runs when its tokens are read."""

    def __init__(self, executor: "LaggingExecutor", rows: list[Row]) -> None:
        self.executor, self.rows = executor, rows
        self.sampled: list[SampledToken | None] = []

    def tokens(self) -> StepOutput:
        self.executor.run_until(self)
        return StepOutput.of(self.sampled)


class LaggingExecutor:
    """An executor that runs steps as late as possible: when their tokens are read, in order.

    Like a device, it knows the tokens that it has sampled before they have been read.
    """

    def __init__(self, num_blocks: int) -> None:
        self.slots = [IN_FLIGHT] * num_blocks * BLOCK_SIZE
        self.newest: dict[tuple[Sequence, int], int] = {}  # sampled tokens by sequence and position
        self.drafts: dict[Sequence, list[int]] = {}  # tokens that are not part of the sequence yet
        self.queue: deque[Lagging] = deque()
        self.most_in_flight = self.num_steps = 0

    def launch(self, scheduled: list[Scheduled], num_decodes: int = 0) -> Pending:
        rows, start = [], 0
        for i, (seq, num_tokens) in enumerate(scheduled):
            is_again = i > 0 and scheduled[i - 1][0] is seq
            start = start if is_again else seq.num_computed_tokens
            token_ids = seq.token_ids + self.drafts.get(seq, [])
            slots = [block * BLOCK_SIZE + offset for block in seq.block_table for offset in range(BLOCK_SIZE)]
            writes = [(slots[at], token_ids[at], at) for at in range(start, start + num_tokens)]
            start += num_tokens
            rows.append(Row(seq, writes, slots[:start] if start >= seq.num_tokens else None))
        step = Lagging(self, rows)
        self.queue.append(step)
        self.most_in_flight, self.num_steps = max(self.most_in_flight, len(self.queue)), self.num_steps + 1
        return step

    def run_until(self, last: Lagging) -> None:
        while last in self.queue:
            step = self.queue.popleft()
            for row in step.rows:  # all keys are written before one is read
                for slot, token_id, position in row.writes:
                    self.slots[slot] = self.newest[row.seq, position] if token_id == IN_FLIGHT else token_id
            for row in step.rows:
                step.sampled.append(None if row.context is None else self.sample(row.seq, row.context))

    def sample(self, seq: Sequence, context: list[int]) -> SampledToken:
        token_id = next_token([self.slots[slot] for slot in context])
        self.newest[seq, len(context)] = token_id
        return SampledToken(token_id, -1.0)


class Loop:
    """The loop of an engine with up to `depth` steps in flight: it schedules a step before it reads the last one."""

    def __init__(self, executor: Executor, num_blocks: int, depth: int, **options) -> None:
        tier = HostTier(torch.empty(num_blocks, 1, 2, BLOCK_SIZE, 1, 1), 0, Observer())
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, False, tier, Observer())
        config = EngineConfig(**{"watermark": 0.0, "block_size": BLOCK_SIZE, "max_num_batched_tokens": 16} | options)
        self.scheduler = Scheduler(config, self.manager, Observer())
        self.executor, self.depth = executor, depth
        self.in_flight: deque[tuple[list[Scheduled], list[int], Pending]] = deque()

    def run(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.scheduler.add(seq)
        while self.scheduler.waiting or self.scheduler.running:
            self.launch()
            while len(self.in_flight) >= self.depth or (self.in_flight and not self.scheduler.running):
                self.update(*self.in_flight.popleft())
            self.manager.check_integrity()
        while self.in_flight:
            self.update(*self.in_flight.popleft())
        assert self.manager.num_free_blocks == self.manager.num_blocks

    def launch(self) -> None:
        """Launch a step. Its tokens now count as computed, and the next ones as sampled but unknown."""
        batch = self.scheduler.schedule().batch
        if not batch:
            return
        pending = self.executor.launch(batch)
        for seq, num_tokens in batch:
            seq.num_computed_tokens += num_tokens
            if seq.num_uncomputed_tokens == 0:
                seq.token_ids.append(IN_FLIGHT)
        self.in_flight.append((batch, [seq.num_tokens - 1 for seq, _ in batch], pending))

    def update(self, batch: list[Scheduled], positions: list[int], pending: Pending) -> None:
        """Fill in each token. Remove sequences that have ended, and discard what they have computed since."""
        tokens = pending.tokens()
        for row, ((seq, _), position) in enumerate(zip(batch, positions, strict=True)):
            token = tokens.row(row)
            if not isinstance(token, SampledToken) or seq.finished:
                continue
            later = seq.token_ids[position + 1 :]
            del seq.token_ids[position:]
            seq.append_token(token)
            if seq.finished:
                self.scheduler.remove(seq)
            else:
                seq.token_ids += later


def random_sequences(rng: random.Random, count: int) -> list[Sequence]:
    """Return sequences with different tokens, some of which end at a stop token."""
    seqs = []
    for i in range(count):
        seq = make_sequence(str(i), num_prompt_tokens=rng.randint(1, 20), max_tokens=rng.randint(1, 20))
        seq.token_ids = [rng.randrange(320) for _ in seq.token_ids]
        seq.prompt_token_ids = list(seq.token_ids)
        if rng.random() < 0.5:
            output = generated(seq.prompt_token_ids, 20)
            seq.stop_token_ids = {output[rng.randrange(20)]}
        seqs.append(seq)
    return seqs


def expected_of(seq: Sequence) -> list[int]:
    output = generated(seq.prompt_token_ids, seq.max_num_tokens - seq.num_prompt_tokens)
    ends = [i for i, token_id in enumerate(output) if token_id in seq.stop_token_ids]
    return output[: ends[0] + 1] if ends else output


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_steps_in_flight_change_no_token(depth, seed):
    """Small pools preempt sequences whose newest token is in flight, among chunks and stop tokens."""
    rng, num_blocks = random.Random(seed), 14
    seqs, executor = random_sequences(rng, 12), LaggingExecutor(num_blocks)
    loop = Loop(executor, num_blocks, depth, max_num_seqs=rng.choice([3, 6]))
    loop.run(seqs)
    assert [seq.output_token_ids for seq in seqs] == [expected_of(seq) for seq in seqs]
    assert executor.most_in_flight == depth
    assert loop.scheduler.num_preemptions > 0


class DraftingLoop(Loop):
    """A loop that adds a draft to each decoding sequence, as many guesses as fit the slots that it holds anyway."""

    num_accepted = num_rejected = 0

    def __init__(self, executor: LaggingExecutor, num_blocks: int, rng: random.Random) -> None:
        super().__init__(executor, num_blocks, depth=1)
        self.drafts, self.rng = executor.drafts, rng

    def launch(self) -> None:
        batch: list[Scheduled] = []
        for seq, num_tokens in self.scheduler.schedule().batch:
            batch.append((seq, num_tokens))
            if num_tokens == seq.num_uncomputed_tokens:
                draft = generated(seq.token_ids, len(seq.block_table) * BLOCK_SIZE - seq.num_tokens)
                self.drafts[seq] = [token if self.rng.random() < 0.7 else token ^ 1 for token in draft]
                batch += [(seq, 1)] * len(draft)
        self.in_flight.append((batch, [], self.executor.launch(batch)))

    def update(self, batch: list[Scheduled], positions: list[int], pending: Pending) -> None:
        """Accept the draft's tokens up to the first wrong one, and the sampled token there."""
        output = pending.tokens()
        tokens = [output.row(row) for row in range(len(batch))]
        for i, (seq, num_tokens) in enumerate(batch):
            if i and batch[i - 1][0] is seq:
                continue
            seq.num_computed_tokens += num_tokens
            draft = self.drafts.pop(seq, [])
            for j, token in enumerate(tokens[i : i + 1 + len(draft)]):
                if not isinstance(token, SampledToken):
                    break
                if j:
                    seq.num_computed_tokens += 1
                    self.num_accepted += 1
                seq.append_token(token)
                if seq.finished or (j < len(draft) and draft[j] != token.token_id):
                    self.num_rejected += not seq.finished
                    break
            if seq.finished:
                self.scheduler.remove(seq)


@pytest.mark.parametrize("seed", range(5))
def test_several_rows_per_sequence_change_no_token(seed):
    """With right and wrong drafts, a row's token counts if all tokens before it were right."""
    rng, num_blocks = random.Random(seed), 14
    seqs, executor = random_sequences(rng, 12), LaggingExecutor(num_blocks)
    loop = DraftingLoop(executor, num_blocks, rng)
    loop.run(seqs)
    assert [seq.output_token_ids for seq in seqs] == [expected_of(seq) for seq in seqs]
    assert loop.num_accepted > 20 and loop.num_rejected > 5


# ModelRunner as an Executor


@pytest.fixture
def runner(model) -> ModelRunner:
    device = torch.device("cpu")
    kv_cache = KVCache(model.config, 8, BLOCK_SIZE, torch.float32, device)
    return ModelRunner(model, PagedAttention(kv_cache, tile_size=64), BLOCK_SIZE, device)


def sequence_with_blocks(num_tokens: int) -> Sequence:
    seq = make_sequence("a", num_tokens, max_tokens=5)
    seq.block_table = list(range(8))
    return seq


def test_runner_samples_one_token_for_each_complete_sequence(runner):
    whole, part = sequence_with_blocks(3), sequence_with_blocks(6)
    (token_id, none), _, _ = runner.launch([(whole, 3), (part, 2)]).tokens()
    assert runner.run([(whole, 3)]).token_ids == [token_id] and none == NO_TOKEN
    assert (whole.num_computed_tokens, whole.num_tokens) == (0, 3), "the caller advances it"
    assert (runner.num_steps, runner.num_tokens) == (2, 8)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_error_waits_for_its_reader_and_keeps_nothing_of_the_step_alive(runner, monkeypatch):
    kept = []

    def fails(batch):
        hidden = torch.zeros(len(batch), 32)
        kept.append(weakref.ref(hidden))
        raise RuntimeError("no memory")

    monkeypatch.setattr(runner.backend, "compute", fails)
    with no_collector():
        pending = runner.launch([(sequence_with_blocks(3), 3)])
        with pytest.raises(RuntimeError, match="no memory") as raised:
            pending.tokens()
        del raised
        assert kept[0]() is None, "only the garbage collector would free it"
