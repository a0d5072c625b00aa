"""Tracer: an observer that records events. Watch: a tracer that a server turns on and off.

An engine calls tell() right after each change, so the tracer only reads the new state, such as block tables and
reference counts. For each sequence, the tracer remembers only how much of it has been recorded.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from .events import VERSION, Event, Sink, hide_texts

if TYPE_CHECKING:
    from ..engine.block_pool import BlockPool
    from ..engine.kv_cache import BlockCopy
    from ..engine.scheduler import SchedulerOutput
    from ..engine.sequence import Sequence
    from ..llm_engine import LLMEngine
    from ..tiers.host_tier import HostTier


@dataclass
class Recorded:
    """The part of a sequence that the trace already has."""

    name: str
    num_tokens: int
    num_computed_tokens: int = 0
    num_once_computed: int = 0  # before preemptions; computing these tokens again is a recompute
    is_beam: bool = False


class Tracer:
    """An observer that records the events of one engine, of the package or of any stage, from attach() to detach()."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # raised by the sink, which ends the trace
        self.step = 0
        self.recorded: dict[Sequence, Recorded] = {}  # sequences that have arrived and have not ended
        self._sink: Sink | None = None
        self._start = 0.0  # when the trace began
        self._began: float | None = None  # when the current step began
        self._num_beams = 0
        self._held_up: HeldUp | None = None  # this and the next four attributes are of the current step
        self._has_preempted = False
        self._copying: dict[int, str] = {}  # by block that a copy is about to fill, its holder's name
        self._forked: tuple[Sequence, Sequence] | None = None  # the last parent and child
        self._freed_next: list[int] = []  # loaded or lost blocks that the engine is about to free
        self._has_lost_blocks = False  # blocks were lost since the last step was scheduled

    def attach(self, llm: Any, sink: Sink, show_text: bool = True) -> None:
        """Send a snapshot of `llm`, an LLM or an LLMEngine, to `sink`, and then its events.

        The tracer joins the observers of the package's engine; a stage's LLM must have been built with it. Without
        `show_text`, no token is decoded, and hide_texts() removes everything else that reveals text. Raise ValueError
        if `llm` is not an engine, is being traced already, or cannot be traced now.
        """
        engine = getattr(llm, "llm_engine", llm)
        if not hasattr(engine, "kv_cache_manager"):
            raise ValueError(f"llm must be an LLM or an LLMEngine, got {type(llm).__name__}")
        observers = getattr(engine, "observers", ())
        if self._sink or any(isinstance(each, Tracer) for each in observers):
            raise ValueError("the engine is being traced already")
        self.engine, self.manager = engine, engine.kv_cache_manager
        self.scheduler = getattr(engine, "scheduler", None)  # not in stages 1 to 3
        self.pool: BlockPool | None = getattr(self.manager, "pool", None)  # not in stage 1, which has slots
        self.tier: HostTier | None = getattr(engine, "host_tier", None)  # from stage 7 on
        self.text = decoder(engine.tokenizer, show_text)
        self.error, self.step, self.recorded = None, 0, {}
        self._start, self._began, self._num_beams = time.perf_counter(), None, 0
        self._forget_step()
        snapshot = self._snapshot()
        self._sink = sink if show_text else hide_texts(sink)
        self._put({"kind": "snapshot", "step": 0, **snapshot})
        if observers:
            observers.append(self)

    def detach(self) -> None:
        """Stop recording. If a step is open, close it with an error."""
        if self._began is not None:
            self._close_step("the trace was closed in this step")
        self._sink = None
        if self in getattr(self.engine, "observers", ()):
            self.engine.observers.remove(self)

    def tell(self, kind: str, *details: Any) -> None:
        """Record an event of a stage. In the package, Observers calls the methods directly."""
        if self._sink and (method := getattr(self, f"on_{kind}", None)):
            method(*details)

    def name(self, seq: "Sequence") -> str:
        """Return the name of a sequence that has arrived and not ended."""
        return self.recorded[seq].name

    # A request, from arrival to end

    def on_add(self, seq: "Sequence") -> None:
        self._arrive(seq)
        for sample in carried_samples(seq):
            self._arrive(sample, carried_by=seq)

    def on_refuse(self, request_id: str, error: str) -> None:
        self._emit("refused", {"request": request_id, "why": error})

    def on_wait(self, seq: "Sequence", why: str, needed: int | None, free: int | None) -> None:
        """Keep the reason until the step is scheduled, since a later reason may replace it."""
        self._held_up = HeldUp(seq, why, needed, free, caller_name())

    def on_admit(self, seq: "Sequence", hits: "list[int | None] | tuple[()]" = ()) -> None:
        record, by = self._record_of(seq), caller_name()
        if self.pool is None:
            slots = getattr(seq, "slots")  # noqa: B009  # stage 1 has them instead of a block table
            self._emit("reserved", {"seq": record.name, "start": slots.start, "end": slots.stop}, by)
        else:
            hit_indexes = {index for index, block in enumerate(hits) if block is not None}
            for index, block in enumerate(seq.block_table):
                if index in hit_indexes:
                    was = "held" if self.pool.ref_counts[block] > 1 else "idle"
                    self._emit("hit", {"block": block, "seq": record.name, "index": index, "was": was}, by)
                else:
                    self._emit("taken", {"block": block, "seq": record.name, "index": index, "why": "admit"}, by)
        record.num_computed_tokens = seq.num_computed_tokens
        self._emit("admit", {"seq": record.name, "num_computed_tokens": seq.num_computed_tokens}, by)

    def on_fork(self, parent: "Sequence", child: "Sequence") -> None:
        if child not in self.recorded:
            self._num_beams += 1
            self._arrive(child, parent, f"{child.request_id}.beam{self._num_beams}")
        record, by = self.recorded[child], caller_name()
        self._compute(parent, self.recorded[parent], by)  # beam search doesn't report what its steps compute
        behind = self._forked[1] if self._forked and self._forked[0] is parent else parent
        names = {"seq": record.name, "from": self.name(parent)}
        self._emit("forked", {**names, "behind": self.name(behind)}, by)
        for index, block in enumerate(child.block_table):
            self._emit("shared", {"block": block, "index": index, **names, "why": "fork"}, by)
        record.num_computed_tokens = child.num_computed_tokens
        self._forked = parent, child

    def on_grow(self, seq: "Sequence", copy: "BlockCopy | None" = None) -> None:
        name, by = self.name(seq), caller_name()
        block, index = seq.block_table[-1], len(seq.block_table) - 1
        self._emit("taken", {"block": block, "seq": name, "index": index, "why": "copy" if copy else "grow"}, by)
        if copy:
            self._emit("given_back", {"block": copy.source, "seq": name, "why": "copy"}, by)
            self._copying[copy.target] = name

    def on_preempt(self, seq: "Sequence", makes_room_for: "Sequence | None") -> None:
        record = self.recorded[seq]
        record.num_once_computed = max(record.num_once_computed, record.num_computed_tokens)
        record.num_computed_tokens, self._has_preempted = 0, True
        room_for = self.name(makes_room_for) if makes_room_for else None
        # Without a request that needs room, a preemption between two steps is due to a reset of the prefix cache.
        why = "blocks" if room_for else "reset" if self._began is None else "step failed"
        if self._has_lost_blocks and why == "step failed":
            why = "lost"
        self._emit("preempt", {"seq": record.name, "for": room_for, "why": why})

    def on_free(self, seq: "Sequence", blocks: Any) -> None:
        """Record that `seq` gave back blocks: a list, or a range of slots in stage 1."""
        record, by = self.recorded[seq], caller_name()
        if self.pool is None:
            self._emit("released", {"seq": record.name, "start": blocks.start, "end": blocks.stop}, by)
        else:
            why = "end" if record.is_beam else {None: "preempt", "abort": "abort"}.get(seq.finish_reason, "end")
            self._give_back(record.name, blocks, why, by)
        if record.is_beam:  # its children go on, or the search is over
            self._end(seq, "beam")

    def _give_back(self, name: str, blocks: list[int], why: str, by: str) -> None:
        ref_counts = getattr(self.pool, "ref_counts", None)  # up to stage 4, a block has at most one holder
        for block in reversed(blocks):  # in the order of BlockPool.free_blocks()
            self._emit("given_back", {"block": block, "seq": name, "why": why}, by)
            if ref_counts is None or not ref_counts[block]:
                self._emit_free(block, by)

    def on_draft(self, seq: "Sequence") -> None:
        tokens = list(seq.draft_token_ids)
        texts = [self.text(token) for token in tokens]
        self._emit("draft_proposed", {"seq": self.name(seq), "tokens": tokens, "texts": texts})

    def on_verify(self, seq: "Sequence", num_drafted: int, num_accepted: int) -> None:
        self._emit("draft_accepted", {"seq": self.name(seq), "num_tokens": num_accepted})

    def on_trim(self, seq: "Sequence", blocks: list[int]) -> None:
        self._give_back(self.name(seq), blocks, "draft", caller_name())

    def on_abort(self, request_id: str) -> None:
        self._emit("abort", {"request": request_id})

    def on_finish(self, seq: "Sequence") -> None:
        if seq in self.recorded:
            self._end(seq, seq.finish_reason or "abort")
        if self._held_up and self._held_up.seq is seq:
            self._held_up = None  # keep nothing of a finished request

    # A step

    def on_begin(self) -> None:
        if self._began is not None:  # a stage doesn't report the end of a step that raised an error
            self._close_step("the step broke off")
        self.step += 1
        self._began = self.seconds

    def on_schedule(self, output: "SchedulerOutput") -> None:
        """Record why the first waiting sequence was not admitted."""
        self._has_lost_blocks = False
        held_up = self._held_up
        if self.scheduler is not None and self.scheduler.waiting:
            seq = next(iter(self.scheduler.waiting))
            if held_up is None or held_up.seq is not seq:  # the scheduler never considered it
                budget = self.engine.config.max_num_batched_tokens - sum(num_tokens for _, num_tokens in output.batch)
                held_up = HeldUp(seq, "budget", seq.num_uncomputed_tokens, budget, caller_name())
                if self._has_preempted:
                    held_up = HeldUp(seq, "preemption", None, None, caller_name())
        elif self.scheduler is not None:
            held_up = None
        if held_up is not None:
            needs = {"why": held_up.why, "needed": held_up.needed, "free": held_up.free}
            self._emit("held_up", {"seq": self.name(held_up.seq), **needs}, held_up.by)

    def on_raise(self, batch: "list[tuple[Sequence, int]]", error: Exception) -> None:
        self._emit("raised", {"sequences": [self.name(seq) for seq, _ in batch], "error": error_text(error)})

    def on_step(self, batch: "list[tuple[Sequence, int]]", updated: "list[Sequence]") -> None:
        """Record the computed and the new tokens. This is the hot path, with two events per sequence."""
        by, step, text = caller_name(), self.step, self.text
        for seq, _ in batch:
            record = self.recorded[seq]
            self._compute(seq, record, by)
            for position in range(record.num_tokens, seq.num_tokens):
                token = seq.token_ids[position]
                self._put(
                    {"kind": "token", "step": step, "seq": record.name, "token": token, "text": text(token),
                     "position": position, "by": by}
                )  # fmt: skip
            record.num_tokens = seq.num_tokens

    def _compute(self, seq: "Sequence", record: Recorded, by: str) -> None:
        start, end = record.num_computed_tokens, seq.num_computed_tokens
        if end > start:
            why = "decode" if start >= seq.num_prompt_tokens else "prefill"
            if start < record.num_once_computed:
                why = "recompute"
            record.num_computed_tokens = end
            chunk = {"seq": record.name, "start": start, "end": end, "why": why, "by": by}
            self._put({"kind": "chunk", "step": self.step, **chunk})

    def on_end(self, error: BaseException | None = None) -> None:
        if self._began is not None:
            self._close_step(None if error is None else error_text(error))
        elif error is not None:  # a beam search that got no blocks
            self._emit_pools()

    # Blocks of the two tiers

    def on_cache(self, block: int, block_hash: bytes) -> None:
        self._emit("cached", {"block": block, "hash": hash_text(block_hash)})

    def on_evict(self, block: int, block_hash: bytes, why: str) -> None:
        self._emit("evicted", {"block": block, "hash": hash_text(block_hash), "why": why})

    def on_copy(self, copies: "list[BlockCopy]") -> None:
        for copy in copies:
            self._emit("copied", {"from": copy.source, "to": copy.target, "seq": self._copying[copy.target]})

    def on_store(self, block: int, host_block: int, block_hash: bytes) -> None:
        self._emit("stored", {"from": block, "to": host_block, "hash": hash_text(block_hash)})

    def on_renew(self, host_block: int, block_hash: bytes) -> None:
        self._emit("renewed", {"to": host_block, "hash": hash_text(block_hash)})

    def on_host_evict(self, host_block: int, block_hash: bytes, why: str) -> None:
        self._emit("host_evicted", {"block": host_block, "hash": hash_text(block_hash), "why": why})

    def on_load(self, seq: "Sequence", copies: "list[BlockCopy]") -> None:
        name, by = self._record_of(seq).name, caller_name()
        for copy in copies:
            if self._is_on_host(copy):
                self._emit("loaded", {"from": copy.source, "to": copy.target, "seq": name}, by)
            else:
                block_hash = seq.block_hashes[seq.block_table.index(copy.target)]
                self._emit("disk_loaded", {"hash": hash_text(block_hash), "to": copy.target, "seq": name}, by)

    def on_arrive(self, copies: "list[BlockCopy]") -> None:
        """Record arrivals in the order in which host blocks are freed. Device blocks are freed after all arrivals."""
        assert self.pool is not None, "stage 1 has no blocks"
        by = caller_name()
        for copy in reversed(copies):
            if self._is_on_host(copy):
                self._emit("arrived", {"from": copy.source, "to": copy.target}, by)
            else:
                self._emit("disk_arrived", {"to": copy.target}, by)
        # With one holder, which is the load, a block is freed next.
        self._freed_next += [copy.target for copy in copies if self.pool.ref_counts[copy.target] == 1]

    def on_disk_store(self, block_hash: bytes) -> None:
        self._emit("disk_stored", {"hash": hash_text(block_hash)})

    def on_disk_drop(self, block_hash: bytes) -> None:
        self._emit("disk_dropped", {"hash": hash_text(block_hash)})

    def on_disk_evict(self, block_hash: bytes) -> None:
        self._emit("disk_evicted", {"hash": hash_text(block_hash)})

    def on_disk_bad(self, block_hash: bytes, error: Exception) -> None:
        self._emit("disk_bad", {"hash": hash_text(block_hash), "error": error_text(error)})

    def on_lose(self, blocks: list[int]) -> None:
        """Record lost blocks. The lost blocks that no sequence holds are freed next."""
        assert self.pool is not None, "stage 1 has no blocks"
        by = caller_name()
        for block in blocks:
            self._emit("lost", {"to": block}, by)
        self._freed_next += [block for block in blocks if self.pool.ref_counts[block] == 1]
        self._has_lost_blocks = True

    def _is_on_host(self, copy: "BlockCopy") -> bool:
        """Return whether a load is from the host. The disk's blocks are numbered after the host's."""
        return self.tier is None or copy.source < self.tier.pool.num_blocks

    # Writing an event

    @property
    def seconds(self) -> float:
        """The seconds since the trace began."""
        return round(time.perf_counter() - self._start, 6)

    def _emit(self, kind: str, fields: Event, by: str | None = None) -> None:
        self._put({"kind": kind, "step": self.step, **fields, "by": by or caller_name()})

    def _put(self, event: Event) -> None:
        if self._freed_next and event["kind"] not in ("arrived", "disk_arrived"):  # so the engine has freed them
            freed, self._freed_next = self._freed_next, []
            for block in reversed(freed):
                self._emit_free(block, "BlockManager.collect_loads")
        if self._sink is None or self.error:
            return
        try:
            self._sink(event)
        except Exception as error:
            self.error = error

    def _arrive(self, seq: "Sequence", carried_by: "Sequence | None" = None, beam_name: str | None = None) -> Recorded:
        is_beam = beam_name is not None
        self.recorded[seq] = record = Recorded(beam_name or name_of(seq), seq.num_tokens, is_beam=is_beam)
        carrier = self.name(carried_by) if carried_by else None
        self._emit("arrive", {**self._description(seq), "carried_by": carrier, "seconds": self.seconds})
        return record

    def _record_of(self, seq: "Sequence") -> Recorded:
        """Return the record of `seq`. A sequence that was never added is the root of a beam search."""
        return self.recorded.get(seq) or self._arrive(seq, beam_name=seq.request_id)

    def _description(self, seq: "Sequence") -> Event:
        tokens = list(seq.token_ids)
        texts = [self.text(token) for token in tokens]
        names = {"seq": self.name(seq), "request": seq.request_id}
        return {**names, "tokens": tokens, "texts": texts, "max_num_tokens": seq.max_num_tokens}

    def _end(self, seq: "Sequence", why: str) -> None:
        record = self.recorded.pop(seq)
        self._emit("end", {"seq": record.name, "why": why, "error": seq.error, "seconds": self.seconds})

    def _emit_free(self, block: int, by: str) -> None:
        """Record that a block without holders joins the free queue, and at which end."""
        is_cached = block in getattr(self.pool, "hashes", ())
        self._emit("idle" if is_cached else "free", {"block": block, "place": "back" if is_cached else "front"}, by)

    def _emit_pools(self) -> None:
        """Record both queues and both indexes, which a failed step may have partly changed."""
        pools = self._pools()
        queues = {name: pools[name] for name in ("free", "cached", "host_free", "host_cached")}
        self._put({"kind": "pools", "step": self.step, **queues})

    def _forget_step(self) -> None:
        self._held_up, self._has_preempted, self._copying = None, False, {}
        self._forked, self._freed_next = None, []

    def _close_step(self, error: str | None) -> None:
        if error is not None:
            self._emit_pools()
        began, self._began = self._began, None
        self._put({"kind": "step", "step": self.step, "began": began, "seconds": self.seconds, "error": error})
        self._forget_step()

    # The snapshot

    def _snapshot(self) -> Event:
        """Return the engine's options and its state, and start to track all its sequences."""
        manager, config = self.manager, self.engine.config
        unit = {"unit": "slots", "num_blocks": getattr(manager, "num_slots", 0), "block_size": 1}
        if self.pool is not None:
            unit = {"unit": "blocks", "num_blocks": manager.num_blocks, "block_size": manager.block_size}
        return {
            "version": VERSION,
            "stage": stage_of(manager),
            "pool": unit,
            "host": {"num_blocks": self.tier.pool.num_blocks} if self.tier else None,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": getattr(config, "max_num_batched_tokens", None),
            "state": {**self._queues(), **self._pools()},
        }

    def _queues(self) -> Event:
        if self.scheduler is None:
            if self.manager.report().held:
                raise ValueError("a stream() of this LLM is open: start the trace first")
            return {"sequences": [], "waiting": [], "running": []}
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        sequences = []
        for first in [*running, *waiting]:
            for seq, carrier in [(first, None), *((sample, first) for sample in carried_samples(first))]:
                self.recorded[seq] = Recorded(name_of(seq), seq.num_tokens, seq.num_computed_tokens)
                progress = {"num_computed_tokens": seq.num_computed_tokens, "block_table": list(seq.block_table)}
                sequences.append({**self._description(seq), "carried_by": carrier and self.name(carrier), **progress})
        names = {"waiting": [self.name(seq) for seq in waiting], "running": [self.name(seq) for seq in running]}
        return {"sequences": sequences, **names}

    def _pools(self) -> Event:
        state: Event = {"ref_counts": [], "free": [], "cached": {}}
        state |= {"host_ref_counts": [], "host_free": [], "host_cached": {}, "loading": {}}
        if self.pool is not None:
            state["free"] = free_blocks(self.pool)
            running = self.scheduler.running if self.scheduler is not None else []
            held = Counter(block for seq in running for block in seq.block_table)
            counted = [held[block] for block in range(self.pool.num_blocks)]
            state["ref_counts"] = list(getattr(self.pool, "ref_counts", counted))
            state["cached"] = json_index(getattr(self.pool, "hashes", {}))
        if self.tier:
            host = self.tier.pool
            state |= {"host_ref_counts": list(host.ref_counts), "host_free": list(host.free)}
            state["host_cached"] = json_index(host.hashes)
            state["loading"] = {str(copy.source): copy.target for load in self.tier.loads for copy in load.copies}
        if disk := getattr(self.engine, "disk_tier", None):
            state["disk_loading"] = disk.arriving()
        return state


