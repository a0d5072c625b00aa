"""Blocks that are shared: stage 5's engine without a model, what each of its steps holds and copies, a beam search that
is watched, and the faults of two texts about sharing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stages import s5_cow_sampling as s5
from stages.s5_cow_sampling.beam_search import BeamSearch
from stages.s5_cow_sampling.block_manager import BlockManager, cdiv
from stages.s5_cow_sampling.input_processor import InputProcessor
from stages.s5_cow_sampling.kv_cache import KVCache, bytes_per_token
from stages.s5_cow_sampling.llama import ModelConfig
from stages.s5_cow_sampling.sampling import SampledToken
from stages.s5_cow_sampling.sequence import Sequence as Seq

# ---- without a model


class Placeholder:
    """A model runner that computes nothing; each sample of a prompt gets a token of its own."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = 0

    def run(self, batch: Sequence[tuple[Seq, int]]) -> list[list[SampledToken]]:
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + sum(count for _, count in batch)
        return [
            [SampledToken(3 + sampler.sample_index, 0.0) for sampler in seq.samplers()]
            if seq.num_computed_tokens + count == seq.num_tokens
            else []
            for seq, count in batch
        ]


class WithoutModel(s5.LLMEngine):
    """Stage 5's engine with placeholders for tokens. Blocks are taken, shared, copied and given back as ever."""

    def __init__(self, **options: Any) -> None:
        """`options` are EngineConfig's."""
        super().__init__(s5.EngineConfig(**options))

    def build_tokenizer(self) -> None:
        return None

    def build_model(self) -> Any:
        return None

    def build_model_runner(self, model: Any) -> Any:
        return Placeholder()


class Moment(NamedTuple):
    """A step of an engine."""

    blocks: int  # held after it
    tables: int  # entries of all block tables: what would be held if nothing were shared
    copied: int  # blocks that it copied


class Ask(NamedTuple):
    """A request: so many samples of a prompt of so many tokens."""

    num_prompt_tokens: int
    num_output_tokens: int
    n: int = 1


def serve(engine: WithoutModel, *asks: Ask) -> list[Moment]:
    """All are there at once. A moment for each step, as it is before those who have ended leave."""
    for number, ask in enumerate(asks):
        params = s5.SamplingParams(n=ask.n, max_tokens=ask.num_output_tokens, ignore_eos=True)
        engine.add_request(str(number), [3 + i for i in range(ask.num_prompt_tokens)], params)
    manager, cache = engine.kv_cache_manager, engine.kv_cache
    moments: list[Moment] = []

    def note() -> None:
        blocks = manager.num_blocks - manager.num_free_blocks
        tables = sum(len(seq.block_table) for seq in engine.scheduler.running)
        moments.append(Moment(blocks, tables, cache.num_blocks_copied - sum(moment.copied for moment in moments)))

    engine.note_peak = note  # type: ignore[method-assign]
    while engine.has_unfinished_requests():
        engine.step()
    return moments


def serve_anew(options: dict[str, Any], *asks: Ask) -> list[Moment]:
    """serve() with a new engine; `options` are EngineConfig's."""
    return serve(WithoutModel(**options), *asks)


def blocks_at_most(moments: Sequence[Moment]) -> int:
    return max(moment.blocks for moment in moments)


# ---- beams


class Beam(NamedTuple):
    """A row of a picture: a beam at one step."""

    text: str  # its last token
    table: tuple[int, ...]


class BeamStep(NamedTuple):
    beams: list[Beam]
    ref_counts: dict[int, int]  # of the blocks that the beams hold
    copies: list[tuple[int, int]]  # from, to


class WatchedBeams(BeamSearch):
    """A beam search that notes who holds what, each time that the model is about to run."""

    def __init__(self, engine: s5.LLMEngine, params: s5.BeamSearchParams) -> None:
        super().__init__(engine, params)
        self.steps: list[BeamStep] = []

    def _compute(self, beams: list[Seq]) -> list[SampledToken]:
        copies: list[tuple[int, int]] = []
        cache, make = self._engine.kv_cache, self._engine.kv_cache.copy_blocks

        def noted(needed: dict[int, int]) -> None:
            copies.extend((source, target) for target, source in needed.items())
            make(needed)

        cache.copy_blocks = noted  # type: ignore
        tokens = super()._compute(beams)
        del cache.copy_blocks
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "a picture of beams shows their text"
        rows = [Beam(tokenizer.decode(beam.token_ids[-1:]), tuple(beam.block_table)) for beam in beams]
        blocks = {block for row in rows for block in row.table}
        counts = {block: sum(block in row.table for row in rows) for block in sorted(blocks)}
        self.steps.append(BeamStep(rows, counts, copies))
        return tokens


