"""Tokenizers of every form give the same ids and the same text as transformers."""

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanovllm.checkpoints.stream_decoder import StreamDecoder
from nanovllm.checkpoints.tokenizer import HFTokenizer, load_tokenizer
from nanovllm.llama import Tokenizer as CoreTokenizer
from nanovllm.tests.testing.tokenizers import (
    FORMS,
    PIECES,
    SENTENCEPIECE,
    fuzzed_texts,
    write_form,
    write_sentencepiece,
)
from tests.helpers import ROOT

QUICK = {"llama3", "qwen2", "llama2", "sentencepiece_llama"}
ALL = [*FORMS, *(f"sentencepiece_{form}" for form in SENTENCEPIECE)]
REPLACEMENT = "\ufffd"


def write(folder: Path, form: str) -> Path:
    if form in FORMS:
        return write_form(folder, form)
    return write_sentencepiece(folder, form.removeprefix("sentencepiece_"))


class Pair:
    """The tokenizer of a folder, loaded by us and by transformers."""

    def __init__(self, folder: Path) -> None:
        self.ours: Any = load_tokenizer(folder)
        self.theirs: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=[f if f in QUICK else pytest.param(f, marks=pytest.mark.full) for f in ALL])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(write(tmp_path_factory.mktemp("form") / request.param, request.param))


def streamed(tokenizer: Any, ids: list[int], prompt: list[int] | None = None) -> str:
    decoder = StreamDecoder(tokenizer, prompt or [])
    return "".join([decoder.push([token_id]) for token_id in ids]) + decoder.flush()


def streamed_by(sizes: Iterator[int], tokenizer: Any, ids: list[int]) -> str:
    """Return the streamed text, with several ids in each push."""
    decoder, pieces = StreamDecoder(tokenizer, []), []
    while ids:
        size = next(sizes)
        now, ids = ids[:size], ids[size:]
        pieces.append(decoder.push(now))
    return "".join(pieces) + decoder.flush()


# Ids and text


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_ids_and_text_are_the_same_as_in_transformers(pair, count):
    ours, theirs = pair.ours, pair.theirs
    for text in [*PIECES, *fuzzed_texts(count)]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.encode(text, add_bos=False) == theirs(text, add_special_tokens=False).input_ids, text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_text_of_random_ids_is_the_same_as_in_transformers(pair, count):
    rng = random.Random(count)
    for _ in range(count):
        ids = [rng.randrange(len(pair.ours) + 3) for _ in range(rng.randint(0, 60))]
        for skip in (True, False):
            assert pair.ours.decode(ids, skip_special_tokens=skip) == pair.theirs.decode(ids, skip_special_tokens=skip)


def test_vocabulary_and_special_tokens_are_the_same_as_in_transformers(pair):
    ours, theirs = pair.ours, pair.theirs
    assert len(ours) == len(theirs) and ours.vocab_size == theirs.vocab_size and ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_tokens == theirs.all_special_tokens and ours.all_special_ids == theirs.all_special_ids
    for name in ("bos_token", "eos_token", "bos_token_id", "eos_token_id", "unk_token", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    ids = list(range(len(ours) + 1))
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    tokens = ["the", "<s>", "no such token", *ours.all_special_tokens]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)


# Streams


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shows", [False, True])
def test_pieces_of_a_stream_add_up_to_the_text(pair, shows, count):
    tokenizer = pair.ours.showing_special_tokens() if shows else pair.ours
    rng = random.Random(count)
    texts = [tokenizer.encode(text) for text in fuzzed_texts(count, seed=1)]
    for ids in texts + [[rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 60))] for _ in range(count)]:
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
        assert streamed_by(iter(lambda: rng.randint(0, 9), None), tokenizer, ids) == tokenizer.decode(ids)
        assert streamed_by(repeat(1000), tokenizer, ids) == tokenizer.decode(ids)
        num_before = rng.randint(0, len(ids))
        before, after = ids[:num_before], ids[num_before:]
        if not (text := tokenizer.decode(before)).endswith(REPLACEMENT):
            assert text + streamed(tokenizer, after, before) == tokenizer.decode(ids)


def test_encoded_text_decodes_as_in_transformers(pair):
    for text in fuzzed_texts(60, seed=2):
        if "<0x" not in text:  # a unigram model reads "<0xE6>" as the byte
            ids = pair.ours.encode(text)
            assert pair.ours.decode(ids) == pair.theirs.decode(ids, skip_special_tokens=True)
            assert pair.ours.showing_special_tokens().decode(ids) == pair.theirs.decode(ids)


