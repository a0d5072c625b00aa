"""Chat templates render as in transformers: the families' own, and all that a template may use."""

import json
import random
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from nanovllm.checkpoints import template_environment
from nanovllm.checkpoints.chat_template import reads_parts, render_chat
from nanovllm.checkpoints.tokenizer import HFTokenizer, load_tokenizer
from nanovllm.checkpoints.tool_schema import function_schema
from nanovllm.tests.made_tokenizers import write_form

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_form(tmp_path_factory.mktemp("chat"), "llama3")


@pytest.fixture(scope="module")
def ours(folder: Path) -> HFTokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def weather(city: str, days: int = 3, unit: str | None = None) -> list[float]:
    """
    Tell the weather.

    Args:
        city: The city, é "quoted" <b>
        days: How many days,
            at most 7
        unit: A unit (choices: ["C", "F "])

    Returns:
        Degrees of each day.
    """


SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {"name": "search", "description": "a <b>", "parameters": {"type": "object"}},
}


def some_chat(rng: random.Random) -> list[dict[str, Any]]:
    """Turns that may be out of order for a template; with calls, their results, and thoughts."""
    chat: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        chat.append({"role": "system", "content": rng.choice(["Be kind. ", "  x\n", 'é "q"'])})
    for _ in range(rng.randint(1, 4)):
        text = rng.choice([" Hi", "What?\n", "<tool_response>x</tool_response>", "{{ x }} 🙂", "a"])
        chat.append({"role": "user", "content": text})
        kind = rng.random()
        if kind < 0.3:
            arguments = rng.choice([{"city": "Köln", "days": "2"}, {}, {"unit": "C"}])
            function = {"name": "weather", "arguments": arguments}
            ids = [f"abcdefgh{i}" for i in range(rng.choice([1, 1, 2]))]
            calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
            chat.append({"role": "assistant", "content": rng.choice([None, "", "Let me see."]), "tool_calls": calls})
            for call_id in ids:
                chat.append({"role": "tool", "tool_call_id": call_id, "name": "weather", "content": "[1.5, 2]"})
            chat.append({"role": "assistant", "content": "It is sunny. "})
        elif kind < 0.8:
            answer = rng.choice(["Hello. ", "<think>\nhm\n</think>\n\nYes", "No"])
            thoughts = {rng.choice(["reasoning_content", "reasoning", "thinking"]): "thoughts\n"}
            chat.append({"role": "assistant", "content": answer} | (thoughts if rng.random() < 0.3 else {}))
    return chat