class Watch:
    """A tracer of a server's engine, turned on while a page shows it. Call it in the engine's thread, between steps."""

    def __init__(self, engine: "LLMEngine") -> None:
        self._engine, self._tracer = engine, Tracer()
        self._is_on = False
        self._events: list[Event] = []

    def on(self, show_text: bool) -> None:
        """Start the trace, or start it again, with a snapshot as the first event."""
        self.off()
        self._tracer.attach(self._engine, lambda event: self._events.append(event), show_text)
        self._is_on = True

    def off(self) -> None:
        """Stop the trace. Events that have not been taken are lost."""
        if self._is_on:
            self._tracer.detach()
        self._is_on, self._events = False, []

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take(self) -> list[Event] | None:
        """Return the events since the last call, or None if there are none. Raise the error that ended the trace."""
        if self._tracer.error:
            raise self._tracer.error
        events, self._events = self._events, []
        return events or None


class HeldUp(NamedTuple):
    """The reason why the first waiting sequence is not admitted."""

    seq: "Sequence"
    why: str
    needed: int | None
    free: int | None
    by: str


def caller_name() -> str:
    """Return the qualified name of the function that called tell(), such as "Scheduler._preempt"."""
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_code.co_name != "tell":
        frame = frame.f_back
    while frame and frame.f_code.co_name == "tell":  # an observer may forward events
        frame = frame.f_back
    name = frame.f_code.co_qualname if frame else ""
    return name.partition(".<locals>")[0]  # for a lambda, name the function around it


