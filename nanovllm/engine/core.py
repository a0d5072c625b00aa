"""EngineCore: requests come and go at any time, and each step() computes some tokens of the unfinished ones.

A step is three calls: schedule (choose the sequences), launch (the model), update (append the new tokens). With
async_scheduling, a step is launched before the one before it is read, so that the device need not wait for the host:

    host      schedule 2, launch 2 | read 1, update 1, outputs | schedule 3, launch 3 | read 2, ...
    device    ... step 1 ................... | step 2 ............................... | step 3 ...

What happens to a step:

    schedule --> batch --> launch --> in flight: a batch and its Pending --> read --> update --> outputs
       |                                                                      |
       |                                        it raises: its sequences are launched and read one by one,
       |                                        and a sequence that raises again ends with finish_reason "error"
       '-- it raises, or a copy does: all sequences start over

When the failure of step n is read, step n + 1 may be in flight. Step n + 1 used keys and values that step n never
computed, so it is dropped, and its sequences are scheduled again. If an update raises, finished sequences are removed
immediately, and the next step returns their outputs.
"""

import threading
from collections import abc
from contextlib import suppress
from dataclasses import dataclass
from typing import overload
from zlib import crc32

from ..distributed.rank_group import RankError, RankGroup
from ..options.config import EngineConfig
from ..profiling import step_range
from ..progress import no_progress_due
from ..requests.outputs import RequestOutput
from ..requests.pooling_params import PoolingParams
from ..requests.prompts import Prompt
from ..requests.sampling_params import SamplingParams
from ..requests.tokens import PoolerOutput, RowError, RowOutput, SampledToken, StepOutput
from .block_manager import BlockManager, cdiv
from .executor import Executor, FinishedStep, InFlight, Kernels, Pending, Scheduled, must_read_first, with_drafts
from .input_processor import InputProcessor
from .interrupts import interrupts_held_back
from .kv_cache import KVCache
from .observer import Observers
from .scheduler import Scheduler, SchedulerOutput
from .sequence import Sequence, is_due, request_output


@dataclass(frozen=True)
class Parts:
    """The parts of an engine, which ../build.py makes from the options."""

    config: EngineConfig
    ranks: RankGroup  # the tensor-parallel processes; if there is only one, announce() and send() do nothing
    input_processor: InputProcessor
    kv_cache: KVCache
    executor: Executor
    kernels: Kernels
    kv_cache_manager: BlockManager
    scheduler: Scheduler
    observers: Observers


