"""Tokens turn into text as they arrive: how much is shown, when, and where the text ends.

A text can be spelled in bytes, one token each, or in longer pieces: both decode to the same.
"""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ...checkpoints.stream_decoder import StreamDecoder
from ...checkpoints.tokenizer import HFTokenizer, load_tokenizer
from ...llm import LLM
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ..testing.checkpoints import BOS, CONFIG, EOS, byte_ids, random_tensors, train_tokenizer, write_checkpoint

REPLACEMENT = "\ufffd"
SPELLINGS = ["bytes", "pieces"]
TOOL, END = 320, 321  # tokens that a folder adds


def say(llm: LLM, prompt="the", **params) -> list[RequestOutput]:
    """Return the stream of one request."""
    return list(llm.stream([prompt], SamplingParams(**{"max_tokens": 200, "temperature": 0.0} | params)))


def shown(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def spell(tokenizer: HFTokenizer, text: str, spelling: str = "pieces") -> list[int]:
    """Return the tokens of text in the middle of another text."""
    return byte_ids(text) if spelling == "bytes" else tokenizer.encode("\n" + text, add_bos=False)[2:]


def assert_never_taken_back(outputs: list[RequestOutput]) -> None:
    texts = shown(outputs)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts)), texts


# Encoding


def test_text_starts_with_bos_and_decodes_to_itself(tokenizer):
    for text in ("the little fox", "Zebra 漢字 🙂\n\n  two  spaces", "the end "):
        ids = tokenizer.encode(text)
        assert ids[0] == BOS and tokenizer.decode(ids) == text


def test_checkpoint_may_want_no_bos(tmp_path, tokenizer_model, tokenizer):
    write_checkpoint(tmp_path, tokenizer_model=tokenizer_model)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false}')
    assert load_tokenizer(tmp_path).encode("the fox") == tokenizer.encode("the fox", add_bos=False)


def test_special_tokens_in_a_text_are_encoded_as_themselves(tokenizer):
    ids = tokenizer.encode("the</s><s>fox", add_bos=False)
    assert ids == [*tokenizer.encode("the", add_bos=False), EOS, BOS, *spell(tokenizer, "fox")]
    assert tokenizer.decode(ids) == "thefox"


def test_only_the_start_of_a_text_gets_a_space_before_the_first_word(tokenizer):
    first, after_special = tokenizer.encode("fox", add_bos=False), tokenizer.encode("</s>fox", add_bos=False)[1:]
    assert tokenizer.decode([*spell(tokenizer, " a"), *first]) == "a fox"
    assert tokenizer.decode([*spell(tokenizer, " a"), *after_special]) == "afox"


def add_tokens(folder: Path, tokenizer_model: bytes, more: dict[int, dict[str, object]] | None = None) -> Path:
    """Return a folder whose tokenizer_config.json adds <tool>, which is text, and <|end|>, which is not."""
    write_checkpoint(folder, CONFIG | {"vocab_size": 330}, tokenizer_model=tokenizer_model)
    tokens = {TOOL: {"content": "<tool>", "special": False}, END: {"content": "<|end|>", "special": True}}
    config = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": tokens | (more or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_each_token_that_the_folder_adds_is_one_token(tmp_path, tokenizer_model):
    tokenizer = load_tokenizer(add_tokens(tmp_path, tokenizer_model, {322: {"content": "<|end|>>", "special": True}}))
    assert len(tokenizer) == 323
    assert tokenizer.encode("a<|end|>b<|end|>>")[-1] == 322, "the longer of two matches"
    ids = tokenizer.encode("the<tool>fox<|end|>the", add_bos=False)
    the, fox = tokenizer.encode("the", add_bos=False), spell(tokenizer, "fox")
    assert ids == [*the, TOOL, *fox, END, *spell(tokenizer, "the")]


