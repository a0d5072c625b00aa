"""HostKVCache: what it is made of, what its copies move, and when a load has arrived."""

import pytest
import torch

from ...engine.kv_cache import BlockCopy, KVCache
from ...engine.offload import HostKVCache, Load
from .pool import make_cache, model_config

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = (3, 2, 4, 2, 8)  # of a block: num_layers, 2, block_size, num_kv_heads, head_dim


def filled(num_blocks: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> KVCache:
    """No two numbers of it are alike."""
    cache = make_cache(num_blocks, num_layers=3, dtype=dtype, device=device)
    numbers = torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(0))
    cache.blocks.copy_(numbers)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_has_blocks_like_the_device_s(dtype):
    host = HostKVCache(filled(5, dtype).blocks, 7)
    assert host.blocks.shape == (7, *SHAPE) and host.blocks.dtype == dtype
    assert host.blocks.device.type == "cpu" and host.num_blocks == 7
    assert (host.num_blocks_stored, host.num_blocks_loaded) == (0, 0)


def test_it_may_have_no_block():
    assert HostKVCache(filled(5).blocks, 0).blocks.shape == (0, *SHAPE)


def test_a_host_without_room_says_so_once_with_blocks_and_bytes():
    """A block has 3 layers x 2 x 4 slots x 2 heads x 8 numbers of 4 bytes."""
    error = "^the host has no room for 1,000,000,000,000,000 blocks, 1,536,000,000,000,000,000 bytes$"
    with pytest.raises(ValueError, match=error) as raised:
        HostKVCache(filled(1).blocks, 10**15)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


def test_a_store_moves_a_block_to_the_host_in_every_layer_and_nothing_else():
    cache = filled(4)
    host, device = HostKVCache(cache.blocks, 6), cache.blocks.clone()
    host.blocks.zero_()
    host.store(BlockCopy(source=0, target=5))
    host.store(BlockCopy(source=3, target=2))
    assert torch.equal(host.blocks[5], device[0]) and torch.equal(host.blocks[2], device[3])
    assert not host.blocks[[0, 1, 3, 4]].any() and torch.equal(cache.blocks, device)
    assert (host.num_blocks_stored, host.num_blocks_loaded) == (2, 0)


def test_a_load_moves_blocks_to_the_device_in_every_layer_and_nothing_else():
    cache = filled(4)
    host, device = HostKVCache(cache.blocks, 6), cache.blocks.clone()
    host.blocks.copy_(filled(6).blocks + 1)
    kept = host.blocks.clone()
    load = host.load([BlockCopy(source=5, target=1), BlockCopy(source=2, target=0)])
    assert (load.sources, load.targets) == ([5, 2], {0, 1})
    load.wait()
    assert torch.equal(cache.blocks, torch.stack([kept[2], kept[5], device[2], device[3]]))
    assert torch.equal(host.blocks, kept) and (host.num_blocks_stored, host.num_blocks_loaded) == (0, 2)


def test_a_copy_that_fails_is_not_counted():
    host = HostKVCache(filled(4).blocks, 6)
    with pytest.raises(IndexError):
        host.store(BlockCopy(source=0, target=6))
    with pytest.raises(IndexError):
        host.load([BlockCopy(source=0, target=1), BlockCopy(source=1, target=4)])
    assert (host.num_blocks_stored, host.num_blocks_loaded) == (0, 0)


def test_without_streams_a_load_has_arrived_when_the_call_returns():
    cache = filled(4)
    host = HostKVCache(cache.blocks, 6)
    host.blocks.fill_(3)
    load = host.load([BlockCopy(0, 1)])
    assert load.has_arrived() and (cache.blocks[1] == 3).all()
    load.wait()


class Event:
    """Like one of CUDA's, as far as a Load uses it."""

    def __init__(self) -> None:
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self.is_past = True


def test_a_load_has_arrived_when_its_event_is_past_or_somebody_has_waited():
    load, other = (Load([BlockCopy(0, 1)], Event()) for _ in range(2))
    assert not load.has_arrived()
    load._event.is_past = True
    assert load.has_arrived()
    assert not other.has_arrived()
    other.wait()
    assert other.has_arrived()


# On a GPU


def busy() -> None:
    """Some milliseconds of work for the stream that computes."""
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        a = (a @ a).softmax(dim=-1)


def large() -> tuple[KVCache, HostKVCache, list[BlockCopy]]:
    """Both pools have 64 blocks of 16 MiB: to load all of it takes 64 times as long as to store one."""
    cache = KVCache(model_config(8, 16, 64), 64, 256, torch.float32, torch.device("cuda"))
    cache.blocks.zero_()
    host = HostKVCache(cache.blocks, 64)
    host.blocks.fill_(1)
    return cache, host, [BlockCopy(i, i) for i in range(64)]


@gpu
@needs_cuda
def test_on_a_gpu_the_host_s_memory_is_pinned_and_loads_have_a_stream_of_their_own():
    host = HostKVCache(filled(4, device="cuda").blocks, 6)
    assert host.blocks.is_pinned() and host._stream != torch.cuda.current_stream()
    assert HostKVCache(filled(4, device="cuda").blocks, 0).num_blocks == 0


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_bytes_come_back_while_a_matmul_runs(dtype):
    cache = filled(64, dtype, "cuda")
    host, device = HostKVCache(cache.blocks, 64), cache.blocks.clone()
    order = list(reversed(range(64)))
    busy()
    for target, source in enumerate(order):
        host.store(BlockCopy(source, target))
    cache.blocks.fill_(float("nan"))  # launched after the stores: they do not see it
    load = host.load([BlockCopy(i, i) for i in range(64)])  # launched after the NaN: nor does it write over this
    busy()
    load.wait()
    assert load.has_arrived() and torch.equal(cache.blocks, device[order])


@gpu
@needs_cuda
def test_on_a_gpu_a_store_is_in_the_order_of_the_steps():
    cache = filled(256, device="cuda")
    host = HostKVCache(cache.blocks, 256)
    for number in range(10):
        busy()
        cache.blocks.fill_(number)
        for i in range(256):
            host.store(BlockCopy(i, i))
        cache.blocks.fill_(-1)
        torch.cuda.synchronize()
        assert (host.blocks == number).all()


@gpu
@needs_cuda
def test_on_a_gpu_a_load_waits_for_the_store_of_what_it_reads():
    cache = filled(512, device="cuda")
    host = HostKVCache(cache.blocks, 256)
    for number in range(1, 10):
        busy()
        cache.blocks[:256].fill_(number)
        for i in range(256):
            host.store(BlockCopy(i, i))
        host.load([BlockCopy(i, 256 + i) for i in range(256)]).wait()
        assert (cache.blocks[256:] == number).all()


@gpu
@needs_cuda
def test_on_a_gpu_neither_a_step_nor_a_store_waits_for_a_load():
    """A GiB is on its way; what is launched after it is over first."""
    cache, host, copies = large()
    host.load(copies[:1]).wait()
    torch.cuda.synchronize()
    load = host.load(copies[1:])
    host.store(BlockCopy(0, 0))
    _ = cache.blocks[0] * 2
    torch.cuda.current_stream().synchronize()
    assert not load.has_arrived(), "it was queued before what did not need it"
    load.wait()
    assert load.has_arrived() and (cache.blocks == 1).all()
