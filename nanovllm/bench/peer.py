"""Another engine in a process of its own, run by an interpreter that has it. workers/worker.py has the protocol."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ..llm import LLM
from .engine import Run
from .workers.worker import Settings
from .workload import Task

LOADERS = {  # a module of workers/, and its function
    "vllm": "serve_vllm:load",
    "llama.cpp": "serve_llama_cpp:load",
    "transformers": "serve_transformers:load",
    "transformers-batch": "serve_transformers:load_batch",
}
WORKER = Path(__file__).with_name("workers") / "worker.py"
NEEDS_FILE = ("llama.cpp",)
LENGTHS = 512  # max_model_len is rounded up to a multiple of it: vLLM compiles for a minute for each new length


class PeerSpec(NamedTuple):
    """An engine, and the interpreter that runs it."""

    name: str
    python: str
    file: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a --peer option. Raise ValueError for an invalid one.

        >>> PeerSpec.of("llama.cpp=/opt/llama/bin/python,model.gguf")
        PeerSpec(name='llama.cpp', python='/opt/llama/bin/python', file='model.gguf')
        """
        name, _, rest = text.partition("=")
        python, _, file = rest.partition(",")
        if name not in LOADERS or not python:
            raise ValueError(f"--peer must be NAME=PYTHON or NAME=PYTHON,FILE for {', '.join(LOADERS)}, got {text!r}")
        if (name in NEEDS_FILE) != bool(file):
            need = "needs its weights, as NAME=PYTHON,FILE.gguf" if name in NEEDS_FILE else "takes no file"
            raise ValueError(f"--peer {text}: {name} {need}")
        return cls(name, python, file)


TRANSFORMERS = PeerSpec("transformers", sys.executable)  # of this environment


def peer_specs(texts: Sequence[str], with_transformers: bool) -> list[PeerSpec]:
    """Return the peers that --peer names, and transformers if it is installed here and not named."""
    specs = [PeerSpec.of(text) for text in texts]
    names = [spec.name for spec in specs]
    if len({*names}) < len(names):
        raise ValueError(f"--peer names an engine twice: {', '.join(names)}")
    if with_transformers and "transformers" not in names and find_spec("transformers") is not None:
        specs.append(TRANSFORMERS)
    return specs


def peer_settings(llm: LLM, tasks: Sequence[Task], **more: Any) -> Settings:
    """Return a peer's settings for the same weights, with room for the tasks."""
    longest = max(task.num_tokens for task in tasks)
    longest = min(-(-longest // LENGTHS) * LENGTHS, llm.max_model_len)
    seats = min(llm.config.max_num_seqs, len(tasks))
    return Settings(
        model=str(llm.config.model),
        load_format=llm.config.load_format,
        dtype=str(llm.llm_engine.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        max_model_len=longest,
        max_num_seqs=seats,
        kv_cache_bytes=seats * longest * llm.llm_engine.kv_cache.bytes_per_token,
        device=str(llm.llm_engine.device),
        **more,
    )


class PeerProcess:
    """A peer's process. It waits for input while others are measured. All errors are ValueErrors that name the peer."""

    def __init__(self, spec: PeerSpec, settings: Settings) -> None:
        """Start the process, and wait until its engine is loaded."""
        self.name = spec.name
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # close() closes it
        given = json.dumps(settings._replace(file=spec.file)._asdict())
        try:
            self._process = subprocess.Popen(
                [spec.python, str(WORKER), LOADERS[spec.name], given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(settings.threads)},
            )
        except OSError as error:
            raise ValueError(f"{self.name}: cannot run {spec.python!r}: {error.strerror}") from None
        try:
            self.version = str(self._read("version")["version"])
        except BaseException:
            self.close()
            raise

    def serve(self, tasks: Sequence[Task], may_be_cut: bool = False) -> Run:
        """Serve all tasks together. Raise ValueError if the peer fails or returns the wrong number of tokens."""
        job = {"prompts": [task.prompt for task in tasks], "lengths": [task.num_output_tokens for task in tasks]}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process has died; the read below reports why
        run = Run(**self._read("tokens", "times", "idle_cpu_seconds"))
        if fault := run.fault(tasks, may_be_cut):
            raise ValueError(f"{self.name} returned {fault}")
        return run

    def _read(self, *names: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name} ended with exit status {self._process.wait()}: {self._last_line()}")
        try:
            values = json.loads(line)
            error = values.get("error")
            result = {name: values[name] for name in names} if error is None else {}
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f"{self.name} printed {line.strip()[:80]!r}, not JSON with {', '.join(names)}") from None
        if error is not None:
            raise ValueError(f"{self.name}: {error}")
        return result

    def _last_line(self) -> str:
        """Return the last line on its standard error."""
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return lines[-1][:200] if lines else "no output"

    def close(self) -> None:
        """End the process by closing its input, and kill it if it doesn't exit soon."""
        try:
            self._process.communicate(timeout=5)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
            self._process.wait()
        self._stderr.close()
