"""The inputs of decode steps: rows follow the batch, block tables stay current, padding does nothing."""

import random

import torch

from ...backends.gpu.inputs import NO_SLOT, HostBuffer, StepInputs, sampling_params
from ...backends.gpu.plain import fill_placeholders
from ...backends.torch.sampler import row_params
from ...engine.sequence import Sequence
from ...requests.sampling_params import SamplingParams
from ..testing.sequences import make_sequence

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def sequence(num_tokens: int, blocks: list[int]) -> Sequence:
    seq = make_sequence("a", num_tokens, max_tokens=100)
    seq.token_ids, seq.block_table = list(range(100, 100 + num_tokens)), blocks
    seq.num_computed_tokens = num_tokens - 1
    return seq


def tables_by_row(inputs: StepInputs, num_rows: int) -> torch.Tensor:
    """Return the block tables of the first rows, as a kernel looks them up, [num_rows, max_blocks]."""
    order = inputs.device["rows"][:num_rows].argsort()
    return inputs.block_tables()[inputs.device["table_indices"][:num_rows][order].long()]


def decodes(*seqs):
    return [(seq, 1) for seq in seqs]


def test_a_row_holds_a_sequences_token_slot_and_blocks():
    inputs = StepInputs(4, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    inputs.fill(decodes(sequence(6, [7, 9]), sequence(1, [2])))
    assert inputs.device["input_ids"][:2].tolist() == [105, 100] and inputs.device["positions"][:2].tolist() == [5, 0]
    assert inputs.device["slot_mapping"].tolist() == [9 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE, NO_SLOT, NO_SLOT]
    assert inputs.device["context_lens"].tolist() == [6, 1, 0, 0]
    assert tables_by_row(inputs, 2).tolist() == [[7, 9, 0], [2, 0, 0]]


def test_rows_with_the_longest_contexts_are_computed_first():
    lengths, inputs = [3, 9, 1, 9, 7], StepInputs(7, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    seqs = [sequence(length, [i] * 3) for i, length in enumerate(lengths)]
    for batch in (seqs, seqs, seqs[1:]):
        inputs.fill(decodes(*batch))
        lens = inputs.device["context_lens"].tolist()
        assert lens == sorted([len(seq.token_ids) for seq in batch], reverse=True) + [0] * (7 - len(batch))
        rows, tables = inputs.device["rows"].tolist(), tables_by_row(inputs, len(batch))
        assert sorted(rows) == [*range(7)], "each row, with its sequence or without, is computed once"
        for row, length in zip(rows, lens[: len(batch)], strict=False):
            assert length == len(batch[row].token_ids) and tables[row].tolist() == batch[row].block_table
        for seq in batch:
            seq.token_ids.append(0)
            seq.num_computed_tokens += 1


def test_a_row_has_the_sampling_parameters_of_its_sequence():
    params = [{"temperature": 0}, {"temperature": 0.5, "top_k": 3, "seed": 1}, {"top_p": 0.5, "min_p": 0.1, "seed": 2}]
    seqs = [sequence(6, [i, i + 10]) for i in range(3)]
    for seq, each in zip(seqs, params, strict=True):
        seq.params = SamplingParams(**each)
    inputs = StepInputs(4, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    for batch in (seqs, seqs, seqs[1:], seqs[:1]):
        inputs.fill(decodes(*batch))
        expected = row_params([seq.sampling_row() for seq in batch], CPU)
        result = sampling_params(inputs.device, len(batch))
        draws = expected.temperature > 0
        assert torch.equal(result.temperature, expected.temperature)
        for one, other in zip(result, expected, strict=True):
            assert torch.equal(one[draws], other[draws])
        assert inputs.device["temperature"][len(batch) :].eq(0).all()
        for seq in batch:
            seq.token_ids.append(0)
            seq.num_computed_tokens += 1


def entries_sent(inputs: StepInputs, seqs: list[Sequence]) -> list[int]:
    """Return the table entries that the next step sends. The last one of StepInputs means none."""
    inputs.fill(decodes(*seqs))
    sent = inputs.device["changed_entries"].tolist()
    inputs.block_tables()
    return [entry for entry in sent if entry != inputs._flat_tables.numel() - 1]  # noqa: SLF001 - its size


def test_a_sequence_sends_its_table_once_whatever_its_rows_are():
    a, b, c, d = (sequence(6, [i, i + 10]) for i in range(1, 5))
    inputs = StepInputs(6, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    for seqs, num_sent in [([a, b, c], 6), ([c, b], 0), ([b, d, d, c], 2), ([d, c, b, b], 0)]:
        assert len(entries_sent(inputs, seqs)) == num_sent
        assert tables_by_row(inputs, len(seqs))[:, 0].tolist() == [seq.block_table[0] for seq in seqs]


def test_each_token_of_a_draft_has_a_row():
    a, b = sequence(6, [7, 9]), sequence(3, [2])
    a.draft_token_ids = [50, 51, 52]
    inputs = StepInputs(6, max_blocks=3, block_size=BLOCK_SIZE, device=CPU)
    entries_sent(inputs, [b, a])
    a.block_table = [7, 9, 4]
    assert len(entries_sent(inputs, [b, a, a, a, a])) == 1
    assert inputs.device["input_ids"][:5].tolist() == [102, 105, 50, 51, 52]
    assert inputs.device["positions"][:5].tolist() == [2, 5, 6, 7, 8]
    lens, rows = inputs.device["context_lens"].tolist(), inputs.device["rows"].tolist()
    assert sorted(zip(rows, lens, strict=True)) == [*enumerate([3, 6, 7, 8, 9, 0])]
    assert inputs.device["slot_mapping"][:5].tolist() == [10, 37, 38, 39, 16]
    assert tables_by_row(inputs, 5)[1:].tolist() == [[7, 9, 4]] * 4
    a.draft_token_ids = [60]
    inputs.fill(decodes(a, a, b))
    assert inputs.device["input_ids"][:3].tolist() == [105, 60, 102]


def test_a_step_sends_only_changed_table_entries():
    seqs = [sequence(BLOCK_SIZE, [i]) for i in range(3)]
    inputs = StepInputs(3, max_blocks=8, block_size=BLOCK_SIZE, device=CPU)

    def sent():
        return entries_sent(inputs, seqs)

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
    assert fill_placeholders(inputs.device["input_ids"][:2], torch.arange(200, 208)).tolist() == [105, 205]
    assert inputs.device["positions"][:2].tolist() == [5, 3]


def test_step_launched_ahead_keeps_its_inputs_while_the_next_one_is_filled(monkeypatch):
    """Copies of steps start late: only when the host waits for them, or at the end."""
    real, late = HostBuffer.copy_to, dict[HostBuffer, torch.Tensor]()

    def start(buffer: HostBuffer) -> None:
        if buffer in late:
            real(buffer, late.pop(buffer))

    monkeypatch.setattr(HostBuffer, "copy_to", lambda self, buffer: late.update({self: buffer}))
    monkeypatch.setattr(HostBuffer, "wait", start)
    inputs, seq = StepInputs(1, max_blocks=3, block_size=BLOCK_SIZE, device=CPU), sequence(6, [7, 9])
    inputs.fill(decodes(seq))
    first = next(iter(late))
    seq.token_ids.append(0)
    seq.num_computed_tokens += 1
    inputs.fill(decodes(seq))
    assert len(late) == 2, "the host has waited for the device"
    start(first)
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
        inputs.fill(decodes(*seqs))
        tables, order = tables_by_row(inputs, len(seqs)), inputs.device["rows"].argsort()
        if rng.random() < 0.05:
            inputs.forget()
        for row, seq in enumerate(seqs):
            assert tables[row, : len(seq.block_table)].tolist() == seq.block_table
            assert inputs.device["input_ids"][row] == seq.token_ids[-1]
            assert inputs.device["context_lens"][order[row]] == len(seq.token_ids)
            at = len(seq.token_ids) - 1
            assert inputs.device["positions"][row] == at
            slot = seq.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            assert inputs.device["slot_mapping"][row] == slot
        assert inputs.device["context_lens"][len(seqs) :].eq(0).all()
        for seq in seqs:
            seq.token_ids.append(rng.randrange(100))
            seq.num_computed_tokens += 1
            if len(seq.token_ids) > BLOCK_SIZE * len(seq.block_table):
                seq.block_table.append(rng.randrange(100))
            elif rng.random() < 0.05:
                seq.block_table = [*seq.block_table[:-1], rng.randrange(100)]  # as after copy-on-write
        seqs = [seq for seq in seqs if len(seq.block_table) <= 40]
