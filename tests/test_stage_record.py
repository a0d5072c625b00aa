"""Compare all stages with a record of their answers, so that a rewrite changes no token, text or finish reason.

A greedy token may differ only where the record notes a tie of the two best logits, and at most one token in a thousand.
A sampled token may never differ.

    python -m tests.test_stage_record --write   rewrite stages_record.json.gz, if all stages agree
"""

import gzip
import importlib
import json
import os
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as in conftest.py

import pytest
import torch

from tests.helpers import MARGIN, STORYTELLER, Oracle, find_stages, margins
from tests.prompts import CANDIDATES
from tests.tiny_models import random_prompts, spread, write_tiny_model

RECORD = Path(__file__).parent / "stages_record.json.gz"
TOKENS_PER_TIE = 1000  # at most one token in 1,000 may differ in a tie
TOLERANCE = 1e-4  # of a log-probability
PROMPTS = [CANDIDATES[i] for i in (0, 1, 2, 8, 10, 13, 15, 20, 21, 24)]
SHAPES = ("gqa", "wide_heads", "llama3", "mlp_bias", "qwen2", "qwen3", "one_layer")
LENGTH = 24
WAYS: dict[str, dict[str, Any]] = {  # ways to manage memory: all of them give the same answers
    "together": {"kv_cache_tokens": len(PROMPTS) * 256},
    "in waves": {"kv_cache_tokens": 256},
    "by request": {"kv_cache_tokens": 256, "reservation": "request"},
    "blocks of four": {"kv_cache_tokens": 384, "block_size": 4},
    "chunks": {"kv_cache_tokens": 512, "max_num_batched_tokens": 12, "max_num_seqs": 6},
    "without caching": {"kv_cache_tokens": 256, "enable_prefix_caching": False},
    "computed again": {"kv_cache_tokens": 256, "offload_policy": "recompute"},
}
KINDS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 40}, {"top_p": 0.8}, {"top_k": 3}]
BAD: list[Any] = [[], "", [1] * 256, [4096], [-1]]

Answers = dict[str, dict[str, Any]]  # by request name


# The random models


def write_shape(name: str, folder: Path) -> Path:
    """Write a model of this shape, with weights that do not depend on the version of transformers."""
    model = write_tiny_model(name, folder).oracle.model
    torch.manual_seed(sum(name.encode()))
    spread(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_shape(name, tmp_path_factory.mktemp(name)) for name in SHAPES}


# A stage's answers


def make(stage: ModuleType, model: Path, **options: Any) -> Any:
    """Return an LLM of this stage that doesn't measure speeds when it starts."""
    has_policy = "offload_policy" in options_of(stage)
    policy = {"offload_policy": "load"} if has_policy else {}
    return stage.LLM(model=model, **({"dtype": "float32", "device": "cpu", "max_model_len": 256} | policy | options))


def options_of(stage: ModuleType) -> set[str]:
    return {field.name for field in fields(stage.EngineConfig)}


def has_beams(stage: ModuleType) -> bool:
    return hasattr(stage, "BeamSearchParams")


def greedy(stage: ModuleType, **params: Any) -> Any:
    return stage.SamplingParams(temperature=0.0, max_tokens=LENGTH, **params)


def named(name: str, outputs: list[Any]) -> Answers:
    return {f"{name}: {i}": as_answer(output) for i, output in enumerate(outputs)}


def as_answer(output: Any) -> dict[str, Any]:
    completions = [
        {
            "token_ids": [*each.token_ids],
            "text": each.text,
            "reason": each.finish_reason,
            "logprob": each.cumulative_logprob,
        }
        for each in output.outputs
    ]
    return {
        "prompt_token_ids": [*output.prompt_token_ids],
        "failed": output.error is not None,
        "finished": output.finished,
        "outputs": completions,
    }


def answer_stories(stage: ModuleType, way: str) -> Answers:
    prompts = PROMPTS if way == "together" else PROMPTS[:3]
    return named("greedy", make(stage, STORYTELLER, **WAYS[way]).generate(prompts, greedy(stage)))


def ways_of(stage: ModuleType) -> list[str]:
    return [way for way, options in WAYS.items() if options.keys() <= options_of(stage)]


def answer_others(stage: ModuleType, folders: dict[str, Path]) -> Answers:
    """Return the answers that are computed once: of samples, of invalid requests, and of the random models."""
    llm = make(stage, STORYTELLER, kv_cache_tokens=2048)
    params = [stage.SamplingParams(seed=i, max_tokens=LENGTH, **KINDS[i % len(KINDS)]) for i in range(6)]
    answers = named("sampled", llm.generate(PROMPTS[:6], params)) | named("failed", llm.generate(BAD, greedy(stage)))
    if "n" in {field.name for field in fields(stage.SamplingParams)}:
        several = [stage.SamplingParams(n=3, seed=i, max_tokens=12) for i in range(3)]
        answers |= named("several", llm.generate(PROMPTS[:3], several))
    if has_beams(stage):
        beams = stage.BeamSearchParams(beam_width=3, max_tokens=8)
        answers |= named("beams", llm.beam_search(PROMPTS[:2], beams))
    for name, folder in folders.items():
        prompts = random_prompts(vocab_size=131, num=6, longest=60)
        llm = make(stage, folder, max_model_len=128, kv_cache_tokens=6 * 128)
        answers |= named(f"shape {name}", llm.generate(prompts, greedy(stage, ignore_eos=True)))
    return answers


