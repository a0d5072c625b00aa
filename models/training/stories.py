"""Text files into training rows: clean the paragraphs, cut the books into stories, tokenize, pack.

A book is one text file, a paragraph a block between blank lines. A story is what stands between two headings; the
model sees it as BOS, paragraphs joined by a newline, EOS.
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

SHORTEST_STORY = 600  # characters; below that it is a dedication, a contents list, a verse
FRONT_MATTER = re.compile(r"Gutenberg|copyright|\bpreface\b|^contents|illustrat|publish", re.IGNORECASE)


@dataclass
class Recipe:
    """Which books to leave out, to hold out for validation, and how often each of the others is read in an epoch."""

    drop: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Recipe":
        """recipe.toml of a checkpoint folder; an empty one if there is none."""
        path = folder / "recipe.toml"
        return cls(**tomllib.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()


class Corpus(NamedTuple):
    train: list[tuple[str, int]]  # story, how often in an epoch
    held_out: list[str]


def read_corpus(folder: Path, recipe: Recipe) -> Corpus:
    """All stories of the text files in `folder`. Raises ValueError if there are none to train on or to hold out."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
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
    if not held_out:  # an unknown folder: every twentieth story
        held_out, train = [story for story, _ in train[::20]], [s for i, s in enumerate(train) if i % 20]
    if not train:
        found = f"{len(held_out)} stories of {SHORTEST_STORY} characters or more to hold out"
        raise ValueError(f"{folder} has, in .txt files, {found}, and none to train on")
    return Corpus(train, held_out)


def split_stories(text: str) -> list[str]:
    """The stories of a book, without their headings; front matter and scraps are left out."""
    stories: list[list[str]] = [[]]
    for paragraph in map(str.strip, text.split("\n\n")):
        if is_heading(paragraph):
            stories.append([])
        elif paragraph:
            stories[-1].append(clean(paragraph))
    joined = ["\n".join(filter(None, story)) for story in stories]
    return [story for story in joined if len(story) >= SHORTEST_STORY and not FRONT_MATTER.search(story[:300])]


def is_heading(paragraph: str) -> bool:
    """A short line that ends in no punctuation.

    >>> is_heading("The Golden Bird"), is_heading("So they lived happily."), is_heading('"No," said he,')
    (True, False, False)
    """
    return 0 < len(paragraph) < 80 and not re.search(r"[.!?,;:\"')\]-]$", paragraph)


def clean(paragraph: str) -> str:
    """One kind of quotation mark, always closed; no shouting, no markup.

    >>> clean("ONCE upon a time a king said: 'Who's there?'")
    'Once upon a time a king said: "Who\\'s there?"'
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
    """British speech marks to American ones, if as many open as close; an apostrophe is neither."""
    opening, closing = r"(?<![\w.,!?'])'(?=\w)", r"(?<=[.,!?;:-])'(?!\w)"
    if len(re.findall(opening, text)) != len(re.findall(closing, text)):
        return text
    return re.sub(closing, '"', re.sub(opening, '"', text))


def train_tokenizer(stories: list[str], vocab_size: int, path: Path) -> None:
    """Write a sentencepiece BPE model with Llama's conventions: byte fallback, digits apart, text unchanged.

    Raises ValueError if the stories are too few for so many pieces.
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
        raise ValueError(f"{size:,} characters are too few for a vocabulary of {vocab_size:,} pieces") from error
    path.with_suffix(".vocab").unlink()


class Paragraph(NamedTuple):
    """A paragraph twice, int64 [num_tokens]: sentencepiece gives the first word of a text a space, others none."""

    first: Tensor  # as the first of a row: BOS, text
    inner: Tensor  # as it follows another: newline, text; or as a story's first: BOS, text


def tokenize(story: str, tokenizer: Tokenizer) -> list[Paragraph]:
    """The story's paragraphs; the last one ends in EOS."""
    newline = tokenizer.encode("\n", add_bos=False)
    texts = story.split("\n")
    firsts = [tokenizer.encode(text) for text in texts]
    inners = firsts[:1] + [tokenizer.encode("\n" + text, add_bos=False)[len(newline) - 1 :] for text in texts[1:]]
    for ids in (firsts[-1], inners[-1]):
        ids.append(tokenizer.eos_token_id)
    return [Paragraph(torch.tensor(first), torch.tensor(inner)) for first, inner in zip(firsts, inners, strict=True)]


def rows(paragraphs: list[Paragraph], length: int) -> Iterator[Tensor]:
    """Rows of `length` + 1 tokens, end to end through the paragraphs; each begins with BOS at a paragraph's start.

    What is left of a paragraph at the end of a row is skipped; a new epoch has another order, so other rows.
    """
    tokens = torch.cat([paragraph.inner for paragraph in paragraphs])
    ends = torch.tensor([len(paragraph.inner) for paragraph in paragraphs]).cumsum(0)
    at = 0
    while at < len(paragraphs):
        first = paragraphs[at].first
        end = int(ends[at]) + length + 1 - len(first)  # of the row, in `tokens`
        if end > len(tokens):
            return
        yield torch.cat([first, tokens[int(ends[at]) : max(end, 0)]])[: length + 1]
        at = max(at + 1, int(torch.searchsorted(ends, end)) + 1)


def held_out_rows(stories: list[list[Paragraph]], length: int) -> list[Tensor]:
    """All rows of the held-out stories. Raises ValueError if there is none."""
    paragraphs = [paragraph for story in stories for paragraph in story]
    found = list(rows(paragraphs, length)) if paragraphs else []
    if not found:
        num_tokens = sum(len(paragraph.inner) for paragraph in paragraphs)
        raise ValueError(f"the held-out text has {num_tokens:,} tokens, less than one row of {length:,}")
    return found


def epochs(stories: list[tuple[list[Paragraph], int]], length: int, rng: random.Random) -> Iterator[Tensor]:
    """Rows without end: every story as often as its weight, in a new order each epoch."""
    copies = [story for story, weight in stories for _ in range(weight)]
    while True:
        rng.shuffle(copies)
        yield from rows([paragraph for story in copies for paragraph in story], length)
