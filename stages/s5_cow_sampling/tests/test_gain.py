"""The gain of this stage: n samples of a prompt cost one prompt, in the pool and in the model."""

from importlib import import_module
from typing import Any

import pytest

from ..llm import LLM
from ..observer import Observer
from ..sampling import SamplingParams
from . import gain
from .gain import BLOCK_SIZE, N
from .helpers import CONFIG, write_checkpoint


class Tables(Observer):
    """The block tables of the step in which the prompt is forked."""

    def tell(self, kind: str, *details: Any) -> None:
        if kind == "schedule" and len(details[0].batch) == N and not hasattr(self, "tables"):
            self.tables = [list(seq.block_table) for seq, _ in details[0].batch]


@pytest.mark.parametrize("num_tokens, num_full, num_copies", [(200, 12, N - 1), (208, 12, N - 1), (209, 13, 0)])
def test_samples_share_the_full_blocks_of_a_prompt_and_copy_only_a_partial_one(
    tmp_path, num_tokens, num_full, num_copies
):
    """All samples but one copy the last block of the prompt. Token 209 begins a block, so there is nothing to copy."""
    write_checkpoint(tmp_path, CONFIG | {"max_position_embeddings": 256})
    llm = LLM(tmp_path, observer := Tables(), block_size=BLOCK_SIZE, kv_cache_tokens=200 * BLOCK_SIZE)
    prompt = [i % 319 + 1 for i in range(num_tokens)]
    llm.generate(prompt, SamplingParams(n=N, seed=0, max_tokens=5, ignore_eos=True))
    assert {tuple(table[:num_full]) for table in observer.tables} == {tuple(observer.tables[0][:num_full])}
    assert len({table[num_full] for table in observer.tables}) == N
    assert llm.kv_cache.num_blocks_copied == num_copies
    assert llm.model_runner.num_tokens == num_tokens - 1 + N * 5


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "blocks held at once": 12 + N,
        "tokens through the model": 199 + N * 5,
    }
