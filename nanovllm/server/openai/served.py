"""ServedModel: the model behind the server, and prompts in its tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...checkpoints.chat_template import render_chat
from ...checkpoints.model_config import default_sampling_params
from ...checkpoints.tokenizer import HFTokenizer, decoded_token, load_tokenizer
from ...engine.prompts import Prompt, whole_text
from ..errors import NotServed
from .bodies import Unsaid
from .chats import Chat

CHARACTERS = 128  # most of a token, in the vocabularies that there are
MANY = 100  # messages
LONG = 20_000  # characters: to tokenize more takes milliseconds, which nobody else is to wait for


@dataclass(frozen=True)
class Tokens:
    """A prompt in tokens."""

    token_ids: list[int]
    text: str | None = None  # where the prompt was one, or a conversation
    first_text: str = ""  # of the first token, if the answer begins with the prompt


@dataclass(frozen=True)
class ServedModel:
    names: Sequence[str]  # the first is the one that answers tell
    other_names: Sequence[str]  # taken, and not told
    tokenizer: HFTokenizer | None
    chat_template: str | None  # in place of the checkpoint's own
    unsaid: Unsaid
    max_model_len: int

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises NotServed. A body that names no model means this one."""
        if name is not None and name not in self.names and name not in self.other_names:
            raise NotServed(f"the model {name!r} does not exist: this server has {', '.join(map(repr, self.names))}")

    @property
    def most_characters(self) -> int:
        """A text that is longer has more tokens than a sequence may have."""
        return max(self.max_model_len * CHARACTERS, LONG)

    async def tokens(
        self, prompt: Prompt | Chat, add_special_tokens: bool, most_characters: int | None = None
    ) -> Tokens:
        """Raises ValueError for what cannot be a prompt."""
        if isinstance(prompt, list):
            return Tokens(prompt)
        text = whole_text(await self.text_of(prompt) if isinstance(prompt, Chat) else prompt)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: a prompt must be a list of token ids")
        if not text:
            return Tokens([], text)
        if len(text) < LONG:
            return Tokens(self.tokenizer.encode(text, add_special_tokens=add_special_tokens), text)
        if most_characters is not None and len(text) > most_characters:
            raise ValueError(f"the prompt has {len(text):,} characters: at most {most_characters:,} are read")
        ids = await asyncio.to_thread(encode_long, self.tokenizer, text, add_special_tokens)
        return Tokens(ids, text)

    def with_text(self, prompt: Tokens) -> Tokens:
        """Raises ValueError if there is no tokenizer."""
        tokenizer: Any = self.tokenizer
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: the text of a prompt is not known")
        text = tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
        first_text = decoded_token(prompt.token_ids[0], [], tokenizer) if prompt.token_ids else ""
        return Tokens(prompt.token_ids, text, first_text)

    async def text_of(self, chat: Chat) -> str:
        """A conversation by the chat template."""
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: it cannot chat")
        render = partial(render_chat, self.tokenizer, chat.messages, chat_template=self.chat_template, **chat.options)
        return await asyncio.to_thread(render) if len(chat.messages) > MANY else render()


def encode_long(tokenizer: HFTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """As encode(), which keeps the interpreter's lock meanwhile: other threads would wait."""
    return tokenizer.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def served_model(
    model: str, folder: str, names: Sequence[str], chat_template: str | None, max_model_len: int
) -> ServedModel:
    """`model` is what the user called it: its last part is the name, unless there are others; a hub's name stays.

    Raises ValueError for a checkpoint whose tokenizer or generation config cannot be read.
    """
    own = Path(model).resolve().name if Path(model).exists() else model
    recommended: dict[str, Any] = default_sampling_params(folder)
    recommended.pop("max_tokens", None)
    return ServedModel(
        names=names or [own],
        other_names=[] if names else [model],
        tokenizer=load_tokenizer(folder),
        chat_template=chat_template,
        unsaid=Unsaid(recommended=recommended),
        max_model_len=max_model_len,
    )
