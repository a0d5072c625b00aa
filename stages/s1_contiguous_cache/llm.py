"""LLM: prompts in, outputs out, in static batches: a batch runs until its last member ends, then the next begins."""

import itertools
from collections import abc, deque
from contextlib import closing
from pathlib import Path
from typing import Any

from .attention import ContiguousAttention
from .config import EngineConfig
from .input_processor import InputProcessor, Prompt
from .interrupts import interrupts_held_back
from .kv_cache import KVCache, PoolReport, num_slots_for
from .llama import ModelConfig, Tokenizer, load_model
from .model_runner import ModelRunner, Scheduled
from .outputs import RequestOutput
from .sampling import SampledToken, SamplingParams
from .sequence import Sequence, request_output
from .slot_manager import SlotManager

Prompts = Prompt | abc.Sequence[Prompt]
Params = SamplingParams | abc.Sequence[SamplingParams] | None  # one for all prompts, or one for each


class LLM:
    """The engine: LLM(model="models/storyteller", kv_cache_tokens=8192).generate("Once upon a time")

    An LLM belongs to one thread, and has one open stream() at a time.
    """

    def __init__(self, model: str | Path = EngineConfig.model, **options: Any) -> None:
        """`options` are the other fields of EngineConfig. Raises ValueError for a bad value or checkpoint."""
        self.config = EngineConfig(str(model) if isinstance(model, Path) else model, **options)
        self.model_config = ModelConfig.from_folder(model)
        self.max_model_len = self.config.longest_sequence(self.model_config.max_position_embeddings)
        device = self.config.torch_device()
        dtype = self.config.torch_dtype(self.model_config.dtype)
        self.tokenizer = Tokenizer(model) if (Path(model) / "tokenizer.model").exists() else None
        llama = load_model(model, self.model_config, dtype, device, self.max_model_len)
        num_slots = num_slots_for(self.config, self.model_config, self.max_model_len, device)
        self.kv_cache = KVCache(self.model_config, num_slots, dtype, device)
        self.kv_cache_manager = SlotManager(num_slots, self.config.reservation, self.max_model_len)
        attention = ContiguousAttention(self.kv_cache)
        self.model_runner = ModelRunner(llama, attention, device)
        self.input_processor = InputProcessor(self.model_config, self.tokenizer, self.max_model_len, self.config.seed)
        self._request_ids = map(str, itertools.count())
        self._is_streaming = False

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held, in the engine's life."""
        return self.kv_cache_manager.peak

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:
        """One finished output a prompt, in the order of the prompts.

        A request that cannot be served ends with finish_reason "error" and RequestOutput.error, in its place.
        """
        # Without closing(), the traceback of an error would keep the generator alive, and so its slots held.
        with closing(self.stream(prompts, sampling_params)) as outputs:
            finished = [output for output in outputs if output.finished]
        return sorted(finished, key=lambda output: int(output.request_id))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        """Yield a request's output so far whenever it got a token. Closing the iterator gives back what it holds.

        Raises ValueError at once if there are not as many sampling_params as prompts, and when it begins if another
        stream() of this LLM has begun and not ended. Ctrl-C is taken between two steps.
        """
        requests = [self._add_request(prompt, params) for prompt, params in pair(prompts, sampling_params)]
        return self._serve(requests)

    def _add_request(self, prompt: Prompt, params: SamplingParams) -> Sequence | RequestOutput:
        """A sequence that can be served, at least alone; otherwise the output that says why not."""
        request_id = next(self._request_ids)
        try:
            seq = self.input_processor.process(request_id, prompt, params)
        except ValueError as error:
            return RequestOutput.failed(request_id, prompt, str(error))
        needed, num_slots = self.kv_cache_manager.num_reserved(seq), self.kv_cache_manager.num_slots
        if needed > num_slots:
            why = f"the request reserves {needed} slots, the pool has {num_slots}"
            return RequestOutput.failed(request_id, prompt, why)
        return seq

    def _serve(self, requests: list[Sequence | RequestOutput]) -> abc.Generator[RequestOutput, None, None]:
        """All prompts of a batch in one step, then one token a step for each sequence that has not ended."""
        if self._is_streaming:
            raise ValueError("another stream() of this LLM is open: drain or close it first")
        waiting = deque(request for request in requests if isinstance(request, Sequence))
        running: list[Sequence] = []
        with interrupts_held_back() as between_steps:
            try:
                self._is_streaming = True
                outputs = [request for request in requests if isinstance(request, RequestOutput)]
                with between_steps:
                    yield from outputs
                while waiting or running:
                    running = running or self._admit(waiting)
                    outputs = self._step(running)
                    running = [seq for seq in running if not seq.finished]
                    with between_steps:
                        yield from outputs
            finally:  # the caller closed the iterator, a step failed, Ctrl-C, or nothing is left to do
                self._is_streaming = False
                for seq in running:
                    self.kv_cache_manager.free(seq)

    def _admit(self, waiting: deque[Sequence]) -> list[Sequence]:
        """The next batch: first come first served, as many as the pool and max_num_seqs allow."""
        batch: list[Sequence] = []
        while waiting and len(batch) < self.config.max_num_seqs and self.kv_cache_manager.can_allocate(waiting[0]):
            self.kv_cache_manager.allocate(waiting[0])
            batch.append(waiting.popleft())
        assert batch, "nobody holds a slot, and _add_request() has seen that each fits alone"
        return batch

    def _step(self, running: list[Sequence]) -> list[RequestOutput]:
        for seq in running:
            self.kv_cache_manager.append_slot(seq)
        scheduled = [(seq, seq.num_uncomputed_tokens) for seq in running]
        for (seq, num_tokens), token in zip(scheduled, self._run(scheduled), strict=True):
            if not seq.finished:  # else it has failed, and nothing of it was computed
                seq.num_computed_tokens += num_tokens
            if token is not None:
                seq.append_token(token)
        for seq in running:
            if seq.finished:
                self.kv_cache_manager.free(seq)
        return [request_output(seq) for seq in running]

    def _run(self, batch: list[Scheduled]) -> list[SampledToken | None]:
        """A step of the model. If it raises, its sequences run again one by one: one that raises alone has failed."""
        try:
            return self.model_runner.run(batch)
        except Exception as error:
            if len(batch) > 1:
                return [token for scheduled in batch for token in self._run([scheduled])]
            batch[0][0].fail(f"{type(error).__name__}: {error}")
            return [None]


def pair(prompts: Prompts, sampling_params: Params) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. Raises ValueError for what is neither, or if their numbers differ.

    >>> [params.max_tokens for _, params in pair(["a", "b"], SamplingParams(max_tokens=4))]
    [4, 4]
    """
    if not isinstance(prompts, abc.Sequence):
        raise ValueError(f"prompts must be a text, token ids or a list of such prompts, not {type(prompts).__name__}")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]  # type: ignore
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    given = sampling_params if isinstance(sampling_params, abc.Sequence) else [sampling_params]
    strangers = [type(params).__name__ for params in given if not isinstance(params, SamplingParams)]
    if strangers:
        raise ValueError(f"sampling_params must be one SamplingParams or a list of them, not {strangers[0]}")
    if len(prompts) != len(sampling_params):
        raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
    return list(zip(prompts, sampling_params, strict=True))  # type: ignore[arg-type]
