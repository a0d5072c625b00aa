"""InputProcessor: turns a prompt and its SamplingParams into one Sequence for each sample."""

import random
from dataclasses import replace

from .llama import ModelConfig, Tokenizer
from .sampling import SamplingParams
from .sequence import Sequence

Prompt = str | list[int]  # text, which gets a BOS token, or token ids, which are used as they are


class InputProcessor:
    """A factory for sequences. It rejects prompts and parameters that cannot be served."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int, seed: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)  # for requests without a seed of their own

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """Return a sequence for each sample. If the prompt cannot be served, return one that finished with an error."""
        if isinstance(prompt, str):
            text, token_ids = prompt, self._tokenizer.encode(prompt) if self._tokenizer else []
        else:
            text, token_ids = None, list(prompt)
        seq = Sequence(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._seeds.getrandbits(62) if params.seed is None else params.seed,
            stop_token_ids={*params.stop_token_ids, *(() if params.ignore_eos else self._model.eos_token_ids)},
            max_num_tokens=min(len(token_ids) + params.max_tokens, self._max_model_len),
            tokenizer=self._tokenizer,
        )
        if error := self._find_error(prompt, token_ids):
            seq.finish("error", error)
            return [seq]
        return [seq, *(replace(seq, sample_index=index) for index in range(1, params.n))]

    def _find_error(self, prompt: Prompt, token_ids: list[int]) -> str | None:
        """Return why a prompt cannot be served, or None."""
        if not prompt:
            return "the prompt is empty"
        if not token_ids:
            return "the checkpoint has no tokenizer.model: pass token ids instead of text"
        if len(token_ids) >= self._max_model_len:
            return f"the prompt has {len(token_ids)} tokens, max_model_len is {self._max_model_len}: no room for output"
        if not all(0 <= token_id < self._model.vocab_size for token_id in token_ids):
            return f"the prompt has token ids outside of 0 .. {self._model.vocab_size - 1}"
        return None
