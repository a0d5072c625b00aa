"""The commands of `python -m stages.bench`: their help, and what they import."""

import subprocess
import sys

import pytest

from nanovllm.options.config import EngineConfig
from stages.bench.__main__ import main
from stages.bench.with_transformers import PUBLISHED_MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("benchmark", "stated"),
    [
        ("published", f"default: {PUBLISHED_MAX_MODEL_LEN}, or the model's limit if lower --max-num-seqs"),
        ("race", f"default: {EngineConfig.model}, unless --shape is given --device"),
    ],
)
def test_help_of_a_benchmark_states_its_own_defaults(benchmark, stated, capsys):
    assert main([benchmark, "--help"]) == 0
    assert stated in " ".join(capsys.readouterr().out.split())


def test_help_imports_no_torch():
    code = "import sys, stages.bench.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
