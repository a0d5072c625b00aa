"""A stage needs only its own folder, torch, sentencepiece and safetensors, and pytest for its tests.

The package needs more: see OF_THE_PACKAGE.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import PACKAGE, ROOT, STORYTELLER, find_branches, find_stages, folder_of, full, nightly

STAGES = [*find_stages(ROOT), PACKAGE]
INSTALLED = {"torch", "sentencepiece", "safetensors", "pytest"}
OF_THE_PACKAGE = {"asyncio", "click", "jinja2", "numpy", "pydantic", "tokenizers", "tqdm"}  # asyncio opens no socket
IF_INSTALLED = {
    "requests/structured_outputs.py": {"llguidance"},
    "checkpoints/gguf.py": {"gguf"},
    **{f"backends/cpu/{path.name}": {"numba", "llvmlite"} for path in (ROOT / "nanovllm/backends/cpu").glob("*.py")},
    **{f"tests/cpu/{path.name}": {"numba", "llvmlite"} for path in (ROOT / "nanovllm/tests/cpu").glob("*.py")},
    **{f"backends/gpu/{path.name}": {"triton"} for path in (ROOT / "nanovllm/backends/gpu").glob("*.py")},
    **{f"tests/gpu/{path.name}": {"triton"} for path in (ROOT / "nanovllm/tests/gpu").glob("*.py")},
}
NUMBA = {"numba", "numpy"}
OF_BRANCHES = {
    "more_kernel": {"paged_kernel.py": NUMBA, "kernel_attention.py": NUMBA, "triton_kernel.py": {"triton"}},
}
SERVE = {"starlette", "uvicorn", "h11", "prometheus_client"}  # the extra named serve
OF_FOLDERS = {  # the package's folders that listen, send HTTP requests, or test either
    "server/": SERVE | {"http", "socket", "urllib"},
    "tests/server/": SERVE | {"httpx", "openai", "socket", "urllib"},
    "bench/load.py": {"aiohttp", "yarl"},
}
CONNECTING = {"connect", "connect_ex", "create_connection", "open_connection", "start_tls"}
NETWORK = {"asyncio", "ftplib", "http", "imaplib", "poplib", "smtplib", "socket", "socketserver", "ssl", "urllib"}
# vLLM's scripts and programs of client libraries, which run in environments of their own
OF_OTHERS = ("tests/scripts/", "tests/clients/programs/")
THROUGH_THE_HUB = {"checkpoints/hub.py", "tests/testing/fake_hub.py", "tests/test_hub.py", "tests/test_gguf.py"}
NETWORK_NAMES = {"hub", "load_state_dict_from_url", "download_url_to_file", "urlopen", "snapshot_download"}

# Runs a module like `python -m`, without the rest of this repository, the test extras and the network.
LAUNCHER = """
import runpy, socket, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

BLOCKED = {"stages", "models", "tests", "notebooks", "transformers", "hypothesis", "matplotlib", "nanovllm", "click"}
find_on_path = PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in BLOCKED else find_on_path(name, path, target)

def refuse_all_but_loopback(function, place):
    def call(*arguments, **options):
        if arguments[place] not in ("127.0.0.1", "localhost") and arguments[place][0] != "127.0.0.1":
            raise OSError("the network is out of reach")
        return function(*arguments, **options)
    return call

