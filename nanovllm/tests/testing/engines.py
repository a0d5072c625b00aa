"""Options of engines for tests, and an engine with a model that costs nothing and notices everything.

The latter is for tests of scheduling and memory. It keeps each token in the slot of the pool that the block table
names. Its next token depends on all tokens that it reads there, so a block that is lost, overwritten, not copied or
not recomputed changes the answer.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from ...backends.torch.model_runner import ModelRunner
from ...engine.executor import Executor, FinishedStep, Kernels, Scheduled
from ...engine.kv_cache import KVCache
from ...engine.prefix_cache import BlockHash, extend_block_hashes
from ...engine.sequence import Sequence
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ...requests.tokens import SampledToken, StepOutput
from .sequences import holders

OPTIONS = {"offload_policy": "load"}  # so that nothing is measured at the start
UNMEASURED = ("--offload-policy", "load")
VOCAB_SIZE = 320
Batch = list[Scheduled]


def model_runner(engine: LLMEngine) -> ModelRunner:
    """Return the ModelRunner of an engine without a custom executor."""
    assert isinstance(engine.executor, ModelRunner)
    return engine.executor


def params(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options)


def next_token(token_ids: list[int], seed: int | None = None, sample_index: int = 0) -> int:
    """Return the token after these. With a seed, each sample gets a different one, as if it were drawn."""
    return crc32(repr((token_ids, seed, sample_index)).encode()) % VOCAB_SIZE


def answer_alone(prompt: list[int], num_tokens: int, seed: int | None = None, sample_index: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed, sample_index if seed is not None else 0))
    return token_ids[len(prompt) :]


def answer(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def answers(output: RequestOutput) -> list[list[int]]:
    """Return the tokens of all samples."""
    return [completion.token_ids for completion in output.outputs]


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


def reasons(output: RequestOutput) -> list[str | None]:
    return [completion.finish_reason for completion in output.outputs]


class ScriptedExecutor:
    """An executor without a model."""

    def __init__(self, kv_cache: KVCache) -> None:
        kv_cache.blocks.fill_(-1)
        self._slots = kv_cache.blocks[:, -1, -1, :, -1, -1]  # [num_blocks, block_size]
        self._block_size = kv_cache.block_size
        self.num_steps = self.num_tokens = 0
        self.steps: list[list[tuple[str, int]]] = []  # request_id and number of tokens of each item, for each step

    def launch(self, batch: Batch, num_decodes: int = 0) -> FinishedStep:
        is_last = [num_tokens == seq.num_uncomputed_tokens == 1 for seq, num_tokens in batch[:num_decodes]]
        assert all(is_last), "decodes come first"
        return FinishedStep(StepOutput.of(self.run(batch)))

    def run(self, batch: Batch) -> list[SampledToken | None]:
        self.num_steps += 1
        self.num_tokens += sum(num_tokens for _, num_tokens in batch)
        self.steps.append([(seq.request_id, num_tokens) for seq, num_tokens in batch])
        for seq, num_tokens in batch:
            assert 0 < num_tokens <= seq.num_uncomputed_tokens
            for position, token_id in enumerate(seq.input_ids(num_tokens), start=seq.num_launched_tokens):
                block, offset = seq.block_table[position // self._block_size], position % self._block_size
                self._slots[block, offset] = token_id
        return [self._next(seq) if num_tokens == seq.num_uncomputed_tokens else None for seq, num_tokens in batch]

    def _next(self, seq: Sequence) -> SampledToken:
        read = [
            int(token) for token in self._slots[seq.block_table].flatten()[: seq.num_tokens_with_placeholders].tolist()
        ]
        drawn = (seq.seed, seq.sample_index) if seq.params.temperature else ()
        seq.placeholder_id = next_token(read, *drawn)
        return SampledToken(seq.placeholder_id, -1.0)


def chooser(executor: Callable[[KVCache], Executor]) -> Callable[[KVCache], tuple[Executor, Kernels]]:
    """Return the argument `choose_executor` of an engine with this executor."""
    return lambda kv_cache: (executor(kv_cache), Kernels("the executor is custom"))


def scripted_engine(checkpoint: Path, num_blocks: int, block_size: int = 4, **options) -> LLMEngine:
    """Return an engine with a ScriptedExecutor. `checkpoint` gives the model's shape, with 64 positions."""
    settings: dict[str, Any] = {
        "offload_policy": "load",
        "watermark": 0.0,
        "skip_tokenizer_init": True,
    }  # "auto" would measure
    settings |= options
    config = EngineConfig(str(checkpoint), block_size=block_size, kv_cache_tokens=num_blocks * block_size, **settings)
    return LLMEngine(config, choose_executor=chooser(ScriptedExecutor))


