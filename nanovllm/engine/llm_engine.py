"""LLMEngine: requests come and go at any time, and each step() computes some tokens of the unfinished ones.

A step is three calls: schedule (choose the sequences), launch (the model), update (append the new tokens). With
async_scheduling, a step is launched before the one before it is read, so that the device need not wait for the host:

    host      schedule 2, launch 2 | read 1, update 1, outputs | schedule 3, launch 3 | read 2, ...
    device    ... step 1 ................... | step 2 ............................... | step 3 ...
"""

import threading
from collections import abc
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Self, overload
from zlib import crc32

import torch

from ..backends.attention_backend import KernelChoice
from ..backends.choice import choose_backend
from ..backends.torch.model_runner import FinishedStep
from ..backends.torch.pooler import PoolerOutput, RowOutput
from ..backends.torch.sampler import SampledToken
from ..checkpoints.hub import find_checkpoint, find_tokenizer
from ..checkpoints.model_config import eos_token_ids, read_model_config
from ..checkpoints.tokenizer import HFTokenizer, load_tokenizer
from ..checkpoints.weights import dummy_model, load_model
from ..distributed.agreed_tier import AgreedTier
from ..distributed.layers import local_config
from ..distributed.rank_group import RankError, RankGroup
from ..host_memory import default_pool_bytes
from ..llama import ModelConfig
from ..profiling import start_profile, step_range, stop_profile
from ..progress import no_progress_due
from .block_manager import BlockManager, cdiv
from .checks import check_unsupported
from .config import EngineArgs, EngineConfig
from .cost_model import CostModel, HitPolicy, measure, measure_disk
from .disk_tier import BlockFiles, DiskTier, open_files
from .executor import Executor, InFlight, Scheduled, with_drafts
from .host_tier import MAX_DEFAULT_BYTES, HostTier
from .input_processor import InputProcessor
from .int8_blocks import int8_block_shape
from .interrupts import interrupts_held_back
from .kv_cache import KVCache, num_blocks_for
from .observer import Observers
from .outputs import RequestOutput
from .pooling_params import PoolingParams
from .prefix_cache import BlockHash
from .prompts import ParsedPrompt, PromptType, TokensPrompt, as_prompt, options_of, parts_of, valid_text
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerOutput
from .sequence import Sequence, is_due, request_output
from .stats import EngineStats, Metric, Tally, collect, get_metrics
from .tier import Tier, Tiers


