"""CostModel: is it cheaper to bring a block back from the host, or to compute its tokens again?

    load        bytes out and bytes in again / bandwidth of the copies
    recompute   tokens / speed of a prefill

Both grow with the number of tokens, so the answer hardly depends on it: it is a ratio of two speeds of the machine.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .block_manager import cdiv
from .kv_cache import BlockCopy
from .offload import HostKVCache
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .engine import LLMEngine

ROUNDS, BLOCKS = 2, 8  # the better of two rounds (the first one warms up), of this many blocks


@dataclass(frozen=True)
class CostModel:
    bytes_per_second: float  # of a copy between the tiers, one way
    tokens_per_second: float  # of a prefill

    def prefers_load(self, bytes_per_token: int) -> bool:
        """Whether to store a token's keys and values and to load them takes less time than to compute them again.

        >>> model = CostModel(bytes_per_second=1e9, tokens_per_second=1000)
        >>> model.prefers_load(bytes_per_token=50_000), model.prefers_load(bytes_per_token=5_000_000)
        (True, False)
        """
        return 2 * bytes_per_token / self.bytes_per_second < 1 / self.tokens_per_second

    def __str__(self) -> str:
        return f"copies {self.bytes_per_second / 1e9:.1f} GB/s, prefill {self.tokens_per_second:,.0f} tokens/s"


def measure(engine: "LLMEngine") -> CostModel:
    """Both speeds on this machine, before the first request. The pool's content is of no use yet."""
    return CostModel(copy_speed(engine), prefill_speed(engine))


def copy_speed(engine: "LLMEngine") -> float:
    """Bytes a second, one way, there and back on average."""
    num_blocks = min(BLOCKS, engine.kv_cache.num_blocks)
    host, copies = HostKVCache(engine.kv_cache.blocks, num_blocks), [BlockCopy(i, i) for i in range(num_blocks)]
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for copy in copies:
            host.store(copy)
        host.load(copies).wait()
        seconds.append(time.perf_counter() - started)
    return 2 * host.blocks.nbytes / min(seconds)


def prefill_speed(engine: "LLMEngine") -> float:
    """Tokens a second of a prompt as long as a step, the model and the pool allow."""
    block_size, num_blocks, runner = engine.config.block_size, engine.kv_cache.num_blocks, engine.model_runner
    num_tokens = min(engine.config.max_num_batched_tokens, engine.max_model_len - 1, num_blocks * block_size)
    [seq] = engine.input_processor.process("", [0] * num_tokens, SamplingParams(temperature=0.0, seed=0))
    seq.block_table = list(range(cdiv(num_tokens, block_size)))
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        runner.run([(seq, num_tokens)])
        seconds.append(time.perf_counter() - started)
    runner.num_steps = runner.num_tokens = 0
    return num_tokens / min(seconds)
