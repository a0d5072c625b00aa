"""Conversations as prompts: a chat template's."""

from ..checkpoints.chat_template import choose_template, parse_template, render_chat
from ..checkpoints.tokenizer import load_tokenizer
from ..llm import LLM
from ..server.openai.chats import Chat
from .request import Request

NOT_TWICE = {"add_special_tokens": False}  # a template writes BOS by itself


def check_template(folder: str, chat_template: str | None) -> None:
    """Raises ValueError, before weights are read, if chats cannot be served."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: its model cannot chat")
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError(f"{folder} has no chat template: give one with --chat-template FILE, or --chat-template plain")
    parse_template(choose_template(tokenizer, chat_template, None))


def add_request(llm: LLM, request: Request) -> None:
    """Raises ValueError for a request that can never be served."""
    engine = llm.llm_engine
    if isinstance(request.prompt, Chat):
        chat = request.prompt
        text = render_chat(engine.get_tokenizer(), chat.messages, **{"chat_template": llm.chat_template} | chat.options)
        engine.add_request(request.id, text, request.params, tokenization_kwargs=NOT_TWICE)
    else:
        engine.add_request(request.id, request.prompt, request.params)
