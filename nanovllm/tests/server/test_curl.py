"""curl, as the README has it."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_completion_and_a_stream(served):
    asked = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    post = f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d"
    whole = json.loads(curl(*post, json.dumps(asked)))
    *chunks, done = curl("-N", *post, json.dumps(asked | {"stream": True})).split("\n\n")[:-1]
    assert done == "data: [DONE]"
    texts = [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["text"]


def test_health_is_an_empty_answer(served):
    assert curl("-o", "-", "-w", "%{http_code}", f"{served.url}/health") == "200"
