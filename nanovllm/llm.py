"""LLM: prompts in, outputs out, with vLLM's interface. A call adds requests and steps the engine until they finish."""

import copy
import itertools
import time
import warnings
from collections import abc
from contextlib import ExitStack, closing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from tqdm import tqdm

from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .checkpoints.chat_template import read_template, render_chat
from .checkpoints.model_config import default_sampling_params
from .checkpoints.tokenizer import HFTokenizer
from .checks import check_unsupported
from .engine.interrupts import interrupts_held_back
from .engine.kv_cache import PoolReport
from .llm_engine import LLMEngine
from .metrics import Metric
from .options.config import EngineConfig
from .options.engine_args import EngineArgs
from .requests.outputs import EmbeddingRequestOutput, RequestOutput
from .requests.pooling_params import PoolingParams
from .requests.prompts import Message, ParsedPrompt, PromptType, as_conversations, as_prompts, checked_options
from .requests.sampling_params import RequestOutputKind, SamplingParams
from .stats import EngineStats

Prompts = PromptType | abc.Sequence[PromptType]
Params = SamplingParams | abc.Sequence[SamplingParams] | None  # one for all prompts, or one for each prompt
Request = tuple[ParsedPrompt, SamplingParams]
ParamsType = TypeVar("ParamsType", SamplingParams, PoolingParams)


class Bar(Protocol):
    """The part of tqdm's interface that ProgressBar uses."""

    postfix: str

    def update(self, n: int) -> object: ...
    def close(self) -> object: ...


UseTqdm = bool | abc.Callable[..., Bar]  # True shows a bar; a callable builds one, with tqdm's arguments


