"""LLM: vLLM's class for scripts. Each call adds its requests to the engine and steps it until they have ended."""

import copy
import itertools
import warnings
from collections import abc
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from .checkpoints.chat_template import read_template, render_chat
from .checkpoints.model_config import default_sampling_params
from .checkpoints.tokenizer import HFTokenizer
from .engine.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .engine.config import EngineArgs, EngineConfig, check_is_args
from .engine.interrupts import interrupts_held_back
from .engine.kv_cache import PoolReport
from .engine.llm_engine import LLMEngine
from .engine.outputs import RequestOutput
from .engine.progress import ProgressBar
from .engine.prompts import Message, ParsedPrompt, PromptType, as_conversations, as_prompts, options_of
from .engine.sampling_params import RequestOutputKind, SamplingParams
from .engine.stats import EngineStats, Metric
from .engine.vllm_options import refuse

Prompts = PromptType | abc.Sequence[PromptType]
Params = SamplingParams | abc.Sequence[SamplingParams] | None  # one for all prompts, or one for each
UseTqdm = bool | abc.Callable[..., Any]  # whether there is a bar; or what makes it, called as tqdm is
Request = tuple[ParsedPrompt, SamplingParams]
MODEL = EngineConfig.model
ONLY_IN_VLLM = {
    *("apply_model", "classify", "collective_rpc", "embed", "encode", "enqueue", "enqueue_chat", "get_world_size"),
    *("release_kv_cache_memory", "reset_mm_cache", "reward", "score", "sleep", "start_profile", "stop_profile"),
    *("wait_for_completion", "wake_up"),
}


