"""DiskTier: files of blocks that outlive the engine, in a folder that several engines may share.

    kv_disk_dir/                          mode 0700, as is every folder in it
        lock                              held by the process that writes; its content is the size of all blocks
        weights/6f0c...                   SHA-256 of a checkpoint, so that it is not read again at each start
        <namespace>/                      what must be equal for a hash to mean the same numbers: see namespace_of()
            3a/3a41...c7.kv               a block, mode 0600: a header of 40 bytes, then its keys and values

A block is written behind: the engine copies it to a free buffer, and one thread writes the buffers to files. If no
buffer is free, the block is dropped, so a step never waits. Each file is complete or absent, also after kill -9. Reads
run on a few threads of their own. A file that is not exactly what was written is deleted, and its block is lost.
"""

import errno
import hashlib
import itertools
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from glob import escape, iglob
from pathlib import Path
from struct import Struct
from time import perf_counter

import torch
from torch import Tensor

from .. import __version__
from ..backends.attention_backend import backend_of
from ..llama import ModelConfig
from ..log import logger
from .config import GIB, EngineConfig
from .kv_cache import BlockCopy
from .observer import Observer
from .prefix_cache import BlockHash

START, CRC = Struct("<8sI16sQ"), Struct("<I")  # MAGIC, VERSION, hash, bytes of the block; CRC-32 of these and the block
MAGIC, VERSION = b"nanovllm", 1
SUFFIX, LOCK, NEW_FILE, WEIGHTS = ".kv", "lock", "new", "weights"
QUEUE_BYTES = 64 * 2**20  # of blocks that wait to be written
NUM_READERS = 4  # threads
KEPT_SHARE = 0.95  # of the size limit, once it has been reached and old blocks are removed
RETRY_SECONDS = 60.0  # until the next write after one that failed
TOUCH_SECONDS = 1.0  # between two updates of the files' times
SETTLED_SECONDS = 2.0  # a file changed later than this could change again and look the same
PAGE_BYTES = 4096  # a file system's unit


