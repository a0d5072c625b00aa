"""A server of this engine in a process of its own, for a benchmark beside the engine itself."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .http_stream import Target

ADDRESS = re.compile(r"serving .* at (http://[^\s,]+),")
LAST_ANSWERS = 30.0  # seconds to end in order


@contextmanager
def own_server(engine: Mapping[str, Any]) -> Iterator[Target]:
    """`nanovllm serve` with these knobs, at a free port. Raises ValueError with its error if it does not start."""
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *flags_of(engine)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = []
        for line in server.stderr:
            if found := ADDRESS.search(line):
                yield Target.of(found[1])
                return
            said.append(line.strip())
        raise ValueError(f"the server did not start: {' '.join(said)}")
    finally:
        server.terminate()
        try:
            server.communicate(timeout=LAST_ANSWERS)
        except subprocess.TimeoutExpired:
            server.kill()


def flags_of(engine: Mapping[str, Any]) -> list[str]:
    """
    >>> flags_of({"block_size": 4, "enforce_eager": True, "enable_prefix_caching": False, "seed": None})
    ['--block-size=4', '--enforce-eager', '--no-enable-prefix-caching']
    """
    flags = []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags
