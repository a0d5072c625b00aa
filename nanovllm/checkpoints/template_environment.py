"""Where a chat template runs: jinja's sandbox, with the functions that transformers gives to templates, and limits.

A template is a program from a stranger. It may not loop or call itself for longer than MAX_SECONDS, nor write or keep
more than MAX_LENGTH characters. One filter that makes a huge text at once is stopped by the machine's memory alone.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 10.0
MAX_LENGTH = 2**24  # characters of a text, and of all that is written
MAX_ITEMS = 2**20  # of a list
MAX_BITS = 2**12  # of a number


@dataclass
class Budget:
    """What is left to a template that runs."""

    ends: float
    num_characters: int = MAX_LENGTH


BUDGET: ContextVar[Budget] = ContextVar("budget")


class Stopped(TemplateError):
    """The template has reached a limit."""


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant says; the text is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body_of"), [], [], body).set_lineno(line)

    def body_of(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.filters |= {"tojson": to_json, "bounded": bounded}
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }
        self.tick, self.bounded, self.written = tick, bounded, written

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Let loops and macros look at the clock, and whatever keeps or writes a text at its length."""
        for block in list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            block.body.insert(0, nodes.ExprStmt(own("tick")))  # type: ignore[attr-defined]
        for assign in list(source.find_all(nodes.Assign)):
            assign.node = own("bounded", assign.node)
        for block in list(source.find_all(nodes.AssignBlock)):
            block.filter = nodes.Filter(block.filter, "bounded", [], [], None, None)
        for output in list(source.find_all(nodes.Output)):
            output.nodes = [own("written", node) for node in output.nodes]
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        tick()
        return bounded(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Judge the size of a product before it is made."""
        numbers = [each for each in (left, right) if isinstance(each, int)]
        sized = [len(each) for each in (left, right) if isinstance(each, str | list | tuple)]
        if operator == "*" and sized and numbers and sized[0] * numbers[0] > MAX_ITEMS:
            raise Stopped(f"the chat template repeats something to a length of {sized[0] * numbers[0]}")
        bits = [number.bit_length() for number in numbers]
        if len(bits) == 2 and (sum(bits) if operator == "*" else bits[0] * right) > MAX_BITS and operator != "+":
            raise Stopped(f"the chat template computes a number of more than {MAX_BITS} bits")
        return bounded(super().call_binop(context, operator, left, right))


def own(name: str, *args: nodes.Node) -> nodes.Call:
    """Return the call of one of the environment's own functions."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)  # type: ignore[arg-type]


def tick() -> None:
    if time.monotonic() > BUDGET.get().ends:
        raise Stopped(f"the chat template has not ended after {MAX_SECONDS:.0f} seconds")


def bounded(value: Any) -> Any:
    """`value`, if it is not too long."""
    most = MAX_LENGTH if isinstance(value, str) else MAX_ITEMS
    if isinstance(value, str | list | tuple) and len(value) > most:
        raise Stopped(f"the chat template makes a {type(value).__name__} of {len(value)}, at most {most} are allowed")
    return value


def written(value: Any) -> Any:
    """`value`, if it is not too long in sum with all that was written before."""
    budget = BUDGET.get()
    budget.num_characters -= len(value) if isinstance(value, str) else 0
    if budget.num_characters < 0:
        raise Stopped(f"the chat template writes more than {MAX_LENGTH} characters")
    return value


def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja's own, which escapes what HTML would misread."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class TemplateDict:
    """dict, but not the class itself, which would be a way out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """jinja's namespace, but without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name one of them self
        values = dict(*args[1:], **kwargs)
        for name in values:
            check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template may not have the name {name!r}")


ENVIRONMENT = ChatEnvironment()


@lru_cache(maxsize=32)
def compiled(template: str) -> Template:
    return ENVIRONMENT.from_string(template)


def parse(template: str) -> nodes.Template:
    try:
        return ENVIRONMENT.parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from None


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template. Raise ValueError, in the template's own words if it raises."""
    before = BUDGET.set(Budget(time.monotonic() + MAX_SECONDS))
    try:
        return compiled(template).render(values)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from None
    except TemplateError as error:
        raise ValueError(str(error)) from None
    except (Exception, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ValueError(f"the chat template cannot be rendered: {reason}") from None
    finally:
        BUDGET.reset(before)