class BlockFiles:
    """The files of one namespace. Any number of processes may write and remove them at the same time."""

    def __init__(self, root: Path, namespace: str, max_bytes: int) -> None:
        """Use the folder of a namespace. All namespaces of `root` together take at most `max_bytes`."""
        self.folder = root / namespace
        self.root, self._max_bytes = root, max_bytes
        self._used: dict[BlockHash, int] = {}  # last use in ns, to write to the files' times

    def __contains__(self, block_hash: BlockHash) -> bool:
        return os.path.isfile(self._path(block_hash))

    def read(self, block_hash: BlockHash, into: memoryview) -> None:
        """Fill `into` with a block.

        Raise ValueError, and delete the file, unless it is exactly what was written. Raise OSError if it cannot be
        read.
        """
        path, header, more = self._path(block_hash), bytearray(START.size + CRC.size), bytearray(1)
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe must not block the thread
        try:
            num_bytes = os.readv(file, [header, into, more])
        finally:
            os.close(file)
        if num_bytes != len(header) + len(into) or header != header_of(block_hash, into):
            os.unlink(path)
            raise ValueError(f"{path} is damaged")

    def write(self, block_hash: BlockHash, data: memoryview) -> list[BlockHash]:
        """Write a block, and make it the most recently used. Return the blocks of this namespace removed for it.

        Raise OSError, and leave no file, if it cannot be written.
        """
        path, header, new = self._path(block_hash), header_of(block_hash, data), self.root / NEW_FILE
        num_bytes, removed = size_on_disk(len(header) + len(data)), list[BlockHash]()
        with self._locked() as lock:
            total = int.from_bytes(os.pread(lock, 8, 0), "little") + num_bytes
            if total > self._max_bytes:
                total, removed = self._remove_oldest(num_bytes)
                total += num_bytes
            os.pwrite(lock, total.to_bytes(8, "little"), 0)  # first: if it is killed now, the size is too large
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                if os.writev(file, [header, data]) < len(header) + len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                try:
                    os.replace(new, path)
                except FileNotFoundError:
                    make_folders(self.folder, path.parent)
                    os.replace(new, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(new)
                raise
            finally:
                os.close(file)
        return removed

    def touch(self, hashes: list[BlockHash]) -> None:
        """Make these blocks the most recently used ones, the first one last: the others are of no use without it.

        write_times() tells the other processes.
        """
        now = time.time_ns()
        self._used |= {block_hash: now - place * 1000 for place, block_hash in enumerate(hashes)}

    def write_times(self) -> None:
        """Update the times of the files that were touched."""
        while self._used:
            block_hash, when = self._used.popitem()
            with suppress(OSError):
                os.utime(self._path(block_hash), ns=(when, when))

    def remove_oldest(self) -> list[BlockHash]:
        """Measure the size, and hold it: remove the least recently used blocks, and what a killed process has left.

        Return the removed blocks of this namespace.
        """
        with self._locked() as lock:
            total, removed = self._remove_oldest(0)
            os.pwrite(lock, total.to_bytes(8, "little"), 0)
        return removed

    def remove_all(self) -> None:
        """Remove all blocks of this namespace."""
        with self._locked() as lock:
            self._used.clear()
            for path in iglob(f"{escape(str(self.folder))}/*/*{SUFFIX}"):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            total, _ = self._remove_oldest(0)
            os.pwrite(lock, total.to_bytes(8, "little"), 0)

    def drop_page_cache(self) -> None:
        """Ask the system to keep no copies of the files in memory, so that the next reads come from the disk."""
        for path in iglob(f"{escape(str(self.folder))}/*/*{SUFFIX}"):
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)

    def _remove_oldest(self, room: int) -> tuple[int, list[BlockHash]]:
        """Make room under the lock. Return the bytes that remain, and the removed blocks of this namespace."""
        self.write_times()
        with suppress(FileNotFoundError):
            os.unlink(self.root / NEW_FILE)  # nobody writes it now
        files = []
        for path in iglob(f"{escape(str(self.root))}/*/*/*{SUFFIX}"):
            with suppress(FileNotFoundError):
                status = os.stat(path)
                files.append((status.st_mtime_ns, size_on_disk(status.st_size), path))
        total, removed = sum(size for _, size, _ in files), list[BlockHash]()
        if total + room <= self._max_bytes:
            return total, removed
        for _, size, path in sorted(files):
            if total + room <= KEPT_SHARE * self._max_bytes:
                break
            with suppress(OSError, ValueError):  # a folder, or a name that is no hash
                os.unlink(path)
                total -= size
                if path.startswith(f"{self.folder}/"):
                    removed.append(bytes.fromhex(Path(path).stem))
        return total, removed

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock that the processes share, and yield its file. The system releases it if a process is killed."""
        import fcntl  # not on Windows

        try:
            file = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            make_folders(self.root)
            file = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / (name + SUFFIX)


@dataclass(eq=False)
class DiskLoad:
    """Blocks on their way from files (sources) to the device (targets)."""

    copies: list[BlockCopy]
    ready: "torch.cuda.Event | None"  # earlier steps may still read the targets before
    began: float
    ended: float = 0.0  # the reads so far
    reads: list[Future[dict[int, Exception]]] = field(default_factory=list)  # each returns the sources that are lost

    @property
    def targets(self) -> set[int]:
        return {copy.target for copy in self.copies}

    @property
    def is_done(self) -> bool:
        return all(read.done() for read in self.reads)

    @property
    def lost(self) -> dict[int, Exception]:
        """The sources that are lost, and why. Wait for the reads."""
        return {source: error for read in self.reads for source, error in read.result().items()}

    def has_arrived(self) -> bool:
        return self.is_done and not self.lost


class DiskTier:
    """The blocks in the files, behind those in memory.

    A held block has a number of its own. The file is not locked, so the block may be lost even so.
    """

    def __init__(
        self, device_blocks: Tensor, files: BlockFiles, save: str, first_block: int, observer: Observer
    ) -> None:
        """Start the threads. `save` is kv_disk_save, and held blocks are numbered from `first_block` on."""
        self.num_blocks_stored = self.num_blocks_loaded = 0
        self.num_blocks_dropped = self.num_blocks_lost = self.num_blocks_evicted = 0
        self.loads: list[DiskLoad] = []
        self._last_ended = 0.0  # the last load
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
        self._known: set[BlockHash] = set()  # found in the files before
        self._bad: set[BlockHash] = set()  # unreadable, and perhaps impossible to delete
        self._dropped: set[BlockHash] = set()  # cached on the device, but no buffer was free
        self._waiting: set[BlockHash] = set()  # in buffers
        self._news: deque[tuple[str, BlockHash]] = deque()  # events of the writer
        self._writes_after, self._touches_after, self._has_warned, self._is_off = 0.0, 0.0, False, False
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="kv-disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-disk-write")
        self._writer.submit(self._hold_size)

    def __contains__(self, block_hash: BlockHash) -> bool:
        if block_hash in self._known:
            return True
        if self._is_off or block_hash in self._bad or block_hash not in self.files:
            return False
        self._known.add(block_hash)
        return True

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Write a computed block behind if kv_disk_save covers it: a prompt's, or all."""
        if self._save == "all" or (self._save == "prompt" and is_prompt):
            self._write_behind(block, block_hash)

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Write an evicted block behind if kv_disk_save says so, or if it was dropped when it was computed."""
        if self._save == "evicted" or block_hash in self._dropped:
            self._write_behind(block, block_hash)
            self._dropped.discard(block_hash)

    def _write_behind(self, block: int, block_hash: BlockHash) -> None:
        """Copy a block to a free buffer, and have it written. If there is none, tell the observer "disk_drop"."""
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
        """Write a buffer in the writer's thread, and free it."""
        try:
            if copied:
                copied.synchronize()
            if block_hash in self._waiting and time.monotonic() >= self._writes_after:
                removed = self.files.write(block_hash, self._buffers[buffer].numpy().data)
                self._forget(removed)
                self._bad.discard(block_hash)
                self._known.add(block_hash)
                self._news.append(("disk_store", block_hash))
        except FileNotFoundError:
            pass  # someone has removed the folder; the next write makes it again
        except OSError as error:
            if not (isinstance(error, IsADirectoryError) and error.filename2):  # in this file's place, by os.replace()
                self._warn(error)
        finally:
            self._waiting.discard(block_hash)
            self._free_buffers.append(buffer)

    def _hold_size(self) -> None:
        try:
            self._forget(self.files.remove_oldest())
        except OSError as error:
            self._warn(error)

    def _forget(self, removed: list[BlockHash]) -> None:
        self._known -= {*removed}
        self._news += (("disk_evict", block_hash) for block_hash in removed)

    def _warn(self, error: OSError) -> None:
        """Stop writing for a while, and warn the first time."""
        self._writes_after = time.monotonic() + RETRY_SECONDS
        if not self._has_warned:
            logger.warning("kv_disk_dir cannot be written, so no more blocks are saved for now: %s", error)
        self._has_warned = True

    def touch(self, hashes: list[BlockHash]) -> None:
        """Make those of the blocks that are on disk, or will be, the most recently used."""
        if used := [each for each in hashes if each in self._known or each in self._waiting]:
            self._writer.submit(self._touch, used)

    def _touch(self, hashes: list[BlockHash]) -> None:
        self.files.touch(hashes)
        if time.monotonic() >= self._touches_after:
            self._touches_after = time.monotonic() + TOUCH_SECONDS
            self.files.write_times()

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Return a number for each of these blocks."""
        held = [next(self._numbers) for _ in hashes]
        self._held |= zip(held, hashes, strict=True)
        return held

    def release(self, held: list[int]) -> None:
        """Forget the numbers."""
        for number in held:
            del self._held[number]

    def load(self, copies: list[BlockCopy]) -> None:
        """Start to read held blocks (sources) into blocks of the device (targets). collect() releases them."""
        ready = torch.cuda.current_stream(self._device_bytes.device).record_event() if self._stream else None
        parts = [copies[i::NUM_READERS] for i in range(min(NUM_READERS, len(copies)))]
        self.loads.append(load := DiskLoad(copies, ready, perf_counter()))
        load.reads = [self._submit(part, load) for part in parts]

    def _submit(self, copies: list[BlockCopy], load: DiskLoad) -> Future[dict[int, Exception]]:
        """Return a read in progress. If the system has no more threads, its blocks are lost."""
        try:
            return self._readers.submit(self._read, copies, load)
        except RuntimeError as error:
            read = Future[dict[int, Exception]]()
            read.set_result({copy.source: error for copy in copies})
            return read

    def _read(self, copies: list[BlockCopy], load: DiskLoad) -> dict[int, Exception]:
        """Read blocks in a reader's thread. Return the sources that are lost, and why."""
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
                    self._stream.synchronize()  # then the buffer can be used again
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
        """Return True if none of these device blocks is still on its way, or lost."""
        return not self.loads or all(load.has_arrived() or load.targets.isdisjoint(blocks) for load in self.loads)

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Release the sources of finished loads, and return their targets: those that have arrived, and the lost ones.

        With `wait`, wait for all loads. Tell the observer "arrive", "disk_bad" for each lost block, and what the writer
        has done: "disk_store" and "disk_evict".
        """
        if wait:
            wait_for([read for load in self.loads for read in load.reads])
        all_arrived, all_lost = list[int](), list[int]()
        for load in [load for load in self.loads if load.is_done]:
            arrived = [copy for copy in load.copies if copy.source not in load.lost]
            for source, error in load.lost.items():
                self._observer.tell("disk_bad", self._held[source], error)
            # Its reads began when those of the load before it had ended. If they ended first, nothing is known.
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
        while self._news:
            kind, block_hash = self._news.popleft()
            self.num_blocks_stored += kind == "disk_store"
            self.num_blocks_evicted += kind == "disk_evict"
            self._observer.tell(kind, block_hash)
        return all_arrived, all_lost

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return [copy.target for load in self.loads for copy in load.copies]

    def flush(self) -> None:
        """Wait until all blocks that were saved so far are in files."""
        self._writer.submit(self.files.write_times).result()

    def reset(self) -> None:
        """Remove this namespace's files, also for other processes. No block may be loading.

        If they cannot be removed, find none of them from now on.
        """
        self._waiting.clear()  # so the writer drops them
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


def make_folders(*folders: Path) -> None:
    """Create these folders, each in the one before it, for their owner alone."""
    for folder in folders:
        os.makedirs(folder, mode=0o700, exist_ok=True)


def header_of(block_hash: BlockHash, data: memoryview) -> bytes:
    """Return the beginning of a block's file, which fits no other block and no damaged one."""
    start = START.pack(MAGIC, VERSION, block_hash, len(data))
    return start + CRC.pack(zlib.crc32(data, zlib.crc32(start)))


