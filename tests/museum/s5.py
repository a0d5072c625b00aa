"""Tests that find every fault in stage 5's room, each one that of its name."""

from .scripted import add, queues, scripted_engine, step, tokens_alone, tokens_of_all


def test_samples_get_their_tokens(checkpoint):
    engine, outputs = scripted_engine(checkpoint, num_blocks=16), {}
    prompt = add(engine, "a", num_tokens=5, max_tokens=8, n=2)
    while engine.has_unfinished_requests():
        outputs |= step(engine)
    assert tokens_of_all(outputs["a"]) == [tokens_alone(prompt, 8, sample_index=i) for i in range(2)]


def test_one_of_n(checkpoint):
    """A request that its client has given up holds nothing."""
    engine = scripted_engine(checkpoint, num_blocks=16)
    add(engine, "a", num_tokens=5, max_tokens=40, n=3)
    for _ in range(3):
        step(engine)
    engine.abort_request("a")
    assert queues(engine) == "none run, none wait"
    assert engine.kv_cache_manager.num_free_blocks == 16