def test_added_token_is_text_unless_it_is_special(tmp_path, tokenizer_model):
    tokenizer = load_tokenizer(add_tokens(tmp_path, tokenizer_model))
    the, fox = tokenizer.encode("the", add_bos=False), spell(tokenizer, " fox")
    assert tokenizer.decode([*the, TOOL, *fox, END]) == "the<tool> fox"
    assert tokenizer.decode([TOOL, *fox]) == "<tool> fox", "the word does not start the text"
    assert tokenizer.decode([BOS, END, *fox]) == "fox", "this one does"
    assert tokenizer.decode([TOOL, TOOL, END, TOOL]) == "<tool><tool><tool>"


@pytest.mark.parametrize(
    "name, names",
    [
        ("tokenizer_config", {"eos_token": "<tool>"}),
        ("tokenizer_config", {"pad_token": {"content": "<tool>", "lstrip": False}}),
        ("tokenizer_config", {"additional_special_tokens": ["<|end|>", "<tool>"]}),
        ("special_tokens_map", {"eos_token": {"content": "<tool>"}}),
    ],
)
def test_token_that_a_file_declares_special_is_special(tmp_path, tokenizer_model, name, names):
    write_checkpoint(tmp_path, tokenizer_model=tokenizer_model)
    (tmp_path / "added_tokens.json").write_text('{"<tool>": 320, "<other>": 321}')
    (tmp_path / f"{name}.json").write_text(json.dumps(names))
    assert load_tokenizer(tmp_path).decode([*byte_ids("a"), TOOL, 321]) == "a<other>"


def test_control_tokens_that_a_folder_adds_again_stay_special(tmp_path, tokenizer_model):
    """Old checkpoints do this."""
    write_checkpoint(tmp_path, tokenizer_model=tokenizer_model)
    (tmp_path / "added_tokens.json").write_text('{"<unk>": 0, "<s>": 1, "</s>": 2}')
    assert load_tokenizer(tmp_path).decode([BOS, *byte_ids("a"), EOS]) == "a"


def test_stop_string_may_be_an_added_token(tmp_path, tokenizer_model):
    """All weights except the head's row of <tool> make the model always predict <tool>."""
    folder = add_tokens(tmp_path, tokenizer_model)
    tensors = {name: torch.zeros_like(each) for name, each in random_tensors(CONFIG | {"vocab_size": 330}).items()}
    tensors["model.embed_tokens.weight"][:, 0] = tensors["model.norm.weight"][0] = 1
    tensors["lm_head.weight"][TOOL, 0] = 1
    write_checkpoint(folder, CONFIG | {"vocab_size": 330}, tensors, tokenizer_model)
    llm = LLM(folder, kv_cache_tokens=256)
    assert shown(say(llm, max_tokens=3)) == ["<tool>", "<tool><tool>", "<tool><tool><tool>"]
    completion = say(llm, stop="tool><")[-1].outputs[0]
    assert (completion.text, completion.token_ids) == ("<", [TOOL, TOOL])


def test_special_tokens_have_no_text(tokenizer):
    """The sentencepiece library would show a sign for the unknown token."""
    assert tokenizer.decode([BOS, *byte_ids("a"), 0, *byte_ids("b"), EOS]) == "ab"


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer):
    """The vocabulary of a model may be padded."""
    assert tokenizer.decode([*byte_ids("ab"), 320, 5000]) == "ab"


# Streaming


