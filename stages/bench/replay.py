"""Requests against just a pool: they arrive, wait for room, grow by a token per step, and leave, without a model.

The pools are the stages' own managers. replay() uses one as an engine does, with two differences: a token is a
placeholder, and a waiting request is admitted at any step, as in stage 4 (stage 1 waits for the end of the batch).
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from stages.bench.engines import part, silent, stage
from stages.bench.workloads import Traffic
from stages.s2_block_manager.block_manager import BlockManager

Seq = Any  # a stage's Sequence
Admits = Callable[[Any, Seq], bool]  # whether a manager has room for a sequence


class Holder(NamedTuple):
    """A running sequence."""

    request_id: str
    slots: range | tuple[int, ...]  # in stage 1; later its block table
    num_computed_tokens: int


class Moment(NamedTuple):
    """The pool at one step, and the first waiting sequence, which does not fit."""

    report: Any
    holders: list[Holder]
    waiting: Seq

    @property
    def num_running(self) -> int:
        return len(self.holders)


def arrivals(name: str, model: Any, requests: Iterable[Traffic], longest: int) -> list[tuple[Seq, int]]:
    """Return sequences of stage `name` (s1 to s4), and the number of tokens after which each ends.

    `model` is a ModelConfig.
    """
    inputs = part(name, "input_processor").InputProcessor(model, None, longest, seed=0)
    made = []
    for number, request in enumerate(requests):
        params = stage(name).SamplingParams(max_tokens=request.max_tokens)
        made.append((inputs.process(str(number), [1] * request.num_prompt_tokens, params), request.num_output_tokens))
    return made


def admitted(manager: Any, sequences: Iterable[Seq], admits: Admits) -> int:
    """Return how many sequences a manager admits, one after the other, until `admits` refuses one."""
    for number, seq in enumerate(sequences):
        if not admits(manager, seq):
            return number
        manager.allocate(seq)
    raise AssertionError("the pool never fills")


def replay(
    manager: Any, arrivals: Iterable[tuple[Seq, int]], num_steps: int, admits: Admits, reports: bool = True
) -> list[Moment]:
    """Serve first come, first served, for `num_steps` steps or until the queue is empty.

    `manager` is a SlotManager of stage 1 or a BlockManager of stage 2. An arrival is a sequence and the number of
    tokens after which it ends. `admits` returns whether the manager has room: SlotManager.can_allocate, or
    BlockManager.can_promise. Without `reports`, no moments are recorded, which saves time.
    """
    is_in_blocks = isinstance(manager, BlockManager)
    waiting = deque(arrivals)
    running: dict[Seq, int] = {}  # and how many tokens each has to go
    moments: list[Moment] = []
    for _ in range(num_steps):
        while waiting and admits(manager, waiting[0][0]):
            seq, num_output_tokens = waiting.popleft()
            manager.allocate(seq)
            running[seq] = num_output_tokens
        if not waiting:
            break
        for seq in running:
            if is_in_blocks:  # a SlotManager reserves all slots at admission
                manager.append_slot(seq)
            seq.num_computed_tokens = seq.num_tokens  # the model would run here
            seq.token_ids.append(0)
            running[seq] -= 1
        if reports:
            slots = {seq: tuple(seq.block_table) if is_in_blocks else seq.slots for seq in running}
            holders = [Holder(seq.request_id, slots[seq], seq.num_computed_tokens) for seq in running]
            moments.append(Moment(manager.report(), holders, waiting[0][0]))
        for seq in [seq for seq, to_go in running.items() if to_go == 0]:
            manager.free(seq)
            del running[seq]
    return moments


class Compacting:
    """An `admits` for replay() that moves sequences of a SlotManager together if enough slots are free but scattered.

    `moved` has the number of tokens whose keys and values each such move copies.
    """

    def __init__(self) -> None:
        self.moved: list[int] = []
        self._admitted: list[Seq] = []

    def __call__(self, manager: Any, seq: Seq) -> bool:
        if not manager.can_allocate(seq) and sum(map(len, manager.free_ranges())) >= manager.num_reserved(seq):
            self._move_together(manager)
        fits: bool = manager.can_allocate(seq)
        if fits:
            self._admitted.append(seq)
        return fits

    def _move_together(self, manager: Any) -> None:
        """Let first fit place all sequences at the beginning, in their order."""
        self._admitted = [seq for seq in self._admitted if seq.slots is not None]
        holders = sorted(self._admitted, key=lambda seq: seq.slots.start)
        starts = [seq.slots.start for seq in holders]
        for seq in holders:
            manager.free(seq)
        for seq in holders:
            manager.allocate(seq)
        after = zip(holders, starts, strict=True)
        self.moved.append(sum(seq.num_computed_tokens for seq, start in after if seq.slots.start != start))


def in_blocks(model: Any, lengths: Iterable[int], block_size: int) -> Any:
    """Return the report of a pool of stage 2 with a text of each length. `model` is a ModelConfig."""
    requests = [Traffic(length, 1, 1) for length in lengths]
    longest = 2 + max(request.num_prompt_tokens for request in requests)
    seqs = [seq for seq, _ in arrivals("s2", model, requests, longest)]
    num_blocks = sum(-(-seq.num_tokens // block_size) for seq in seqs)
    manager = BlockManager(num_blocks, block_size, silent("s2"))
    for seq in seqs:
        manager.allocate(seq)
        seq.num_computed_tokens = seq.num_tokens
    return manager.report()