PathFinder.find_spec = classmethod(find_spec)
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]  # without the finder of an editable install
socket.socket.connect = refuse_all_but_loopback(socket.socket.connect, 1)
socket.getaddrinfo = refuse_all_but_loopback(socket.getaddrinfo, 0)
folder, needed, module, *rest = sys.argv[1:]
BLOCKED -= {*needed.split()}
sys.path.insert(0, folder)
sys.argv = [module, *rest]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run_alone(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run python -m `module` in `folder`. It can import only from there and from site-packages."""
    needed = " ".join(OF_THE_PACKAGE | {PACKAGE}) if (folder / PACKAGE).exists() else ""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    settings = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-P", "-c", LAUNCHER, str(folder), needed, module, *arguments]
    return subprocess.run(command, cwd=folder, env=inherited | settings, capture_output=True, text=True, timeout=300)


@pytest.fixture
def alone(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy a stage's folder into an empty one."""
    source = folder_of(request.param)
    return shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.full
def test_rest_of_the_repository_is_out_of_reach(tmp_path):
    names = "stages", "models", "transformers", "tests", "hypothesis"
    lines = [
        "import sys, torch, sentencepiece, safetensors, pytest",
        "from importlib.util import find_spec",
        "import urllib.request as r",
        f"print([*map(find_spec, {names})], sys.argv[1:])",
        "r.urlopen('http://192.0.2.1:9/')",
    ]
    (tmp_path / "look.py").write_text("\n".join(lines))
    done = run_alone(tmp_path, "look", "--a", "b")
    assert done.stdout == f"{[None] * len(names)} ['--a', 'b']\n" and "the network is out of reach" in done.stderr


@pytest.mark.parametrize("alone", [full(STAGES[0]), STAGES[-2], PACKAGE], indirect=True)
@pytest.mark.full
def test_stage_generates_text_alone(alone):
    command = ["generate"] if alone.name == PACKAGE else []
    flags = [*command, "--model", str(STORYTELLER), "--max-tokens", "8", "--temperature", "0"]
    done = run_alone(alone.parent, alone.name, *flags, "Once upon a time", "The fox")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Once upon a time\S* ?\w+", done.stdout, re.M) and "\nThe fox" in done.stdout
    assert any(" tokens/s, " in line for line in done.stdout.splitlines()[-3:])
    assert [path.name for path in alone.parent.iterdir()] == [alone.name], "it wrote files outside its folder"


GAIN = "-k", "test_gain"
CALLS = "-k", "test_llm or test_generate or test_tokenizer_engine or test_trace"
RUNS = [full(STAGES[0], ()), nightly(STAGES[3], GAIN), full(STAGES[6], GAIN), nightly(PACKAGE, CALLS)]


@pytest.mark.parametrize(("alone", "part"), RUNS, indirect=["alone"])
def test_stage_passes_its_tests_alone(alone, part):
    """All its test files are imported. All tests of stage 1 run, test_gain.py, and some of the package's.

    A test could fail alone because of an import, which the tests below check, or because of a file that it reads.
    """
    doctests = "--doctest-modules", "--doctest-ignore-import-errors"  # Triton may be missing
    done = run_alone(alone.parent, "pytest", "-q", "-p", "no:cacheprovider", *doctests, *part, alone.name)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert re.search(r"\b\d+ passed", done.stdout)


# Imports


def import_faults(folder: Path) -> list[str]:
    """Return a stage's forbidden imports: from outside its folder, or of network libraries."""
    faults = []
    installed = INSTALLED | OF_THE_PACKAGE if folder.name == PACKAGE else INSTALLED
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if folder.name == PACKAGE and (name in THROUGH_THE_HUB or name.startswith(OF_OTHERS)):
            continue  # tests use a hub on loopback
        depth = len(path.relative_to(folder).parts)
        allowed = installed if path.is_relative_to(folder / "tests") else installed - {"pytest"}
        if folder.name == PACKAGE:
            of_folder = [modules for start, modules in OF_FOLDERS.items() if name.startswith(start)]
            allowed = allowed.union(IF_INSTALLED.get(name, set()), *of_folder)
        allowed = allowed.union(OF_BRANCHES.get(folder.name, {}).get(name, set()))
        file_faults = text_faults(path.read_text(encoding="utf-8"), depth, frozenset(allowed))
        faults += [f"{path.relative_to(folder)}:{fault}" for fault in file_faults]
    return faults


@cache  # most files of a stage are copies
def text_faults(text: str, depth: int, allowed: frozenset[str]) -> list[str]:
    """Return the faults, each with its line number first."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.Attribute | ast.Name)]
    return [f"{node.lineno}: {fault}" for node in nodes for fault in node_faults(node, depth, allowed)]


def node_faults(node: ast.AST, depth: int, allowed: frozenset[str]) -> list[str]:
    """Return a node's faults. `depth` is how many leading dots stay in the stage: 1 for its files, 2 in a subfolder."""
    if isinstance(node, ast.ImportFrom) and node.level:
        return [f"{'.' * node.level}{node.module} is outside the stage"] if node.level > depth else []
    modules = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
    faults = [f"imports {module}" for module in modules if not may_import(module, allowed)]
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    return list(dict.fromkeys(faults)) + ([f"{name} reaches the network"] if name in NETWORK_NAMES else [])


def may_import(module: str, allowed: frozenset[str]) -> bool:
    package, _, rest = module.partition(".")
    if set(rest.split(".")) & NETWORK_NAMES:
        return False
    return package in allowed or (package in sys.stdlib_module_names and package not in NETWORK)


@pytest.mark.parametrize("name", [*find_stages(ROOT), *find_branches(ROOT)])
def test_stage_has_no_forbidden_imports(name):
    assert import_faults(folder_of(name)) == []


def test_server_never_connects_to_other_hosts():
    files = sorted((ROOT / PACKAGE / "server").rglob("*.py"))
    trees = {path.name: ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    names = {(name, node.attr) for name, nodes in trees.items() for node in nodes if isinstance(node, ast.Attribute)}
    assert ("run.py", "listen") in names, "the search must find calls"
    assert [(name, attribute) for name, attribute in names if attribute in CONNECTING] == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("a.py", "from stages.s1_x import LLM", "imports stages.s1_x"),
        ("a.py", "import numpy as np", "imports numpy"),
        ("a.py", "def f():\n    from transformers import LlamaConfig", "imports transformers"),
        ("a.py", "from .. import s1_x", "outside the stage"),
        ("llama/a.py", "from ...s1_x import LLM", "outside the stage"),
        ("a.py", "import pytest", "imports pytest"),
        ("a.py", "import urllib.request", "imports urllib.request"),
        ("a.py", "import torch\ntorch.hub.load('a', 'b')", "hub reaches the network"),
        ("a.py", "from torch.hub import load", "imports torch.hub"),
        ("a.py", "from torch import hub", "imports torch.hub"),
    ],
)
def test_forbidden_imports_are_found(tmp_path, file, line, fault):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    assert any(fault in each for each in import_faults(tmp_path))


def test_allowed_imports_are_accepted(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.py").write_text("import json\nimport torch.nn.functional\nfrom .b import c\nfrom . import d\n")
    (tmp_path / "tests" / "test_a.py").write_text("import pytest\nfrom ..a import json\nimport safetensors.torch\n")
    assert import_faults(tmp_path) == []
