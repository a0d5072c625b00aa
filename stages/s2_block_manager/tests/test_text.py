"""Text: how it becomes tokens, how tokens become text as they come, and where the text ends."""

import random
from itertools import pairwise

import pytest

from ..llama import StreamDecoder, Tokenizer
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .helpers import BOS, EOS, byte_ids

SPELLINGS = ["bytes", "pieces"]  # a text is one token for each byte, or longer pieces


def run(llm: LLM, prompt: str = "the", **params) -> list[RequestOutput]:
    """Return the stream of one request."""
    return list(llm.stream([prompt], SamplingParams(**{"max_tokens": 200, "temperature": 0.0} | params)))


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def ending(llm: LLM, **params) -> tuple[str, list[int], str]:
    completion = run(llm, **params)[-1].outputs[0]
    return completion.text, completion.token_ids, completion.finish_reason


def spell(tokenizer: Tokenizer, text: str, spelling: str = "pieces") -> list[int]:
    """Return the tokens of a text that continues another one."""
    return byte_ids(text) if spelling == "bytes" else tokenizer.encode("\n" + text, add_bos=False)[2:]


def assert_never_taken_back(outputs: list[RequestOutput]) -> None:
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts(outputs))), texts(outputs)


# Tokenizer


def test_text_gets_bos_and_decodes_to_itself(tokenizer):
    for text in ("the little fox", "Zebra 漢字 🙂\n\n  two  spaces", "the end "):
        ids = tokenizer.encode(text)
        assert ids[0] == BOS and tokenizer.decode(ids) == text


def test_special_tokens_in_a_text_are_special(tokenizer):
    ids = tokenizer.encode("the</s><s>fox", add_bos=False)
    assert ids == [*tokenizer.encode("the", add_bos=False), EOS, BOS, *spell(tokenizer, "fox")]


def test_only_the_start_of_a_text_gets_a_space_before_its_first_word(tokenizer):
    first, after_special = tokenizer.encode("fox", add_bos=False), tokenizer.encode("</s>fox", add_bos=False)[1:]
    assert tokenizer.decode([*spell(tokenizer, " a"), *first]) == "a fox"
    assert tokenizer.decode([*spell(tokenizer, " a"), *after_special]) == "afox"


def test_special_and_unknown_ids_have_no_text(tokenizer):
    assert tokenizer.decode([BOS, *byte_ids("a"), 0, *byte_ids("b"), EOS, 320, 5000]) == "ab"


# Streaming


def test_character_is_shown_with_its_last_byte(tokenizer):
    decoder = StreamDecoder(tokenizer, [BOS])
    assert [decoder.push(token_id) for token_id in byte_ids("a🙂é")] == ["a", "", "", "", "🙂", "", "é"]


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer):
    decoder = StreamDecoder(tokenizer, [BOS])
    assert [decoder.push(token_id) for token_id in byte_ids("🙂")[:3]] == ["", "", ""]
    assert decoder.flush() == tokenizer.decode(byte_ids("🙂")[:3])


def test_character_that_the_prompt_began_is_shown(tokenizer):
    decoder = StreamDecoder(tokenizer, [BOS, *byte_ids("a🙂")[:3]])
    assert [decoder.push(token_id) for token_id in byte_ids("🙂")[2:]] == ["", "🙂"]


def test_first_word_after_a_prompt_keeps_its_space(tokenizer):
    fox = tokenizer.encode("fox", add_bos=False)
    assert "".join(map(StreamDecoder(tokenizer, tokenizer.encode("the")).push, fox)) == " fox"
    assert "".join(map(StreamDecoder(tokenizer, [BOS]).push, fox)) == "fox"


@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_random_tokens_join_to_the_text_of_all(tokenizer, seed):
    """Incomplete characters, special tokens and spaces are frequent."""
    space = [i for i in range(320) if tokenizer.decode([*byte_ids("a"), i]) == "a "]
    frequent = [0, BOS, EOS, *space, *space, *byte_ids(" é🙂"), *range(259, 270)]
    rng = random.Random(seed)
    for _ in range(200):
        prompt = tokenizer.encode(rng.choice(["", "the", "the fox 🙂", "the\n"]))
        ids = [rng.choice(frequent) if rng.random() < 0.7 else rng.randrange(320) for _ in range(rng.randint(1, 20))]
        decoder = StreamDecoder(tokenizer, prompt)
        text = "".join(map(decoder.push, ids)) + decoder.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids), (prompt, ids)


