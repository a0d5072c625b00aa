"""The package: its public names, and an engine that works from any folder."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]


def test_public_names_can_be_imported():
    package = import_module("..", __package__)
    assert {"LLM", "SamplingParams", "LLMEngine", "EngineConfig", "RequestOutput"} <= {*package.__all__}
    assert all(getattr(package, name) for name in package.__all__) and {*package.__all__} <= {*dir(package)}
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        package.LMM  # noqa: B018


@pytest.mark.full
def test_engine_works_from_any_folder(checkpoint, tmp_path):
    code = (
        f"from {PACKAGE.name} import LLM, SamplingParams\n"
        f"(output,) = LLM({str(checkpoint)!r}).generate('the fox', SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "import sys\n"
        "print(len(output.outputs[0].token_ids), 'huggingface_hub' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("3 False\n", ""), "a folder needs no hub"
