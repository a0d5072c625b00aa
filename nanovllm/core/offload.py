"""The host's pool, for blocks that leave the device, and the copies between the two.

    device   [0][1][2][3]        store: device -> host, before a block is used for something else
    host     [0][1][2][3][4]..   load: host -> device, before a sequence runs that needs it

On CUDA the copies run on streams of their own, beside the running step; the host's memory is pinned, or they could not.
An event says when a copy is done. Elsewhere a copy is done when the call returns: the code is the same.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Traffic:
    """Copies in one direction, since the start."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # that the copies took, be it beside other work


class Transfer:
    """Copies that were begun together."""

    def __init__(self, traffic: Traffic, events: "tuple[torch.cuda.Event, torch.cuda.Event] | None" = None) -> None:
        self._traffic, self._events = traffic, events

    def is_done(self) -> bool:
        if self._events and self._events[1].query():
            self._traffic.seconds += self._events[0].elapsed_time(self._events[1]) / 1000
            self._events = None
        return self._events is None

    def wait(self) -> None:
        """Until it is done."""
        if self._events:
            self._events[1].synchronize()

    def hold_back_compute(self) -> None:
        """What is launched from now on starts after it. Nobody waits here."""
        if self._events:
            self._events[1].wait()


class HostPool:
    """Room for `num_blocks` blocks of the device's pool, allocated once. Raises ValueError if they do not fit.

    blocks   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], on the host
    """

    def __init__(self, device_blocks: Tensor, num_blocks: int) -> None:
        """device_blocks: KVCache.blocks"""
        is_cuda = device_blocks.device.type == "cuda"
        shape = (num_blocks, *device_blocks.shape[1:])
        try:
            self.blocks = torch.zeros(shape, dtype=device_blocks.dtype, pin_memory=is_cuda)
        except RuntimeError:
            raise ValueError(f"the host has no room for {num_blocks:,} blocks") from None
        self.num_blocks, self.num_device_blocks = num_blocks, len(device_blocks)
        self.bytes_per_block = device_blocks[0].nbytes
        self.stored, self.loaded = Traffic(), Traffic()
        self._device_blocks = device_blocks
        self._streams = [torch.cuda.Stream(device_blocks.device) for _ in range(2)] if is_cuda else []  # stores, loads

    def store(self, copies: dict[int, int]) -> Transfer:
        """{host block: device block}: all layers of each. The device's must not be written before it is done."""
        return self._copy(self.blocks, self._device_blocks, copies, self.stored, 0)

    def load(self, copies: dict[int, int]) -> Transfer:
        """{device block: host block}. Neither may be written, nor the device's be read, before it is done."""
        return self._copy(self._device_blocks, self.blocks, copies, self.loaded, 1)

    def _copy(self, target: Tensor, source: Tensor, copies: dict[int, int], traffic: Traffic, stream: int) -> Transfer:
        started = time.perf_counter()
        if self._streams:
            transfer = self._copy_beside(target, source, copies, traffic, self._streams[stream])
        else:
            for to, origin in copies.items():
                target[to].copy_(source[origin])
            transfer = Transfer(traffic)
            traffic.seconds += time.perf_counter() - started
        traffic.num_blocks += len(copies)
        traffic.num_bytes += len(copies) * self.bytes_per_block
        return transfer

    def _copy_beside(
        self, target: Tensor, source: Tensor, copies: dict[int, int], traffic: Traffic, stream: "torch.cuda.Stream"
    ) -> Transfer:
        """After all that was launched before on any stream; whatever is launched later runs beside it."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        for other in self._streams:
            stream.wait_stream(other)
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        with torch.cuda.stream(stream):
            events[0].record()
            for to, origin in copies.items():
                target[to].copy_(source[origin], non_blocking=True)
            events[1].record()
        return Transfer(traffic, events)
