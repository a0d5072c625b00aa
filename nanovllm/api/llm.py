"""LLM: vLLM's class for scripts. What it takes, and what it refuses in words, is in engine_args.py."""

from collections import abc
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from ..checkpoints.chat_template import render_chat
from ..checkpoints.generation_config import default_sampling_params
from ..engine.config import EngineConfig
from ..engine.llm import LLM as CoreLLM
from ..engine.llm import Params, pair
from ..engine.sampling_params import SamplingParams as CoreSamplingParams
from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .call_outputs import final_only, told, warn_of_errors, with_prompt
from .conversations import Message, as_conversations, read_template
from .engine_args import EngineArgs, check_is_args
from .llm_engine import LLMEngine
from .metrics import Metric
from .only_in_vllm import refuse
from .outputs import RequestOutput
from .params import SamplingParams
from .progress import progress_bar
from .prompts import ParsedPrompt, PromptType, as_prompts, options_of
from .stats import EngineStats

Prompts = PromptType | abc.Sequence[PromptType]
UseTqdm = bool | abc.Callable[..., Any]  # whether there is a bar; or what makes it, called as tqdm is
Request = tuple[ParsedPrompt, CoreSamplingParams]
MODEL = EngineConfig.model
ONLY_IN_VLLM = {
    *("apply_model", "classify", "collective_rpc", "embed", "encode", "enqueue", "enqueue_chat", "get_world_size"),
    *("release_kv_cache_memory", "reset_mm_cache", "reward", "score", "sleep", "start_profile", "stop_profile"),
    *("wait_for_completion", "wake_up"),
}


class LLM(CoreLLM):
    """LLM("models/storyteller").generate("Once upon a time")

    It belongs to the thread that made it, and has one open stream() at a time.
    """

    llm_engine: LLMEngine

    def __init__(self, model: str | Path = MODEL, *, chat_template: str | Path | None = None, **options: Any) -> None:
        """`options` are the other fields of EngineArgs. Raises ValueError for a bad name, value or checkpoint."""
        self._engine_args = EngineArgs.of(model=model, **options)
        self.chat_template = read_template(chat_template)
        args, config = self._engine_args, self._engine_args.engine_config()
        given = default_sampling_params(config.model, args.generation_config, args.override_generation_config)
        try:
            self._default_params = SamplingParams.from_optional(**given)
        except ValueError as error:  # no parameter that the caller gave
            raise ValueError(f"generation_config of {config.model}: {error}") from None
        super().__init__(**vars(config))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        check_is_args(engine_args)
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(EngineArgs)})

    def build_engine(self, config: EngineConfig) -> LLMEngine:
        return LLMEngine(config, self._engine_args)

    def generate(  # type: ignore[override]
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

        Without sampling_params they are the model's own, of its generation_config.json. A request that cannot be
        served has finish_reason "error" and RequestOutput.error, in its place, and a warning tells it. Raises
        ValueError, before anything is computed, for what is no prompt.
        """
        refuse(lora_request=lora_request, priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        self._check_thread()
        parsed = [self.llm_engine.tokenized(prompt, tokenization_kwargs) for prompt in as_prompts(prompts)]
        return self._generate(self._requests(parsed, sampling_params), use_tqdm)

    def stream(  # type: ignore[override]
        self, prompts: Prompts, sampling_params: Params = None
    ) -> abc.Generator[RequestOutput, None, None]:
        """As core's: outputs as they come. vLLM has this in AsyncLLM only."""
        self._check_thread()
        return told(self._serve(self._requests(as_prompts(prompts), sampling_params)))  # type: ignore[arg-type]

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

        Raises ValueError if there is no template, or for a conversation that it refuses.
        """
        refuse(lora_request=lora_request, priority=priority, mm_processor_kwargs=mm_processor_kwargs)
        self._check_thread()
        options: dict[str, Any] = {"tools": tools, "chat_template": chat_template or self.chat_template}
        options["add_generation_prompt"] = add_generation_prompt
        options["continue_final_message"] = continue_final_message
        options |= options_of("chat_template_kwargs", chat_template_kwargs)
        conversations = as_conversations(messages, chat_template_content_format)
        # The template writes BOS where it belongs.
        special = {"add_special_tokens": False} | options_of("tokenization_kwargs", tokenization_kwargs)
        prompts = [self.llm_engine.tokenized(self._render(each, options), special) for each in conversations]
        return self._generate(self._requests(prompts, sampling_params), use_tqdm)

    def beam_search(  # type: ignore[override]
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return one output a prompt, in the order of the prompts, with beam_width sequences, the best first.

        One prompt is searched at a time, whatever the concurrency_limit. Raises ValueError if the engine has unfinished
        requests: the beams of a prompt have it to themselves.
        """
        refuse(lora_request=lora_request)
        self._check_thread()
        if self.llm_engine.has_unfinished_requests():
            raise ValueError("beam_search needs the engine for itself, and it has unfinished requests")
        search, outputs, parsed = BeamSearch(self.llm_engine, params), [], as_prompts(prompts)
        with progress_bar(use_tqdm, len(parsed) * params.beam_width) as note_end:
            for prompt in parsed:
                outputs.append(search.search(next(self._request_ids), prompt))
                note_end(outputs[-1])
        warn_of_errors(outputs, stacklevel=3)
        return outputs

    def get_tokenizer(self) -> Any:
        """Raises ValueError if there is none."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What sampling_params is where it is not given: of the model's generation_config.json."""
        return self._default_params.clone()

    def get_metrics(self) -> list[Metric]:
        return self.llm_engine.get_metrics()

    def stats(self) -> EngineStats:
        """Any thread may ask."""
        return self.llm_engine.stats()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what is cached, on the host too. Returns False, and changes nothing, while a request runs."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def __getattr__(self, name: str) -> NoReturn:
        """Called for names that there are not."""
        if name in ONLY_IN_VLLM:
            raise AttributeError(f"vLLM has LLM.{name}(), nanovllm has not")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _requests(self, prompts: list[ParsedPrompt], params: Params) -> list[Request]:
        return pair(prompts, self.get_default_sampling_params() if params is None else params)  # type: ignore

    def _generate(self, requests: list[Request], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Of a stream only the last outputs are wanted, whatever kind of outputs the parameters ask for."""
        requests = [(prompt, final_only(params)) for prompt, params in requests]
        outputs = []
        # Without closing(), the traceback of an error would keep the generator alive, and so its requests unfinished.
        with (
            progress_bar(use_tqdm, sum(params.n for _, params in requests)) as note_end,
            closing(told(self._serve(requests))) as stream,  # type: ignore[arg-type]
        ):
            for output in stream:
                outputs.append(output)
                note_end(output)
        warn_of_errors(outputs, stacklevel=4)
        outputs.sort(key=lambda output: int(output.request_id))
        return [with_prompt(output, prompt) for output, (prompt, _) in zip(outputs, requests, strict=True)]

    def _render(self, conversation: list[Message], options: dict[str, Any]) -> str:
        return render_chat(self.get_tokenizer(), conversation, **options)

    def _check_thread(self) -> None:
        self.llm_engine.check_thread()
