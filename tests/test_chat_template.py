"""Chat templates render as in transformers: those of the model families, and everything that a template can use."""

import json
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanovllm.checkpoints.chat_template import PLAIN_TEMPLATE, loops_over_content, read_template, render_chat
from nanovllm.checkpoints.tokenizer import HFTokenizer, load_tokenizer
from nanovllm.tests.testing.tokenizers import write_form
from tests.helpers import ROOT

FOLDER = ROOT / "nanovllm" / "tests" / "data" / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in FOLDER.glob("*.jinja")}
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


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": "a <b>", "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string", "description": 'é "quoted" <b>'}, days={"type": "integer"})
SEARCH = tool("search")


def some_chat(rng: random.Random) -> list[dict[str, Any]]:
    """Return random turns with tool calls, their results and reasoning, in orders that some templates reject."""
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
        values["tools"] = [WEATHER, SEARCH][: rng.randint(1, 2)]
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
            assert got == expected, "the template's own message"
        assert got[0] == expected[0] and (got[0] == "error" or got[1] == expected[1])
        without_prompt = {"add_generation_prompt": False} | values
        assert outcome(render_chat, ours, chat, **without_prompt)[1] == got[1], (
            "there is nothing to convert in these messages"
        )
        num_texts += got[0] == "text"
    assert num_texts > count // 3


def test_token_ids_of_a_chat_are_as_in_transformers(ours, theirs):
    chat = [USER, {"role": "assistant", "content": "Hello"}, USER]
    values = {"chat_template": TEMPLATES["llama3"], "add_generation_prompt": True}
    assert ours.apply_chat_template(chat, **values).input_ids == theirs.apply_chat_template(chat, **values).input_ids
    ids = ours.apply_chat_template(chat, return_dict=False, **values)
    assert ids == theirs.apply_chat_template(chat, return_dict=False, **values) and ids.count(ours.bos_token_id) == 1


# What a template can use


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
def test_sandbox_allows_what_transformers_allows(ours, theirs, template, message):
    values = {"chat_template": template, "tokenize": False}
    got, expected = (outcome(each.apply_chat_template, [message], **values) for each in (ours, theirs_of(theirs)))
    assert got == expected or (got[0] == expected[0] == "error" and "namespace" in got[1])