class EngineCore:
    """A scheduler, a pool and a model, and the requests that they serve.

    An engine belongs to the first thread that uses it, even if another thread built it. Ctrl-C takes effect only
    between steps.
    """

    def __init__(self, parts: Parts) -> None:
        self.config, self.ranks, self.observers = parts.config, parts.ranks, parts.observers
        self.input_processor, self.kv_cache = parts.input_processor, parts.kv_cache
        self.executor, self.kernels = parts.executor, parts.kernels
        self.kv_cache_manager, self.scheduler = parts.kv_cache_manager, parts.scheduler
        self.requests: dict[str, list[Sequence]] = {}  # the samples of each unfinished request
        self._thread: threading.Thread | None = None  # the first one to use the engine
        self._thread_lock = threading.Lock()
        self._is_async, self._is_speculative = parts.config.overlaps_steps, parts.config.speculation() is not None
        self._in_flight: InFlight | None = None  # launched in an earlier call of step()
        self._unreported: list[Sequence] = []  # ended in a step that failed: the next step returns their outputs

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request. Raise ValueError, and add nothing, if it can never be served or its id is in use."""
        if not self.requests:
            with no_progress_due():  # switching may take long, which must not look like a stuck engine
                self.kernels.switch_when_ready()
        if request_id in self.requests:
            raise ValueError(f"request_id must be unique, got {request_id!r}, which is in use")
        samples = self.input_processor.process(request_id, prompt, params, cache_salt)
        needed, num_blocks = cdiv(samples[0].num_tokens, self.config.block_size), self.kv_cache_manager.num_blocks
        if needed > num_blocks:
            raise ValueError(f"the prompt must fit the pool of {num_blocks} blocks, got one that needs {needed}")
        self.requests[request_id] = samples
        for seq in samples:
            seq.prompt = prompt_text if seq.prompt is None else seq.prompt
        # If there are more samples than can run together, they form groups. The first sample of each group computes the
        # prompt for its group.
        size = self.config.max_num_seqs
        for first, *others in (samples[start : start + size] for start in range(0, len(samples), size)):
            first.to_fork = others
            self.scheduler.add(first)

    @overload  # str must come first, since it is an iterable of str too
    def abort_request(  # type: ignore[overload-overlap]
        self, request_ids: str, internal: bool = False
    ) -> RequestOutput | None: ...

    @overload
    def abort_request(self, request_ids: abc.Iterable[str], internal: bool = False) -> list[RequestOutput]: ...

    @interrupts_held_back()
    def abort_request(
        self, request_ids: str | abc.Iterable[str], internal: bool = False
    ) -> RequestOutput | list[RequestOutput] | None:
        """End a request in any state, and return its last output, or None if the id is unknown.

        Given several ids, return the outputs of the known ones. `internal` has no effect: it is part of vLLM's
        interface.
        """
        self.check_thread()
        if isinstance(request_ids, str):
            self.ranks.announce(EngineCore.abort_request, request_ids)
            return self._abort(request_ids)
        request_ids = [*request_ids]
        self.ranks.announce(EngineCore.abort_request, request_ids)
        outputs = [self._abort(request_id) for request_id in request_ids]
        return [output for output in outputs if output is not None]

    def _abort(self, request_id: str) -> RequestOutput | None:
        samples = self.requests.get(request_id)
        if samples is None:
            return None
        self.observers.tell("abort", request_id)
        for seq in samples:
            if not seq.finished:
                seq.finish("abort")
                self.scheduler.remove(seq)
        self._unreported = [seq for seq in self._unreported if seq not in samples]
        [output] = self._outputs(samples)
        self._drop_wasted_step()
        return output

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    @interrupts_held_back()
    def step(self) -> list[RequestOutput]:
        """Compute some tokens. Return the outputs that are due: see is_due().

        With async_scheduling, launch a step and return the outputs of the step that the previous call launched.

        If no sequence can run, wait for blocks to arrive from the host or the disk. If Ctrl-C is pressed during the
        step, raise KeyboardInterrupt at the step's end, and lose its outputs.
        """
        self.check_thread()
        self.ranks.send(EngineCore.step)
        self.observers.tell("begin")
        try:
            with step_range("schedule"):
                # Each rank schedules for itself. All must choose the same tokens, and an error on one is raised on all.
                output = self.ranks.call_on_all(self._schedule, batch_checksum)
            with step_range("launch"):
                previous = self._in_flight
                self._in_flight = self._launch(output.batch, output.num_decodes) if output.batch else None
            can_wait = previous is None and self._in_flight is None  # only if nothing else can run
            self.kv_cache_manager.collect_loads(wait=can_wait)
            with step_range("update"):
                updated = [*self._unreported, *output.failed]
                if previous is not None:
                    updated += self._update(previous)
                if self._in_flight is not None and (not self._is_async or must_read_first(self._in_flight.batch)):
                    current, self._in_flight = self._in_flight, None  # it can't overlap the next step
                    updated += self._update(current)
                self._unreported = []
                outputs = self._outputs(updated)
            self._drop_wasted_step()
        except BaseException as error:
            self._remove_ended()
            self._drop_steps()
            ended = [samples for samples in self.requests.values() if all(seq.finished for seq in samples)]
            self._unreported = [seq for samples in ended for seq in samples]
            self.observers.tell("end", error)
            raise
        self.observers.tell("end", None)
        return outputs

    def _schedule(self) -> SchedulerOutput:
        """Schedule the step, and make its copies. If either fails, preempt all sequences, and raise the error.

        Otherwise a sequence might read a block that was never copied.
        """
        try:
            output = self.scheduler.schedule()
            if output.copies:
                self.kv_cache.copy_blocks(output.copies)
                self.observers.tell("copy", output.copies)
            return output
        except Exception:
            self.scheduler.preempt_all()
            raise

    def _launch(self, batch: list[Scheduled], num_decodes: int = 0) -> InFlight:
        """Start a step. If the launch raises, reading the step raises the same error."""
        rows = with_drafts(batch) if self._is_speculative else batch
        num_decodes = num_decodes if rows is batch else 0
        try:
            pending: Pending = self.executor.launch(rows, num_decodes)
        except Exception as error:
            pending = FinishedStep.failed(error)
        for seq, _ in batch[:num_decodes]:  # note_launched(), written out
            seq.num_output_placeholders += 1
            seq.num_in_flight_tokens += 1
        for seq, num_tokens in batch[num_decodes:]:
            seq.note_launched(num_tokens)
        return InFlight(batch, pending, num_decodes)

    def _read(self, step: InFlight) -> tuple[InFlight, StepOutput]:
        """Wait for a step. Return it with its tokens: a row for each sequence, and one more for each token of a draft.

        If the step raises, run its sequences one by one and without drafts, so that only the sequences at fault end
        with an error; return those that it still had. Drop the step that was launched after it, if there is one,
        because that step has read keys and values that were never computed.
        """
        try:
            return step, self.ranks.call_on_all(step.pending.tokens)
        except RankError:
            raise
        except Exception as error:
            # the other sequences were preempted or have ended since the launch
            batch = [scheduled for scheduled in step.batch if scheduled[0].num_in_flight_tokens]
            num_rows = len(with_drafts(step.batch))  # before the drafts are dropped
            self.observers.tell("raise", batch, error)
            for seq, _ in [*batch, *(self._in_flight.batch if self._in_flight is not None else [])]:
                seq.forget_launched()
                self.kv_cache_manager.trim(seq)
            self._in_flight = None
            if num_rows > 1:  # find the sequence at fault
                rows = [self._read(self._launch([scheduled]))[1].row(0) for scheduled in batch]
                return InFlight(batch, step.pending), StepOutput.of(rows)
            return InFlight(batch, step.pending), StepOutput.of([RowError(f"{type(error).__name__}: {error}")])

    def _update(self, step: InFlight) -> list[Sequence]:
        """Add the new tokens and embeddings, and remove the sequences that have ended.

        Return the sequences that may be in an output now: they got a token or an embedding, or have failed.
        """
        step, tokens = self._read(step)
        batch, updated, due = list[Scheduled](), list[Sequence](), list[Sequence]()
        num_decodes, block_size = step.num_decodes, self.config.block_size
        columns = zip(step.batch[:num_decodes], tokens.token_ids, tokens.logprobs, strict=False)
        for number, (item, token_id, logprob) in enumerate(columns):
            seq = item[0]
            if len(seq.token_ids) < seq.ready_until and token_id not in seq.stop_token_ids:  # almost always: it goes on
                seq.advance(token_id, logprob)
                if seq.num_computed_tokens % block_size == 0:
                    self.kv_cache_manager.cache_blocks(seq, 1)
                batch.append(item)
                updated.append(seq)
                if seq.is_streamed:
                    due.append(seq)
            elif not seq.finished:
                batch.append((seq, 1 + self._append(seq, 1, [tokens.row(number)])))
                updated.append(seq)
                due.append(seq)
        row = num_decodes
        for seq, num_tokens in step.batch[num_decodes:]:
            rows = [tokens.row(row + i) for i in range(1 + len(seq.draft_token_ids))]
            row += len(rows)
            if not seq.finished:
                batch.append((seq, num_tokens + self._append(seq, num_tokens, rows)))
                if rows[0] is not None:
                    updated.append(seq)
                    due.append(seq)
        self.observers.tell("step", batch, updated)
        for seq in [seq for seq in due if seq.finish_reason is not None]:
            for ended in [seq, *seq.to_fork]:
                self.scheduler.remove(ended)
        return due

    def _append(self, seq: Sequence, num_tokens: int, rows: list[RowOutput | None]) -> int:
        """Add the results of a step to a sequence. Return how many tokens of its draft were accepted."""
        num_drafted, num_accepted = len(seq.draft_token_ids), 0
        if isinstance(rows[0], RowError):
            for sample in [seq, *seq.to_fork]:
                sample.finish("error", rows[0].error)
        elif isinstance(rows[0], PoolerOutput):
            seq.add_embedding(rows[0].embedding)
        elif rows[0] is not None:  # before note_read(): if this raises, the step is computed again
            num_accepted = seq.append_tokens([token for token in rows if isinstance(token, SampledToken)])
        if seq.num_in_flight_tokens:  # else it failed, or was preempted after the launch
            seq.note_read(num_tokens, rows[0] is not None, num_accepted)
            self.kv_cache_manager.cache_blocks(seq, num_tokens + num_accepted)
        if num_drafted:
            self.observers.tell("verify", seq, num_drafted, num_accepted)
        if seq.drafter is not None:
            self.kv_cache_manager.trim(seq)
        return num_accepted

    def _remove_ended(self) -> None:
        """Remove the sequences that ended in a failed step, so that the next step does not run them again."""
        for seq in [seq for seq in self.scheduler.running if seq.finished]:
            for ended in [seq, *seq.to_fork]:
                with suppress(Exception):  # an observer may raise again; the first error is the one to report
                    self.scheduler.remove(ended)

    def _drop_steps(self) -> None:
        """Forget all launched steps after a failure. If a step was in flight, preempt all sequences."""
        for seq in self.scheduler.running:
            seq.forget_launched()
            self.kv_cache_manager.trim(seq)
        if self._in_flight is not None:  # sequences may hold blocks for tokens that will never be sampled
            self._in_flight = None
            self.scheduler.preempt_all()

    def _drop_wasted_step(self) -> None:
        """Forget the launched step, without reading it, if no requests are left."""
        if not self.requests:
            self._in_flight = None

    def _outputs(self, seqs: list[Sequence]) -> list[RequestOutput]:
        """Return the outputs that are due for the requests of `seqs`. Forget the requests that have finished.

        If the text of a finished request cannot be decoded, raise the error, but forget the request, too: otherwise
        every step would raise.
        """
        outputs = []
        for request_id in dict.fromkeys([seq.request_id for seq in seqs]):
            samples = self.requests[request_id]
            seq = samples[0]
            try:
                if seq.is_delta_stream and seq.finish_reason is None:
                    outputs.append(seq.next_delta())
                elif is_due(samples):
                    outputs.append(request_output(samples))
            except Exception:
                if all(seq.finished for seq in samples):
                    del self.requests[request_id]
                raise
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs

    @interrupts_held_back()
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache in all tiers, and return True. While a request runs, change nothing, and return False.

        With `reset_running_requests`, preempt all running requests first, so that they start over. This also removes
        the blocks in kv_disk_dir that belong to this model and these options, so other engines lose them.
        `reset_connector` has no effect: it is part of vLLM's interface.
        """
        self.check_thread()
        self.ranks.send(EngineCore.reset_prefix_cache, reset_running_requests)
        if reset_running_requests:
            self._in_flight = None  # its tokens are sampled again
            self.scheduler.preempt_all()
        return self.kv_cache_manager.reset_prefix_cache()

    def check_thread(self) -> None:
        """Let the engine belong to the first thread that calls this. Raise RuntimeError in any other thread."""
        current = threading.current_thread()
        with self._thread_lock:
            self._thread = self._thread or current
        if current is not self._thread:
            caller, owner = current.name, self._thread.name
            raise RuntimeError(
                f"the engine belongs to thread {owner!r}, but thread {caller!r} called it: "
                "use AsyncLLM to share an engine between threads"
            )


def batch_checksum(output: SchedulerOutput) -> int:
    """Return a checksum of the batch. If two ranks have different ones, they are about to compute different tokens."""
    rows = [(seq.request_id, seq.sample_index, seq.input_ids(num_tokens)) for seq, num_tokens in output.batch]
    return crc32(repr(rows).encode())
