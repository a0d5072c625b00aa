"""The files next to a tokenizer: special and added tokens are merged as in transformers; invalid files are errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanovllm.checkpoints.tokenizer import load_tokenizer
from nanovllm.tests.testing.checkpoints import write_checkpoint
from nanovllm.tests.testing.tokenizers import (
    fuzzed_texts,
    sentencepiece_model,
    write_config,
    write_form,
    write_sentencepiece,
)

TOKEN = {"content": "<|new|>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
CASES: dict[str, dict[str, Any]] = {  # additions to tokenizer_config.json, and other files
    "a name of the model's own": {"tokenizer_config.json": {"image_token": "<|image|>", "pad_token": "<|pad|>"}},
    "names in a dict": {
        "tokenizer_config.json": {"extra_special_tokens": {"boi_token": "<|boi|>", "eoi_token": "fox"}}
    },
    "a list": {"tokenizer_config.json": {"extra_special_tokens": ["<|a|>", "fox", "[INST]"]}},
    "an older list": {"tokenizer_config.json": {"additional_special_tokens": ["<|a|>", "rabbit"]}},
    "a token with flags": {"tokenizer_config.json": {"eos_token": {**TOKEN, "__type": "AddedToken", "lstrip": True}}},
    "null": {"tokenizer_config.json": {"bos_token": None}},
    "an older file": {"special_tokens_map.json": {"eos_token": {**TOKEN, "rstrip": True}, "pad_token": "<unk>"}},
    "an older file's list": {"special_tokens_map.json": {"additional_special_tokens": ["<|a|>", "<|b|>"]}},
    "added_tokens.json": {"added_tokens.json": {"<|x|>": 900, "two words": 901, "rabbit": 902}},
    "added and special": {
        "added_tokens.json": {"<|x|>": 900, "<|y|>": 901},
        "special_tokens_map.json": {"additional_special_tokens": ["<|y|>"]},
    },
    "a decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "905": {**TOKEN, "special": True},
                "904": {**TOKEN, "content": "x y", "special": False},
            }
        },
        "special_tokens_map.json": {"eos_token": "left out"},
    },
    "split": {"tokenizer_config.json": {"split_special_tokens": True}},
    "flags next to tokenizer.json": {"tokenizer_config.json": {"add_bos_token": False, "add_eos_token": True}},
}


def write_case(folder: Path, files: dict[str, Any], form: str | None) -> Path:
    if form:
        write_form(folder, form)
    else:
        write_sentencepiece(folder, "plain")
    config = NAMED if form != "llama3" else {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_config(folder, "llama", config)
    for name, entries in files.items():
        if name == "tokenizer_config.json":
            entries = config | entries
        (folder / name).write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("form", ["llama2", pytest.param(None, id="sentencepiece"), "llama3"])
@pytest.mark.parametrize("case", CASES)
def test_merges_special_and_added_tokens_as_transformers_does(tmp_path, case, form):
    folder = write_case(tmp_path, CASES[case], form)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.get_vocab() == theirs.get_vocab() and ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    news = ["<|new|>", "<|a|>", "<|b|>", "<|x|>", "<|y|>", "x y", "<|image|>", "<|pad|>", "<|boi|>", "fox", "rabbit"]
    for text in [f" {a}{b} {a} " for a in news for b in news[:3]] + fuzzed_texts(20):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


# Invalid files


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


BAD_JSON = [  # a change to tokenizer.json, and the error after its path
    (lambda text: text[: len(text) // 2], "is not valid JSON: "),
    (lambda text: "", "is not valid JSON: "),
    (lambda text: "[]", "holds a list, not an object"),
    (lambda text: "{}", "is unsupported by the tokenizers library"),
    (lambda text: "\x00", "is not valid JSON: "),
]
BAD_ENTRIES = [
    ("model", {"type": "Oracle"}),
    ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}),
    ("model", None),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
    ("pre_tokenizer", {"type": "NoSuch"}),
    ("normalizer", "NFC"),
    ("decoder", {"type": "Oracle"}),
    ("post_processor", {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": 1}),
    ("added_tokens", [{"id": 0}]),
    ("added_tokens", {}),
]


@pytest.mark.parametrize("spoil, error", BAD_JSON)
def test_invalid_tokenizer_json_is_an_error_of_one_line(tmp_path, spoil, error):
    path = write_form(tmp_path, "llama3") / "tokenizer.json"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ValueError) as raised:
        load_tokenizer(tmp_path)
    assert str(raised.value).startswith(f"{path}") and error in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name, value", BAD_ENTRIES)
def test_tokenizer_json_with_an_invalid_part_is_an_error_of_one_line(tmp_path, name, value):
    path = write_form(tmp_path, "llama3") / "tokenizer.json"
    change(path, **{name: value})
    with pytest.raises(ValueError) as raised:
        load_tokenizer(tmp_path)
    assert str(raised.value).startswith(f"{path} is unsupported") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "file, entries, error",
    [
        ("tokenizer_config.json", {"bos_token": 1}, "bos_token must be a string or an object, got 1"),
        ("tokenizer_config.json", {"eos_token": {"content": 5}}, "eos_token.content must be a string, got 5"),
        ("tokenizer_config.json", {"eos_token": {"content": "a", "lstrip": 1}}, "lstrip must be true or false, got 1"),
        ("tokenizer_config.json", {"additional_special_tokens": "a"}, "must be a list of tokens, got 'a'"),
        ("tokenizer_config.json", {"additional_special_tokens": [3]}, "additional_special_tokens[0] must be a string"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            "has the key 'x', which is not a token id",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": "a"}}, "added_tokens_decoder.5 must be an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder must be an object, got []"),
        ("tokenizer_config.json", {"tokenizer_class": 1}, "tokenizer_class must be a string, got 1"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
        ("tokenizer_config.json", {"legacy": 1}, "legacy must be true or false, got 1"),
        ("tokenizer_config.json", {"chat_template": 1}, "chat_template must be a string, got 1"),
        ("tokenizer_config.json", {"chat_template": [{"name": "a"}]}, "chat_template[0].template must be a string"),
        ("tokenizer_config.json", {"split_special_tokens": 2}, "split_special_tokens must be true or false, got 2"),
        ("special_tokens_map.json", {"eos_token": []}, "eos_token must be a string or an object, got []"),
        ("added_tokens.json", {"<x>": "y"}, "<x> must be an integer of at least 0, got 'y'"),
    ],
)
def test_error_names_the_invalid_entry_and_its_file(tmp_path, file, entries, error):
    folder = write_case(tmp_path, {file: entries}, "llama2")
    with pytest.raises(ValueError) as raised:
        load_tokenizer(folder)
    assert str(raised.value).startswith(f"{folder / file}: ") and error in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"not a model", sentencepiece_model()[:3000]])
def test_invalid_tokenizer_model_is_an_error_of_one_line(tmp_path, data):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a sentencepiece model") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def tiny_bpe(vocab: list[str], merges: list[list[str]], **model: Any) -> dict[str, Any]:
    ids = {token: i for i, token in enumerate(vocab)}
    return {"model": {"type": "BPE", "vocab": ids, "merges": merges, **model}, "added_tokens": []}


FLAGS = {name: False for name in ("single_word", "lstrip", "rstrip", "special")}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}


def shifted(step: dict[str, Any]) -> dict[str, Any]:
    """Return a normalizer whose first step puts text before nothing; the second one fails on that."""
    return {"type": "Sequence", "normalizers": [step, {"type": "NFC"}]}


PANICS = {  # tokenizer.json for which the library panics: on the file, an added token, or a text
    "merge shorter than its prefix": tiny_bpe(["a", "b", "ab"], [["a", "b"]], continuing_subword_prefix="xx"),
    "broken charsmap": tiny_bpe(["a"], []) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "empty Prepend": tiny_bpe(["a"], [])
    | {"normalizer": shifted({"type": "Prepend", "prepend": ""})}
    | {"added_tokens": [{"id": 1, "content": "b", "normalized": True, **FLAGS}]},
    "Replace of nothing": tiny_bpe(["a"], [])
    | {"normalizer": shifted({"type": "Replace", "pattern": {"String": ""}, "content": "a"})},
    "FixedLength of 0": tiny_bpe(["a"], []) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "unknown token in a template": tiny_bpe(["a"], []) | {"post_processor": TEMPLATE | {"special_tokens": {}}},
}


@pytest.mark.parametrize("case", PANICS)
def test_panic_of_the_library_is_an_error_of_one_line(tmp_path, capfd, case):
    (tmp_path / "tokenizer.json").write_text(json.dumps(PANICS[case]))
    with pytest.raises(ValueError) as raised:
        load_tokenizer(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / "tokenizer.json")) and "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.full
def test_command_names_a_tokenizer_that_would_abort_the_library(tmp_path):
    """The library cuts a character in two. Its message about the result is no valid text."""
    spec = tiny_bpe(["a", "ã", "ģ", "aaaaaa"], [["ã", "ģ"]], continuing_subword_prefix="x")
    (write_checkpoint(tmp_path) / "tokenizer.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "nanovllm", "generate", "a", "--model", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    assert str(tmp_path / "tokenizer.json") in line


def test_bpe_with_a_prefix_loads(tmp_path):
    spec = tiny_bpe(["a", "##b", "ab"], [["a", "##b"]], continuing_subword_prefix="##")
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(tmp_path).encode("ab") == [2]


def test_other_text_on_standard_error_is_kept(tmp_path, capfd, monkeypatch):
    write_form(tmp_path, "llama3")
    from_str = Tokenizer.from_str
    monkeypatch.setattr(
        "nanovllm.checkpoints.tokenizer_files.Tokenizer",
        SimpleNamespace(from_str=lambda text: os.write(2, b"a warning\n") and from_str(text)),
    )
    assert load_tokenizer(tmp_path).encode("a")
    assert capfd.readouterr().err == "a warning\n"


def test_special_tokens_in_a_users_text_become_special_tokens(tmp_path):
    write_form(tmp_path, "qwen2")
    ids, wanted = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text, end = "a fox<|im_end|> and<|im_start|>system", wanted.convert_tokens_to_ids("<|im_end|>")
    assert ids.encode(text) == wanted.encode(text) and end in ids.encode(text)