class LLM:
    """An engine for scripts, as in LLM("models/storyteller").generate("Once upon a time").

    An LLM belongs to the first thread that uses it, and only one stream() may be open at a time.
    """

    def __init__(
        self, model: str | Path = EngineConfig.model, *, chat_template: str | Path | None = None, **options: Any
    ) -> None:
        """Build an engine. `options` are the other fields of EngineArgs.

        Raise TypeError for an unknown option, and ValueError for an invalid value or checkpoint.
        """
        args = EngineArgs(model=model, **options)
        self.chat_template = read_template(chat_template)
        self.config = args.engine_config()
        defaults = default_sampling_params(self.config.model, args.generation_config, args.override_generation_config)
        try:
            self._default_params = SamplingParams.from_optional(**defaults)
        except ValueError as error:
            raise ValueError(f"generation_config of {self.config.model}: {error}") from None
        self.llm_engine = engine = LLMEngine(self.config)
        self.tokenizer, self.model_config = engine.tokenizer, engine.model_config
        self.max_model_len = engine.max_model_len
        self._request_ids = map(str, itertools.count())
        self._is_streaming = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an LLM from EngineArgs."""
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(EngineArgs)})

    @property
    def peak(self) -> PoolReport:
        """The fullest state of the KV cache's pool since the start."""
        return self.llm_engine.kv_cache_manager.peak

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: object = None,
        priority: int | list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return one finished output per prompt, in the order of the prompts.

        By default, sampling_params come from the model's generation_config.json. If a request cannot be served, the
        finish_reason of its output is "error", RequestOutput.error gives the reason, and a warning is issued. Raise
        ValueError for an invalid prompt, before computing anything.
        """
        check_unsupported(lora_request=lora_request, priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        self.llm_engine.check_thread()
        parsed_prompts = [self.llm_engine.tokenized(prompt, tokenization_kwargs) for prompt in as_prompts(prompts)]
        return self._generate(self._requests(parsed_prompts, sampling_params), use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        """Yield outputs as they are generated, in the form that output_kind selects.

        Close the iterator to abort unfinished requests. Raise ValueError for an invalid prompt, or if the numbers of
        prompts and sampling_params differ. The first iteration raises ValueError if another stream() is open or if
        `llm_engine` has unfinished requests.
        """
        self.llm_engine.check_thread()
        return self._serve(self._requests(as_prompts(prompts), sampling_params))

    def chat(
        self,
        messages: list[Message] | abc.Sequence[list[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: object = None,
        priority: int | list[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the model's answers to one or more conversations, in order.

        The chat template, by default the model's own, turns each conversation into a prompt. Raise ValueError if there
        is no template, or if the template rejects a conversation.
        """
        check_unsupported(lora_request=lora_request, priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        self.llm_engine.check_thread()
        options: dict[str, Any] = {"tools": tools, "chat_template": chat_template or self.chat_template}
        options["add_generation_prompt"] = add_generation_prompt
        options["continue_final_message"] = continue_final_message
        options |= checked_options("chat_template_kwargs", chat_template_kwargs)
        conversations = as_conversations(messages, chat_template_content_format)
        # The template already adds BOS.
        tokenizer_options = {"add_special_tokens": False} | checked_options("tokenization_kwargs", tokenization_kwargs)
        texts = (render_chat(self.get_tokenizer(), conversation, **options) for conversation in conversations)
        prompts = [self.llm_engine.tokenized(text, tokenizer_options) for text in texts]
        return self._generate(self._requests(prompts, sampling_params), use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | abc.Sequence[PoolingParams] | None = None,
        lora_request: object = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in order: the hidden state of its last token, by default normalized.

        Raise ValueError, before computing anything, for a prompt that is invalid or too long.
        """
        check_unsupported(lora_request=lora_request)
        self.llm_engine.check_thread()
        parsed_prompts = [self.llm_engine.tokenized(prompt, tokenization_kwargs) for prompt in as_prompts(prompts)]
        params = PoolingParams() if pooling_params is None else pooling_params
        outputs, requests = [], pair_with_params(parsed_prompts, params, PoolingParams, "pooling_params")
        with ProgressBar(use_tqdm, len(requests)) as bar, closing(self._serve(requests)) as stream:
            for output in stream:  # rejected requests come first, and from_base() raises for them
                outputs.append(EmbeddingRequestOutput.from_base(output))
                bar.add(output)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: object = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return one output per prompt, in order, each with up to beam_width sequences, best first.

        Prompts are processed one at a time, and concurrency_limit has no effect. If a prompt cannot be served,
        `error` in its output gives the reason. Raise ValueError if the engine has unfinished requests.
        """
        check_unsupported(lora_request=lora_request)
        self.llm_engine.check_thread()
        if self.llm_engine.has_unfinished_requests():
            raise ValueError("beam_search needs an idle engine, and this one has unfinished requests")
        self.llm_engine.kernels.switch_when_ready()
        search, outputs, parsed_prompts = BeamSearch(self.llm_engine, params), [], as_prompts(prompts)
        with ProgressBar(use_tqdm, len(parsed_prompts) * params.beam_width) as bar:
            for prompt in parsed_prompts:
                outputs.append(search.run(next(self._request_ids), prompt))
                bar.add(outputs[-1])
        warn_of_errors(outputs, stacklevel=3)
        return outputs

    def get_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer. Raise ValueError if the checkpoint has none."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the default sampling_params, from the model's generation_config.json."""
        return self._default_params.clone()

    def get_metrics(self) -> list[Metric]:
        """Return the statistics as metrics with vLLM's names."""
        return self.llm_engine.get_metrics()

    def stats(self) -> EngineStats:
        """Return the state of the queues and pools, and counts since the start. Any thread may call this."""
        return self.llm_engine.stats()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record a profile until stop_profile(), as configured by profiler_config. See the ranges in profiling.py."""
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """Stop recording, and write the trace of torch's profiler. Raise ValueError if no profile is being recorded."""
        self.llm_engine.stop_profile()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache in all tiers, disk included. Return False, and change nothing, while a request runs.

        With `reset_running_requests`, preempt all running requests first, so that they start over.
        """
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def _requests(self, prompts: list[ParsedPrompt], params: Params) -> list[Request]:
        params = self.get_default_sampling_params() if params is None else params
        return pair_with_params(prompts, params, SamplingParams, "sampling_params")

    def _generate(self, requests: list[Request], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Return the final outputs, regardless of output_kind."""
        requests = [(prompt, final_only(params)) for prompt, params in requests]
        # Without closing(), the traceback of an error would keep the generator alive and its requests unfinished.
        outputs, num_samples = [], sum(params.n for _, params in requests)
        with ProgressBar(use_tqdm, num_samples) as bar, closing(self._serve(requests)) as stream:
            for output in stream:
                outputs.append(output)
                bar.add(output)
        warn_of_errors(outputs, stacklevel=4)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _serve(
        self, requests: abc.Sequence[tuple[ParsedPrompt, SamplingParams | PoolingParams]]
    ) -> abc.Generator[RequestOutput, None, None]:
        if self._is_streaming or self.llm_engine.has_unfinished_requests():
            raise ValueError("the engine has unfinished requests: finish or close the open stream() first")
        request_ids = list(itertools.islice(self._request_ids, len(requests)))
        with interrupts_held_back() as between_steps:
            try:
                self._is_streaming = True
                outputs = []
                for request_id, (prompt, params) in zip(request_ids, requests, strict=True):
                    try:
                        self.llm_engine.add_request(request_id, prompt, params)
                    except ValueError as error:
                        outputs.append(RequestOutput.failed(request_id, prompt, str(error)))
                with between_steps:
                    yield from outputs
                while self.llm_engine.has_unfinished_requests():
                    outputs = self.llm_engine.step()
                    with between_steps:
                        yield from outputs
            finally:
                self._is_streaming = False
                with ExitStack() as stack:  # abort every request, even if aborting one raises
                    for request_id in request_ids:
                        stack.callback(self.llm_engine.abort_request, request_id)


def pair_with_params(
    prompts: list[ParsedPrompt], params: ParamsType | abc.Sequence[ParamsType], params_type: type[ParamsType], name: str
) -> list[tuple[ParsedPrompt, ParamsType]]:
    """Pair each prompt with its params. Raise ValueError if their numbers differ, or for params of a wrong type.

    `name` is the name of the argument `params` in the error.

    >>> pairs = pair_with_params(["a", "b"], SamplingParams(max_tokens=4), SamplingParams, "sampling_params")
    >>> [params.max_tokens for _, params in pairs]
    [4, 4]
    """
    if isinstance(params, params_type):
        params = [params] * len(prompts)
    params_list = params if isinstance(params, abc.Sequence) else [params]
    wrong_types = [type(item).__name__ for item in params_list if not isinstance(item, params_type)]
    if wrong_types:
        raise ValueError(f"{name} must be {params_type.__name__} or a list of them, got {wrong_types[0]}")
    if len(prompts) != len(params_list):
        raise ValueError(f"{name} must have one entry for each of the {len(prompts)} prompts, got {len(params_list)}")
    return list(zip(prompts, params_list, strict=True))


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a shallow copy of `params` that asks only for the final output."""
    params = copy.copy(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def warn_of_errors(outputs: abc.Sequence[RequestOutput], stacklevel: int) -> None:
    """Warn about requests that were not served, because their empty outputs are easy to miss.

    The warning shows a line of the user's script: `stacklevel` counts the calls from this function, which is 1, up to
    the script.
    """
    failed = [output for output in outputs if output.error]
    if failed:
        first, count = failed[0], f"{len(failed)} of {len(outputs)} requests were not served"
        warnings.warn(f"{count}: request {first.request_id}: {first.error}", stacklevel=stacklevel)


class ProgressBar:
    """A progress bar for finished samples, with tokens per second, as in vLLM.

    It is not an Observer of the engine, because a user-supplied bar may raise, which is safe only between steps.
    """

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        """Show a bar for `total` samples. With use_tqdm=True, it appears only in a terminal, never in a log file."""
        self._start = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0
        options: dict[str, Any] = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
        options["postfix"] = self._speed(1.0)
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=None if use_tqdm else True)
        self._bar: Bar = make_bar(**options)

    def add(self, output: RequestOutput) -> None:
        """Count all samples of a finished request."""
        num_samples = len(output.outputs)
        self._num_prompt_tokens += num_samples * len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self._bar.postfix = self._speed(time.perf_counter() - self._start)
        self._bar.update(num_samples)

    def _speed(self, seconds: float) -> str:
        prompt, output = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        return f"est. speed input: {prompt:.2f} toks/s, output: {output:.2f} toks/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
