"""BlockFiles: files of blocks, in a folder that several engines may share.

    kv_disk_dir/                          mode 0700, as is every folder in it
        lock                              locked by the process that writes; contains the total size of all blocks
        weights/6f0c...                   SHA-256 of a checkpoint, so that not every start reads all of the checkpoint
        <namespace>/                      blocks that the same engines can use: see namespace_of()
            3a/3a41...c7.kv               a block, mode 0600: a header of 40 bytes, then its keys and values

Each file is complete or absent, even after kill -9. A damaged file is deleted when it is read, and its block is lost.
"""

import errno
import hashlib
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import escape, iglob
from pathlib import Path
from struct import Struct

from torch import Tensor

from .. import __version__
from ..engine.prefix_cache import BlockHash
from ..llama import ModelConfig
from ..options.attention_backend import backend_of
from ..options.config import GIB, EngineConfig

# the header of a file: MAGIC, VERSION, hash and size of the block; then the CRC-32 of these and of the block
HEADER_START, CRC = Struct("<8sI16sQ"), Struct("<I")
MAGIC, VERSION = b"nanovllm", 1
SUFFIX, LOCK_FILE, NEW_FILE, WEIGHTS_FOLDER = ".kv", "lock", "new", "weights"
KEPT_SHARE = 0.95  # fraction of the size limit that is kept when old blocks are removed
SETTLED_SECONDS = 2.0  # a file that changed more recently could change again with the same times
PAGE_BYTES = 4096  # the unit in which a file system allocates space


class BlockFiles:
    """The files of one namespace. Any number of processes may write and remove them at the same time."""

    def __init__(self, root: Path, namespace: str, max_bytes: int) -> None:
        """Use the folder of a namespace. All namespaces of `root` together take at most `max_bytes`."""
        self.folder = root / namespace
        self.root, self._max_bytes = root, max_bytes
        self._used: dict[BlockHash, int] = {}  # last use in ns, to be written as the files' times

    def __contains__(self, block_hash: BlockHash) -> bool:
        return os.path.isfile(self._path(block_hash))

    def read(self, block_hash: BlockHash, into: memoryview) -> None:
        """Fill `into` with a block.

        Raise ValueError, and delete the file, if the file is damaged. Raise OSError if it cannot be read.
        """
        path, header, excess = self._path(block_hash), bytearray(HEADER_START.size + CRC.size), bytearray(1)
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # so that a pipe doesn't block the thread
        try:
            num_bytes = os.readv(file, [header, into, excess])
        finally:
            os.close(file)
        if num_bytes != len(header) + len(into) or header != header_of(block_hash, into):
            os.unlink(path)
            raise ValueError(f"{path} is damaged")

    def write(self, block_hash: BlockHash, data: memoryview) -> list[BlockHash]:
        """Write a block, which becomes the most recently used. Return the removed blocks of this namespace.

        If there is no room, the least recently used blocks of all namespaces are removed. Raise OSError, and leave no
        file, if the block cannot be written.
        """
        path, header, new_path = self._path(block_hash), header_of(block_hash, data), self.root / NEW_FILE
        num_bytes, removed = size_on_disk(len(header) + len(data)), list[BlockHash]()
        with self._locked() as lock:
            total = int.from_bytes(os.pread(lock, 8, 0), "little") + num_bytes
            if total > self._max_bytes:
                total, removed = self._remove_oldest(num_bytes)
                total += num_bytes
            os.pwrite(lock, total.to_bytes(8, "little"), 0)  # first, so a kill can only leave a size that is too large
            file = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                if os.writev(file, [header, data]) < len(header) + len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                try:
                    os.replace(new_path, path)
                except FileNotFoundError:
                    make_folders(self.folder, path.parent)
                    os.replace(new_path, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(new_path)
                raise
            finally:
                os.close(file)
        return removed

    def touch(self, hashes: list[BlockHash]) -> None:
        """Make these blocks the most recently used. The first one counts as used last, because later ones need it.

        Other processes see this after write_times().
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
        """Enforce the size limit: remove the least recently used blocks, and any file that a killed process left.

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
        """Ask the system to drop the files from its page cache, so that the next reads come from the disk."""
        for path in iglob(f"{escape(str(self.folder))}/*/*{SUFFIX}"):
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)

    def _remove_oldest(self, room: int) -> tuple[int, list[BlockHash]]:
        """Remove the least recently used blocks if `room` more bytes do not fit. The caller holds the lock.

        Return the number of bytes still in use, and the removed blocks of this namespace.
        """
        self.write_times()
        with suppress(FileNotFoundError):
            os.unlink(self.root / NEW_FILE)  # left by a killed process
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
            with suppress(OSError, ValueError):  # the path is a folder, or its name is not a hash
                os.unlink(path)
                total -= size
                if path.startswith(f"{self.folder}/"):
                    removed.append(bytes.fromhex(Path(path).stem))
        return total, removed

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock that processes share, and yield its file descriptor. A killed process releases it, too."""
        import fcntl  # not on Windows

        try:
            file = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            make_folders(self.root)
            file = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / (name + SUFFIX)


def make_folders(*folders: Path) -> None:
    """Create these folders, with access for only their owner. Outer folders must come first."""
    for folder in folders:
        os.makedirs(folder, mode=0o700, exist_ok=True)


def header_of(block_hash: BlockHash, data: memoryview) -> bytes:
    """Return the header of a block's file. Other blocks and damaged blocks have different headers."""
    start = HEADER_START.pack(MAGIC, VERSION, block_hash, len(data))
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
    """Open or create kv_disk_dir. Return the files that this engine can use. `blocks` is KVCache.blocks.

    Raise ValueError if the folder does not exist and cannot be created, if other users may write to it, or if
    kv_disk_size has no room for two blocks.
    """
    assert config.kv_disk_dir is not None
    root, max_bytes = Path(config.kv_disk_dir).expanduser(), int(config.kv_disk_size * GIB)
    if max_bytes < 2 * size_on_disk(blocks[0].nbytes + HEADER_START.size + CRC.size):
        raise ValueError(f"kv_disk_size must hold two blocks of {blocks[0].nbytes:,} bytes, got {max_bytes:,} bytes")
    try:
        make_folders(root)
    except OSError as error:
        raise ValueError(f"kv_disk_dir must be a folder, got {str(root)!r}: {error.strerror}") from None
    status = os.stat(root)  # other users could plant blocks that change the output
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ValueError(f"kv_disk_dir must be writable only by its owner (mode 0700), got {str(root)!r}")
    weights = "dummy" if config.load_format == "dummy" else weights_digest(Path(config.model), root)
    return BlockFiles(root, namespace_of(config, model, weights, blocks, rank, world_size), max_bytes)


