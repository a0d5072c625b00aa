"""Attention without the rest of the model: what a stage's `attend` was asked in a step, asked again."""

from typing import Any

import torch
from torch import Tensor

from stages.decode import DecodeStep


class Recorder:
    """Stands before an engine's attention until it is told to leave, and keeps what the last step asked of it."""

    def __init__(self, engine: Any) -> None:
        self.attention = engine.model_runner._attention
        self.step: Any = None
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []  # of each layer: q, k, v
        self._runner = engine.model_runner
        self._runner._attention = self

    def leave(self) -> None:
        """Stand there no longer."""
        self._runner._attention = self.attention

    def begin(self, step: Any) -> None:
        self.step, self.asked = step, []
        self.attention.begin(step)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.asked.append((q, k, v))
        return self.attention(layer, q, k, v)


class AttentionAlone:
    """A stage's attention for a batch in the middle of its decoding; a call does that part of one step."""

    def __init__(self, step: DecodeStep) -> None:
        self._recorder = Recorder(step.engine)
        step()
        self._recorder.leave()

    @torch.inference_mode()
    def __call__(self) -> None:
        recorder = self._recorder
        recorder.attention.begin(recorder.step)
        for layer, (q, k, v) in enumerate(recorder.asked):
            recorder.attention(layer, q, k, v)


def looks_back(asked: list[tuple[Tensor, Tensor, Tensor]]) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
    """What each head of each layer asks for the last of a sequence's tokens, by (layer, head).

    q [1, 1, 1, head_dim]; k, v [1, 1, num_tokens, head_dim]
    """
    looks = {}
    for layer, (q, k, v) in enumerate(asked):
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            looks[layer, head] = tuple(x[None, None] for x in (q[-1:, head], k[:, head // group], v[:, head // group]))
    return looks
