"""Stage 7's engine without a model: who is on the device, on the host or nowhere; and a swap as one text tells it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from stages import s7_cpu_offload as s7
from stages.s7_cpu_offload.cost_model import CostModel
from stages.s7_cpu_offload.offload import HostPool
from stages.s7_cpu_offload.sampling import SampledToken
from stages.s7_cpu_offload.sequence import Sequence as Seq

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


class WithoutModel(s7.LLMEngine):
    """Stage 7's engine with placeholders for tokens. Blocks are taken, swapped and given back as ever."""

    def __init__(self, cost_model: CostModel | None = None, **options: Any) -> None:
        """`cost_model` is what "auto" goes by; `options` are EngineConfig's."""
        self._given = cost_model
        super().__init__(s7.EngineConfig(**options))

    def build_tokenizer(self) -> None:
        return None

    def build_model(self) -> Any:
        return None

    def build_model_runner(self, model: Any) -> Any:
        return Placeholder()

    def build_cost_model(self) -> CostModel | None:
        return self._given


class Ask(NamedTuple):
    """A request: so many samples of a prompt of so many tokens."""

    num_prompt_tokens: int
    num_output_tokens: int
    n: int = 1


class Where(NamedTuple):
    """A request after a step: blocks that it holds on the device and on the host. It has not ended."""

    device: int
    host: int


class Counts(NamedTuple):
    """A run in numbers."""

    steps: int
    tokens_computed: int
    computed_twice: int
    preemptions: int
    blocks_swapped: int  # both ways


def serve(engine: WithoutModel, asks: Iterable[Ask]) -> list[dict[int, Where]]:
    """All are there at once. Where each request that has not ended is, after each step."""
    for number, ask in enumerate(asks):
        params = s7.SamplingParams(n=ask.n, max_tokens=ask.num_output_tokens, ignore_eos=True)
        engine.add_request(str(number), [3 + i for i in range(ask.num_prompt_tokens)], params)
    moments: list[dict[int, Where]] = []
    while engine.has_unfinished_requests():
        engine.step()
        here = dict.fromkeys(map(int, engine._requests), Where(0, 0))
        for seq in (*engine.scheduler.running, *engine.scheduler.waiting):
            device, host = here[int(seq.request_id)]
            here[int(seq.request_id)] = Where(device + len(seq.block_table), host + len(seq.host_table))
        moments.append(here)
    return moments


def counts(engine: WithoutModel, asks: Sequence[Ask]) -> Counts:
    """serve(), counted. The samples of a request get their first tokens from one computation of its prompt."""
    serve(engine, asks)
    needed = sum(ask.num_prompt_tokens + ask.n * (ask.num_output_tokens - 1) for ask in asks)
    runner, host = engine.model_runner, engine.host_pool
    moved = host.stored.num_blocks + host.loaded.num_blocks if host else 0
    computed = runner.num_tokens
    return Counts(runner.num_steps, computed, computed - needed, engine.scheduler.num_preemptions, moved)


class Swapped(NamedTuple):
    """What a swap of a whole request moved."""

    entries: int  # of all block tables of its samples
    stored: int  # blocks
    loaded: int


def swap_samples(ask: Ask, num_steps: int, **options: Any) -> Swapped:
    """Preempt a request after so many steps, bring it back, and serve it to its end."""
    engine = WithoutModel(preemption="swap", **options)
    params = s7.SamplingParams(n=ask.n, max_tokens=ask.num_output_tokens, ignore_eos=True)
    engine.add_request("0", [3 + i for i in range(ask.num_prompt_tokens)], params)
    for _ in range(num_steps):
        engine.step()
    entries = sum(len(seq.block_table) for seq in engine.scheduler.running)
    engine.scheduler._preempt(list(engine.scheduler.running))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.host_pool is not None
    return Swapped(entries, engine.host_pool.stored.num_blocks, engine.host_pool.loaded.num_blocks)


# ---- costs


class Machine(NamedTuple):
    """What decides between swap and recompute."""

    name: str
    bytes_per_second: float  # of the link, one way
    tokens_per_second: float  # of a prefill
    bytes_per_token: int

    @property
    def ratio(self) -> float:
        """How many times as long recompute takes as a swap, out and in. Above 1 the swap wins.

        >>> Machine("", bytes_per_second=1e9, tokens_per_second=1000, bytes_per_token=50_000).ratio
        10.0
        """
        model = CostModel(self.bytes_per_second, self.tokens_per_second)
        return model.recompute_seconds(1) / model.swap_seconds(self.bytes_per_token)


