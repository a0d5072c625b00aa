"""HostPool: what it is made of, what it counts, and copies that run beside other work."""

import pytest
import torch

from ..kv_cache import KVCache
from ..offload import HostPool, Traffic, Transfer
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
    cache = filled(5, dtype)
    pool = HostPool(cache.blocks, 7)
    assert pool.blocks.shape == (7, *SHAPE) and pool.blocks.dtype == dtype
    assert pool.blocks.device.type == "cpu" and not pool.blocks.any()
    assert (pool.num_blocks, pool.num_device_blocks) == (7, 5)
    assert pool.bytes_per_block == 3 * 2 * 4 * 2 * 8 * dtype.itemsize == 4 * cache.bytes_per_token


def test_a_host_without_room_says_so():
    with pytest.raises(ValueError, match="the host has no room for 1,000,000,000,000,000 blocks"):
        HostPool(filled(1).blocks, 10**15)


def test_a_store_goes_from_the_device_and_a_load_to_it():
    """{to: from}: all layers of those blocks, and nothing else."""
    cache = filled(4)
    pool, device = HostPool(cache.blocks, 6), cache.blocks.clone()
    pool.store({5: 0, 2: 3}).wait()
    assert torch.equal(pool.blocks[5], device[0]) and torch.equal(pool.blocks[2], device[3])
    assert not pool.blocks[[0, 1, 3, 4]].any() and torch.equal(cache.blocks, device)
    pool.load({1: 5, 0: 2}).wait()
    assert torch.equal(cache.blocks, device[[3, 0, 2, 3]])


def test_traffic_is_counted_in_each_direction():
    pool = HostPool(filled(4).blocks, 6)
    assert pool.stored == pool.loaded == Traffic(num_blocks=0, num_bytes=0, seconds=0.0)
    pool.store({0: 0, 1: 1, 2: 2})
    pool.load({3: 1})
    pool.load({2: 0, 1: 1})
    assert (pool.stored.num_blocks, pool.stored.num_bytes) == (3, 3 * pool.bytes_per_block)
    assert (pool.loaded.num_blocks, pool.loaded.num_bytes) == (3, 3 * pool.bytes_per_block)
    pool.store({})
    assert pool.stored.num_blocks == 3
    assert pool.stored.seconds > 0 and pool.loaded.seconds > 0


def test_a_copy_that_fails_is_not_counted():
    pool = HostPool(filled(4).blocks, 6)
    with pytest.raises(IndexError):
        pool.store({0: 0, 6: 1})
    assert pool.stored.num_blocks == pool.stored.num_bytes == 0


def test_without_streams_a_transfer_is_done_at_once():
    pool = HostPool(filled(4).blocks, 6)
    transfer = pool.store({0: 0})
    assert transfer.is_done()
    transfer.wait()
    transfer.hold_back_compute()
    assert transfer.is_done()


class Event:
    """Like one of CUDA's, as far as a Transfer uses it."""

    def __init__(self, calls: list[str]) -> None:
        self.is_past, self.calls = False, calls

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.is_past = True

    def wait(self) -> None:
        self.calls.append("wait")

    def elapsed_time(self, end: "Event") -> float:
        return 250.0  # milliseconds


def test_a_transfer_is_done_when_its_last_event_is_past_and_its_time_counts_once():
    traffic, calls = Traffic(), []
    begin, end = Event(calls), Event(calls)
    transfer = Transfer(traffic, (begin, end))
    begin.is_past = True
    assert not transfer.is_done() and traffic.seconds == 0
    end.is_past = True
    assert transfer.is_done() and transfer.is_done()
    assert traffic.seconds == 0.25


def test_to_wait_holds_the_host_and_to_hold_back_compute_holds_only_the_device():
    calls: list[str] = []
    transfer = Transfer(Traffic(), (Event([]), Event(calls)))
    transfer.hold_back_compute()
    assert calls == ["wait"] and not transfer.is_done()
    transfer.wait()
    assert calls == ["wait", "synchronize"] and transfer.is_done()
    transfer.wait()
    transfer.hold_back_compute()
    assert calls == ["wait", "synchronize"]


# On a GPU


@gpu
@needs_cuda
def test_on_a_gpu_the_host_s_memory_is_pinned_and_stores_and_loads_have_their_streams():
    pool = HostPool(filled(4, device="cuda").blocks, 6)
    assert pool.blocks.is_pinned()
    current = torch.cuda.current_stream()
    assert len({*pool._streams, current}) == 3


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_bytes_come_back_while_a_matmul_runs(dtype):
    cache = KVCache(model_config(2, 3), 64, 4, dtype, torch.device("cuda"))
    cache.blocks.normal_()
    pool, device = HostPool(cache.blocks, 64), cache.blocks.clone()
    order = list(reversed(range(64)))
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        a = (a @ a).softmax(dim=-1)
    store = pool.store({host: block for host, block in enumerate(order)})
    for _ in range(20):
        a = (a @ a).softmax(dim=-1)
    store.wait()
    assert store.is_done()
    cache.blocks.fill_(float("nan"))
    load = pool.load({block: block for block in range(64)})
    for _ in range(20):
        a = (a @ a).softmax(dim=-1)
    load.wait()
    assert load.is_done() and torch.equal(cache.blocks, device[order])
    assert a.isfinite().all()
    assert pool.stored.seconds > 0 and pool.loaded.seconds > 0


@gpu
@needs_cuda
def test_on_a_gpu_a_store_sees_what_was_launched_before_it_and_holds_back_what_comes_after():
    cache = KVCache(model_config(2, 3), 512, 16, torch.float32, torch.device("cuda"))
    pool = HostPool(cache.blocks, 512)
    a = torch.randn(4096, 4096, device="cuda")
    for number in range(10):
        for _ in range(10):
            a = (a @ a).softmax(dim=-1)
        cache.blocks.fill_(number)
        transfer = pool.store({i: i for i in range(512)})
        transfer.hold_back_compute()
        cache.blocks.fill_(-1)
        transfer.wait()
        assert (pool.blocks == number).all()


@gpu
@needs_cuda
def test_on_a_gpu_a_load_waits_for_the_store_of_what_it_reads():
    cache = KVCache(model_config(2, 3), 512, 16, torch.float32, torch.device("cuda"))
    pool = HostPool(cache.blocks, 256)
    for number in range(1, 10):
        cache.blocks[:256].fill_(number)
        pool.store({i: i for i in range(256)})
        load = pool.load({256 + i: i for i in range(256)})
        load.hold_back_compute()
        assert (cache.blocks[256:] == number).all()
