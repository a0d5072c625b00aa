"""An engine whose model is a script, for tests of who runs when: it costs nothing and notices everything.

A token leaves its id in its slot. The next token depends on all ids that the sequence then reads through its block
table, so a block that is lost, overwritten or not computed again gives other tokens than said_alone().
"""

from pathlib import Path
from typing import Any
from zlib import crc32

from ..config import EngineConfig
from ..engine import LLMEngine
from ..model_runner import Scheduled
from ..outputs import RequestOutput
from ..sampling import SampledToken, SamplingParams
from ..scheduler import SchedulerOutput
from ..sequence import Sequence

BLOCK_SIZE = 4


def next_token(token_ids: list[int], seed: int = 0, sample_index: int = 0) -> int:
    return 3 + crc32(repr((token_ids, seed, sample_index)).encode()) % 300


def said_alone(prompt: list[int], num_tokens: int, seed: int = 0, sample_index: int = 0) -> list[int]:
    """Return what a sample says if nobody else is there and memory has no end."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed, sample_index))
    return token_ids[len(prompt) :]


class ScriptedRunner:
    """Stands in for ModelRunner, on the slots of the real pool."""

    def __init__(self, engine: LLMEngine) -> None:
        self._slots = engine.kv_cache.blocks.fill_(-1).numpy()[:, 0, 0, :, 0, 0]  # [num_blocks, block_size], a view
        self.steps: list[list[tuple[str, int]]] = []  # of each step: request_id and number of tokens

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for step in self.steps for _, num_tokens in step)

    def run(self, batch: list[Scheduled]) -> list[SampledToken | None]:
        self.steps.append([(seq.request_id, num_tokens) for seq, num_tokens in batch])
        for seq, num_tokens in batch:
            assert 0 < num_tokens <= seq.num_uncomputed_tokens
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
                self._slots[seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE] = seq.token_ids[position]
        return [self._next(seq) if num_tokens == seq.num_uncomputed_tokens else None for seq, num_tokens in batch]

    def _next(self, seq: Sequence) -> SampledToken:
        read = self._slots[seq.block_table].flatten()[: seq.num_tokens].astype(int).tolist()
        return SampledToken(next_token(read, seq.seed, seq.sampling_row().sample_index), -1.0)


def scripted_engine(checkpoint: Path, num_blocks: int, **options) -> LLMEngine:
    """Return an engine with a pool of that size, for texts of up to 64 tokens. `checkpoint` gives the model's shape."""
    options = {"watermark": 0.0, "max_model_len": 64} | options
    size: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_cache_tokens": num_blocks * BLOCK_SIZE}
    engine = LLMEngine(EngineConfig(str(checkpoint), **size, **options))
    engine.model_runner = ScriptedRunner(engine)  # type: ignore[assignment]
    return engine


def steps_of(engine: LLMEngine) -> list[list[tuple[str, int]]]:
    """Return what ran in each step: request_id and number of tokens."""
    runner: Any = engine.model_runner
    return runner.steps


def add(engine: LLMEngine, request_id: str, num_tokens: int, max_tokens: int = 8, **options) -> list[int]:
    """Add a request and return its prompt: `num_tokens` times the letter of its name."""
    prompt = [ord(request_id[0])] * num_tokens
    engine.add_request(request_id, prompt, SamplingParams(**{"max_tokens": max_tokens, "seed": 0} | options))
    return prompt


def start(engine: LLMEngine, request_id: str, num_tokens: int, num_computed: int) -> Sequence:
    """Let a sequence run, of whose tokens some are computed. It has blocks for one token less than it has."""
    seq = Sequence(request_id, None, [7] * (num_tokens - 1), SamplingParams(), 0, set(), max_num_tokens=64)
    engine.kv_cache_manager.allocate(seq)
    seq.token_ids.append(8)
    seq.num_computed_tokens = num_computed
    engine.scheduler.running.append(seq)
    return seq


def batch_of(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(seq.request_id, num_tokens) for seq, num_tokens in output.batch]


def names(seqs: list[Sequence]) -> str:
    return " ".join(seq.request_id for seq in seqs)


def step(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Return the outputs of one step, by request_id. Everything must be in its place before and after."""
    outputs = engine.step()
    check(engine)
    return {output.request_id: output for output in outputs}


def check(engine: LLMEngine) -> None:
    """Raise AssertionError unless the pool and the queues are as they must be between two steps."""
    engine.kv_cache_manager.check_integrity()
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    assert len(running) <= engine.config.max_num_seqs
    assert all(not seq.finished and seq.num_uncomputed_tokens > 0 for seq in [*running, *waiting])
    assert all(seq.num_computed_tokens == 0 and not seq.block_table for seq in waiting), "it waits and holds blocks"
    arrivals = [seq.metrics.arrival_time for seq in [*running, *waiting]]
    assert arrivals == sorted(arrivals), "somebody was overtaken"


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until all requests have finished. Return their outputs, by request_id. Nobody may hold a block then."""
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {request_id: output for request_id, output in step(engine).items() if output.finished}
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.kv_cache_manager.num_free_blocks == engine.kv_cache_manager.num_blocks
    return finished


def said(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason
