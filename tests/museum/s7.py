"""Tests that find every fault in stage 7's room, each one that of its name."""

from .scripted import BLOCK_SIZE, add, run, scripted_engine, tokens_alone, tokens_of


def offloading_engine(checkpoint, num_host_blocks: int):
    """Return an engine with four blocks on the device."""
    host = {"kv_offloading_tokens": num_host_blocks * BLOCK_SIZE}
    return scripted_engine(checkpoint, num_blocks=4, enable_prefix_caching=True, **host)


def ask(engine, name: str, num_tokens: int) -> None:
    """Serve a request for one token. It must be the one that the request gets alone."""
    prompt = add(engine, name, num_tokens, max_tokens=1)
    assert tokens_of(run(engine)[name]) == tokens_alone(prompt, 1), name


def test_a_request_alone_gets_its_tokens(checkpoint):
    engine = offloading_engine(checkpoint, 16)
    prompt = add(engine, "a", num_tokens=5, max_tokens=8)
    assert tokens_of(run(engine)["a"]) == tokens_alone(prompt, 8)


def test_never_unpinned(checkpoint):
    """Two prompts take turns, so each is evicted while the host has it already. run() checks the host's pool, too."""
    engine = offloading_engine(checkpoint, 16)
    for turn in range(3):
        for name in "ab":
            ask(engine, f"{name}{turn}", 13)
    assert engine.host_tier.num_blocks_loaded > 0


def test_source_not_held(checkpoint):
    """The host has room for the two blocks of a, and b fills the device. When a returns, blocks of b must make room."""
    engine = offloading_engine(checkpoint, 2)
    for name, num_tokens in (("a", 9), ("b", 16), ("a again", 9)):
        ask(engine, name, num_tokens)
    assert engine.host_tier.num_blocks_loaded == 2


def test_slow_store(checkpoint):
    """The blocks of a are evicted by b, and come back from the host."""
    engine = offloading_engine(checkpoint, 16)
    for name, num_tokens in (("a", 9), ("b", 16), ("a again", 9)):
        ask(engine, name, num_tokens)
    assert engine.host_tier.num_blocks_loaded == 2
