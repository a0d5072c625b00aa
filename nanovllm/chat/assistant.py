"""AssistantParser: turn the text of one output, which arrives in pieces, into the parts of a chat message.

    thought -> content -> opening of a call -> call -> end of a call
                  ^                                        |
                  +----------------------------------------+

The message doesn't depend on how the text is split. A call's arguments appear exactly as the model writes them.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from .formats import MessageFormat

MAX_OPENING = 300  # characters before the arguments of a call; a text with more isn't a call
ARGUMENT_KEYS = {"arguments", "parameters"}  # models use one of them for a call's arguments
CALL_KEYS = {"name", "type", "id"} | ARGUMENT_KEYS
# The text between the tag and the first brace of a call: nothing, the "[" of a list, or name[ARGS].
OPENING = re.compile(r"(?:\[\s*)?|([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*")
JSON_CHARACTERS = frozenset(' \t\r\n"{}[]:,0123456789+-.Etruefalsn')  # all that JSON has outside strings


@dataclass(frozen=True)
class ToolCallDelta:
    """The new part of a tool call."""

    index: int  # of the call within the message
    id: str | None = None  # the id and the name are set only in the first part
    name: str | None = None
    arguments: str = ""  # the next characters of the JSON text


@dataclass(frozen=True)
class MessageDelta:
    """The new part of a message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


def read_message(text: str, format: MessageFormat, is_cut: bool = False) -> MessageDelta:
    """Parse a whole output. A malformed call, or one with invalid JSON, becomes content.

    An incomplete call becomes content, too. If the output was cut off (`is_cut`), though, a call whose arguments have
    begun keeps those written so far, and a forced call never becomes content for being incomplete.
    """
    return AssistantParser(format, streams=False).feed(text, is_last=True, is_cut=is_cut)


class AssistantParser:
    """A parser for one output (a sample) of a request.

    Whitespace around a thought and before a call is dropped. Special tokens are dropped everywhere. A call that turns
    out to be malformed before its arguments begin becomes content.
    """

    def __init__(self, format: MessageFormat, *, streams: bool = True) -> None:
        """Prepare to parse an output from its start.

        If `streams`, feed() returns arguments as they arrive. Otherwise, it returns each call in one part, once the
        call is complete, and turns a call whose arguments are not valid JSON into content.
        """
        self._format, self._streams = format, streams
        self._tool_format = None if format.forced else format.tool_format
        thought = format.reasoning_format
        self._thought_start, self._thought_end = (thought.start, thought.end) if thought else ("", "")
        tags = {self._thought_start, self._thought_end, *(self._tool_format.tags if self._tool_format else ())} - {""}
        self._special_tokens = frozenset(format.special_tokens)
        self._ignored_tokens = self._special_tokens - tags
        self._tag_pattern = tag_pattern(self._special_tokens | tags)
        self._unread = ""  # text that may be the beginning of a tag
        self._held: list[str] = []  # whitespace and separators, dropped if a call or the end of a thought follows
        self._raw: list[str] = []  # the text of a call so far, which becomes content if the call is malformed
        self._opening = ""  # the text between the tag of a call and its first brace
        # What feed() returns next:
        self._reasoning, self._content, self._calls = list[str](), list[str](), list[ToolCallDelta]()
        self._num_calls = 0
        self._in_list = self._has_content = self._skips_space = self._takes_bare_call = False
        self._call = CallReader()
        self._state: Callable[[str], str] = self._before_thought
        if thought is None:
            self._begin_content()

    def feed(self, text: str, is_last: bool = False, is_cut: bool = False) -> MessageDelta:
        """Return the part of the message that `text` completes. This part can be empty.

        `is_last` marks the end of the output, so nothing is held back. `is_cut` means that the output was cut off
        there, so its last call may be incomplete.
        """
        *items, last = self._tag_pattern.split(self._unread + text)  # texts and tags alternate
        end = len(last) if is_last else self._tag_pattern.find_partial_tag(last)
        self._unread = last[end:]
        self._read([*items, last[:end]])
        if is_last:
            self._finish(is_cut)
        part = MessageDelta("".join(self._reasoning), "".join(self._content), tuple(self._calls))
        self._reasoning, self._content, self._calls = [], [], []
        return part

    def _finish(self, is_cut: bool) -> None:
        if is_cut and self._state == self._read_call and self._call.counts_as_call(self._format.forced is not None):
            self._pass_on(self._call)
        elif self._state in (self._open_call, self._read_call) and not (is_cut and self._format.forced):
            self._give_up()
        if self._state == self._read_content and not (self._num_calls or self._skips_space):
            self._content += self._held

    def _read(self, items: Sequence[str]) -> None:
        """Pass each text or tag to the current state's method, which returns what the next state must read."""
        for item in items:
            while item and item not in self._ignored_tokens:
                item = self._state(item)

    def _write(self, parts: list[str], text: str) -> None:
        """Add text to `parts`, the list of the thought or of the content. Hold back whitespace at the text's end."""
        if text in self._special_tokens:
            return
        if self._skips_space:
            self._held, text = [], text.lstrip()
        if stripped := text.rstrip():
            parts += [*self._held, stripped]
            self._held, self._skips_space = [], False
            self._has_content |= parts is self._content
        self._held.append(text[len(stripped) :])

    def _hold_space(self, text: str, separators: str = "") -> str:
        """Hold back whitespace and separators at the start of the text, and return the rest."""
        rest = text.lstrip(" \t\r\n" + separators)
        self._held.append(text[: len(text) - len(rest)])
        return rest

    # States

    def _before_thought(self, item: str) -> str:
        if not (text := self._hold_space(item)):
            return ""
        has_tag = text == self._thought_start
        if has_tag or self._format.starts_in_thought:
            self._skips_space, self._state = True, self._read_thought
        else:
            self._begin_content()
        return "" if has_tag else text

    def _read_thought(self, item: str) -> str:
        if item == self._thought_end:
            self._skips_space = True
            self._begin_content()
        else:
            self._write(self._reasoning, item)
        return ""

    def _begin_content(self) -> None:
        self._takes_bare_call = self._tool_format is not None and self._tool_format.takes_bare_calls
        self._state = self._open_call if self._format.forced and not self._num_calls else self._read_content

    def _read_content(self, item: str) -> str:
        if self._tool_format and item == self._tool_format.start:
            self._raw, self._state = [item], self._open_call
            return ""
        if self._takes_bare_call and self._tool_format:
            item = self._hold_space(item, self._tool_format.separators if self._num_calls else "")
            self._takes_bare_call = not item
            if item.startswith("{"):
                self._call, self._state = CallReader(known_names=self._format.tool_names), self._read_call
                return item
        self._write(self._content, item)
        return ""

    def _open_call(self, item: str) -> str:
        """Read up to the brace that begins the call or, after a name, its arguments."""
        text, brace, rest = item.partition("{")
        self._raw.append(text)
        self._opening = (self._opening + text).lstrip()
        match = OPENING.fullmatch(self._opening) if len(self._opening) <= MAX_OPENING else None
        forced = self._format.forced
        if match is None or (match[1] and not (self._tool_format and self._tool_format.takes_names)):
            self._give_up()
        elif brace:
            self._in_list |= self._opening.startswith("[")
            self._call, self._state = CallReader(match[1] or (forced.name if forced else None)), self._read_call
            self._opening = ""
        return brace + rest

    def _read_call(self, item: str) -> str:
        call = self._call
        call.is_broken = item in self._special_tokens
        num_read = 0 if call.is_broken else call.read(item)
        self._raw.append(item[:num_read])
        if call.is_ready and (self._streams or call.is_valid):
            self._pass_on(call)
        if call.is_broken or (call.is_complete and not call.is_passed_on):
            self._give_up()
        elif call.is_complete:
            self._raw, self._state = [], self._after_call
        return item[num_read:]

    def _pass_on(self, call: "CallReader") -> None:
        """Add the new part of a call to the message, unless parallel calls are off and this isn't the first call."""
        id = name = None
        if not call.is_passed_on:
            self._num_calls += 1
            id, name, call.is_passed_on = self._format.new_id(), call.name, True
            self._held, self._skips_space = [], not self._has_content
        arguments, call.arguments, self._raw = "".join(call.arguments), [], []
        if (name or arguments) and (self._num_calls == 1 or self._format.parallel_tool_calls):
            self._calls.append(ToolCallDelta(self._num_calls - 1, id, name, arguments))

    def _after_call(self, item: str) -> str:
        """Read what follows a call: its closing tag, and the separator or the end of a list of calls."""
        text = self._hold_space(item, "," if self._in_list else "")
        if not text or (self._tool_format and text == self._tool_format.end):
            self._in_list = self._in_list and not text
            return ""
        if self._in_list and text.startswith("{"):
            self._state = self._open_call
        elif self._in_list and text.startswith("]"):
            self._in_list, text = False, text[1:]
        else:
            self._in_list = False
            self._begin_content()
        return text

    def _give_up(self) -> None:
        """Turn the text of a malformed call into content."""
        text = "".join(part for part in self._raw if part not in self._special_tokens)
        self._raw, self._opening, self._in_list, self._state = [], "", False, self._read_content
        self._write(self._content, text)


