"""Trainer: updates of the storyteller, with its schedule, its optimizers and its state on disk.

It trains stage 1's llama/model.py unchanged. For inference, `attend` looks up keys in a cache. Here it is causal
attention over the rows of a batch, and that is the only difference.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig
from stages.s1_contiguous_cache.llama.model import LlamaDecoderLayer

SHAPE = ModelConfig(  # models/storyteller
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
    """The settings of a run. The first `short_share` of the tokens come in short rows, which are cheaper."""

    tokens: int = 22_000_000
    batch_tokens: int = 8192
    short_row: int = 256
    short_share: float = 0.5
    learning_rate: float = 3e-3  # AdamW's
    matrix_learning_rate: float = 2e-2  # Muon's
    weight_decay: float = 0.1
    warmup_steps: int = 100
    dropout: float = 0.1
    clip: float = 1.0
    seed: int = 0
    optimizer: str = "muon"  # or "adamw", for everything


class CurvePoint(NamedTuple):
    """A point of the loss curve, in nats per token."""

    tokens: int
    train: float  # mean since the previous point
    held_out: float


class Best(NamedTuple):
    """The weights at the point with the lowest held-out loss. The checkpoint gets these."""

    point: CurvePoint
    weights: dict[str, Tensor]  # a copy of the model's state_dict


class CausalAttend:
    """The `attend` of training, for rows of equal length end to end. A token sees its own row, up to itself."""

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention, of the same shape as q.

        q [num_rows * row_length, num_heads, head_dim]; k, v [num_rows * row_length, num_kv_heads, head_dim]
        """
        group = q.shape[1] // k.shape[1]
        # Under autocast, v is bfloat16, but q and k are float32 after the rotation.
        q, k, v = (x.to(v.dtype).unflatten(0, (-1, self.row_length)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))  # [num_rows, num_heads, row_length, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)


def mean_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of next tokens, in nats per token. batch int64 [num_rows, row_length + 1]."""
    inputs, targets = batch[:, :-1].flatten(), batch[:, 1:].flatten()  # [num_tokens]
    row_length = batch.shape[1] - 1
    positions = torch.arange(row_length, device=batch.device).repeat(batch.shape[0])
    hidden = model(inputs, positions, CausalAttend(row_length))  # [num_tokens, hidden_size]
    return F.cross_entropy(model.compute_logits(hidden).float(), targets)


class Trainer:
    """The state of a run: model, optimizers, position in the schedule, the loss curve and its lowest point."""

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
        """Update the model once. Return the loss before the update."""
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
        """Return the mean loss of held-out rows, in nats per token, without dropout."""
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = [self.loss(batch.to(self.device)).item() for batch in batches]
        self.model.train()
        return sum(losses) / len(losses)

    def record(self, train: float, held_out: float) -> None:
        """Add a point to the curve, and copy the weights if its held-out loss is the lowest so far."""
        point = CurvePoint(self.tokens_seen, train, held_out)
        self.curve.append(point)
        if self.best is None or held_out < self.best.point.held_out:
            weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
            self.best = Best(point, weights)

    def save(self, path: Path) -> None:
        """Write the whole state. A crash while saving leaves the previous file intact."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "settings": asdict(self.settings),
            "tokens_seen": self.tokens_seen,
            "curve": [tuple(point) for point in self.curve],
            "best": None if self.best is None else (tuple(self.best.point), self.best.weights),
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def resume(self, path: Path) -> None:
        """Continue from a saved state. The number of tokens may differ, and sets a new end.

        Raise ValueError if the state comes from another optimizer.
        """
        state = torch.load(path, map_location=self.device)
        saved, given = state["settings"]["optimizer"], self.settings.optimizer
        if saved != given:
            raise ValueError(f"--optimizer must be {saved} to resume {path}, got {given}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.tokens_seen, self.curve = state["tokens_seen"], [CurvePoint(*point) for point in state["curve"]]
        if state["best"] is not None:  # None before the first evaluation
            point, weights = state["best"]
            self.best = Best(CurvePoint(*point), weights)


def init_weights(model: LlamaForCausalLM) -> None:
    """Draw small normal weights, scaled down by depth where they add to the residual stream (as in GPT-2)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * model.config.num_hidden_layers) if into_stream else 0.02
            nn.init.normal_(parameter, std=std)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Add dropout to each layer's two outputs through hooks, because the model itself has none."""
    if rate == 0.0:
        return
    for layer in model.model.layers:
        assert isinstance(layer, LlamaDecoderLayer), layer
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, _, out: drop(out, rate) if module.training else out)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def drop(x: Tensor, rate: float) -> Tensor:
    """Return x after dropout with one random byte per element. F.dropout draws more, which is slow on a CPU.

    The rate is rounded to a multiple of 1/256, and kept elements grow so that the mean stays the same.
    """
    threshold = round(256 * rate)
    kept = torch.empty(x.shape, dtype=torch.uint8, device=x.device).random_() >= threshold
    return x * (kept * (256 / (256 - threshold))).to(x.dtype)


def make_optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al. 2024) for the matrices inside layers and AdamW for the rest, or AdamW for all."""
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
    """Return the factor on the peak learning rate: a linear warm-up, then a cosine decay to 2%.

    >>> [round(schedule(n, Settings(tokens=1000, batch_tokens=1, warmup_steps=10)), 2) for n in (0, 9, 500, 1000)]
    [0.1, 1.0, 0.51, 0.02]
    """
    warmup = (tokens_seen / settings.batch_tokens + 1) / settings.warmup_steps
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, tokens_seen / settings.tokens)))
    return min(1.0, warmup) * (0.02 + 0.98 * cosine)
