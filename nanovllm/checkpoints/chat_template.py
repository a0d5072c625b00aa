"""Turn the messages of a conversation into a prompt, with the checkpoint's chat template, as transformers does.

render_chat() takes messages in OpenAI's form, and apply_chat_template() takes them in the template's form. A template
is a program from the internet, so it runs in jinja2's sandbox, and its variables have only JSON's types. As in
transformers and vLLM, its running time is not limited.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .entries import Entries, shorten

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # of a message; the first one that is set counts
# For each type of content part, the key of its text
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the last message in a rendered text
PLAIN_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
PLAIN_STOP = ("\nUser:", "\nSystem:", "\nAssistant:")  # stop strings: a base model would write the user's turns, too

JsonDict = dict[str, Any]


class HasChatTemplate(Protocol):
    """A tokenizer with one chat template, or several by name, and the special tokens that templates use."""

    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]


def render_chat(
    tokenizer: HasChatTemplate,
    messages: Sequence[Any],
    /,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """Return the prompt of a conversation in OpenAI's form, which allows content in parts and tool arguments as JSON.

    `options` are passed to apply_chat_template(). Raise ValueError for a conversation that the template cannot render,
    with the template's own message if it raises one.
    """
    template = choose_template(tokenizer, chat_template, tools)
    return apply_chat_template(
        tokenizer,
        convert_messages(check_messages(messages), template),
        chat_template=template,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **options,
    )


def apply_chat_template(
    tokenizer: HasChatTemplate,
    messages: Sequence[Any],
    /,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    **kwargs: Any,
) -> str:
    """Return the prompt of a conversation whose messages already have the form that the template expects.

    `kwargs` are variables for the template, such as enable_thinking. They override the tokenizer's special tokens.
    With `continue_final_message`, the prompt ends where the last message's content ends, or the field that it names.
    """
    if "messages" in kwargs:
        raise ValueError("chat_template_kwargs must not contain messages, which is the conversation itself")
    template = choose_template(tokenizer, chat_template, tools)
    chat = [add_reasoning_keys(message) for message in check_messages(messages)]
    field = "content" if continue_final_message is True else continue_final_message
    if field and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt must not both be set")
    last_text = mark_end(chat[-1], field, template) if field else ""
    variables = {
        "messages": chat,
        "tools": check_dicts("tools", tools),
        "documents": check_dicts("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    text = render(template, {**tokenizer.special_tokens_map, **to_plain(kwargs), **variables})
    return cut_at_tag(text, last_text) if field else text


def check_messages(messages: Sequence[Any]) -> list[JsonDict]:
    """Return copies of the messages without their None entries. Raise ValueError unless they are a list of dicts."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must have at least 1 message, got 0")
    chat = [to_plain(message) for message in messages]
    for i, message in enumerate(chat):
        if not isinstance(message, dict):
            raise ValueError(f'message {i} must be like {{"role": "user", "content": ...}}, got {shorten(messages[i])}')
    return [{name: value for name, value in message.items() if value is not None} for message in chat]


def check_dicts(name: str, values: Sequence[Mapping[str, Any]] | None) -> list[JsonDict] | None:
    """Return copies of tools or documents. Raise ValueError, naming the argument, if they are not dictionaries."""
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} must be a list, got {type(values).__name__}")
    for i, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}[{i}] must be a dictionary, got {type(value).__name__}")
    return [to_plain(value) for value in values]


def to_plain(value: Any) -> Any:
    """Return a copy of `value` in JSON's types. An object of any other type is replaced by the name of its type.

    >>> to_plain({"content": ("a", 1, None), "image": object()})
    {'content': ['a', 1, None], 'image': '<object>'}
    """
    from pydantic_core import to_jsonable_python  # lazily, as an engine without chats doesn't need pydantic

    return to_jsonable_python(value, fallback=lambda unknown: f"<{type(unknown).__name__}>")


# Messages in OpenAI's form


def convert_messages(messages: list[JsonDict], template: str) -> list[JsonDict]:
    """Return the messages in the form that vLLM passes to a template.

    Content in parts is joined into one string, unless the template itself loops over parts. Tool arguments become
    dicts. If the template does not support developer messages, they are merged with the system messages into one.
    Raise ValueError for a part that is not text.
    """
    keeps_parts = loops_over_content(template)
    converted = []
    for i, message in enumerate(messages):
        content = message.get("content", [])
        if keeps_parts and message.get("role") != "tool" and not isinstance(content, str):
            content = [{"type": "text", "text": text} for text in part_texts(content, f"message {i}")]
        else:
            content = content_text(content, f"message {i}")
        converted.append(parse_tool_calls({**message, "content": content}, i))
    supports_developer = "'developer'" in template or '"developer"' in template
    has_developer = any(message.get("role") == "developer" for message in converted)
    return merge_system_messages(converted) if has_developer and not supports_developer else converted


