"""The gain of speculation: one engine serves the same requests with and without drafts, in turns."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from nanovllm.backends.torch.backend import end_positions
from nanovllm.bench.bench_options import whole_numbers
from nanovllm.bench.engine import Run, load_llm, serve
from nanovllm.bench.harness import ratio, take_turns
from nanovllm.bench.report import Report, machine, report_of, settings
from nanovllm.bench.workload import Task, check_lengths, random_tasks
from nanovllm.engine.executor import Executor, Pending, Scheduled
from nanovllm.engine.sequence import Sequence
from nanovllm.llm import LLM
from nanovllm.requests.tokens import NO_TOKEN, StepOutput
from stages.bench.options import Speculation

BEGINNINGS = ("Once upon a time", "One day, Tom", "The little dog", "Lily and her mom")


def speculation(engine: dict[str, Any], options: Speculation) -> Report:
    """Measure edits, and with a tokenizer stories too. Raise ValueError without speculative_config."""
    if engine["speculative_config"] is None:
        raise ValueError("this benchmark needs --speculative-config, got none")
    llm, measured, length = load_llm(engine), dict[str, Any](), options.output_len
    for batch_size in whole_numbers("--batch-sizes", options.batch_sizes):
        with edits_forced(llm, options.edit_every):
            edits = random_tasks(llm.model_config.vocab_size, batch_size, length, length)
            measured[f"{batch_size} edits"] = gain(llm, edits, options.rounds)
        if llm.tokenizer is None:
            continue
        beginnings = [llm.tokenizer.encode(BEGINNINGS[i % len(BEGINNINGS)]) for i in range(batch_size)]
        stories = [Task(beginning, length, temperature=options.temperature) for beginning in beginnings]
        measured[f"{batch_size} stories"] = gain(llm, stories, options.rounds)
        told = serve_with(llm, stories, drafts=False).run.tokens
        again = [Task(start + story + start, length) for start, story in zip(beginnings, told, strict=True)]
        measured[f"{batch_size} stories again"] = gain(llm, again, options.rounds)
    return report_of("speculation", settings(options), machine(llm), measured, [])


class Served(NamedTuple):
    """A round of requests, and what became of its drafts."""

    run: Run
    num_drafted: int
    num_accepted: int


def gain(llm: LLM, tasks: list[Task], num_rounds: int) -> dict[str, Any]:
    """Return the speeds with and without drafts, their ratio, and what became of the drafts."""
    check_lengths(tasks, llm.max_model_len)
    calls = {name: partial(serve_with, llm, tasks, drafts=name == "with") for name in ("with", "without")}
    rounds = take_turns(calls, num_rounds, title="speculation")
    last, plain = rounds[-1]["with"], rounds[-1]["without"]
    return {
        "tokens_per_second_without": median(each["without"].run.tokens_per_second for each in rounds),
        "tokens_per_second": median(each["with"].run.tokens_per_second for each in rounds),
        "speedup": ratio(rounds, "with", "without", lambda served: served.run.tokens_per_second)._asdict(),
        "tokens_per_step": last.run.num_tokens / last.run.num_steps / len(tasks),
        "drafted": last.num_drafted,
        "accepted": last.num_accepted,
        "same_outputs": sum(a == b for a, b in zip(last.run.tokens, plain.run.tokens, strict=True)),
    }


def serve_with(llm: LLM, tasks: list[Task], drafts: bool) -> Served:
    """Serve the tasks once, with the same seeds each time."""
    before, arrivals = llm.stats(), Arrivals(drafts)
    llm.llm_engine.observers.append(arrivals)
    try:
        run = serve(llm, tasks)
    finally:
        llm.llm_engine.observers.remove(arrivals)
    after = llm.stats()
    return Served(run, after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens)


class Arrivals:
    """An Observer that gives each new request a seed, and takes its drafter away if there are to be no drafts."""

    def __init__(self, drafts: bool) -> None:
        self._drafts, self._count = drafts, 0

    def on_add(self, seq: Sequence) -> None:
        seq.seed = self._count = self._count + 1
        seq.drafter = seq.drafter if self._drafts else None


@contextmanager
def edits_forced(llm: LLM, edit_every: int) -> Iterator[None]:
    """Let each output be its prompt, with a change every `edit_every` tokens, whatever the model says."""
    executor = llm.llm_engine.executor
    llm.llm_engine.executor = Editor(executor, edit_every)
    try:
        yield
    finally:
        llm.llm_engine.executor = executor


class Editor:
    """An Executor that computes each step with another one, and replaces the sampled tokens."""

    def __init__(self, inner: Executor, edit_every: int) -> None:
        self._inner, self._edit_every = inner, edit_every
        self.num_steps = self.num_tokens = 0

    def launch(self, batch: list[Scheduled], num_decodes: int = 0) -> Pending:
        rows = zip(batch, end_positions(batch), strict=True)
        token_ids = [self._edited(seq.prompt_token_ids, end - seq.num_prompt_tokens) for (seq, _), end in rows]
        return Edited(self._inner.launch(batch, num_decodes), token_ids)

    def next_logits(self, batch: list[Scheduled]) -> Tensor:
        return self._inner.next_logits(batch)

    def _edited(self, prompt: list[int], at: int) -> int:
        """Return the prompt's token, or for a change its counterpart from the end."""
        return prompt[at] if (at + 1) % self._edit_every else prompt[-1 - at]


class Edited(NamedTuple):
    """A Pending with other tokens than the device's."""

    pending: Pending
    token_ids: list[int]

    def tokens(self) -> StepOutput:
        output = self.pending.tokens()
        both = zip(output.token_ids, self.token_ids, strict=True)
        return output._replace(token_ids=[old if old == NO_TOKEN else new for old, new in both])
