"""nanovllm chat: a conversation in the terminal."""

from typing import Any

import click

from .common import located, one_line_errors
from .flags import chosen_sampling_flags, engine_flags, split
from .interrupts import ctrl_c_raises
from .streams import standard_input, standard_output


@click.command(params=chosen_sampling_flags() + engine_flags())
@click.option("--system", metavar="TEXT", help="what the model is told before the conversation")
@click.option(
    "--chat-template",
    metavar="PATH",
    help="a file with the template of the conversation, or the word plain for a model that has none",
)
def chat(system: str | None, chat_template: str | None, **values: Any) -> int:
    """Talk with a model in the terminal.

    A message is a line; a backslash at its end goes on in the next one. /reset begins anew, /undo takes the last
    message back, /help lists the commands, and /exit or Ctrl-D ends. Ctrl-C stops an answer; at the prompt it ends.

    From a pipe, each line is a message, and only the answers go to standard output.

    Exit status 1: a message got no answer. 2: nothing was done.
    """
    engine, sampling = split(values)
    given = {name: value for name, value in sampling.items() if value not in (None, ())}
    with one_line_errors():
        standard_input()
        standard_output()

    from ..checkpoints.chat_template import PLAIN_STOP, read_template
    from ..llm import LLM
    from .chats import check_template
    from .conversation import Conversation, answer_params, room_of
    from .talk import talk

    with one_line_errors():
        template = read_template(chat_template)
        options = located(engine)
        check_template(options["model"], template)
        llm = LLM(**options)
        params = answer_params(llm, given, PLAIN_STOP if chat_template == "plain" else ())
        conversation = Conversation(llm.get_tokenizer(), template, room_of(llm), system)
    with ctrl_c_raises():
        return 0 if talk(llm, conversation, params) else 1