def namespace_of(
    config: EngineConfig, model: ModelConfig, weights: str, blocks: Tensor, rank: int, world_size: int
) -> str:
    """Return the name of the folder for blocks that this engine can use.

    It is a hash of everything that the keys and values of a text depend on: `weights`, from weights_digest(), the
    model's config with hf_overrides, the type of the weights, quantization, the type and layout of a block, the
    backend's operations, this rank's share of the heads, and the version of the package.
    """
    backend = backend_of(config.attention_backend, config.enforce_eager, config.device_type == "cuda")
    numerics = config.torch_dtype(model.dtype), config.quantization, config.device_type, backend
    shape = replace(model, eos_token_ids=())  # end-of-text tokens don't affect keys and values
    facts = (VERSION, __version__, weights, shape, numerics, blocks.dtype, blocks.shape[1:], rank, world_size)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def weights_digest(folder: Path, root: Path) -> str:
    """Return the SHA-256 of all weights in a checkpoint's folder and of its config.json.

    Every byte is read, at about a second per gigabyte, so a changed checkpoint has a different digest. The digest is
    cached under `root`, and reused as long as the files' paths, inodes, sizes and times are the same. It is not cached
    if a file has changed within the last two seconds. A process cannot set the time of the last status change (ctime).
    """
    patterns = ("*.safetensors", "*.gguf", "*.index.json", "model.gguf.json", "config.json")
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    now = time.time_ns()
    stats = [(str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
             for path in paths for status in [path.stat()]]  # fmt: skip
    cache_file = root / WEIGHTS_FOLDER / hashlib.sha256(repr(stats).encode()).hexdigest()
    with suppress(OSError):
        return cache_file.read_text(encoding="ascii")
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    if all(now - changed > SETTLED_SECONDS * 1e9 for *_, changed in stats):
        with suppress(OSError):
            os.makedirs(cache_file.parent, mode=0o700, exist_ok=True)
            new_file = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
            new_file.touch(mode=0o600)
            new_file.write_text(digest.hexdigest(), encoding="ascii")
            new_file.replace(cache_file)
    return digest.hexdigest()
