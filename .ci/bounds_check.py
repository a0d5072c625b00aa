"""Install the oldest versions that pyproject.toml allows, and use them: `python3.11 .ci/bounds_check.py`.

Every lower bound of the core and of the extras serve, structured and kernels is pinned, except torch's, which has the
version of constraints.txt. The other pins don't count here. In that environment, every module of the package is
imported, a story is generated, and requests are served. The last line is "N passed, N failed".
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fresh_env import ROOT, Environment, torch_pin

sys.path.insert(0, str(ROOT))
from tests.blocks import Block, Session

EXTRAS = ("serve", "structured", "kernels")
IMPORTS = """
import importlib, pkgutil, re, nanovllm
for module in pkgutil.walk_packages(nanovllm.__path__, "nanovllm."):
    if not re.search(r"\\.(tests|bench|gpu|__main__)\\b", module.name):
        importlib.import_module(module.name)
"""
CHECKS = (
    ("python", "", IMPORTS),
    ("sh", "", "nanovllm generate 'Once upon a time' --max-tokens 16"),
    (
        "python",
        "",
        "from nanovllm import LLM, SamplingParams, StructuredOutputsParams\n"
        "llm = LLM('models/storyteller', kv_cache_tokens=1024, max_model_len=512)\n"
        "params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=['fox', 'wolf']))\n"
        "(output,) = llm.generate('The', params)\n"
        "assert output.outputs[0].text in ('fox', 'wolf'), output\n",
    ),
    ("sh", "server", "nanovllm serve models/storyteller --chat-template plain"),
    (
        "sh",
        "",
        "curl -sf http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' "
        """-d '{"prompt": "Once upon a time", "max_tokens": 8}'""",
    ),
    ("sh", "", "curl -sf http://127.0.0.1:8000/metrics"),
)


def lower_bounds() -> Iterator[str]:
    """Yield a pin for each lower bound, such as "click==8.1"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for requirement in project["dependencies"] + [each for name in EXTRAS for each in extras[name]]:
        match = re.match(r"([\w-]+)>=([\w.]+)", requirement)
        assert match is not None, f"{requirement} has no lower bound"
        if match[1] != "torch":
            yield f"{match[1]}=={match[2]}"


def main() -> int:
    passed = failed = 0
    pins = list(lower_bounds())
    with tempfile.TemporaryDirectory(prefix="nanovllm-bounds-") as folder:
        environment = Environment(Path(folder, "env"))
        environment.install_torch()
        print("installing", *pins, flush=True)
        try:
            environment.pip(f"torch=={torch_pin()}", *pins, ROOT)
        except subprocess.CalledProcessError:
            print("the lower bounds cannot be installed together\n0 passed, 1 failed")
            return 1
        workplace = Path(folder, "work")
        workplace.mkdir()
        with Session(workplace, str(environment.python), **environment.variables()) as session:
            for number, check in enumerate(CHECKS, start=1):
                language, word, code = check
                try:
                    session.run(Block(Path("check"), number, language, word, code + "\n"))
                except Exception as error:  # a failure or a timeout: report it and go on
                    failed += 1
                    print(f"{code.strip()}: failed\n{error}", flush=True)
                else:
                    passed += 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
