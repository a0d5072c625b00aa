"""Who is preempted: four choices compared. And when to let somebody in (claim 8)."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from notebooks.helpers import s4, size
from notebooks.helpers.claims.table import POINTER, Finding
from stages.bench.models import STORYTELLER
from stages.s4_continuous_batching.block_manager import cdiv
from stages.s4_continuous_batching.scheduler import Scheduler, SchedulerOutput
from stages.s4_continuous_batching.sequence import Sequence

Choice = Callable[[list[Sequence]], Sequence]

CHOICES: dict[str, Choice] = {
    "the latest to come (stage 4)": lambda running: running[-1],
    "the first to come": lambda running: running[0],
    "who holds most blocks": lambda running: max(running, key=lambda seq: len(seq.block_table)),
    "who has least computed": lambda running: min(running, key=lambda seq: seq.num_computed_tokens),
}


def preempting(choose: Choice) -> type[Scheduler]:
    """Stage 4's scheduler with another victim. One that was scheduled in this step is taken out of it again."""

    class Chooses(Scheduler):
        def _make_room(self, seq: Sequence, output: SchedulerOutput) -> bool:
            while not self._kv_cache_manager.can_append(seq):
                if self.running == [seq]:
                    self._fail(seq, output)
                    return False
                victim = choose(self.running)
                output.batch[:] = [pair for pair in output.batch if pair[0] is not victim]
                self._preempt(victim)
                if victim is seq:
                    return False
            return True

    return Chooses


class Toll(NamedTuple):
    preemptions: float
    repeated: float
    computed_twice: float
    steps: float
    last_wait: float  # steps to the first token, of the request that waits longest


def compare(blocks: int, seeds: int) -> dict[str, Toll]:
    """The same requests, more than the pool holds, all there at once, under each choice; no watermark."""
    found = {}
    for name, choose in CHOICES.items():
        runs = [
            s4.overloaded(str(STORYTELLER), blocks, seed, preempting(choose), watermark=0.0) for seed in range(seeds)
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


class Thresholds(Scheduler):
    """Preempt while more than 95% of the blocks are held; admit whoever leaves less than 80% held."""

    def held(self, more: int = 0) -> float:
        manager = self._kv_cache_manager
        return 1 - (manager.num_free_blocks - more) / manager.num_blocks

    def schedule(self) -> SchedulerOutput:
        while len(self.running) > 1 and self.held() > 0.95:
            self._preempt(self.running[-1])
        return super().schedule()

    def _may_admit(self, seq: Sequence) -> bool:
        if not self.running:
            return self._kv_cache_manager.can_allocate(seq)
        return self.held(cdiv(seq.num_tokens, 16)) < 0.80


class NeverPreempts(Scheduler):
    """Whoever finds no block waits until somebody ends."""

    def _make_room(self, seq: Sequence, output: SchedulerOutput) -> bool:
        return self._kv_cache_manager.can_append(seq)


def finding_8() -> Finding:
    model, seeds = str(STORYTELLER), range(size(2, 1))
    tolls = {w: s4.mean_toll(s4.overloaded(model, 512, seed, watermark=w) for seed in seeds) for w in (0.0, 0.01, 0.2)}
    both = s4.mean_toll(s4.overloaded(model, 512, seed, Thresholds) for seed in seeds)
    large = s4.mean_toll([s4.overloaded(model, 8206, 0)])
    stuck = {n: s4.gets_stuck(lambda n=n: s4.overloaded(model, n, 0, NeverPreempts)) for n in (512, 8206)}
    told = {n: "gets stuck" if is_stuck else "ends" for n, is_stuck in stuck.items()}
    return Finding(
        8,
        "a 1% watermark (82 of 8,206 blocks) avoids deadlock; preempt above 95%, admit below 80% avoids oscillation",
        (POINTER,),
        "stage 4's scheduler, more requests than the pool holds, counted; the same without preemption; two "
        "thresholds as a "
        "subclass",
        f"without preemption and with 1% a run in 512 blocks {told[512]}, in 8,206 {told[8206]}; with it none is "
        "stuck. "
        f"Preemptions for 100 requests at 1%: {tolls[0.01].for_100:.0f} and {large.for_100:.1f}. Repeated preemptions: "
        f"{tolls[0.0].repeated:.0f} (0%), {tolls[0.01].repeated:.0f} (1%), {tolls[0.2].repeated:.0f} (20%), "
        f"{both.repeated:.0f} (95% and 80%), in {both.steps / tolls[0.2].steps:.2f} times the steps of 20%",
        "preemption avoids deadlock, not the watermark; two thresholds do what one watermark of 20% does"
        if both.repeated <= tolls[0.01].repeated
        else "two thresholds do not help",
    )
