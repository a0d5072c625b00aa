"""Train the checkpoint in models/storyteller: `make train TEXT=folder`, or `python -m models.training --help`."""

import itertools
import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from tqdm import tqdm

from models.training.checkpoint import write_checkpoint
from models.training.stories import Paragraph, Recipe, epochs, held_out_rows, read_corpus, tokenize, train_tokenizer
from models.training.trainer import SHAPE, Settings, Trainer
from stages.s1_contiguous_cache.llama import Tokenizer

EVALUATE_EVERY, SAVE_EVERY = 100, 50  # steps
FOLDER = click.Path(file_okay=False, path_type=Path)
SHARE, RATE = click.FloatRange(0, 1), click.FloatRange(0, 0.9)


class Data:
    """Batches of rows, first short, then full. Their order depends on the seed and on where the run resumed."""

    def __init__(self, train: list[tuple[list[Paragraph], int]], settings: Settings, tokens_seen: int) -> None:
        """Prepare the rows. Raise ValueError if all stories together are shorter than two full rows."""
        self.settings = settings
        self.epoch_tokens = sum(weight * len(paragraph.inner) for story, weight in train for paragraph in story)
        least = 2 * SHAPE.max_position_embeddings
        if self.epoch_tokens < least:
            raise ValueError(f"training needs at least {least:,} tokens, but the stories have {self.epoch_tokens:,}")
        rng = random.Random(f"{settings.seed} {tokens_seen}")
        self._short = epochs(train, settings.short_row, rng)
        self._full = epochs(train, SHAPE.max_position_embeddings, rng)

    def next_batch(self, tokens_seen: int) -> Tensor:
        """Return the next batch, int64 [num_rows, row_length + 1]."""
        short = tokens_seen < self.settings.short_share * self.settings.tokens
        length = self.settings.short_row if short else SHAPE.max_position_embeddings
        rows_of = self._short if short else self._full
        return torch.stack([next(rows_of) for _ in range(self.settings.batch_tokens // length)])


def held_out_batches(stories: list[list[Paragraph]], settings: Settings) -> list[Tensor]:
    """Return batches of about 32 full rows, spread over the held-out stories. Raise ValueError if there are none."""
    length = SHAPE.max_position_embeddings
    chosen = held_out_rows(stories, length)
    chosen = chosen[:: max(1, len(chosen) // 32)]
    return list(torch.stack(chosen).split(max(1, settings.batch_tokens // length)))


def run(trainer: Trainer, data: Data, held_out: list[Tensor], state_path: Path) -> None:
    """Train to the end of the schedule, saving and evaluating regularly."""
    settings, losses = trainer.settings, []
    with tqdm(total=settings.tokens, initial=trainer.tokens_seen, unit="tok", unit_scale=True) as bar:
        for step in itertools.count(1):
            batch = data.next_batch(trainer.tokens_seen)
            losses.append(trainer.step(batch))
            bar.update(batch[:, 1:].numel())
            held_out_loss = trainer.curve[-1].held_out if trainer.curve else math.nan
            bar.set_postfix(loss=f"{losses[-1]:.2f}", held_out=f"{held_out_loss:.3f}")
            done = trainer.tokens_seen >= settings.tokens
            if step % EVALUATE_EVERY == 0 or done:
                train_loss, losses = sum(losses) / len(losses), []
                trainer.record(train_loss, trainer.evaluate(held_out))
            if step % SAVE_EVERY == 0 or done:
                trainer.save(state_path)
            if done:
                return


def write_results(trainer: Trainer, epoch_tokens: int, out: Path) -> None:
    """Write the checkpoint from the run's best state, and training.json for the model card.

    This loads the best state into the trainer's model.
    """
    assert trainer.best is not None, "a run ends with an evaluation"
    trainer.model.load_state_dict(trainer.best.weights)
    write_checkpoint(trainer.model, out)
    run = {
        "settings": asdict(trainer.settings),
        "epoch_tokens": epoch_tokens,
        "shipped_tokens": trainer.best.point.tokens,
        "curve": [point._asdict() for point in trainer.curve],
    }
    (out / "training.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


@click.command(context_settings={"show_default": True})
@click.option("--text", type=FOLDER, required=True, help="folder of .txt files")
@click.option("--out", type=FOLDER, default="models/storyteller", help="checkpoint folder")
@click.option("--tokens", type=int, default=Settings.tokens, help="tokens to train on")
@click.option("--optimizer", type=click.Choice(["muon", "adamw"]), default=Settings.optimizer, help="for matrices")
@click.option("--learning-rate", type=float, default=Settings.learning_rate, help="AdamW's peak")
@click.option("--short-share", type=SHARE, default=Settings.short_share, help="share of the tokens in short rows")
@click.option("--dropout", type=RATE, default=Settings.dropout, help="on each layer's output")
@click.option("--device", default="cpu", help="torch device to train on")
@click.option("--compile/--no-compile", default=True, help="faster, but needs a C++ compiler on a CPU")
@click.option("--resume", is_flag=True, help="continue from the last saved state")
def main(text: Path, out: Path, device: str, compile: bool, resume: bool, **settings: Any) -> None:
    """Train a storyteller on a folder of text files, and write it as a checkpoint folder.

    An optional recipe.toml in the checkpoint folder lists the books to drop, to hold out and to repeat.
    """
    state_path = out / "checkpoints" / "state.pt"
    if resume and not state_path.exists():
        raise click.ClickException(f"--resume needs a saved state, and {state_path} doesn't exist")
    state_path.parent.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(Settings(**settings), torch.device(device), compile)
    try:
        if resume:
            trainer.resume(state_path)
        data, held_out = prepare(text, out, trainer, new_tokenizer=not resume)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    print(f"{data.epoch_tokens:,} tokens per epoch, {trainer.settings.tokens / data.epoch_tokens:.1f} epochs")
    run(trainer, data, held_out, state_path)
    write_results(trainer, data.epoch_tokens, out)


def prepare(text: Path, out: Path, trainer: Trainer, new_tokenizer: bool) -> tuple[Data, list[Tensor]]:
    """Tokenize the stories. Return batches to train on and held-out batches. Raise ValueError if text is too short."""
    corpus = read_corpus(text, Recipe.of(out))
    if new_tokenizer:
        train_tokenizer([story for story, _ in corpus.train], SHAPE.vocab_size, out / "tokenizer.model")
    tokenizer = Tokenizer(out)
    train = [(tokenize(story, tokenizer), weight) for story, weight in tqdm(corpus.train, "tokenizing")]
    held_out = [tokenize(story, tokenizer) for story in corpus.held_out]
    return Data(train, trainer.settings, trainer.tokens_seen), held_out_batches(held_out, trainer.settings)
