"""An engine whose model is a script, for tests of which sequences run in which step. It is fast, and misses no fault.

Computing a token writes its id to its slot. The next token depends on all ids that the sequence reads through its block
table, so a block that is lost, overwritten or not computed again changes the output: it differs from tokens_alone().
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

from torch import Tensor

from ..config import EngineConfig
from ..engine import LLMEngine
from ..host_tier import HostTier
from ..kv_cache import BlockCopy
from ..model_runner import Scheduled
from ..outputs import RequestOutput
from ..sampling import SampledToken, SamplingParams
from ..scheduler import SchedulerOutput
from ..sequence import Sequence

BLOCK_SIZE = 4


def next_token(token_ids: list[int], seed: int = 0, sample_index: int = 0) -> int:
    return 3 + crc32(repr((token_ids, seed, sample_index)).encode()) % 300


def tokens_alone(prompt: list[int], num_tokens: int, seed: int = 0, sample_index: int = 0) -> list[int]:
    """Return the output of a sample that runs alone and never runs out of blocks."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed, sample_index))
    return token_ids[len(prompt) :]


class ScriptedRunner:
    """A stand-in for ModelRunner that writes to the slots of the real pool."""

    def __init__(self, engine: LLMEngine) -> None:
        self._pool = engine.kv_cache_manager.pool
        self._slots = engine.kv_cache.blocks.fill_(-1).numpy()[:, 0, 0, :, 0, 0]  # [num_blocks, block_size], a view
        self.steps: list[list[tuple[str, int]]] = []  # request_id and number of tokens of each sequence, sorted

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for step in self.steps for _, num_tokens in step)

    def run(self, batch: list[Scheduled]) -> list[SampledToken | None]:
        self.steps.append(sorted((seq.request_id, num_tokens) for seq, num_tokens in batch))
        for seq, num_tokens in batch:
            num_left = seq.num_uncomputed_tokens
            assert 0 < num_tokens <= num_left, f"{seq.request_id} runs {num_tokens} tokens, {num_left} are uncomputed"
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
                block = seq.block_table[position // BLOCK_SIZE]
                assert self._pool.ref_counts[block] == 1, f"block {block} is shared, and written"
                assert block not in self._pool.hashes, f"block {block} is cached, and written"
                self._slots[block, position % BLOCK_SIZE] = seq.token_ids[position]
        return [self._next(seq) if num_tokens == seq.num_uncomputed_tokens else None for seq, num_tokens in batch]

    def _next(self, seq: Sequence) -> SampledToken:
        read = self._slots[seq.block_table].flatten()[: seq.num_tokens].astype(int).tolist()
        return SampledToken(next_token(read, seq.seed, seq.sampling_row().sample_index), -1.0)


def scripted_engine(checkpoint: Path, num_blocks: int, **options) -> LLMEngine:
    """Return an engine with a pool of that size, for up to 64 tokens a request. `checkpoint` is the model's shape.

    It has no prefix cache unless a test enables it. Evicted blocks are loaded.
    """
    options = {"enable_prefix_caching": False, "offload_policy": "load"} | options
    options = {"watermark": 0.0, "max_model_len": 64} | options
    size: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_cache_tokens": num_blocks * BLOCK_SIZE}
    engine = LLMEngine(EngineConfig(str(checkpoint), **size, **options))
    engine.model_runner = ScriptedRunner(engine)  # type: ignore[assignment]
    return engine


def steps_of(engine: LLMEngine) -> list[list[tuple[str, int]]]:
    """Return what each step has run: the request_id and the number of tokens of each sequence, sorted."""
    runner: Any = engine.model_runner
    return runner.steps


class Transfer:
    """A stand-in for the event of a load, which arrives when a test says so or when the engine waits for it."""

    def __init__(self, tier: HostTier, device_blocks: Tensor, copies: list[BlockCopy]) -> None:
        self.has_arrived = False
        self._tier, self._device_blocks, self._copies = tier, device_blocks, copies
        device_blocks[[copy.target for copy in copies]] = -1

    def query(self) -> bool:
        return self.has_arrived

    def synchronize(self) -> None:
        for source, target in self._copies if not self.has_arrived else []:
            self._device_blocks[target] = self._tier.blocks[source]
        self.has_arrived = True


def slow_loads(engine: LLMEngine) -> list[Transfer]:
    """Let loads take their time. Return a list that will have their transfers, in order."""
    tier, load = engine.host_tier, engine.host_tier.load
    transfers: list[Transfer] = []

    def load_slowly(copies: list[BlockCopy]) -> None:
        load(copies)
        if copies:
            transfers.append(Transfer(tier, engine.kv_cache.blocks, copies))
            tier.loads[-1].event = transfers[-1]

    tier.load = load_slowly  # type: ignore[method-assign]
    return transfers


def add(engine: LLMEngine, request_id: str, num_tokens: int, max_tokens: int = 8, **options) -> list[int]:
    """Add a request, and return its prompt: the first letter of its id, `num_tokens` times."""
    prompt = [ord(request_id[0])] * num_tokens
    engine.add_request(request_id, prompt, SamplingParams(**{"max_tokens": max_tokens, "seed": 0} | options))
    return prompt


def start(engine: LLMEngine, request_id: str, num_tokens: int, num_computed: int) -> Sequence:
    """Add a sequence to `running` with some tokens computed, and with blocks for all its tokens but the last."""
    seq = Sequence(request_id, None, [7] * (num_tokens - 1), SamplingParams(), 0, set(), max_num_tokens=64)
    engine.kv_cache_manager.allocate(seq, [])
    seq.token_ids.append(8)
    seq.num_computed_tokens = num_computed
    engine.scheduler.running.append(seq)
    return seq


def batch_of(output: SchedulerOutput) -> list[tuple[str, int]]:
    """Return the request_id and the number of tokens of each sequence in a step, sorted."""
    return sorted((seq.request_id, num_tokens) for seq, num_tokens in output.batch)


def names(seqs: Iterable[Sequence]) -> str:
    return " ".join(seq.request_id for seq in seqs)


def queues(engine: LLMEngine) -> str:
    """Return which requests run, and which wait, such as "a b run, c wait"."""
    running, waiting = names(engine.scheduler.running), names(engine.scheduler.waiting)
    return f"{running or 'none'} run, {waiting or 'none'} wait"


def step(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Run a step and check the engine. Return the outputs by request_id."""
    outputs = engine.step()
    check(engine)
    return {output.request_id: output for output in outputs}


def check(engine: LLMEngine) -> None:
    """Raise AssertionError unless the pool and the queues are as they must be between two steps."""
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    for seq in waiting:
        assert not seq.block_table, f"{seq.request_id} waits, and still holds blocks {seq.block_table}"
        num_computed = seq.num_computed_tokens
        assert num_computed == 0, f"{seq.request_id} has no blocks, but {num_computed} of its tokens count as computed"
    for seq in [*running, *waiting]:
        assert not seq.finished, f"{seq.request_id} has finished, and is still in a queue"
        assert seq.num_uncomputed_tokens > 0, f"{seq.request_id} is in a queue with nothing left to compute"
        samples = [other.sample_index for other in [*running, *waiting] if other.request_id == seq.request_id]
        in_order = sorted(samples)
        assert samples == in_order, f"not in order of arrival: {seq.request_id}'s samples {samples}, not {in_order}"
    num_seats, max_num_seqs = sum(1 + len(seq.to_fork) for seq in running), engine.config.max_num_seqs
    assert num_seats <= max_num_seqs, f"{num_seats} seats are taken, max_num_seqs is {max_num_seqs}"
    arrivals = [seq.metrics.arrival_time for seq in [*running, *waiting]]
    assert arrivals == sorted(arrivals), f"not in order of arrival: {queues(engine)}"
    engine.kv_cache_manager.check_integrity()


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until all requests have finished. Return their outputs by request_id. All blocks must be free then."""
    finished: dict[str, RequestOutput] = {}
    num_idle = 0
    while engine.has_unfinished_requests():
        num_tokens = engine.model_runner.num_tokens
        outputs = step(engine)
        finished |= {request_id: output for request_id, output in outputs.items() if output.finished}
        num_idle = 0 if outputs or engine.model_runner.num_tokens > num_tokens else num_idle + 1
        assert num_idle < 9, "nothing runs, and requests are unfinished: do they wait for loads, or in no queue?"
    engine.kv_cache_manager.collect_loads(wait=True)  # of requests that were aborted
    check(engine)
    assert not engine.scheduler.running and not engine.scheduler.waiting, "a queue is not empty at the end"
    num_free, num_blocks = engine.kv_cache_manager.num_free_blocks, engine.kv_cache_manager.num_blocks
    assert num_free == num_blocks, f"only {num_free} of {num_blocks} blocks are free at the end"
    return finished


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def tokens_of_all(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason
