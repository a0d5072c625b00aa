"""LLMEngine: requests come and go at any time; step() computes some tokens of the unfinished ones.

A step is three calls: schedule (who runs), run (the model), update (what came of it).
"""

from pathlib import Path

from ..backends.torch.attention import PagedAttention
from ..backends.torch.model_runner import ModelRunner, Scheduled
from ..llama import LlamaForCausalLM, ModelConfig, Tokenizer, load_model
from .block_manager import BlockManager, cdiv
from .config import EngineConfig
from .cost_model import CostModel, measure
from .input_processor import InputProcessor, Prompt
from .interrupts import interrupts_held_back
from .kv_cache import KVCache, num_blocks_for
from .offload import MAX_DEFAULT_BYTES, HostKVCache
from .outputs import RequestOutput
from .sampling_params import SampledToken, SamplingParams
from .scheduler import Scheduler
from .sequence import Sequence, request_output


class LLMEngine:
    """An engine belongs to one thread. Ctrl-C is taken between two steps."""

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
        self.model_runner = self.build_model_runner(model)
        self.input_processor = self.build_input_processor()
        self.cost_model: CostModel | None = None
        self.host_kv_cache = self.build_host_kv_cache()
        self.kv_cache_manager = self.build_block_manager()
        self.scheduler = self.build_scheduler()
        self._requests: dict[str, list[Sequence]] = {}  # the samples of each; one of them at least has not ended

    @interrupts_held_back()
    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """It runs from the next step on that has room. Raises ValueError for a request that can never be served."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is being served already")
        samples = self.input_processor.process(request_id, prompt, params or SamplingParams())
        needed, num_blocks = cdiv(samples[0].num_tokens, self.config.block_size), self.kv_cache_manager.num_blocks
        if needed > num_blocks:
            raise ValueError(f"the prompt needs {needed} blocks, the pool has {num_blocks}")
        self._requests[request_id] = samples
        size = self.config.max_num_seqs  # the first of so many computes the prompt, the others are forked from it
        for first, *others in (samples[start : start + size] for start in range(0, len(samples), size)):
            first.to_fork = others
            self.scheduler.add(first)

    @interrupts_held_back()
    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state. Returns its last output; None, and nothing happens, if it is not here."""
        samples = self._requests.get(request_id)
        if samples is None:
            return None
        for seq in samples:
            self.scheduler.remove(seq)
            if not seq.finished:
                seq.finish("abort")
        [output] = self._outputs(samples)
        return output

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @interrupts_held_back()
    def step(self) -> list[RequestOutput]:
        """Compute some tokens. Returns the outputs so far of the requests that got a token or have ended.

        If a sequence can never go on, it ends, and no model runs in this step. If nobody can run, it waits for what is
        on its way from the host, and returns no outputs. A Ctrl-C that was pressed meanwhile is raised in place of the
        outputs: they are then lost, also the last ones of requests that have ended.
        """
        batch, failed = self._schedule()
        if failed:
            return self._outputs(failed)
        if not batch:
            self.kv_cache_manager.collect_loads(wait=True)  # nobody can run until a block arrives
        tokens = self._run(batch) if batch else []
        return self._outputs(self._update(batch, tokens))

    def _schedule(self) -> tuple[list[Scheduled], list[Sequence]]:
        """Return the batch and the failed sequences; the copies are made.

        If this raises, all are preempted: none may read a block whose copy was not made.
        """
        try:
            batch, copies, failed = self.scheduler.schedule()
            self.kv_cache.copy_blocks(copies)
            return batch, failed
        except Exception:
            self.scheduler.preempt_all()
            raise

    def _run(self, batch: list[Scheduled]) -> list[SampledToken | None]:
        """A step of the model. If it raises, its sequences run again one by one: one that raises alone has failed."""
        try:
            return self.model_runner.run(batch)
        except Exception as error:
            if len(batch) > 1:
                return [token for scheduled in batch for token in self._run([scheduled])]
            batch[0][0].fail(f"{type(error).__name__}: {error}")
            return [None]

    def _update(self, batch: list[Scheduled], tokens: list[SampledToken | None]) -> list[Sequence]:
        """Returns the sequences that got a token or have failed; a sequence that ends gives its blocks back."""
        updated = []
        for (seq, num_tokens), token in zip(batch, tokens, strict=True):
            if not seq.finished:  # else it has failed, and nothing of it was computed
                seq.num_computed_tokens += num_tokens
                self.kv_cache_manager.cache_blocks(seq, num_tokens)
            if token is not None:
                seq.append_token(token)
            if token is not None or seq.finished:
                updated.append(seq)
        for seq in updated:
            if seq.finished:
                self.scheduler.remove(seq)
        return updated

    def _outputs(self, seqs: list[Sequence]) -> list[RequestOutput]:
        """Of their requests, so far, each once. The engine forgets a request that has finished."""
        outputs = []
        for request_id in dict.fromkeys(seq.request_id for seq in seqs):
            output = self.build_output(self._requests[request_id])
            if output.finished:
                del self._requests[request_id]
            outputs.append(output)
        return outputs

    def build_output(self, samples: list[Sequence]) -> RequestOutput:
        return request_output(samples)

    def build_input_processor(self) -> InputProcessor:
        return InputProcessor(self.model_config, self.tokenizer, self.max_model_len, self.config.seed)

    def build_tokenizer(self) -> Tokenizer | None:
        folder = Path(self.config.model)
        return Tokenizer(folder) if (folder / "tokenizer.model").exists() else None

    def build_model(self) -> LlamaForCausalLM:
        return load_model(self.config.model, self.model_config, self.dtype, self.device, self.max_model_len)

    def build_kv_cache(self) -> KVCache:
        num_blocks = num_blocks_for(self.config, self.model_config, self.max_model_len, self.device)
        return KVCache(self.model_config, num_blocks, self.config.block_size, self.dtype, self.device)

    def build_block_manager(self) -> BlockManager:
        config = self.config
        return BlockManager(
            self.kv_cache.num_blocks, config.block_size, config.enable_prefix_caching, self.host_kv_cache
        )

    def build_host_kv_cache(self) -> HostKVCache:
        """As many blocks as kv_offloading_tokens fill; without it as the device has, up to MAX_DEFAULT_BYTES.

        None if no hit is possible (no prefix cache, or max_model_len within a block: a hit is a full block, and then a
        token), or if nothing is to be stored: by the policy, or because computing is cheaper than loading. The
        cost_model is measured under "auto" only, and only where blocks could be stored.
        """
        config = self.config
        num_blocks = min(self.kv_cache.num_blocks, MAX_DEFAULT_BYTES // self.kv_cache.blocks[0].nbytes)
        if config.kv_offloading_tokens is not None:
            num_blocks = config.kv_offloading_tokens // config.block_size
        can_hit = config.enable_prefix_caching and self.max_model_len > config.block_size  # a full block, then a token
        if config.offload_policy == "recompute" or not can_hit:
            num_blocks = 0
        if config.offload_policy == "auto" and num_blocks:
            self.cost_model = measure(self)
            if not self.cost_model.prefers_load(self.kv_cache.bytes_per_token):
                num_blocks = 0
        return HostKVCache(self.kv_cache.blocks, num_blocks)

    def build_scheduler(self) -> Scheduler:
        return Scheduler(self.config, self.kv_cache_manager)

    def build_model_runner(self, model: LlamaForCausalLM) -> ModelRunner:
        attention = PagedAttention(self.kv_cache, self.config.slots_in_a_tile())
        return ModelRunner(model, attention, self.config.block_size, self.device)
