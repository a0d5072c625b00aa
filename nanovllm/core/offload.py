"""The second tier: room on the host for blocks that leave the device, and the copies between the two.

    device   [0][1][2][3]          store: a cached block is evicted, its text stays on the host
    host     [0][1][2][3][4]..     load: a sequence begins with a text that only the host has

On CUDA the host's memory is pinned. A store is launched like a part of the step: it reads a block before anything that
is launched later can write to it. A load runs beside the steps, on a stream of its own, or it would wait behind every
store; an event says when it has arrived. Elsewhere a copy is done when the call returns: the code is the same.
"""

import torch
from torch import Tensor

from .kv_cache import BlockCopy

MAX_DEFAULT_BYTES = 4 * 2**30  # of a host's pool whose size nobody asked for: pinned memory is taken from all


class Load:
    """Blocks on their way from the host to the device. Until then neither may be written, nor the device's be read."""

    def __init__(self, copies: list[BlockCopy], event: "torch.cuda.Event | None") -> None:
        self.sources = [copy.source for copy in copies]  # blocks of the host
        self.targets = {copy.target for copy in copies}  # blocks of the device
        self._event = event

    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Until it has arrived."""
        if self._event:
            self._event.synchronize()


class HostKVCache:
    """Room for `num_blocks` blocks of the device's pool, allocated once. Raises ValueError if they do not fit.

    blocks   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], on the host
    """

    def __init__(self, device_blocks: Tensor, num_blocks: int) -> None:
        """device_blocks: KVCache.blocks"""
        is_cuda = device_blocks.device.type == "cuda"
        shape = (num_blocks, *device_blocks.shape[1:])
        try:
            self.blocks = torch.empty(shape, dtype=device_blocks.dtype, pin_memory=is_cuda)
        except RuntimeError:
            size = num_blocks * device_blocks[0].nbytes
            raise ValueError(f"the host has no room for {num_blocks:,} blocks, {size:,} bytes") from None
        self.num_blocks = num_blocks
        self.num_blocks_stored = self.num_blocks_loaded = 0  # since the start
        self._device_blocks = device_blocks
        self._stream = torch.cuda.Stream(device_blocks.device) if is_cuda else None

    def store(self, copy: BlockCopy) -> None:
        """From a block of the device to one of the host, in the order of the steps."""
        self.blocks[copy.target].copy_(self._device_blocks[copy.source], non_blocking=True)
        self.num_blocks_stored += 1

    def load(self, copies: list[BlockCopy]) -> Load:
        """From blocks of the host to blocks of the device: after all that was launched before, beside what comes."""
        if self._stream is None:
            return self._copy(copies)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            return self._copy(copies)

    def _copy(self, copies: list[BlockCopy]) -> Load:
        for source, target in copies:
            self._device_blocks[target].copy_(self.blocks[source], non_blocking=True)
        self.num_blocks_loaded += len(copies)
        return Load(copies, self._stream.record_event() if self._stream else None)
