"""An engine in a process of its own, with an interpreter that the user names: workers/worker.py has the protocol."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

from .answers import Answer
from .workload import Task

MODULES = {
    "vllm": "serve_vllm",
    "llama.cpp": "serve_llama_cpp",
    "transformers": "serve_transformers",
    "transformers-batch": "serve_transformers_batch",
}
WORKER = Path(__file__).with_name("workers") / "worker.py"
NEEDS_FILE = ("llama.cpp",)


class PeerSpec(NamedTuple):
    name: str
    python: str
    file: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises ValueError for what is no peer.

        >>> PeerSpec.of("llama.cpp=/opt/llama/bin/python,model.gguf")
        PeerSpec(name='llama.cpp', python='/opt/llama/bin/python', file='model.gguf')
        """
        name, _, rest = text.partition("=")
        python, _, file = rest.partition(",")
        if name not in MODULES or not python:
            raise ValueError(f"--peer {text}: give one of {', '.join(MODULES)} as NAME=PYTHON or NAME=PYTHON,FILE")
        if (name in NEEDS_FILE) != bool(file):
            need = "needs its weights, as NAME=PYTHON,FILE.gguf" if name in NEEDS_FILE else "takes no file"
            raise ValueError(f"--peer {text}: {name} {need}")
        return cls(name, python, file)


def peer_specs(texts: tuple[str, ...], with_transformers: bool) -> list[PeerSpec]:
    """transformers is taken from this environment, if it is here and no other was named."""
    specs = [PeerSpec.of(text) for text in texts]
    names = [spec.name for spec in specs]
    if len({*names}) < len(names):
        raise ValueError(f"--peer names an engine twice: {', '.join(names)}")
    if with_transformers and "transformers" not in names and find_spec("transformers") is not None:
        specs.append(PeerSpec("transformers", sys.executable))
    return specs


class PeerProcess:
    """It waits in a read while others are measured. Whatever goes wrong with it raises ValueError with its name."""

    def __init__(self, spec: PeerSpec, settings: dict[str, Any]) -> None:
        self.name = spec.name
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # end() closes it
        command = [spec.python, str(WORKER), MODULES[spec.name], json.dumps(settings | {"file": spec.file})]
        pipe = subprocess.PIPE
        environment = os.environ | {"OMP_NUM_THREADS": str(settings["threads"])}
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, env=environment
            )
        except OSError as error:
            raise ValueError(f"{self.name}: {spec.python!r} cannot be run: {error.strerror}") from None
        try:
            self.version = str(self._read("version")["version"])
        except BaseException:
            self.end()
            raise

    def serve(self, tasks: list[Task], may_be_cut: bool = False) -> Answer:
        job = {"prompts": [task.prompt for task in tasks], "lengths": [task.num_tokens for task in tasks]}
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died: reading tells how
        answer = Answer(**self._read("tokens", "times", "idle_cpu_seconds"))
        if fault := answer.fault(tasks, may_be_cut):
            raise ValueError(f"{self.name} answered {fault}")
        return answer

    def _read(self, *names: str) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name} ended with exit status {self._process.wait()}: {self._last_words()}")
        try:
            values = json.loads(line)
            error = values.get("error")
            found = {name: values[name] for name in names} if error is None else {}
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f"{self.name} answered {line.strip()[:80]!r}, no JSON with {', '.join(names)}") from None
        if error is not None:
            raise ValueError(f"{self.name}: {error}")
        return found

    def _last_words(self) -> str:
        """The last line on its standard error."""
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return lines[-1][:200] if lines else "it said nothing"

    def end(self) -> None:
        """Its standard input ends: so does it. If it does not soon, it is killed."""
        try:
            self._process.communicate(timeout=5)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
            self._process.wait()
        self._said.close()