def size_on_disk(num_bytes: int) -> int:
    """Return the size of a file in whole pages.

    >>> size_on_disk(1), size_on_disk(4096), size_on_disk(4097)
    (4096, 4096, 8192)
    """
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def open_files(
    config: EngineConfig, model: ModelConfig, blocks: Tensor, rank: int = 0, world_size: int = 1
) -> BlockFiles:
    """Open or create kv_disk_dir. Return the files of blocks that mean the same as those of `blocks` (KVCache.blocks).

    Raise ValueError if there is no such folder and none can be created, if others may write to it, or if kv_disk_size
    has no room for two blocks.
    """
    assert config.kv_disk_dir is not None
    root, max_bytes = Path(config.kv_disk_dir).expanduser(), int(config.kv_disk_size * GIB)
    if max_bytes < 2 * size_on_disk(blocks[0].nbytes + START.size + CRC.size):
        raise ValueError(f"kv_disk_size must hold two blocks of {blocks[0].nbytes:,} bytes, got {max_bytes:,} bytes")
    try:
        make_folders(root)
    except OSError as error:
        raise ValueError(f"kv_disk_dir must be a folder, got {str(root)!r}: {error.strerror}") from None
    status = os.stat(root)  # others could plant blocks, which would change answers
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ValueError(f"kv_disk_dir must be writable by its owner alone (mode 0700), got {str(root)!r}")
    weights = "dummy" if config.load_format == "dummy" else weights_digest(Path(config.model), root)
    return BlockFiles(root, namespace_of(config, model, weights, blocks, rank, world_size), max_bytes)


