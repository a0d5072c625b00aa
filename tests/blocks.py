"""The commands of the docs: the fenced blocks of a page, and a session that runs them as a reader would.

A fence names the language. If the block can't run everywhere, it also says why:

    ```sh              runs
    ```python          runs; neighboring blocks share their names
    ```sh server       starts a server that the blocks below use
    ```sh network      doesn't run in tests, but its options are checked; REASONS lists all such words

It uses only the standard library, because .ci/install_check.py runs the same blocks in a fresh environment.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "nanovllm" / "README.md", *sorted((ROOT / "nanovllm" / "docs").glob("*.md"))]
PAGES.append(ROOT / "stages" / "GPU.md")
REASONS = {
    "docker": "needs Docker",
    "gpu": "needs an NVIDIA GPU",
    "install": "changes the environment; .ci/install_check.py runs it",
    "minutes": "takes minutes",
    "network": "downloads something",
    "peers": "needs other engines",
    "ray": "needs Ray, or a gateway; make test-ray runs the same",
}
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HERE_DOCUMENT = re.compile(r"(<<'(\w+)'.*?\n).*?^\2$", re.DOTALL | re.MULTILINE)
FOLDERS = ("models", "stages", "notebooks", ".ci", "Makefile", "pyproject.toml", "constraints.txt")  # what blocks read
SECONDS = 300  # for a block


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    word: str  # after the language: "server", one of REASONS, or ""
    code: str

    @property
    def runs(self) -> bool:
        return self.word in ("", "server")

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page}, line {self.line}"


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that a reader can run."""
    text = page.read_text(encoding="utf-8")
    blocks = [
        Block(page, text[: match.start()].count("\n") + 1, match[1], match[2] or "", match[3])
        for match in FENCE.finditer(text)
    ]
    return [block for block in blocks if block.language in ("sh", "python")]


def merge_python(blocks: Iterable[Block]) -> list[Block]:
    """Join neighboring Python blocks to one, since later ones use the names of earlier ones."""
    merged: list[Block] = []
    for block in blocks:
        if merged and block.language == merged[-1].language == "python" and block.runs and merged[-1].runs:
            merged[-1] = merged[-1]._replace(code=merged[-1].code + block.code)
        else:
            merged.append(block)
    return merged


def commands_in(code: str) -> Iterator[list[str]]:
    r"""Yield the commands of a shell block as lists of words, without redirections and texts in here-documents.

    >>> list(commands_in("echo 'a b' | nanovllm chat --n 2 > out  # quick\nmake run \\\n  STAGE=1\n"))
    [['echo', 'a b'], ['nanovllm', 'chat', '--n', '2'], ['make', 'run', 'STAGE=1']]
    """
    for line in HERE_DOCUMENT.sub(r"\1", code).replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>;&")
        lexer.whitespace_split = True
        skip = False
        for word in lexer:
            if word in ("|", ";", "&&"):
                yield words
                words = []
            elif set(word) <= {"<", ">"}:
                skip = True  # the next word is a file
            elif not skip:
                words.append(word)
            else:
                skip = False
        if words:
            yield words


def with_port(code: str, port: int) -> str:
    """Return a block's code with a port other than 8000, which another server on this machine may use.

    >>> with_port("nanovllm serve a", 81), with_port("curl http://127.0.0.1:8000/health", 81)
    ('nanovllm serve a --port 81', 'curl http://127.0.0.1:81/health')
    """
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("--port 8000", f"--port {port}")
    code = re.sub(r"^(nanovllm serve (?!.*--port).*)$", rf"\1 --port {port}", code, flags=re.MULTILINE)
    url = f"http://127.0.0.1:{port}"
    code = re.sub(r"^(nanovllm bench serve (?!.*--base-url).*)$", rf"\1 --base-url {url}", code, flags=re.MULTILINE)
    return re.sub(r"^make serve\b", f'make serve ARGS="--port {port}"', code, flags=re.MULTILINE)


class Session:
    """A shell in a folder of its own, for the blocks of one page."""

    def __init__(self, folder: Path, python: str = sys.executable, **environment: str) -> None:
        """Link the files that the docs' commands read into `folder`. Commands run in `python`'s environment."""
        for name in FOLDERS:
            (folder / name).symlink_to(ROOT / name)
        self._folder, self._python = folder, python
        self._environment = os.environ | {"MAKEFLAGS": f"PY={python}", "ARGS": "", "HF_HUB_OFFLINE": "1"} | environment
        self._server: subprocess.Popen[str] | None = None
        self._port = 0  # the server chooses one

    def run(self, block: Block) -> str:
        """Run a block and return its output. Raise AssertionError if it fails."""
        if block.word == "server":
            self._serve(block, with_port(block.code, 0))
            return ""
        code = with_port(block.code, self._port)
        if block.language == "python":
            command = [self._python, "-c", code]
        else:
            command = ["bash", "-euo", "pipefail", "-c", code]
        # DEVNULL, so that nothing waits for a terminal
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{block}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, block: Block, code: str) -> None:
        """Start a server, and wait until it is healthy."""
        self._stop()
        log = self._folder / "server.log"
        with log.open("w") as output:
            self._server = subprocess.Popen(
                ["bash", "-euc", code],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self._server.poll() is None:
            if address := re.search(r" at http://127\.0\.0\.1:(\d+)", log.read_text()):
                self._port = int(address[1])
                with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{self._port}/health", timeout=SECONDS):
                    return
            time.sleep(0.2)
        raise AssertionError(f"{block}: the server did not start\n{log.read_text()}")

    def _stop(self) -> None:
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGTERM)
            self._server.wait(SECONDS)
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
