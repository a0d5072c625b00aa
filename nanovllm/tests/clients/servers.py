"""The servers that the programs talk to: each plays an assistant that answers a question with a text from ANSWERS.

The models are tiny and random, with the tokenizer and the chat template of a family, so that a program gets calls in
that family's format. The server "storyteller" has the shipped checkpoint and no script, for programs that measure it.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..testing import scripted_model
from ..testing.scripted_model import write_scripted_checkpoint

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
STORYTELLER = ROOT / "models" / "storyteller"
SECONDS = 120.0  # for a server to start


class Call(NamedTuple):
    """A call of get_weather."""

    city: str

    def json(self, arguments: str) -> str:
        """Return the call as JSON. `arguments` is the key that a family uses for them."""
        return json.dumps({"name": "get_weather", arguments: {"city": self.city}})


THOUGHT = "<think>\nOslo is a city.\n</think>"

# The text that occurs last in a prompt, and the assistant's answer. After calls, that is the result of the last one.
ANSWERS: dict[str, str | Sequence[Call]] = {
    "Tell me about a fox.": "A fox lives in the wood.",
    "How many legs has a fox?": "<think>\nA fox is an animal with four legs.\n</think>\n\nFour.",
    "Count without a thought.": "One, two.",
    "Think, then call (auto).": f"{THOUGHT}\n\n<tool_call>{Call('Oslo').json('arguments')}</tool_call>",
    # a grammar begins right after the thought
    "Think, then call (required).": f"{THOUGHT}[{Call('Oslo').json('arguments')}]",
    "Think about it: Tom is 9 years old.": '<think>\nA name and an age.\n</think>{"name": "Tom", "age": 9}',
    "What is the weather in Paris?": [Call("Paris")],
    "18 degrees": "It is 18 degrees in Paris.",
    "Which is warmer, Oslo or Rome?": [Call("Oslo"), Call("Rome")],
    "24 degrees": "Rome is warmer.",
    # JSON that a schema describes, also as the arguments of a function that the request names
    "Jason is 25 years old.": '{"name": "Jason", "age": 25}',
    "Just the arguments, for Bern.": '{"city": "Bern"}',
    # calls that a request requires have one format, whatever the family's is
    "Call it for Lima.": f"[{Call('Lima').json('arguments')}]",
    "Mary is 47 years old.": '[{"name": "Person", "arguments": {"name": "Mary", "age": 47}}]',
    "Anna is 31 years old.": '[{"name": "final_result", "arguments": {"name": "Anna", "age": 31}}]',  # Pydantic AI's
    "Is it warm in Nice?": f"[{Call('Nice').json('arguments')}]",
    "20 degrees": '[{"name": "final_answer", "arguments": {"answer": "It is 20 degrees in Nice."}}]',  # smolagents'
    "Multiply 6 by 7.": "Thought: I can calculate that.\n<code>\nfinal_answer(6 * 7)\n</code>",
    "Is a fox a bird?": "no",
    "When was it?": "1999",
    "In brackets, please.": "(12)",
}


class Family(NamedTuple):
    """A family of models: its tokenizer, its special tokens, and its format of calls."""

    form: str  # one of testing/tokenizers.py, FORMS
    special_tokens: Sequence[str]
    calls: Callable[[Sequence[Call]], str]
    flags: Sequence[str] = ()  # of the server


def mistral_calls(calls: Sequence[Call]) -> str:
    """Return calls in both of Mistral's formats: one call in the newer one, several as a list."""
    if len(calls) == 1:
        return f"[TOOL_CALLS]get_weather[ARGS]{json.dumps({'city': calls[0].city})}"
    return f"[TOOL_CALLS] [{', '.join(call.json('arguments') for call in calls)}]"


FAMILIES = {
    "qwen3": Family(
        "qwen3", [], lambda calls: "\n".join(f"<tool_call>\n{call.json('arguments')}\n</tool_call>" for call in calls)
    ),
    "llama3": Family(
        "llama3",
        [],
        lambda calls: "; ".join(call.json("parameters") for call in calls),
        ["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"],
    ),
    "mistral": Family(
        "tekken",
        ["[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        mistral_calls,
    ),
}


def script(family: Family) -> dict[str, str]:
    """Return the script for a model of a family."""
    return {
        question: answer if isinstance(answer, str) else family.calls(answer) for question, answer in ANSWERS.items()
    }


@contextmanager
def server(name: str, folder: Path) -> Iterator[str]:
    """Run a server inside a `with` block, and yield the base URL of its API. `folder` is for its files."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "storyteller":
        command = ["nanovllm", "serve", str(STORYTELLER), "--chat-template", "plain", "--dtype", "float32"]
    else:
        family = FAMILIES[name]
        model = write_scripted_checkpoint(folder / "model", family.form, *family.special_tokens)
        (folder / "script.json").write_text(json.dumps(script(family)))
        command = [scripted_model.__name__, str(folder / "script.json"), "serve", str(model), *family.flags]
        command += ["--chat-template", str(TEMPLATES / f"{name}.jinja"), "--served-model-name", "assistant"]
        command += ["--max-model-len", "16384", "--kv-cache-tokens", "65536"]
    command = [sys.executable, "-m", *command, "--port", "0", "--offload-policy", "load"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NANOVLLM_ATTENTION_BACKEND": "torch"}
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stderr=output, cwd=ROOT)
    try:
        yield f"{address(log, process)}/v1"
    finally:
        process.terminate()
        process.wait()


def address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    """Wait for the line in which a server says where it listens. Raise RuntimeError if it ends, or takes too long."""
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        if match := re.search(r"at (http://\S+),", log.read_text()):
            return match[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")
