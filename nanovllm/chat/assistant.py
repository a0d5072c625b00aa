"""AssistantParser: the text of one sample, fed in pieces, becomes the parts of a message.

    thought -> content -> opening -> call -> after a call
                  ^                                |
                  +--------------------------------+

Any split of the text gives the same message. Arguments are passed on as the model writes them, never rewritten.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from .formats import MessageFormat

State = Callable[[], bool]
PIECE = 1024  # characters read at a time: copies of the rest of a long text would take quadratic time
MAX_HEADER = 1024  # characters of a call besides its arguments
ARGUMENTS = {"arguments", "parameters"}  # keys of a call
CALL_KEYS = {"name", "type", "id"} | ARGUMENTS
KEY = re.compile(r'"([^"]*)"\s*:$')
NAMED_CALL = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")  # name[ARGS]{
NAMED_CALL_SO_FAR = re.compile(r"[\w.\[\]-]{1,256}\s{0,16}")
SPACE = " \t\r\n"
JSON_CHARACTERS = frozenset(' \t\r\n"{}[]:,0123456789+-.Etruefalsn')  # outside strings


@dataclass(frozen=True)
class ToolCallDelta:
    """The new part of a call."""

    index: int  # of the call within the message
    id: str | None = None  # in the first part, with the name
    name: str | None = None
    arguments: str = ""  # the next characters of the JSON text


@dataclass(frozen=True)
class MessageDelta:
    """The new part of a message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


def read_message(text: str, format: MessageFormat) -> MessageDelta:
    """Return the whole message of an output. A call that is not valid JSON to its end comes back as content."""
    parser = AssistantParser(format, streams=False)
    parts = parser.feed(text), parser.finish()
    return MessageDelta(
        reasoning="".join(part.reasoning for part in parts),
        content="".join(part.content for part in parts),
        tool_calls=[call for part in parts for call in part.tool_calls],
    )


