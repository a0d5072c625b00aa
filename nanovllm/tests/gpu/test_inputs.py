"""The inputs of decode steps: sequences keep their rows, block tables stay current, padding does nothing."""

import random

import torch

from ...backends.gpu.inputs import NO_SLOT, HostBuffer, StepInputs
from ...engine.sequence import Sequence
from ..engine.helpers import make_sequence

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def sequence(num_tokens: int, blocks: list[int]) -> Sequence:
    seq = make_sequence("a", num_tokens, max_tokens=100)
    seq.token_ids, seq.block_table = list(range(100, 100 + num_tokens)), blocks
    seq.num_computed_tokens = num_tokens - 1
    return seq


def decodes(*seqs):
    return [(seq, 1) for seq in seqs]


def test_a_row_holds_a_sequences_token_slot_and_blocks():
    inputs = StepInputs(4, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    rows = inputs.fill(decodes(sequence(6, [7, 9]), sequence(1, [2])))
    inputs.apply_changes()
    assert rows == [0, 1]
    assert inputs.device["input_ids"][:2].tolist() == [105, 100] and inputs.device["positions"][:2].tolist() == [5, 0]
    assert inputs.device["slot_mapping"].tolist() == [9 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE, NO_SLOT, NO_SLOT]
    assert inputs.device["context_lens"].tolist() == [6, 1, 0, 0]
    assert inputs.block_tables[:2].tolist() == [[7, 9, 0], [2, 0, 0]]


def test_sequences_keep_their_rows_and_the_last_one_fills_a_gap():
    a, b, c, d = (sequence(6, [i, i + 10]) for i in range(1, 5))
    inputs = StepInputs(4, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    assert inputs.fill(decodes(a, b, c)) == [0, 1, 2]
    assert inputs.fill(decodes(b, c)) == [1, 0]
    assert inputs.fill(decodes(c, d, b)) == [0, 2, 1]


def test_each_token_of_a_draft_has_a_row():
    a, b = sequence(6, [7, 9]), sequence(3, [2])
    a.draft_token_ids = [50, 51, 52]
    inputs = StepInputs(6, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    assert inputs.fill(decodes(b, a)) == [0, 1]
    inputs.apply_changes()
    a.block_table = [7, 9, 4]
    rows = inputs.fill(decodes(b, a, a, a, a))
    inputs.apply_changes()
    assert rows == [0, 1, 2, 3, 4]
    assert inputs.device["input_ids"][:5].tolist() == [102, 105, 50, 51, 52]
    assert inputs.device["positions"][:5].tolist() == [2, 5, 6, 7, 8]
    assert inputs.device["context_lens"].tolist() == [3, 6, 7, 8, 9, 0]
    assert inputs.device["slot_mapping"][:5].tolist() == [10, 37, 38, 39, 16]
    assert inputs.block_tables[1:5].tolist() == [[7, 9, 4]] * 4
    a.draft_token_ids = [60]
    assert inputs.fill(decodes(a, a, b)) == [1, 2, 0]
    assert inputs.device["input_ids"][:3].tolist() == [102, 105, 60]


def test_a_step_sends_only_changed_table_entries():
    seqs = [sequence(BLOCK_SIZE, [i]) for i in range(3)]
    inputs = StepInputs(3, max_blocks=8, block_size=BLOCK_SIZE, device=CPU)
    unused = 3 * 8

    def sent():
        inputs.fill(decodes(*seqs))
        return [entry for entry in inputs.device["changed_entries"].tolist() if entry != unused]

    assert sent() == [0, 8, 16] and sent() == []
    seqs[1].block_table, seqs[1].num_computed_tokens = [1, 5], BLOCK_SIZE
    seqs[1].token_ids.append(0)
    assert sent() == [9]
    seqs[2].block_table = [6]  # as after a preemption
    assert sent() == [16]


def test_placeholders_become_the_tokens_of_the_latest_step():
    known, unknown = sequence(6, [7, 9]), sequence(3, [2])
    unknown.note_launched(1)
    unknown.placeholder_id = ~5
    inputs = StepInputs(4, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    inputs.fill(decodes(known, unknown))
    inputs.fill_placeholders(torch.arange(200, 208))
    assert inputs.device["input_ids"][:2].tolist() == [105, 205] and inputs.device["positions"][:2].tolist() == [5, 3]


def test_step_launched_ahead_keeps_its_inputs_while_the_next_one_is_prepared(monkeypatch):
    """Copies of steps start late: only when the host waits for them, or at the end."""
    real, late = HostBuffer.copy_to, dict[HostBuffer, torch.Tensor]()

    def start(buffer: HostBuffer) -> None:
        if buffer in late:
            real(buffer, late.pop(buffer))

    monkeypatch.setattr(HostBuffer, "copy_to", lambda self, buffer: late.update({self: buffer}))
    monkeypatch.setattr(HostBuffer, "wait", start)
    inputs, seq = StepInputs(1, max_blocks=3, block_size=BLOCK_SIZE, device=CPU), sequence(6, [7, 9])
    inputs.fill(decodes(seq))
    inputs.prepare()
    assert len(late) == 1, "the host has waited for the device"
    start(next(iter(late)))
    assert inputs.device["positions"].tolist() == [5]


def test_the_device_has_the_batchs_inputs_through_random_histories():
    rng, seqs = random.Random(0), []
    inputs = StepInputs(5, max_blocks=40, block_size=BLOCK_SIZE, device=CPU)
    for _ in range(300):
        seqs = [seq for seq in seqs if rng.random() > 0.02]
        while len(seqs) < 5 and rng.random() < 0.5:
            length = rng.randint(1, 60)
            seqs.append(sequence(length, rng.sample(range(100), -(-length // BLOCK_SIZE))))
        if rng.random() < 0.3:
            rng.shuffle(seqs)
        rows = inputs.fill(decodes(*seqs))
        inputs.apply_changes()
        if rng.random() < 0.8:
            inputs.prepare()
        assert sorted(rows) == list(range(len(seqs)))
        for row, seq in zip(rows, seqs, strict=True):
            assert inputs.block_tables[row, : len(seq.block_table)].tolist() == seq.block_table
            assert inputs.device["input_ids"][row] == seq.token_ids[-1]
            assert inputs.device["context_lens"][row] == len(seq.token_ids)
            at = len(seq.token_ids) - 1
            assert inputs.device["positions"][row] == at
            slot = seq.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            assert inputs.device["slot_mapping"][row] == slot
        assert inputs.device["context_lens"][len(seqs) :].eq(0).all()
        for seq in seqs:
            seq.token_ids.append(rng.randrange(100))
            seq.num_computed_tokens += 1
            if len(seq.token_ids) > BLOCK_SIZE * len(seq.block_table):
                seq.block_table = [*seq.block_table, rng.randrange(100)]
            elif rng.random() < 0.05:
                seq.block_table = [*seq.block_table[:-1], rng.randrange(100)]  # as after copy-on-write
        seqs = [seq for seq in seqs if len(seq.block_table) <= 40]
