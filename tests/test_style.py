"""This project's own rules of style: where devices are named, and the size of measuring code.

ruff and mypy know the general ones: types, docstrings, private names, printing (make lint).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.tests.test_house import code_lines
from tests.helpers import PACKAGE, ROOT, find_branches, find_stages, folder_of

STAGES = [folder_of(name) for name in [*find_stages(ROOT), *find_branches(ROOT), PACKAGE]]
CONFIGURATION = [*(folder / "config.py" for folder in STAGES), *(folder_of(PACKAGE) / "options").glob("*.py")]
CONFIGURATION += [folder_of(PACKAGE) / "vllm_names.py"]  # vLLM's platforms and profilers
MEASURING = [*ROOT.glob("stages/bench/**/*.py"), *ROOT.glob("nanovllm/bench/**/*.py")]
MEASURING = [path for path in MEASURING if path.parent.name != "texts"]  # those programs are what is measured
MAX_MEASURING_LINES = 5_463  # of code, without comments and docstrings


def fixed_devices(tree: ast.Module) -> Iterator[str]:
    """Yield GPUs named outside comparisons, devices as defaults, and methods that move tensors to a GPU."""
    nodes = [*ast.walk(tree)]
    compared = {id(part) for node in nodes if isinstance(node, ast.Compare) for part in ast.walk(node)}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    defaults = {id(part) for function in functions for part in function.args.defaults + function.args.kw_defaults}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "half", "bfloat16"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner != "torch":
                yield f".{node.attr} in line {node.lineno}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in compared:
            is_gpu = node.value.split(":")[0] in ("cuda", "mps")
            if is_gpu or (node.value == "cpu" and id(node) in defaults):
                yield f"{node.value!r} in line {node.lineno}"


def test_only_the_configuration_names_devices():
    files = [path for folder in STAGES for path in sorted(folder.rglob("*.py")) if "tests" not in path.parts]
    assert len(files) > 200
    texts = {path.read_text(encoding="utf-8"): path.relative_to(ROOT) for path in files if path not in CONFIGURATION}
    assert [f"{path}: {each}" for text, path in texts.items() for each in fixed_devices(ast.parse(text))] == []


@pytest.mark.parametrize(
    ("code", "num_faults"),
    [
        ("if device.type == 'cuda': torch.cuda.synchronize()\nx = torch.empty(1, device='cpu')", 0),
        ("def f(device: str = 'cuda:0') -> None: ...", 1),
        ("def f(*, device: str = 'cpu') -> None: ...", 1),
        ("x.to('cuda')\nx.cuda()\nx.half()", 3),
    ],
)
def test_fixed_device_is_found(code, num_faults):
    assert len(list(fixed_devices(ast.parse(code)))) == num_faults


def test_few_tests_read_private_attributes():
    """Ruff's SLF001 finds all of them. Each one that stays has its reason behind a dash."""
    folders = [folder for folder in ROOT.rglob("tests") if not folder.relative_to(ROOT).parts[0].startswith(".")]
    files = {path for folder in folders for path in folder.rglob("*.py")} - {Path(__file__)}
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines() if "noqa: SLF001" in line]
    assert 0 < len(lines) <= 20 and [line for line in lines if "noqa: SLF001 - " not in line] == []


def test_measuring_code_stays_small():
    num_lines = sum(code_lines(path.read_text(encoding="utf-8")) for path in MEASURING)
    assert num_lines <= MAX_MEASURING_LINES, f"{num_lines} lines of code"
    assert {path.name for path in MEASURING} >= {"throughput.py", "decode_step.py", "parts.py", "worker.py"}