def test_stream_shows_whole_characters_and_takes_nothing_back(scripted, tokenizer):
    ids = [*spell(tokenizer, " fox"), *byte_ids(" 🙂"), *spell(tokenizer, " the end"), EOS]
    outputs = run(scripted(ids))
    assert texts(outputs)[-1] == " fox 🙂 the end"
    assert_never_taken_back(outputs)
    assert not any("\ufffd" in text for text in texts(outputs))


# Stop tokens


def test_eos_stays_in_token_ids_and_not_in_text(scripted, tokenizer):
    ids = [*spell(tokenizer, " fox"), EOS]
    assert ending(scripted([*ids, 7])) == (" fox", ids, "stop")


def test_ignore_eos_continues_to_max_tokens(scripted, tokenizer):
    ids = [*spell(tokenizer, " fox"), EOS, *spell(tokenizer, " the")]
    assert ending(scripted(ids), max_tokens=len(ids), ignore_eos=True) == (" fox the", ids, "length")


def test_eos_as_the_last_token_is_a_stop(scripted):
    assert ending(scripted([7, EOS]), max_tokens=2)[2] == "stop"
    assert ending(scripted([7, 8]), max_tokens=2)[2] == "length"


def test_text_of_a_stop_token_is_not_shown(scripted, tokenizer):
    fox = spell(tokenizer, " fox")[0]
    ids = [*byte_ids("ab"), EOS, fox]
    assert ending(scripted([*ids, 7]), stop_token_ids=[300, fox], ignore_eos=True) == ("ab", ids, "stop")


# Stop strings


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    "stop, text",
    [
        ("the end", " a little fox. And that is "),
        ("fo", " a little "),
        (" a", ""),
        ("is the en", " a little fox. And that "),
    ],
)
def test_stop_string_cuts_the_text_wherever_tokens_end(scripted, tokenizer, spelling, stop, text):
    ids = [*spell(tokenizer, " a little fox. And that is the end of it", spelling), EOS]
    outputs = run(scripted(ids), stop=stop)
    completion = outputs[-1].outputs[0]
    assert completion.text == text and completion.finish_reason == "stop"
    assert completion.token_ids == ids[: len(completion.token_ids)], "stop strings cut text only"
    assert_never_taken_back(outputs)


def test_text_that_may_become_a_stop_string_is_held_back(scripted):
    """As many characters as the longest stop string has, less one."""
    outputs = run(scripted(byte_ids("a--b---c")), stop=["---", "!"])
    assert texts(outputs) == ["", "", "a", "a-", "a--", "a--b", "a--b"]


def test_text_that_is_held_back_is_shown_at_the_end(scripted):
    assert texts(run(scripted([*byte_ids("a--"), EOS]), stop="---"))[-1] == "a--"
    assert texts(run(scripted(byte_ids("a--b")), stop="---", max_tokens=3))[-1] == "a--"


def test_stop_string_may_begin_again_inside_itself(scripted):
    assert texts(run(scripted(byte_ids("xaabaabaac")), stop="aabaac"))[-1] == "xaab"


def test_first_complete_stop_string_ends_the_text_even_within_one_token(scripted, tokenizer):
    """The string "tt" is complete before "ittle" is."""
    one_token = [i for i in range(320) if tokenizer.decode([i]) == "ittle"]
    for ids in (byte_ids("ittle"), one_token):
        assert texts(run(scripted([*ids, EOS]), stop=["ittle", "tt"]))[-1] == "i"


def test_stop_string_does_not_begin_in_the_prompt(scripted):
    assert texts(run(scripted([*byte_ids("xylophone"), EOS]), prompt="the", stop="thexy"))[-1] == "xylophone"


@pytest.mark.parametrize("seed", range(3))
def test_random_text_is_cut_as_if_characters_came_one_by_one(scripted, tokenizer, seed):
    rng = random.Random(seed)
    for _ in range(20):
        text = "".join(rng.choice("abé") for _ in range(30))
        stops = ["".join(rng.choice("abé") for _ in range(rng.randint(2, 5))) for _ in range(2)]
        expected = next((text[:n] for n in range(31) if any(text[:n].endswith(stop) for stop in stops)), text)
        complete = [len(stop) for stop in stops if expected.endswith(stop)]
        expected = expected[: len(expected) - max(complete, default=0)]
        ids = [i for start in range(0, 30, 6) for i in spell(tokenizer, text[start : start + 6], rng.choice(SPELLINGS))]
        outputs = run(scripted([*ids, EOS]), stop=stops)
        assert texts(outputs)[-1] == expected, (text, stops, ids)
        assert_never_taken_back(outputs)