# The comparison


class Compared(NamedTuple):
    num_tokens: int
    num_excused: int


def compare(recorded: Answers, answers: Answers) -> Compared:
    """Count the compared tokens, and those that differ in a tie. Raise AssertionError for any other difference."""
    counts = [Compared(0, 0)]
    for name, answer in answers.items():
        expected = recorded[name]
        for key in ("prompt_token_ids", "failed", "finished"):
            assert answer[key] == expected[key], (name, key)
        for one, other in zip(expected["outputs"], answer["outputs"], strict=True):
            counts.append(compare_output(name, one, other))
    return Compared(*(sum(column) for column in zip(*counts, strict=True)))


def compare_output(name: str, recorded: dict[str, Any], output: dict[str, Any]) -> Compared:
    """Compare an output up to the first token that differs in a tie. The text after it may be anything."""
    expected, got = recorded["token_ids"], output["token_ids"]
    different = [i for i, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other]
    if different and different[0] in recorded["ties"]:
        return Compared(different[0] + 1, 1)
    assert got == expected, name
    for key in ("text", "reason"):
        assert output[key] == recorded[key], (name, key)
    assert abs(output["logprob"] - recorded["logprob"]) <= TOLERANCE * max(1, len(expected)), name
    return Compared(len(expected), 0)


def check(compared: Compared) -> None:
    assert compared.num_excused * TOKENS_PER_TIE <= compared.num_tokens, f"{compared.num_excused} tokens differ in ties"


@pytest.fixture(scope="session")
def recorded() -> Answers:
    return json.loads(gzip.decompress(RECORD.read_bytes()))


@pytest.mark.newest
def test_stories_match_the_record(stage, recorded):
    for way in ways_of(stage):
        check(compare(recorded, answer_stories(stage, way)))


@pytest.mark.newest
@pytest.mark.full
def test_other_answers_match_the_record(stage, folders, recorded):
    answers = answer_others(stage, folders)
    check(compare(recorded, answers))
    missing = ("greedy",) if has_beams(stage) else ("greedy", "beams")
    others = {name for name in recorded if not name.startswith(missing)}
    assert answers.keys() in (others, {name for name in others if not name.startswith("several")})


def test_tokens_may_differ_only_in_ties():
    output = {"token_ids": [5, 6, 7], "text": "a", "reason": "length", "logprob": -3.0}
    recorded = output | {"ties": [1]}
    assert compare_output("", recorded, output) == (3, 0)
    assert compare_output("", recorded, output | {"token_ids": [5, 9, 9]}) == (2, 1)
    for change in ({"token_ids": [5, 6, 9]}, {"token_ids": [5, 6]}, {"text": "b"}, {"reason": "stop"}, {"logprob": -4}):
        with pytest.raises(AssertionError):
            compare_output("", recorded, output | change)


# The record


def main() -> None:
    """Write the record of the last stage and of the branch with beams, if all other stages give the same answers."""
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    root = Path(__file__).resolve().parents[1]
    *stages, with_beams = [importlib.import_module(name) for name in (*find_stages(root), "stages.more_beams")]
    with tempfile.TemporaryDirectory() as place:
        folders = {name: write_shape(name, Path(place) / name) for name in SHAPES}
        record = answer_stories(stages[-1], "together") | answer_others(stages[-1], folders)
        record |= answer_others(with_beams, folders)
        for name, answer in record.items():
            folder = folders.get(name.partition(": ")[0].removeprefix("shape "), STORYTELLER)
            is_greedy = name.startswith(("greedy", "shape"))
            add_ties(answer, Oracle(folder) if is_greedy else None)
        for stage in (*stages, with_beams):
            check(compare(record, answer_others(stage, folders)))
            for way in ways_of(stage):
                check(compare(record, answer_stories(stage, way)))
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    RECORD.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def add_ties(answer: dict[str, Any], oracle: Oracle | None) -> None:
    """Note the positions of a greedy output at which the oracle has a tie."""
    for output in answer["outputs"]:
        output["logprob"] = round(output["logprob"], 6)
        rows = oracle and output["token_ids"] and oracle.logits(answer["prompt_token_ids"], output["token_ids"])
        output["ties"] = [] if not oracle else [i for i, margin in enumerate(margins(rows)) if margin < MARGIN]


if __name__ == "__main__":
    main()
