"""Scripts written for vLLM run here with two changes: `nanovllm` for `vllm`, and the model's name."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from ..tiers.cost_model import CostModel
from .vllm_examples import STORYTELLER, renamed, with_model

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.skipif(not STORYTELLER.exists(), reason="the shipped checkpoint is missing")
MODELS = ("facebook/opt-125m", "meta-llama/Llama-3.2-1B-Instruct")
ARGUMENTS = {
    "engine_loop": ["--enforce-eager", "--block-size", "8"],
    "engine_args_cli": ["--max-tokens", "8", "--temperature", "0", "--max-model-len", "1k"],
}
OUTPUTS = {  # patterns in the output of each script, in order
    "basic": [
        r"""Prompt: +'Hello, my name is'\nOutput: +['"].+['"]""",
        r"""Prompt: +'The future of AI is'\nOutput: +['"].+['"]""",
    ],
    "chat": [
        r"Prompt: 'System: You are a helpful assistant\\nUser: Hello\\n.*Assistant:'\n\nGenerated text: ['\"].+['\"]"
    ]
    * 4,
    "engine_loop": [r"\n2 \[['\"].+['\"], ['\"].+['\"]\]"],
    "async_streaming": [r"(.+ -> ?['\"].+['\"] in (\d|1\d|20) pieces\n){3}"],
    "beam_search": [*[r"\d+ tokens, -\d\.\d\d a token: ['\"]Hello, my name is .+\n"] * 3, *[r"11 tokens, -"] * 3],
    "samples_and_logprobs": [r"0 .+ length -\d+\.\d+\n", r"\(rank 1, -\d\.\d\d\), not \['.+\]", "\n2 ", r"\nNone\n\{'"],
    "prefix_caching": [r"are the same: True\n", r"cached tokens: \[\d\d+, \d\d+, \d\d+\]\n", r"cache was reset: True"],
    "stop_strings": [r"[^.]+ stop \.\n", r"\.['\"] stop \.\n", r" stop \d+\n", r" length None\n"],
    "seeds": ["equal texts: True\n", "different texts: True\n"],
    "token_ids": ["7 outputs, 1 text: .+\nTrue\n"],
    "metrics": [r"vllm:num_requests_running \(gauge\) = 0", r"vllm:generation_tokens \(counter\) = \d+", r"\+Inf = 3"],
    "engine_args_cli": [r"Prompt: 'Hello, my name is'\nGenerated text: .+\n", "Prompt: 'The future of AI is'\n"],
}


def test_every_script_runs():
    assert {path.stem for path in SCRIPTS.glob("*.py")} - {"conftest"} == {*OUTPUTS} and len(OUTPUTS) >= 12


def changed(script: str) -> str:
    """Return the script with the changes that a user makes: `nanovllm` for `vllm`, and the model's name."""
    return with_model(renamed(script), STORYTELLER)


@pytest.mark.full
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.filterwarnings("ignore:gpu_memory_utilization")
def test_script_runs(name, monkeypatch, tmp_path, capsys):
    measured = CostModel(load_bytes_per_second=1e9, store_bytes_per_second=1e9, tokens_per_second=1000.0)
    monkeypatch.setattr(f"{__package__.removesuffix('.tests')}.build.measure", lambda *engine: measured)
    script = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(changed(script), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(".*".join(OUTPUTS[name]), out, flags=re.DOTALL), out


@pytest.mark.parametrize("name", OUTPUTS)
def test_only_the_import_and_the_models_name_change(name):
    script = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    lines = zip(script.splitlines(), changed(script).splitlines(), strict=True)
    for before, after in lines:
        if before != after:
            assert before.startswith("from vllm") or any(model in before for model in MODELS)
    assert not re.search(r"\bvllm\b(?!:)", changed(script)) and not any(model in changed(script) for model in MODELS)