@pytest.mark.parametrize("text", [" little fox.", "é", " 漢字", "🙂 and 🙂", "\n\n  the"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_pieces_join_to_the_text(tokenizer, text, spelling):
    decoder = StreamDecoder(tokenizer, tokenizer.encode("the"))
    ids = spell(tokenizer, text, spelling)
    pieces = [decoder.push([token_id]) for token_id in ids]
    assert "".join(pieces) == text and decoder.flush() == ""


def test_character_is_shown_with_its_last_byte(tokenizer):
    decoder = StreamDecoder(tokenizer, [BOS])
    assert [decoder.push([token_id]) for token_id in byte_ids("a🙂é")] == ["a", "", "", "", "🙂", "", "é"]


def test_bytes_that_never_form_a_character_are_shown_at_the_end(tokenizer):
    decoder = StreamDecoder(tokenizer, [BOS])
    assert [decoder.push([token_id]) for token_id in byte_ids("🙂")[:3]] == ["", "", ""]
    assert decoder.flush() == tokenizer.decode(byte_ids("🙂")[:3])


def test_character_that_starts_in_the_prompt_is_shown_when_complete(tokenizer):
    decoder = StreamDecoder(tokenizer, [BOS, *byte_ids("a🙂")[:3]])
    assert [decoder.push([token_id]) for token_id in byte_ids("🙂")[2:]] == ["", "🙂"]


def test_replacement_character_at_the_end_of_a_prompt_is_not_repeated(tokenizer):
    decoder = StreamDecoder(tokenizer, tokenizer.encode("a" + REPLACEMENT))
    assert [decoder.push([token_id]) for token_id in byte_ids(REPLACEMENT + "b")] == ["", "", "", REPLACEMENT + "b"]


def one_by_one(token_ids):
    """Return a list for each token, as push() takes it."""
    return [[token_id] for token_id in token_ids]


def test_first_word_after_a_prompt_keeps_its_space(tokenizer):
    fox = tokenizer.encode("fox", add_bos=False)
    assert "".join(map(StreamDecoder(tokenizer, tokenizer.encode("the")).push, one_by_one(fox))) == " fox"
    assert "".join(map(StreamDecoder(tokenizer, [BOS]).push, one_by_one(fox))) == "fox"


def test_word_after_a_special_token_keeps_its_space(tokenizer):
    ids = [*tokenizer.encode("fox", add_bos=False), EOS, BOS, *tokenizer.encode("the", add_bos=False)]
    decoder = StreamDecoder(tokenizer, tokenizer.encode("the"))
    assert "".join(map(decoder.push, one_by_one(ids))) == " fox the"


@pytest.mark.parametrize("keeps_spaces", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_random_tokens_join_to_the_whole_text(tmp_path, seed, keeps_spaces):
    """Random ids include invalid bytes, special tokens and spaces; one tokenizer drops spaces at a start."""
    write_checkpoint(tmp_path, tokenizer_model=train_tokenizer(remove_extra_whitespaces=not keeps_spaces))
    tokenizer = load_tokenizer(tmp_path)
    space = [i for i in range(320) if tokenizer.decode([*byte_ids("a"), i]) == "a "]
    likely = [0, BOS, EOS, *space, *space, *byte_ids(" é🙂"), *range(259, 270)]
    rng = random.Random(seed)
    for _ in range(200):
        prompt = tokenizer.encode(rng.choice(["the", "the fox 🙂", "the\n"]))
        ids = [rng.choice(likely) if rng.random() < 0.7 else rng.randrange(320) for _ in range(rng.randint(1, 20))]
        decoder = StreamDecoder(tokenizer, prompt)
        text = "".join(map(decoder.push, one_by_one(ids))) + decoder.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids), (prompt, ids)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_bytes_and_added_tokens_join_to_the_whole_text(tmp_path, tokenizer_model, seed):
    """Long runs of tokens that hold text back: invalid bytes, U+FFFD itself, spaces, tokens without text."""
    tokenizer = load_tokenizer(add_tokens(tmp_path, tokenizer_model))
    space = [i for i in range(320) if tokenizer.decode([*byte_ids("a"), i]) == "a "]
    runs = [byte_ids(REPLACEMENT), byte_ids("🙂"), byte_ids("🙂")[:3], byte_ids("é")[:1], byte_ids("a"), space, [EOS]]
    runs += [[TOOL], [END], [300]]
    rng = random.Random(seed)
    for _ in range(100):
        prompt = tokenizer.encode(rng.choice(["the", "", "<tool>"])) + rng.choice(
            [[], space * 20, [EOS] * 20, [EOS] * 140, space, [300, *space], [*space, EOS]]
        )
        ids = [i for run in rng.sample(runs, 4) for i in run * rng.randint(1, 20)]
        decoder = StreamDecoder(tokenizer, prompt)
        text = "".join(map(decoder.push, one_by_one(ids))) + decoder.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids), (prompt, ids)


@pytest.mark.parametrize("run", ["spaces", "line breaks", "half characters", "special tokens", "words"])
def test_cost_of_a_token_does_not_grow_with_the_text(tokenizer, monkeypatch, run):
    """Count the ids that are decoded for it."""
    repeated = {
        "spaces": [i for i in range(320) if tokenizer.decode([*byte_ids("a"), i]) == "a "],
        "line breaks": byte_ids("\n"),
        "half characters": byte_ids("🙂")[:1],
        "special tokens": [EOS],
        "words": spell(tokenizer, " fox"),
    }[run][:1]
    num_decoded = []
    decode = HFTokenizer.decode
    monkeypatch.setattr(HFTokenizer, "decode", lambda self, ids: num_decoded.append(len(ids)) or decode(self, ids))
    decoder, costs = StreamDecoder(tokenizer, tokenizer.encode("the")), []
    for _ in range(400):
        num_decoded.clear()
        decoder.push([repeated[0]])
        costs.append(sum(num_decoded))
    assert max(costs[200:]) == max(costs[100:200]) <= 64


def test_bytes_that_form_no_character_do_not_hold_text_back_forever(tokenizer):
    decoder = StreamDecoder(tokenizer, [BOS])
    first = byte_ids("🙂")[0]
    assert [decoder.push([first]) for _ in range(6)] == ["", "", "", REPLACEMENT, REPLACEMENT, REPLACEMENT]
    assert decoder.push([byte_ids("a")[0]]) == REPLACEMENT * 3 + "a"


def test_engine_streams_the_text_of_the_whole_output(scripted, tokenizer):
    ids = [*spell(tokenizer, " fox"), *byte_ids(" 🙂"), *spell(tokenizer, " the end"), EOS]
    outputs = say(scripted(ids))
    assert shown(outputs)[-1] == " fox 🙂 the end"
    assert_never_taken_back(outputs)
    assert not any(REPLACEMENT in text for text in shown(outputs))


def test_engine_shows_incomplete_characters_at_the_end(scripted, tokenizer):
    outputs = say(scripted([*byte_ids("a🙂")[:4], EOS]))
    assert shown(outputs) == ["a", "a", "a", "a", "a" + tokenizer.decode(byte_ids("🙂")[:3])]


# The end of a text


def test_eos_stops_and_is_in_token_ids_but_not_in_text(scripted, tokenizer):
    ids = [*spell(tokenizer, " fox"), EOS]
    completion = say(scripted([*ids, *spell(tokenizer, " more")]))[-1].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == (" fox", ids, "stop")


def test_ignore_eos_continues_to_max_tokens(scripted, tokenizer):
    ids = [*spell(tokenizer, " fox"), EOS, *spell(tokenizer, " the")]
    completion = say(scripted(ids), max_tokens=len(ids), ignore_eos=True)[-1].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == (" fox the", ids, "length")


def test_eos_as_the_last_allowed_token_is_a_stop(scripted):
    assert say(scripted([7, EOS]), max_tokens=2)[-1].outputs[0].finish_reason == "stop"
    assert say(scripted([7, 8]), max_tokens=2)[-1].outputs[0].finish_reason == "length"


def test_eos_as_the_first_token_gives_an_empty_text(scripted):
    completion = say(scripted([EOS]))[-1].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [EOS], "stop")