def executor_of(engine: LLMEngine) -> ScriptedExecutor:
    assert isinstance(engine.executor, ScriptedExecutor)
    return engine.executor


def step(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Run one step, check the engine, and return the outputs by request id."""
    outputs = engine.step()
    assert_whole(engine)
    return {output.request_id: output for output in outputs}


def run_to_the_end(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Run until all requests have ended, and return the last output of each."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs = step(engine)
        ended |= {request_id: output for request_id, output in outputs.items() if output.finished}
    assert_empty(engine)
    return ended


def assert_whole(engine: LLMEngine) -> None:
    """Assert everything that holds between two steps about the pool, the queues and each request."""
    manager, scheduler = engine.kv_cache_manager, engine.scheduler
    manager.check_integrity()
    queued = [*scheduler.running, *scheduler.waiting]
    carried = [sample for seq in queued for sample in seq.to_fork]
    unfinished = [seq for samples in engine.requests.values() for seq in samples if not seq.finished]
    assert Counter(unfinished) == Counter([*queued, *carried]), (
        "each sample is in one queue, or carried by a sequence in one"
    )
    unreported = {seq.request_id for seq in engine._unreported}  # noqa: SLF001 - ended in a step that failed
    for request_id, samples in engine.requests.items():
        assert any(not seq.finished for seq in samples) or request_id in unreported
    assert holders(manager) == set(scheduler.running)
    assert len(scheduler.running) + sum(len(seq.to_fork) for seq in scheduler.running) <= engine.config.max_num_seqs
    for seq in queued:
        assert 0 <= seq.num_computed_tokens < seq.num_tokens, "the last token has no keys and values yet"
        assert seq.num_launched_tokens <= seq.num_tokens and seq.num_output_placeholders in (0, 1)
        assert not seq.to_fork or seq.num_tokens == seq.num_prompt_tokens, "samples fork before the first token"
    for seq in [*scheduler.waiting, *carried]:
        assert (seq.num_launched_tokens, seq.num_output_placeholders, seq.block_table) == (0, 0, [])
    assert not any(seq.to_fork for seq in carried)
    for seq in scheduler.running:
        assert_cached_blocks_are_its_own(engine, seq)
    arrivals = [(seq.metrics.arrival_time, seq.sample_index) for seq in queued]
    assert arrivals == sorted(arrivals), "all running sequences arrived before all waiting ones"


def assert_cached_blocks_are_its_own(engine: LLMEngine, seq: Sequence) -> None:
    """Assert that the cached blocks in its table are full, computed, and indexed by the text up to their end."""
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, seq.token_ids, engine.config.block_size, seq.root_hash)
    for i, block in enumerate(seq.block_table):
        if block in engine.kv_cache_manager.pool.hashes:
            assert engine.config.enable_prefix_caching and (i + 1) * engine.config.block_size <= seq.num_computed_tokens
            assert engine.kv_cache_manager.pool.hashes[block] == hashes[i]


def assert_empty(engine: LLMEngine) -> None:
    """Assert that no request and no block remains."""
    engine.kv_cache_manager.collect_loads(wait=True)  # loads of aborted requests
    assert_whole(engine)
    assert not engine.has_unfinished_requests() and not engine.requests
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.kv_cache_manager.num_free_blocks == engine.kv_cache_manager.num_blocks
    assert engine.kv_cache_manager.report().pieces == ()
