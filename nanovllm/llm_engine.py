"""LLMEngine: an engine built from its options, with vLLM's methods. Its steps are in engine/core.py."""

from collections import abc
from typing import Any, Self

from .build import ChooseExecutor, build, start_ranks, with_checkpoint_folder
from .checkpoints.model_config import read_model_config
from .checkpoints.tokenizer import HFTokenizer
from .checks import check_unsupported
from .distributed.rank_group import RankError, RankGroup
from .engine.core import EngineCore
from .engine.interrupts import interrupts_held_back
from .metrics import Metric
from .options.config import EngineConfig
from .options.engine_args import EngineArgs
from .profiling import start_profile, stop_profile
from .requests.pooling_params import PoolingParams
from .requests.prompts import ParsedPrompt, PromptType, TokensPrompt, as_prompt, checked_options, parts_of, valid_text
from .requests.sampling_params import SamplingParams
from .stats import EngineStats, collect, get_metrics


class LLMEngine(EngineCore):
    """An engine for one thread: add requests, then step until they finish. Other threads may call only stats()."""

    def __init__(
        self,
        config: EngineConfig,
        observers: abc.Iterable[object] = (),
        choose_executor: ChooseExecutor | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Load the checkpoint and allocate the pools. Raise ValueError for an invalid option or checkpoint.

        `config.model` is a folder or a name on the Hugging Face Hub. If `choose_executor` is given, it returns the
        executor and its kernels for a pool, and no weights are loaded.

        With tensor parallelism, each rank is a complete engine with its part of the model, and all ranks make the same
        calls. Rank 0 starts the others, unless torchrun does. The engine of a rank that rank 0 started gets `ranks`.
        """
        config = with_checkpoint_folder(config)
        model_config = read_model_config(config.model, config.hf_overrides)
        ranks = start_ranks(config, model_config, self.run_rank) if ranks is None else ranks
        try:
            config = config.on_rank(ranks.local_rank) if ranks.world_size > 1 else config
            built = build(config, model_config, observers, choose_executor, ranks)
        except BaseException:
            ranks.close()
            raise
        super().__init__(built.parts)
        self.model_config, self.tokenizer, self.max_model_len = built.model_config, built.tokenizer, built.max_model_len
        self.device, self.dtype = built.parts.kv_cache.blocks.device, built.parts.kv_cache.dtype
        self.tally, self.tiers = built.tally, built.tiers
        self.host_tier, self.disk_tier = built.tiers.host, built.tiers.disk

    @classmethod
    def run_rank(cls, config: EngineConfig, ranks: RankGroup) -> None:
        """Run the engine of a rank other than 0, and repeat each call that rank 0 makes."""
        engine = cls(config, ranks=ranks)
        for method, args, kwargs in ranks.commands():
            try:
                method(engine, *args, **kwargs)
            except RankError:
                raise
            except Exception:  # the call failed on rank 0, too, and rank 0 reports the error
                continue

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: object = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Build an engine. Raise ValueError for an invalid option or checkpoint. `usage_context` has no effect."""
        check_unsupported(stat_loggers=stat_loggers, enable_multiprocessing=enable_multiprocessing)
        return cls(engine_args.engine_config())

    @interrupts_held_back()
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: object = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: object = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: object = None,
    ) -> str:
        """Queue a request, and return its id. It starts in the first step that has room for it.

        The only output of a request with PoolingParams is the embedding of its prompt. If the prompt is token ids,
        outputs show `prompt_text` as its text. Raise ValueError, and add nothing, if the request can never be served.
        """
        self.check_thread()
        options: dict[str, Any] = {"tokenization_kwargs": tokenization_kwargs, "prompt_text": prompt_text}
        self.ranks.announce(LLMEngine.add_request, request_id, prompt, params, **options)
        try:
            check_unsupported(arrival_time=arrival_time, lora_request=lora_request, trace_headers=trace_headers)
            check_unsupported(priority=priority, session_id=session_id, kv_hints=kv_hints)
            if not isinstance(request_id, str):
                raise ValueError(f"request_id must be a string, got {request_id!r}")
            parsed, text, cache_salt = parts_of(self.tokenized(as_prompt(prompt), tokenization_kwargs))
            prompt_text = prompt_text if text is None else text
            params = SamplingParams() if params is None else params
            self.add(request_id, parsed, params, prompt_text, cache_salt)
        except ValueError as error:
            self.observers.tell("refuse", str(request_id), str(error))
            raise
        return request_id

    def tokenized(self, prompt: ParsedPrompt, tokenization_kwargs: dict[str, Any] | None) -> ParsedPrompt:
        """Return the prompt, as token ids if it is text and tokenizer options are given.

        Raise ValueError for an unsupported option.
        """
        options = checked_options("tokenization_kwargs", tokenization_kwargs)
        text, _, cache_salt = parts_of(prompt)
        if not options or not isinstance(text, str):
            return prompt
        add_special_tokens = bool(options.pop("add_special_tokens", True))
        check_unsupported(**{f"tokenization_kwargs[{name!r}]": value for name, value in options.items()})
        token_ids = self.get_tokenizer().encode(valid_text(text), add_special_tokens=add_special_tokens)
        tokens = TokensPrompt(prompt_token_ids=token_ids, prompt=text)
        if cache_salt:
            tokens["cache_salt"] = cache_salt
        return tokens

    def get_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer. Raise ValueError if the checkpoint has none."""
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: pass token ids instead of text")
        return self.tokenizer

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record a profile until stop_profile(), as configured by profiler_config. See the ranges in profiling.py.

        The trace's file name starts with `profile_prefix`. Raise ValueError without profiler_config, or if a profile is
        already being recorded.
        """
        self.check_thread()
        if self.config.profiler_config is None:
            raise ValueError("start_profile() needs the option profiler_config, got None")
        start_profile(self.config.profiler_config, profile_prefix)

    def stop_profile(self) -> None:
        """Stop recording, and write the trace of torch's profiler. Raise ValueError if no profile is being recorded."""
        self.check_thread()
        stop_profile()

    def stats(self) -> EngineStats:
        """Return the state of the queues and pools, and counts since the start. Any thread may call this."""
        return collect(self, self.tally, self.tiers)

    def get_metrics(self) -> list[Metric]:
        """Return the statistics as metrics with vLLM's names."""
        return get_metrics(self, self.tally, self.tiers, self.config.served_model_name or self.config.model)