class AssistantParser:
    """The parser of one sample.

    Whitespace around a thought and before a call is dropped. Special tokens are dropped everywhere. A call that breaks
    before its arguments begin becomes content again.
    """

    def __init__(self, format: MessageFormat, *, streams: bool = True) -> None:
        """Start at the end of the prompt.

        With `streams`, arguments are returned as they come. Without it, a call is returned once it is complete, in one
        part, and a call whose arguments are no valid JSON becomes content.
        """
        self._format, self._streams = format, streams
        reasoning, tools = format.reasoning, None if format.forced else format.tools
        own = (tools.tags if tools else set()) | ({reasoning.start, reasoning.end} if reasoning else set())
        special = frozenset(format.special_tokens)
        self._special, self._hidden = tag_finder(special - own), tag_finder(special & own)
        self._content_tags = tag_finder((special & own) | ({tools.start} if tools else set()))
        self._thought_tags = tag_finder((special & own) | ({reasoning.end} if reasoning else set()))
        self._tools = tools
        self._unread = ""  # may begin a special token
        self._buffer = ""  # may begin a tag
        self._held: list[str] = []  # whitespace that is dropped if a call or the end of a thought follows
        self._raw: list[str] = []  # the text of a call, until it is certain to be one
        self._reasoning: list[str] = []  # new parts
        self._content: list[str] = []
        self._tool_calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._is_last = self._in_list = self._has_content = self._skips_space = False
        self._call = CallReader()
        self._state = self._before_thought if reasoning else self._begin_content()

    def feed(self, text: str) -> MessageDelta:
        """Return the part of the message that `text` completes. It can be empty."""
        for start in range(0, len(text), PIECE):
            clean, self._unread = self._special.remove(self._unread + text[start : start + PIECE])
            self._read(clean)
        return self._new_part()

    def finish(self) -> MessageDelta:
        """Return what was held back, at the end of the output."""
        self._is_last = True
        self._read(self._unread)
        if not self._num_calls and self._state == self._read_content:
            self._content += self._held
        return self._new_part()

    def _new_part(self) -> MessageDelta:
        part = MessageDelta("".join(self._reasoning), "".join(self._content), tuple(self._tool_calls))
        self._reasoning, self._content, self._tool_calls = [], [], []
        return part

    def _read(self, text: str) -> None:
        """Run the states, each of which returns whether the next one can go on with the buffer."""
        self._buffer += text
        while self._state():
            pass

    def _write(self, text: str) -> None:
        """Add text to the thought or the content. Whitespace at its end waits for what follows."""
        if self._skips_space:
            self._held, text = [], text.lstrip()
        body = text.rstrip()
        if body:
            is_thought = self._state == self._read_thought
            (self._reasoning if is_thought else self._content).append("".join(self._held) + body)
            self._held, self._skips_space = [], False
            self._has_content |= not is_thought
        self._held.append(text[len(body) :])

    # Thoughts

    def _before_thought(self) -> bool:
        """Drop the opening tag, if the output begins with one."""
        self._hold_space()
        reasoning = self._format.reasoning
        assert reasoning is not None, "the format has thoughts"
        has_tag = self._buffer.startswith(reasoning.start)
        if not has_tag and reasoning.start.startswith(self._buffer) and not self._is_last:
            return False
        if has_tag or self._format.starts_in_thought:
            self._buffer = self._buffer.removeprefix(reasoning.start)
            self._held, self._skips_space, self._state = [], True, self._read_thought
        else:
            self._state = self._begin_content()
        return True

    def _read_thought(self) -> bool:
        before, tag, self._buffer = self._thought_tags.split(self._buffer, self._is_last)
        self._write(before)
        if self._format.reasoning and tag == self._format.reasoning.end:
            self._held, self._skips_space, self._state = [], True, self._begin_content()
        return bool(tag)

    # Content and calls

    def _begin_content(self) -> State:
        """Return the state after the thought."""
        self._takes_bare_call = self._tools is not None and self._tools.takes_bare_calls
        return self._open_call if self._format.forced else self._read_content

    def _read_content(self) -> bool:
        """Pass on text up to a call."""
        if self._takes_bare_call:
            self._hold_space(self._tools.separators if self._tools and self._num_calls else "")
            if not self._buffer:
                return False
            self._takes_bare_call = False
            if self._buffer[0] == "{":
                self._call, self._state = CallReader(known=self._format.tool_names), self._read_call
                return True
        before, tag, self._buffer = self._content_tags.split(self._buffer, self._is_last)
        self._write(before)
        if self._tools and tag == self._tools.start:
            self._raw, self._state = [tag], self._open_call
        return bool(tag)

    def _open_call(self) -> bool:
        """Find out how a call is written."""
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        if self._buffer.startswith("[") and not self._in_list:
            self._in_list = True
            self._take(1)
            return True
        forced = self._format.forced
        takes_names = self._tools is not None and self._tools.takes_names and not self._in_list
        name = NAMED_CALL.match(self._buffer) if takes_names else None
        if self._buffer.startswith("{"):
            self._call, self._state = CallReader(forced.name if forced else None), self._read_call
        elif name:
            self._take(name.end())
            self._call, self._state = CallReader(name[1]), self._read_call
        elif not self._is_last and (not self._buffer or (takes_names and NAMED_CALL_SO_FAR.fullmatch(self._buffer))):
            return False
        else:
            self._give_up()
        return True

    def _read_call(self) -> bool:
        """Pass on a call, unless another one may not be made."""
        call = self._call
        self._take(call.read(self._buffer))
        is_broken = call.is_broken or (self._is_last and not call.is_complete)
        if call.is_ready and (self._streams or (call.is_complete and call.is_valid)):
            self._pass_on(call)
        elif call.is_complete:
            is_broken = True
        if is_broken:
            self._give_up()
        elif call.is_complete:
            self._raw, self._state = [], self._after_call
        return is_broken or call.is_complete

    def _pass_on(self, call: "CallReader") -> None:
        is_first = not call.is_passed_on
        if is_first:
            self._num_calls += 1
            self._held, self._skips_space = [], not self._has_content
        call.is_passed_on = True
        self._raw = []
        arguments, call.arguments = "".join(call.arguments), []
        if (is_first or arguments) and (self._num_calls == 1 or self._format.parallel_tool_calls):
            new = (self._format.new_id(), call.name) if is_first else (None, None)
            self._tool_calls.append(ToolCallDelta(self._num_calls - 1, *new, arguments))

    def _after_call(self) -> bool:
        """Skip the end of a call, and find out whether the list goes on."""
        self._hold_space("," if self._in_list else "")
        if self._in_list:
            if not self._buffer and not self._is_last:
                return False
            if self._buffer.startswith("{"):
                self._state = self._open_call
                return True
            self._buffer, self._in_list = self._buffer.removeprefix("]"), False
        end = self._tools.end if self._tools else ""
        if end.startswith(self._buffer) and self._buffer != end and not self._is_last:
            return False
        self._buffer = self._buffer.removeprefix(end)
        self._state = self._read_content if self._format.forced else self._begin_content()
        return True

    def _give_up(self) -> None:
        """Return what was read of a broken call to the content."""
        text, rest = self._hidden.remove("".join(self._raw))
        self._raw, self._in_list, self._state = [], False, self._read_content
        self._write(text + rest)

    def _take(self, count: int) -> None:
        """Move characters from the buffer to the text of the call."""
        self._raw.append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _hold_space(self, separators: str = "") -> None:
        """Move whitespace at the start of the buffer to the text that may be dropped."""
        rest = self._buffer.lstrip(SPACE + separators)
        self._held.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest


