"""Tests that find every fault in stage 4's room, each one that of its name."""

from .scripted import add, run, scripted_engine, tokens_alone, tokens_of


def test_a_request_alone_gets_its_tokens(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16)
    prompt = add(engine, "a", num_tokens=5, max_tokens=8)
    assert tokens_of(run(engine)["a"]) == tokens_alone(prompt, 8)


def preempted(checkpoint):
    """Return an engine that has preempted a request with an output, the outputs, and the prompts."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    prompts = {name: add(engine, name, num_tokens=6, max_tokens=8) for name in "ab"}
    outputs = run(engine)
    assert engine.scheduler.num_preemptions > 0
    return outputs, prompts


def test_counted_short(checkpoint):
    """Two sequences outgrow the pool. One of them makes room: nothing is taken that isn't there."""
    preempted(checkpoint)


def test_half_reset(checkpoint):
    """Every token of the script has a logprob of -1, and counts once."""
    outputs, _ = preempted(checkpoint)
    for output in outputs.values():
        [sample] = output.outputs
        assert sample.cumulative_logprob == -len(sample.token_ids)


def test_outlived_memory(checkpoint):
    """A preempted request gets the tokens that it would get alone."""
    outputs, prompts = preempted(checkpoint)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == tokens_alone(prompt, 8)
