"""An engine whose model costs nothing and notices everything, for tests of who runs when.

It keeps each token in the slot that the block table names. What it says next depends on all that it then reads there,
so a block lost, shared or not computed anew gives other tokens than `said_alone`.
"""

from pathlib import Path
from zlib import crc32

from ..config import EngineConfig
from ..engine import LLMEngine
from ..llama import LlamaForCausalLM
from ..model_runner import ModelRunner
from ..outputs import RequestOutput
from ..sampling import SampledToken, SamplingParams
from ..sequence import Sequence

VOCAB_SIZE = 320
Batch = list[tuple[Sequence, int]]


def params(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options)


def next_token(token_ids: list[int], seed: int | None = None) -> int:
    """What comes after these tokens; with a seed, as if drawn."""
    return crc32(repr((token_ids, seed)).encode()) % VOCAB_SIZE


def said_alone(prompt: list[int], num_tokens: int, seed: int | None = None) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


def answer(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


class ScriptedRunner(ModelRunner):
    """Runs no model, and needs none."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._slots = [-1] * num_slots
        self._block_size = block_size
        self.num_steps = self.num_tokens = 0
        self.steps: list[list[tuple[str, int]]] = []  # of each step, request_id and number of tokens, in their order

    def run(self, batch: Batch) -> list[SampledToken | None]:
        self.num_steps += 1
        self.num_tokens += sum(num_tokens for _, num_tokens in batch)
        self.steps.append([(seq.request_id, num_tokens) for seq, num_tokens in batch])
        for seq, num_tokens in batch:
            assert 0 < num_tokens <= seq.num_uncomputed_tokens
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
                self._slots[self._slot(seq, position)] = seq.token_ids[position]
        return [self._next(seq) if num_tokens == seq.num_uncomputed_tokens else None for seq, num_tokens in batch]

    def _next(self, seq: Sequence) -> SampledToken:
        read = [self._slots[self._slot(seq, position)] for position in range(seq.num_tokens)]
        return SampledToken(next_token(read, seq.seed if seq.params.temperature else None), -1.0)

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self._block_size] * self._block_size + position % self._block_size


class ScriptedEngine(LLMEngine):
    model_runner: ScriptedRunner

    def build_tokenizer(self) -> None:
        return None

    def build_model(self) -> None:
        return None

    def build_model_runner(self, model: LlamaForCausalLM) -> ScriptedRunner:
        return ScriptedRunner(self.kv_cache.num_blocks * self.config.block_size, self.config.block_size)


def scripted_engine(checkpoint: Path, num_blocks: int, block_size: int = 4, **options) -> ScriptedEngine:
    """`checkpoint` gives the model's shape: 64 positions."""
    options = {"watermark": 0.0} | options
    return ScriptedEngine(
        EngineConfig(str(checkpoint), block_size=block_size, kv_cache_tokens=num_blocks * block_size, **options)
    )


def step(engine: LLMEngine) -> dict[str, RequestOutput]:
    """One step of an engine that stays whole; the outputs by their request's id."""
    outputs = engine.step()
    assert_whole(engine)
    return {output.request_id: output for output in outputs}


def run_to_the_end(engine: LLMEngine) -> dict[str, RequestOutput]:
    """The last output of each request that ends from here on."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs = step(engine)
        ended |= {request_id: output for request_id, output in outputs.items() if output.finished}
    assert_empty(engine)
    return ended


def assert_whole(engine: LLMEngine) -> None:
    """What holds between any two steps: of the pool, of the queues, and of each request."""
    manager, scheduler = engine.kv_cache_manager, engine.scheduler
    manager.check_integrity()
    seqs = [*scheduler.running, *scheduler.waiting]
    assert {seq.request_id: seq for seq in seqs} == engine._requests and len(seqs) == len(engine._requests)
    assert set(manager._holders) == set(scheduler.running)
    assert len(scheduler.running) <= engine.config.max_num_seqs
    for seq in seqs:
        assert not seq.finished
        assert 0 <= seq.num_computed_tokens < seq.num_tokens, "the last token has no keys and values yet"
    for seq in scheduler.waiting:
        assert (seq.num_computed_tokens, seq.block_table) == (0, [])
    arrivals = [seq.metrics.arrival_time for seq in seqs]
    assert arrivals == sorted(arrivals), "all who run came before all who wait"


def assert_empty(engine: LLMEngine) -> None:
    """Nobody is left, and nothing of those who were."""
    assert_whole(engine)
    assert not engine.has_unfinished_requests() and not engine._requests
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.kv_cache_manager.num_free_blocks == engine.kv_cache_manager.num_blocks
    assert engine.kv_cache_manager.report().tables == ()
