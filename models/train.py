"""Train the small checkpoint that the project ships: `make train TEXT=folder`, or `python -m models.train --help`.

The training model is stage 1's llama/model.py as it stands. At inference its `attend` looks keys up in a cache; here it
is causal attention over the rows of a batch, and nothing else differs.
"""

import itertools
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from models.stories import Paragraph, Recipe, epochs, read_corpus, rows, tokenize, train_tokenizer
from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig, Tokenizer

SHAPE = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)


@dataclass
class Settings:
    """One run. The first `short_share` of the tokens comes in short rows, which are cheaper; the rest in full ones."""

    tokens: int = 36_000_000
    batch_tokens: int = 8192
    short_row: int = 256
    short_share: float = 0.7
    learning_rate: float = 3e-3  # AdamW's: embedding and norms; Muon's where there is one
    matrix_learning_rate: float = 2e-2  # Muon's
    weight_decay: float = 0.1
    warmup_steps: int = 100
    dropout: float = 0.0
    clip: float = 1.0
    seed: int = 0


class CurvePoint(NamedTuple):
    tokens: int
    train: float  # mean loss since the point before, nats a token
    held_out: float


class CausalAttend:
    """`attend` for training: rows of equal length lie end to end, each token sees its own row up to itself."""

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, out [num_rows * row_length, num_heads, head_dim]; k, v [num_rows * row_length, num_kv_heads, head_dim]"""
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.to(v.dtype).unflatten(0, (-1, self.row_length)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))  # [num_rows, num_heads, row_length, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)


class Trainer:
    """The state of a run: model, optimizers, where in the schedule, the curve so far."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.device = settings, device
        self.model = LlamaForCausalLM(SHAPE)
        init_weights(self.model)
        add_dropout(self.model, settings.dropout)
        self.model.to(device)
        self.optimizers = make_optimizers(self.model, settings)
        self.base_rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.tokens_seen = 0
        self.curve: list[CurvePoint] = []
        self._loss = torch.compile(self.loss)

    def loss(self, batch: Tensor) -> Tensor:
        """batch int64 [num_rows, row_length + 1] -> mean cross-entropy, nats a token."""
        inputs, targets = batch[:, :-1].flatten(), batch[:, 1:].flatten()  # [num_tokens]
        row_length = batch.shape[1] - 1
        positions = torch.arange(row_length, device=batch.device).repeat(batch.shape[0])
        hidden = self.model(inputs, positions, CausalAttend(row_length))  # [num_tokens, hidden_size]
        return F.cross_entropy(self.model.compute_logits(hidden).float(), targets)

    def step(self, batch: Tensor) -> float:
        """One update; returns the loss before it."""
        scale = schedule(self.tokens_seen, self.settings)
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss(batch.to(self.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.tokens_seen += batch[:, 1:].numel()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: list[Tensor]) -> float:
        """Mean loss of held-out rows, nats a token, without dropout."""
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = [self.loss(batch.to(self.device)).item() for batch in batches]
        self.model.train()
        return sum(losses) / len(losses)

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "tokens_seen": self.tokens_seen,
            "curve": [tuple(point) for point in self.curve],
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)  # a run that dies while saving leaves the last whole checkpoint

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.tokens_seen, self.curve = state["tokens_seen"], [CurvePoint(*point) for point in state["curve"]]


def init_weights(model: LlamaForCausalLM) -> None:
    """Small normal weights; what writes to the residual stream is smaller by its depth (GPT-2's rule)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * SHAPE.num_hidden_layers) if into_stream else 0.02
            nn.init.normal_(parameter, std=std)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on what a layer adds to the stream, from outside: the model has none in it."""
    if rate == 0.0:
        return
    for layer in model.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, _, out: F.dropout(out, rate, module.training))