def content_text(content: Any, origin: str) -> str:
    """Return a message's content as one string, with a line per part.

    Raise ValueError if a part is not text. The error begins with `origin`, such as "message 3".
    """
    return content if isinstance(content, str) else "\n".join(part_texts(content, origin))


def part_texts(content: Any, origin: str) -> list[str]:
    """Return the text of each part of a message's content. Raise ValueError if a part is not text."""
    content = to_plain(content)
    if not isinstance(content, list | tuple):
        raise ValueError(f"{origin}: content must be a string or a list of parts, got {type(content).__name__}")
    return [part_text(part, origin) for part in content]


def part_text(part: Any, origin: str) -> str:
    """Return the text of one part, which is a string or a dict such as {"type": "text", "text": "Hi"}."""
    if isinstance(part, str):
        return part
    part_type = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    key = TEXT_KEYS.get(part_type) if isinstance(part, dict) else None
    if key is None:
        raise ValueError(f"{origin}: content parts of type {part_type!r} are not supported; the model reads only text")
    text = part.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{origin}: a content part of type {part_type!r} must have a string as its {key!r}")
    return text


def merge_system_messages(messages: list[JsonDict]) -> list[JsonDict]:
    """Merge developer and system messages into one system message at the start."""
    systems = [message for message in messages if message.get("role") in ("system", "developer")]
    texts = [content_text(message["content"], "a system message") for message in systems]
    others = [message for message in messages if message.get("role") not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def parse_tool_calls(message: JsonDict, i: int) -> JsonDict:
    """Return message `i` with the arguments of its tool calls as dicts. An empty list of calls is dropped."""
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return message
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    converted = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f'message {i}: a tool call must be like {{"type": "function", "function": {{...}}}}')
        converted.append({**call, "function": {**function, "arguments": parse_arguments(function.get("arguments"))}})
    return {**message, "tool_calls": converted}


