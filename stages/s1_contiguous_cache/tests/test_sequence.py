"""Sequence: what a sampled token does to it, and when it ends."""

import pytest

from ..llama import Tokenizer
from ..sampling import SampledToken, SamplingParams
from ..sequence import Sequence
from .helpers import EOS, byte_ids


@pytest.fixture
def new(tokenizer: Tokenizer):
    """Return a function that makes a sequence of a prompt of 3 tokens."""

    def make(max_tokens: int = 100, **params) -> Sequence:
        return Sequence(
            request_id="a",
            prompt="the",
            prompt_token_ids=[1, *byte_ids("ab")],
            params=SamplingParams(max_tokens=max_tokens, **params),
            seed=0,
            stop_token_ids={EOS, *byte_ids("!")},
            max_num_tokens=3 + max_tokens,
            tokenizer=tokenizer,
        )

    return make


def append(seq: Sequence, *token_ids: int) -> Sequence:
    """Append sampled tokens, as the engine does, which stops at the end of the sequence."""
    for number, token_id in enumerate(token_ids):
        assert not seq.finished, f"it ended ({seq.finish_reason}) after {number} of {len(token_ids)} tokens"
        seq.append_token(SampledToken(token_id, -0.5))
    return seq


def ending(seq: Sequence) -> tuple[str | None, str]:
    return seq.finish_reason, seq.text


def test_sampled_token_joins_the_sequence(new):
    seq = append(new(), *byte_ids("xyz"))
    assert seq.token_ids == [1, *byte_ids("abxyz")], "the prompt, and 3 sampled tokens"
    assert ending(seq) == (None, "xyz"), "it goes on, and its text is that of the sampled tokens"
    assert seq.cumulative_logprob == -1.5, "3 tokens of -0.5 each"
    assert seq.num_computed_tokens == 0, "a sampled token is not computed yet"


def test_time_of_the_first_token_is_noted_once(new):
    seq = new()
    assert append(seq, 70).metrics.first_token_time is not None, "the first token has come"
    first = seq.metrics.first_token_time
    assert append(seq, 71).metrics.first_token_time == first, "the second token does not change it"


def test_sequence_ends_with_its_last_token_and_not_before(new):
    seq = append(new(max_tokens=3), *byte_ids("xyz"))
    assert ending(seq) == ("length", "xyz"), "3 sampled tokens, max_tokens is 3"
    assert ending(append(new(max_tokens=1), *byte_ids("x"))) == ("length", "x"), "1 sampled token, max_tokens is 1"


def test_stop_token_ends_the_sequence_and_has_no_text(new):
    for stop in (EOS, *byte_ids("!")):
        seq = append(new(), *byte_ids("xy"), stop)
        assert ending(seq) == ("stop", "xy"), f"the last token is the stop token {stop}"
        assert seq.token_ids[-1] == stop, "a stop token stays in token_ids"
        assert seq.cumulative_logprob == -1.5, "its logprob counts, too"


def test_stop_token_in_the_last_place_is_a_stop(new):
    seq = append(new(max_tokens=2), *byte_ids("x"), EOS)
    assert ending(seq) == ("stop", "x"), "2 sampled tokens, max_tokens is 2, and the last one is a stop token"


def test_stop_string_cuts_the_text(new):
    seq = append(new(stop="--"), *byte_ids("x-y--"))
    assert ending(seq) == ("stop", "x-y"), 'x-y-- with the stop string "--"'
    assert seq.token_ids == [1, *byte_ids("abx-y--")], "token_ids are not cut"


def test_stop_string_in_the_last_place_is_a_stop(new):
    seq = append(new(max_tokens=3, stop="--"), *byte_ids("x--"))
    assert ending(seq) == ("stop", "x"), "3 sampled tokens, max_tokens is 3, and the text ends in a stop string"


def test_stop_string_that_is_complete_first_ends_the_text(new, tokenizer):
    """One token has the text "ittle": "tt" is complete before "ittle" is."""
    [little] = [i for i in range(320) if tokenizer.decode([i]) == "ittle"]
    seq = append(new(stop=["ittle", "tt"]), *byte_ids("l"), little)
    assert ending(seq) == ("stop", "li"), 'little with the stop strings "ittle" and "tt"'


def test_of_two_stop_strings_that_are_complete_together_the_longer_one_counts(new):
    seq = append(new(stop=["--", "x--"]), *byte_ids("wx--"))
    assert ending(seq) == ("stop", "w"), 'wx-- with the stop strings "--" and "x--"'


def test_stop_string_of_the_prompt_does_not_count(new):
    assert ending(append(new(stop="abx"), *byte_ids("xy"))) == (None, "xy"), 'the prompt ends in "ab"; a stop is "abx"'


def test_sequence_without_a_tokenizer_has_no_text():
    seq = Sequence("a", None, [5], SamplingParams(max_tokens=2, stop="x"), 0, {EOS}, max_num_tokens=3)
    assert ending(append(seq, 70, 71)) == ("length", "")
