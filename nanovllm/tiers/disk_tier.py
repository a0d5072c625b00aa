"""DiskTier: blocks that outlive the engine, in the files of block_files.py.

Blocks are written in the background: the engine copies a block to a free buffer, and one thread writes the buffers to
files. If no buffer is free, the block is dropped, so a step never waits. A few reader threads load blocks.
"""

import itertools
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from ..engine.kv_cache import BlockCopy
from ..engine.observer import Observer
from ..engine.prefix_cache import BlockHash
from ..log import logger
from .block_files import BlockFiles

QUEUE_BYTES = 64 * 2**20  # of buffers for blocks that wait to be written
NUM_READERS = 4  # reader threads
RETRY_SECONDS = 60.0  # how long no block is written after a failed write
TOUCH_SECONDS = 1.0  # between two updates of the files' times


@dataclass(eq=False)
class DiskLoad:
    """Blocks on their way from files (sources) to the device (targets)."""

    copies: list[BlockCopy]
    ready: "torch.cuda.Event | None"  # before this event, earlier steps may still read the targets
    began: float
    ended: float = 0.0  # when the latest read ended
    reads: list[Future[dict[int, Exception]]] = field(default_factory=list)  # each returns the lost sources' errors

    @property
    def targets(self) -> set[int]:
        return {copy.target for copy in self.copies}

    @property
    def is_done(self) -> bool:
        return all(read.done() for read in self.reads)

    @property
    def lost(self) -> dict[int, Exception]:
        """The lost sources, with their errors. Getting them waits until the reads have ended."""
        return {source: error for read in self.reads for source, error in read.result().items()}

    def has_arrived(self) -> bool:
        return self.is_done and not self.lost