class LLMEngine:
    """A scheduler, a pool and a model, and the requests that they serve.

    An engine belongs to the first thread that uses it, which need not have built it. Only stats() is for all threads.
    Ctrl-C takes effect between steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        observers: abc.Iterable[object] = (),
        choose: abc.Callable[[KVCache], tuple[Executor, KernelChoice]] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Load the checkpoint and allocate the pools. Raise ValueError for an invalid option or checkpoint.

        `config.model` is a folder or a name on the Hugging Face Hub. If `choose` is given, it returns the executor and
        its kernels for the pool, and no weights are loaded. With tensor_parallel_size, start the other `ranks`, unless
        this engine is one of them: each is a whole engine with its part of the model, and makes the same calls.
        """
        if config.load_format != "dummy":
            hub: dict[str, Any] = {"cache_dir": config.download_dir, "token": config.hf_token}
            folder = find_checkpoint(config.model, hf_overrides=config.hf_overrides, **hub)
            config = replace(config, model=str(folder))
        self._thread: threading.Thread | None = None  # the first one to use the engine
        self._thread_lock = threading.Lock()
        self.model_config = read_model_config(config.model, config.hf_overrides)
        self.ranks = start_ranks(config, self.model_config, self.follow) if ranks is None else ranks
        try:
            self._build(config, observers, choose)
        except BaseException:
            self.ranks.close()
            raise

    def _build(
        self,
        config: EngineConfig,
        observers: abc.Iterable[object],
        choose: abc.Callable[[KVCache], tuple[Executor, KernelChoice]] | None,
    ) -> None:
        config = self.config = config.on_rank(self.ranks.local_rank) if self.ranks.world_size > 1 else config
        self.max_model_len = config.longest_sequence(self.model_config.max_position_embeddings)
        local = local_config(self.model_config, self.ranks.world_size)  # with this rank's heads
        if config.has_int8_kv:
            int8_block_shape(local, config.block_size)  # raises before the weights are read
        self.device, self.dtype = config.torch_device(), config.torch_dtype(self.model_config.dtype)
        self.tokenizer = tokenizer_of(config)
        model = None
        if choose is None:
            load = dummy_model if config.load_format == "dummy" else load_model
            where = self.dtype, self.device, self.max_model_len
            model = load(config.model, self.model_config, *where, config.quantization, self.ranks)
        num_blocks = num_blocks_for(config, local, self.max_model_len, self.device)  # after the weights
        [num_blocks] = self.ranks.least([num_blocks])
        self.kv_cache = KVCache(local, num_blocks, config.block_size, self.dtype, self.device, config.has_int8_kv)
        self.executor: Executor
        self.kernels: KernelChoice
        if choose is not None:
            self.executor, self.kernels = choose(self.kv_cache)
        elif model is not None:
            self.executor, self.kernels = choose_backend(
                model,
                self.kv_cache,
                config.slots_in_a_tile(),
                self.max_model_len,
                config.max_rows,
                config.attention_backend,
                config.enforce_eager,
                "ranks exchange parts of each layer" if self.ranks.world_size > 1 else None,
            )
        if config.generation_config not in ("auto", "vllm"):
            self.model_config = replace(self.model_config, eos_token_ids=eos_token_ids(config.generation_config))
        speculation = config.speculation()
        self.input_processor = InputProcessor(
            self.model_config, self.tokenizer, self.max_model_len, config.seed, speculation
        )
        self.cost_model: CostModel | None = None  # of the host, at the start
        self.disk_cost_model: CostModel | None = None
        num_host_blocks, files = self._num_host_blocks(), self._block_files()
        self.tally = Tally(
            self.max_model_len,
            config.block_size,
            config.enable_prefix_caching,
            has_tier=num_host_blocks > 0 or files is not None,
            num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
        )
        self.observers = Observers(self.tally, *observers)
        tier: Tier
        tier = self.host_tier = HostTier(self.kv_cache.blocks, num_host_blocks, self.observers)
        self.disk_tier: DiskTier | None = None
        if files is not None:
            save, first_block = config.kv_disk_save, num_host_blocks
            self.disk_tier = DiskTier(self.kv_cache.blocks, files, save, first_block, self.observers)
            tier = Tiers(self.host_tier, self.disk_tier, first_block)
        self.hit_policy: HitPolicy | None = None
        num_worth_loading: abc.Callable[[list[BlockHash | None]], int] = len
        if config.offload_policy == "auto" and (num_host_blocks > 0 or files is not None):
            self.hit_policy = HitPolicy(self.host_tier, self.kv_cache, self._measure(), self.disk_cost_model)
            self.observers.append(self.hit_policy)
            num_worth_loading = self.hit_policy.num_worth_loading
        least: abc.Callable[[list[int]], list[int]] = list
        if self.ranks.world_size > 1 and (num_host_blocks > 0 or files is not None):
            tier, least = AgreedTier(tier, self.ranks), self.ranks.least
        self.kv_cache_manager = BlockManager(
            num_blocks, config.block_size, config.enable_prefix_caching, tier, self.observers, least, num_worth_loading
        )
        self.scheduler = Scheduler(config, self.kv_cache_manager, self.observers)
        self.requests: dict[str, list[Sequence]] = {}  # the samples of each unfinished request
        self._is_async = config.overlaps_steps
        self._in_flight: InFlight | None = None  # launched in an earlier call of step()
        self._unreported: list[Sequence] = []  # ended in a step that failed: the next step returns their outputs

    def _num_host_blocks(self) -> int:
        """Return the size of the host's pool: 0 if no hit is possible, or if computing a block again is faster.

        A hit takes a full block and one more token. The default is the device's size, up to 4 GiB, or less if memory is
        short. Under "auto" the machine is measured, with a prompt as long as a step, the model and the pool allow.
        """
        config, num_blocks = self.config, self.kv_cache.num_blocks
        if config.offload_policy == "recompute" or not config.enable_prefix_caching:
            return 0
        if config.kv_offloading_tokens is not None:
            num_host_blocks = config.kv_offloading_tokens // config.block_size
        else:
            room = default_pool_bytes(MAX_DEFAULT_BYTES) // self.ranks.world_size  # they share the machine's memory
            num_host_blocks = min(num_blocks, room // self.kv_cache.blocks[0].nbytes)
        [num_host_blocks] = self.ranks.least([num_host_blocks])
        if num_host_blocks == 0 or self.max_model_len <= config.block_size:
            return 0
        if config.offload_policy == "auto":
            prefers_load = self._measure().prefers_load(self.kv_cache.bytes_per_token)
            [num_host_blocks] = self.ranks.least([num_host_blocks * prefers_load])
        return num_host_blocks

    def _measure(self) -> CostModel:
        """Measure the machine once, with a prompt as long as a step, the model and the pool allow."""
        if self.cost_model is None:
            longest = self.kv_cache.num_blocks * self.config.block_size
            num_tokens = min(self.config.max_num_batched_tokens, self.max_model_len - 1, longest)
            self.cost_model = measure(self.kv_cache, self.executor, self.input_processor, num_tokens)
        return self.cost_model

    def _block_files(self) -> BlockFiles | None:
        """Return the files of kv_disk_dir, or None without it.

        Under "auto" the disk is measured, unless the folder cannot be written: then it was filled elsewhere.
        """
        config = self.config
        if config.kv_disk_dir is None or self.max_model_len <= config.block_size:
            return None
        files = open_files(config, self.model_config, self.kv_cache.blocks, self.ranks.rank, self.ranks.world_size)
        if config.offload_policy == "auto":
            with suppress(OSError):
                self.disk_cost_model = measure_disk(self._measure(), files.root, self.kv_cache.blocks[0].nbytes)
        return files

    @classmethod
    def follow(cls, config: EngineConfig, ranks: RankGroup) -> None:
        """Be the engine of another rank than the first, and make the calls of the first one."""
        engine = cls(config, ranks=ranks)
        for method, args, kwargs in ranks.commands():
            try:
                method(engine, *args, **kwargs)
            except RankError:
                raise
            except Exception:  # it has failed on rank 0, too, which reports it
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

        With PoolingParams, its only output is the embedding of the prompt. Raise ValueError, and add nothing, if it can
        never be served. If the prompt is token ids, `prompt_text` is the prompt that outputs show.
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
            if not self.requests:
                with no_progress_due():
                    self.kernels.switch_when_ready()
            if request_id in self.requests:
                raise ValueError(f"request_id must be unique, got {request_id!r}, which is in use")
            params = SamplingParams() if params is None else params
            samples = self.input_processor.process(request_id, parsed, params, cache_salt)
            needed, num_blocks = cdiv(samples[0].num_tokens, self.config.block_size), self.kv_cache_manager.num_blocks
            if needed > num_blocks:
                raise ValueError(f"the prompt must fit the pool of {num_blocks} blocks, got one that needs {needed}")
        except ValueError as error:
            self.observers.tell("refuse", str(request_id), str(error))
            raise
        self.requests[request_id] = samples
        for seq in samples:
            seq.prompt = prompt_text if seq.prompt is None else seq.prompt
        size = self.config.max_num_seqs  # samples that can run at once: the first one computes the prompt for all
        for first, *others in (samples[start : start + size] for start in range(0, len(samples), size)):
            first.to_fork = others
            self.scheduler.add(first)
        return request_id

    @overload  # str must come first, since it is an iterable of str too
    def abort_request(  # type: ignore[overload-overlap]
        self, request_ids: str, internal: bool = False
    ) -> RequestOutput | None: ...

    @overload
    def abort_request(self, request_ids: abc.Iterable[str], internal: bool = False) -> list[RequestOutput]: ...

    @interrupts_held_back()
    def abort_request(
        self, request_ids: str | abc.Iterable[str], internal: bool = False
    ) -> RequestOutput | list[RequestOutput] | None:
        """End a request, whatever its state, and return its last output. Return None if it is unknown.

        Given several ids, return the outputs of the known ones.
        """
        self.check_thread()
        if isinstance(request_ids, str):
            self.ranks.announce(LLMEngine.abort_request, request_ids)
            return self._abort(request_ids)
        request_ids = [*request_ids]
        self.ranks.announce(LLMEngine.abort_request, request_ids)
        outputs = [self._abort(request_id) for request_id in request_ids]
        return [output for output in outputs if output is not None]

    def _abort(self, request_id: str) -> RequestOutput | None:
        samples = self.requests.get(request_id)
        if samples is None:
            return None
        self.observers.tell("abort", request_id)
        for seq in samples:
            if not seq.finished:
                seq.finish("abort")
                self.scheduler.remove(seq)
        self._unreported = [seq for seq in self._unreported if seq not in samples]
        [output] = self._outputs(samples)
        self._drop_wasted_step()
        return output

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @interrupts_held_back()
    def step(self) -> list[RequestOutput]:
        """Compute some tokens. Return the output so far of each request that got a token or has ended.

        With async_scheduling, launch a step and return the outputs of the one that was launched in the previous call.

        If no sequence can run, wait for blocks to arrive from the host, and return no outputs. If Ctrl-C is pressed
        during the step, raise KeyboardInterrupt at its end: the outputs of the step are lost.
        """
        self.check_thread()
        self.ranks.send(LLMEngine.step)
        self.observers.tell("begin")
        try:
            with step_range("schedule"):
                output = self.ranks.together(self._schedule, plan_of)
            with step_range("launch"):
                last, self._in_flight = self._in_flight, self._launch(output.batch) if output.batch else None
            can_wait = last is None and self._in_flight is None  # only if nothing else can run
            self.kv_cache_manager.collect_loads(wait=can_wait)
            with step_range("update"):
                updated = [*self._unreported, *output.failed]
                if last is not None:
                    updated += self._update(last)
                if self._in_flight is not None and (not self._is_async or self._in_flight.must_read_first):
                    last, self._in_flight = self._in_flight, None
                    updated += self._update(last)
                self._unreported = []
                outputs = self._outputs(updated)
            self._drop_wasted_step()
        except BaseException as error:
            self._remove_ended()
            self._drop_steps()
            ended = [samples for samples in self.requests.values() if all(seq.finished for seq in samples)]
            self._unreported = [seq for samples in ended for seq in samples]
            self.observers.tell("end", error)
            raise
        self.observers.tell("end", None)
        return outputs

    def _schedule(self) -> SchedulerOutput:
        """Schedule the step, and make its copies. If a copy raises, all sequences start over.

        Otherwise one of them might read a block that was never copied.
        """
        try:
            output = self.scheduler.schedule()
            if output.copies:
                self.kv_cache.copy_blocks(output.copies)
                self.observers.tell("copy", output.copies)
            return output
        except Exception:
            self.scheduler.preempt_all()
            raise

    def _launch(self, batch: list[Scheduled]) -> InFlight:
        """Start a step. If that raises, the step raises the error when it is read."""
        try:
            step = InFlight(batch, self.executor.launch(with_drafts(batch)))
        except Exception as error:
            step = InFlight(batch, FinishedStep([], error))
        for seq, num_tokens in batch:
            seq.note_launched(num_tokens)
        return step

    def _read(self, step: InFlight) -> list[tuple[Scheduled, list[RowOutput | None]]]:
        """Wait for a step. Return its sequences with their tokens, but not those that have ended since the launch.

        A sequence with a draft has a token for each row. If the step raises, run the sequences one by one and without
        drafts, so that only those at fault end with an error. The step after it, if there is one, has read keys and
        values that were not computed, so it is dropped.
        """
        batch = step.batch
        try:
            tokens = iter(self.ranks.together(step.pending.tokens))
        except RankError:
            raise
        except Exception as error:
            batch = [scheduled for scheduled in batch if scheduled[0].num_in_flight_tokens]  # the others hold no blocks
            num_rows = len(with_drafts(step.batch))
            self.observers.tell("raise", batch, error)
            for seq, _ in [*batch, *(self._in_flight.batch if self._in_flight is not None else [])]:
                seq.forget_launched()
                self.kv_cache_manager.trim(seq)
            self._in_flight = None
            if num_rows > 1:
                return [row for scheduled in batch for row in self._read(self._launch([scheduled]))]
            for seq, _ in batch:
                for sample in [seq, *seq.to_fork]:
                    sample.finish("error", f"{type(error).__name__}: {error}")
            return [(scheduled, [None]) for scheduled in batch]
        rows = [(scheduled, list(islice(tokens, 1 + len(scheduled[0].draft_token_ids)))) for scheduled in batch]
        return [row for row in rows if not row[0][0].finished]

    def _update(self, step: InFlight) -> list[Sequence]:
        """Add the new tokens and embeddings, and remove the sequences that have ended.

        Return the sequences that got one or have failed.
        """
        updated, batch = [], []
        for (seq, num_tokens), outputs in self._read(step):
            has_failed, num_drafted, num_accepted = seq.finished, len(seq.draft_token_ids), 0
            if isinstance(outputs[0], PoolerOutput):
                seq.add_embedding(outputs[0].embedding)
            elif outputs[0] is not None:  # first: if it raises, the step is computed again
                num_accepted = seq.append_tokens([token for token in outputs if isinstance(token, SampledToken)])
            if not has_failed and seq.num_in_flight_tokens:  # else it failed, or was preempted after the launch
                seq.note_read(num_tokens, outputs[0] is not None, num_accepted)
                self.kv_cache_manager.cache_blocks(seq, num_tokens + num_accepted)
            if num_drafted:
                self.observers.tell("verify", seq, num_drafted, num_accepted)
            if seq.drafter is not None:
                self.kv_cache_manager.trim(seq)
            if outputs[0] is not None or seq.finished:
                updated.append(seq)
            batch.append((seq, num_tokens + num_accepted))
        self.observers.tell("step", batch, updated)
        for seq in updated:
            for ended in [seq, *seq.to_fork] if seq.finished else ():
                self.scheduler.remove(ended)
        return updated

    def _remove_ended(self) -> None:
        """Remove the sequences that ended in a failed step, so that the next step does not run them again."""
        for seq in [seq for seq in self.scheduler.running if seq.finished]:
            for ended in [seq, *seq.to_fork]:
                with suppress(Exception):  # an observer may raise again; the first error is the one to report
                    self.scheduler.remove(ended)

    def _drop_steps(self) -> None:
        """Forget all launched steps after a failure. If there was one ahead, all sequences start over."""
        for seq in self.scheduler.running:
            seq.forget_launched()
            self.kv_cache_manager.trim(seq)
        if self._in_flight is not None:  # sequences may hold blocks for tokens that are not sampled now
            self._in_flight = None
            self.scheduler.preempt_all()

    def _drop_wasted_step(self) -> None:
        """Forget the launched step, without reading it, once no request needs it."""
        if not self.requests:
            self._in_flight = None

    def _outputs(self, seqs: list[Sequence]) -> list[RequestOutput]:
        """Return the outputs that are due for the requests of `seqs`. Forget the requests that have finished.

        If the text of a finished request cannot be decoded, forget it too, or it would raise in every step.
        """
        outputs = []
        for request_id in {seq.request_id: None for seq in seqs}:
            samples = self.requests[request_id]
            try:
                if is_due(samples):
                    outputs.append(request_output(samples))
            except Exception:
                if all(seq.finished for seq in samples):
                    del self.requests[request_id]
                raise
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs

    def tokenized(self, prompt: ParsedPrompt, tokenization_kwargs: dict[str, Any] | None) -> ParsedPrompt:
        """Return text as token ids if options for the tokenizer are given. Raise ValueError for unsupported ones."""
        options = options_of("tokenization_kwargs", tokenization_kwargs)
        text, _, cache_salt = parts_of(prompt)
        if not options or not isinstance(text, str):
            return prompt
        special = bool(options.pop("add_special_tokens", True))
        check_unsupported(**{f"tokenization_kwargs[{name!r}]": value for name, value in options.items()})
        tokens = TokensPrompt(
            prompt_token_ids=self.get_tokenizer().encode(valid_text(text), add_special_tokens=special), prompt=text
        )
        if cache_salt:
            tokens["cache_salt"] = cache_salt
        return tokens

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer. Raise ValueError if the checkpoint has none."""
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: pass token ids instead of text")
        return self.tokenizer

    @interrupts_held_back()
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache in all tiers. Return False, and change nothing, while a request runs.

        With `reset_running_requests`, preempt all running requests first, so that they start over. In kv_disk_dir, the
        blocks of this model with these options are removed, also for other engines.
        """
        self.check_thread()
        self.ranks.send(LLMEngine.reset_prefix_cache, reset_running_requests)
        if reset_running_requests:
            self._in_flight = None  # its tokens are sampled again
            self.scheduler.preempt_all()
        return self.kv_cache_manager.reset_prefix_cache()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record a profile, as profiler_config says, until stop_profile(). Its ranges are those of ../profiling.py.

        The prefix begins the name of a trace. Raise ValueError without profiler_config, or during another profile.
        """
        self.check_thread()
        if self.config.profiler_config is None:
            raise ValueError("start_profile() needs the option profiler_config, got None")
        start_profile(self.config.profiler_config, profile_prefix)

    def stop_profile(self) -> None:
        """Stop recording, and write the trace. Raise ValueError if no profile is being recorded."""
        self.check_thread()
        stop_profile()

    def stats(self) -> EngineStats:
        """Return the state of the queues and pools, and counts since the start. Any thread may call this."""
        return collect(self)

    def get_metrics(self) -> list[Metric]:
        """Return the statistics as metrics with vLLM's names."""
        return get_metrics(self, self.config.served_model_name or self.config.model)

    def check_thread(self) -> None:
        """Give the engine to the current thread if it is the first to use it. Raise RuntimeError in any other one."""
        current = threading.current_thread()
        with self._thread_lock:
            self._thread = self._thread or current
        if current is not self._thread:
            caller, owner = current.name, self._thread.name
            raise RuntimeError(
                f"the engine belongs to thread {owner!r}, but thread {caller!r} called it: "
                "use AsyncLLM to share an engine between threads"
            )


def start_ranks(
    config: EngineConfig, model: ModelConfig, follow: abc.Callable[[EngineConfig, RankGroup], None]
) -> RankGroup:
    """Return the group of tensor_parallel_size ranks. Raise ValueError if model or machine cannot be divided."""
    size, device = config.tensor_parallel_size, config.device_type
    local_config(model, size)
    if size == 1:
        return RankGroup()
    if config.distributed_executor_backend == "external_launcher":
        return RankGroup.join(size, device)
    if device == "cuda" and size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size must be at most {torch.cuda.device_count()}, the number of GPUs, got {size}"
        )
    return RankGroup.start(size, device, partial(follow, config))


def plan_of(output: SchedulerOutput) -> int:
    """Return a number that two ranks share only if they are about to compute the same tokens."""
    rows = [(seq.request_id, seq.sample_index, seq.input_ids(num_tokens)) for seq, num_tokens in output.batch]
    return crc32(repr(rows).encode())


def tokenizer_of(config: EngineConfig | EngineArgs) -> HFTokenizer | None:
    """Return the tokenizer that `config` names, or the checkpoint's. Raise ValueError if the named one is missing."""
    if config.skip_tokenizer_init:
        return None
    if not config.tokenizer:
        return load_tokenizer(config.model)
    folder = find_tokenizer(
        config.tokenizer, config.tokenizer_revision, cache_dir=config.download_dir, token=config.hf_token
    )
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"tokenizer {str(config.tokenizer)!r} has no tokenizer.json and no tokenizer.model")
    return tokenizer
