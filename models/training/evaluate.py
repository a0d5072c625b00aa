"""How well checkpoints predict the held-out stories: `python -m models.training.evaluate FOLDER ... --text TEXT`.

The held-out loss in training.json is that of some rows, in bfloat16, to watch a run. This one is that of all rows, in
float32. Nats a token compare checkpoints with one tokenizer, bits a character any.
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
    nats_per_token: float
    bits_per_character: float
    window: int
    tokens: int  # predicted, BOS and EOS among them
    characters: int  # of their text


def held_out_stories(text: Path, folder: Path) -> list[str]:
    """All stories in `text` that the folder's recipe holds out. Raises ValueError if one of its books is not there."""
    recipe = Recipe.of(folder)
    corpus = read_corpus(text, recipe)
    missing = [name for name in recipe.held_out if not (text / f"{name}.txt").exists()]
    if missing:  # read_corpus would hold out others, which the checkpoint may have been trained on
        raise ValueError(f"{text} has no {missing[0]}.txt, which {folder / 'recipe.toml'} holds out")
    return corpus.held_out


def evaluate(folder: Path, stories: list[str], window: int) -> Score:
    """The mean over all non-overlapping windows of the stories, each of which begins at a paragraph.

    Raises ValueError for a folder without a checkpoint, a window that the model has no positions for, too few stories.
    """
    config = ModelConfig.from_folder(folder)
    if window > config.max_position_embeddings:
        raise ValueError(f"{folder} has {config.max_position_embeddings:,} positions, a window would take {window:,}")
    model = load_model(folder, config, torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer(folder)
    found = held_out_rows([tokenize(story, tokenizer) for story in stories], window)
    nats = 0.0
    for batch in tqdm(torch.stack(found).split(max(1, BATCH_TOKENS // window)), folder.name, leave=False):
        nats += mean_loss(model, batch).item() * batch[:, 1:].numel()
    tokens, characters = len(found) * window, sum(num_characters(row, tokenizer) for row in found)
    return Score(nats / tokens, nats / math.log(2) / characters, window, tokens, characters)


def num_characters(row: Tensor, tokenizer: Tokenizer) -> int:
    """Of a row's text, each story decoded alone: in the middle of a text its first word would have a space."""
    starts = (row == tokenizer.bos_token_id).nonzero().flatten()
    return sum(len(tokenizer.decode(part.tolist())) for part in row.tensor_split(starts))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file. Raise ValueError, naming it, for another."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def training_of(folder: Path) -> dict[str, Any]:
    """What training.json, if there is one, says of the state that ships, and the command with all of its flags.

    Raises ValueError if it is not what models/training/train.py writes.
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
@click.option("--window", type=click.IntRange(min=1), default=256, show_default=True, help="tokens in a row")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write the results into")
def main(folders: tuple[Path, ...], text: Path, window: int, out: Path | None) -> None:
    """Print the loss of checkpoint folders on the stories that recipe.toml in the first of them holds out."""
    try:
        results = read_json(out) if out else {}
        training = {folder.resolve().name: training_of(folder) for folder in folders}
        if len(training) < len(folders):
            raise ValueError(f"{len(folders)} folders have {len(training)} names, and results go by name")
        stories = held_out_stories(text, folders[0])
        for folder, name in zip(folders, training, strict=True):
            score = evaluate(folder, stories, window)
            results[name] = score._asdict() | training[name]
            losses = f"{score.nats_per_token:.3f} nats a token, {score.bits_per_character:.3f} bits a character"
            print(f"{folder}: {losses}, over {score.tokens:,} tokens in windows of {window:,}")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
