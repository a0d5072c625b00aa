"""models/training, from text files to a checkpoint and its card, with a tiny model and invented books."""

import itertools
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoTokenizer, LlamaForCausalLM

from models import training
from models.training import evaluate as evaluation
from models.training.checkpoint import write_checkpoint
from models.training.stories import Paragraph, Recipe, epochs, read_corpus, rows, tokenize, train_tokenizer
from models.training.train import Data, held_out_batches
from models.training.trainer import Settings, Trainer, drop
from stages.s1_contiguous_cache import LLM, SamplingParams
from stages.s1_contiguous_cache.llama import ModelConfig, Tokenizer, load_model
from stages.tools.prose import model_card

SHAPE = replace(
    training.trainer.SHAPE,
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)
SETTINGS = Settings(
    tokens=40_000, batch_tokens=512, short_row=32, short_share=0.7, warmup_steps=5, learning_rate=1e-2, dropout=0.0
)
CPU = torch.device("cpu")
NAMES = ["Ann", "Tom", "the goose", "the fox", "a king", "the miller", "Grandmother", "the bear"]
DEEDS = ["went to the river", "opened the door", "said nothing at all", "was very hungry", "laughed", "lost a shoe"]


def story(number: int, mark: str) -> str:
    """Return a story of a few paragraphs, each of which mentions the mark."""
    rng = random.Random(number)
    sentence = lambda: f"Then {rng.choice(NAMES)} {rng.choice(DEEDS)}, and {mark} {rng.choice(DEEDS)}."  # noqa: E731
    return "\n\n".join(" ".join(sentence() for _ in range(rng.randint(2, 5))) for _ in range(6))


def book(name: str, num_stories: int, mark: str) -> str:
    return "\n\n".join(f"{name} {i}\n\n{story(hash_of(name) + i, f'{mark}{i}')}" for i in range(num_stories))


def hash_of(name: str) -> int:
    return sum(name.encode())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three books. Each sentence names the character of its story: A0, A1, ..., B0, ..., C0, ..."""
    folder = tmp_path_factory.mktemp("library")
    for name, num_stories in (("Apples", 8), ("Bells", 4), ("Cats", 3)):
        (folder / f"{name.lower()}.txt").write_text(book(name, num_stories, name[0]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer_file(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    stories = [story for story, _ in read_corpus(library, Recipe()).train]
    train_tokenizer(stories, SHAPE.vocab_size, folder / "tokenizer.model")
    assert [path.name for path in folder.iterdir()] == ["tokenizer.model"]
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file.parent)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model tiny, and compile nothing."""
    monkeypatch.setattr(training.trainer, "SHAPE", SHAPE)
    monkeypatch.setattr(training.train, "SHAPE", SHAPE)
    monkeypatch.setattr(torch, "compile", lambda function: function)


# The corpus


def test_a_recipe_drops_holds_out_and_weighs_books(library):
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


def test_a_folder_without_stories_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("Too short.", encoding="utf-8")
    with pytest.raises(ValueError, match="no stories of 600 characters to train on"):
        read_corpus(tmp_path, Recipe())
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        read_corpus(tmp_path / "nowhere", Recipe())


# Rows


