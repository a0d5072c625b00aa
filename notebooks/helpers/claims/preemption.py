"""Which sequence is preempted: four choices compared (claim 32); and one threshold or two (8)."""

from collections.abc import Callable
from statistics import mean

from nanovllm import LLM
from notebooks.helpers import s4, size
from notebooks.helpers.claims.findings import Finding, finding
from stages.bench.models import STORYTELLER
from stages.bench.texts import attempt, block_manager, markdown_table
from stages.s4_continuous_batching.block_manager import BlockManager
from stages.s4_continuous_batching.config import EngineConfig
from stages.s4_continuous_batching.observer import Observer
from stages.s4_continuous_batching.scheduler import Scheduler, SchedulerOutput
from stages.s4_continuous_batching.sequence import Sequence

Order = Callable[[Sequence], int]
MODEL = str(STORYTELLER)

ORDERS: dict[str, Order] = {  # of the running sequences: the last one is preempted first
    "the newest (stage 4)": lambda seq: int(seq.request_id),
    "the oldest": lambda seq: -int(seq.request_id),
    "the one with most blocks": lambda seq: len(seq.block_table),
    "the one with least computed": lambda seq: -seq.num_computed_tokens,
}


def preempting(order: Order) -> type[Scheduler]:
    """Return stage 4's scheduler with another victim: it preempts the last one in `running`, in another order."""

    class Ordered(Scheduler):
        def schedule(self) -> SchedulerOutput:
            self.running.sort(key=order)
            return super().schedule()

    return Ordered


def compare(blocks: int, seeds: int) -> str:
    """Return a table of the same requests, all at once and more than the pool holds, for each choice of victim."""
    head, rows = "preempted, preemptions, of a request again, computed twice, steps, longest wait for a first token", []
    for name, order in ORDERS.items():
        runs = [s4.overloaded(MODEL, blocks, seed, preempting(order), watermark=0.0) for seed in range(seeds)]
        toll, wait = s4.mean_toll(runs), mean(max(s4.ttft(run)) for run in runs)
        counts = f"{toll.preemptions:.0f}", f"{toll.repeated:.0f}", f"{toll.computed_twice:.0%}"
        rows.append((name, *counts, f"{toll.steps:,.0f}", f"{wait:,.0f}"))
    return markdown_table(head.split(", "), rows)


# ---- one threshold, or two


class PreemptsAbove95(s4.WithoutPeak):
    """A manager in which no sequence grows while more than 95% of the blocks are held, except one that is alone.

    A watermark of 20% is the other threshold: a sequence is admitted if at most 80% are held then.
    """

    def can_append(self, seq: Sequence) -> bool:
        num_held = self.num_blocks - self.num_free_blocks
        is_alone = num_held == len(seq.block_table)
        return super().can_append(seq) and (num_held <= 0.95 * self.num_blocks or is_alone)


class NeverPreempts(Scheduler):
    """A scheduler in which a sequence that finds no free block waits until another one ends."""

    def __init__(self, config: EngineConfig, kv_cache_manager: BlockManager, observer: Observer) -> None:
        super().__init__(config, kv_cache_manager, observer)
        self.manager = kv_cache_manager

    def schedule(self) -> SchedulerOutput:
        """Leave sequences without a free block out of the step."""
        everyone, num_free = list(self.running), self.manager.num_free_blocks
        self.running = []
        for seq in everyone:
            is_full = seq.num_tokens > len(seq.block_table) * self.manager.block_size
            if not is_full or num_free > 0:
                self.running.append(seq)
            num_free -= is_full
        output = super().schedule()
        self.running = [*everyone, *(seq for seq in self.running if seq not in everyone)]
        return output


def finding_8() -> Finding:
    seeds = range(size(2, 1))
    tolls = [s4.mean_toll(s4.overloaded(MODEL, 512, seed, watermark=w) for seed in seeds) for w in (0.0, 0.01, 0.2)]
    tolls += [s4.mean_toll(s4.overloaded(MODEL, 512, s, manager=PreemptsAbove95, watermark=0.2) for s in seeds)]
    stuck = [s4.gets_stuck(lambda n=n: s4.overloaded(MODEL, n, 0, NeverPreempts)) for n in (512, 8206)]
    small, large = ("gets stuck" if is_stuck else "ends" for is_stuck in stuck)
    return finding(
        8,
        holds_as_worded=stuck[0] and block_manager.pressure_of(0) > 0.80,  # stuck without preemption
        reserved=block_manager.watermark(),
        pressure=block_manager.pressure_of(0),
        with_cached=block_manager.pressure_of(1500),
        small=small,
        large=large,
        for_100=tolls[1].for_100,
        for_100_large=s4.mean_toll([s4.overloaded(MODEL, 8206, 0)]).for_100,
        repeated=[toll.repeated for toll in tolls],
        steps=tolls[3].steps / tolls[2].steps,
        two="do what one watermark of 20% does" if tolls[3].repeated <= tolls[1].repeated else "do not help",
    )


def finding_32() -> Finding:
    llm = LLM(STORYTELLER, kv_cache_tokens=512, attention_backend="torch", offload_policy="load")
    error = attempt(lambda: llm.generate([[5]], priority=[1]))
    return finding(32, error != "no error", error=error)
