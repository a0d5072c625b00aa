"""The stages, and the oracle that they are compared with: transformers' LlamaForCausalLM."""

import os
import re
import tomllib
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
STORYTELLER = ROOT / "models" / "storyteller"

# "The same tokens" means float32. A row of a batch differs by about 2e-6 from the same row in a batch of another size,
# and its logits by 1e-5. Two logits closer than MARGIN standard deviations are a tie, and either token may win.
MARGIN = 1e-3
MAX_LOGIT_ERROR = 1e-4  # of the largest |logit|, float32


def find_stages(root: Path) -> list[str]:
    """Return the module names in order: stages.s1_..., stages.s2_...

    $NANOVLLM_STAGE names a package that takes the place of the stage of its number: exercises.s6 is tested as stage 6.
    """
    numbered = {}
    for path in root.glob("stages/s*_*/__init__.py"):
        if match := re.fullmatch(r"s(\d+)_\w+", path.parent.name):
            numbered[int(match[1])] = f"stages.{match[0]}"
    if own := os.environ.get("NANOVLLM_STAGE"):
        numbered[int(own.rpartition(".s")[2].partition("_")[0])] = own
    return [numbered[number] for number in sorted(numbered)]


def find_branches(root: Path) -> list[str]:
    """Return the module names of the branches: stages.more_..."""
    return sorted(f"stages.{path.parent.name}" for path in root.glob("stages/more_*/__init__.py"))


def find_bases(root: Path) -> dict[str, str]:
    """Return the stage that each branch is a copy of: stages.more_... -> stages.s7_..."""
    stages = {name.rpartition(".")[2].partition("_")[0]: name for name in find_stages(root)}
    tables = tomllib.loads((root / "stages" / "chain.toml").read_text("utf-8")) if find_branches(root) else {}
    return {branch: stages[tables[branch.rpartition(".")[2]]["after"]] for branch in find_branches(root)}


PACKAGE = "nanovllm"  # its engine is based on the last stage's, so some tests run only once for both


def folder_of(stage: str) -> Path:
    return ROOT.joinpath(*stage.split("."))


def has_cuda() -> bool:
    import torch  # imported here, so that tests without torch start fast

    return torch.cuda.is_available()


def full(*values: Any) -> Any:
    """Mark a test's parameters for `make test-all` only."""
    return pytest.param(*values, marks=pytest.mark.full)


def nightly(*values: Any) -> Any:
    """Mark a test's parameters for `make test-all` and .ci/nightly, but not for .ci/run."""
    return pytest.param(*values, marks=pytest.mark.nightly)


class Greedy(NamedTuple):
    token_ids: list[int]  # the likeliest token at each position
    margins: list[float]  # the best logit minus the second best, in standard deviations of the row's logits


class Oracle:
    """The model of transformers for a checkpoint folder."""

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
        """Return the logits for each token of `output`, float32 [len(output), vocab_size].

        One forward pass over the whole text needs no cache.
        """
        return self._logits(tuple(prompt), tuple(output))

    @lru_cache(maxsize=500)  # noqa: B019 the oracle lives as long as the session, and all stages ask the same
    def _logits(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> Any:
        import torch

        ids = torch.tensor([prompt + output[:-1]], device=self._device)
        with torch.inference_mode():
            return self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()

    def greedy(self, prompt: list[int], max_tokens: int, guess: list[int] | None = None) -> Greedy:
        """Generate with transformers, ignoring EOS.

        A guess is the answer if each of its tokens is the likeliest one, which takes one forward pass in all to see.
        """
        if guess and len(guess) == max_tokens:
            rows = self.logits(prompt, guess)
            if rows.argmax(dim=-1).tolist() == guess:
                return Greedy(guess, margins(rows))
        return self._greedy(tuple(prompt), max_tokens)

    @lru_cache(maxsize=500)  # noqa: B019 as above
    def _greedy(self, prompt: tuple[int, ...], max_tokens: int) -> Greedy:
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config.update(output_logits=True, return_dict_in_generate=True)
        ids = torch.tensor([list(prompt)], device=self._device)
        with torch.inference_mode():
            done = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        rows = torch.cat(done.logits).float().cpu()
        return Greedy(done.sequences[0, len(prompt) :].tolist(), margins(rows))


def margins(rows: Any) -> list[float]:
    """Return the lead of each row's best logit in standard deviations. rows float32 [num_rows, vocab_size]."""
    best = rows.topk(2, dim=-1).values
    return ((best[:, 0] - best[:, 1]) / rows.std(dim=-1)).tolist()


class Compared(NamedTuple):
    num_tokens: int
    num_excused: int


def compare_greedy(oracle: Oracle, prompt: list[int], output: list[int]) -> Compared:
    """Compare `output` with the tokens that the oracle chooses after the same text.

    A different token is excused if the oracle has a tie there, which ends the comparison. Raise AssertionError for any
    other difference.
    """
    rows = oracle.logits(prompt, output)
    best, spread = rows.max(dim=-1), rows.std(dim=-1)
    for i, token in enumerate(output):
        if token != best.indices[i]:
            margin = float((best.values[i] - rows[i, token]) / spread[i])
            assert margin < MARGIN, (
                f"token {i} after a prompt of {len(prompt)} is {token}, but the oracle's is {best.indices[i]}, "
                f"ahead by {margin:.4f} standard deviations; a tie is less than {MARGIN}"
            )
            return Compared(i + 1, 1)
    return Compared(len(output), 0)
