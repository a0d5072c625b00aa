"""Small tokenizers in every form that checkpoints use, trained here on a few lines of text; and texts to test them."""

import json
import random
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import Sequence as ProcessorSequence
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from .checkpoints import CONFIG, SENTENCES

CORPUS = [
    *SENTENCES,
    "He said: don't go, it's 1999 or 2024, 12345 steps!  Two  spaces, and then\n\n  an indented line.",
    "El niño comió una manzana, é só. Größe, naïve, coöperate. café cafe\u0301",
    "Слон и лиса сидели в лесу. Το κόκκινο σπίτι. שלום עולם. مرحبا بالعالم",
    "小さなうさぎは森に住んでいました。狐狸和兔子住在森林里。 안녕하세요 세계",
    "def f(x):\n\treturn x + 1  # plus one\r\nif x == 3: pass",
] * 4

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def plain(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=False, **flags)


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


ADDED = [  # added to every form, one for each flag
    plain("<tool_call>", normalized=False),
    plain("<left>", normalized=False, lstrip=True),
    plain("<right>", normalized=False, rstrip=True),
    plain("word", normalized=False, single_word=True),
    plain("NORMAL", normalized=True),
    special("<|both|>", lstrip=True, rstrip=True),
    plain("two words", normalized=False),
]


def byte_level(words: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Train a byte-level BPE that splits words by a regular expression."""
    tokenizer = Tokenizer(BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def byte_fallback(legacy: bool) -> Tokenizer:
    """Train a BPE as if converted from sentencepiece: spaces are "\u2581", and unknown characters become bytes."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = BpeTrainer(
        vocab_size=1000, special_tokens=["<unk>", "<s>", "</s>", *BYTES], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # byte tokens belong to the model
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if legacy:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Sequence(steps), None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    return tokenizer


def with_bos(tokenizer: Tokenizer, bos: str) -> TemplateProcessing:
    return TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def llama3() -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer = byte_level(LLAMA3_WORDS)
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
    tokenizer.add_special_tokens([special(f"<|{name}|>") for name in names])
    tokenizer.add_tokens(ADDED)
    template = with_bos(tokenizer, "<|begin_of_text|>")
    tokenizer.post_processor = ProcessorSequence([ByteLevelProcessor(trim_offsets=False), template])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
    }
    return tokenizer, config, "llama"


def qwen(model_type: str) -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer = byte_level(QWEN_WORDS, normalizers.NFC())
    tokenizer.add_special_tokens([special(f"<|{name}|>") for name in ("endoftext", "im_start", "im_end")])
    tokenizer.add_tokens([plain(text, normalized=False) for text in ("</tool_call>", "<think>", "</think>")])
    tokenizer.add_tokens(ADDED)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": added_tokens_decoder(tokenizer),
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
    }
    return tokenizer, config, model_type


