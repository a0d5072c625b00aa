"""ServedModel: the model's names, its tokenizer, and the conversion of prompts to tokens."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..build import tokenizer_of
from ..chat.formats import ModelFormats
from ..checkpoints.chat_template import PLAIN_STOP, PLAIN_TEMPLATE, choose_template, render_chat
from ..checkpoints.model_config import default_sampling_params
from ..checkpoints.stream_decoder import decoded_token
from ..checkpoints.tokenizer import HFTokenizer
from ..options.engine_args import EngineArgs
from ..requests.prompts import Prompt, valid_text
from .bodies import Chat, InvalidRequest, model_formats
from .errors import ApiError

MAX_TOKEN_CHARACTERS = 128  # the length of the longest token in today's vocabularies
MANY_MESSAGES = 100  # a chat with more messages is rendered in a thread, so that other clients don't wait for it
LONG_TEXT = 20_000  # characters; tokenizing a longer text takes milliseconds, so a thread does it


@dataclass(frozen=True)
class TokenizedPrompt:
    """A tokenized prompt."""

    token_ids: list[int]
    text: str | None = None  # None if the prompt came as token ids
    first_text: str = ""  # the text of the first token, if the response echoes the prompt

    def truncated(self, limit: int, side: str) -> "TokenizedPrompt":
        """Return at most `limit` tokens: the last ones, or the first ones if `side` is "right"."""
        ids = self.token_ids
        if len(ids) <= limit:
            return self
        return TokenizedPrompt(ids[:limit] if side == "right" else ids[len(ids) - limit :])


@dataclass(frozen=True)
class ServedModel:
    """The model that the server serves, and how to turn prompts into tokens for it."""

    names: Sequence[str]  # responses show the first one
    other_names: Sequence[str]  # accepted in requests, but not shown in responses
    tokenizer: HFTokenizer | None
    chat_template: str | None  # replaces the checkpoint's own template
    formats: ModelFormats  # of tool calls and reasoning
    recommended: Mapping[str, Any]  # the checkpoint's defaults for SamplingParams, without max_tokens
    max_model_len: int

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def can_chat(self) -> bool:
        """True if a chat template can turn messages into a prompt."""
        try:
            return self.tokenizer is not None and bool(choose_template(self.tokenizer, self.chat_template, None))
        except ValueError:
            return False

    @property
    def chat_stop(self) -> Sequence[str]:
        """The strings that end an answer on the page, as in `nanovllm chat`."""
        return PLAIN_STOP if self.chat_template == PLAIN_TEMPLATE else ()

    @property
    def max_characters(self) -> int:
        """The length in characters beyond which a text certainly has more tokens than a sequence may have."""
        return max(self.max_model_len * MAX_TOKEN_CHARACTERS, LONG_TEXT)

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 if `name` isn't one of this model's names. None, from a body without it, is valid."""
        if name is not None and name not in self.names and name not in self.other_names:
            names = ", ".join(f"`{each}`" for each in self.names)
            message = f"The model `{name[:100]}` does not exist. This server has {names}."
            raise ApiError(message, 404, "model", "model_not_found")

    def require_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer. Raise InvalidRequest if there is none."""
        if self.tokenizer is None:
            raise InvalidRequest("This model has no tokenizer: a prompt must be an array of token ids.")
        return self.tokenizer

    async def tokenize(
        self, prompt: Prompt | Chat, add_special_tokens: bool, max_characters: int | None = None
    ) -> TokenizedPrompt:
        """Tokenize a prompt. Raise ValueError if it is invalid, or longer than both LONG_TEXT and `max_characters`."""
        if isinstance(prompt, list):
            return TokenizedPrompt(prompt)
        tokenizer = self.require_tokenizer()
        text = valid_text(await self._render(tokenizer, prompt) if isinstance(prompt, Chat) else prompt)
        if not text:
            return TokenizedPrompt([], text)
        if len(text) < LONG_TEXT:
            return TokenizedPrompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)
        if max_characters is not None and len(text) > max_characters:
            message = f"This model's maximum context length is {self.max_model_len} tokens, and the prompt has"
            raise InvalidRequest(f"{message} {len(text):,} characters.", "prompt", "context_length_exceeded")
        ids = await asyncio.to_thread(encode_long, tokenizer, text, add_special_tokens)
        return TokenizedPrompt(ids, text)

    def with_text(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        """Return the prompt with its text, for a response that echoes it."""
        tokenizer = self.require_tokenizer()
        text = tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
        first_text = decoded_token(prompt.token_ids[0], [], tokenizer) if prompt.token_ids else ""
        return TokenizedPrompt(prompt.token_ids, text, first_text)

    async def _render(self, tokenizer: HFTokenizer, chat: Chat) -> str:
        render = partial(render_chat, tokenizer, chat.messages, chat_template=self.chat_template, **chat.options)
        return await asyncio.to_thread(render) if len(chat.messages) > MANY_MESSAGES else render()


def encode_long(tokenizer: HFTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a long text. Unlike encode(), this releases the interpreter's lock."""
    return tokenizer.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def served_model(
    model: str, args: EngineArgs, names: Sequence[str], template: str | None, parsers: Sequence[str], max_model_len: int
) -> ServedModel:
    """Build a ServedModel for `model`, a folder or a name on the Hub.

    Without `names`, clients use the name on the Hub, or the last part of the folder's path. `parsers` are the names of
    tool_call_parser and reasoning_parser. Raise ValueError if the checkpoint's tokenizer or generation config
    cannot be read.
    """
    default_name = Path(model).resolve().name if Path(model).exists() else model
    recommended = default_sampling_params(args.model, args.generation_config, args.override_generation_config)
    recommended.pop("max_tokens", None)
    tokenizer = tokenizer_of(args)
    return ServedModel(
        names=names or [default_name],
        other_names=[] if names else [model],
        tokenizer=tokenizer,
        chat_template=template,
        formats=model_formats(tokenizer, template, *parsers),
        recommended=recommended,
        max_model_len=max_model_len,
    )