def held_by_beams(
    options: dict[str, Any], prompt: str | list[int], width: int, max_tokens: int
) -> tuple[list[int], int]:
    """Blocks held at each step of a beam search by a new engine, and blocks copied in all of them."""
    llm = s5.LLM(**options)
    params = s5.BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    search = WatchedBeams(llm.llm_engine, params)
    search.run("beams", prompt)
    return [len(step.ref_counts) for step in search.steps], llm.kv_cache.num_blocks_copied


# ---- costs


def fork_and_free(manager: BlockManager, parent: Seq, child: Seq) -> None:
    """`child` shares all that `parent` has, and lets go."""
    manager.fork(parent, child, parent.num_tokens)
    manager.free(child)


def copy_each(cache: KVCache, copies: dict[int, int]) -> None:
    """{target: source}, one after the other."""
    for target, source in copies.items():
        cache.copy_blocks({target: source})


def copy_and_wait(cache: KVCache, copies: dict[int, int]) -> None:
    """All at once; a GPU has done it when this returns."""
    cache.copy_blocks(copies)
    if cache.blocks.is_cuda:
        torch.cuda.synchronize()


# ---- the faults of two texts, retold, not copied


class CountsFromNothing:
    """Reference counts as "PagedAttention: memory layout and kernel analysis" has them: a fork adds 1 to each, and
    taking a block sets none.

    >>> blocks = CountsFromNothing(num_blocks=4)
    >>> blocks.allocate("a", 2); blocks.fork("a", "b"); blocks.must_copy("a"), blocks.must_copy("b")
    (False, False)
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}

    def allocate(self, name: str, count: int) -> None:
        self.tables[name] = [self.free.pop() for _ in range(count)]  # the fault: nobody counts the first holder

    def fork(self, parent: str, child: str) -> None:
        self.tables[child] = list(self.tables[parent])
        for block in self.tables[child]:
            self.ref_counts[block] += 1

    def must_copy(self, name: str) -> bool:
        """Before it writes to its last block."""
        return self.ref_counts[self.tables[name][-1]] > 1


def shared_prompt(num_tokens: int, block_size: int, drops_the_first: bool) -> tuple[list[int], int]:
    """The example of "Memory Pool Management: Slab Allocators for GPU Inference" on stage 5's manager: a prompt is
    computed, two requests fork it, and each frees what it holds. The text's fault is that the first owner never does.

    Returns the reference count of a block of the prompt after each of these calls, and the blocks held at the end.
    """
    manager = BlockManager(3 * cdiv(num_tokens, block_size), block_size)
    inputs = InputProcessor(ModelConfig(64, 8, 8, 1, 1, 1, 8), None, 2 * num_tokens, seed=0)
    owner, *children = (inputs.process(name, [1] * num_tokens, s5.SamplingParams())[0] for name in "abc")
    manager.allocate(owner)
    owner.num_computed_tokens = num_tokens
    block, counts = owner.block_table[0], [1]
    for child in children:
        manager.fork(owner, child, num_tokens)
        counts.append(manager._pool.ref_count(block))
    for seq in (*children, owner)[: 3 if drops_the_first else 2]:
        manager.free(seq)
        counts.append(manager._pool.ref_count(block))
    return counts, manager.num_blocks - manager.num_free_blocks


# ---- arithmetic


def saving(options: dict[str, Any], num_prompt_tokens: int, num_own_tokens: int, n: int) -> float:
    """What saved() says, counted. A step has room for all prompts: so none has ended when the last one comes."""
    options = options | {"max_num_batched_tokens": n * num_prompt_tokens}
    num_output_tokens = num_own_tokens + 1  # the last is never computed
    together = serve_anew(options, Ask(num_prompt_tokens, num_output_tokens, n))
    apart = serve_anew(options, *[Ask(num_prompt_tokens, num_output_tokens)] * n)
    return 1 - blocks_at_most(together) / blocks_at_most(apart)


def saved(num_prompt_tokens: int, num_own_tokens: int, n: int, block_size: int) -> float:
    """The share of the blocks that n samples of a prompt save, each with so many tokens of its own.

    >>> saved(4, 4, 2, block_size=4), saved(5, 0, 2, block_size=4), saved(5, 1, 2, block_size=4)
    (0.25, 0.5, 0.25)
    """
    each = cdiv(num_prompt_tokens + num_own_tokens, block_size)
    shared = num_prompt_tokens // block_size if num_own_tokens else each
    return (n - 1) * shared / (n * each)


def bytes_of_layer(model: ModelConfig, dtype: torch.dtype) -> int:
    """What a token takes in one layer."""
    return bytes_per_token(model, dtype) // model.num_hidden_layers
