"""Does the body that a function had in the stage before still fit? Not if it names what this stage does not have."""

import ast
import builtins
from collections.abc import Iterator

from .functions import find_node


def gone(name: str, before: str, now: str) -> list[str]:
    """What the body that the function `name` has in the file `before` names, and what is not in the file `now`.

    Its parameters, the attributes of `self`, and the names of the module; of other objects nothing is known.

    >>> gone("f", "def f(count): return min(count, MAX)", "def f(size): return 1")
    ['the parameter count', 'MAX']
    >>> gone("Pool.size", "class Pool:\\n def size(self): return self.free", "class Pool:\\n def size(self): return 1")
    ['self.free']
    """
    old, new, tree = find_node(before, name), find_node(now, name), ast.parse(now)
    assert old and new, f"{name} is in both stages"
    own = {id(node) for node in ast.walk(new)}
    others = [node for node in ast.walk(tree) if id(node) not in own]
    attributes = {each for node in others for each in _names_of(node)}
    used = [node for statement in old.body for node in ast.walk(statement)]
    local = {node.id for node in used if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local |= {node.arg for node in used if isinstance(node, ast.arg)}
    known = local | _parameters(new) | _module_names(tree) | {*dir(builtins)} | {f"self.{each}" for each in attributes}
    missing = [each for node in used if (each := _named(node)) and each not in known]
    return [f"the parameter {each}" if each in _parameters(old) else each for each in dict.fromkeys(missing)]


def _named(node: ast.AST) -> str:
    """What a node names: "self.free", "len", or nothing that could be gone."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""


def _names_of(node: ast.AST) -> Iterator[str]:
    """The attributes that a node uses or defines."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _parameters(node: ast.FunctionDef) -> set[str]:
    return {arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}


def _module_names(tree: ast.Module) -> set[str]:
    """What the module defines and imports."""
    imported = (alias for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names)
    assignments = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assigned = (node.id for target in assignments for node in ast.walk(target) if isinstance(node, ast.Name))
    defined = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {alias.asname or alias.name for alias in imported} | {*assigned} | {*defined}