def parse_arguments(value: Any) -> JsonDict:
    """Return the arguments of a call, or an empty dict if the model wrote no valid JSON object."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@lru_cache(maxsize=32)
def loops_over_content(template: str) -> bool:
    """Return whether the template loops over a message's content.

    >>> loops_over_content("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}")
    True
    >>> loops_over_content("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    False
    """
    tree = parse_template(template)
    variables = {"content"}  # names of those that hold a message's content
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node, variables):
            variables.add(assign.target.name)
    for macro in tree.find_all(nodes.Macro):
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                pairs = zip(call.args, macro.args, strict=False)
                variables |= {parameter.name for argument, parameter in pairs if is_content(argument, variables)}
    return any(is_content(loop.iter, variables) for loop in tree.find_all(nodes.For))


def is_content(node: nodes.Node | None, variables: set[str]) -> bool:
    """Return whether an expression is a message's content, or one of the `variables` that hold a message's content."""
    while isinstance(node, nodes.Filter | nodes.Test):
        node = node.node
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return is_content(node.node, variables)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in variables


# Reasoning, and continuation of the last message


def add_reasoning_keys(message: JsonDict) -> JsonDict:
    """Return a message with its reasoning under both keys that templates read: thinking and reasoning_content."""
    reasoning = next((message[name] for name in REASONING_KEYS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def mark_end(message: JsonDict, field: str, template: str) -> str:
    """Append END_TAG to the text in `field` of the last message, and return that text without the tag.

    Raise ValueError if there is no such text, or if the template does not use it.
    """
    value = message.get(field)
    keys = [key for key in REASONING_KEYS if message.get(key) == value] if field in REASONING_KEYS else [field]
    if value is None:
        raise ValueError(f"continue_final_message: the last message has no {field} to continue")
    if not any(key in template for key in keys):
        raise ValueError(f"continue_final_message: the chat template does not use {field}")
    if isinstance(value, str):
        message.update({key: value + END_TAG for key in keys})
        return value
    part = next((part for part in reversed(value) if isinstance(part, dict) and "text" in part), None)
    if part is None:
        raise ValueError("continue_final_message: the last message has no text to continue")
    text: str = part["text"]
    part["text"] = text + END_TAG
    return text


def cut_at_tag(text: str, last_text: str) -> str:
    """Return the rendered text up to END_TAG, which marks the end of `last_text`, the text to continue.

    Raise ValueError if the template has dropped either of them.
    """
    if last_text.strip() not in text or END_TAG.strip() not in text:
        raise ValueError("continue_final_message: the chat template drops the end of the last message")
    end = text.rindex(END_TAG.strip())
    is_untrimmed = text.startswith(END_TAG, end)
    return text[:end] if is_untrimmed else text[:end].rstrip()  # trim the message as the template trimmed the tag


# Choosing and reading a template


def choose_template(tokenizer: HasChatTemplate, chat_template: str | None, tools: object) -> str:
    """Return the template to use. `chat_template` is a template, or the name of one of the tokenizer's templates.

    If `chat_template` is None, return the tokenizer's template; if it has several, return "tool_use" if there are
    tools, or else "default". Raise ValueError if there is none.
    """
    if chat_template is not None and not isinstance(chat_template, str):
        raise ValueError(f"chat_template must be a string, got {type(chat_template).__name__}")
    stored = tokenizer.chat_template
    if isinstance(stored, dict):
        if chat_template is None and tools is not None and "tool_use" in stored:
            return stored["tool_use"]
        if chat_template is None and "default" not in stored:
            raise ValueError(f"the checkpoint has no default chat template: choose one of {', '.join(sorted(stored))}")
        return stored["default"] if chat_template is None else stored.get(chat_template, chat_template)
    template = stored if chat_template is None else chat_template
    if template is None:
        raise ValueError("the checkpoint has no chat template: pass one as chat_template")
    return template


def read_template(template: str | Path | None) -> str | None:
    """Return a template given as text, as a file name, or as "plain", which stands for PLAIN_TEMPLATE.

    Return None for None. Raise ValueError if the file cannot be read or is empty.
    """
    if not isinstance(template, str | Path | None):
        raise ValueError(f"chat_template must be a template or the name of a file, got {template!r}")
    if template == "plain":
        return PLAIN_TEMPLATE
    if template is None or (isinstance(template, str) and any(character in template for character in "{}\n")):
        return template
    text = read_text(Path(template))
    if not text.strip():
        raise ValueError(f"chat template {template} is empty")
    return text


def find_chat_template(folder: Path, config: Entries) -> str | dict[str, str] | None:
    """Return a folder's chat template, a dict of several by name, or None if it has none.

    .jinja files override `config`, the folder's tokenizer_config.json, which overrides chat_template.json.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja"} | files
    templates = {name: read_text(path) for name, path in files.items()}
    if templates:
        return templates["default"] if [*templates] == ["default"] else templates
    legacy = Entries.read_if_exists(folder / "chat_template.json")
    source = config if "chat_template" in config else legacy
    value = source.values.get("chat_template")
    if isinstance(value, list):
        items = [Entries({"": item}, source.path, f"chat_template[{i}]").entries("") for i, item in enumerate(value)]
        return {item.text("name"): item.text("template") for item in items}
    if isinstance(value, dict):
        return {name: source.entries("chat_template").text(name) for name in value}
    return source.text("chat_template") if value else None


def read_text(path: Path) -> str:
    """Return the text of a template file. Raise ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat template {path} cannot be read: {error}") from None


# Rendering a template


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the rendered template. Raise ValueError if it fails, with the template's own message if it raises one."""
    try:
        return compile_template(template).render(variables)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from None
    except TemplateError as error:
        raise ValueError(str(error)) from None
    except (Exception, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ValueError(f"the chat template cannot be rendered: {reason}") from None


def parse_template(template: str) -> nodes.Template:
    """Return the syntax tree of a template. Raise ValueError, naming the line, for a syntax error."""
    try:
        return ENVIRONMENT.parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from None


@lru_cache(maxsize=32)
def compile_template(template: str) -> Template:
    """Compile a template, and cache the result."""
    return ENVIRONMENT.from_string(template)


class GenerationTag(Extension):
    """The tag {% generation %} ... {% endgeneration %}, which marks the assistant's text. Only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag into a call block, so that its body has a separate scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Callable[[], str]) -> str:
        """Return the rendered body."""
        return caller()


class TemplateDict:
    """The `dict` function that templates call. The dict class itself would let them bypass the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> JsonDict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> JsonDict:
        """Return dict.fromkeys(*args)."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """jinja2's namespace, which here rejects names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may use that name for a variable
        values = dict(*args[1:], **kwargs)
        for name in values:
            reject_private(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        reject_private(name)
        super().__setitem__(name, value)


def reject_private(name: Any) -> None:
    """Raise SecurityError for a name that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template must not contain the private name {name!r}")


def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `x` as JSON. jinja2's own filter would escape characters that are special in HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Raise an error with the template's own message."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the current time, formatted."""
    return datetime.now().strftime(format)


EXTENSIONS = (GenerationTag, loopcontrols)
# jinja2's sandbox, with the functions that transformers offers to templates
ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
ENVIRONMENT.filters["tojson"] = to_json
ENVIRONMENT.globals |= {
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
    "dict": TemplateDict(),
    "namespace": TemplateNamespace,
}