def flags_of(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return {name: getattr(token, name) for name in names}


def added_tokens_decoder(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    return {str(i): flags_of(token) for i, token in tokenizer.get_added_tokens_decoder().items()}


def tekken() -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer = byte_level(TEKKEN_WORDS)
    tokenizer.add_special_tokens([special(text) for text in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")])
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = with_bos(tokenizer, "<s>")
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "legacy": True,
    }
    return tokenizer, config, "mistral"


def metaspace(model_type: str, legacy_file: bool, **config: Any) -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer = byte_fallback(legacy_file)
    tokenizer.add_special_tokens([special("[INST]"), special("[/INST]")])
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = with_bos(tokenizer, "<s>")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **names, **config}, model_type


def gpt2() -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer = byte_level(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.add_special_tokens([special(f"<|{name}|>") for name in ("endoftext", "im_start", "im_end")])
    tokenizer.add_tokens(ADDED)
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "added_tokens_decoder": added_tokens_decoder(tokenizer),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    return tokenizer, config, "llama"


FORMS = {
    "llama3": llama3,
    "qwen2": lambda: qwen("qwen2"),
    "qwen3": lambda: qwen("qwen3"),
    "tekken": tekken,
    "mistral": lambda: metaspace("mistral", legacy_file=True),
    "mistral_v3": lambda: metaspace("mistral", legacy_file=False, legacy=False),
    "llama2": lambda: metaspace("llama", legacy_file=True, legacy=False),
    "llama2_legacy": lambda: metaspace("llama", legacy_file=True, legacy=True),
    "llama2_no_prefix": lambda: metaspace("llama", legacy_file=True, add_prefix_space=False),
    "gpt2": gpt2,
}


@cache
def trained(form: str) -> tuple[str, dict[str, Any], str]:
    tokenizer, config, model_type = FORMS[form]()
    return tokenizer.to_str(), config, model_type


def write_form(folder: Path, form: str, **changes: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json of a form. `changes` apply to the latter."""
    state, config, model_type = trained(form)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(state)
    write_config(folder, model_type, config | changes)
    return folder


def write_config(folder: Path, model_type: str, config: dict[str, Any] | None) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
WITH_ADDED = LLAMA | {
    "added_tokens_decoder": {str(700 + i): flags_of(token) for i, token in enumerate(ADDED)},
}
SENTENCEPIECE: dict[str, tuple[dict[str, Any] | None, str, dict[str, Any]]] = {  # form: config, family, training
    "plain": ({}, "llama", {}),
    "llama": (WITH_ADDED, "llama", {}),
    "llama_eos": (LLAMA | {"add_bos_token": False, "add_eos_token": True}, "llama", {}),
    "llama_legacy": (WITH_ADDED | {"legacy": True}, "llama", {}),
    "llama_no_prefix": (WITH_ADDED | {"add_prefix_space": False}, "llama", {}),
    "mistral": (WITH_ADDED, "mistral", {}),
    "normalized": ({"add_bos_token": True}, "mistral", {"normalization_rule_name": "nmt_nfkc"}),
    "unigram": ({}, "mistral", {"model_type": "unigram", "byte_fallback": False, "vocab_size": 150}),
}


@cache
def sentencepiece_model(vocab_size: int = 700, **options: Any) -> bytes:
    model = BytesIO()
    settings: dict[str, Any] = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    settings |= {"remove_extra_whitespaces": False, "character_coverage": 0.98, "user_defined_symbols": ["<user>"]}
    SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        vocab_size=vocab_size,
        num_threads=1,
        minloglevel=2,
        **(settings | options),
    )
    return model.getvalue()


def write_sentencepiece(folder: Path, form: str) -> Path:
    config, family, training = SENTENCEPIECE[form]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(**training))
    write_config(folder, family, config)
    return folder


# Texts

PIECES = [
    *[" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff", "\x00", "\x7f"],
    *[
        "the",
        " the",
        "fox",
        "Rabbit",
        " rabbit.",
        "DON'T",
        "'s",
        "it's",
        "don\u2019t",
        "a",
        "b",
        "12",
        "3456",
        "٣٤",
        "²",
    ],
    *[
        "e\u0301",
        "\u0301",
        "n\u0303o",
        "é",
        "Å",
        "\u212b",
        "ﬁ",
        "🙂",
        "👩\u200d👩\u200d👧",
        "🏳\ufe0f\u200d🌈",
        "𝔘",
        "\U0010ffff",
    ],
    *[
        "שלום",
        "عالم",
        "\u202e",
        "漢字",
        "狐狸",
        "ก็",
        "नमस्ते",
        "안녕",
        "\u1100\u1161",
        "Слон",
        "\u2581",
        "\u2581\u2581",
        "Ġ",
        "Ċ",
    ],
    *[
        ".",
        ",",
        " .",
        " ,",
        "?!",
        "...",
        "<",
        ">",
        "|",
        "<0x0A>",
        "<0xE6>",
        "\ufffd",
        "/",
        "#",
        "[INST]",
        "[/INST]",
        "<s>",
    ],
    *["</s>", "<unk>", "<|", "|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<think>", "</think>", "<user>"],
    *[
        "<tool_call>",
        "<left>",
        "<right>",
        "word",
        " word ",
        "words",
        "NORMAL",
        "<|both|>",
        "two words",
        "<tool",
        "_call>",
    ],
]


def fuzzed_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12))) for _ in range(count)]