def make_optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (Jordan et al. 2024), AdamW for the embedding and the norms."""
    inside = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is q for q in inside)]
    return [
        torch.optim.Muon(inside, lr=settings.matrix_learning_rate, weight_decay=settings.weight_decay),
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(tokens_seen: int, settings: Settings) -> float:
    """Share of the full learning rate: linear warm-up, then a cosine down to a fiftieth.

    >>> [round(schedule(n, Settings(tokens=1000, batch_tokens=1, warmup_steps=10)), 2) for n in (0, 9, 500, 1000)]
    [0.1, 1.0, 0.51, 0.02]
    """
    warmup = (tokens_seen / settings.batch_tokens + 1) / settings.warmup_steps
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, tokens_seen / settings.tokens)))
    return min(1.0, warmup) * (0.02 + 0.98 * cosine)


class Data:
    """Batches of rows, short at first, full later; the order is a function of the seed and of where the run resumed."""

    def __init__(self, train: list[tuple[list[Paragraph], int]], settings: Settings, tokens_seen: int) -> None:
        self.settings = settings
        rng = random.Random(f"{settings.seed} {tokens_seen}")
        self._short = epochs(train, settings.short_row, rng)
        self._full = epochs(train, SHAPE.max_position_embeddings, rng)

    def next_batch(self, tokens_seen: int) -> Tensor:
        """int64 [num_rows, row_length + 1]"""
        short = tokens_seen < self.settings.short_share * self.settings.tokens
        length = self.settings.short_row if short else SHAPE.max_position_embeddings
        rows_of = self._short if short else self._full
        return torch.stack([next(rows_of) for _ in range(self.settings.batch_tokens // length)])


def held_out_batches(stories: list[list[Paragraph]], settings: Settings) -> list[Tensor]:
    """Every n-th full row of the held-out stories, about 32 of them, in batches."""
    length = SHAPE.max_position_embeddings
    chosen = list(rows([paragraph for story in stories for paragraph in story], length))
    chosen = chosen[:: max(1, len(chosen) // 32)]
    return list(torch.stack(chosen).split(max(1, settings.batch_tokens // length)))


def run(trainer: Trainer, data: Data, held_out: list[Tensor], state_path: Path) -> None:
    """Train to the end of the schedule; save often, evaluate now and then."""
    settings, losses = trainer.settings, []
    with tqdm(total=settings.tokens, initial=trainer.tokens_seen, unit="tok", unit_scale=True) as bar:
        for step in itertools.count(1):
            batch = data.next_batch(trainer.tokens_seen)
            losses.append(trainer.step(batch))
            bar.update(batch[:, 1:].numel())
            done = trainer.tokens_seen >= settings.tokens
            if step % 400 == 0 or done:
                train_loss, losses = sum(losses) / len(losses), []
                point = CurvePoint(trainer.tokens_seen, train_loss, trainer.evaluate(held_out))
                trainer.curve.append(point)
                bar.set_postfix(train=f"{point.train:.3f}", held_out=f"{point.held_out:.3f}")
            if step % 50 == 0 or done:
                trainer.save(state_path)
            if done:
                return


@click.command()
@click.option("--text", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("models/storyteller"))
@click.option("--recipe", type=click.Path(dir_okay=False, path_type=Path), default=Path("models/storyteller/recipe.toml"))
@click.option("--tokens", type=int, default=Settings.tokens, show_default=True, help="how many to train on")
@click.option("--device", default="cpu", show_default=True)
@click.option("--resume", is_flag=True, help="go on from the last saved state")
def main(text: Path, out: Path, recipe: Path, tokens: int, device: str, resume: bool) -> None:
    """Train a story teller on a folder of text files and write it as a checkpoint folder."""
    settings = Settings(tokens=tokens)
    state_path = out / "checkpoints" / "state.pt"
    state_path.parent.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(text, Recipe.read(recipe) if recipe.exists() else Recipe())
    if not (out / "tokenizer.model").exists():
        train_tokenizer([story for story, _ in corpus.train], SHAPE.vocab_size, out / "tokenizer.model")
    tokenizer = Tokenizer(out)
    train = [(tokenize(story, tokenizer), weight) for story, weight in tqdm(corpus.train, "tokenizing")]
    size = sum(weight * sum(len(p.inner) for p in story) for story, weight in train)
    print(f"{len(train):,} stories, {size:,} tokens an epoch, {settings.tokens / size:.1f} epochs")
    trainer = Trainer(settings, torch.device(device))
    if resume:
        trainer.resume(state_path)
    started = time.perf_counter()
    held_out = held_out_batches([tokenize(story, tokenizer) for story in corpus.held_out], settings)
    run(trainer, Data(train, settings, trainer.tokens_seen), held_out, state_path)
    print(f"{time.perf_counter() - started:.0f} s", trainer.curve[-1])


if __name__ == "__main__":
    main()