def test_cost_of_a_token_does_not_grow_with_the_text(pair, monkeypatch):
    """The window stays short, even for whitespace, invalid bytes and hidden tokens."""
    tokenizer, lengths = pair.ours, []
    decode = HFTokenizer.decode
    counted = lambda self, ids, *args: lengths.append(len(ids)) or decode(self, ids, *args)  # noqa: E731
    monkeypatch.setattr(HFTokenizer, "decode", counted)
    newline, in_bytes = (tokenizer.encode(text, add_bos=False) for text in ("\n", "\U0010ffff"))
    for repeated in (newline[-1:], in_bytes[-3:-2], in_bytes[-3:], tokenizer.all_special_ids[:1]):
        decoder = StreamDecoder(tokenizer, [])
        for token_id in repeated * 200:
            decoder.push([token_id])
    assert max(lengths) <= 64


def test_line_break_in_a_byte_token_is_returned_at_once(tmp_path):
    """A stop string that is a line break depends on it."""
    tokenizer = load_tokenizer(write(tmp_path, "llama2"))
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    decoder = StreamDecoder(tokenizer, tokenizer.encode("the fox"))
    begun = tokenizer.convert_tokens_to_ids(["<0xF0>", "<0x9F>"])
    assert [decoder.push([token_id]) for token_id in [newline, *begun]] == ["\n", "", ""]
    assert decoder.push([newline]) == REPLACEMENT * 2 + "\n"


# Files and imports


def test_tokenizer_json_wins_over_tokenizer_model(tmp_path):
    folder = write_sentencepiece(write_form(tmp_path, "llama3"), "plain")
    write_form(tmp_path, "llama3")
    assert load_tokenizer(folder).encode("the fox") == AutoTokenizer.from_pretrained(folder)("the fox").input_ids
    assert len(load_tokenizer(folder)) != 700


def test_tokenizer_model_alone_follows_llamas_conventions(tmp_path):
    """Without tokenizer_config.json, text gets BOS and a space before the first word, as in the stages."""
    folder = write_sentencepiece(tmp_path, "plain")
    (folder / "tokenizer_config.json").unlink()
    ours, stage = load_tokenizer(folder), CoreTokenizer(folder)
    for text in [text.replace("\u2581", "").replace("<user>", "").lstrip(" ") for text in fuzzed_texts(100)]:
        assert ours.encode(text) == stage.encode(text), text
        assert ours.decode(ours.encode(text)) == stage.decode(stage.encode(text)), text
    assert (ours.bos_token_id, ours.eos_token_id) == (stage.bos_token_id, stage.eos_token_id)


def test_folder_without_a_tokenizer_gives_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_load_tokenizer_does_not_import_transformers_or_the_hub(tmp_path):
    folder = write_form(tmp_path, "llama3")
    code = (
        "import sys; from nanovllm.checkpoints.tokenizer import load_tokenizer as load\n"
        f"tokenizer = load({str(folder)!r})\n"
        "print(len(tokenizer.encode('the fox')), {'transformers', 'huggingface_hub'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith(" set()\n") and done.stderr == ""


# Calls of scripts


def test_calls_return_the_same_as_in_transformers(tmp_path):
    pair = Pair(write_form(tmp_path, "llama3"))
    ours, theirs = pair.ours.showing_special_tokens(), pair.theirs
    for text in ("the fox", ["the fox", "a"], ""):
        for name in ("input_ids", "attention_mask"):
            assert ours(text)[name] == theirs(text)[name], text
        assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False).input_ids
    ids = ours("the fox<|eot_id|>").input_ids
    assert ids == theirs("the fox<|eot_id|>").input_ids == ours.encode("the fox<|eot_id|>", add_special_tokens=True)
    assert ours.decode(ids) == theirs.decode(ids) == "<|begin_of_text|>the fox<|eot_id|>"
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True) == "the fox"
    assert ours.batch_decode([ids, ids[:1]]) == theirs.batch_decode([ids, ids[:1]])
    assert ours.decode(ids[1]) == theirs.decode(ids[1]) and ours.tokenize("the fox") == theirs.tokenize("the fox")
    assert ours.backend.token_to_id("<|eot_id|>") == ours.eos_token_id == theirs.eos_token_id


def test_wrong_types_are_errors(tmp_path):
    tokenizer = load_tokenizer(write_form(tmp_path, "qwen2"))
    for call in (tokenizer, tokenizer.encode):
        for wrong in (None, 5, b"a"):
            with pytest.raises(ValueError, match=f"a tokenizer takes a string.*, got {type(wrong).__name__}"):
                call(wrong)
    for wrong, error in (("a", "got str"), (None, "got NoneType"), ([1.5], "got 1.5"), ([[1]], r"got \[1\]")):
        with pytest.raises(ValueError, match=f"integer.*{error}"):
            tokenizer.decode(wrong)
