"""Rules of style that a test can check: types, private names, printing, devices, and the size of measuring code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.tests.test_house import code_lines
from tests.helpers import PACKAGE, ROOT, find_stages, folder_of

STAGES = [folder_of(name) for name in [*find_stages(ROOT), PACKAGE]]
STAGE_FILES = [path for folder in STAGES for path in sorted(folder.rglob("*.py"))]
TYPED_FILES = sorted({*STAGE_FILES, *ROOT.glob("stages/**/*.py"), *ROOT.glob("models/**/*.py")})


def without_tests(paths: list[Path]) -> list[Path]:
    return [path for path in paths if "tests" not in path.relative_to(ROOT).parts]


def each(paths: list[Path]) -> pytest.MarkDecorator:
    paths = without_tests(paths)
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def is_kernel(function: Function) -> bool:
    """Return True for Triton's kernels, whose arguments have their shapes in comments instead of types."""
    return any(isinstance(node, ast.Attribute) and node.attr == "jit" for node in heads_of(function.decorator_list))


def heads_of(decorators: list[ast.expr]) -> list[ast.expr]:
    return [node.func if isinstance(node, ast.Call) else node for node in decorators]


# The rules: each one yields faults


def untyped(tree: ast.Module) -> Iterator[str]:
    methods = {id(node) for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in owner.body}
    for function in functions(tree):
        if is_kernel(function):
            continue
        spec = function.args
        arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
        is_static = any(isinstance(name, ast.Name) and name.id == "staticmethod" for name in function.decorator_list)
        if id(function) in methods and not is_static:
            arguments = arguments[1:]  # self
        bare = [argument.arg for argument in arguments if argument.annotation is None]
        if function.returns is None:
            bare.append("its result")
        if bare:
            yield f"{function.name}:{function.lineno}: no type for {', '.join(bare)}"


def private_reads(tree: ast.Module) -> Iterator[str]:
    """Yield reads of private attributes of anything but self and cls. NamedTuple's methods are public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own and node.attr not in ("_replace", "_asdict", "_fields"):
                yield f"{ast.unparse(node)} in line {node.lineno}"


def prints(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"print in line {node.lineno}"


def fixed_devices(tree: ast.Module) -> Iterator[str]:
    """Yield GPUs named outside comparisons, devices as defaults, and methods that move tensors to a GPU."""
    compared = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    defaults = {id(part) for function in functions(tree) for part in function.args.defaults + function.args.kw_defaults}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "half", "bfloat16"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner != "torch":
                yield f".{node.attr} in line {node.lineno}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in compared:
            is_gpu = node.value.split(":")[0] in ("cuda", "mps")
            if is_gpu or (node.value == "cpu" and id(node) in defaults):
                yield f"{node.value!r} in line {node.lineno}"


@each(TYPED_FILES)
def test_every_signature_has_types(path):
    assert list(untyped(tree_of(path))) == []


@each([path for path in TYPED_FILES if PACKAGE not in path.relative_to(ROOT).parts])
def test_no_private_attributes_of_others_are_read(path):
    assert [read for read in private_reads(tree_of(path)) if not read.startswith("os._exit ")] == []


@each(STAGE_FILES)
def test_every_module_has_a_docstring(path):
    assert ast.get_docstring(tree_of(path))


MAY_PRINT = ("__main__.py", "print_utils.py")  # commands, and vLLM's function that prints


@each([path for path in STAGE_FILES if path.name not in MAY_PRINT and path.parent.name != "cli"])
def test_only_the_command_line_prints(path):
    assert list(prints(tree_of(path))) == []


MEASURING = [*ROOT.glob("stages/bench/**/*.py"), *ROOT.glob("nanovllm/bench/**/*.py")]
MAX_MEASURING_LINES = 4_600  # of code, without comments and docstrings


def test_measuring_code_stays_small():
    num_lines = sum(code_lines(path.read_text(encoding="utf-8")) for path in MEASURING)
    assert num_lines <= MAX_MEASURING_LINES, f"{num_lines} lines of code"
    assert {path.name for path in MEASURING} >= {"throughput.py", "decode_step.py", "parts.py", "worker.py"}


CONFIGURATION = [*(folder / "config.py" for folder in STAGES), folder_of(PACKAGE) / "engine" / "config.py"]


@each([path for path in STAGE_FILES if path not in CONFIGURATION])
def test_only_the_configuration_names_devices(path):
    assert list(fixed_devices(tree_of(path))) == []


@pytest.mark.parametrize(
    ("rule", "code", "num_faults"),
    [
        (untyped, "def f(a: int, *b: int, c: int = 1, **d: int) -> None: ...\nclass A:\n  def f(self) -> int: ...", 0),
        (untyped, "def f(a) -> None: ...", 1),
        (untyped, "def f(a: int): ...", 1),
        (untyped, "def f(*a, **b) -> None: ...", 1),
        (untyped, "class A:\n  def f(self, a) -> None: ...\n  @staticmethod\n  def g(a) -> None: ...", 2),
        (untyped, "def f() -> None:\n  def g(a): ...", 1),
        (private_reads, "class A:\n  def f(self) -> int: return self._a + self.b.__len__() + self.c._replace(d=1)", 0),
        (private_reads, "a._b = 1\nprint(self.a._b)\na._b()", 3),
        (untyped, "@triton.jit(do_not_specialize=['b'])\ndef f(a, b): ...\n@triton.jit\ndef g(a): ...", 0),
        (prints, "def f() -> None:\n  print('a')\nprint", 1),
        (fixed_devices, "if device.type == 'cuda': torch.cuda.synchronize()\nx = torch.empty(1, device='cpu')", 0),
        (fixed_devices, "def f(device: str = 'cuda:0') -> None: ...", 1),
        (fixed_devices, "def f(*, device: str = 'cpu') -> None: ...", 1),
        (fixed_devices, "x.to('cuda')\nx.cuda()\nx.half()", 3),
    ],
)
def test_rules_find_faults(rule, code, num_faults):
    assert len(list(rule(ast.parse(code)))) == num_faults
