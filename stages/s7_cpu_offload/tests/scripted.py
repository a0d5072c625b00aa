"""An engine whose model costs nothing and notices everything, for tests of who runs when.

It keeps each token in the slot of the pool that the block table names. What it says next depends on all that it then
reads there, so a block lost, overwritten, not copied or not computed anew gives other tokens than `said_alone`.
"""

from pathlib import Path
from zlib import crc32

from ..block_manager import cdiv
from ..config import EngineConfig
from ..cost_model import CostModel
from ..engine import LLMEngine
from ..kv_cache import KVCache
from ..llama import LlamaForCausalLM
from ..model_runner import ModelRunner
from ..outputs import RequestOutput
from ..sampling import SampledToken, SamplingParams
from ..scheduler import groups
from ..sequence import Sequence

VOCAB_SIZE = 320
Batch = list[tuple[Sequence, int]]


def params(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options)


def next_token(token_ids: list[int], seed: int | None = None, sample_index: int = 0) -> int:
    """What comes after these tokens; with a seed, as if drawn: samples that agree so far agree once more in half."""
    draws_alike = crc32(repr((seed, len(token_ids))).encode()) % 2
    return crc32(repr((token_ids, seed, 0 if draws_alike else sample_index)).encode()) % VOCAB_SIZE


def said_alone(prompt: list[int], num_tokens: int, seed: int | None = None, sample_index: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed, sample_index if seed is not None else 0))
    return token_ids[len(prompt) :]


def answer(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def answers(output: RequestOutput) -> list[list[int]]:
    """Of all samples."""
    return [completion.token_ids for completion in output.outputs]


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


def reasons(output: RequestOutput) -> list[str | None]:
    return [completion.finish_reason for completion in output.outputs]


class ScriptedRunner(ModelRunner):
    """Runs no model, and needs none."""

    def __init__(self, kv_cache: KVCache) -> None:
        kv_cache.blocks.fill_(-1)
        self._slots = kv_cache.blocks[:, -1, -1, :, -1, -1]  # [num_blocks, block_size]
        self._block_size = kv_cache.block_size
        self.num_steps = self.num_tokens = 0
        self.steps: list[list[tuple[str, int]]] = []  # of each step, request_id and number of tokens, in their order

    def run(self, batch: Batch) -> list[list[SampledToken]]:
        self.num_steps += 1
        self.num_tokens += sum(num_tokens for _, num_tokens in batch)
        self.steps.append([(seq.request_id, num_tokens) for seq, num_tokens in batch])
        for seq, num_tokens in batch:
            assert 0 < num_tokens <= seq.num_uncomputed_tokens
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
                block, offset = seq.block_table[position // self._block_size], position % self._block_size
                self._slots[block, offset] = seq.token_ids[position]
        return [self._next(seq) if num_tokens == seq.num_uncomputed_tokens else [] for seq, num_tokens in batch]

    def _next(self, seq: Sequence) -> list[SampledToken]:
        read = [int(token) for token in self._slots[seq.block_table].flatten()[: seq.num_tokens].tolist()]
        return [
            SampledToken(next_token(read, *((each.seed, each.sample_index) if each.params.temperature else ())), -1.0)
            for each in seq.samplers()
        ]


class ScriptedEngine(LLMEngine):
    model_runner: ScriptedRunner
    speeds: CostModel | None = None  # in place of those that would be measured: nothing is to be run unasked

    def build_cost_model(self) -> CostModel | None:
        return self.speeds

    def build_tokenizer(self) -> None:
        return None

    def build_model(self) -> None:
        return None

    def build_model_runner(self, model: LlamaForCausalLM) -> ScriptedRunner:
        return ScriptedRunner(self.kv_cache)


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
    unfinished = {name: [seq for seq in group if not seq.finished] for name, group in engine._requests.items()}
    queued = [*groups(scheduler.running), *groups(scheduler.waiting)]
    assert {group[0].request_id: group for group in queued} == unfinished and len(queued) == len(unfinished)
    followers = [follower for seq in scheduler.running for follower in seq.followers]
    assert manager._holders.keys() == set(scheduler.running) - set(followers)
    assert len(scheduler.running) <= engine.config.max_num_seqs
    for seq in seqs:
        assert not seq.finished and engine.has_request(seq.request_id)
        assert 0 <= seq.num_computed_tokens < seq.num_tokens, "the last token has no keys and values yet"
    swapped = [seq for seq in scheduler.waiting if seq.host_table]
    assert set(manager._swapped) == set(swapped), "those who are swapped out wait"
    for seq in swapped:
        assert seq.block_table == [] and len(seq.host_table) == cdiv(seq.num_computed_tokens, manager.block_size)
    for seq in set(seqs) - set(swapped) - {seq for seq in scheduler.running if seq not in followers}:
        assert (seq.num_computed_tokens, seq.block_table, seq.followers) == (0, [], [])
    assert not any(seq.host_table for seq in scheduler.running)
    arrivals = [group[0].metrics.arrival_time for group in queued]
    assert arrivals == sorted(arrivals), "all who run came before all who wait"


def assert_empty(engine: LLMEngine) -> None:
    """Nobody is left, and nothing of those who were, on either tier."""
    engine.kv_cache_manager.collect(wait=True)
    assert_whole(engine)
    assert not engine.has_unfinished_requests() and not engine._requests
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.kv_cache_manager.num_free_blocks == engine.kv_cache_manager.num_blocks
    assert engine.kv_cache_manager.report().tables == () and not engine.kv_cache_manager.is_copying
    assert engine.kv_cache_manager._host.num_free == engine.kv_cache_manager._host.num_blocks
