"""LLMEngine: requests come and go at any time, and each step() computes some tokens of the unfinished ones.

A step is three calls: schedule (choose the sequences), run (the model), update (append the new tokens).
"""

from pathlib import Path

import torch

from .attention import PagedAttention
from .block_manager import BlockManager
from .config import EngineConfig
from .cost_model import CostModel, measure
from .host_tier import HostTier
from .input_processor import InputProcessor, Prompt
from .kv_cache import KVCache
from .llama import ModelConfig, Tokenizer, load_model
from .model_runner import ModelRunner, Scheduled
from .observer import Observer
from .outputs import RequestOutput
from .sampling import SampledToken, SamplingParams
from .scheduler import Scheduler
from .sequence import Sequence, request_output


class LLMEngine:
    """A scheduler, a pool and a model, and the requests that they serve."""

    def __init__(self, config: EngineConfig, observer: Observer | None = None) -> None:
        """Load the checkpoint and allocate the pools."""
        self.config, self.observer = config, observer or Observer()
        self.model_config = ModelConfig.from_folder(config.model)
        num_blocks, longest = config.kv_cache_tokens // config.block_size, self.model_config.max_context_len
        self.max_model_len = config.max_model_len or min(longest, num_blocks * config.block_size)
        if self.max_model_len > longest:
            raise ValueError(f"max_model_len is {self.max_model_len}, the model reads at most {longest} tokens")
        device, dtype = torch.device(config.device), config.torch_dtype(self.model_config.dtype)
        self.tokenizer = Tokenizer(config.model) if (Path(config.model) / "tokenizer.model").exists() else None
        model = load_model(config.model, self.model_config, dtype, device, self.max_model_len)
        self.kv_cache = KVCache(self.model_config, num_blocks, config.block_size, dtype, device)
        self.model_runner = ModelRunner(
            model, PagedAttention(self.kv_cache, config.tile_size), config.block_size, device
        )
        self.input_processor = InputProcessor(self.model_config, self.tokenizer, self.max_model_len, config.seed)
        self.cost_model: CostModel | None = None
        self.host_tier = HostTier(self.kv_cache.blocks, self._num_host_blocks(), self.observer)
        self.kv_cache_manager = BlockManager(
            num_blocks, config.block_size, config.enable_prefix_caching, self.host_tier, self.observer
        )
        self.scheduler = Scheduler(config, self.kv_cache_manager, self.observer)
        self.num_draft_tokens = self.num_accepted_tokens = 0  # since the start
        self._requests: dict[str, list[Sequence]] = {}  # the samples of each unfinished request
        self._ended: list[Sequence] = []  # they get no token: the next step returns their outputs

    def _num_host_blocks(self) -> int:
        """Return the size of the host's pool: 0 if nothing is cached, or if blocks should be computed again.

        With "auto" the speeds decide, measured with the longest prompt that a step, the model and the pool allow.
        """
        config, num_blocks = self.config, self.config.num_host_blocks
        if config.offload_policy == "recompute" or not config.enable_prefix_caching:
            return 0
        if config.offload_policy == "auto" and num_blocks > 0:
            pool_size = self.kv_cache.num_blocks * config.block_size
            num_tokens = min(config.max_num_batched_tokens, self.max_model_len - 1, pool_size)
            self.cost_model = measure(self.kv_cache, self.model_runner, self.input_processor, num_tokens)
            if not self.cost_model.prefers_load(self.kv_cache.bytes_per_token):
                return 0
        return num_blocks

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request. It starts in the first step that has room for it.

        One that can never be served ends at once: the next step returns its output with finish_reason "error".
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id} has not finished: its id is in use")
        samples = self.input_processor.process(request_id, prompt, params or SamplingParams())
        self._requests[request_id] = samples
        if samples[0].finished:
            self._ended.append(samples[0])
            self.observer.tell("refuse", request_id, samples[0].error)
            return
        size = self.config.max_num_seqs  # so many samples can run at once: the first one computes the prompt for them
        for first, *others in (samples[start : start + size] for start in range(0, len(samples), size)):
            first.to_fork = others
            self.scheduler.add(first)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state, and return its last output. Return None if no unfinished one has this id."""
        if request_id not in self._requests:
            return None
        self.observer.tell("abort", request_id)
        samples = self._requests.pop(request_id)
        for seq in samples:
            if not seq.finished:
                seq.finish("abort")
                self.scheduler.remove(seq)
        self._ended = [seq for seq in self._ended if seq not in samples]
        return request_output(samples)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Run one step. Return the output so far of each request that got a token or has ended."""
        self.observer.tell("begin")
        output = self.scheduler.schedule()
        self._ended += output.failed
        if output.copies:
            self.kv_cache.copy_blocks(output.copies)
            self.observer.tell("copy", output.copies)
        tokens = self.model_runner.run(output.batch) if output.batch else []
        self.kv_cache_manager.collect_loads(wait=not output.batch)  # wait only if nothing can run
        updated = [*self._ended, *self._update(output.batch, tokens)]
        self._ended = []
        self.observer.tell("end")
        return self._outputs(updated)

    def _update(self, batch: list[Scheduled], tokens: list[list[SampledToken]]) -> list[Sequence]:
        """Append the new tokens, and remove the sequences that have ended. Return those that got a token.

        Tokens of a draft that were wrong do not count as computed, and the blocks that only they needed are given back.
        num_draft_tokens counts the tokens of drafts, and num_accepted_tokens the right ones. If there was a draft, tell
        the observer "verify", with the sequence and both numbers.
        """
        updated = []
        for (seq, num_tokens), new_tokens in zip(batch, tokens, strict=True):
            num_drafted = len(seq.draft_token_ids)
            num_accepted = seq.append_tokens(new_tokens)
            num_valid = num_tokens - num_drafted + num_accepted
            seq.num_computed_tokens += num_valid
            self.kv_cache_manager.cache_blocks(seq, num_valid)
            self.kv_cache_manager.trim(seq)
            if num_drafted:
                self.num_draft_tokens += num_drafted
                self.num_accepted_tokens += num_accepted
                self.observer.tell("verify", seq, num_drafted, num_accepted)
            if new_tokens:
                updated.append(seq)
        self.observer.tell("step", batch, updated)
        for seq in updated:
            if seq.finished:
                self.scheduler.remove(seq)
        return updated

    def _outputs(self, seqs: list[Sequence]) -> list[RequestOutput]:
        """Return the outputs of the requests of `seqs`. Forget those that have finished."""
        outputs = [request_output(self._requests[request_id]) for request_id in {seq.request_id: None for seq in seqs}]
        for output in outputs:
            if output.finished:
                del self._requests[output.request_id]
        return outputs