def some_values(rng: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if rng.random() < 0.4:
        values["tools"] = [weather, SEARCH][: rng.randint(1, 2)]
    if rng.random() < 0.2:
        values["documents"] = [{"title": "a", "text": "b"}, {"text": "c"}, {"title": "d", "text": "e"}]
    if rng.random() < 0.2:
        values["enable_thinking"] = rng.random() < 0.5
    if rng.random() < 0.2:
        values["tools_in_user_message"] = False
    if rng.random() < 0.1:
        values["builtin_tools"] = ["code_interpreter", "weather"]
    return values | rng.choice([{}, {"add_generation_prompt": True}, {"continue_final_message": True}])


def outcome(render: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        return "text", render(*args, **kwargs)
    except Exception as error:
        return "error", str(error)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_render_as_in_transformers(ours, theirs, name, count):
    rng, num_texts = random.Random(name), 0
    for _ in range(count):
        chat, values = some_chat(rng), some_values(rng)
        values["chat_template"] = TEMPLATES[name]
        got = outcome(ours.apply_chat_template, chat, tokenize=False, **values)
        expected = outcome(theirs.apply_chat_template, chat, tokenize=False, **values)
        if expected[0] == "error" and "continue_final_message" not in expected[1]:
            assert got == expected, "a template's own words"
        assert got[0] == expected[0] and (got[0] == "error" or got[1] == expected[1])
        without_prompt = {"add_generation_prompt": False} | values
        assert outcome(render_chat, ours, chat, **without_prompt)[1] == got[1], "nothing here is to be converted"
        num_texts += got[0] == "text"
    assert num_texts > count // 3


def test_token_ids_of_a_chat_are_as_in_transformers(ours, theirs):
    chat = [USER, {"role": "assistant", "content": "Hello"}, USER]
    values = {"chat_template": TEMPLATES["llama3"], "add_generation_prompt": True}
    assert ours.apply_chat_template(chat, **values).input_ids == theirs.apply_chat_template(chat, **values).input_ids
    ids = ours.apply_chat_template(chat, return_dict=False, **values)
    assert ids == theirs.apply_chat_template(chat, return_dict=False, **values) and ids.count(ours.bos_token_id) == 1


# What a template may use


@dataclass
class Turn:
    role: str
    content: str


class Role(StrEnum):
    USER = "user"


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}",
        "{{ strftime_now('%Y') }} {{ messages[0].role }} {{ messages[0]['content'] | tojson }}",
        "{%- for m in messages -%}\n  {{ m.role }}\n  {%- endfor %}\n\n{# a #}\n  {% if true %}\nx\n  {% endif %}\n",
        "{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}",
        "{% for i in range(5) %}{{ i }}{% if i > 2 %}{% break %}{% endif %}{% continue %}-{% endfor %}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}",
        "{{ dict.fromkeys('ab', 1) }}{{ dict(a=1).items() | list }}",
        "{{ missing }}|{{ missing | default('x') }}|{{ tools is none }}|{{ documents }}|{{ add_generation_prompt }}",
        "{{ 'a,b'.split(',') | join('-') }} {{ messages | length * 2 }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] + [2] }}",
        "{% macro f(x, y='d') %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call f(2) %}c{% endcall %}",
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}{% filter upper %}x{% endfilter %}",
        "{% for a in [[1, [2, [3]]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
        "{% set x | upper %}a{{ messages[0].content }}{% endset %}{{ x }}{% with y = 2 %}{{ y }}{% endwith %}",
        "{{ raise_exception('no ' ~ messages[0].role) }}",
        "{{ ().__class__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{{ messages[0].content.upper.__globals__ }}",
    ],
)
@pytest.mark.parametrize("message", [USER, Turn("user", "é"), {"role": Role.USER, "content": np.str_("n")}])
def test_what_a_template_may_use_and_may_not(ours, theirs, template, message):
    values = {"chat_template": template, "tokenize": False}
    got, expected = (outcome(each.apply_chat_template, [message], **values) for each in (ours, theirs_of(theirs)))
    assert got == expected or (got[0] == expected[0] == "error" and "namespace" in got[1])


def theirs_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """transformers drops what is None of a message's items before it makes a dict of a dataclass."""

    class Converted:
        def apply_chat_template(self, chat: list[Any], **values: Any) -> Any:
            return tokenizer.apply_chat_template([vars(m) if isinstance(m, Turn) else m for m in chat], **values)

    return Converted()


