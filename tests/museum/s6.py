"""Tests that find every fault in stage 6's room, each one that of its name."""

from ..sampling import SamplingParams
from .scripted import add, run, scripted_engine, step, tokens_alone, tokens_of


def caching_engine(checkpoint, num_blocks: int):
    return scripted_engine(checkpoint, num_blocks, enable_prefix_caching=True)


def test_a_request_alone_gets_its_tokens(checkpoint):
    engine = caching_engine(checkpoint, 16)
    prompt = add(engine, "a", num_tokens=5, max_tokens=8)
    assert tokens_of(run(engine)["a"]) == tokens_alone(prompt, 8)


def test_nothing_left(checkpoint):
    """A prompt of two whole blocks, twice: run() gives up if no token comes."""
    engine = caching_engine(checkpoint, 16)
    for name in ("a1", "a2"):
        prompt = add(engine, name, num_tokens=8, max_tokens=4)
        assert tokens_of(run(engine)[name]) == tokens_alone(prompt, 4)


def test_unwritten_slot(checkpoint):
    """A request of three whole blocks, and then a turn that begins with it."""
    engine = caching_engine(checkpoint, 16)
    text = add(engine, "a", num_tokens=5, max_tokens=7)
    text += tokens_of(run(engine)["a"])
    engine.add_request("b", [*text, 9], SamplingParams(max_tokens=4, seed=0))
    assert tokens_of(run(engine)["b"]) == tokens_alone([*text, 9], 4)


def test_remembered_hits(checkpoint):
    """The prefix of a is cached. c would hit it, but waits for room, and b grows into it."""
    engine = caching_engine(checkpoint, 6)
    prefix = add(engine, "a", num_tokens=9, max_tokens=1)[:8]
    run(engine)
    add(engine, "b", num_tokens=13, max_tokens=8)
    step(engine)
    prompt = [*prefix, *[9] * 8]
    engine.add_request("c", prompt, SamplingParams(max_tokens=4, seed=0))
    assert tokens_of(run(engine)["c"]) == tokens_alone(prompt, 4)
