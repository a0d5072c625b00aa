"""nanovllm chat: a conversation in the terminal, or one message per line from a pipe."""

import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from ..log import tell
from .click_options import PATH, engine_options, sampling_options, split, usage_errors, with_checkpoint
from .terminal import ctrl_c_raises, ctrl_c_sets_event, dim

if TYPE_CHECKING:
    from ..checkpoints.tokenizer import HFTokenizer
    from ..llm import LLM
    from ..requests.outputs import RequestOutput
    from ..requests.sampling_params import SamplingParams

Message = dict[str, str]
ANSWER_DIVISOR = 4  # a quarter of the context is reserved for the answer
MESSAGE_PROMPT, CONTINUATION_PROMPT = "> ", "… "
COMMANDS_HELP = """\
/reset   start over
/undo    remove the last message and its answer
/help    print this list
/exit    leave; Ctrl-D does too
A backslash at the end of a line continues the message. Start a message with // to send one that begins with a slash.
Ctrl-C stops an answer. Pressed twice, or at the prompt, it exits."""


def options() -> list[click.Parameter]:
    """Return the sampling and engine options. Sampling options have no defaults, because the model has its own."""
    sampling = [option for option in sampling_options() if option.name != "n"]
    for option in sampling:
        option.default = () if option.multiple else None
    return sampling + engine_options()


template_option = click.option(
    "--chat-template", type=PATH, help="file with a chat template, or `plain` for a model without one"
)


@click.command(params=options())
@click.option("--system", metavar="TEXT", help="system message, before the conversation")
@template_option
def chat(system: str | None, chat_template: str | None, **values: Any) -> int:
    """Chat with a model in the terminal.

    A message is a line; a backslash at its end continues the message on the next line. /reset starts over, /undo
    removes the last message, /help lists the commands, and /exit or Ctrl-D leaves. Ctrl-C stops an answer; at the
    prompt it exits.

    From a pipe, each line is a message, and only the answers go to standard output.

    Sampling options default to the model's own recommendations. Without --max-tokens, the model decides when an
    answer ends.

    Exit status 1: a message got no answer. 2: invalid options, and nothing was sent.
    """
    engine, sampling = split(values)
    given_params = {name: value for name, value in sampling.items() if value not in (None, ())}

    from ..checkpoints.chat_template import PLAIN_STOP, read_template
    from ..llm import LLM

    with usage_errors():
        template = read_template(chat_template)
        engine = with_checkpoint(engine)
        check_template(engine["model"], template)
        llm = LLM(**engine)
        params = answer_params(llm, given_params, PLAIN_STOP if chat_template == "plain" else ())
        kv_cache = llm.llm_engine.kv_cache
        context_size = min(llm.max_model_len, kv_cache.num_blocks * kv_cache.block_size)
        conversation = Conversation(llm.get_tokenizer(), template, context_size, system)
    with ctrl_c_raises():
        return 0 if talk(llm, conversation, params) else 1


def check_template(folder: str, chat_template: str | None) -> None:
    """Raise ValueError, before weights are read, if the model in `folder` cannot chat."""
    from ..checkpoints.chat_template import choose_template, parse_template
    from ..checkpoints.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: its model cannot chat")
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError(f"{folder} has no chat template: use --chat-template FILE or --chat-template plain")
    parse_template(choose_template(tokenizer, chat_template, None))


def answer_params(llm: "LLM", given_params: dict[str, Any], stop: Sequence[str]) -> "SamplingParams":
    """Return the model's sampling parameters, updated with `given_params` and `stop`.

    Unless it is given, max_tokens is None, so that an answer can be as long as there is room.
    """
    params = llm.get_default_sampling_params()
    params.max_tokens = None
    for name, value in given_params.items():
        setattr(params, name, list(value) if isinstance(value, tuple) else value)
    params.stop = [*(params.stop or ()), *stop]
    return params.checked()


# The conversation


