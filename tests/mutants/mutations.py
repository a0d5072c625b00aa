"""The mutants of a file, and a sample of them that stays the same when other code changes.

cosmic-ray finds the places and changes the code; this module chooses its operators and adds two of its own: deleting a
statement, and deleting the filter of a comprehension. What no test of behavior can see is left out (see skip_reason).
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple

# Each operator of cosmic-ray, with the type of parso's nodes that it changes
OPERATORS = {
    **{
        f"ReplaceComparisonOperator_{change}": "comparison"
        for change in (
            *("Lt_LtE", "Lt_Gt", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
            *("Eq_NotEq", "Eq_LtE", "Eq_GtE", "NotEq_Eq", "NotEq_Lt", "NotEq_Gt", "Is_IsNot", "IsNot_Is"),
        )
    },
    **{
        f"ReplaceBinaryOperator_{change}": "operator"
        for change in (
            *(
                "Add_Sub",
                "Sub_Add",
                "Mul_Add",
                "Mul_FloorDiv",
                "Div_Mul",
                "FloorDiv_Mul",
                "FloorDiv_Div",
                "Mod_FloorDiv",
            ),
            *("Pow_Mul", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd", "LShift_RShift", "RShift_LShift"),
        )
    },
    "ReplaceUnaryOperator_USub_UAdd": "factor",
    "ReplaceUnaryOperator_Delete_Invert": "factor",
    "ReplaceUnaryOperator_Delete_Not": "not_test",
    "AddNot": "if_stmt while_stmt test",
    "ReplaceTrueWithFalse": "keyword",
    "ReplaceFalseWithTrue": "keyword",
    "ReplaceAndWithOr": "keyword",
    "ReplaceOrWithAnd": "keyword",
    "ReplaceBreakWithContinue": "keyword",
    "ReplaceContinueWithBreak": "keyword",
    "ExceptionReplacer": "except_clause",
    "NumberReplacer": "number",
    "RemoveDecorator": "decorator",
    "ZeroIterationForLoop": "for_stmt",
    "DeleteStatement": "simple_stmt",
    "DeleteFilter": "comp_if",
}
LOGGING = ("logger.", "logging.", "warnings.warn", "warn(", "print(")
CHECKERS = ("__repr__", "check_integrity")  # what people read, and the tests' own net
# arguments that change speed or memory, that tell of bugs alone, or that matter when Python exits
SILENT_ARGUMENTS = ("strict", "daemon", "non_blocking", "pin_memory", "slots", "frozen", "repr", "kw_only")
SILENT_DECORATORS = ("cache", "lru_cache", "override", "overload", "abstractmethod", "runtime_checkable", "torch.")


class Mutant(NamedTuple):
    """One change to one file. The id stays the same as long as the function's name and the line do."""

    file: str
    function: str  # its qualified name, or "" for code at the top of a module
    operator: str
    line: str  # the source line, without indentation
    nth: int  # among the mutants of the same line, function and operator
    occurrence: int  # among all places in the file that the operator could change
    lineno: int
    reach: tuple[
        int, int
    ]  # the first and the last line of the statement: a test that reaches none can't see the mutant
    origin: str = ""  # the file's name before it moved, so that the sample stays the same

    @property
    def id(self) -> str:
        text = "\n".join((self.origin or self.file, self.function, self.operator, self.line, str(self.nth)))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def rank(self, seed: int) -> str:
        """Return the key that orders the mutants of all files. Another seed gives another order."""
        return hashlib.sha256(f"{seed} {self.id}".encode()).hexdigest()


class DeleteStatement:
    """Replaces a call, an assignment to an attribute or an item, a bare return, a raise or a del by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt" and self._is_deletable(node.children[0]):
            yield (node.children[0].start_pos, node.children[0].end_pos)

    def mutate(self, node: Any, index: int) -> Any:
        from parso.python.tree import Keyword

        statement = node.children[0]
        node.children[0] = Keyword("pass", statement.start_pos, prefix=statement.get_first_leaf().prefix)
        return node

    @staticmethod
    def _is_deletable(statement: Any) -> bool:
        if statement.type in ("raise_stmt", "del_stmt") or getattr(statement, "value", "") == "return":
            return True
        if statement.type == "expr_stmt":
            target, operator = statement.children[:2]
            if operator.type == "annassign" and len(operator.children) == 2:
                return False  # a type, without a value
            is_augmented = getattr(operator, "value", "=") != "="
            return is_augmented or (
                target.type == "atom_expr" and enclosing_name(statement).split(".")[-1] != "__init__"
            )
        awaited = statement.type == "atom_expr" and statement.children[0].type == "keyword"
        return statement.type == "atom_expr" and (awaited or statement.children[-1].get_code().startswith("("))


class DeleteFilter:
    """Replaces the condition of a comprehension by True."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "comp_if":
            yield (node.children[1].start_pos, node.children[1].end_pos)

    def mutate(self, node: Any, index: int) -> Any:
        from parso.python.tree import Keyword

        node.children[1] = Keyword("True", node.children[1].start_pos, prefix=" ")
        return node


@cache
def operator_of(name: str) -> Any:
    """Return an operator: one of this module's, or one of cosmic-ray's."""
    if name in globals():
        return globals()[name]()
    from cosmic_ray.operators.provider import OperatorProvider

    return OperatorProvider()[name]()