def test_stop_token_is_not_shown_although_it_has_text(scripted, tokenizer):
    fox = spell(tokenizer, " fox")
    completion = say(scripted([*byte_ids("ab"), *fox, EOS]), stop_token_ids=[300, fox[0]])[-1].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == (
        "ab",
        [*byte_ids("ab"), fox[0]],
        "stop",
    )


def test_ignore_eos_keeps_the_requests_own_stop_tokens(scripted):
    completion = say(scripted([7, EOS, 8, 9]), stop_token_ids=[8], ignore_eos=True)[-1].outputs[0]
    assert completion.token_ids == [7, EOS, 8]


# Stop strings


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    "stop, text",
    [
        ("the end", " a little fox. And that is "),
        (" end", " a little fox. And that is the"),
        ("fo", " a little "),
        (".", " a little fox"),
        (" a", ""),
        ("is the en", " a little fox. And that "),
        ("zebra", " a little fox. And that is the end of it"),
    ],
)
def test_stop_string_cuts_the_text_exactly_wherever_tokens_end(scripted, tokenizer, spelling, stop, text):
    whole = " a little fox. And that is the end of it"
    ids = spell(tokenizer, whole, spelling)
    outputs = say(scripted([*ids, EOS]), stop=stop)
    completion = outputs[-1].outputs[0]
    assert completion.text == text and completion.finish_reason == "stop"
    assert_never_taken_back(outputs)
    assert all(stop not in text for text in shown(outputs))
    assert completion.token_ids == [*ids, EOS][: len(completion.token_ids)], "stop strings cut only the text"