def theirs_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a tokenizer whose messages are dicts: transformers does not accept dataclasses."""

    class Converted:
        def apply_chat_template(self, chat: list[Any], **values: Any) -> Any:
            return tokenizer.apply_chat_template([vars(m) if isinstance(m, Turn) else m for m in chat], **values)

    return Converted()


@pytest.mark.parametrize(
    "template, error",
    [
        ("{% if %}", "line 1 of the chat template: Expected an expression, got 'end of statement block'"),
        ("a\n{% for %}", "line 2 of the chat template: "),
        ("{{ a.b.c }}", "'a' is undefined"),
        ("{{ range(10 ** 9) | list }}", "the chat template cannot be rendered: OverflowError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template cannot be rendered: RecursionError"),
        ("{{ 1 / 0 }}", "the chat template cannot be rendered: ZeroDivisionError: division by zero"),
        ("{{ raise_exception('No system, please.') }}", "No system, please."),
    ],
)
def test_failing_template_is_an_error_of_one_line(ours, template, error):
    with pytest.raises(ValueError) as raised:
        render_chat(ours, [USER], chat_template=template)
    assert str(raised.value).startswith(error) and "\n" not in str(raised.value)


# Messages in OpenAI's form

PARTS = [{"type": "text", "text": "Look:"}, "and", {"type": "input_text", "text": "say."}]
ECHO = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_parts_become_one_text_unless_the_template_loops_over_them(ours, theirs):
    chat = [{"role": "user", "content": PARTS}, {"role": "tool", "content": PARTS[:1]}]
    assert render_chat(ours, chat, chat_template=ECHO) == "<user>Look:\nand\nsay.<tool>Look:"
    through = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    through += "[{{ part.type }} {{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    assert render_chat(ours, chat, chat_template=through) == "[text Look:][text and][text say.]Look:"
    assert not loops_over_content(ECHO) and loops_over_content(through) and loops_over_content(TEMPLATES["features"])
    assert not any(map(loops_over_content, (TEMPLATES[name] for name in ("llama3", "qwen25", "qwen3", "mistral"))))


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_error_names_the_type_of_unsupported_parts(ours, kind):
    chat = [USER, {"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}]
    with pytest.raises(ValueError, match=f"message 1: content parts of type '{kind}' are not supported"):
        render_chat(ours, chat, chat_template=ECHO)


def test_tool_arguments_become_dicts(ours):
    def call(arguments: Any) -> str:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
        return render_chat(ours, chat, chat_template="{{ messages[1].tool_calls[0].function.arguments | tojson }}")

    assert [call(given) for given in ('{"a": [1]}', {"a": 1}, "", "broken{", "3")] == [
        '{"a": [1]}',
        '{"a": 1}',
        *["{}"] * 3,
    ]


def test_developer_becomes_system_if_the_template_does_not_know_the_role(ours):
    chat = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}]
    assert render_chat(ours, chat, chat_template=ECHO) == "<system>a\n\nb<user>Hi"
    assert render_chat(ours, chat, chat_template=ECHO + "{# 'developer' #}") == "<system>a<user>Hi<developer>b"


@pytest.mark.parametrize(
    "messages, values, error",
    [
        ([], {}, "messages must have at least 1 message, got 0"),
        ("Hi", {}, "messages must be a list of messages, got str"),
        (["Hi"], {}, "message 0 must be like "),
        ([{"role": "user", "content": 5}], {}, "message 0: content must be a string or a list of parts, got int"),
        ([USER], {"tools": [SEARCH, 3]}, "tools[1] must be a dictionary, got int"),
        ([USER], {"tools": {}}, "tools must be a list, got dict"),
        ([USER], {"documents": ["x"]}, "documents[0] must be a dictionary, got str"),
        ([USER], {"continue_final_message": True}, "continue_final_message and add_generation_prompt"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "message 0: a content part of type 'text' must have a"),
        ([{"role": "assistant", "tool_calls": [1]}], {}, "message 0: a tool call must be like "),
    ],
)
def test_invalid_conversation_is_an_error_of_one_line(ours, messages, values, error):
    with pytest.raises(ValueError) as raised:
        render_chat(ours, messages, chat_template=ECHO, **values)
    assert str(raised.value).startswith(error)


# Where templates come from

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
PLACES: dict[str, dict[str, Any]] = {
    "none": {},
    "config": {"tokenizer_config.json": {"chat_template": "C"}},
    "list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "without a default": {"tokenizer_config.json": {"chat_template": NAMED[1:]}},
    "file": {"tokenizer_config.json": {"chat_template": "C"}, "chat_template.jinja": "J\n"},
    "files": {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "A", "x.jinja": "X"},
    "others": {"tokenizer_config.json": {"chat_template": "C"}, "additional_chat_templates/rag.jinja": "A"},
}


@pytest.mark.parametrize("place", PLACES)
def test_finds_templates_as_transformers_does(tmp_path, place):
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


def test_chat_template_json_is_the_last_resort(tmp_path):
    folder = write_form(tmp_path, "llama3")
    (folder / "chat_template.json").write_text('{"chat_template": "P"}')
    assert render_chat(load_tokenizer(folder), [USER]) == "P"


def test_missing_template_is_an_error(ours):
    with pytest.raises(ValueError, match="the checkpoint has no chat template: pass one as chat_template"):
        render_chat(ours, [USER])


def test_read_template_takes_text_a_file_or_plain(tmp_path):
    path = tmp_path / "a.jinja"
    path.write_text("a{# b #}")
    assert read_template(str(path)) == read_template(path) == read_template("a{# b #}") == "a{# b #}"
    assert read_template("plain") == PLAIN_TEMPLATE and read_template(None) is None
    (tmp_path / "empty.jinja").write_text("\n")
    with pytest.raises(ValueError, match=r"chat template .*empty\.jinja is empty"):
        read_template(str(tmp_path / "empty.jinja"))
    with pytest.raises(ValueError, match=r"chat template missing\.jinja cannot be read"):
        read_template("missing.jinja")
