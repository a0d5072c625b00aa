"""An engine of core whose parts know log-probabilities, and how much of a prompt was cached."""

from dataclasses import replace
from pathlib import Path
from typing import cast

from ..backends.torch.attention import PagedAttention
from ..checkpoints.hub import find_checkpoint
from ..checkpoints.load_tokenizer import load_tokenizer
from ..engine.block_manager import BlockManager as CoreBlockManager
from ..engine.config import EngineConfig
from ..engine.engine import LLMEngine as CoreLLMEngine
from ..engine.outputs import RequestOutput as CoreRequestOutput
from ..engine.sequence import Sequence as CoreSequence
from ..llama import LlamaForCausalLM, Tokenizer
from .input_processor import InputProcessor
from .model_runner import ModelRunner
from .outputs import RequestOutput
from .sequence import Sequence, is_due, request_output


class BlockManager(CoreBlockManager):
    def find_hits(self, seq: CoreSequence) -> list:
        """None if it is to be computed anew. Its blocks are cached all the same."""
        return super().find_hits(seq) if cast(Sequence, seq).may_hit else []

    def allocate(self, seq: CoreSequence) -> None:
        super().allocate(seq)
        cast(Sequence, seq).note_admission()


class LLMEngine(CoreLLMEngine):
    def __init__(self, config: EngineConfig) -> None:
        """`config.model` may be a name of the hub, too."""
        super().__init__(replace(config, model=str(self.find_model(config.model))))

    def find_model(self, model: str) -> Path:
        return find_checkpoint(model)

    def build_tokenizer(self) -> Tokenizer | None:
        return cast(Tokenizer | None, load_tokenizer(self.config.model))  # it does what core asks of its own

    def build_input_processor(self) -> InputProcessor:
        return InputProcessor(self.model_config, self.tokenizer, self.max_model_len, self.config.seed)

    def build_block_manager(self) -> BlockManager:
        caching = self.config.enable_prefix_caching
        return BlockManager(self.kv_cache.num_blocks, self.config.block_size, caching, self.host_kv_cache)

    def build_model_runner(self, model: LlamaForCausalLM) -> ModelRunner:
        attention = PagedAttention(self.kv_cache, self.config.slots_in_a_tile())
        return ModelRunner(model, attention, self.config.block_size, self.device)

    def build_output(self, samples: list[CoreSequence]) -> RequestOutput:
        return request_output(cast(list[Sequence], samples))

    def _outputs(self, seqs: list[CoreSequence]) -> list[CoreRequestOutput]:
        """Those that are due: a request may want its last output only, or one for several tokens."""
        return super()._outputs([seq for seq in seqs if is_due(cast(list[Sequence], self._requests[seq.request_id]))])
