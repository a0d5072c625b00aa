"""Find tests whose result depends on a clock. A busy machine fails them.

A test may look at a clock for one reason: to give up after MIN_GUARD seconds or more. Otherwise it counts steps, calls,
bytes or events, moves a clock of its own, or is marked nightly. These are found:

    assert time.monotonic() - start < 2     a comparison of a clock's value, or of one that was computed from it
    thread.join(5), timeout=5               a limit below MIN_GUARD
    header_timeout=0.2                      the same limit, as an option of the program under test
    time.sleep(0.2)                         a sleep, unless it is the pause in a `while` loop that awaits a condition
    performance.now                         a clock of the page, in a script for the browser

Python code in a string, such as a script for a child process, is searched too.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

MIN_GUARD = 60.0  # seconds
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime", "getrusage", "utcnow"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
SHORT_CLOCKS = {"time", "time_ns", "times", "now", "today"}  # too common without their owner
OWNERS = {"time", "datetime", "date", "os", "loop", "get_running_loop", "get_event_loop"}
ARITHMETIC = {"min", "max", "abs", "round", "sum", "sorted", "median", "mean", "float", "int"}
PLACE_OF_LIMIT = {"wait": 0, "join": 0, "result": 0, "poll": 0, "timeout": 0, "wait_for": 1}  # among the arguments
PAGE_CLOCKS = ("performance.now" + "()", ".start" + "Time", "Date.now" + "()")  # in parts, or they would be found here
WORDS = ("time", "sleep", "wait", "join", "rusage")  # one of them is in each script that depends on a clock
CLOCK = re.compile(rf"\b({'|'.join(CLOCKS)}|time|times|now|today)\(")
TRIGGER = re.compile(
    rf"{CLOCK.pattern}|sleep|timeout|wait_for|\.(wait|join|result|poll)\([^)\"'\[]|performance|startTime|Date"
)
STRESS = "let_others_run"  # the one pause that a test may make: a correct program passes without it, too

Function = ast.FunctionDef | ast.AsyncFunctionDef
Numbers = Mapping[str, float]


class Finding(NamedTuple):
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def find_clocks(sources: Mapping[str, str]) -> list[Finding]:
    """Return each place that depends on a clock, given the texts of test files by name."""
    trees = {name: ast.parse(text) for name, text in sources.items() if TRIGGER.search(text)}
    clocks = {name for name in trees if CLOCK.search(sources[name])}
    shared = Shared({}, {}, set())
    for tree in trees.values():
        shared.numbers.update(constants(tree.body))
        for helper in functions(tree):
            given = [each.arg for each in helper.args.args]
            found_limits = limits_in(helper) if given else set()
            if limits := [name for name in given if name in found_limits]:
                shared.limits[helper.name] = given, limits
    for name in clocks:
        shared.timed.update(Search(shared, trees[name], True).timed_functions())
    callers = re.compile(rf"\b({'|'.join(shared.timed | {*shared.limits, '<none>'})})\(")
    for name in sources.keys() - trees.keys():
        if callers.search(sources[name]):
            trees[name] = ast.parse(sources[name])
    found = set()
    for name, tree in trees.items():
        has_clocks = name in clocks or any(each in sources[name] for each in shared.timed)
        found |= {Finding(name, *each) for each in Search(shared, tree, has_clocks).findings()}
    return sorted(found)


class Shared(NamedTuple):
    """Constants and helpers that test files share."""

    numbers: dict[str, float]  # constants
    limits: dict[str, tuple[list[str], list[str]]]  # of helpers that give up: all arguments, and the limits
    timed: set[str]  # the helpers that return a clock's value


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def constants(body: Iterable[ast.stmt]) -> Iterator[tuple[str, float]]:
    """Yield the names that are bound to a number."""
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
            value = number(node.value, {})
            if value is not None:
                yield target.id, value


def number(node: ast.AST | None, numbers: Numbers) -> float | None:
    """Return the value of an expression, or None if only the test knows it.

    >>> number(ast.parse("2 * SECONDS", mode="eval").body, {"SECONDS": 30.0})
    60.0
    """
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return numbers.get(name)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add() as op, right=right):
            a, b = number(left, numbers), number(right, numbers)
            return None if a is None or b is None else a * b if isinstance(op, ast.Mult) else a + b
        case ast.IfExp(body=left, orelse=right):
            both = [each for each in (number(left, numbers), number(right, numbers)) if each]
            return min(both, default=None)
    return None


def name_of(node: ast.AST) -> str:
    """Return the last part of a name: "sleep" for time.sleep, "loop" for self.loop, "time" for time.time()."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_nightly(node: ast.AST) -> bool:
    """Return True for a test, a class or a module that is marked nightly as a whole."""
    marks = list(getattr(node, "decorator_list", []))
    if isinstance(node, ast.Module):
        assigned = [each for each in node.body if isinstance(each, ast.Assign)]
        marks = [each.value for each in assigned if name_of(each.targets[0]) == "pytestmark"]
    return any(name_of(each) == "nightly" for mark in marks for each in [mark, *getattr(mark, "elts", [])])


