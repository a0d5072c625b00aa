"""What sampling costs at a real vocabulary: stages/bench/sampler.py."""

import pytest
import torch

from stages.bench import sampler

MOST = 3  # times argmax and log_softmax of the same logits


def test_the_table_has_each_way_on_each_number_of_threads(monkeypatch):
    monkeypatch.setattr(sampler, "measure_ways", lambda logits: {"top_p": {"ms": 1.0, "ratio": 1.0}})
    monkeypatch.setattr(sampler, "VOCAB_SIZE", 300)
    threads = torch.get_num_threads()
    found = sampler.measure(None)
    assert {*found["sampler"]} == {"peaked_1", "peaked_2", "flat_1", "flat_2"}
    assert torch.get_num_threads() == threads
    likeliest = sampler.peaked(3).softmax(dim=-1).topk(50).values.sum(dim=-1)
    assert (likeliest > 0.9).all() and (sampler.flat(3).softmax(dim=-1).topk(50).values.sum(dim=-1) < 0.9).all()


def test_ways_are_compared_with_argmax_and_log_softmax(monkeypatch):
    monkeypatch.setattr(sampler, "VOCAB_SIZE", 300)
    found = sampler.measure_ways(sampler.flat(2), rounds=2)
    assert {*found} == {*sampler.WAYS} and all(row["ms"] > 0 < row["least"] <= row["ratio"] for row in found.values())


@pytest.mark.full
@pytest.mark.parametrize("logits", ["peaked", "flat"])
def test_sampling_takes_at_most_3_times_argmax_and_log_softmax(logits):
    """The medians of five measurements, on one thread: another process on the machine slows both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = getattr(sampler, logits)()
        found = [sampler.measure_ways(rows, rounds=5) for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    for way in sampler.WAYS:
        ratios = sorted(each[way]["ratio"] for each in found)
        assert ratios[len(ratios) // 2] <= MOST, (way, ratios)
