"""LLM: prompts in, outputs out, in static batches: a batch runs until its last sequence ends, then the next begins."""

import itertools
from collections import abc, deque
from pathlib import Path
from typing import Any

import torch

from .attention import GatherAttention
from .block_manager import BlockManager
from .config import EngineConfig
from .input_processor import InputProcessor, Prompt
from .kv_cache import KVCache, PoolReport
from .llama import ModelConfig, Tokenizer, load_model
from .model_runner import ModelRunner
from .observer import Observer
from .outputs import RequestOutput
from .sampling import SamplingParams
from .sequence import Sequence, request_output

Prompts = Prompt | abc.Sequence[Prompt]
Params = SamplingParams | abc.Sequence[SamplingParams] | None  # one for all prompts, or one for each


class LLM:
    """The engine: LLM(model="models/storyteller", kv_cache_tokens=8192).generate("Once upon a time")."""

    def __init__(
        self, model: str | Path = EngineConfig.model, observer: Observer | None = None, **options: Any
    ) -> None:
        """Load a checkpoint. `options` are the other fields of EngineConfig."""
        self.config = config = EngineConfig(str(model), **options)
        self.observer = observer or Observer()
        self.model_config = ModelConfig.from_folder(model)
        num_blocks, longest = config.kv_cache_tokens // config.block_size, self.model_config.max_context_len
        self.max_model_len = config.max_model_len or min(longest, num_blocks * config.block_size)
        if self.max_model_len > longest:
            raise ValueError(f"max_model_len is {self.max_model_len}, the model reads at most {longest} tokens")
        device, dtype = torch.device(config.device), config.torch_dtype(self.model_config.dtype)
        self.tokenizer = Tokenizer(model) if (Path(model) / "tokenizer.model").exists() else None
        llama = load_model(model, self.model_config, dtype, device, self.max_model_len)
        self.kv_cache = KVCache(self.model_config, num_blocks, config.block_size, dtype, device)
        self.kv_cache_manager = BlockManager(num_blocks, config.block_size, self.observer)
        self.model_runner = ModelRunner(llama, GatherAttention(self.kv_cache), config.block_size, device)
        self.input_processor = InputProcessor(self.model_config, self.tokenizer, self.max_model_len, config.seed)
        self._request_ids = map(str, itertools.count())

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held, since the start."""
        return self.kv_cache_manager.peak

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:
        """Return one finished output for each prompt, in their order.

        A request that cannot be served has finish_reason "error", and RequestOutput.error says why.
        """
        finished = [output for output in self.stream(prompts, sampling_params) if output.finished]
        return sorted(finished, key=lambda output: int(output.request_id))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        """Yield the output of a request so far whenever it has a new token. Close the iterator to free its blocks."""
        return self._serve([self._process(prompt, params) for prompt, params in pair(prompts, sampling_params)])

    def _process(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Return a request as a sequence. If it cannot be served, the sequence has finished with an error."""
        seq = self.input_processor.process(next(self._request_ids), prompt, params)
        needed, num_blocks = self.kv_cache_manager.num_promised(seq), self.kv_cache_manager.num_blocks
        if not seq.finished and needed > num_blocks:
            seq.finish("error", f"the request may need {needed} blocks, the pool has {num_blocks}")
        return seq

    def _serve(self, seqs: list[Sequence]) -> abc.Generator[RequestOutput, None, None]:
        """Run batch after batch, and yield the outputs of each step."""
        refused = [seq for seq in seqs if seq.finished]
        for seq in refused:
            self.observer.tell("refuse", seq.request_id, seq.error)
        waiting, running = deque(seq for seq in seqs if not seq.finished), list[Sequence]()
        for seq in waiting:
            self.observer.tell("add", seq)
        try:
            yield from [request_output(seq) for seq in refused]
            while waiting or running:
                self.observer.tell("begin")
                if not running:
                    running = self._admit(waiting)
                elif waiting:
                    self.observer.tell("wait", waiting[0], "batch", None, None)
                self._step(running)
                outputs = [request_output(seq) for seq in running]
                running = [seq for seq in running if not seq.finished]
                self.observer.tell("end")
                yield from outputs
        finally:  # the iterator was closed, or a step has failed
            for seq in [*running, *waiting]:
                seq.finish("abort")
                self._remove(seq)

    def _admit(self, waiting: deque[Sequence]) -> list[Sequence]:
        """Return the next batch: first come, first served, as many as max_num_seqs and promises allow."""
        manager, max_num_seqs = self.kv_cache_manager, self.config.max_num_seqs
        batch: list[Sequence] = []
        while waiting and len(batch) < max_num_seqs and manager.can_promise(waiting[0]):
            batch.append(waiting.popleft())
            manager.allocate(batch[-1])
            self.observer.tell("admit", batch[-1])
        if waiting and len(batch) == max_num_seqs:
            self.observer.tell("wait", waiting[0], "seat", 1, 0)
        elif waiting:
            needed, free = manager.num_promised(waiting[0]), manager.num_unpromised_blocks
            self.observer.tell("wait", waiting[0], "promise", needed, free)
        assert batch, "no sequence fits: another stream() of this LLM holds blocks"
        return batch

    def _step(self, running: list[Sequence]) -> None:
        """Compute all that is uncomputed of each sequence, a prompt or a token, and append its next token."""
        for seq in running:
            self.kv_cache_manager.append_slot(seq)
        batch = [(seq, seq.num_uncomputed_tokens) for seq in running]
        self.observer.tell("schedule", batch)
        for (seq, num_tokens), token in zip(batch, self.model_runner.run(batch), strict=True):
            seq.num_computed_tokens += num_tokens
            seq.append_token(token)
        self.observer.tell("step", batch, running)
        for seq in running:
            if seq.finished:
                self._remove(seq)

    def _remove(self, seq: Sequence) -> None:
        """Free the blocks of a sequence that has finished."""
        if seq.block_table:
            self.kv_cache_manager.free(seq)
        self.observer.tell("finish", seq)


def pair(prompts: Prompts, sampling_params: Params) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its parameters. Raise ValueError if there are not as many of each.

    >>> [params.max_tokens for _, params in pair(["a", "b"], SamplingParams(max_tokens=4))]
    [4, 4]
    """
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]  # type: ignore
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    if len(prompts) != len(sampling_params):
        raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
    return list(zip(prompts, sampling_params, strict=True))  # type: ignore[arg-type]