class CallReader:
    """A reader of one call: {"name": ..., "arguments": {...}}, or only the arguments if the name is known.

    Keys may come in any order. The reader goes through the text character by character, and tracks strings and
    brackets. While it reads, it parses only the fields around the arguments.
    """

    def __init__(self, name: str | None = None, known_names: Collection[str] | None = None) -> None:
        """Prepare to read only arguments if `name` is given. If `known_names` is given, accept no other name."""
        self.name = name
        self.arguments: list[str] = []  # read but not passed on yet
        self.is_broken = self.is_complete = self.is_passed_on = False
        self._known_names = known_names
        self._header = ""  # the object read so far, with null in place of each object or list in it
        self._level = 2 if name is None else 1  # the bracket depth at which the arguments are
        self._depth = 0  # the current bracket depth
        self._in_string = self._is_escaped = self._in_arguments = self._has_arguments = False

    @property
    def is_ready(self) -> bool:
        """True once this is definitely a call: its name is known, and its arguments have begun (or it has none)."""
        return self.name is not None and self._has_arguments

    @property
    def is_valid(self) -> bool:
        """True if the call is complete and its arguments are valid JSON. Check this before any of them is passed on."""
        return self.is_complete and not self.is_broken and parse_object("".join(self.arguments)) is not None

    def read(self, text: str) -> int:
        """Read up to the end of the call, or up to an error in it. Return the number of characters read."""
        for i, char in enumerate(text):
            old_depth, was_in_string = self._depth, self._in_string
            self._in_string = (char == '"') != was_in_string if not self._is_escaped else was_in_string
            self._is_escaped = was_in_string and char == "\\" and not self._is_escaped
            if not was_in_string:
                self._depth += (char in "{[") - (char in "}]")
                self.is_broken |= char not in JSON_CHARACTERS
            if max(old_depth, self._depth) < self._level:
                self._header += char
                self.is_broken |= len(self._header) > MAX_OPENING
            elif old_depth < self._level:
                self._begin_value(char)
            if self.is_broken:
                return i
            if self._in_arguments:
                self.arguments.append(char)
            if self._depth < self._level <= old_depth:
                self._in_arguments, self._header = False, self._header + "null"
            if self._depth == 0:
                self._end_call()
                return i + 1
        return len(text)

    def counts_as_call(self, is_forced: bool) -> bool:
        """Return whether an output that was cut off here ends in a call. A forced call needs only a complete name."""
        if is_forced and self.name is None:
            self._read_header(is_partial=True)
        return self.is_ready or (is_forced and self.name is not None)

    def _begin_value(self, bracket: str) -> None:
        """Determine whether the object or list that begins here holds the arguments."""
        fields = self._read_header("null}") if self._level == 2 else {"arguments": None}
        if fields and [*fields][-1] in ARGUMENT_KEYS:
            self.is_broken |= bracket != "{" or self._has_arguments
            self._in_arguments = self._has_arguments = self._has_arguments or not self.is_broken

    def _end_call(self) -> None:
        self.is_complete = True
        if self._level == 2 and ARGUMENT_KEYS.isdisjoint(self._read_header()):
            self.arguments, self._has_arguments = ["{}"], True

    def _read_header(self, ending: str = "", is_partial: bool = False) -> dict[str, Any]:
        """Return the fields of the header plus `ending`. Set `name`, or `is_broken` if the header isn't a call's."""
        parsed = parse_object(self._header + ending, is_partial)
        fields = parsed or {}
        name = fields.get("name")
        if isinstance(name, str) and name and (self._known_names is None or name in self._known_names):
            self.name = name
        elif parsed is None or name is not None or (self._known_names is not None and fields.keys() - CALL_KEYS):
            self.is_broken = True
        return fields


def parse_object(text: str, is_partial: bool = False) -> dict[str, Any] | None:
    """Return the fields of a JSON object, or None for invalid JSON. If `is_partial`, the object may be unfinished."""
    try:
        fields: dict[str, Any] = from_json(text, allow_inf_nan=False, allow_partial=is_partial)
    except ValueError:
        return None
    return fields


class TagPattern:
    """A pattern that finds tags in text that arrives in pieces."""

    def __init__(self, tags: Collection[str]) -> None:
        """Compile a pattern for the tags. If one tag is the beginning of another, the shorter one is found."""
        self.split = re.compile(f"({'|'.join(map(re.escape, sorted(tags, key=len))) or '(?!)'})").split
        self._beginnings = {tag[:i] for tag in tags for i in range(1, len(tag))}
        self._longest = max(map(len, tags), default=0)

    def find_partial_tag(self, text: str) -> int:
        """Return the index at which a partial tag ends `text`, or len(text) if none does. `text` has no whole tag."""
        starts = range(max(0, len(text) - self._longest), len(text))
        return next((i for i in starts if text[i:] in self._beginnings), len(text))


tag_pattern = lru_cache(maxsize=32)(TagPattern)  # cached: a vocabulary can have hundreds of special tokens
