"""Read the names, kinds and defaults of vLLM's interface from its source, with nothing imported, and write them here.

    python nanovllm/tests/data/vllm_0_32/make_api.py path/to/site-packages/vllm

A signature becomes a list of [name, kind, default], and a dataclass a list of [name, default]. A default is a literal,
{"expression": its source text} or {"required": true}. Constants of other classes are replaced by their values.
"""

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REQUIRED = {"required": True}
BODIES = {
    "CompletionRequest": "completion",
    "ChatCompletionRequest": "chat_completion",
    "ResponsesRequest": "responses",
}
LABELS = ["model_name", "engine"]
SOURCE = Path()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of vllm/config by name. The defaults of EngineArgs are their attributes."""
    paths = sorted((SOURCE / "config").glob("*.py"))
    return {node.name: node for path in paths for node in tree(path).body if isinstance(node, ast.ClassDef)}


def find_class(path: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(tree(SOURCE / path)) if isinstance(node, ast.ClassDef) and node.name == name)


def value(node: ast.expr) -> Any:
    """Return the default that an expression stands for."""
    try:
        return plain(ast.literal_eval(node))
    except ValueError:
        pass
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in classes():
        return attribute(node.value.id, node.attr)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "get_field":
            owner, name = map(ast.unparse, node.args)
            return attribute(owner, ast.literal_eval(name))
        if node.func.id in ("Field", "field"):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if "default" in given:
                return value(given["default"])
            if node.args:
                return value(node.args[0])
            return {"expression": f"{ast.unparse(given['default_factory'])}()"}
    return {"expression": ast.unparse(node)}


def plain(found: Any) -> Any:
    return {"expression": repr(found)} if isinstance(found, set | tuple) or found is ... else found


def attribute(owner: str, name: str) -> Any:
    """Return the default of a field of a class in vllm/config or of a base class. A member of an Enum has none."""
    for node in classes()[owner].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return value(node.value) if node.value else REQUIRED
    bases = [base.id for base in classes()[owner].bases if isinstance(base, ast.Name) and base.id in classes()]
    return attribute(bases[0], name) if bases else {"expression": f"{owner}.{name}"}


def signature(path: str, owner: str, name: str) -> list[list[Any]]:
    body = find_class(path, owner).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spec = [node for node in functions if node.name == name][-1].args
    defaults = [None] * (len(spec.args) - len(spec.defaults)) + spec.defaults
    rows = [[arg.arg, "positional or keyword", default(each)] for arg, each in zip(spec.args, defaults, strict=True)]
    keywords = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    rows += [[arg.arg, "keyword", default(each)] for arg, each in keywords]
    if spec.kwarg:
        rows.append([spec.kwarg.arg, "any other keyword", REQUIRED])
    return rows[1:]  # without self


def default(node: ast.expr | None) -> Any:
    return REQUIRED if node is None else value(node)


def fields(path: str, name: str) -> list[list[Any]]:
    """Return the fields of a dataclass, with their defaults."""
    body = [node for node in find_class(path, name).body if isinstance(node, ast.AnnAssign)]
    return [[node.target.id, default(node.value)] for node in body if isinstance(node.target, ast.Name)]


def body_fields(folder: str, name: str) -> list[list[Any]]:
    """Return the public fields of a request body, with their defaults."""
    return [row for row in fields(f"entrypoints/openai/{folder}/protocol.py", name) if not row[0].startswith("_")]


def metrics(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each metric's name (vllm:...) with its type, labels and bounds, in the order of the file."""
    families = {}  # variable: family of bounds
    for node in ast.walk(tree(SOURCE / path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            families[ast.unparse(node.targets[0])] = ast.unparse(node.value.args[0]).strip("'")
    for node in ast.walk(tree(SOURCE / path)):
        given = {each.arg: each.value for each in getattr(node, "keywords", [])}
        if isinstance(node, ast.Call) and isinstance(given.get("name"), ast.Constant):
            kind = ast.unparse(node.func).removeprefix("self._").removesuffix("_cls")
            found: dict[str, Any] = {"type": kind, "labels": labels(given["labelnames"])}
            if "buckets" in given:
                found["buckets"] = bounds(families[ast.unparse(given["buckets"])])
            yield str(ast.literal_eval(given["name"])), found


def labels(node: ast.AST) -> list[str]:
    """`labelnames` stands for the first two."""
    parts = list(ast.walk(node))
    common = LABELS if any(isinstance(each, ast.Name) and each.id == "labelnames" for each in parts) else []
    return [*common, *(str(each.value) for each in parts if isinstance(each, ast.Constant))]


def bounds(family: str) -> list[float] | None:
    """None for those that depend on the longest sequence."""
    for node in tree(SOURCE / "v1/metrics/buckets.py").body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == f"{family.upper()}_BUCKETS":
            return list(ast.literal_eval(node.value))
    return None


def offload_metrics() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the same for blocks on the host. A file gives their types by the classes of its events."""
    path = "distributed/kv_transfer/kv_connector/v1/offloading/metrics.py"
    body = [node for node in find_class(path, "_TransferMetricName").body if isinstance(node, ast.Assign)]
    names = {f"_TransferMetricName.{ast.unparse(node.targets[0])}": ast.literal_eval(node.value) for node in body}
    for node in ast.walk(tree(SOURCE / path)):
        for key, made in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if key and ast.unparse(key) in names and isinstance(made, ast.Call):
                kind = ast.unparse(made.func).removeprefix("Offloading").removesuffix("Metadata").lower()
                yield names[ast.unparse(key)], {"type": kind, "labels": LABELS}


def version() -> str:
    found = [path.name.split("-")[1] for path in SOURCE.parent.glob("vllm-*.dist-info")]
    return ".".join(found[0].split(".")[:2]) if found else "0.32"


def write(name: str, content: dict[str, Any]) -> None:
    text = json.dumps({"vllm": version(), **content}, indent=1)
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    llm, beams = "entrypoints/llm.py", "entrypoints/generate/beam_search"
    methods = {name: signature(llm, "LLM", name) for name in ("__init__", "generate", "chat", "reset_prefix_cache")}
    methods["beam_search"] = signature(f"{beams}/offline.py", "BeamSearchOfflineMixin", "beam_search")
    methods["embed"] = signature("entrypoints/pooling/offline.py", "PoolingOfflineMixin", "embed")
    write("llm.json", methods)
    args = "engine/arg_utils.py"
    write("engine_args.json", {name: fields(args, name) for name in ("EngineArgs", "AsyncEngineArgs")})
    engine = "v1/engine/llm_engine.py"
    write("llm_engine.json", {name: signature(engine, "LLMEngine", name) for name in ("add_request", "abort_request")})
    names = ("generate", "abort", "shutdown", "from_engine_args", "check_health", "reset_prefix_cache")
    write("async_llm.json", {name: signature("v1/engine/async_llm.py", "AsyncLLM", name) for name in names})
    kinds = {name: fields(f"{beams}/utils.py", name) for name in ("BeamSearchSequence", "BeamSearchOutput")}
    write("beam_search.json", kinds | {"BeamSearchParams": fields("sampling_params.py", "BeamSearchParams")})
    write("bodies.json", {name: body_fields(folder, name) for name, folder in BODIES.items()})
    kinds = {name: fields("v1/metrics/reader.py", name) for name in ("Counter", "Vector", "Gauge", "Histogram")}
    made = dict([*metrics("v1/metrics/loggers.py"), *offload_metrics()])
    write("metrics.json", kinds | {"metrics": made})


if __name__ == "__main__":
    SOURCE = Path(sys.argv[1])
    main()
