"""Turn text files into training rows: clean paragraphs, split books into stories, tokenize, and pack into rows.

A book is one text file, and its paragraphs are separated by blank lines. A story is the text between two headings. The
model sees it as BOS, the paragraphs joined by newlines, EOS.
"""

import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import torch
from torch import Tensor

from stages.s1_contiguous_cache.llama import Tokenizer

MIN_STORY_LENGTH = 600  # characters; shorter texts are dedications, tables of contents or verses
FRONT_MATTER = re.compile(r"Gutenberg|copyright|\bpreface\b|^contents|illustrat|publish", re.IGNORECASE)


@dataclass
class Recipe:
    """The books to drop, the books to hold out for validation, and how often an epoch reads each of the others."""

    drop: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Recipe":
        """Read recipe.toml from a checkpoint folder. Without one, the recipe is empty."""
        path = folder / "recipe.toml"
        return cls(**tomllib.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()


class Corpus(NamedTuple):
    """The stories of a folder of books."""

    train: list[tuple[str, int]]  # a story, and how often an epoch reads it
    held_out: list[str]


def read_corpus(folder: Path, recipe: Recipe) -> Corpus:
    """Return the stories of all text files in `folder`. Raise ValueError if there are none to train on or hold out."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    train: list[tuple[str, int]] = []
    held_out: list[str] = []
    for path in sorted(folder.glob("*.txt")):
        if path.stem in recipe.drop:
            continue
        stories = split_stories(path.read_text(encoding="utf-8"))
        if path.stem in recipe.held_out:
            held_out += stories
        else:
            train += [(story, recipe.weights.get(path.stem, 1)) for story in stories]
    if not held_out:  # without a recipe, hold out every twentieth story
        held_out, train = [story for story, _ in train[::20]], [s for i, s in enumerate(train) if i % 20]
    if not train:
        counts = f"no stories of {MIN_STORY_LENGTH} characters to train on, and {len(held_out)} to hold out"
        raise ValueError(f"the .txt files in {folder} have {counts}")
    return Corpus(train, held_out)


def split_stories(text: str) -> list[str]:
    """Return the stories of a book without headings, front matter and scraps."""
    stories: list[list[str]] = [[]]
    for paragraph in map(str.strip, text.split("\n\n")):
        if is_heading(paragraph):
            stories.append([])
        elif paragraph:
            stories[-1].append(clean(paragraph))
    joined = ["\n".join(filter(None, story)) for story in stories]
    return [story for story in joined if len(story) >= MIN_STORY_LENGTH and not FRONT_MATTER.search(story[:300])]


def is_heading(paragraph: str) -> bool:
    """Return whether a paragraph is a short line without final punctuation.

    >>> is_heading("The Golden Bird"), is_heading("So they lived happily."), is_heading('"No," said he,')
    (True, False, False)
    """
    return 0 < len(paragraph) < 80 and not re.search(r"[.!?,;:\"')\]-]$", paragraph)


def clean(paragraph: str) -> str:
    r"""Normalize a paragraph: one kind of quotation mark, always closed, no shouting, no markup.

    >>> clean("ONCE upon a time a king said: 'Who's there?'")
    'Once upon a time a king said: "Who\'s there?"'
    >>> clean('"It is late, [1] my _dear_ son.')
    '"It is late, my dear son."'
    """
    text = re.sub(r"\[[^\]]*\]|[_*=~|]", "", paragraph)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"^(\W*)([A-Z]{2,})\b", lambda m: m[1] + m[2].capitalize(), text)
    text = re.sub(r"\b[A-Z]{4,}\b", lambda m: m[0].capitalize(), text)
    if '"' not in text:
        text = double_quotes(text)
    return text + '"' if text.count('"') % 2 else text


def double_quotes(text: str) -> str:
    """Replace single quotation marks by double ones, if they pair up. Apostrophes stay."""
    opening, closing = r"(?<![\w.,!?'])'(?=\w)", r"(?<=[.,!?;:-])'(?!\w)"
    if len(re.findall(opening, text)) != len(re.findall(closing, text)):
        return text
    return re.sub(closing, '"', re.sub(opening, '"', text))


def train_tokenizer(stories: list[str], vocab_size: int, path: Path) -> None:
    """Write a sentencepiece BPE model with Llama's conventions: byte fallback, split digits, text kept as it is.

    Raise ValueError if there is too little text for that many pieces.
    """
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for story in stories for line in story.split("\n")),
            model_prefix=str(path.with_suffix("")),
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=16384,
            num_threads=2,
            minloglevel=1,
        )
    except RuntimeError as error:
        size = sum(map(len, stories))
        raise ValueError(f"a vocabulary of {vocab_size:,} pieces needs more than {size:,} characters") from error
    path.with_suffix(".vocab").unlink()


class Paragraph(NamedTuple):
    """A paragraph in two forms, int64 [num_tokens]: sentencepiece adds a space before the first word of a text only."""

    first: Tensor  # at the start of a row: BOS, text
    inner: Tensor  # after another paragraph: newline, text; at the start of a story: BOS, text


def tokenize(story: str, tokenizer: Tokenizer) -> list[Paragraph]:
    """Return the story's paragraphs. The last one ends in EOS."""
    newline = tokenizer.encode("\n", add_bos=False)
    texts = story.split("\n")
    firsts = [tokenizer.encode(text) for text in texts]
    inners = firsts[:1] + [tokenizer.encode("\n" + text, add_bos=False)[len(newline) - 1 :] for text in texts[1:]]
    for ids in (firsts[-1], inners[-1]):
        ids.append(tokenizer.eos_token_id)
    return [Paragraph(torch.tensor(first), torch.tensor(inner)) for first, inner in zip(firsts, inners, strict=True)]


def rows(paragraphs: list[Paragraph], length: int) -> Iterator[Tensor]:
    """Yield consecutive rows of `length` + 1 tokens. Each starts with BOS, at the beginning of a paragraph.

    The rest of a paragraph that a row cuts off is skipped. Each epoch has a different order, so it cuts elsewhere.
    """
    tokens = torch.cat([paragraph.inner for paragraph in paragraphs])
    ends = torch.tensor([len(paragraph.inner) for paragraph in paragraphs]).cumsum(0)
    at = 0
    while at < len(paragraphs):
        first = paragraphs[at].first
        end = int(ends[at]) + length + 1 - len(first)  # the row's end in `tokens`
        if end > len(tokens):
            return
        yield torch.cat([first, tokens[int(ends[at]) : max(end, 0)]])[: length + 1]
        at = max(at + 1, int(torch.searchsorted(ends, end)) + 1)


def held_out_rows(stories: list[list[Paragraph]], length: int) -> list[Tensor]:
    """Return all rows of the held-out stories. Raise ValueError if there is less than one."""
    paragraphs = [paragraph for story in stories for paragraph in story]
    held_out = list(rows(paragraphs, length)) if paragraphs else []
    if not held_out:
        num_tokens = sum(len(paragraph.inner) for paragraph in paragraphs)
        raise ValueError(f"the held-out text has {num_tokens:,} tokens, less than one row of {length:,}")
    return held_out


def epochs(stories: list[tuple[list[Paragraph], int]], length: int, rng: random.Random) -> Iterator[Tensor]:
    """Yield rows forever. Each epoch has a new order, and repeats every story as often as its weight says."""
    copies = [story for story, weight in stories for _ in range(weight)]
    while True:
        rng.shuffle(copies)
        yield from rows([paragraph for story in copies for paragraph in story], length)
