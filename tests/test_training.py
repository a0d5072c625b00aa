"""models/train.py and what it stands on, with a tiny model and a made-up folder of books."""

import itertools
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import models.train
import models.trainer
from models.checkpoint import write_checkpoint
from models.stories import Paragraph, Recipe, epochs, read_corpus, rows, tokenize, train_tokenizer
from models.train import Data, held_out_batches
from models.trainer import Settings, Trainer
from stages.s1_contiguous_cache import LLM, SamplingParams
from stages.s1_contiguous_cache.llama import Tokenizer

SHAPE = replace(
    models.trainer.SHAPE,
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)
SETTINGS = Settings(tokens=40_000, batch_tokens=512, short_row=32, warmup_steps=5, learning_rate=1e-2)
CPU = torch.device("cpu")
NAMES = ["Ann", "Tom", "the goose", "the fox", "a king", "the miller", "Grandmother", "the bear"]
DEEDS = ["went to the river", "opened the door", "said nothing at all", "was very hungry", "laughed", "lost a shoe"]


def story(number: int, mark: str) -> str:
    """A story of a few paragraphs, each of which names the mark."""
    rng = random.Random(number)
    sentence = lambda: f"Then {rng.choice(NAMES)} {rng.choice(DEEDS)}, and {mark} {rng.choice(DEEDS)}."  # noqa: E731
    return "\n\n".join(" ".join(sentence() for _ in range(rng.randint(2, 5))) for _ in range(6))


def book(name: str, num_stories: int, mark: str) -> str:
    return "\n\n".join(f"{name} {i}\n\n{story(hash_of(name) + i, f'{mark}{i}')}" for i in range(num_stories))


def hash_of(name: str) -> int:
    return sum(name.encode())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three books of stories; who acts in them tells which one a sentence is from: A0, A1, ..., B0, ..., C0, ..."""
    folder = tmp_path_factory.mktemp("library")
    for name, num_stories in (("Apples", 8), ("Bells", 4), ("Cats", 3)):
        (folder / f"{name.lower()}.txt").write_text(book(name, num_stories, name[0]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    stories = [story for story, _ in read_corpus(library, Recipe()).train]
    train_tokenizer(stories, SHAPE.vocab_size, folder / "tokenizer.model")
    assert [path.name for path in folder.iterdir()] == ["tokenizer.model"]
    return Tokenizer(folder)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trained shape is a constant of its module: here it is a tiny one, and nothing is compiled."""
    monkeypatch.setattr(models.trainer, "SHAPE", SHAPE)
    monkeypatch.setattr(models.train, "SHAPE", SHAPE)
    monkeypatch.setattr(torch, "compile", lambda function: function)


# The corpus


def test_books_are_dropped_held_out_and_weighed(library):
    corpus = read_corpus(library, Recipe(drop=["bells"], held_out=["cats"], weights={"apples": 3}))
    assert [weight for _, weight in corpus.train] == [3] * 8
    assert len(corpus.held_out) == 3
    assert not any("B0" in text or "C0" in text for text, _ in corpus.train)
    assert all("C" in text for text in corpus.held_out)


def test_a_folder_without_a_recipe_holds_out_every_twentieth_story(tmp_path):
    (tmp_path / "a.txt").write_text(book("Apples", 41, "A"), encoding="utf-8")
    corpus = read_corpus(tmp_path, Recipe())
    assert (len(corpus.held_out), len(corpus.train)) == (3, 38)
    assert not set(corpus.held_out) & {text for text, _ in corpus.train}


def test_headings_front_matter_and_scraps_are_left_out(tmp_path):
    scraps = "CONTENTS\n\nApples 0, page 1.\n\nPreface\n\nThe preface. " + "I thank the printer. " * 40
    (tmp_path / "a.txt").write_text(scraps + "\n\n" + book("Apples", 3, "A"), encoding="utf-8")
    corpus = read_corpus(tmp_path, Recipe())
    stories = [*corpus.held_out, *(text for text, _ in corpus.train)]
    assert len(stories) == 3
    assert not any(word in text for text in stories for word in ("Apples", "printer", "page"))


