"""Measure how well checkpoints predict held-out stories: `python -m models.training.evaluate FOLDER ... --text TEXT`.

The held-out loss in training.json covers a sample of rows in bfloat16, enough to watch a run. This one covers all rows
in float32. Use nats per token to compare checkpoints that share a tokenizer, and bits per character for any others.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from tqdm import tqdm

from models.training import train
from models.training.stories import Recipe, held_out_rows, read_corpus, tokenize
from models.training.trainer import mean_loss
from stages.s1_contiguous_cache.llama import ModelConfig, Tokenizer, load_model

BATCH_TOKENS = 4096


class Score(NamedTuple):
    """The loss of a checkpoint."""

    nats_per_token: float
    bits_per_character: float
    window: int
    tokens: int  # predicted, including BOS and EOS
    characters: int  # in their text


def held_out_stories(text: Path, folder: Path) -> list[str]:
    """Return the stories that the checkpoint folder's recipe holds out. Raise ValueError if a book is missing."""
    recipe = Recipe.of(folder)
    corpus = read_corpus(text, recipe)
    missing = [name for name in recipe.held_out if not (text / f"{name}.txt").exists()]
    if missing:  # read_corpus() may have held out other stories, which the checkpoint may have been trained on
        raise ValueError(f"{text} has no {missing[0]}.txt, which {folder / 'recipe.toml'} holds out")
    return corpus.held_out


def evaluate(folder: Path, stories: list[str], window: int) -> Score:
    """Return the mean loss over all windows of the stories. Windows don't overlap, and each begins at a paragraph.

    Raise ValueError if there is no checkpoint, if the window exceeds the model's positions, or if stories are too few.
    """
    config = ModelConfig.from_folder(folder)
    if window > config.max_position_embeddings:
        raise ValueError(f"--window must be at most {config.max_position_embeddings:,} for {folder}, got {window:,}")
    model = load_model(folder, config, torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer(folder)
    rows = held_out_rows([tokenize(story, tokenizer) for story in stories], window)
    nats = 0.0
    for batch in tqdm(torch.stack(rows).split(max(1, BATCH_TOKENS // window)), folder.name, leave=False):
        nats += mean_loss(model, batch).item() * batch[:, 1:].numel()
    tokens, characters = len(rows) * window, sum(num_characters(row, tokenizer) for row in rows)
    return Score(nats / tokens, nats / math.log(2) / characters, window, tokens, characters)


def num_characters(row: Tensor, tokenizer: Tokenizer) -> int:
    """Count the characters of a row's text. Stories are decoded separately, or each would begin with a space."""
    starts = (row == tokenizer.bos_token_id).nonzero().flatten()
    return sum(len(tokenizer.decode(part.tolist())) for part in row.tensor_split(starts))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one without a file. Raise ValueError if it isn't valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def training_of(folder: Path) -> dict[str, Any]:
    """Return the training command and the tokens at the shipped state, from training.json if there is one.

    Raise ValueError if an entry that train.py writes is missing.
    """
    run = read_json(folder / "training.json")
    if not run:
        return {}
    if missing := {"settings", "shipped_tokens"} - run.keys():
        raise ValueError(f"{folder / 'training.json'} has no {min(missing)}")
    flags = [option for option in train.main.params if option.name in run["settings"]]
    words = [f"{option.opts[0]} {run['settings'][option.name]}" for option in flags]
    return {
        "command": " ".join(["python -m models.training --text folder", *words]),
        "shipped_tokens": run["shipped_tokens"],
    }


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--text", type=train.FOLDER, required=True, help="folder of .txt files")
@click.option("--window", type=click.IntRange(min=1), default=256, show_default=True, help="tokens per row")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to add the results to")
def main(folders: tuple[Path, ...], text: Path, window: int, out: Path | None) -> None:
    """Print the loss of checkpoint folders on held-out stories, as chosen by recipe.toml in the first folder."""
    try:
        results = read_json(out) if out else {}
        training = {folder.resolve().name: training_of(folder) for folder in folders}
        if len(training) < len(folders):
            raise ValueError(f"folder names must be different: {len(folders)} folders have {len(training)} names")
        stories = held_out_stories(text, folders[0])
        for folder, name in zip(folders, training, strict=True):
            score = evaluate(folder, stories, window)
            results[name] = score._asdict() | training[name]
            losses = f"{score.nats_per_token:.3f} nats per token, {score.bits_per_character:.3f} bits per character"
            print(f"{folder}: {losses}, over {score.tokens:,} tokens in windows of {window:,}")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
