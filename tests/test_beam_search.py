"""Beam search of the branch more_beams: the same beams as transformers' `generate`, token for token, in float32.

Stories of the shipped checkpoint rarely end, so some searches treat a few frequent tokens as the end of a text.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import GenerationConfig

from stages.more_beams import LLM, BeamSearchParams
from tests.helpers import STORYTELLER, Oracle, full

PROMPTS = ["Once upon a time", "He said,"]
ORACLE = Oracle(STORYTELLER)


class Search(NamedTuple):
    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    endings: tuple[str, ...] = ()  # tokens that end a text, in addition to EOS


FREQUENT = (".", ",", "▁and")
SEARCHES = [
    Search(4, 16),
    Search(2, 16, 0.0, True),
    Search(3, 16, 1.0, False, FREQUENT),
    Search(3, 16, 1.0, True, FREQUENT),
    Search(3, 12, 2.0, "never", FREQUENT),
    Search(3, 16, 0.0, False, FREQUENT),
    Search(2, 12, -1.0, "never", FREQUENT),
]


class Beams(NamedTuple):
    token_ids: list[list[int]]
    scores: list[float]


def endings_of(search: Search) -> list[int]:
    return [2, *ORACLE.tokenizer.convert_tokens_to_ids(list(search.endings))]


@cache
def expected(prompt: str, search: Search) -> Beams:
    """Return the beams of transformers, without the padding after an end of text."""
    ids, eos = ORACLE.tokenizer(prompt).input_ids, endings_of(search)
    config = GenerationConfig(
        num_beams=search.width,
        num_return_sequences=search.width,
        max_new_tokens=search.max_tokens,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = torch.tensor([ids])
    with torch.inference_mode():
        result = ORACLE.model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=config)
    outputs = [row[len(ids) :].tolist() for row in result.sequences]
    ends = [next((i + 1 for i, token in enumerate(output) if token in eos), len(output)) for output in outputs]
    return Beams([output[:end] for output, end in zip(outputs, ends, strict=True)], result.sequences_scores.tolist())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, ...], Path]:
    """Return the shipped checkpoint with each set of EOS tokens."""
    folders = {}
    for search in SEARCHES:
        if search.endings not in folders:
            folders[search.endings] = folder = tmp_path_factory.mktemp("checkpoint")
            for name in ("config.json", "model.safetensors", "tokenizer.model"):
                (folder / name).symlink_to(STORYTELLER / name)
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": endings_of(search)}))
    return folders


@cache
def llm_of(folder: Path) -> Any:
    return LLM(folder, dtype="float32", max_model_len=256, kv_cache_tokens=4096, max_num_batched_tokens=7)


CASES = [SEARCHES[i] for i in (1, 3, 6)] + [full(SEARCHES[i]) for i in (0, 2, 4, 5)]


@pytest.mark.parametrize("search", CASES, ids=str)
def test_beams_match_transformers(search, folders):
    llm = llm_of(folders[search.endings])
    width, max_tokens, length_penalty, early_stopping, _ = search
    params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty, early_stopping=early_stopping)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        beams = expected(prompt, search)
        assert [completion.token_ids for completion in output.outputs] == beams.token_ids
        scores = [each.cumulative_logprob / len(each.token_ids) ** length_penalty for each in output.outputs]
        assert scores == pytest.approx(beams.scores, rel=1e-4)
    assert llm.kv_cache_manager.num_free_blocks == llm.kv_cache_manager.num_blocks


def test_compared_beams_end_in_both_ways():
    beams = [(token_ids, search) for search in SEARCHES for p in PROMPTS for token_ids in expected(p, search).token_ids]
    num_stopped = sum(token_ids[-1] in endings_of(search) for token_ids, search in beams)
    num_long = sum(len(token_ids) == search.max_tokens for token_ids, search in beams)
    assert num_stopped > 10 and num_long > 10
