"""LLMEngine: requests come and go at any time; step() computes some tokens of those that are here.

A step is three calls: schedule (who runs), run (the model), update (what came of it).
"""

from pathlib import Path

from .attention import PagedAttention
from .config import EngineConfig
from .cost_model import CostModel, measure
from .input_processor import InputProcessor, Prompt
from .kv_cache import KVCache, num_blocks_for
from .llama import LlamaForCausalLM, ModelConfig, Tokenizer, load_model
from .model_runner import ModelRunner, Scheduled
from .offload import HostPool
from .outputs import RequestOutput
from .prefix_cache import PrefixCache
from .sampling import SampledToken, SamplingParams
from .scheduler import Scheduler
from .sequence import Sequence, request_output
from .tiered_block_manager import TieredBlockManager


class LLMEngine:
    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError for a bad value or checkpoint. Each part has a method that builds it, to be overridden."""
        self.config = config
        self.model_config = ModelConfig.from_folder(config.model)
        self.max_model_len = config.longest_sequence(self.model_config.max_position_embeddings)
        self.device = config.torch_device()
        self.dtype = config.torch_dtype(self.model_config.dtype)
        self.tokenizer = self.build_tokenizer()
        model = self.build_model()
        self.kv_cache = self.build_kv_cache()  # after the weights: on a GPU it takes what they leave
        self.host_pool = self.build_host_pool()
        self.block_manager = self.build_block_manager()
        self.scheduler = self.build_scheduler()
        self.model_runner = self.build_model_runner(model)
        self.peak = self.block_manager.report()  # the pool when most of it was used, in the engine's life
        self.input_processor = InputProcessor(self.model_config, self.tokenizer, self.max_model_len, config.seed)
        self._requests: dict[str, list[Sequence]] = {}  # the samples of those that have not ended
        self.cost_model = self.build_cost_model()  # at last: it may run the model

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """It runs from the next step on that has room. Raises ValueError for a request that can never be served."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is being served already")
        params = params or SamplingParams()
        if params.n > self.config.max_num_seqs:
            raise ValueError(f"n is {params.n}, max_num_seqs is {self.config.max_num_seqs}")
        group = self.input_processor.process(request_id, prompt, params)
        needed, num_blocks = self.block_manager.num_blocks_for(*group), self.block_manager.num_blocks
        if needed > num_blocks:
            raise ValueError(f"the prompt needs {needed} blocks, the pool has {num_blocks}")
        self._requests[request_id] = group
        self.scheduler.add(group)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state. Returns its last output; None, and nothing happens, if it is not here."""
        group = self._requests.pop(request_id, None)
        if group is None:
            return None
        for seq in group:
            self.scheduler.remove(seq)
            if not seq.finished:
                seq.finish("abort")
        return request_output(group)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def has_request(self, request_id: str) -> bool:
        """Whether it was added and has not ended."""
        return request_id in self._requests

    def step(self) -> list[RequestOutput]:
        """The outputs so far of those that got a token. If some can never go on: theirs alone, and no model runs.

        If the model raises, nothing was computed: the same sequences are scheduled again in the next step.
        """
        batch, failed = self.scheduler.schedule()
        self.kv_cache.copy_blocks(self.scheduler.copies)
        self.scheduler.copies.clear()
        if failed:
            return self._outputs(failed)
        if not batch:
            self.block_manager.collect(wait=True)  # nobody can run before a copy is done
        tokens = self.model_runner.run(batch) if batch else []
        return self._outputs(self._update(batch, tokens))

    def _update(self, batch: list[Scheduled], tokens: list[list[SampledToken]]) -> list[Sequence]:
        """Returns the sequences that got a token; those that it ends leave the queues."""
        updated = []
        for (seq, num_tokens), sampled in zip(batch, tokens, strict=True):
            seq.num_computed_tokens += num_tokens
            self.block_manager.cache_blocks(seq)
            samplers = seq.samplers() if sampled else []
            self.scheduler.fork_followers(seq)
            for sampler, token in zip(samplers, sampled, strict=True):
                sampler.append_token(token)
                updated.append(sampler)
        self.note_peak()
        for seq in updated:
            if seq.finished:
                self.scheduler.remove(seq)
        return updated

    def _outputs(self, seqs: list[Sequence]) -> list[RequestOutput]:
        """Of the requests of which these are samples; those that have ended leave the engine."""
        outputs = [request_output(self._requests[request_id]) for request_id in {seq.request_id: None for seq in seqs}]
        for output in outputs:
            if output.finished:
                del self._requests[output.request_id]
        return outputs

    def note_peak(self) -> None:
        """Look at the pool now, for `peak`."""
        self.peak = max(self.peak, self.block_manager.report(), key=lambda report: report.used)

    def build_tokenizer(self) -> Tokenizer | None:
        folder = Path(self.config.model)
        return Tokenizer(folder) if (folder / "tokenizer.model").exists() else None

    def build_model(self) -> LlamaForCausalLM:
        return load_model(self.config.model, self.model_config, self.dtype, self.device)

    def build_kv_cache(self) -> KVCache:
        num_blocks = num_blocks_for(self.config, self.model_config, self.max_model_len, self.device)
        return KVCache(self.model_config, num_blocks, self.config.block_size, self.dtype, self.device)

    def build_block_manager(self) -> TieredBlockManager:
        prefix_cache = PrefixCache(self.config.block_size) if self.config.enable_prefix_caching else None
        return TieredBlockManager(self.kv_cache.num_blocks, self.config.block_size, prefix_cache, self.host_pool)

    def build_host_pool(self) -> HostPool:
        tokens = self.config.swap_space_tokens
        num_blocks = self.kv_cache.num_blocks if tokens is None else tokens // self.config.block_size
        return HostPool(self.kv_cache.blocks, num_blocks)

    def build_cost_model(self) -> CostModel | None:
        """None if there is nothing to choose. Else both speeds are measured, which takes a few steps."""
        has_choice = self.config.preemption == "auto" and self.max_model_len > 1  # 1: no prompt is short enough
        return measure(self) if has_choice and self.host_pool.num_blocks else None

    def build_scheduler(self) -> Scheduler:
        return Scheduler(self.config, self.block_manager, self.prefers_swap)

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a preempted group of so many blocks and computed tokens goes to the host."""
        if self.cost_model:
            return self.cost_model.prefers_swap(num_blocks * self.host_pool.bytes_per_block, num_tokens)
        return self.config.preemption == "swap" and self.host_pool.num_blocks > 0

    def build_model_runner(self, model: LlamaForCausalLM) -> ModelRunner:
        attention = PagedAttention(self.kv_cache, self.config.slots_in_a_tile())
        return ModelRunner(model, attention, self.config.block_size, self.device)