class CallReader:
    """The reader of one call: {"name": ..., "arguments": {...}}, or the arguments alone if the name is known.

    Calls are JSON with the keys in any order. The reader follows strings and brackets only, one character at a time.
    """

    def __init__(self, name: str | None = None, known: Collection[str] | None = None) -> None:
        """Read only arguments if `name` is given. Take no other names than `known`, if given."""
        self.name = name
        self.arguments: list[str] = []  # read, and not passed on
        self.is_broken = self.is_complete = self.is_passed_on = False
        self._known = known
        self._header = ""  # the object, with null for each object or list in it
        self._key = ""  # the last one
        self._arguments_depth = 2 if name is None else 1  # in brackets
        self._depth = 0
        self._in_string = self._is_escaped = self._in_arguments = self._has_arguments = False

    @property
    def is_ready(self) -> bool:
        """True if this is certain to be a call."""
        return self.name is not None and self._has_arguments

    @property
    def is_valid(self) -> bool:
        """True if the arguments, none of which was passed on, are valid JSON."""
        try:
            from_json("".join(self.arguments), allow_inf_nan=False)
        except ValueError:
            return False
        return True

    def read(self, text: str) -> int:
        """Read up to the end of the call, or to where it breaks. Return the number of characters."""
        start, end = 0, len(text)  # of the arguments in this text
        for i, char in enumerate(text):
            depth = self._depth
            self._step(char)
            if depth < self._arguments_depth <= self._depth:
                self._begin_value(char)
                start = i
            elif self._depth < self._arguments_depth <= depth:
                self._end_value(text[start : i + 1])
            elif depth < self._arguments_depth:
                self._header += char
                if char in '":' and not self._in_string:
                    self._read_header()
            if self.is_broken or len(self._header) > MAX_HEADER:
                self.is_broken, end = True, i
                break
            if self._depth == 0 and depth > 0:
                self._end_call()
                return i + 1
        if self._in_arguments:
            self.arguments.append(text[start:end])
        return end

    def _step(self, char: str) -> None:
        """Follow strings and brackets."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        else:
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self.is_broken |= char not in JSON_CHARACTERS

    def _begin_value(self, bracket: str) -> None:
        """Note whether the object or list that begins here holds the arguments."""
        is_named = self._arguments_depth == 1
        if is_named or self._key in ARGUMENTS:
            self.is_broken = self._has_arguments or bracket != "{"
            self._in_arguments = self._has_arguments = not self.is_broken
        self.is_broken |= not (is_named or self._header.rstrip().endswith(":"))

    def _end_value(self, text: str) -> None:
        if self._in_arguments:
            self.arguments.append(text)
        self._in_arguments = False
        self._header += "null"

    def _read_header(self) -> None:
        """Read the key or the name that is complete now."""
        if key := KEY.search(self._header):
            self._key = key[1]
            self.is_broken = self._known is not None and self.name is None and self._key not in CALL_KEYS
        elif self._key == "name" and self.name is None:
            name = self._fields(allow_partial=True).get("name")
            is_name = isinstance(name, str) and name != "" and (self._known is None or name in self._known)
            self.name, self.is_broken = (name, False) if is_name else (None, True)

    def _end_call(self) -> None:
        """Complete a call without arguments, which has an empty object of them."""
        self.is_complete = True
        if not self._has_arguments and ARGUMENTS.isdisjoint(self._fields()):
            self.arguments, self._has_arguments = ["{}"], True

    def _fields(self, allow_partial: bool = False) -> dict[str, Any]:
        """Return the fields of the object, or none if it is no JSON."""
        try:
            fields: dict[str, Any] = from_json(self._header, allow_partial=allow_partial)
        except ValueError:
            return {}
        return fields


class TagFinder:
    """A search for tags in text that arrives in pieces."""

    def __init__(self, tags: Collection[str]) -> None:
        """Take the tags. If one begins another, the shorter one is found."""
        self._pattern = re.compile("|".join(map(re.escape, sorted(tags, key=len))) or "(?!)")
        self._beginnings = {tag[:i] for tag in tags for i in range(1, len(tag))}
        self._longest = max(map(len, tags), default=1)

    def split(self, text: str, is_last: bool = False) -> tuple[str, str, str]:
        """Return the text before the first tag, the tag, and the rest. Without a tag, the rest may begin one."""
        if match := self._pattern.search(text):
            return text[: match.start()], match[0], text[match.end() :]
        end = len(text) if is_last else self._held_from(text)
        return text[:end], "", text[end:]

    def remove(self, text: str) -> tuple[str, str]:
        """Return the text without tags, and the rest, which may begin one."""
        parts = self._pattern.split(text)
        end = self._held_from(parts[-1])
        return "".join(parts[:-1]) + parts[-1][:end], parts[-1][end:]

    def _held_from(self, text: str) -> int:
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        return next((i for i in starts if text[i:] in self._beginnings), len(text))


@lru_cache(maxsize=64)
def tag_finder(tags: frozenset[str]) -> TagFinder:
    """Return the finder of these tags. A vocabulary can have hundreds of them."""
    return TagFinder(tags)
