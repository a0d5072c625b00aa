"""Trainer: one update of the story teller at a time, with its schedule, its optimizers and its state on disk.

The training model is stage 1's llama/model.py as it stands. At inference its `attend` looks keys up in a cache; here it
is causal attention over the rows of a batch, and nothing else differs.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig

SHAPE = ModelConfig(  # of the checkpoint that ships
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

    tokens: int = 22_000_000
    batch_tokens: int = 8192
    short_row: int = 256
    short_share: float = 0.5
    learning_rate: float = 3e-3  # AdamW's: embedding and norms; Muon's where there is one
    matrix_learning_rate: float = 2e-2  # Muon's
    weight_decay: float = 0.1
    warmup_steps: int = 100
    dropout: float = 0.1
    clip: float = 1.0
    seed: int = 0
    optimizer: str = "muon"  # or "adamw", for everything


class CurvePoint(NamedTuple):
    tokens: int
    train: float  # mean loss since the point before, nats a token
    held_out: float


class Best(NamedTuple):
    """The weights at the point of the curve with the lowest held-out loss: what ships."""

    point: CurvePoint
    weights: dict[str, Tensor]  # the model's state_dict, copied


class CausalAttend:
    """`attend` for training: rows of equal length lie end to end, each token sees its own row up to itself."""

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, out [num_rows * row_length, num_heads, head_dim]; k, v [num_rows * row_length, num_kv_heads, head_dim]"""
        group = q.shape[1] // k.shape[1]
        # under autocast the float32 rope tables leave q and k in float32, v is bfloat16
        q, k, v = (x.to(v.dtype).unflatten(0, (-1, self.row_length)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))  # [num_rows, num_heads, row_length, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)


def mean_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """batch int64 [num_rows, row_length + 1] -> mean cross-entropy of what follows each token, nats a token."""
    inputs, targets = batch[:, :-1].flatten(), batch[:, 1:].flatten()  # [num_tokens]
    row_length = batch.shape[1] - 1
    positions = torch.arange(row_length, device=batch.device).repeat(batch.shape[0])
    hidden = model(inputs, positions, CausalAttend(row_length))  # [num_tokens, hidden_size]
    return F.cross_entropy(model.compute_logits(hidden).float(), targets)


class Trainer:
    """The state of a run: model, optimizers, where in the schedule, the curve so far and its lowest point."""

    def __init__(self, settings: Settings, device: torch.device, compile: bool = True) -> None:
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
        self.best: Best | None = None
        self._loss = torch.compile(self.loss) if compile else self.loss

    def loss(self, batch: Tensor) -> Tensor:
        return mean_loss(self.model, batch)

    def step(self, batch: Tensor) -> float:
        """One update; returns the loss before it."""
        scale = schedule(self.tokens_seen, self.settings)
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
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

    def record(self, train: float, held_out: float) -> None:
        """Add a point to the curve; copy the weights if all points before it were higher on held-out text."""
        point = CurvePoint(self.tokens_seen, train, held_out)
        self.curve.append(point)
        if self.best is None or held_out < self.best.point.held_out:
            weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
            self.best = Best(point, weights)

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "settings": asdict(self.settings),
            "tokens_seen": self.tokens_seen,
            "curve": [tuple(point) for point in self.curve],
            "best": None if self.best is None else (tuple(self.best.point), self.best.weights),
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)  # a run that dies while saving leaves the last whole checkpoint

    def resume(self, path: Path) -> None:
        """Raises ValueError if the state is of a run with another optimizer; another number of tokens is a new end."""
        state = torch.load(path, map_location=self.device)
        saved, given = state["settings"]["optimizer"], self.settings.optimizer
        if saved != given:
            raise ValueError(f"{path} is of a run with {saved}, not {given}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.tokens_seen, self.curve = state["tokens_seen"], [CurvePoint(*point) for point in state["curve"]]
        if state["best"] is not None:  # None: saved before the first point of the curve
            point, weights = state["best"]
            self.best = Best(CurvePoint(*point), weights)


def init_weights(model: LlamaForCausalLM) -> None:
    """Small normal weights; what writes to the residual stream is smaller by its depth (GPT-2's rule)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * model.config.num_hidden_layers) if into_stream else 0.02
            nn.init.normal_(parameter, std=std)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on what a layer adds to the stream, from outside: the model has none in it."""
    if rate == 0.0:
        return
    for layer in model.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, _, out: drop(out, rate) if module.training else out)


@torch.compiler.disable
def drop(x: Tensor, rate: float) -> Tensor:
    """Dropout with one random byte an element: F.dropout draws more, which is slow on a CPU.

    x, out of any shape. A byte makes the rate a multiple of 1/256; what is kept grows so that the mean stays.
    """
    threshold = round(256 * rate)
    kept = torch.empty(x.shape, dtype=torch.uint8, device=x.device).random_() >= threshold
    return x * (kept * (256 / (256 - threshold))).to(x.dtype)


def make_optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (Jordan et al. 2024) and AdamW for the rest, or AdamW for all."""
    inside = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in inside)]
    decay = settings.weight_decay
    if settings.optimizer == "adamw":
        groups = [{"params": inside, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))]
    return [
        torch.optim.Muon(inside, lr=settings.matrix_learning_rate, weight_decay=decay),
        torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(tokens_seen: int, settings: Settings) -> float:
    """Share of the full learning rate: linear warm-up, then a cosine down to a fiftieth.

    >>> [round(schedule(n, Settings(tokens=1000, batch_tokens=1, warmup_steps=10)), 2) for n in (0, 9, 500, 1000)]
    [0.1, 1.0, 0.51, 0.02]
    """
    warmup = (tokens_seen / settings.batch_tokens + 1) / settings.warmup_steps
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, tokens_seen / settings.tokens)))
    return min(1.0, warmup) * (0.02 + 0.98 * cosine)