@pytest.mark.parametrize("num_bytes", [1, 2, 4])
def test_stop_string_of_many_bytes_straddles_tokens(scripted, num_bytes):
    stop = {1: "x", 2: "é", 4: "🙂"}[num_bytes]
    completion = say(scripted(byte_ids(f"ab{stop}cd")), stop=stop)[-1].outputs[0]
    assert completion.text == "ab" and len(completion.token_ids) == 2 + num_bytes


def test_possible_start_of_a_stop_string_is_held_back(scripted):
    outputs = say(scripted([*byte_ids("a--b---c"), EOS]), stop="---")
    assert shown(outputs) == ["a", "a", "a", "a--b", "a--b", "a--b", "a--b"]


def test_held_back_text_is_shown_at_the_end(scripted):
    assert shown(say(scripted([*byte_ids("a--"), EOS]), stop="---"))[-1] == "a--"
    assert shown(say(scripted(byte_ids("a--b")), stop="---", max_tokens=3))[-1] == "a--"


def test_stop_string_may_start_again_inside_itself(scripted):
    assert shown(say(scripted(byte_ids("xaabaabaac")), stop="aabaac"))[-1] == "xaab"


@pytest.mark.parametrize("stops", [["ab", "abcd"], ["abcd", "ab"]])
def test_first_complete_stop_string_ends_the_text(scripted, stops):
    completion = say(scripted([*byte_ids("xabcd"), EOS]), stop=stops)[-1].outputs[0]
    assert completion.text == "x" and len(completion.token_ids) == 3


def test_cut_at_overlapping_stop_strings_does_not_depend_on_the_tokens(scripted, tokenizer):
    """The stop string "tt" is complete before "ittle", even when a single token completes both."""
    one_token = [i for i in range(320) if tokenizer.decode([i]) == "ittle"]
    assert len(one_token) == 1
    for ids in (byte_ids("ittle"), one_token):
        assert shown(say(scripted([*ids, EOS]), stop=["ittle", "tt"]))[-1] == "i"


def test_all_stop_strings_are_watched(scripted):
    for text in ("one. two", "one! two", "one\ntwo"):
        assert shown(say(scripted([*byte_ids(text), EOS]), stop=[".", "!", "\n"]))[-1] == "one"


def test_stop_string_does_not_start_in_the_prompt(scripted):
    assert shown(say(scripted([*byte_ids("xylophone"), EOS]), prompt="the", stop="thexy"))[-1] == "xylophone"


@pytest.mark.parametrize("seed", range(5))
def test_random_texts_are_cut_as_if_characters_came_one_by_one(scripted, tokenizer, seed):
    rng, script = random.Random(seed), list[int]()
    llm = scripted(script)
    for _ in range(20):
        text = "".join(rng.choice("abé") for _ in range(30))
        stops = ["".join(rng.choice("abé") for _ in range(rng.randint(2, 5))) for _ in range(2)]
        expected = next((text[:n] for n in range(31) if any(text[:n].endswith(stop) for stop in stops)), text)
        ends = [stop for stop in stops if expected.endswith(stop)]
        if ends:
            expected = expected[: -max(map(len, ends))]
        spans = [text[i : i + 6] for i in range(0, 30, 6)]
        ids = [i for span in spans for i in spell(tokenizer, span, rng.choice(SPELLINGS))]
        script[:] = [*ids, EOS]
        outputs = say(llm, stop=stops)
        assert shown(outputs)[-1] == expected, (text, stops, ids)
        assert_never_taken_back(outputs)