DOUBLING = "{% set n = namespace(s=START) %}{% for i in range(99) %}{% set n.s HOW %}{% endfor %}"
LIMITS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a text that doubles": DOUBLING.replace("START", "'xy'").replace("HOW", "= n.s ~ n.s"),
    "a sum that doubles": DOUBLING.replace("START", "'xy'").replace("HOW", "= n.s + n.s"),
    "a list that doubles": DOUBLING.replace("START", "[0]").replace("HOW", "= n.s + n.s"),
    "a block that doubles": DOUBLING.replace("START", "'xy'").replace("HOW", "%}{{ n.s }}{{ n.s }}{% endset"),
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a list's product": "{{ [0] * 10 ** 10 }}",
    "a number": "{{ 10 ** (10 ** 8) }}",
    "a range": "{{ range(10 ** 9) | list }}",
    "what is written": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "words": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_template_that_has_no_end_is_stopped(ours, monkeypatch, what):
    monkeypatch.setattr(template_environment, "MAX_SECONDS", 0.2)
    with pytest.raises(ValueError) as raised:
        render_chat(ours, [USER], chat_template=LIMITS[what])
    assert str(raised.value).startswith("the chat template ") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "template, error",
    [
        ("{% if %}", "line 1 of the chat template: Expected an expression, got 'end of statement block'"),
        ("a\n{% for %}", "line 2 of the chat template: "),
        ("{{ a.b.c }}", "'a' is undefined"),
        ("{{ 1 / 0 }}", "the chat template cannot be rendered: ZeroDivisionError: division by zero"),
        ("{{ raise_exception('No system, please.') }}", "No system, please."),
    ],
)
def test_a_template_that_fails_is_one_line(ours, template, error):
    with pytest.raises(ValueError) as raised:
        render_chat(ours, [USER], chat_template=template)
    assert str(raised.value).startswith(error)


# Messages as OpenAI's interface has them

PARTS = [{"type": "text", "text": "Look:"}, "and", {"type": "input_text", "text": "say."}]
ECHO = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_parts_are_one_text_unless_the_template_goes_through_them(ours, theirs):
    chat = [{"role": "user", "content": PARTS}, {"role": "tool", "content": PARTS[:1]}]
    assert render_chat(ours, chat, chat_template=ECHO) == "<user>Look:\nand\nsay.<tool>Look:"
    through = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    through += "[{{ part.type }} {{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    assert render_chat(ours, chat, chat_template=through) == "[text Look:][text and][text say.]Look:"
    assert not reads_parts(ECHO) and reads_parts(through) and reads_parts(TEMPLATES["features"])
    assert not any(map(reads_parts, (TEMPLATES[name] for name in ("llama3", "qwen25", "qwen3", "mistral"))))


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_a_part_that_is_no_text_is_refused_by_name(ours, kind):
    chat = [USER, {"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}]
    with pytest.raises(ValueError, match=f"message 1: a part of type '{kind}' is no text"):
        render_chat(ours, chat, chat_template=ECHO)


def test_arguments_in_json_become_dicts(ours):
    def call(arguments: Any) -> str:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
        return render_chat(ours, chat, chat_template="{{ messages[1].tool_calls[0].function.arguments | tojson }}")

    assert [call(given) for given in ('{"a": [1]}', {"a": 1}, "", "broken{", "3")] == [
        '{"a": [1]}',
        '{"a": 1}',
        *["{}"] * 3,
    ]


def test_a_developer_is_the_system_where_the_template_knows_none(ours):
    chat = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}]
    assert render_chat(ours, chat, chat_template=ECHO) == "<system>a\n\nb<user>Hi"
    assert render_chat(ours, chat, chat_template=ECHO + "{# 'developer' #}") == "<system>a<user>Hi<developer>b"


@pytest.mark.parametrize(
    "messages, values, error",
    [
        ([], {}, "the conversation is empty: at least 1 message is needed"),
        ("Hi", {}, "messages must be a list of messages, not str"),
        (["Hi"], {}, "message 0 must be as "),
        ([{"role": "user", "content": 5}], {}, "message 0: content must be a text or a list of parts, not int"),
        ([USER], {"tools": [3]}, "a tool must be a JSON schema or a function, not int"),
        ([USER], {"documents": ["x"]}, "a document must be as "),
        ([USER], {"continue_final_message": True}, "continue_final_message goes on with the last message"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "message 0: a part of type 'text' must have a text"),
        ([{"role": "assistant", "tool_calls": [1]}], {}, "message 0: a tool call must be as "),
    ],
)
def test_a_conversation_that_is_none_is_one_line(ours, messages, values, error):
    with pytest.raises(ValueError) as raised:
        render_chat(ours, messages, chat_template=ECHO, **values)
    assert str(raised.value).startswith(error)


# Functions as tools


class Colour(Enum):
    RED, BLUE = "red", "blue"


