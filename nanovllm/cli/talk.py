"""The conversation itself: a message in, its answer out as it comes, commands that begin with a slash."""

import itertools
import sys
from threading import Event

from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from ..llm import LLM
from ..log import tell
from .conversation import Conversation
from .interrupts import ctrl_c_noted
from .messages import check_text, messages
from .streams import dim

HELP = """\
/reset   begin anew
/undo    take back the last message and its answer
/help    this list
/exit    end; so does Ctrl-D
A line that ends in a backslash goes on in the next one. A message that begins with a slash is written with two.
Ctrl-C stops an answer; twice, or at the prompt, it ends."""
IDS = map(str, itertools.count())


def talk(llm: LLM, conversation: Conversation, params: SamplingParams) -> bool:
    """Until the messages end. Returns False if one of them got no answer."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        tell(dim("/help lists the commands; Ctrl-D ends"))
    are_answered = True
    for message in messages():
        if message.startswith("/") and not message.startswith("//"):
            if not obey(message, conversation):
                break
            continue
        text = message[1:] if message.startswith("//") else message
        if text.strip():
            are_answered &= reply(llm, conversation, params, text)
    return are_answered


def obey(command: str, conversation: Conversation) -> bool:
    """Returns False if the command ends the conversation."""
    name = command.strip()
    if name == "/exit":
        return False
    if name == "/reset":
        conversation.reset()
    elif name == "/undo":
        if not conversation.undo():
            tell("there is nothing to take back")
    elif name == "/help":
        for line in HELP.splitlines():
            tell(line)
    else:
        tell(f"there is no command {name.split()[0]}: /help lists them")
    return True


def reply(llm: LLM, conversation: Conversation, params: SamplingParams, text: str) -> bool:
    """Show the answer as it comes. A message that cannot be answered is told in one line, and forgotten: False then."""
    try:
        check_text(text)
        token_ids, num_forgotten = conversation.ask(text)
    except ValueError as error:
        tell(f"not sent: {error}")
        return False
    if num_forgotten:
        turns = "the oldest turn is" if num_forgotten == 1 else f"the {num_forgotten} oldest turns are"
        tell(dim(f"{turns} forgotten: the model has room for {conversation.room:,} tokens"))
    try:
        with ctrl_c_noted() as interrupted:
            output = show_answer(llm, token_ids, params, interrupted)
    except ValueError as error:
        conversation.undo()
        tell(f"not sent: {error}")
        return False
    conversation.answer(output.outputs[0].text.strip())
    if output.error:
        tell(f"error: {output.error}")
    tell(dim(closing_line(output)))
    return output.error is None


def show_answer(llm: LLM, token_ids: list[int], params: SamplingParams, interrupted: Event) -> RequestOutput:
    """Raises ValueError for a prompt that can never be served."""
    engine, request_id, shown = llm.llm_engine, next(IDS), 0
    engine.add_request(request_id, token_ids, params)
    while True:
        outputs = [engine.abort_request(request_id)] if interrupted.is_set() else engine.step()
        for output in outputs:
            text = output.outputs[0].text.lstrip()
            sys.stdout.write(text[shown:] + ("\n" if output.finished else ""))
            sys.stdout.flush()
            shown = len(text)
            if output.finished:
                return output


def closing_line(output: RequestOutput) -> str:
    """How long the answer is, why it ended, how fast it came, and how much of the conversation was cached."""
    answer, metrics = output.outputs[0], output.metrics
    seconds = metrics.finished_time - metrics.arrival_time
    why = {"length": "cut at its greatest length", "abort": "stopped"}.get(answer.finish_reason)
    parts = [f"{len(answer.token_ids)} tokens", f"{len(answer.token_ids) / seconds:.0f} tokens/s"]
    parts += [f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"]
    return "[" + ", ".join([*parts, why] if why else parts) + "]"
