"""RankGroup: the processes that share a model and run in lockstep.

    rank 0    the program's process     add_request, abort_request, step, ...  -- commands -->  rank 1, rank 2, ...
    rank r    a complete engine, with part of the weights, and of the keys and values of every block

Every rank makes the same calls in the same order, so all schedulers make the same plan. The ranks must first agree on
any value that depends on a clock, free memory or a disk: minimum() gives every rank the smallest of their values. There
are two kinds of connections: for tensors (NCCL on CUDA, Gloo on a CPU), and for agreements (Gloo). Only the latter
survive a step that fails.

Under torchrun there are no commands, since every rank runs the same script, as with vLLM's "external_launcher".
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
CONNECT_TIMEOUT = timedelta(seconds=60)
FOREVER = timedelta(days=365)  # no timeout: if a rank dies, its connections close
ERROR_BYTES = 1024  # size of an error message that the ranks exchange
ENGINE_NUMBERS = count()  # one for each engine of this process, which uses a separate part of torchrun's store


class RankError(RuntimeError):
    """A fatal error: a rank died or diverged."""


class DisconnectedError(RuntimeError):
    """An error on a rank that cannot exchange a tensor, because another rank has failed."""


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

        `followers` are the processes that rank 0 has started; in those, `inbox` receives its commands. Under torchrun,
        both are None.
        """
        self.rank, self.world_size = rank, world_size
        self.local_rank = rank  # this rank's number on its machine, and the number of its GPU
        self.num_all_reduces = 0  # for tensors, not for agreements
        self.num_reconnections = 0  # after steps that failed
        self._store, self._tensor_backend = store, "nccl" if device_type == "cuda" else "gloo"
        self._followers, self._inbox = followers, inbox
        self._outbox: list[bytes] = []  # pickled commands that have not been sent yet
        self._connection_numbers = count()
        self._agreement_connections: Connections | None = None
        self._tensor_connections: Connections | None = None
        if world_size > 1:
            with self._close_on_error():
                self._agreement_connections = self._connect("gloo")
                self._tensor_connections = self._connect(self._tensor_backend)

    @classmethod
    def start(cls, world_size: int, device_type: str, run_rank: Callable[["RankGroup"], object]) -> Self:
        """Start the other ranks, in processes that call `run_rank` with their own group. Return rank 0's group.

        Raise RankError if a rank does not start.
        """
        followers = Followers(world_size)
        path = followers.store_path
        try:
            followers.run(
                [partial(cls.follow, rank, world_size, path, device_type, run_rank) for rank in range(1, world_size)]
            )
        except OSError as error:
            followers.end()
            raise RankError(str(error)) from None
        return cls(0, world_size, open_store(path, 0, world_size), device_type, followers)

    @classmethod
    def follow(
        cls,
        rank: int,
        world_size: int,
        store_path: str,
        device_type: str,
        run_rank: Callable[["RankGroup"], object],
        inbox: Connection,
    ) -> None:
        """Connect to the other ranks, and call `run_rank`. This is the job of each process that start() starts."""
        run_rank(cls(rank, world_size, open_store(store_path, rank, world_size), device_type, inbox=inbox))

    @classmethod
    def join(cls, world_size: int, device_type: str) -> Self:
        """Return this rank's group under torchrun. Raise ValueError unless torchrun has started `world_size` ranks."""
        num_started = os.environ.get("WORLD_SIZE", "1")
        if num_started != str(world_size):
            raise ValueError(
                f"tensor_parallel_size must be {num_started}, the number of torchrun's ranks, got {world_size}"
            )
        store, rank, _ = next(iter(rendezvous("env://")))
        if not dist.is_initialized():  # so that scripts can call dist.get_rank()
            dist.init_process_group("gloo", store=PrefixStore("script", store), rank=rank, world_size=world_size)
            atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        ranks = cls(rank, world_size, PrefixStore(f"engine {next(ENGINE_NUMBERS)}", store), device_type)
        ranks.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        atexit.register(ranks.close)  # gloo's threads abort the process if they outlive Python
        return ranks

    def check(self) -> None:
        """Raise RankError if one of the followers has died. Only rank 0 has followers."""
        if self._followers is not None and self._followers.any_died:
            with self._close_on_error():
                raise ChildProcessError

    def close(self) -> None:
        """Close all connections, and end the followers. A second call has no effect."""
        for connections in (self._agreement_connections, self._tensor_connections):
            if connections is not None:
                connections.abort()
        self._agreement_connections = self._tensor_connections = None
        if self._followers is not None:
            self._followers.end()

    # Commands, from rank 0 to its followers. Without followers, nothing is sent.

    def announce(self, method: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Queue a call for the other ranks, which make it just before the next call that send() sends."""
        if self._followers is not None:
            self._outbox.append(pickle.dumps(Command(method, args, kwargs), pickle.HIGHEST_PROTOCOL))

    def send(self, method: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Send the queued calls and this one, without waiting for results. Raise RankError if a rank has died."""
        if self._followers is not None:
            self.announce(method, *args, **kwargs)
            message, self._outbox = pickle.dumps(self._outbox), []
            with self._close_on_error():
                self._followers.send(message)

    def commands(self) -> Iterator[Command]:
        """Yield rank 0's commands, until it closes the group or dies."""
        assert self._inbox is not None, "only followers receive commands"
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
            connected(self._agreement_connections).allreduce([tensor], all_reduce_options(dist.ReduceOp.MIN)).wait()
        agreed: list[int] = tensor.tolist()
        return agreed

    def call_on_all(self, function: Callable[[], Result], checksum: Callable[[Result], int] | None = None) -> Result:
        """Call `function`, as every rank does, and return its result.

        If it raises on a rank, raise the same error there, and RuntimeError with its message on the other ranks. These
        may be waiting for a tensor from the rank that raises, so that rank closes its tensor connections, and then all
        ranks reconnect.

        With `checksum`, which turns a result into a number, close the group and raise RankError if the numbers differ
        or if only some ranks raise, because the ranks cannot go on.
        """
        if self.world_size == 1:
            return function()
        raised: BaseException | None = None
        try:
            result = function()
            digest = checksum(result) if checksum else 0
        except BaseException as error:
            raised, digest = error, -1
            self._close_tensor_connections()
        all_succeeded, smallest, negative_largest = self.minimum([raised is None, digest, -digest])
        can_go_on = checksum is None or smallest == -negative_largest
        if all_succeeded and can_go_on:
            return result
        is_cause = raised is not None and not isinstance(raised, DisconnectedError)
        errors = self._exchange(f"{type(raised).__name__}: {raised}" if is_cause else "")
        reason = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
        if not can_go_on:
            self.close()
            raise RankError(reason or "the ranks were not given the same requests in the same order") from raised
        self._close_tensor_connections()
        with self._close_on_error():
            self._tensor_connections = self._connect(self._tensor_backend)
        self.num_reconnections += 1
        if raised is not None and is_cause:
            raise raised
        raise RuntimeError(reason)

    def _exchange(self, text: str) -> list[str]:
        """Return the text of each rank, cut to ERROR_BYTES."""
        own_bytes = torch.frombuffer(bytearray(text.encode()[:ERROR_BYTES].ljust(ERROR_BYTES)), dtype=torch.uint8)
        all_bytes = own_bytes.new_empty(self.world_size, ERROR_BYTES)
        with self._close_on_error():
            connected(self._agreement_connections).allgather([[*all_bytes.unbind()]], [own_bytes]).wait()
        return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in all_bytes]

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """Turn a connection error in the `with` block into RankError, with the reason, and close the group."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            death = self._followers.death() if self._followers is not None else None
            self.close()
            raise RankError(death or f"another rank has ended: {error}") from None

    # Tensors

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the values of a tensor with their sums over the ranks."""
        if self.world_size > 1:
            with disconnection_errors():
                connected(self._tensor_connections).allreduce([tensor], all_reduce_options(dist.ReduceOp.SUM)).wait()
            self.num_all_reduces += 1

    def gather(self, tensor: Tensor, num_columns: int) -> Tensor:
        """Return all ranks' columns side by side, [num_rows, num_columns], without those at the end that only pad."""
        if self.world_size == 1:
            return tensor
        parts = tensor.new_empty(self.world_size, *tensor.shape)
        with disconnection_errors():
            connected(self._tensor_connections).allgather([[*parts.unbind()]], [tensor.contiguous()]).wait()
        return parts.transpose(0, 1).flatten(1)[:, :num_columns]

    def _close_tensor_connections(self) -> None:
        if self._tensor_connections is not None:
            self._tensor_connections.abort()
        self._tensor_connections = None

    def _connect(self, backend: str) -> Connections:
        assert self._store is not None, "several ranks need a store"
        store = PrefixStore(f"{backend} {next(self._connection_numbers)}", self._store)
        group: Any  # torch's stubs lack the methods
        if backend == "gloo":
            group = dist.ProcessGroupGloo(store, self.rank, self.world_size, CONNECT_TIMEOUT)
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
    """Turn the RuntimeError of a broken connection into DisconnectedError."""
    try:
        yield
    except RuntimeError as error:
        raise DisconnectedError(str(error)) from None


def connected(connections: Connections | None) -> Connections:
    """Return `connections` if they are open. Raise RuntimeError if the ranks have disconnected."""
    if connections is None:
        raise RuntimeError("the ranks are not connected")
    return connections


def all_reduce_options(operation: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    """Return the options of an all-reduce with this operation that never times out."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp(operation), FOREVER
    return options