def plain(a: int, b: float, c: bool, d: str, e: list, f: dict, g: tuple, h: Any):
    """All simple types.

    Args:
        a: one
        b: two
        c: three
        d: four: with a colon
        e: five
        f: six
        g: seven
        h: eight
    """


def nested(a: list[list[int]], b: dict[str, float], c: tuple[int, str], d: int | str | None = None) -> str:
    """Nested types.
    Over two lines.

    Args:
        a: one

            with a line between
        b: two
            - item: not an argument
        c: three
        d: four
    """


def chosen(a: Literal["x", 1, None], b: Colour, c: Optional[int] = 3, d: Union[list[int], str, None] = None) -> Path:  # noqa: UP007, UP045
    """Choices.

    Args:
        a: one
        b: two
        c: three (choices: [1, 2])
        d: four

    Returns:
        A path.

    Raises:
        ValueError: never
    """


class Shop:
    def price(self, item: str) -> dict[str, float]:
        """The price.

        Args:
            item: What

        Returns:
            By currency.
        """


@pytest.mark.parametrize(
    "function", [weather, plain, nested, chosen, Shop().price, Shop.price], ids=lambda f: f.__qualname__
)
def test_a_function_becomes_the_schema_that_transformers_makes(function):
    assert json.dumps(function_schema(function)) == json.dumps(get_json_schema(function))


def undocumented(a: int) -> None: ...


def unhinted(a) -> None:
    """No hint.

    Args:
        a: one
    """


def undescribed(a: int) -> None:
    """No description."""


def strange(a: Path) -> None:
    """A strange type.

    Args:
        a: one
    """


@pytest.mark.parametrize(
    "function, error",
    [
        (undocumented, "tool undocumented has no docstring"),
        (unhinted, "tool unhinted: a has no type hint"),
        (undescribed, "tool undescribed: its docstring does not describe a"),
        (strange, "tool strange: the type hint <class 'pathlib.Path'> says nothing in JSON"),
    ],
)
def test_a_function_that_says_too_little_is_refused(function, error):
    with pytest.raises(ValueError, match=error):
        function_schema(function)


# Where a folder keeps its templates

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
PLACES: dict[str, dict[str, Any]] = {
    "nowhere": {},
    "config": {"tokenizer_config.json": {"chat_template": "C"}},
    "list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "without a default": {"tokenizer_config.json": {"chat_template": NAMED[1:]}},
    "file": {"tokenizer_config.json": {"chat_template": "C"}, "chat_template.jinja": "J\n"},
    "files": {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "A", "x.jinja": "X"},
    "others": {"tokenizer_config.json": {"chat_template": "C"}, "additional_chat_templates/rag.jinja": "A"},
}


@pytest.mark.parametrize("place", PLACES)
def test_templates_are_found_as_in_transformers(tmp_path, place):
    folder = write_form(tmp_path, "llama3")
    for name, content in PLACES[place].items():
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".json"):
            content = json.dumps(json.loads((folder / name).read_text()) | content)
        (folder / name).write_text(content)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.chat_template == theirs.chat_template
    for values in ({}, {"tools": [SEARCH]}, {"chat_template": "rag"}, {"chat_template": "{{ messages[0].role }}"}):
        got = outcome(ours.apply_chat_template, [USER], tokenize=False, **values)
        expected = outcome(theirs.apply_chat_template, [USER], tokenize=False, **values)
        assert got[0] == expected[0] and (got[0] == "error" or got == expected), values


def test_a_template_in_chat_template_json_is_the_last_resort(tmp_path):
    folder = write_form(tmp_path, "llama3")
    (folder / "chat_template.json").write_text('{"chat_template": "P"}')
    assert render_chat(load_tokenizer(folder), [USER]) == "P"


def test_a_folder_without_a_template_says_so(ours):
    with pytest.raises(ValueError, match="the checkpoint has no chat template: give one as chat_template"):
        render_chat(ours, [USER])
