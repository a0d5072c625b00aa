"""InputProcessor: a prompt and its SamplingParams into a Sequence for each sample, or one clear error."""

from typing import Any, cast

from ..engine.input_processor import InputProcessor as CoreInputProcessor
from ..engine.input_processor import Prompt
from ..engine.sampling_params import SamplingParams as CoreSamplingParams
from ..engine.sequence import Sequence as CoreSequence
from ..llama import ModelConfig, StreamDecoder, Tokenizer
from .bad_words import bad_words_token_ids
from .grammars import Grammars
from .logits_processors import make_processors
from .params import SamplingParams
from .sequence import Sequence


class InputProcessor(CoreInputProcessor):
    sequence_class: Any = Sequence

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int, seed: int) -> None:
        super().__init__(model, tokenizer, max_model_len, seed)
        # The tokenizer's EOS token ends a text, too, where the model names others; it alone gives no stop_reason.
        self._eos_token_id = tokenizer.eos_token_id if tokenizer else None
        self._eos_token_ids |= {self._eos_token_id} - {None}
        ends = {token_id for token_id in self._eos_token_ids if token_id < model.vocab_size}
        self._grammars = Grammars(cast(Any, tokenizer), model.vocab_size, ends)
        self._showing: Tokenizer = cast(Any, tokenizer).showing_special_tokens() if tokenizer else None

    def process(self, request_id: str, prompt: Prompt, params: CoreSamplingParams) -> list[CoreSequence]:
        """Raises ValueError for a prompt or parameters that cannot be served. The request has a copy of them."""
        params = SamplingParams.of(params).checked()
        self._check(params)
        asked = params.structured_outputs
        grammars = [[self._grammars.processor(asked)] if asked else [] for _ in range(params.n)]  # each has a state
        bad_words = bad_words_token_ids(params.bad_words, self._tokenizer, self._model.vocab_size)
        samples = super().process(request_id, prompt, params)
        room = self._max_model_len - samples[0].num_prompt_tokens
        if params.min_tokens > room:
            raise ValueError(f"min_tokens is {params.min_tokens}, and max_model_len leaves room for {room} new tokens")
        ends = self._eos_token_ids | {*params.stop_token_ids}
        held_back = {token_id for token_id in ends if token_id < self._model.vocab_size}  # a tokenizer may know more
        processors = make_processors(params, samples[0].prompt_token_ids, held_back, bad_words)
        for seq, grammar in zip(samples, grammars, strict=True):
            cast(Sequence, seq).logits_processors = [*grammar, *processors]
        return samples

    def _check(self, params: SamplingParams) -> None:
        """Raises ValueError for what this model or this tokenizer does not have."""
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self._tokenizer is None:
                raise ValueError(f"{name} is {getattr(params, name)}, and the checkpoint has no tokenizer")
        size = self._model.vocab_size
        for name in ("stop_token_ids", "logprob_token_ids", "logit_bias", "allowed_token_ids"):
            wrong = [token_id for token_id in getattr(params, name) or () if not 0 <= token_id < size]
            if wrong:
                raise ValueError(f"{name}: token id {wrong[0]} is not from 0 to {size - 1}")

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and self._tokenizer is None:
            raise ValueError(
                "the checkpoint has neither tokenizer.json nor tokenizer.model: a prompt must be a list of token ids"
            )
        return super()._token_ids(prompt)

    def _sequence(
        self, request_id: str, prompt: Prompt, token_ids: list[int], params: CoreSamplingParams, seed: int, index: int
    ) -> Sequence:
        params = cast(SamplingParams, params)
        tokenizer = self._tokenizer if params.skip_special_tokens else self._showing
        if not params.detokenize:
            tokenizer = None
        max_tokens = self._max_model_len if params.max_tokens is None else params.max_tokens
        return self.sequence_class(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            stop_token_ids=frozenset(params.stop_token_ids) | (set() if params.ignore_eos else self._eos_token_ids),
            max_num_tokens=min(len(token_ids) + max_tokens, self._max_model_len),
            decoder=StreamDecoder(tokenizer, token_ids) if tokenizer else None,
            sample_index=index,
            tokenizer=tokenizer and self._showing,
            eos_token_id=None if params.ignore_eos else self._eos_token_id,
        )