def namespace_of(
    config: EngineConfig, model: ModelConfig, weights: str, blocks: Tensor, rank: int, world_size: int
) -> str:
    """Return the name of the folder for blocks that mean the same as this engine's.

    It covers all that the keys and values of a text depend on: `weights`, from weights_digest(), the model's config
    with hf_overrides, the type of the weights, quantization, the type and layout of a block, the backend's operations,
    this rank's share of the heads, and the version of the package.
    """
    backend = backend_of(config.attention_backend, config.enforce_eager, config.device_type == "cuda")
    numerics = config.torch_dtype(model.dtype), config.quantization, config.device_type, backend
    shape = replace(model, eos_token_ids=())  # where a text ends changes none of it
    facts = (VERSION, __version__, weights, shape, numerics, blocks.dtype, blocks.shape[1:], rank, world_size)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def weights_digest(folder: Path, root: Path) -> str:
    """Return the SHA-256 of all weights in a checkpoint's folder and of its config.json.

    Each byte is read, about a second per gigabyte, so a changed checkpoint has another digest. It is remembered under
    `root` and used again as long as the files look untouched: the same paths, inodes, sizes and times of change, all of
    them older than two seconds when the digest was made. A process cannot set the time of change.
    """
    names = ("*.safetensors", "*.gguf", "*.index.json", "model.gguf.json", "config.json")
    paths = sorted(path for name in names for path in folder.glob(name) if path.is_file())
    now = time.time_ns()
    looks = [(str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
             for path in paths for status in [path.stat()]]  # fmt: skip
    note = root / WEIGHTS / hashlib.sha256(repr(looks).encode()).hexdigest()
    with suppress(OSError):
        return note.read_text(encoding="ascii")
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    if all(now - changed > SETTLED_SECONDS * 1e9 for *_, changed in looks):
        with suppress(OSError):
            os.makedirs(note.parent, mode=0o700, exist_ok=True)
            new = note.with_name(f"{note.name}.{os.getpid()}")
            new.touch(mode=0o600)
            new.write_text(digest.hexdigest(), encoding="ascii")
            new.replace(note)
    return digest.hexdigest()
