"""Made-up traffic for a pool: requests come, wait for room, grow by a token a step, and leave. No model runs.

The pools are the stages' own managers. What replay() does with one is what an engine does, with two differences: a
token is a placeholder, and a waiting request is let in at any step (stage 4 will do that; stage 1 waits for the end
of the batch).
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol

Seq = Any  # a stage's Sequence


class Manager(Protocol):
    """The verbs that every stage's slot or block manager has."""

    def can_allocate(self, seq: Seq) -> bool: ...
    def allocate(self, seq: Seq) -> None: ...
    def append_slot(self, seq: Seq) -> object: ...
    def free(self, seq: Seq) -> None: ...
    def report(self) -> Any: ...


class Request(NamedTuple):
    num_prompt_tokens: int
    max_tokens: int  # what the client asks for, to be safe
    num_output_tokens: int  # what it then needs

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def requests(count: int, seed: int, mean_output: int = 150, longest: int = 1024) -> list[Request]:
    """Prompts of 10 to 200 tokens; outputs mostly short, some long; clients ask for 1 to 4 times what they need."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        num_prompt_tokens = rng.randint(10, 200)
        num_output_tokens = min(8 + int(rng.expovariate(1 / mean_output)), longest - num_prompt_tokens)
        max_tokens = min(int(num_output_tokens * rng.uniform(1, 4)), longest - num_prompt_tokens)
        made.append(Request(num_prompt_tokens, max_tokens, num_output_tokens))
    return made


def arrivals(
    stage: ModuleType, model: Any, requests: Iterable[Request], longest: int, max_tokens: str = "max_tokens"
) -> list[tuple[Seq, int]]:
    """What replay() takes: sequences of the package `stage`, and the number of tokens after which each ends. `model` is
    a ModelConfig; `max_tokens` names the field of a request that the client states.
    """
    inputs = import_module(f"{stage.__name__}.input_processor").InputProcessor(model, None, longest, seed=0)
    made = []
    for number, request in enumerate(requests):
        params = stage.SamplingParams(max_tokens=getattr(request, max_tokens))
        made.append((inputs.process(str(number), [1] * request.num_prompt_tokens, params), request.num_output_tokens))
    return made


def can_promise(manager: Any, seq: Seq) -> bool:
    """What stage 2's LLM asks: beside the others, are there blocks for all that `seq` may come to need?"""
    report = manager.report()
    needed = -(-seq.max_num_tokens // report.block_size) * report.block_size
    return report.promised + needed <= report.num_slots


class Moment(NamedTuple):
    """The pool at one step, and the first sequence in the queue, which found no room."""

    report: Any
    waiting: Seq


def replay(
    manager: Manager,
    arrivals: Iterable[tuple[Seq, int]],
    num_steps: int,
    admits: Callable[[Any, Seq], bool] | None = None,
) -> list[Moment]:
    """First come, first served, for `num_steps` steps or until the queue is empty. An arrival is a sequence and the
    number of tokens after which it ends. `admits` says whether the manager has room; without it `can_allocate` does.
    """
    admits = admits or (lambda manager, seq: manager.can_allocate(seq))
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
            manager.append_slot(seq)
            seq.num_computed_tokens = seq.num_tokens  # where the model would run
            seq.token_ids.append(0)
            running[seq] -= 1
        moments.append(Moment(manager.report(), waiting[0][0]))
        for seq in [seq for seq, to_go in running.items() if to_go == 0]:
            manager.free(seq)
            del running[seq]
    return moments


def churn(manager: Manager, sequences: Iterator[Seq], frees: Iterable[float], seed: int) -> Iterator[bool]:
    """Allocate or free at random. Each entry of `frees` is an operation: the probability that it frees one of the
    holders, any of them alike; otherwise the next of `sequences` asks for room. Yields whether that was to be had.
    """
    rng = random.Random(seed)
    holders: list[Seq] = []
    for probability in frees:
        fits = True
        if holders and rng.random() < probability:
            manager.free(holders.pop(rng.randrange(len(holders))))
        else:
            seq = next(sequences)
            fits = manager.can_allocate(seq)
            if fits:
                manager.allocate(seq)
                holders.append(seq)
        yield fits


def shares(reports: list[Any]) -> dict[str, list[float]]:
    """What the pool was used for at each of `reports`, in shares that sum to 1. Holes: free, but not in the largest
    free piece.
    """
    return {
        "used": [report.used / report.num_slots for report in reports],
        "reserved, empty": [report.wasted / report.num_slots for report in reports],
        "holes": [1 - (report.held + report.largest_free) / report.num_slots for report in reports],
        "largest free piece": [report.largest_free / report.num_slots for report in reports],
    }


def external_fragmentation(report: Any) -> float:
    """1 - largest free piece / all free slots: 0 if the free slots are one piece, near 1 if they are crumbs."""
    free = report.num_slots - report.held
    return 1 - report.largest_free / free if free else 0.0
