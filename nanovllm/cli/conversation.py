"""Conversation: what was said, and as much of it as fits the model as a prompt."""

from collections.abc import Sequence
from typing import Any

from ..checkpoints.chat_template import render_chat
from ..engine.sampling_params import SamplingParams
from ..llm import LLM

Message = dict[str, str]
ANSWER_SHARE = 4  # an answer has at least one part in four of the room


class Conversation:
    """The oldest turns are forgotten when the model has no room for all: a turn is a message and its answer."""

    def __init__(self, tokenizer: Any, template: str | None, room: int, system: str | None) -> None:
        """`room` is what the model takes, prompt and answer, in tokens. A `template` of None is the checkpoint's."""
        self._tokenizer, self._template, self.room = tokenizer, template, room
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[list[Message]] = []

    def ask(self, text: str) -> tuple[list[int], int]:
        """Begin a turn. Returns the prompt's token ids, and how many turns were forgotten.

        Raises ValueError if the model cannot take the message even alone; it is then as if it had not been said.
        """
        before = self.turns
        turns = [*before, [{"role": "user", "content": text}]]
        token_ids = self._token_ids(turns)
        while len(token_ids) > self.room - self.room // ANSWER_SHARE and len(turns) > 1:
            turns = turns[1:]
            token_ids = self._token_ids(turns)
        if len(token_ids) >= self.room:
            raise ValueError(f"the prompt would have {len(token_ids)} tokens, and there is room for {self.room - 1}")
        self.turns = turns
        return token_ids, len(before) + 1 - len(turns)

    def answer(self, text: str) -> None:
        """End the turn."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def undo(self) -> bool:
        """Forget the last turn. Returns False if there is none."""
        return bool(self.turns and self.turns.pop())

    def reset(self) -> None:
        self.turns = []

    def _token_ids(self, turns: list[list[Message]]) -> list[int]:
        messages = [*self._system, *(message for turn in turns for message in turn)]
        text = render_chat(self._tokenizer, messages, chat_template=self._template)
        return self._tokenizer.encode(text, add_special_tokens=False)  # the template writes BOS by itself


def room_of(llm: LLM) -> int:
    """The most tokens of a sequence: of the model's positions, and of the pool."""
    return min(llm.max_model_len, llm.kv_cache.num_blocks * llm.kv_cache.block_size)


def answer_params(llm: LLM, given: dict[str, Any], stop: Sequence[str]) -> SamplingParams:
    """The model's own parameters with those that are given; an answer ends where the model ends it.

    Raises ValueError for a value that cannot be.
    """
    params = llm.get_default_sampling_params()
    params.max_tokens = None
    for name, value in given.items():
        setattr(params, name, list(value) if isinstance(value, tuple) else value)
    params.stop = [*params.stop, *stop]
    return params.checked()
