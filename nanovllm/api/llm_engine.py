"""LLMEngine with vLLM's methods, and with parts that count. Scripts that step an engine by themselves use it."""

import threading
from collections import abc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ..backends.cpu.choice import Choice
from ..backends.options import backend_of
from ..backends.gpu.choice import GpuChoice
from ..checkpoints.dummy import dummy_model
from ..checkpoints.generation_config import eos_token_ids
from ..checkpoints.hub import find_tokenizer
from ..checkpoints.load_tokenizer import load_tokenizer
from ..engine.config import EngineConfig
from ..engine.sampling_params import SamplingParams as CoreSamplingParams
from ..engine.sequence import Sequence
from ..llama import LlamaForCausalLM
from .counting import BlockManager, CountedSequence, Scheduler
from .engine import InputProcessor
from .engine import LLMEngine as BaseLLMEngine
from .engine_args import EngineArgs, check_is_args
from .metrics import Metric, as_metrics
from .model_runner import ModelRunner
from .only_in_vllm import refuse
from .params import SamplingParams
from .prompts import ParsedPrompt, PromptType, TokensPrompt, as_prompt, options_of, whole_text
from .stats import EngineStats, collect
from .tally import Tally


class LLMEngine(BaseLLMEngine):
    """It belongs to the thread that made it; stats() may be asked from any. AsyncLLM serves several callers."""

    kv_cache_manager: BlockManager
    scheduler: Scheduler
    kernels: Choice | GpuChoice

    def __init__(self, config: EngineConfig, args: EngineArgs | None = None) -> None:
        self.engine_args = args or EngineArgs(**vars(config))
        self._thread = threading.current_thread()
        super().__init__(config)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Raises ValueError for a bad value or checkpoint. `usage_context` says nothing here."""
        refuse(stat_loggers=stat_loggers, enable_multiprocessing=enable_multiprocessing)
        check_is_args(engine_args)
        return cls(engine_args.engine_config(), engine_args)

    def add_request(  # type: ignore[override]
        self,
        request_id: str,
        prompt: PromptType,
        params: CoreSamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
    ) -> str:
        """Returns the request's id. Raises ValueError for a request that can never be served, and then adds nothing.

        `prompt_text` is shown as the output's prompt, where the prompt is token ids.
        """
        self.check_thread()
        refuse(arrival_time=arrival_time, lora_request=lora_request, trace_headers=trace_headers, priority=priority)
        refuse(session_id=session_id, kv_hints=kv_hints)
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a text, not {request_id!r}")
        if not isinstance(prompt_text, str | None):
            raise ValueError(f"prompt_text must be a text, not {prompt_text!r}")
        parsed = self.tokenized(as_prompt(prompt), tokenization_kwargs)
        if isinstance(parsed, dict):
            prompt_text = parsed.get("prompt", prompt_text)
            parsed = parsed["prompt_token_ids"]
        if not self._requests:
            self.kernels.take_up()
        super().add_request(request_id, parsed, SamplingParams() if params is None else SamplingParams.of(params))
        for seq in self._requests[request_id]:
            seq.prompt = seq.prompt if prompt_text is None else prompt_text
        return request_id

    def tokenized(self, prompt: ParsedPrompt, tokenization_kwargs: dict[str, Any] | None) -> ParsedPrompt:
        """A text as token ids where the caller says how. Raises ValueError for what only vLLM's tokenizers do."""
        options = options_of("tokenization_kwargs", tokenization_kwargs)
        if not options or not isinstance(prompt, str):
            return prompt
        special = bool(options.pop("add_special_tokens", True))
        refuse(**{f"tokenization_kwargs[{name!r}]": value for name, value in options.items()})
        ids = self.get_tokenizer().encode(whole_text(prompt), add_special_tokens=special)
        return TokensPrompt(prompt_token_ids=ids, prompt=prompt)

    def abort_request(  # type: ignore[override]
        self, request_ids: str | abc.Iterable[str], internal: bool = False
    ) -> Any:
        """End a request in any state. Returns its last output; None, and nothing happens, if it is not here.

        Of several, given as a list, it returns the outputs of those that are here.
        """
        self.check_thread()
        if isinstance(request_ids, str):
            return super().abort_request(request_ids)
        outputs = [super(LLMEngine, self).abort_request(request_id) for request_id in listed_ids(request_ids)]
        return [output for output in outputs if output is not None]

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> dict[str, list[Sequence]]:
        """The samples of each request that has not ended."""
        return self._requests

    def get_tokenizer(self) -> Any:
        """Raises ValueError if there is none."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: prompts must be token ids")
        return self.tokenizer

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what is cached, on the host too. Returns False, and changes nothing, while a request runs.

        With `reset_running_requests` they are preempted first, and computed again.
        """
        self.check_thread()
        if reset_running_requests:
            self.scheduler.preempt_all()
        return self.kv_cache_manager.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return collect(self)

    def get_metrics(self) -> list[Metric]:
        name = self.engine_args.served_model_name or str(self.engine_args.model)
        labels = {"model_name": name if isinstance(name, str) else name[0], "engine": "0"}
        live = [seq for samples in list(self._requests.values()) for seq in samples if not seq.finished]
        metrics = as_metrics(self.stats(), self.tally, labels, self.kv_cache.blocks[0].nbytes)
        return metrics + self.tally.histograms(live, labels)

    def check_thread(self) -> None:
        """Raises RuntimeError in another thread than the one that made the engine."""
        if threading.current_thread() is not self._thread:
            here, owner = threading.current_thread().name, self._thread.name
            raise RuntimeError(
                f"the engine belongs to thread {owner!r} and was called from {here!r}: "
                "AsyncLLM serves several callers with one engine"
            )

    def find_model(self, model: str) -> Path:
        return Path(model) if self.engine_args.load_format == "dummy" else super().find_model(model)

    def build_model(self) -> LlamaForCausalLM:
        if self.engine_args.load_format == "dummy":
            return dummy_model(self.config.model, self.model_config, self.dtype, self.device, self.max_model_len)
        return super().build_model()

    def build_input_processor(self) -> InputProcessor:
        if (folder := self.engine_args.generation_config) not in ("auto", "vllm"):
            self.model_config = replace(self.model_config, eos_token_ids=eos_token_ids(folder))
        processor = super().build_input_processor()
        self.tally = Tally(self.max_model_len)
        processor.sequence_class = partial(CountedSequence, self.tally)  # type: ignore[assignment]
        return processor

    def build_block_manager(self) -> BlockManager:
        caching = self.config.enable_prefix_caching
        return BlockManager(self.kv_cache.num_blocks, self.config.block_size, caching, self.host_kv_cache)

    def build_model_runner(self, model: LlamaForCausalLM) -> ModelRunner:
        """It computes with kernels, or will when they are compiled, or never: `kernels` says."""
        from ..backends.cpu.runner import KernelRunner, refusal
        from ..backends.gpu.runner import GpuRunner  # which are built on this package

        args, is_gpu = self.engine_args, self.device.type == "cuda"
        backend = backend_of(args.attention_backend, args.enforce_eager, is_gpu)
        parts = model, self.kv_cache, self.config.slots_in_a_tile(), self.max_model_len, self.device
        if is_gpu:
            on_gpu = GpuRunner(*parts)
            self.kernels = GpuChoice(backend, bool(args.enforce_eager), on_gpu, self.config.max_num_seqs)
            return on_gpu
        runner = KernelRunner(*parts)
        self.kernels = Choice(backend, runner, self.dtype, refusal(model, self.device, self.dtype))
        return runner

    def build_scheduler(self) -> Scheduler:
        return Scheduler(self.config, self.kv_cache_manager)

    def build_tokenizer(self) -> Any:
        args = self.engine_args
        if args.skip_tokenizer_init:
            return None
        if not args.tokenizer:
            return load_tokenizer(self.config.model)
        of_the_hub = {"cache_dir": args.download_dir, "token": args.hf_token}
        tokenizer = load_tokenizer(find_tokenizer(args.tokenizer, args.tokenizer_revision, **of_the_hub))
        if tokenizer is None:
            raise ValueError(f"tokenizer {str(args.tokenizer)!r} is no folder with a tokenizer.json or tokenizer.model")
        return tokenizer


def listed_ids(request_ids: Any) -> list[str]:
    """A request's id, or several, as a list. Raises ValueError for what is none.

    >>> listed_ids("a"), listed_ids(("a", "b"))
    (['a'], ['a', 'b'])
    """
    ids = [request_ids] if isinstance(request_ids, str) or not isinstance(request_ids, abc.Iterable) else [*request_ids]
    for each in ids:
        if not isinstance(each, str):
            raise ValueError(f"a request_id must be a text, not {each!r}")
    return ids