def test_rows_begin_with_bos_and_keep_story_boundaries(library, tokenizer):
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
        assert starts[1:] == [end + 1 for end in ends], "EOS must be followed by BOS"
        num_ends += len(ends)
        stories = [row[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for text in (tokenizer.decode(ids) for ids in stories):
            whole = text.split("\n")[:-1]  # the row may have cut off the last one
            assert set(whole) <= texts, "a row must contain the story's own paragraphs"
    assert num_ends > 3


def test_rows_follow_the_text_of_a_story(library, tokenizer):
    (text,) = [text for text, _ in read_corpus(library, Recipe()).train][:1]
    paragraphs = tokenize(text, tokenizer)
    whole = tokenizer.encode(text) + [tokenizer.eos_token_id]
    assert torch.cat([paragraph.inner for paragraph in paragraphs]).tolist() == whole
    first = next(rows(paragraphs, 40)).tolist()
    assert first == whole[:41]


def test_training_rows_never_contain_held_out_stories(library, tokenizer):
    corpus = read_corpus(library, Recipe(held_out=["cats"]))
    data = Data([(tokenize(text, tokenizer), weight) for text, weight in corpus.train], SETTINGS, tokens_seen=0)
    batches = [data.next_batch(tokens_seen) for tokens_seen in (0, 39_999) for _ in range(40)]
    seen = "".join(tokenizer.decode(row.tolist()) for batch in batches for row in batch)
    assert not any(f"C{i} " in seen for i in range(3))
    assert all(f"{mark} " in seen for mark in ("A0", "A7", "B0", "B3"))
    held_out = held_out_batches([tokenize(text, tokenizer) for text in corpus.held_out], SETTINGS)
    assert "C0 " in "".join(tokenizer.decode(row.tolist()) for batch in held_out for row in batch)


def test_an_epoch_repeats_each_story_by_its_weight():
    """The stories are single words, 11, 12 and 13, and a row holds one story."""
    words = [torch.tensor([1, word, 2]) for word in (11, 12, 13)]
    stories = [([Paragraph(ids, ids)], weight) for ids, weight in zip(words, (1, 3, 2), strict=True)]
    endless = epochs(stories, 1, random.Random(0))
    first, second = ([row.tolist() for row in itertools.islice(endless, 6)] for _ in range(2))
    assert sorted(first) == sorted(second) == [[1, 11]] + [[1, 12]] * 3 + [[1, 13]] * 2
    assert first != second, "each epoch must have a new order"


def test_short_rows_come_before_full_rows(library, tokenizer):
    corpus = read_corpus(library, Recipe())
    data = Data([(tokenize(text, tokenizer), weight) for text, weight in corpus.train], SETTINGS, tokens_seen=0)
    assert data.next_batch(0).shape == (16, 33)
    assert data.next_batch(int(0.69 * SETTINGS.tokens)).shape == (16, 33)
    assert data.next_batch(int(0.71 * SETTINGS.tokens)).shape == (8, 65)


# The trainer


Story = tuple[list[Paragraph], int]  # a text's tokens, and its weight


@pytest.fixture(scope="module")
def stories(library: Path, tokenizer: Tokenizer) -> list[Story]:
    return [(tokenize(text, tokenizer), weight) for text, weight in read_corpus(library, Recipe()).train]


@pytest.fixture
def data(stories: list[Story]) -> Data:
    return Data(stories, SETTINGS, tokens_seen=0)


def make_trainer(seed: int = 0) -> Trainer:
    return Trainer(replace(SETTINGS, seed=seed), CPU, compile=False)


@pytest.fixture(scope="module")
def trained(stories: list[Story]) -> tuple[Trainer, list[float]]:
    """Return a trainer after 40 steps, and the loss of each."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        trainer, data = make_trainer(), Data(stories, SETTINGS, tokens_seen=0)
        return trainer, [trainer.step(data.next_batch(trainer.tokens_seen)) for _ in range(40)]


def test_training_lowers_the_loss(trained):
    trainer, losses = trained
    assert trainer.tokens_seen == 40 * 512
    assert losses[0] == pytest.approx(math.log(SHAPE.vocab_size), abs=0.3), "all tokens are equally likely at first"
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_a_token_sees_neither_later_tokens_nor_other_rows(data):
    trainer = make_trainer()
    batch = data.next_batch(0)
    changed = batch.clone()
    changed[0, 20:] = 7
    attend = training.trainer.CausalAttend(row_length=32)
    positions = torch.arange(32).repeat(len(batch))
    with torch.no_grad():
        hidden = [trainer.model(rows[:, :-1].flatten(), positions, attend) for rows in (batch, changed)]
    one, other = (each.unflatten(0, (-1, 32)) for each in hidden)
    assert torch.equal(one[0, :20], other[0, :20]) and torch.equal(one[1:], other[1:])
    assert not torch.equal(one[0, 20:], other[0, 20:])


def test_a_batchs_loss_is_the_mean_of_its_rows_losses(data):
    trainer, batch = make_trainer(), data.next_batch(0)
    losses = []
    with torch.no_grad():
        for row in batch:
            hidden = trainer.model(row[:-1], torch.arange(32), training.trainer.CausalAttend(32))
            losses.append(torch.nn.functional.cross_entropy(trainer.model.compute_logits(hidden), row[1:]).item())
        assert trainer.loss(batch).item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_equal_seeds_give_equal_runs(data, dropout):
    batches = [data.next_batch(0) for _ in range(2)]
    trainers = (Trainer(replace(SETTINGS, seed=seed, dropout=dropout), CPU, compile=False) for seed in (0, 0, 1))
    first, second, third = ([trainer.step(b) for b in batches] for trainer in trainers)
    assert first == second != third


def test_a_resumed_run_matches_an_uninterrupted_one(data, tmp_path):
    batches = [data.next_batch(0) for _ in range(4)]
    trainer = make_trainer()
    for batch in batches[:2]:
        trainer.step(batch)
    trainer.curve.append(training.trainer.CurvePoint(1024, 3.5, 3.75))
    trainer.save(tmp_path / "state.pt")
    expected = [trainer.step(batch) for batch in batches[2:]]

    resumed = make_trainer(seed=1)
    resumed.resume(tmp_path / "state.pt")
    assert (resumed.tokens_seen, resumed.curve) == (1024, [(1024, 3.5, 3.75)])
    assert [resumed.step(batch) for batch in batches[2:]] == expected
    for ours, theirs in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert list(tmp_path.iterdir()) == [tmp_path / "state.pt"]


def test_dropout_applies_to_training_only(data):
    trainer = Trainer(replace(SETTINGS, dropout=0.5), CPU, compile=False)
    batch = data.next_batch(0)
    without = make_trainer()
    without.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate([batch]) == without.evaluate([batch])
    assert trainer.loss(batch).item() != trainer.loss(batch).item()


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_mean_and_drops_its_rate(rate):
    torch.manual_seed(0)
    x = torch.full((1000, 1000), 2.0, requires_grad=True)
    out = drop(x, rate)
    share = round(256 * rate) / 256
    assert share == pytest.approx(rate, abs=1 / 512)
    assert (out == 0).float().mean().item() == pytest.approx(share, abs=2e-3)  # 4 standard deviations
    assert out.mean().item() == pytest.approx(2.0, abs=1e-2)
    assert out[out != 0].unique().tolist() == pytest.approx([2 / (1 - share)])
    out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0), "dropped elements must have no gradient"


# The best state


def test_the_best_state_has_the_weights_of_the_lowest_point(data):
    trainer, states = make_trainer(), []
    for held_out in (3.0, 2.0, 2.0, 2.5):
        trainer.step(data.next_batch(0))
        trainer.record(train=1.0, held_out=held_out)
        states.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
    assert trainer.best.point == trainer.curve[1] == (1024, 1.0, 2.0), "ties go to the first"
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in trainer.best.weights.items())
    assert not torch.equal(trainer.best.weights["model.norm.weight"], states[2]["model.norm.weight"])


def test_resuming_keeps_the_best_state(data, tmp_path):
    trainer = make_trainer()
    trainer.step(data.next_batch(0))
    trainer.save(tmp_path / "early.pt")
    trainer.record(train=1.0, held_out=2.0)
    trainer.step(data.next_batch(0))
    trainer.save(tmp_path / "late.pt")

    early, late = make_trainer(seed=1), make_trainer(seed=2)
    early.resume(tmp_path / "early.pt")
    assert early.best is None, "this state was saved before the first evaluation"
    early.record(train=1.0, held_out=9.0)
    assert early.best.point == (512, 1.0, 9.0)
    late.resume(tmp_path / "late.pt")
    late.record(train=0.5, held_out=2.5)
    assert late.best.point == trainer.best.point == (512, 1.0, 2.0)
    assert all(torch.equal(tensor, late.best.weights[name]) for name, tensor in trainer.best.weights.items())


Train = Callable[..., Result]


@pytest.fixture
def train(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return the command, to run on a copy of the library in tmp_path, which is also the checkpoint folder."""
    shutil.copytree(library, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(training.train, "Settings", lambda **given: replace(SETTINGS, **given))
    arguments = ["--text", str(tmp_path), "--out", str(tmp_path), "--dropout", "0", "--learning-rate", "0.01"]
    return lambda *more: CliRunner().invoke(training.train.main, [*arguments, *more], catch_exceptions=False)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[float, torch.Tensor]:
    """Make the held-out losses 3, 2, 5 and 4, and return the final norm's weights at each, in bfloat16."""
    losses, seen = iter([3.0, 2.0, 5.0, 4.0]), {}

    def evaluate(trainer: Trainer, batches: list[torch.Tensor]) -> float:
        loss = next(losses)
        seen[loss] = trainer.model.model.norm.weight.detach().bfloat16()
        return loss

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    monkeypatch.setattr(training.train, "EVALUATE_EVERY", 4)
    return seen


@pytest.mark.parametrize("in_two_parts", [False, True])
@pytest.mark.full
def test_the_checkpoint_has_the_lowest_point_even_if_the_loss_rises_later(train, planted, tmp_path, in_two_parts):
    if in_two_parts:
        assert train("--tokens", "4096").exit_code == 0  # the two points 3 and 2
    assert train("--tokens", "8192", *["--resume"] * in_two_parts).exit_code == 0
    run = json.loads((tmp_path / "training.json").read_text())
    points = [(point["tokens"], point["held_out"]) for point in run["curve"]]
    assert points == [(2048, 3.0), (4096, 2.0), (6144, 5.0), (8192, 4.0)]
    assert run["shipped_tokens"] == 4096
    model = load_model(tmp_path, ModelConfig.from_folder(tmp_path), torch.bfloat16, CPU)
    assert torch.equal(model.model.norm.weight, planted[2.0])
    assert not torch.equal(planted[2.0], planted[4.0])
    state = torch.load(tmp_path / "checkpoints" / "state.pt")
    assert state["tokens_seen"] == 8192, "a resumed run must continue from the end"
    assert torch.equal(state["model"]["model.norm.weight"].bfloat16(), planted[4.0])


# The checkpoint folder


def test_an_engine_loads_the_checkpoint_folder(trained, tokenizer_file, tmp_path):
    trainer, _ = trained
    shutil.copy(tokenizer_file, tmp_path)
    write_checkpoint(trainer.model, tmp_path)
    llm = LLM(tmp_path, kv_cache_tokens=64)
    (output,) = llm.generate("Then the fox", SamplingParams(temperature=0.0, max_tokens=16))
    text = "Then the fox" + output.outputs[0].text
    assert len(output.outputs[0].token_ids) == 16
    assert any(word in text for name in (*NAMES, *DEEDS) for word in name.split() if len(word) > 3)

    ids = torch.tensor(output.prompt_token_ids + output.outputs[0].token_ids)
    with torch.no_grad():
        hidden = trainer.model(ids[:-1], torch.arange(len(ids) - 1), training.trainer.CausalAttend(len(ids) - 1))
        logprobs = trainer.model.compute_logits(hidden).log_softmax(dim=-1)
    taken = logprobs.gather(1, ids[1:].unsqueeze(1))[len(output.prompt_token_ids) - 1 :].sum()
    assert output.outputs[0].cumulative_logprob == pytest.approx(taken.item(), abs=0.5)  # the file has bfloat16


@pytest.mark.full
def test_the_command_trains_resumes_and_writes_a_folder(train, tmp_path):
    assert train("--tokens", "8192", "--resume").output.startswith("Error: --resume needs a saved state")
    assert train("--tokens", "4096").exit_code == 0
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.model", "training.json"} <= names
    tokenizer_before = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "more.txt").write_text(book("Dogs", 5, "Zz"), encoding="utf-8")
    assert train("--tokens", "10000", "--resume").exit_code == 0
    curve = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert [point["tokens"] for point in curve] == [4096, 10240]
    assert curve[1]["held_out"] < curve[0]["held_out"]
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer_before, "a resumed run must keep its tokenizer"
    (output,) = LLM(tmp_path, kv_cache_tokens=64).generate("Then", SamplingParams(max_tokens=4, seed=0))
    assert output.outputs[0].token_ids


def test_the_command_reports_a_missing_folder_in_one_line(tmp_path):
    done = CliRunner().invoke(training.train.main, ["--text", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    assert done.exit_code == 1 and done.output.startswith("Error: ") and done.output.count("\n") == 1
    assert "nowhere is not a folder" in done.output


@pytest.mark.parametrize(("flag", "value"), [("--dropout", "1"), ("--dropout", "-0.1"), ("--short-share", "70")])
def test_options_out_of_range_are_rejected(train, flag, value):
    done = train(flag, value)
    assert done.exit_code == 2 and f"Invalid value for '{flag}': {float(value):g}" in done.output


def test_too_little_text_is_an_error(tmp_path):
    few = [Paragraph(torch.ones(50, dtype=torch.int64), torch.ones(50, dtype=torch.int64))]
    with pytest.raises(ValueError, match="at least 128 tokens, but the stories have 50"):
        Data([(few, 1)], SETTINGS, tokens_seen=0)
    with pytest.raises(ValueError, match="the held-out text has 50 tokens, less than one row of 64"):
        held_out_batches([few], SETTINGS)
    with pytest.raises(ValueError, match="4,096 pieces needs more than 12 characters"):
        train_tokenizer(["Once upon a."], 4096, tmp_path / "tokenizer.model")


def test_no_paragraph_is_skipped_when_rows_end_with_paragraphs():
    paragraphs = [Paragraph(torch.full((4,), n), torch.full((4,), n)) for n in range(6)]
    assert [row.tolist() for row in rows(paragraphs, 7)] == [[n] * 4 + [n + 1] * 4 for n in (0, 2, 4)]


# models/training/evaluate.py


def make_folder(folder: Path, texts: list[str], shape: ModelConfig = SHAPE, seed: int = 0) -> Path:
    """Write a checkpoint of random weights, with a tokenizer trained on `texts`."""
    folder.mkdir(exist_ok=True)
    train_tokenizer(texts, shape.vocab_size, folder / "tokenizer.model")
    torch.manual_seed(seed)
    model = training.trainer.LlamaForCausalLM(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0)  # so that the loss differs from a uniform model's
    write_checkpoint(model, folder)
    return folder


@pytest.fixture
def folder(library: Path, tmp_path: Path) -> Path:
    made = make_folder(tmp_path / "small", [story for story, _ in read_corpus(library, Recipe()).train])
    (made / "recipe.toml").write_text('held_out = ["cats"]\n', encoding="utf-8")
    return made


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(evaluation.main, [str(each) for each in arguments], catch_exceptions=False)


def plain_nats(folder: Path, *texts: torch.Tensor) -> float:
    """Return the sum of -log p of every token but a text's first, according to transformers."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = [model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(dim=-1) for ids in texts]
    return -sum(each.gather(1, ids[1:].unsqueeze(1)).sum().item() for each, ids in zip(logprobs, texts, strict=True))


def test_the_loss_of_a_story_matches_transformers(library, tmp_path):
    """The story fills exactly one window, so its text gives the characters and transformers' tokenizer the ids."""
    corpus = read_corpus(library, Recipe(held_out=["cats"]))
    shape = replace(SHAPE, max_position_embeddings=999)
    folder = make_folder(tmp_path / "one", [text for text, _ in corpus.train], shape)
    text = corpus.held_out[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    score = evaluation.evaluate(folder, [text], window=len(ids) - 1)
    nats = plain_nats(folder, ids)
    assert (score.window, score.tokens, score.characters) == (len(ids) - 1, len(ids) - 1, len(text))
    assert score.nats_per_token == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert score.bits_per_character == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
    assert score.nats_per_token > 1.2 * math.log(SHAPE.vocab_size)


def test_the_loss_is_the_mean_over_all_windows(library, folder, monkeypatch):
    monkeypatch.setattr(training.evaluate, "BATCH_TOKENS", 100)  # two windows per batch, and one in the last
    texts = read_corpus(library, Recipe(held_out=["cats"])).held_out
    score = evaluation.evaluate(folder, texts, window=40)
    windows = list(rows([part for text in texts for part in tokenize(text, Tokenizer(folder))], 40))
    assert len(windows) % 2 == 1 and score.tokens == 40 * len(windows)
    assert score.nats_per_token == pytest.approx(plain_nats(folder, *windows) / score.tokens, rel=1e-5)
    whole = sum(map(len, texts))
    assert 0.5 * whole < score.characters < whole, "windows cut some paragraphs off"
    bits = score.nats_per_token * score.tokens / math.log(2)
    assert score.bits_per_character == pytest.approx(bits / score.characters)


def test_a_storys_first_word_counts_without_a_space(folder):
    tokenizer = Tokenizer(folder)
    ids = [*tokenizer.encode("The end."), tokenizer.eos_token_id, *tokenizer.encode("Then the fox")]
    assert evaluation.num_characters(torch.tensor(ids), tokenizer) == len("The end.") + len("Then the fox")


def test_evaluate_prints_a_line_per_folder_and_merges_its_results(library, folder, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "recipe.toml").unlink()
    settings = asdict(replace(SETTINGS, optimizer="adamw", short_share=1.0))
    (other / "training.json").write_text(json.dumps({"settings": settings, "shipped_tokens": 7, "curve": []}))
    out = tmp_path / "new" / "comparison.json"
    first = evaluate(folder, other, "--text", library, "--window", 32, "--out", out)
    lines = [line for line in first.stdout.splitlines() if "nats per token" in line]
    assert [line.split(":")[0] for line in lines] == [str(folder), str(other)] and first.exit_code == 0
    results = json.loads(out.read_text())
    expected = evaluation.evaluate(folder, read_corpus(library, Recipe(held_out=["cats"])).held_out, 32)._asdict()
    assert results["small"] == expected and f"{expected['nats_per_token']:.3f} nats per token" in lines[0]
    assert results["other"].items() >= expected.items(), "the first folder's recipe applies to all"
    assert results["other"]["shipped_tokens"] == 7

    words = results["other"]["command"].removeprefix("python -m models.training ").split()
    again = training.train.main.make_context("train", words).params
    assert {name: again[name] for name in again if name in settings} == {
        name: settings[name] for name in ("tokens", "optimizer", "learning_rate", "short_share", "dropout")
    }
    assert evaluate(folder, "--text", library, "--window", 16, "--out", out).exit_code == 0
    merged = json.loads(out.read_text())
    assert (merged["small"]["window"], merged["other"]) == (16, results["other"])


def test_evaluate_reports_each_mistake_in_one_line(library, folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    (bad / "model.safetensors").unlink()
    (bad / "training.json").write_text("{}\n")
    less = Path(shutil.copytree(library, tmp_path / "less"))
    (less / "cats.txt").unlink()
    same = Path(shutil.copytree(folder, empty / "small"))
    text = ("--text", library)
    for arguments, message in (
        ((tmp_path / "nowhere", *text), "nowhere is not a checkpoint folder: it has no config.json"),
        ((library / "cats.txt", *text), "cats.txt is not a checkpoint folder: it has no config.json"),
        ((bad, *text, "--window", "64"), "bad: tensor model.embed_tokens.weight is missing"),
        ((folder, *text, "--window", "65"), "--window must be at most 64 for"),
        ((folder, "--text", tmp_path / "nowhere"), "nowhere is not a folder"),
        ((folder, "--text", empty), "no stories of 600 characters to train on, and 0 to hold out"),
        ((folder, "--text", less), "less has no cats.txt, which"),
        ((folder, same, *text), "2 folders have 1 names"),
        ((folder, *text, "--out", library / "cats.txt"), "cats.txt is not valid JSON"),
    ):
        done = evaluate(*arguments)
        lines = [line for line in done.output.splitlines() if line]
        assert done.exit_code == 1 and len(lines) == 1 and lines[0].startswith("Error: "), done.output
        assert message in lines[0]
    (bad / "training.json").write_text('{"settings": {}}\n')
    assert "training.json has no shipped_tokens" in evaluate(bad, *text).output
    with pytest.raises(ValueError, match="the held-out text has 0 tokens, less than one row of 32"):
        evaluation.evaluate(folder, [], window=32)


# The model card


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the small files that the card's tables read."""
    for name in ("config.json", "recipe.toml", "training.json"):
        shutil.copy(model_card.STORYTELLER / name, tmp_path)
    monkeypatch.setattr(model_card, "STORYTELLER", tmp_path)
    return tmp_path


def test_the_card_describes_the_shipped_state(card):
    run = json.loads((card / "training.json").read_text())
    points = [(1_500_000, 4.0, 4.25), (3_000_000, 3.0, 3.5), (4_500_000, 2.0, 3.75)]
    run["curve"] = [training.trainer.CurvePoint(*point)._asdict() for point in points]
    (card / "training.json").write_text(json.dumps(run | {"shipped_tokens": 3_000_000, "epoch_tokens": 2_000_000}))
    block = model_card.training_block({})
    assert "| shipped | the state after 3.0 million tokens, the lowest held-out loss |" in block
    assert "| held-out loss | 3.50 nats" in block and "| training loss | 3.00 nats" in block
    assert "| last state | held-out loss 3.75, training loss 2.00 |" in block
    assert "| whole run | 4.5 million tokens, 2.2 epochs |" in block
    (card / "training.json").write_text(json.dumps(run | {"shipped_tokens": 4_500_000}))
    assert "lowest" not in model_card.training_block({}), "only the lowest point may be called the lowest"
    (card / "training.json").write_text(json.dumps(run | {"shipped_tokens": 1}))
    with pytest.raises(ValueError):  # not a point of the curve
        model_card.training_block({})


def test_the_card_compares_checkpoints_once_both_are_measured(card):
    assert model_card.BLOCKS["baseline"]({}) == "Not measured yet.\n"
    score = {"nats_per_token": 3.25, "bits_per_character": 1.125, "window": 256, "tokens": 1, "characters": 3}
    entry = score | {"command": "python -m models.training --dropout 0.1", "shipped_tokens": 9_800_000}
    path = card / "comparison.json"
    path.write_text(json.dumps({"storyteller": entry}))
    assert model_card.baseline_block({}) == "Not measured yet.\n"
    worse = entry | {"nats_per_token": 3.5, "command": "python -m models.training --optimizer adamw"}
    path.write_text(json.dumps({"baseline": worse, "another": {}, "storyteller": entry}))
    block = model_card.baseline_block({})
    assert "| storyteller | 3.250 | 1.125 | 9.8 million |\n| baseline | 3.500 | 1.125 | 9.8 million |\n" in block
    assert "\npython -m models.training --dropout 0.1 --out models/storyteller\n" in block
    assert "\npython -m models.training --optimizer adamw --out runs/baseline\n" in block
    assert "--window 256" in block
    path.write_text(json.dumps({"baseline": worse | {"window": 64}, "storyteller": entry}))
    with pytest.raises(ValueError, match="windows of 256 and of 64 tokens"):
        model_card.baseline_block({})