def break_even(fixed_swap: float, swap_a_token: float, fixed_compute: float, compute_a_token: float) -> float | None:
    """From how many tokens on a swap is cheaper than recompute, if each costs a fixed time and a time a token.

    None if it never is; 0 if it always is.

    >>> break_even(10, 1, 0, 2), break_even(0, 1, 5, 2), break_even(10, 3, 0, 2)
    (10.0, 0, None)
    """
    if fixed_swap <= fixed_compute and swap_a_token <= compute_a_token:
        return 0
    if swap_a_token >= compute_a_token:
        return None
    return (fixed_swap - fixed_compute) / (compute_a_token - swap_a_token)


def to_host(is_pinned: bool) -> Callable[[], None]:
    """A call that copies 64 blocks of 5.24 MB from a GPU to the host, pinned or pageable, and waits for them."""
    blocks = torch.zeros(64, 5_240_000, dtype=torch.uint8, device="cuda")
    host = torch.zeros(blocks.shape, dtype=torch.uint8, pin_memory=is_pinned)

    def copy() -> None:
        host.copy_(blocks, non_blocking=True)
        torch.cuda.synchronize()

    return copy


# ---- the faults of a text, retold, not copied


class AsTold:
    """An offload as "vLLM v1 Block Manager: KV cache at the pointer level" has it. One pool of numbers, the device's
    blocks and the host's; the host's tensor is indexed by a block's number less the length of the device's free list.
    A device block is given back at once, while its copy is still on its way.
    """

    def __init__(self, num_device: int, num_host: int) -> None:
        self.device, self.host = torch.zeros(num_device), torch.zeros(num_host)  # a number stands for a block
        self.free_device = list(range(num_device))
        self.free_host = list(range(num_device, num_device + num_host))
        self.on_their_way: list[tuple[int, int]] = []  # (row of the host, device block)

    def swap_out(self, block: int) -> int:
        """Returns the host's block. The copy has begun, no more."""
        number = self.free_host.pop(0)
        self.on_their_way.append((self.row(number), block))
        self.free_device.append(block)  # the fault: it is not copied yet
        return number

    def row(self, number: int) -> int:
        """The fault: it changes with every block that is taken or given back."""
        return (number - len(self.free_device)) % len(self.host)

    def copies_end(self) -> None:
        for row, block in self.on_their_way:
            self.host[row] = self.device[block]
        self.on_their_way.clear()

    def swap_in(self, number: int) -> float:
        """What is read for the host's block."""
        return self.host[self.row(number)].item()


class Late:
    """A transfer that is done when it is told to be: what a stream would do, on any machine."""

    def __init__(self, copy: Any) -> None:
        self._copy, self._is_done = copy, False

    def is_done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        if not self._is_done:
            self._copy()
            self._is_done = True

    def hold_back_compute(self) -> None:
        self.wait()

    def settle(self) -> None:
        pass


class LateHostPool(HostPool):
    """A host pool whose stores are done when somebody waits for them."""

    def __init__(self, device_blocks: torch.Tensor, num_blocks: int) -> None:
        super().__init__(device_blocks, num_blocks)
        self.on_their_way: list[Late] = []

    def store(self, copies: dict[int, int]) -> Any:
        make = super().store
        self.on_their_way.append(Late(lambda: make(copies)))
        return self.on_their_way[-1]


def told_swap(others_in_between: int, is_copied_first: bool) -> bool:
    """Whether the text's offload gives back what was swapped out, if others take so many device blocks meanwhile."""
    pool = AsTold(num_device=8, num_host=8)
    (block,) = [pool.free_device.pop(0)]
    pool.device[block] = 7.0
    number = pool.swap_out(block)
    if is_copied_first:
        pool.copies_end()
    for _ in range(others_in_between):  # the last in is the first out: the block that was just given back
        pool.device[pool.free_device.pop()] = -1.0
    pool.copies_end()
    return pool.swap_in(number) == 7.0


def our_swap(others_in_between: int, **options: Any) -> bool:
    """The same question to stage 7's manager, with a copy that is slow. `options` are EngineConfig's."""

    class Slow(WithoutModel):
        def build_host_pool(self) -> HostPool:
            return LateHostPool(self.kv_cache.blocks, 8)

    engine = Slow(preemption="swap", kv_cache_tokens=8 * 16, **options)
    manager, blocks = engine.kv_cache_manager, engine.kv_cache.blocks
    params = s7.SamplingParams(max_tokens=4)
    seq, *others = (engine.input_processor.process(str(i), [3] * 16, params)[0] for i in range(1 + others_in_between))
    manager.allocate(seq)
    seq.num_computed_tokens = 16
    blocks[seq.block_table] = 7.0
    manager.swap_out([seq])
    for other in others:
        manager.allocate(other)
        blocks[other.block_table] = -1.0
    manager.collect(wait=True)
    for other in others:
        manager.free(other)
    manager.swap_in([seq])
    manager.collect(wait=True)
    return bool((blocks[seq.block_table[0]] == 7.0).all())