class DiskTier:
    """A tier of blocks in files.

    A block gets a new number when it is held. Its file is not locked, so a held block can still be lost.
    """

    def __init__(
        self, device_blocks: Tensor, files: BlockFiles, save: str, first_block: int, observer: Observer
    ) -> None:
        """Start the threads. `save` is kv_disk_save, and the numbers of held blocks start at `first_block`."""
        self.num_blocks_stored = self.num_blocks_loaded = 0
        self.num_blocks_dropped = self.num_blocks_lost = self.num_blocks_evicted = 0
        self.loads: list[DiskLoad] = []
        self._last_ended = 0.0  # when the last load ended
        self.files = files
        self._save, self._observer = save, observer
        self._device_bytes = device_blocks.view(len(device_blocks), -1).view(torch.uint8)  # [num_blocks, block_bytes]
        is_cuda, block_bytes = device_blocks.is_cuda, device_blocks[0].nbytes
        self._stream = torch.cuda.Stream(device_blocks.device) if is_cuda else None
        if self._stream:
            device_blocks.record_stream(self._stream)  # keep the pool's memory until the loads are done
        num_buffers = max(QUEUE_BYTES // block_bytes, 2)
        self._buffers = torch.empty(num_buffers + NUM_READERS, block_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._free_buffers = deque(range(num_buffers))
        self._free_read_buffers = deque(range(num_buffers, num_buffers + NUM_READERS))
        self._numbers = itertools.count(first_block)
        self._held: dict[int, BlockHash] = {}
        self._known: set[BlockHash] = set()  # hashes of blocks that were found in files or written to files
        self._bad: set[BlockHash] = set()  # blocks whose files exist, but cannot be read
        self._dropped: set[BlockHash] = set()  # blocks that were not written, because no buffer was free
        self._waiting: set[BlockHash] = set()  # blocks in buffers, not written yet
        self._events: deque[tuple[str, BlockHash]] = deque()  # the writer's events, for the observer
        self._writes_after, self._touches_after, self._has_warned, self._is_off = 0.0, 0.0, False, False
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="kv-disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-disk-write")
        self._writer.submit(self._enforce_size)

    def __contains__(self, block_hash: BlockHash) -> bool:
        if block_hash in self._known:
            return True
        if self._is_off or block_hash in self._bad or block_hash not in self.files:
            return False
        self._known.add(block_hash)
        return True

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Write a computed block in the background if kv_disk_save is "all", or "prompt" and it belongs to a prompt."""
        if self._save == "all" or (self._save == "prompt" and is_prompt):
            self._write_in_background(block, block_hash)

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Write an evicted block in the background if kv_disk_save is "evicted", or if the block was dropped before."""
        if self._save == "evicted" or block_hash in self._dropped:
            self._write_in_background(block, block_hash)
            self._dropped.discard(block_hash)

    def _write_in_background(self, block: int, block_hash: BlockHash) -> None:
        """Copy a block to a free buffer, to be written. If no buffer is free, tell the observer "disk_drop".

        Do nothing if the block is already on disk or in a buffer, or if a write has failed recently.
        """
        if block_hash in self._waiting or time.monotonic() < self._writes_after or block_hash in self:
            return
        if not self._free_buffers:
            self._dropped.add(block_hash)
            self.num_blocks_dropped += 1
            self._observer.tell("disk_drop", block_hash)
            return
        buffer = self._free_buffers.popleft()
        self._buffers[buffer].copy_(self._device_bytes[block], non_blocking=self._stream is not None)
        copied = torch.cuda.current_stream(self._device_bytes.device).record_event() if self._stream else None
        self._waiting.add(block_hash)
        self._writer.submit(self._write, buffer, block_hash, copied)

    def _write(self, buffer: int, block_hash: BlockHash, copied: "torch.cuda.Event | None") -> None:
        """Write a buffer to a file, and free the buffer. The writer thread calls this."""
        try:
            if copied:
                copied.synchronize()
            if block_hash in self._waiting and time.monotonic() >= self._writes_after:
                removed = self.files.write(block_hash, self._buffers[buffer].numpy().data)
                self._forget(removed)
                self._bad.discard(block_hash)
                self._known.add(block_hash)
                self._events.append(("disk_store", block_hash))
        except FileNotFoundError:
            pass  # the folder was removed; the next write creates it again
        except OSError as error:
            if not (isinstance(error, IsADirectoryError) and error.filename2):  # else a folder has the file's name
                self._warn(error)
        finally:
            self._waiting.discard(block_hash)
            self._free_buffers.append(buffer)

    def _enforce_size(self) -> None:
        try:
            self._forget(self.files.remove_oldest())
        except OSError as error:
            self._warn(error)

    def _forget(self, removed: list[BlockHash]) -> None:
        self._known -= {*removed}
        self._events += (("disk_evict", block_hash) for block_hash in removed)

    def _warn(self, error: OSError) -> None:
        """Write nothing for RETRY_SECONDS, and log a warning the first time."""
        self._writes_after = time.monotonic() + RETRY_SECONDS
        if not self._has_warned:
            logger.warning("kv_disk_dir cannot be written, so no more blocks are saved for now: %s", error)
        self._has_warned = True

    def touch(self, hashes: list[BlockHash]) -> None:
        """Mark the blocks that are on disk, or soon will be, as the most recently used."""
        if used := [each for each in hashes if each in self._known or each in self._waiting]:
            self._writer.submit(self._touch, used)

    def _touch(self, hashes: list[BlockHash]) -> None:
        self.files.touch(hashes)
        if time.monotonic() >= self._touches_after:
            self._touches_after = time.monotonic() + TOUCH_SECONDS
            self.files.write_times()

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Give each of these blocks a new number, and return the numbers."""
        held = [next(self._numbers) for _ in hashes]
        self._held |= zip(held, hashes, strict=True)
        return held

    def release(self, held: list[int]) -> None:
        """Forget the numbers of held blocks."""
        for number in held:
            del self._held[number]

    def load(self, copies: list[BlockCopy]) -> None:
        """Start to read held blocks (sources) into blocks of the device (targets). collect() releases the sources."""
        ready = torch.cuda.current_stream(self._device_bytes.device).record_event() if self._stream else None
        parts = [copies[i::NUM_READERS] for i in range(min(NUM_READERS, len(copies)))]
        self.loads.append(load := DiskLoad(copies, ready, perf_counter()))
        load.reads = [self._submit(part, load) for part in parts]

    def _submit(self, copies: list[BlockCopy], load: DiskLoad) -> Future[dict[int, Exception]]:
        """Start a read in a reader thread. If the system cannot start a thread, the blocks count as lost."""
        try:
            return self._readers.submit(self._read, copies, load)
        except RuntimeError as error:
            read = Future[dict[int, Exception]]()
            read.set_result({copy.source: error for copy in copies})
            return read

    def _read(self, copies: list[BlockCopy], load: DiskLoad) -> dict[int, Exception]:
        """Read blocks, and return the lost sources, with their errors. A reader thread calls this."""
        lost: dict[int, Exception] = {}
        buffer = self._buffers[number := self._free_read_buffers.popleft()]
        for source, target in copies:
            block_hash, row = self._held[source], self._device_bytes[target]
            try:
                self.files.read(block_hash, (row if row.is_cpu else buffer).numpy().data)
                if self._stream and load.ready:
                    with torch.cuda.stream(self._stream):
                        self._stream.wait_event(load.ready)  # earlier steps may still read the target
                        row.copy_(buffer, non_blocking=True)
                    self._stream.synchronize()  # so that the buffer can be used again
                elif not row.is_cpu:
                    row.copy_(buffer)
            except (OSError, ValueError, RuntimeError) as error:
                lost[source] = error
                self._known.discard(block_hash)
                if not isinstance(error, FileNotFoundError) and block_hash in self.files:
                    self._bad.add(block_hash)
        self._free_read_buffers.append(number)
        load.ended = perf_counter()
        return lost

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True unless one of these device blocks is in a load that is unfinished or has lost a block."""
        return not self.loads or all(load.has_arrived() or load.targets.isdisjoint(blocks) for load in self.loads)

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Release the sources of finished loads, and return their targets: those that have arrived, and the lost ones.

        With `wait`, wait for all loads. Tell the observer "arrive" and, if known, "timed" for each load, "disk_bad" for
        each lost block, and the writer's events, "disk_store" and "disk_evict".
        """
        if wait:
            wait_for([read for load in self.loads for read in load.reads])
        all_arrived, all_lost = list[int](), list[int]()
        for load in [load for load in self.loads if load.is_done]:
            arrived = [copy for copy in load.copies if copy.source not in load.lost]
            for source, error in load.lost.items():
                self._observer.tell("disk_bad", self._held[source], error)
            # Loads may overlap, so this load is timed from its own start, or from the end of the previous load if that
            # is later. If this load ended before the previous one, its time is unknown.
            if not load.lost and load.ended > (since := max(load.began, self._last_ended)):
                self._observer.tell("timed", "disk", len(arrived), load.ended - since)
            self._last_ended = max(load.ended, self._last_ended)
            self.loads.remove(load)
            self.release([copy.source for copy in load.copies])
            all_arrived += [copy.target for copy in arrived]
            all_lost += [copy.target for copy in load.copies if copy.source in load.lost]
            self._observer.tell("arrive", arrived)
        self.num_blocks_loaded += len(all_arrived)
        self.num_blocks_lost += len(all_lost)
        while self._events:
            kind, block_hash = self._events.popleft()
            self.num_blocks_stored += kind == "disk_store"
            self.num_blocks_evicted += kind == "disk_evict"
            self._observer.tell(kind, block_hash)
        return all_arrived, all_lost

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return [copy.target for load in self.loads for copy in load.copies]

    def flush(self) -> None:
        """Wait until all blocks saved so far have been written, and update the times of used files."""
        self._writer.submit(self.files.write_times).result()

    def reset(self) -> None:
        """Remove the files of this model with these options, so other engines lose them, too. No block may be loading.

        If the files cannot be removed, ignore them from now on.
        """
        self._waiting.clear()  # so that the writer drops these blocks
        try:
            self._writer.submit(self.files.remove_all).result()
        except OSError as error:
            self._warn(error)
            self._is_off = True
        self._known.clear()
        self._dropped.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the loads hold their sources, and nothing else is held."""
        sources = sorted(copy.source for load in self.loads for copy in load.copies)
        assert sorted(self._held) == sources, f"blocks {sorted(self._held)} are held, {sources} are loading"
