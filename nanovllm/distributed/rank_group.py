"""RankGroup: the processes that share a model and run in lockstep.

    rank 0    the program's process     add_request, abort_request, step, ...  -- commands -->  rank 1, rank 2, ...
    rank r    a complete engine, with part of the weights, and of the keys and values of every block

Every rank makes the same calls in the same order, so its scheduler makes the same plan. The ranks must first agree on
any value that depends on a clock, free memory or a disk: minimum() is an all-reduce with MIN. There are two kinds of
connections: for tensors (NCCL on CUDA, Gloo on a CPU), and for agreements (Gloo), which survive a step that fails.

Under torchrun there are no commands, since every rank runs the same script, like vLLM's "external_launcher".
"""

import atexit
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .followers import Followers

Result = TypeVar("Result")
CONNECT = timedelta(seconds=60)
FOREVER = timedelta(days=365)  # no timeout: if a rank dies, its connections close
ERROR_BYTES = 1024  # of an error message that the ranks exchange
ENGINES = count()  # numbers a process's engines, as each uses a separate part of torchrun's store


class RankError(RuntimeError):
    """A fatal error: a rank died or diverged."""


class DisconnectedError(RuntimeError):
    """The error of a rank that waits for a tensor from a rank that has failed."""


class Connections(Protocol):
    """A torch process group. It is not registered with torch, because a script may have its own groups."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> dist.Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> dist.Work: ...
    def abort(self) -> None: ...


class Command(NamedTuple):
    """A call to an engine method, which all ranks make."""

    method: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RankGroup:
    """One rank's view of all ranks. By default there is only one rank, and methods return without communication."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        device_type: str = "",
        followers: Followers | None = None,
        inbox: Connection | None = None,
    ) -> None:
        """Connect to the other ranks through `store`, and wait for them.

        Rank 0 passes the `followers` that it has started. Each of them passes the `inbox` that receives its commands.
        """
        self.rank, self.world_size = rank, world_size
        self.local_rank = rank  # on this machine, which is also its GPU's number
        self.num_all_reduces = 0  # of tensors
        self._store, self._tensor_backend = store, "nccl" if device_type == "cuda" else "gloo"
        self._followers, self._inbox = followers, inbox
        self._outbox: list[bytes] = []  # pickled commands that have not been sent yet
        self._group_numbers = count()
        self._control: Connections | None = None
        self._tensors: Connections | None = None
        if world_size > 1:
            with self._close_on_error():
                self._control = self._open("gloo")
                self._tensors = self._open(self._tensor_backend)

    @classmethod
    def start(cls, world_size: int, device_type: str, follow: Callable[["RankGroup"], object]) -> Self:
        """Start the other ranks, in processes that call `follow` with their own group. Return rank 0's group.

        Raise RankError if one of them does not start.
        """
        followers = Followers(world_size)
        store = followers.store_path
        try:
            followers.run(
                [partial(cls.follow, rank, world_size, store, device_type, follow) for rank in range(1, world_size)]
            )
        except OSError as error:
            followers.end()
            raise RankError(str(error)) from None
        return cls(0, world_size, open_store(store, 0, world_size), device_type, followers)

    @classmethod
    def follow(
        cls,
        rank: int,
        world_size: int,
        store: str,
        device_type: str,
        follow: Callable[["RankGroup"], object],
        inbox: Connection,
    ) -> None:
        """Run a rank other than 0, in the process that start() has started."""
        follow(cls(rank, world_size, open_store(store, rank, world_size), device_type, inbox=inbox))

    @classmethod
    def join(cls, world_size: int, device_type: str) -> Self:
        """Return the group of torchrun's ranks. Raise ValueError unless there are `world_size` of them."""
        started = os.environ.get("WORLD_SIZE", "1")
        if started != str(world_size):
            raise ValueError(
                f"tensor_parallel_size must be {started}, the number of torchrun's ranks, got {world_size}"
            )
        store, rank, _ = next(iter(rendezvous("env://")))
        if not dist.is_initialized():  # so that scripts can call dist.get_rank()
            dist.init_process_group("gloo", store=PrefixStore("script", store), rank=rank, world_size=world_size)
            atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        ranks = cls(rank, world_size, PrefixStore(f"engine {next(ENGINES)}", store), device_type)
        ranks.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        atexit.register(ranks.close)  # gloo's threads abort the process if they outlive Python
        return ranks

    def check(self) -> None:
        """Raise RankError if a rank that this one has started has died."""
        if self._followers is not None and self._followers.has_died:
            with self._close_on_error():
                raise ChildProcessError

    def close(self) -> None:
        """Disconnect, and end the ranks that this one has started. Further calls have no effect."""
        for group in (self._control, self._tensors):
            if group is not None:
                group.abort()
        self._control = self._tensors = None
        if self._followers is not None:
            self._followers.end()

    # Commands

    def announce(self, method: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Queue this call for the other ranks, which make it before the next call that is sent."""
        if self._followers is not None:
            self._outbox.append(pickle.dumps(Command(method, args, kwargs), pickle.HIGHEST_PROTOCOL))

    def send(self, method: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Make the other ranks run the queued calls and this one now. Raise RankError if a rank has died."""
        if self._followers is not None:
            self.announce(method, *args, **kwargs)
            message, self._outbox = pickle.dumps(self._outbox), []
            with self._close_on_error():
                self._followers.send(message)

    def commands(self) -> Iterator[Command]:
        """Yield the commands from rank 0, until it ends."""
        assert self._inbox is not None, "rank 0 gets no commands"
        with suppress(EOFError, OSError):
            while message := self._inbox.recv_bytes():
                yield from map(pickle.loads, pickle.loads(message))

    # Agreements

    def minimum(self, values: list[int]) -> list[int]:
        """Return the elementwise minimum of all ranks' values. Raise RankError if a rank has died."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        with self._close_on_error():
            connected(self._control).allreduce([tensor], options_of(dist.ReduceOp.MIN)).wait()
        agreed: list[int] = tensor.tolist()
        return agreed

    def call_on_all(self, function: Callable[[], Result], checksum: Callable[[Result], int] | None = None) -> Result:
        """Call `function`, as every rank does, and return its result. If it raises on one rank, raise on all.

        The other ranks may be waiting for a tensor from the one that raises, so that one closes its tensor connections
        first, and then all reconnect. With `checksum`, which turns a result into a number, raise RankError if these
        numbers differ, or if only some ranks raise, because the ranks cannot go on.
        """
        if self.world_size == 1:
            return function()
        raised: BaseException | None = None
        try:
            result = function()
            plan = checksum(result) if checksum else 0
        except BaseException as error:
            raised, plan = error, -1
            self._close_tensors()
        is_fine, smallest, negative_largest = self.minimum([raised is None, plan, -plan])
        can_go_on = checksum is None or smallest == -negative_largest
        if is_fine and can_go_on:
            return result
        is_cause = raised is not None and not isinstance(raised, DisconnectedError)
        errors = self._exchange(f"{type(raised).__name__}: {raised}" if is_cause else "")
        reason = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
        if not can_go_on:
            self.close()
            raise RankError(reason or "the ranks were not given the same requests in the same order") from raised
        self._close_tensors()
        with self._close_on_error():
            self._tensors = self._open(self._tensor_backend)
        if raised is not None and is_cause:
            raise raised
        raise RuntimeError(reason)

    def _exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        mine = torch.frombuffer(bytearray(text.encode()[:ERROR_BYTES].ljust(ERROR_BYTES)), dtype=torch.uint8)
        rows = mine.new_empty(self.world_size, ERROR_BYTES)
        with self._close_on_error():
            connected(self._control).allgather([[*rows.unbind()]], [mine]).wait()
        return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows]

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """If a connection breaks, close all of them, and raise RankError with the reason."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            death = self._followers.death() if self._followers is not None else None
            self.close()
            raise RankError(death or f"another rank has ended: {error}") from None

    # Tensors

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor with its sum over the ranks."""
        if self.world_size > 1:
            with disconnection_errors():
                connected(self._tensors).allreduce([tensor], options_of(dist.ReduceOp.SUM)).wait()
            self.num_all_reduces += 1

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the columns of all ranks, [num_rows, world_size * num_columns] for [num_rows, num_columns]."""
        if self.world_size == 1:
            return tensor
        parts = tensor.new_empty(self.world_size, *tensor.shape)
        with disconnection_errors():
            connected(self._tensors).allgather([[*parts.unbind()]], [tensor.contiguous()]).wait()
        return parts.transpose(0, 1).flatten(1)

    def _close_tensors(self) -> None:
        if self._tensors is not None:
            self._tensors.abort()
        self._tensors = None

    def _open(self, backend: str) -> Connections:
        assert self._store is not None, "several ranks need a store"
        store = PrefixStore(f"{backend} {next(self._group_numbers)}", self._store)
        group: Any  # torch's stubs lack the methods
        if backend == "gloo":
            group = dist.ProcessGroupGloo(store, self.rank, self.world_size, CONNECT)
        else:
            group = dist.ProcessGroupNCCL(store, self.rank, self.world_size, dist.ProcessGroupNCCL.Options())
        connections: Connections = group
        return connections


def open_store(path: str, rank: int, world_size: int) -> Store:
    """Return the store that the ranks share through a file."""
    store: Store = next(iter(rendezvous(f"file://{path}", rank, world_size)))[0]
    return store


@contextmanager
def disconnection_errors() -> Iterator[None]:
    """Turn connection errors into DisconnectedError."""
    try:
        yield
    except RuntimeError as error:
        raise DisconnectedError(str(error)) from None


def connected(connections: Connections | None) -> Connections:
    """Return `connections` if they are open. Raise RuntimeError if the ranks have disconnected."""
    if connections is None:
        raise RuntimeError("the ranks are not connected")
    return connections


def options_of(operation: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    """Return the options of an all-reduce that never times out."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp(operation), FOREVER
    return options
