"""InputProcessor: a prompt and its SamplingParams into a Sequence for each sample, or one clear error."""

import random

from ..llama import ModelConfig, StreamDecoder, Tokenizer
from .sampling_params import SamplingParams
from .sequence import Sequence

Prompt = str | list[int]  # a text (BOS is put before it) or token ids (taken as they are)


class InputProcessor:
    sequence_class = Sequence  # a subclass may name one that keeps more

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int, seed: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)  # for requests that bring none
        self._eos_token_ids = set(model.eos_token_ids)
        if tokenizer and not self._eos_token_ids:
            self._eos_token_ids = {tokenizer.eos_token_id}

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """Raises ValueError, naming both numbers, for a prompt that the model cannot take."""
        token_ids = self._token_ids(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty: 0 tokens, at least 1 is needed")
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; max_model_len {self._max_model_len} leaves room for "
                f"{self._max_model_len - 1} and one new token"
            )
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        return [self._sequence(request_id, prompt, token_ids, params, seed, i) for i in range(params.n)]

    def _sequence(
        self, request_id: str, prompt: Prompt, token_ids: list[int], params: SamplingParams, seed: int, index: int
    ) -> Sequence:
        stop_token_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos_token_ids)
        return self.sequence_class(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            stop_token_ids=frozenset(stop_token_ids),
            max_num_tokens=min(len(token_ids) + params.max_tokens, self._max_model_len),
            decoder=StreamDecoder(self._tokenizer, token_ids) if self._tokenizer else None,
            sample_index=index,
        )

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("the checkpoint has no tokenizer.model: a prompt must be a list of token ids")
            try:
                prompt.encode()
            except UnicodeEncodeError as half:  # half a character; of a command line: a byte that is not UTF-8
                raise ValueError(f"the prompt is no UTF-8 text: {prompt[half.start]!r} in place {half.start}") from None
            token_ids = self._tokenizer.encode(prompt) if prompt else []
        elif isinstance(prompt, list | tuple):
            token_ids = list(prompt)
        else:
            raise ValueError(f"a prompt must be a text or a list of token ids, not {type(prompt).__name__}")
        vocab_size = self._model.vocab_size  # a tokenizer may know more tokens than the model
        wrong = [i for i in token_ids if type(i) is not int or not 0 <= i < vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]!r} is not an int from 0 to {vocab_size - 1}")
        return token_ids