class Conversation:
    """A conversation as a prompt. A turn is a message and its answer; the oldest turns are dropped to make room."""

    def __init__(self, tokenizer: "HFTokenizer", template: str | None, context_size: int, system: str | None) -> None:
        """Start without turns. `context_size` is the maximum number of tokens of prompt plus answer.

        If `template` is None, the chat template is the model's own.
        """
        self._tokenizer, self._template, self.context_size = tokenizer, template, context_size
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[list[Message]] = []

    def ask(self, text: str) -> tuple[list[int], int]:
        """Start a turn. Return the prompt's token ids, and how many turns were dropped to make it fit.

        Raise ValueError, and change nothing, if the message is too long even without earlier turns.
        """
        earlier_turns = self.turns
        turns = [*earlier_turns, [{"role": "user", "content": text}]]
        token_ids = self._token_ids(turns)
        while len(token_ids) > self.context_size - self.context_size // ANSWER_DIVISOR and len(turns) > 1:
            turns = turns[1:]
            token_ids = self._token_ids(turns)
        if len(token_ids) >= self.context_size:
            raise ValueError(f"the prompt must have at most {self.context_size - 1} tokens, got {len(token_ids)}")
        self.turns = turns
        return token_ids, len(earlier_turns) + 1 - len(turns)

    def answer(self, text: str) -> None:
        """End the turn with its answer."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def undo(self) -> bool:
        """Remove the last turn. Return False if there is none."""
        return bool(self.turns and self.turns.pop())

    def _token_ids(self, turns: list[list[Message]]) -> list[int]:
        from ..checkpoints.chat_template import render_chat

        messages = [*self._system, *(message for turn in turns for message in turn)]
        text = render_chat(self._tokenizer, messages, chat_template=self._template)
        return self._tokenizer.encode(text, add_special_tokens=False)  # the template already adds BOS


def talk(llm: "LLM", conversation: Conversation, params: "SamplingParams") -> bool:
    """Answer messages until the input ends, or until /exit. Return False if any of them failed, as in reply()."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        tell(dim("/help lists the commands; Ctrl-D exits"))
    request_ids = map(str, itertools.count())
    all_answered = True
    for message in messages():
        if message.startswith("/") and not message.startswith("//"):
            if not run_command(message, conversation):
                break
            continue
        text = message[1:] if message.startswith("//") else message
        if text.strip():
            all_answered &= reply(llm, conversation, params, text, next(request_ids))
    return all_answered


def run_command(command: str, conversation: Conversation) -> bool:
    """Carry out a command. Return False if it ends the conversation."""
    name = command.strip()
    if name == "/exit":
        return False
    if name == "/reset":
        conversation.turns = []
    elif name == "/undo":
        if not conversation.undo():
            tell("there is no message to undo")
    elif name == "/help":
        for line in COMMANDS_HELP.splitlines():
            tell(line)
    else:
        tell(f"unknown command {name.split()[0]}: /help lists the commands")
    return True


def reply(llm: "LLM", conversation: Conversation, params: "SamplingParams", text: str, request_id: str) -> bool:
    """Print the answer as it is generated. Return True if it is complete or was stopped by Ctrl-C.

    If the message cannot be sent, print why, and remove it from the conversation. If an error ends the answer, print
    the error, and keep the turn. Return False in both cases.
    """
    try:
        token_ids, num_dropped = conversation.ask(text)
    except ValueError as error:
        tell(f"not sent: {error}")
        return False
    if num_dropped:
        turns = "the oldest turn was" if num_dropped == 1 else f"the {num_dropped} oldest turns were"
        tell(dim(f"{turns} dropped: the model has room for {conversation.context_size:,} tokens"))
    try:
        with ctrl_c_sets_event() as interrupted:
            output = print_answer(llm, request_id, token_ids, params, interrupted)
    except ValueError as error:
        conversation.undo()
        tell(f"not sent: {error}")
        return False
    conversation.answer(output.outputs[0].text.strip())
    if output.error:
        tell(f"error: {output.error}")
    tell(dim(closing_line(output)))
    return output.error is None


def print_answer(
    llm: "LLM", request_id: str, token_ids: list[int], params: "SamplingParams", interrupted: Event
) -> "RequestOutput":
    """Print an answer as it is generated, and return it. Raise ValueError if the prompt can never be served.

    Once `interrupted` is set, abort the request.
    """
    engine, num_printed = llm.llm_engine, 0
    engine.add_request(request_id, token_ids, params)
    while True:
        outputs = [engine.abort_request(request_id)] if interrupted.is_set() else engine.step()
        for output in filter(None, outputs):
            text = output.outputs[0].text.lstrip()
            sys.stdout.write(text[num_printed:] + ("\n" if output.finished else ""))
            sys.stdout.flush()
            num_printed = len(text)
            if output.finished:
                return output


def closing_line(output: "RequestOutput") -> str:
    """Return one line: the length and speed of the answer, the cached part of its prompt, and whether it was cut."""
    answer, metrics = output.outputs[0], output.metrics
    assert metrics.finished_time is not None, "the answer is complete"
    seconds = metrics.finished_time - metrics.arrival_time
    reason = {"length": ", cut at max_tokens", "abort": ", stopped"}.get(answer.finish_reason or "", "")
    speed = f"{len(answer.token_ids)} tokens, {len(answer.token_ids) / seconds:.0f} tokens/s"
    cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
    return f"[{speed}, {cached}{reason}]"


# Messages


def messages() -> Iterator[str]:
    """Yield messages from a terminal or from a pipe, until the input ends."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with suppress(ImportError):  # not available on every platform
            import readline  # noqa: F401  # importing it gives input() a history and editing keys
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid bytes become U+FFFD
    lines: list[str] = []
    while (line := next_line(CONTINUATION_PROMPT if lines else MESSAGE_PROMPT, is_terminal)) is not None:
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        yield "\n".join([*lines, line])
        lines = []
    if lines:
        yield "\n".join(lines)


def next_line(prompt: str, is_terminal: bool) -> str | None:
    """Return a line without its newline, or None at the end of the input."""
    if is_terminal:
        try:
            return input(prompt)
        except EOFError:
            sys.stdout.write("\n")  # Ctrl-D leaves the cursor after the prompt
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
