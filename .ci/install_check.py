"""Install nanovllm as a user would, and run each command of both README files: `python .ci/install_check.py`.

The environment is new, in a temporary folder, and pip runs outside the repository. The commands run as shown, with
that environment's `nanovllm`. Blocks that need Docker, a GPU or other engines are skipped. The last line is "N passed,
N failed".
"""

import sys
import tempfile
from pathlib import Path

from fresh_env import ROOT, Environment

sys.path.insert(0, str(ROOT))
from tests.blocks import Session, merge_python, read_blocks

PAGES = ("README.md", "nanovllm/README.md")
EXTRAS = "serve,structured,kernels"


def main() -> int:
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="nanovllm-install-") as folder:
        environment = Environment(Path(folder, "env"))
        environment.install_torch()
        environment.pip("-c", ROOT / "constraints.txt", f"{ROOT}[{EXTRAS}]")
        for number, page in enumerate(PAGES):
            workplace = Path(folder, f"page-{number}")
            workplace.mkdir()
            with Session(workplace, str(environment.python), **environment.variables()) as session:
                for block in merge_python(block for block in read_blocks(ROOT / page) if block.runs):
                    try:
                        session.run(block)
                    except Exception as error:  # a failure or a timeout: report it and go on
                        failed += 1
                        print(f"{block}: failed\n{error}", flush=True)
                    else:
                        passed += 1
                        print(f"{block}: passed", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