def statement_lines(node: Any) -> tuple[int, int]:
    """Return the lines that run if the code around a node runs: its statement's, or a compound statement's header."""
    first, last = node.start_pos[0], node.end_pos[0]
    if node.type in ("if_stmt", "while_stmt", "for_stmt"):
        last = next(each for each in node.children if getattr(each, "value", "") == ":").start_pos[0]
    elif node.type == "simple_stmt":
        last = node.children[0].end_pos[0]
    while (node := node.parent) is not None and node.type not in ("suite", "file_input", "classdef"):
        first = node.start_pos[0]
        last = max(last, node.children[0].end_pos[0]) if node.type == "simple_stmt" else last
    return first, last


def enclosing_name(node: Any) -> str:
    """Return the qualified name of the function or class around a node, such as "Scheduler.schedule"."""
    names = []
    while node := node.parent:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
    return ".".join(reversed(names))


def is_constant(node: Any) -> bool:
    """Return whether a node is in the value of a module's constant, and in no function."""
    while node.parent.type not in ("file_input", "lambdef"):
        node = node.parent
    return node.parent.type == "file_input" and node.type == "simple_stmt"


def skip_reason(node: Any, operator: str) -> str | None:
    """Return why no test of behavior can see a change of this node, or None.

    Annotations, log messages, errors' wordings and assertions are left out: an assert states what cannot happen, so a
    weaker one changes nothing. So are arguments and decorators that only cost speed or memory.
    """
    if operator == "RemoveDecorator" and node.get_code().strip().lstrip("@").startswith(SILENT_DECORATORS):
        return "a decorator for speed, memory or readers"
    if operator == "DeleteStatement":
        statement = node.children[0].get_code(include_prefix=False)
        if statement.startswith(LOGGING):
            return "a log message"
    child, parent = node, node.parent
    while parent is not None:
        if parent.type in ("assert_stmt", "raise_stmt", "decorator", "import_from"):
            return f"inside of {parent.type}"
        position = next(index for index, each in enumerate(parent.children) if each is child)
        before = parent.children[position - 1] if position else None
        if parent.type in ("tfpdef", "annassign") and position and getattr(before, "value", "") == ":":
            return "an annotation"
        if parent.type == "funcdef" and (getattr(before, "value", "") == "->" or parent.name.value in CHECKERS):
            return "an annotation, or a check of the tests' own"
        if parent.type == "argument" and parent.children[0].get_code().strip() in SILENT_ARGUMENTS:
            return "an argument that behavior does not show"
        if parent.type == "atom_expr" and parent.get_code(include_prefix=False).startswith(LOGGING):
            return "a log message"
        if parent.type == "if_stmt" and "TYPE_CHECKING" in parent.children[1].get_code():
            return "for type checkers"
        child, parent = parent, parent.parent
    if operator.startswith(("NumberReplacer", "ReplaceBinaryOperator")) and is_constant(node):
        return "a constant such as a buffer's size, which a test could only repeat, or a type alias"
    return None


class Source:
    """A file's text, parsed, and its mutants."""

    def __init__(self, file: str, text: str, origin: str = "") -> None:
        self.file, self.text, self.origin = file, text, origin

    @cached_property
    def functions(self) -> dict[str, str]:
        """The source text of each function and method, by qualified name."""
        functions: dict[str, str] = {}

        def collect(body: list[ast.stmt], prefix: str) -> None:
            for node in body:
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    functions[prefix + node.name] = ast.get_source_segment(self.text, node) or ""

        collect(ast.parse(self.text).body, "")
        return functions

    def mutants(self, unchanged: frozenset[str] = frozenset()) -> list[Mutant]:
        """Return the mutants of the file, except those of `unchanged` functions: an earlier stage's."""
        from cosmic_ray.ast import ast_nodes, get_ast

        lines = self.text.splitlines()
        by_type: dict[str, list[str]] = {}
        for operator, types in OPERATORS.items():
            for each in types.split():
                by_type.setdefault(each, []).append(operator)
        seen: Counter[tuple[str, ...]] = Counter()
        occurrences: Counter[str] = Counter()
        mutants = []
        for node in ast_nodes(get_ast(self.text)):
            for operator in by_type.get(node.type, ()):
                for start, _ in operator_of(operator).mutation_positions(node):
                    occurrence, occurrences[operator] = occurrences[operator], occurrences[operator] + 1
                    function = enclosing_name(node)
                    if skip_reason(node, operator) or function in unchanged:
                        continue
                    line = lines[start[0] - 1].strip()
                    nth, seen[function, operator, line] = (
                        seen[function, operator, line],
                        seen[function, operator, line] + 1,
                    )
                    place = occurrence, start[0], statement_lines(node)
                    mutants.append(Mutant(self.file, function, operator, line, nth, *place, self.origin))
        return mutants

    def apply(self, mutant: Mutant) -> str | None:
        """Return the text with one mutation, or None if it is no program, or the same program."""
        from cosmic_ray.mutating import mutate_code

        text: str = mutate_code(self.text, operator_of(mutant.operator), mutant.occurrence)
        try:
            tree = ast.parse(text)
            compile(text, self.file, "exec")
        except SyntaxError:
            return None
        if ast.dump(tree) == ast.dump(ast.parse(self.text)):
            return None
        return text.replace("CosmicRayTestingException", "ZeroDivisionError")  # cosmic-ray's own would need an import
