"""Which stages there are, and the reference that they are compared with: transformers' LlamaForCausalLM."""

import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
STORYTELLER = ROOT / "models" / "storyteller"

# "The same tokens" is said of float32. A row of a batch differs by some 2e-6 from the same row in a batch of another
# size, and its logits by 1e-5: two logits closer than MARGIN standard deviations are a tie, which may fall either way.
MARGIN = 1e-3
MAX_LOGIT_ERROR = 1e-4  # of the largest |logit|, float32


def find_stages(root: Path) -> list[str]:
    """Module names in order: stages.s1_..., stages.s2_..."""
    numbered = {}
    for path in root.glob("stages/s*_*/__init__.py"):
        if match := re.fullmatch(r"s(\d+)_\w+", path.parent.name):
            numbered[int(match[1])] = f"stages.{match[0]}"
    return [numbered[number] for number in sorted(numbered)]


PACKAGE = "nanovllm"  # its engine is the last stage's, file by file: what tests that one need not run again


def folder_of(stage: str) -> Path:
    return ROOT.joinpath(*stage.split("."))


def has_cuda() -> bool:
    import torch  # here, so that tests that need no torch start at once

    return torch.cuda.is_available()


def full(*values: Any) -> Any:
    """A test's parameters that `make test` leaves out and `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


class Greedy(NamedTuple):
    token_ids: list[int]  # likeliest at each position
    margins: list[float]  # best logit minus second best, in standard deviations of that row's logits


class Oracle:
    """transformers' model on a checkpoint folder, loaded as any user of transformers loads it."""

    def __init__(self, folder: Path, dtype: str = "float32", device: str = "cpu") -> None:
        self.folder, self._dtype, self._device = folder, dtype, device

    @cached_property
    def model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, self._dtype))
        return model.to(self._device).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def logits(self, prompt: list[int], output: list[int]) -> Any:
        """What the model says at each place of `output`, having read all before it: float32 [len(output), vocab_size].

        One forward pass over the whole text: no cache, so no fault of a cache.
        """
        return self._logits(tuple(prompt), tuple(output))

    @lru_cache(maxsize=500)  # noqa: B019 one oracle lives as long as the session, and all stages ask it the same
    def _logits(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> Any:
        import torch

        ids = torch.tensor([prompt + output[:-1]], device=self._device)
        with torch.inference_mode():
            return self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()

    def greedy(self, prompt: list[int], max_tokens: int) -> Greedy:
        """`generate` of transformers, past any end of text."""
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config.update(output_logits=True, return_dict_in_generate=True)
        ids = torch.tensor([prompt], device=self._device)
        with torch.inference_mode():
            done = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        rows = torch.cat(done.logits).float().cpu()
        return Greedy(done.sequences[0, len(prompt) :].tolist(), margins(rows))


def margins(rows: Any) -> list[float]:
    """How clear the choice of each row of logits is, in standard deviations. rows float32 [num_rows, vocab_size]"""
    best = rows.topk(2, dim=-1).values
    return ((best[:, 0] - best[:, 1]) / rows.std(dim=-1)).tolist()


class Compared(NamedTuple):
    num_tokens: int
    num_excused: int


def compare_greedy(oracle: Oracle, prompt: list[int], output: list[int]) -> Compared:
    """Follow `output` as long as it is what the oracle takes, which reads along.

    A token that differs is excused if the oracle has it as good as tied with its own; the comparison ends there.
    Raises AssertionError at any other.
    """
    rows = oracle.logits(prompt, output)
    best, spread = rows.max(dim=-1), rows.std(dim=-1)
    for i, token in enumerate(output):
        if token != best.indices[i]:
            behind = float((best.values[i] - rows[i, token]) / spread[i])
            assert behind < MARGIN, (
                f"token {i} after a prompt of {len(prompt)} is {token}, the oracle takes {best.indices[i]}, "
                f"which is ahead by {behind:.4f} standard deviations: {MARGIN} would be a tie"
            )
            return Compared(i + 1, 1)
    return Compared(len(output), 0)
