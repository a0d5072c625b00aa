"""The second tier: room on the host for blocks that leave the device, and the copies between the two.

    device   [0][1][2][3]          store: a cached block is evicted, its text stays on the host
    host     [0][1][2][3][4]..     load: a sequence begins with a text that only the host has

On CUDA the host's memory is pinned. A store is launched like a part of the step: it reads a block before anything that
is launched later can write to it. A load first waits for all that was launched before it; then it runs beside the
steps, on a stream of its own, or the next step would wait for it. An event says when it has arrived. Elsewhere a copy
is done when the call returns: the code is the same.
"""

import torch
from torch import Tensor

from .kv_cache import BlockCopy

MAX_DEFAULT_BYTES = 4 * 2**30  # most that the host's pool takes unasked: no other program can use pinned memory


class Load:
    """Blocks on their way from the host to the device.

    Until they arrive, nobody may write to either side, or read the device's.
    """

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
        if self._stream:
            device_blocks.record_stream(self._stream)  # if the pool is dropped, its memory waits for the loads

    def store(self, copy: BlockCopy) -> None:
        """From a block of the device to one of the host, in the order of the steps."""
        self.blocks[copy.target].copy_(self._device_blocks[copy.source], non_blocking=self._stream is not None)
        self.num_blocks_stored += 1

    def load(self, copies: list[BlockCopy]) -> Load:
        """From blocks of the host to blocks of the device: after all that was launched before, beside what comes."""
        if self._stream is None:
            return self._copy(copies)
        # The stores launched so far may still write to what it reads, or read from what it overwrites.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                return self._copy(copies)
        except Exception:
            self._stream.synchronize()  # the caller gives these blocks back: nothing may still move in them
            raise

    def _copy(self, copies: list[BlockCopy]) -> Load:
        for source, target in copies:
            self._device_blocks[target].copy_(self.blocks[source], non_blocking=self._stream is not None)
        self.num_blocks_loaded += len(copies)
        return Load(copies, self._stream.record_event() if self._stream else None)
