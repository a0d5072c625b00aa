"""Read names and defaults of vLLM's sampling parameters and outputs from its source, and write them next to this file.

    python nanovllm/tests/data/vllm_0_32/make_sampling_params.py path/to/site-packages/vllm

It imports nothing from vLLM. A class becomes a list of its fields, and a function a list of its parameters, each as
[name, default]. A default is a literal, its source text, or "required". Private names are left out.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

CLASSES = {
    "sampling_params.py": ["SamplingParams", "RequestOutputKind", "RepetitionDetectionParams"],
    "outputs.py": ["CompletionOutput", "RequestOutput"],
    "logprobs.py": ["Logprob", "FlatLogprobs"],
}


def default(node: ast.expr | None) -> Any:
    if node is None:
        return "required"
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def fields(node: ast.ClassDef) -> list[tuple[str, Any]]:
    """Return annotated fields, or members of an Enum, or else the arguments of the class's __init__."""
    annotated = [(each.target, each.value) for each in node.body if isinstance(each, ast.AnnAssign)]
    members = [(each.targets[0], each.value) for each in node.body if isinstance(each, ast.Assign)]
    rows = [(target.id, default(value)) for target, value in annotated or members if isinstance(target, ast.Name)]
    return rows or parameters(node, "__init__")


def parameters(node: ast.ClassDef, name: str) -> list[tuple[str, Any]]:
    [spec] = [each.args for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name]
    without = [None] * (len(spec.args) - len(spec.defaults))
    defaults = [*without, *spec.defaults, *spec.kw_defaults]
    pairs = zip([*spec.args, *spec.kwonlyargs], defaults, strict=True)
    return [(arg.arg, default(value)) for arg, value in pairs if arg.arg != "self"]


def main(source: Path) -> None:
    found: dict[str, Any] = {"vllm": "0.32"}
    for file, names in CLASSES.items():
        body = ast.parse((source / file).read_text()).body
        nodes = {each.name: each for each in body if isinstance(each, ast.ClassDef)}
        found |= {name: fields(nodes[name]) for name in names}
        if "SamplingParams" in names:
            found["SamplingParams.from_optional"] = parameters(nodes["SamplingParams"], "from_optional")
    lines = [f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items()]
    Path(__file__).with_name("sampling_params.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
