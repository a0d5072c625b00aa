"""Stop strings and repetitions, compared with their definitions on random texts."""

import random

import pytest

from ...engine.output_text import OutputText, RepetitionDetector
from ...requests.sampling_params import MAX_STOP_CHARACTERS, RepetitionDetectionParams, SamplingParams


class Characters:
    """A decoder of tokens that are strings."""

    def push(self, tokens):
        return "".join(tokens)

    def flush(self):
        return ""


def ends_in_repetition(token_ids, params):
    sizes = range(max(1, params.min_pattern_size), min(params.max_pattern_size, len(token_ids)) + 1)
    ends = {size: token_ids[-size * params.min_count :] for size in sizes if size * params.min_count <= len(token_ids)}
    return any(end == end[:size] * params.min_count for size, end in ends.items())


@pytest.mark.parametrize("seed", range(20))
def test_repetitions_are_those_of_the_definition(seed):
    rng = random.Random(seed)
    least = rng.choice([0, 1, 2, 5, 40])
    params = RepetitionDetectionParams(rng.choice([least + 1, 60, 2**63]), least, rng.choice([2, 2, 3, 5]))
    detector, token_ids = RepetitionDetector(params), []
    pattern = [rng.randrange(3) for _ in range(rng.randrange(1, 50))]
    for i in range(200):
        token_ids.append(pattern[i % len(pattern)] if rng.random() < 0.98 else rng.randrange(3))
        assert detector.push(token_ids[-1]) == ends_in_repetition(token_ids, params), token_ids


@pytest.mark.parametrize("sizes", [(2**63, 2**63, 2), (2**63, 0, 2**63), (2**63, 2**62, 2**63)])
def test_numbers_that_no_output_reaches_find_nothing(sizes):
    detector = RepetitionDetector(RepetitionDetectionParams(*sizes))
    assert not any(detector.push(5) for _ in range(100))


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_first_complete_stop_string_ends_a_random_text(seed, is_kept):
    rng = random.Random(seed)
    for _ in range(20):
        stops = ["".join(rng.choices("ab", k=rng.randint(2, 7))) for _ in range(rng.randint(1, 4))]
        pieces = ["".join(rng.choices("ab", k=rng.randint(0, 4))) for _ in range(20)]
        text = OutputText(Characters(), tuple(stops), keep_stop=is_kept)
        whole = "".join(pieces)
        found = [(whole.find(stop) + len(stop), i) for i, stop in enumerate(stops) if stop in whole]
        end, index = min(found, default=(len(whole), None))
        shown = ""
        for piece in pieces:
            ends = text.push(piece)
            assert "".join(text.pieces).startswith(shown), "text that was shown is never taken back"
            shown = "".join(text.pieces)
            if ends:
                break
            assert whole.startswith(shown)
        text.close()
        assert text.stop_string == (None if index is None else stops[index])
        assert "".join(text.pieces) == whole[: end if is_kept or index is None else end - len(stops[index])]


def test_long_stop_strings_are_refused_with_both_numbers():
    SamplingParams(stop=["a" * (MAX_STOP_CHARACTERS - 1), "b"])
    for stop in ("a" * (MAX_STOP_CHARACTERS + 1), ["a" * MAX_STOP_CHARACTERS, "b"]):
        with pytest.raises(ValueError, match=r"stop must have at most 4,096 characters .*, got 4,097"):
            SamplingParams(stop=stop)
