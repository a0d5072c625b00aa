"""GuideLLM, which benchmarks a server."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def benchmark(profile):
    """Run the command, and return what its report says about requests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = {
            "backend": f"kind=openai_http,target={URL},model=storyteller",
            "profile": profile,
            "constraint": "kind=max_requests,count=8",
            "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "tokenizer": "kind=huggingface_auto,model=models/storyteller",
            "output": f"kind=json,path={report}",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [sys.executable, "-m", "guidellm", "run", "--disable-console", *arguments]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(report.read_text())["benchmarks"]


def check(benchmarks):
    [each] = benchmarks
    totals = each["metrics"]["request_totals"]  # GuideLLM leaves out some at the ends
    assert 4 <= totals["successful"] == totals["total"], totals
    assert each["metrics"]["output_token_count"]["successful"]["mean"] == 16


def try_synchronous():
    check(benchmark("kind=synchronous"))


def try_concurrent():
    check(benchmark("kind=concurrent,streams=4"))