class LLM:
    """LLM("models/storyteller").generate("Once upon a time")

    It belongs to the thread that made it, and has one open stream() at a time.
    """

    def __init__(self, model: str | Path = MODEL, *, chat_template: str | Path | None = None, **options: Any) -> None:
        """Build an engine. `options` are the other fields of EngineArgs.

        Raise ValueError for a bad name, value or checkpoint.
        """
        args = EngineArgs.of(model=model, **options)
        self.chat_template = read_template(chat_template)
        self.config = args.engine_config()
        given = default_sampling_params(self.config.model, args.generation_config, args.override_generation_config)
        try:
            self._default_params = SamplingParams.from_optional(**given)
        except ValueError as error:  # the caller gave none of these
            raise ValueError(f"generation_config of {self.config.model}: {error}") from None
        self.llm_engine = engine = LLMEngine(self.config)
        self.tokenizer, self.model_config = engine.tokenizer, engine.model_config
        self.max_model_len = engine.max_model_len
        self.kv_cache, self.kv_cache_manager = engine.kv_cache, engine.kv_cache_manager
        self.model_runner, self.input_processor = engine.executor, engine.input_processor
        self._request_ids = map(str, itertools.count())
        self._is_streaming = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Build an LLM from options by vLLM's names."""
        check_is_args(engine_args)
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(EngineArgs)})

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held, in the engine's life."""
        return self.kv_cache_manager.peak

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: int | list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return one finished output a prompt, in the order of the prompts.

        Without sampling_params, use the model's own, of its generation_config.json. A request that cannot be served
        has finish_reason "error" and RequestOutput.error, in its place, and a warning names it. Raise ValueError,
        before anything is computed, for a value that is no prompt.
        """
        refuse(lora_request=lora_request, priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        self.llm_engine.check_thread()
        parsed = [self.llm_engine.tokenized(prompt, tokenization_kwargs) for prompt in as_prompts(prompts)]
        return self._generate(self._requests(parsed, sampling_params), use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        """Yield a request's output so far whenever it got a token. Closing the iterator aborts unfinished requests.

        Raise ValueError at once if there are not as many sampling_params as prompts, and when it begins if another
        stream() of this LLM is open, or if the engine has requests that were added to `llm_engine`.
        """
        self.llm_engine.check_thread()
        return self._serve(self._requests(as_prompts(prompts), sampling_params))

    def chat(
        self,
        messages: list[Message] | abc.Sequence[list[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
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
        """Answer a conversation, or several: each becomes a prompt by the model's chat template, or by the given one.

        Raise ValueError if there is no template, or for a conversation that it refuses.
        """
        refuse(lora_request=lora_request, priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        self.llm_engine.check_thread()
        options: dict[str, Any] = {"tools": tools, "chat_template": chat_template or self.chat_template}
        options["add_generation_prompt"] = add_generation_prompt
        options["continue_final_message"] = continue_final_message
        options |= options_of("chat_template_kwargs", chat_template_kwargs)
        conversations = as_conversations(messages, chat_template_content_format)
        # The template writes BOS where it belongs.
        special = {"add_special_tokens": False} | options_of("tokenization_kwargs", tokenization_kwargs)
        texts = (render_chat(self.get_tokenizer(), each, **options) for each in conversations)
        prompts = [self.llm_engine.tokenized(text, special) for text in texts]
        return self._generate(self._requests(prompts, sampling_params), use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return one output a prompt, in the order of the prompts, with beam_width sequences, the best first.

        One prompt is searched at a time, whatever the concurrency_limit. Raise ValueError if the engine has unfinished
        requests: the beams of a prompt have it to themselves.
        """
        refuse(lora_request=lora_request)
        self.llm_engine.check_thread()
        if self.llm_engine.has_unfinished_requests():
            raise ValueError("beam_search needs the engine for itself, and it has unfinished requests")
        self.llm_engine.kernels.take_up()
        search, outputs, parsed = BeamSearch(self.llm_engine, params), [], as_prompts(prompts)
        with ProgressBar(use_tqdm, len(parsed) * params.beam_width) as bar:
            for prompt in parsed:
                outputs.append(search.run(next(self._request_ids), prompt))
                bar.add(outputs[-1])
        warn_of_errors(outputs, stacklevel=3)
        return outputs

    def get_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer. Raise ValueError if there is none."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling_params, of its generation_config.json: calls without any use them."""
        return self._default_params.clone()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counts under vLLM's names."""
        return self.llm_engine.get_metrics()

    def stats(self) -> EngineStats:
        """Return the state of queues and pools, and counts since the start. Any thread may call this."""
        return self.llm_engine.stats()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the cache, on the host too. Return False, and change nothing, while a request runs."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError for an unknown name, saying so of a method that only vLLM has."""
        if name in ONLY_IN_VLLM:
            raise AttributeError(f"vLLM has LLM.{name}(), nanovllm has not")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _requests(self, prompts: list[ParsedPrompt], params: Params) -> list[Request]:
        return pair(prompts, self.get_default_sampling_params() if params is None else params)

    def _generate(self, requests: list[Request], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Return the last outputs, whatever kind of outputs the parameters ask for."""
        requests = [(prompt, final_only(params)) for prompt, params in requests]
        # Without closing(), the traceback of an error would keep the generator alive, and so its requests unfinished.
        outputs, num_samples = [], sum(params.n for _, params in requests)
        with ProgressBar(use_tqdm, num_samples) as bar, closing(self._serve(requests)) as stream:
            for output in stream:
                outputs.append(output)
                bar.add(output)
        warn_of_errors(outputs, stacklevel=4)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _serve(self, requests: list[Request]) -> abc.Generator[RequestOutput, None, None]:
        if self._is_streaming or self.llm_engine.has_unfinished_requests():
            raise ValueError("another stream() is open, or the engine has unfinished requests: drain or close it first")
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
                errors = []
                for request_id in request_ids:
                    try:
                        self.llm_engine.abort_request(request_id)
                    except Exception as error:  # the other requests must end too
                        errors.append(error)
                if errors:
                    raise errors[-1]


def pair(prompts: list[ParsedPrompt], sampling_params: SamplingParams | abc.Sequence[SamplingParams]) -> list[Request]:
    """Return each prompt with its parameters. Raise ValueError for a wrong type, or if their numbers differ.

    >>> [params.max_tokens for _, params in pair(["a", "b"], SamplingParams(max_tokens=4))]
    [4, 4]
    """
    if isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params] * len(prompts)
    given = sampling_params if isinstance(sampling_params, abc.Sequence) else [sampling_params]
    others = [type(params).__name__ for params in given if not isinstance(params, SamplingParams)]
    if others:
        raise ValueError(f"sampling_params must be one SamplingParams or a list of them, not {others[0]}")
    if len(prompts) != len(given):
        raise ValueError(f"{len(prompts)} prompts but {len(given)} sampling_params")
    return list(zip(prompts, given, strict=True))


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a copy that asks for the last output only."""
    params = copy.copy(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def warn_of_errors(outputs: abc.Sequence[RequestOutput], stacklevel: int) -> None:
    """Warn of requests that were not served: an empty output looks like one that the model has ended at once.

    The warning names the line of the script: it is so many calls above this one.
    """
    failed = [output for output in outputs if output.error]
    if failed:
        first, count = failed[0], f"{len(failed)} of {len(outputs)} requests were not served"
        warnings.warn(f"{count}: request {first.request_id}: {first.error}", stacklevel=stacklevel)
