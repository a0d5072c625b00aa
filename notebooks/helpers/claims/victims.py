"""Who is preempted: four choices compared. And when to let somebody in (claim 8)."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from notebooks.helpers import s4, size
from notebooks.helpers.claims.table import POINTER, Finding
from stages.bench.models import STORYTELLER
from stages.s4_continuous_batching.block_manager import BlockManager
from stages.s4_continuous_batching.config import EngineConfig
from stages.s4_continuous_batching.observer import Observer
from stages.s4_continuous_batching.scheduler import Scheduler, SchedulerOutput
from stages.s4_continuous_batching.sequence import Sequence

Order = Callable[[Sequence], int]

ORDERS: dict[str, Order] = {  # of the running sequences: the last one is preempted first
    "the latest to come (stage 4)": lambda seq: int(seq.request_id),
    "the first to come": lambda seq: -int(seq.request_id),
    "who holds most blocks": lambda seq: len(seq.block_table),
    "who has least computed": lambda seq: -seq.num_computed_tokens,
}


def preempting(order: Order) -> type[Scheduler]:
    """Return stage 4's scheduler with another victim: it preempts the last in `running`, which is in another order."""

    class Ordered(Scheduler):
        def schedule(self) -> SchedulerOutput:
            self.running.sort(key=order)
            return super().schedule()

    return Ordered


class Toll(NamedTuple):
    preemptions: float
    repeated: float
    computed_twice: float
    steps: float
    last_wait: float  # steps to the first token, of the request that waits longest


def compare(blocks: int, seeds: int) -> dict[str, Toll]:
    """The same requests, more than the pool holds, all there at once, under each choice; no watermark."""
    found = {}
    for name, order in ORDERS.items():
        runs = [
            s4.overloaded(str(STORYTELLER), blocks, seed, preempting(order), watermark=0.0) for seed in range(seeds)
        ]
        toll = s4.mean_toll(runs)
        waits = statistics.mean(max(run.first_token_waits()) for run in runs)
        found[name] = Toll(toll.preemptions, toll.repeated, toll.computed_twice, toll.steps, waits)
    return found


def table(found: dict[str, Toll]) -> str:
    rows = "".join(
        f"| {name} | {t.preemptions:.0f} | {t.repeated:.0f} | {t.computed_twice:.0%} | {t.steps:,.0f} | "
        f"{t.last_wait:,.0f} |\n"
        for name, t in found.items()
    )
    return (
        "| who gives way | preemptions | of those, again | computed twice | steps | longest wait for a first token |\n"
        "|---|---|---|---|---|---|\n" + rows
    )


# ---- one threshold, or two


class PreemptsAbove95(s4.WithoutPeak):
    """No sequence grows while more than 95% of the blocks are held, so the scheduler preempts. One alone may grow.

    A watermark of 20% is the other threshold: it admits whoever leaves at most 80% held.
    """

    def can_append(self, seq: Sequence) -> bool:
        num_held = self.num_blocks - self.num_free_blocks
        is_alone = num_held == len(seq.block_table)
        return super().can_append(seq) and (num_held <= 0.95 * self.num_blocks or is_alone)


class NeverPreempts(Scheduler):
    """A sequence that finds no free block waits until another one ends."""

    def __init__(self, config: EngineConfig, kv_cache_manager: BlockManager, observer: Observer) -> None:
        super().__init__(config, kv_cache_manager, observer)
        self.manager = kv_cache_manager

    def schedule(self) -> SchedulerOutput:
        """Leave those out of the step for which there is no block."""
        everyone, num_free = list(self.running), self.manager.num_free_blocks
        self.running = []
        for seq in everyone:
            is_full = seq.num_tokens > len(seq.block_table) * self.manager.block_size
            if not is_full or num_free > 0:
                self.running.append(seq)
            num_free -= is_full
        output = super().schedule()
        admitted = [seq for seq in self.running if seq not in everyone]
        self.running = [*everyone, *admitted]
        return output


def finding_8() -> Finding:
    model, seeds = str(STORYTELLER), range(size(2, 1))
    tolls = {w: s4.mean_toll(s4.overloaded(model, 512, seed, watermark=w) for seed in seeds) for w in (0.0, 0.01, 0.2)}
    both = s4.mean_toll(s4.overloaded(model, 512, seed, manager=PreemptsAbove95, watermark=0.2) for seed in seeds)
    large = s4.mean_toll([s4.overloaded(model, 8206, 0)])
    stuck = {n: s4.gets_stuck(lambda n=n: s4.overloaded(model, n, 0, NeverPreempts)) for n in (512, 8206)}
    told = {n: "gets stuck" if is_stuck else "ends" for n, is_stuck in stuck.items()}
    return Finding(
        8,
        "a 1% watermark (82 of 8,206 blocks) avoids deadlock; preempt above 95%, admit below 80% avoids oscillation",
        (POINTER,),
        "stage 4's scheduler, more requests than the pool holds, counted; the same without preemption; two "
        "thresholds: a watermark of 20%, and a block manager that refuses to grow above 95%",
        f"without preemption and with 1% a run in 512 blocks {told[512]}, in 8,206 {told[8206]}; with it none is "
        "stuck. "
        f"Preemptions for 100 requests at 1%: {tolls[0.01].for_100:.0f} and {large.for_100:.1f}. Repeated preemptions: "
        f"{tolls[0.0].repeated:.0f} (0%), {tolls[0.01].repeated:.0f} (1%), {tolls[0.2].repeated:.0f} (20%), "
        f"{both.repeated:.0f} (95% and 80%), in {both.steps / tolls[0.2].steps:.2f} times the steps of 20%",
        "preemption avoids deadlock, not the watermark; two thresholds do what one watermark of 20% does"
        if both.repeated <= tolls[0.01].repeated
        else "two thresholds do not help",
    )
