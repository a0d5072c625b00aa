"""The gain of speculation: one engine serves the same requests with and without drafts, in turns."""

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ..backends.torch.backend import ends_of
from ..backends.torch.pooler import RowOutput
from ..backends.torch.sampler import SampledToken
from ..engine.executor import Executor, Pending, Scheduled
from ..engine.sequence import Sequence
from ..llm import LLM
from .bench_options import Speculation, whole_numbers
from .engine import Run, load_llm, serve
from .harness import ratio, take_turns
from .report import Report, machine, report_of, settings
from .workload import Task, check_lengths, random_tokens

BEGINNINGS = ("Once upon a time", "One day, Tom", "The little dog", "Lily and her mom")


class Served(NamedTuple):
    """A round of requests, with what became of its drafts."""

    run: Run
    num_drafted: int
    num_accepted: int


def speculation(engine: dict[str, Any], options: Speculation) -> Report:
    """Measure edits, and with a tokenizer stories too. Raise ValueError without speculative_config."""
    if engine["speculative_config"] is None:
        raise ValueError("this benchmark needs --speculative-config, got none")
    llm, measured = load_llm(engine), dict[str, Any]()
    for batch_size in whole_numbers("--batch-sizes", options.batch_sizes):
        edits = edit_tasks(llm.model_config.vocab_size, batch_size, options.output_len, options.edit_every)
        with forced_outputs(llm, [output for _, output in edits]):
            measured[f"{batch_size} edits"] = gain(llm, [task for task, _ in edits], options.rounds)
        if llm.tokenizer is not None:
            stories = story_tasks(llm, batch_size, options)
            measured[f"{batch_size} stories"] = gain(llm, stories, options.rounds)
            told = serve_with(llm, stories, drafts=False).run.tokens
            again = [repeated(task, output) for task, output in zip(stories, told, strict=True)]
            measured[f"{batch_size} stories again"] = gain(llm, again, options.rounds)
    return report_of("speculation", settings(options), machine(llm), measured, [])


def gain(llm: LLM, tasks: list[Task], num_rounds: int) -> dict[str, Any]:
    """Serve the tasks with and without drafts. Return the speeds, their ratio, and what became of the drafts."""
    check_lengths(tasks, llm.max_model_len)
    calls: dict[str, Callable[[], Served]] = {
        "with": partial(serve_with, llm, tasks, drafts=True), "without": partial(serve_with, llm, tasks, drafts=False)
    }  # fmt: skip
    rounds = take_turns(calls, num_rounds, title="speculation")
    speedup = ratio(rounds, "with", "without", lambda served: served.run.tokens_per_second)
    last, plain = rounds[-1]["with"], rounds[-1]["without"]
    return {
        "tokens_per_second_without": statistics.median(each["without"].run.tokens_per_second for each in rounds),
        "tokens_per_second": statistics.median(each["with"].run.tokens_per_second for each in rounds),
        "speedup": speedup._asdict(),
        "tokens_per_step": last.run.num_tokens / last.run.num_steps / len(tasks),
        "drafted": last.num_drafted,
        "accepted": last.num_accepted,
        "same_outputs": sum(a == b for a, b in zip(last.run.tokens, plain.run.tokens, strict=True)),
    }


def serve_with(llm: LLM, tasks: list[Task], drafts: bool) -> Served:
    """Serve the tasks once."""
    before, observer = llm.stats(), Arrivals(drafts)
    llm.llm_engine.observers.append(observer)
    try:
        run = serve(llm, tasks)
    finally:
        llm.llm_engine.observers.remove(observer)
    after = llm.stats()
    return Served(run, after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens)


class Arrivals:
    """An Observer that gives each request the same seed in each round, and takes its drafter away if it has no use."""

    def __init__(self, drafts: bool) -> None:
        self._drafts, self._count = drafts, 0

    def on_add(self, seq: Sequence) -> None:
        seq.seed = self._count = self._count + 1
        seq.drafter = seq.drafter if self._drafts else None


# ---- requests


def edit_tasks(vocab_size: int, count: int, length: int, edit_every: int) -> list[tuple[Task, list[int]]]:
    """Return prompts of random tokens, and as outputs the same tokens with changes."""
    rng, tasks = random.Random(0), []
    for _ in range(count):
        prompt = random_tokens(rng, vocab_size, length)
        output = [prompt[i] if (i + 1) % edit_every else rng.randrange(3, vocab_size) for i in range(length)]
        tasks.append((Task(prompt, length), output))
    return tasks


def story_tasks(llm: LLM, count: int, options: Speculation) -> list[Task]:
    """Return beginnings of stories."""
    beginnings = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(count)]
    prompts = [llm.get_tokenizer().encode(text) for text in beginnings]
    return [Task(prompt, options.output_len, temperature=options.temperature) for prompt in prompts]


def repeated(task: Task, output: list[int]) -> Task:
    """Return a task that begins the same story once more, after the whole of it."""
    return Task([*task.prompt, *output, *task.prompt], len(output))


# ---- outputs that are given


@contextmanager
def forced_outputs(llm: LLM, outputs: list[list[int]]) -> Iterator[None]:
    """Let requests have these outputs, in the order of their arrival and over again, whatever is sampled."""
    engine = llm.llm_engine
    forced = ForcedExecutor(engine.executor, outputs)
    engine.executor = forced
    engine.observers.append(forced)
    try:
        yield
    finally:
        engine.observers.remove(forced)
        engine.executor = forced.inner


class ForcedExecutor:
    """An Executor that computes each step with another one, and replaces the sampled tokens."""

    def __init__(self, inner: Executor, outputs: list[list[int]]) -> None:
        self.inner = inner
        self.num_steps = self.num_tokens = 0
        self._outputs, self._num_arrived = outputs, 0
        self._output_of: dict[Sequence, list[int]] = {}

    def on_add(self, seq: Sequence) -> None:
        """Give a new sequence its output."""
        self._output_of[seq] = self._outputs[self._num_arrived % len(self._outputs)]
        self._num_arrived += 1

    def on_finish(self, seq: Sequence) -> None:
        self._output_of.pop(seq, None)

    def launch(self, batch: list[Scheduled]) -> Pending:
        places = [
            (self._output_of[seq], end - seq.num_prompt_tokens)
            for end, (seq, _) in zip(ends_of(batch), batch, strict=True)
        ]
        return ForcedStep(
            self.inner.launch(batch), [output[at] if 0 <= at < len(output) else 0 for output, at in places]
        )

    def next_logits(self, batch: list[Scheduled]) -> Tensor:
        return self.inner.next_logits(batch)


class ForcedStep(NamedTuple):
    """A Pending with other tokens than the device's."""

    pending: Pending
    token_ids: list[int]

    def tokens(self) -> list[RowOutput | None]:
        rows = zip(self.pending.tokens(), self.token_ids, strict=True)
        return [row._replace(token_id=at) if isinstance(row, SampledToken) else row for row, at in rows]
