"""The table of vLLM's examples is complete, and the script that makes it notes what happens."""

import socket
import subprocess
from pathlib import Path

import pytest

from . import vllm_examples
from .vllm_examples import (
    NEEDS,
    PAGE,
    Outcome,
    block,
    examples,
    is_offline_example,
    number_that_run,
    outcome_of,
    outcomes_on,
    run,
)

DOCS = PAGE.parent
OUTCOMES = outcomes_on(PAGE.read_text(encoding="utf-8"))
UNSHARE = ["unshare", "--map-root-user", "--net", "true"]
needs_namespaces = pytest.mark.skipif(
    subprocess.run(UNSHARE, capture_output=True, check=False).returncode != 0, reason="no network namespaces here"
)


def test_every_example_of_the_table_runs_or_needs_something():
    assert len({each.example for each in OUTCOMES}) == len(OUTCOMES) > 70
    for each in OUTCOMES:
        runs = each == Outcome(each.example, "runs", "")
        assert runs or (each.outcome.removeprefix("needs ") in NEEDS.values() and each.reason), each


def test_prose_has_the_numbers_of_the_table():
    assert block(OUTCOMES) in PAGE.read_text(encoding="utf-8")
    text = (DOCS / "from-vllm.md").read_text(encoding="utf-8")
    assert f"[{number_that_run(OUTCOMES)}](vllm-examples.md)" in text


def test_table_is_read_as_it_was_written():
    outcomes = [Outcome("a.py", "runs"), Outcome("b/c.py", "needs LoRA", "ImportError: a / b")]
    assert block(outcomes).startswith("1 of 2 examples run.\n")
    assert outcomes_on(f"# Title\n\n{block(outcomes)}<!-- /figures -->\n") == outcomes


@pytest.mark.parametrize(
    ("text", "is_example"),
    [
        ("from vllm import LLM, SamplingParams", True),
        ("from vllm.engine.async_llm_engine import (\n    AsyncLLMEngine,\n)", True),
        ("def f():\n    from vllm.v1.engine.async_llm import AsyncLLM", True),
        ("import vllm\nvllm.AsyncLLMEngine.from_engine_args(args)", True),
        ("from vllm.utils.serial_utils import tensor2base64  # not LLM", False),
        ("from openai import OpenAI\nmodel = 'vllm.LLM'", False),
    ],
)
def test_offline_example_takes_an_engine_from_vllm(text, is_example, tmp_path):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "script.py").write_text(text)
    assert is_offline_example(text) == is_example
    assert [*examples(tmp_path)] == ([("features/script.py", text)] if is_example else [])


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("llm = LLM(model, enable_lora=True)", "needs LoRA"),
        ("LLM(model, pipeline_parallel_size=4)", "needs several devices"),
        ("LLM(model, tensor_parallel_size=4)", "fails"),
        ("outputs = llm.score(query, documents)", "needs pooling other than embeddings"),
        ("outputs = llm.embed(prompts)", "fails"),
    ],
)
def test_example_that_fails_needs_what_its_text_says(text, outcome):
    assert outcome_of(text) == outcome


@needs_namespaces
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\nassert sorted(os.listdir()) == ['a.py', 'models']", ("runs", "")),
        ("model = 'org/name'\nassert model.endswith('/storyteller')", ("runs", "")),
        ("raise ValueError('a | b')", ("fails", "ValueError: a / b")),
        ("import vllm.lora", ("fails", "ModuleNotFoundError: No module named 'nanovllm.lora'")),
        ("raise SystemExit(3)  # LoRARequest", ("needs LoRA", "exit status 3")),
        (
            "import warnings\nwarnings.warn('1 of 4 requests were not served: request 0: too long')",
            ("fails", "1 of 4 requests were not served: request 0: too long"),
        ),
    ],
)
def test_outcome_of_a_script(text, expected):
    assert run("folder/a.py", text, Path("/checkpoints/storyteller")) == Outcome("folder/a.py", *expected)


@needs_namespaces
def test_script_that_takes_too_long_is_killed(monkeypatch):
    monkeypatch.setattr(vllm_examples, "TIME_LIMIT", 0.5)
    outcome = run("a.py", "import time\ntime.sleep(60)", Path("/checkpoints/storyteller"))
    assert outcome == Outcome("a.py", "fails", "it runs for more than 0.5 seconds")


@needs_namespaces
def test_script_has_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=1)"
        outcome = run("a.py", text, Path("/checkpoints/storyteller"))
    assert outcome.outcome == "fails" and outcome.reason.startswith("ConnectionRefusedError: ")
