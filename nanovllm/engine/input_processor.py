"""InputProcessor: turns a prompt and its parameters into one Sequence for each sample."""

import random
from dataclasses import replace

from ..checkpoints.tokenizer import HFTokenizer
from ..llama import ModelConfig
from ..requests.logits_processors import bad_words_token_ids, make_processors
from ..requests.pooling_params import PoolingParams
from ..requests.prompts import Prompt, valid_text
from ..requests.sampling_params import RequestOutputKind, SamplingParams
from ..requests.speculation import NgramDrafter, SpeculativeConfig
from ..requests.structured_outputs import Grammars
from .prefix_cache import root_hash
from .sequence import Sequence


class InputProcessor:
    """A factory for sequences. It rejects prompts and parameters that cannot be served."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: HFTokenizer | None,
        max_model_len: int,
        seed: int,
        speculation: SpeculativeConfig | None = None,
    ) -> None:
        self._vocab_size = model.vocab_size  # the tokenizer may know more tokens
        self._tokenizer = tokenizer
        self._max_model_len, self._hidden_size = max_model_len, model.hidden_size
        self._speculation = speculation
        self._seeds = random.Random(seed)  # for requests without a seed of their own
        # The tokenizer's EOS ends an output even if the model does not list it. Only this token makes stop_reason None.
        self._eos_token_id = tokenizer.eos_token_id if tokenizer else None
        self._eos_token_ids = {*model.eos_token_ids, *([] if self._eos_token_id is None else [self._eos_token_id])}
        self._grammars = Grammars(tokenizer, model.vocab_size, self._within_vocabulary(self._eos_token_ids))
        self._tokenizer_with_special_tokens = tokenizer.showing_special_tokens() if tokenizer else None

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, cache_salt: str | None = None
    ) -> list[Sequence]:
        """Return a sequence for each sample, with a copy of `params`.

        Raise ValueError for a prompt or parameters that cannot be served.
        """
        if isinstance(params, PoolingParams):
            return [replace(self._pooling_sequence(request_id, prompt, params), root_hash=root_hash(cache_salt))]
        params = SamplingParams.of(params).checked()
        self._check(params)
        spec = params.structured_outputs
        grammars = [[each] for each in self._grammars.processors(spec, params.n)] if spec else [[]] * params.n
        bad_words = bad_words_token_ids(params.bad_words or [], self._tokenizer, self._vocab_size)
        token_ids = self._token_ids(prompt, self._max_model_len - 1)
        room = self._max_model_len - len(token_ids)
        seq = self._sequence(request_id, prompt, token_ids, params)
        seq.root_hash = root_hash(cache_salt)
        samples = [seq, *(replace(seq, sample_index=index) for index in range(1, params.n))]
        if params.min_tokens > room:
            raise ValueError(f"min_tokens must be at most {room} to fit max_model_len, got {params.min_tokens}")
        banned_by_min_tokens = self._within_vocabulary(self._eos_token_ids | {*(params.stop_token_ids or [])})
        processors = make_processors(params, token_ids, banned_by_min_tokens, bad_words)
        for seq, grammar in zip(samples, grammars, strict=True):
            seq.logits_processors = [*grammar, *processors]
            # For logits processors and logprobs, each row of a draft would need the output up to that row.
            if self._speculation and not (seq.must_read_first or params.prompt_logprobs is not None):
                seq.drafter = NgramDrafter(self._speculation)
        return samples

    def _sequence(self, request_id: str, prompt: Prompt, token_ids: list[int], params: SamplingParams) -> Sequence:
        tokenizer = self._tokenizer if params.skip_special_tokens else self._tokenizer_with_special_tokens
        max_tokens = self._max_model_len if params.max_tokens is None else params.max_tokens
        return Sequence(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._seeds.getrandbits(62) if params.seed is None else params.seed,
            stop_token_ids={*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)},
            max_num_tokens=min(len(token_ids) + max_tokens, self._max_model_len),
            tokenizer=tokenizer if params.detokenize else None,
            logprobs_tokenizer=self._tokenizer_with_special_tokens if params.detokenize else None,
            eos_token_id=None if params.ignore_eos else self._eos_token_id,
        )

    def _pooling_sequence(self, request_id: str, prompt: Prompt, params: PoolingParams) -> Sequence:
        """Return a sequence that ends with an embedding. No token follows, so its prompt may fill max_model_len."""
        params, size = replace(params), self._hidden_size  # replace() checks the copy
        if params.dimensions not in (None, size):
            raise ValueError(f"dimensions must be {size}, the model's hidden_size, got {params.dimensions}")
        token_ids = self._token_ids(prompt, self._max_model_len)
        # with a fixed seed, since an embedding needs no random one
        final_only = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False, seed=0)
        seq = self._sequence(request_id, prompt, token_ids, final_only)
        return replace(seq, pooling_params=params, max_num_tokens=len(token_ids))

    def _token_ids(self, prompt: Prompt, limit: int) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("the checkpoint has no tokenizer: pass token ids instead of text")
            token_ids = self._tokenizer.encode(valid_text(prompt)) if prompt else []
        else:
            token_ids = list(prompt)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self._vocab_size)
            raise ValueError(f"the prompt's token ids must be from 0 to {self._vocab_size - 1}, got {wrong}")
        if not token_ids:
            raise ValueError("the prompt is empty: it must have at least 1 token, got 0")
        if len(token_ids) > limit:
            raise ValueError(
                f"the prompt must have at most {limit} tokens, since max_model_len is {self._max_model_len}, "
                f"got {len(token_ids)}"
            )
        return token_ids

    def _check(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that this model or tokenizer cannot serve."""
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self._tokenizer is None:
                raise ValueError(f"{name} needs a tokenizer, and the checkpoint has none: got {getattr(params, name)}")
        for name in ("stop_token_ids", "logprob_token_ids", "logit_bias", "allowed_token_ids"):
            wrong = [token_id for token_id in getattr(params, name) or () if not 0 <= token_id < self._vocab_size]
            if wrong:
                raise ValueError(f"{name}: a token id must be from 0 to {self._vocab_size - 1}, got {wrong[0]}")

    def _within_vocabulary(self, token_ids: set[int]) -> set[int]:
        return {token_id for token_id in token_ids if token_id < self._vocab_size}