class Search:
    """The search of one module, or of a script in a string."""

    def __init__(self, shared: Shared, tree: ast.Module, has_clocks: bool) -> None:
        self.shared, self.tree, self.has_clocks = shared, tree, has_clocks
        self.numbers = shared.numbers | dict(constants(tree.body))
        self.arguments: set[str] = set()  # of the function being searched
        self.timed: set[str] = set()  # names that hold a clock's value
        self.guards: set[str] = set()  # names that hold a moment at least MIN_GUARD ahead
        self.parents: dict[int, ast.AST] = {}
        nodes, outside = self.walk(tree)
        if has_clocks:
            self.follow(outside, names=True)
            self.follow(nodes, names=False)

    def walk(self, tree: ast.Module) -> tuple[list[ast.AST], list[ast.AST]]:
        """Note the parent of each node, and return all nodes and those outside of functions."""
        nodes: list[ast.AST] = [tree]
        outside: list[ast.AST] = []
        inner: set[int] = set()  # nodes inside of a function
        for node in nodes:  # it grows meanwhile
            is_inner = id(node) in inner
            if not is_inner:
                outside.append(node)
            for child in ast.iter_child_nodes(node):
                self.parents[id(child)] = node
                nodes.append(child)
                if is_inner or isinstance(node, Function):
                    inner.add(id(child))
        return nodes, outside

    def functions_around(self, node: ast.AST | None) -> list[Function]:
        """Return the functions that hold a node, the innermost one first."""
        around = []
        while (node := self.parents.get(id(node))) is not None:
            if isinstance(node, Function):
                around.append(node)
        return around

    def findings(self) -> Iterator[tuple[int, str]]:
        yield from self.search(self.tree)

    def timed_functions(self) -> set[str]:
        """Return the names of the functions that return a clock's value."""
        timed = set()
        for function in functions(self.tree):
            with_names = self.inside(function)
            returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
            if any(map(with_names.is_timed, returned)):
                timed.add(function.name)
        return timed

    def inside(self, function: Function) -> "Search":
        """Return a search that knows the names of a function."""
        search = object.__new__(Search)
        vars(search).update(vars(self))
        spec = function.args
        given = [each.arg for each in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]]
        search.numbers = {name: value for name, value in self.numbers.items() if name not in given}
        search.numbers |= dict(defaults(function)) | dict(constants(function.body))
        search.arguments = self.arguments | {*given}
        search.timed, search.guards = self.timed - {*given}, self.guards - {*given}
        if self.has_clocks:
            search.follow(list(ast.walk(function)), names=True)
        return search

    def search(self, node: ast.AST) -> Iterator[tuple[int, str]]:
        if is_nightly(node):
            return
        inner = self.inside(node) if isinstance(node, Function) else self
        if isinstance(node, ast.Compare) and self.has_clocks:
            yield from self.comparison(node)
        elif isinstance(node, ast.Call):
            yield from self.call(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and str(key.value).endswith("_timeout"):
                    yield from self.limit(value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self.script(node, node.value)
        for child in ast.iter_child_nodes(node):
            yield from inner.search(child)

    def script(self, node: ast.Constant, text: str) -> Iterator[tuple[int, str]]:
        """Search a string that is code."""
        if isinstance(self.parents.get(id(node)), ast.Expr):
            return  # a docstring
        for clock in PAGE_CLOCKS:
            if clock in text:
                yield node.lineno, f"looks at a clock of the page: {clock}"
        if "import" not in text or not any(word in text for word in WORDS):
            return
        try:
            tree = ast.parse(textwrap.dedent(text).replace("{{", "{").replace("}}", "}"))
        except (SyntaxError, ValueError):
            return
        for line, what in Search(self.shared, tree, True).findings():
            yield node.lineno + line - 1, what

    # Values of a clock

    def follow(self, nodes: list[ast.AST], names: bool) -> None:
        """Gather the names or the attributes that hold a clock's value, until no more are found."""
        kind = ast.Name if names else ast.Attribute
        bound = [each for node in nodes for each in bindings(node) if isinstance(each[0], kind)]
        count = -1
        while count != len(self.timed) + len(self.guards):
            count = len(self.timed) + len(self.guards)
            for target, value in bound:
                if self.is_guard(value):
                    self.guards.add(name_of(target))
                elif self.is_timed(value):
                    self.timed.add(name_of(target))

    def is_clock(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        name, owner = name_of(node.func), getattr(node.func, "value", None)
        return name in CLOCKS or (name in SHORT_CLOCKS and owner is not None and name_of(owner) in OWNERS)

    def is_timed(self, node: ast.AST) -> bool:
        """Return True if an expression's value comes from a clock."""
        match node:
            case ast.Name(id=name):
                return name in self.timed
            case ast.Attribute(attr=name, value=value):
                return (
                    name in self.timed or self.is_clock(value) or (isinstance(value, ast.Name) and self.is_timed(value))
                )
            case ast.Call(func=function, args=arguments):
                name = name_of(function)
                is_helper = name in self.shared.timed and isinstance(function, ast.Name)
                return self.is_clock(node) or is_helper or (name in ARITHMETIC and any(map(self.is_timed, arguments)))
            case ast.Constant() | ast.JoinedStr() | ast.Dict() | ast.Lambda() | ast.Compare():
                return False
        return any(
            self.is_timed(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr | ast.Starred)
        )

    def is_guard(self, node: ast.AST) -> bool:
        """Return True for a moment that is far ahead, such as time.monotonic() + 60.

        The seconds may be an argument of a helper: then its callers are checked.
        """
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return name in self.guards
            case ast.BinOp(left=left, op=ast.Add(), right=right) if self.is_clock(left):
                seconds = number(right, self.numbers)
                return name_of(right) in self.arguments if seconds is None else seconds >= MIN_GUARD
        return False

    def comparison(self, node: ast.Compare) -> Iterator[tuple[int, str]]:
        sides = [node.left, *node.comparators]
        is_guard = any(map(self.is_guard, sides)) and all(self.is_guard(side) or self.is_clock(side) for side in sides)
        if not is_guard and any(self.is_timed(side) or self.is_guard(side) for side in sides):
            yield node.lineno, f"compares a clock: {ast.unparse(node)}"

    # Limits and sleeps

    def call(self, node: ast.Call) -> Iterator[tuple[int, str]]:
        name = name_of(node.func)
        if name in ("sleep", "wait_for_timeout"):
            around = self.functions_around(node)
            if node.args and (name != "sleep" or not self.is_pause(node)) and (not around or around[0].name != STRESS):
                yield node.lineno, f"sleeps: {ast.unparse(node)}"
            return
        for keyword in node.keywords:
            if (keyword.arg or "").endswith("timeout"):
                yield from self.limit(keyword.value)
        place = PLACE_OF_LIMIT.get(name)
        if name in self.shared.limits and isinstance(node.func, ast.Name):
            given, limits = self.shared.limits[name]
            place = given.index(limits[0])
            for keyword in node.keywords:
                if keyword.arg in limits and not keyword.arg.endswith("timeout"):
                    yield from self.limit(keyword.value)
        if place is not None and len(node.args) > place and not any(isinstance(a, ast.Starred) for a in node.args):
            yield from self.limit(node.args[place])

    def limit(self, value: ast.expr) -> Iterator[tuple[int, str]]:
        seconds = number(value, self.numbers)
        if seconds is not None and 0 < seconds < MIN_GUARD:
            yield value.lineno, f"gives up after {seconds:g} seconds"

    def is_pause(self, node: ast.Call) -> bool:
        """Return True for a sleep in a loop that awaits a condition, for sleep(0), and for one that the test ends."""
        seconds = number(node.args[0], self.numbers)
        if seconds is not None and not 0 < seconds < MIN_GUARD:
            return True
        above: ast.AST | None = node
        while (above := self.parents.get(id(above))) is not None:
            if isinstance(above, ast.While):
                return True
            if isinstance(above, Function | ast.Lambda | ast.For | ast.AsyncFor):
                return False
        return False


def limits_in(helper: Function) -> set[str]:
    """Return the names after whose seconds a helper gives up."""
    limits: list[ast.AST] = []
    for node in ast.walk(helper):
        if isinstance(node, ast.Call):
            place = PLACE_OF_LIMIT.get(name_of(node.func), -1)
            limits += node.args[place : place + 1] if place >= 0 else []
            limits += [each.value for each in node.keywords if (each.arg or "").endswith("timeout")]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.left, ast.Call):
            limits += [node.right] if name_of(node.left.func) in CLOCKS | SHORT_CLOCKS else []
    return {node.id for node in limits if isinstance(node, ast.Name)}


def bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each name or attribute that a node binds, with its value."""
    if isinstance(node, ast.Assign):
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        pairs = [(node.target, node.value)]
    else:
        return
    for target, value in pairs:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, value
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield from ((each, value) for each in target.elts)


def defaults(function: Function) -> Iterator[tuple[str, float]]:
    """Yield the arguments that are numbers by default."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    given = zip(positional[len(positional) - len(spec.defaults) :], spec.defaults, strict=True)
    for argument, default in [*given, *zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]:
        value = number(default, {})
        if value is not None:
            yield argument.arg, value