def decoder(tokenizer: Any, show_text: bool) -> Callable[[int], str | None]:
    """Return a function from a token id to its text, which is "" without a tokenizer, or None if it is hidden."""
    if tokenizer is None or not show_text:
        text = "" if show_text else None
        return lambda token_id: text
    # Decoded after another token, a word keeps its leading space.
    anchor = getattr(tokenizer, "anchor", None) or tokenizer.encode("\n")
    skip = len(tokenizer.decode(anchor))
    return lru_cache(maxsize=None)(lambda token_id: tokenizer.decode([*anchor, token_id])[skip:])


def carried_samples(seq: "Sequence") -> "list[Sequence]":
    """Return the samples that wait for `seq` to compute their prompt. Stages before 5 have none."""
    return getattr(seq, "to_fork", [])


def name_of(seq: "Sequence") -> str:
    """Return the request's id, with the sample's index if n is above 1."""
    has_samples = getattr(seq.params, "n", 1) > 1
    return f"{seq.request_id}.{seq.sample_index}" if has_samples else seq.request_id


def stage_of(manager: object) -> str:
    """Return the name of the stage or package that the engine belongs to."""
    parts = type(manager).__module__.split(".")
    return next((part for part in parts if re.fullmatch(r"s\d+_\w+", part)), parts[0])


def free_blocks(pool: "BlockPool") -> list[int]:
    """Return the free blocks, starting with the next one to be taken. Stages 2 and 3 have a stack."""
    return pool.free[::-1] if isinstance(pool.free, list) else list(pool.free)


def json_index(hashes: dict[int, bytes]) -> dict[str, str]:
    r"""Return an index of hashes with strings as keys, as JSON requires.

    >>> json_index({3: b"\xab"})
    {'3': 'ab'}
    """
    return {str(block): hash_text(block_hash) for block, block_hash in hashes.items()}


def hash_text(block_hash: Any) -> str:
    """Return a hash as text: hex digits if it is bytes. An exercise may use any hashable value."""
    return block_hash.hex() if isinstance(block_hash, bytes) else repr(block_hash)


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error.

    >>> error_text(ValueError("no")), error_text(KeyboardInterrupt())
    ('ValueError: no', 'KeyboardInterrupt')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