def test_a_folder_without_stories_is_one_clear_error(tmp_path):
    (tmp_path / "a.txt").write_text("Too short.", encoding="utf-8")
    with pytest.raises(ValueError, match="0 stories"):
        read_corpus(tmp_path, Recipe())
    with pytest.raises(ValueError, match="no folder"):
        read_corpus(tmp_path / "nowhere", Recipe())


# Rows


def test_rows_begin_with_bos_and_hold_whole_boundaries(library, tokenizer):
    corpus = read_corpus(library, Recipe(held_out=["cats"]))
    paragraphs = [paragraph for text, _ in corpus.train for paragraph in tokenize(text, tokenizer)]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts = {paragraph for text, _ in corpus.train for paragraph in text.split("\n")}
    packed = [row.tolist() for row in rows(paragraphs, 64)]
    assert len(packed) > 20 and {len(row) for row in packed} == {65}
    num_ends = 0
    for row in packed:
        assert row[0] == bos
        starts = [i for i, token in enumerate(row) if token == bos]
        ends = [i for i, token in enumerate(row[:-1]) if token == eos]
        assert starts[1:] == [end + 1 for end in ends], "a story's end and the next one's beginning belong together"
        num_ends += len(ends)
        stories = [row[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for text in (tokenizer.decode(ids) for ids in stories):
            whole = text.split("\n")[:-1]  # what the end of the row may have cut is left aside
            assert set(whole) <= texts, "a row is text as it stands in the story"
    assert num_ends > 3


def test_a_row_is_read_from_one_end_to_the_other(library, tokenizer):
    """Rows in order are the stories in order, but for what the end of each row cuts off."""
    (text,) = [text for text, _ in read_corpus(library, Recipe()).train][:1]
    paragraphs = tokenize(text, tokenizer)
    whole = tokenizer.encode(text) + [tokenizer.eos_token_id]
    assert torch.cat([paragraph.inner for paragraph in paragraphs]).tolist() == whole
    first = next(rows(paragraphs, 40)).tolist()
    assert first == whole[:41]


def test_no_held_out_story_is_ever_in_a_training_row(library, tokenizer):
    corpus = read_corpus(library, Recipe(held_out=["cats"]))
    data = Data([(tokenize(text, tokenizer), weight) for text, weight in corpus.train], SETTINGS, tokens_seen=0)
    batches = [data.next_batch(tokens_seen) for tokens_seen in (0, 39_999) for _ in range(40)]
    seen = "".join(tokenizer.decode(row.tolist()) for batch in batches for row in batch)
    assert not any(f"C{i} " in seen for i in range(3))
    assert all(f"{mark} " in seen for mark in ("A0", "A7", "B0", "B3")), "and the others are"
    held_out = held_out_batches([tokenize(text, tokenizer) for text in corpus.held_out], SETTINGS)
    assert "C0 " in "".join(tokenizer.decode(row.tolist()) for batch in held_out for row in batch)


def test_an_epoch_reads_every_story_as_often_as_its_weight():
    """Stories of one word, 11, 12 and 13, in rows that hold one story each."""
    words = [torch.tensor([1, word, 2]) for word in (11, 12, 13)]
    stories = [([Paragraph(ids, ids)], weight) for ids, weight in zip(words, (1, 3, 2), strict=True)]
    endless = epochs(stories, 1, random.Random(0))
    first, second = ([row.tolist() for row in itertools.islice(endless, 6)] for _ in range(2))
    assert sorted(first) == sorted(second) == [[1, 11]] + [[1, 12]] * 3 + [[1, 13]] * 2
    assert first != second, "each epoch has an order of its own"


def test_short_rows_come_first_and_full_ones_later(library, tokenizer):
    corpus = read_corpus(library, Recipe())
    data = Data([(tokenize(text, tokenizer), weight) for text, weight in corpus.train], SETTINGS, tokens_seen=0)
    assert data.next_batch(0).shape == (16, 33)
    assert data.next_batch(int(0.69 * SETTINGS.tokens)).shape == (16, 33)
    assert data.next_batch(int(0.71 * SETTINGS.tokens)).shape == (8, 65)


# The trainer


@pytest.fixture
def data(library: Path, tokenizer: Tokenizer) -> Data:
    corpus = read_corpus(library, Recipe())
    return Data([(tokenize(text, tokenizer), weight) for text, weight in corpus.train], SETTINGS, tokens_seen=0)


def make_trainer(seed: int = 0) -> Trainer:
    return Trainer(replace(SETTINGS, seed=seed), CPU, compile=False)


def test_the_loss_falls(data):
    trainer = make_trainer()
    losses = [trainer.step(data.next_batch(trainer.tokens_seen)) for _ in range(60)]
    assert trainer.tokens_seen == 60 * 512
    assert losses[0] == pytest.approx(math.log(SHAPE.vocab_size), abs=0.3), "at first all tokens are as likely"
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_a_token_does_not_see_the_next_one_nor_another_row(data):
    """Else the loss would fall beautifully, and the model would be worth nothing."""
    trainer = make_trainer()
    batch = data.next_batch(0)
    changed = batch.clone()
    changed[0, 20:] = 7
    attend = models.trainer.CausalAttend(row_length=32)
    positions = torch.arange(32).repeat(len(batch))
    with torch.no_grad():
        hidden = [trainer.model(rows[:, :-1].flatten(), positions, attend) for rows in (batch, changed)]
    one, other = (each.unflatten(0, (-1, 32)) for each in hidden)
    assert torch.equal(one[0, :20], other[0, :20]) and torch.equal(one[1:], other[1:])
    assert not torch.equal(one[0, 20:], other[0, 20:])


def test_the_loss_of_a_batch_is_that_of_its_rows(data):
    trainer, batch = make_trainer(), data.next_batch(0)
    losses = []
    with torch.no_grad():
        for row in batch:
            hidden = trainer.model(row[:-1], torch.arange(32), models.trainer.CausalAttend(32))
            losses.append(torch.nn.functional.cross_entropy(trainer.model.compute_logits(hidden), row[1:]).item())
        assert trainer.loss(batch).item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_seed_makes_the_same_run(data):
    batches = [data.next_batch(0) for _ in range(4)]
    first, second, third = ([trainer.step(b) for b in batches] for trainer in map(make_trainer, (0, 0, 1)))
    assert first == second != third


def test_a_resumed_run_goes_on_as_if_nothing_had_been(data, tmp_path):
    batches = [data.next_batch(0) for _ in range(8)]
    trainer = make_trainer()
    for batch in batches[:4]:
        trainer.step(batch)
    trainer.curve.append(models.trainer.CurvePoint(2048, 3.5, 3.75))
    trainer.save(tmp_path / "state.pt")
    on = [trainer.step(batch) for batch in batches[4:]]

    resumed = make_trainer(seed=1)
    resumed.resume(tmp_path / "state.pt")
    assert (resumed.tokens_seen, resumed.curve) == (2048, [(2048, 3.5, 3.75)])
    assert [resumed.step(batch) for batch in batches[4:]] == on
    for ours, theirs in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert list(tmp_path.iterdir()) == [tmp_path / "state.pt"]


def test_dropout_is_for_training_only(data):
    trainer = Trainer(replace(SETTINGS, dropout=0.5), CPU, compile=False)
    batch = data.next_batch(0)
    assert trainer.evaluate([batch]) == trainer.evaluate([batch])
    assert trainer.loss(batch).item() != trainer.loss(batch).item()


# The folder that comes out


def test_the_exported_folder_serves(data, tokenizer, library, tmp_path):
    trainer = make_trainer()
    for _ in range(40):
        trainer.step(data.next_batch(trainer.tokens_seen))
    stories = [text for text, _ in read_corpus(library, Recipe()).train]
    train_tokenizer(stories, SHAPE.vocab_size, tmp_path / "tokenizer.model")
    write_checkpoint(trainer.model, tmp_path)
    llm = LLM(tmp_path, kv_cache_tokens=64)
    (output,) = llm.generate("Then the fox", SamplingParams(temperature=0.0, max_tokens=16))
    text = "Then the fox" + output.outputs[0].text
    assert len(output.outputs[0].token_ids) == 16
    assert any(word in text for name in (*NAMES, *DEEDS) for word in name.split() if len(word) > 3)

    ids = torch.tensor(output.prompt_token_ids + output.outputs[0].token_ids)
    with torch.no_grad():
        hidden = trainer.model(ids[:-1], torch.arange(len(ids) - 1), models.trainer.CausalAttend(len(ids) - 1))
        logprobs = trainer.model.compute_logits(hidden).log_softmax(dim=-1)
    taken = logprobs.gather(1, ids[1:].unsqueeze(1))[len(output.prompt_token_ids) - 1 :].sum()
    assert output.outputs[0].cumulative_logprob == pytest.approx(taken.item(), abs=0.5)  # bfloat16 in the file


def test_the_command_trains_resumes_and_writes_a_folder(library, tmp_path, monkeypatch):
    shutil.copytree(library, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(models.train, "Settings", lambda **given: replace(SETTINGS, **given))
    train = lambda *more: CliRunner().invoke(  # noqa: E731
        models.train.main, ["--text", str(tmp_path), "--out", str(tmp_path), *more], catch_exceptions=False
    )
    assert train("--tokens", "8192", "--resume").output.startswith("Error: there is nothing to resume")
    assert train("--tokens", "8192").exit_code == 0
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.model", "training.json"} <= names
    tokenizer_before = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "more.txt").write_text(book("Dogs", 5, "Zz"), encoding="utf-8")
    assert train("--tokens", "20000", "--resume").exit_code == 0
    curve = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert [point["tokens"] for point in curve] == [8192, 20480]
    assert curve[1]["held_out"] < curve[0]["held_out"]
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer_before, "the model knows no other"
    (output,) = LLM(tmp_path, kv_cache_tokens=64).generate("Then", SamplingParams(max_tokens=4, seed=0))
    assert output.outputs[0].token_ids


def test_the_command_answers_a_mistake_in_one_line(tmp_path):
    done = CliRunner().invoke(models.train.main, ["--text", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    assert done.exit_code == 1 and done.output.startswith("Error: there is no folder") and done.output.count("\n") == 1


def test_too_little_text_is_one_clear_error(tmp_path):
    few = [Paragraph(torch.ones(50, dtype=torch.int64), torch.ones(50, dtype=torch.int64))]
    with pytest.raises(ValueError, match="the stories have 50 tokens, and training needs at least 128"):
        Data([(few, 1)], SETTINGS, tokens_seen=0)
    with pytest.raises(ValueError, match="the held-out text has 50 tokens, less than one row of 64"):
        held_out_batches([few], SETTINGS)
    with pytest.raises(ValueError, match="12 characters are too few for a vocabulary of 4,096 pieces"):
        train_tokenizer(["Once upon a."], 4096, tmp_path / "tokenizer.model")


def test_a_row_that_ends_with_a_paragraph_is_followed_by_the_next_one():
    paragraphs = [Paragraph(torch.full((4,), n), torch.full((4,), n)) for n in range(6)]
    assert [row.tolist() for row in rows(paragraphs, 7)] == [[n] * 4 + [n + 1] * 4 for n in (0, 2, 4)]
