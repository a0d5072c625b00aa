"""Each small kernel against its plain twin, for random shapes, dtypes, block sizes and lengths; workers of a step."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")
from numba import njit

from ...backends.cpu import attention, dot, elementwise, matmul, quantized, team, vectors
from ...backends.cpu.layout import PLACES, SCORES, STRIDE, TILE, WIDTH, Pool, pack, type_of
from ...backends.cpu.threads import Helpers, Shared, end_all, run_helper
from ...backends.cpu.vectors import at, floats, get, integers, like_of, load, put, read, store, stored, write
from ..testing.processes import let_others_run
from . import plain

FULL = pytest.mark.full
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=FULL), pytest.param(torch.float16, marks=FULL)]
SIZES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 64, 100, 257]
ROUNDS = 60


@pytest.fixture
def rng() -> random.Random:
    torch.manual_seed(0)
    return random.Random(0)


def some_x(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return an x of the dtype that linear layers take."""
    return torch.randn(rows, size).to(type_of(dtype))


def guarded(*shape: int) -> Tensor:
    """Return float32 numbers with an extra row that must not be written."""
    return torch.full((shape[0] + 1, *shape[1:]), 7.0)


# Loads and stores


@njit
def convert(x, to, size, like_x, like):
    """Convert sixteen numbers at a time, and the rest one by one."""
    i = 0
    while i + WIDTH <= size:
        store(stored(to, like), i, load(stored(x, like_x), i))
        i += WIDTH
    while i < size:
        write(stored(to, like), i, read(stored(x, like_x), i))
        i += 1


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    convert(x.data_ptr(), out.data_ptr(), x.numel(), like_of(x.dtype), like_of(dtype))
    return out


def numbers_of_all_kinds(rng: random.Random) -> Tensor:
    """Return an odd count of float32 numbers: random bits, rounding ties, subnormal numbers, infinity and NaN."""
    bits = torch.tensor([rng.getrandbits(32) - 2**31 for _ in range(20_000)], dtype=torch.int64).to(torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000  # of bfloat16
    small = bits & (0x807FFFFF - 2**32)
    halves = (bits[:5000] & ~0x1FFF & 0x0FFFFFFF) | 0x38001000  # of float16, near 1
    tiny = torch.tensor([rng.uniform(-1, 1) * 2.0 ** rng.randint(-26, -13) for _ in range(5000)])
    steps = torch.tensor([(k + 0.5) * 2.0**-24 for k in range(-300, 300)])  # ties between subnormal numbers of float16
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.99, 65520.0, -65520.0, 3.4e38])
    return torch.cat((torch.cat((bits, ties, small, halves)).view(torch.float32), tiny, steps, ends))


def equal_bits(a: Tensor, b: Tensor) -> bool:
    of_bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    same = a.view(of_bits) == b.view(of_bits)
    return bool((same | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_stores_round_as_torch_does_and_loads_are_exact(dtype, rng):
    x = numbers_of_all_kinds(rng)
    assert x.numel() % WIDTH, "some numbers must be converted one by one"
    for start in (0, 1):  # move the numbers to other lanes
        part = x[start:] if start else x
        assert equal_bits(converted(part, dtype), part.to(dtype))
        assert equal_bits(converted(part.to(dtype), torch.float32), part.to(dtype).float())
    tail = x[-WIDTH + 1 :]
    assert equal_bits(converted(tail, dtype), tail.to(dtype))


# Dot products, linear layers, norms, rotation


@njit
def call_dot_rows(row, x, size, rows, out, stride, like, like_x):
    dot.dot_rows(stored(row, like), stored(x, like_x), size, rows, np.float32(0), floats(out), stride, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dot_rows(dtype, rng):
    for _ in range(ROUNDS):
        size, rows, stride = rng.choice(SIZES), rng.randint(1, 4), rng.randint(1, 5)
        row, x, out = torch.randn(size).to(dtype), some_x(rows, size, dtype), guarded(rows, stride)
        likes = like_of(dtype), like_of(x.dtype)
        call_dot_rows(row.data_ptr(), x.data_ptr(), size, rows, out.data_ptr(), stride, *likes)
        torch.testing.assert_close(out[:rows, 0], plain.dot_rows(row, x.float()), rtol=1e-5, atol=1e-4)
        assert (out[:, 1:] == 7).all() and (out[rows] == 7).all(), "only out[m * stride] may be written"
        for m in range(rows):
            alone = guarded(1, stride)
            call_dot_rows(row.data_ptr(), x[m].data_ptr(), size, 1, alone.data_ptr(), stride, *likes)
            assert alone[0, 0] == out[m, 0], "a row has the same bits alone"


def test_packing_reorders_a_weight():
    weight = torch.arange(70 * 6.0).view(70, 6)
    packed = weight.clone()
    pack(packed)
    columns = packed[:64].view(4, 6, 16)  # [columns, size, 16]
    assert all(torch.equal(column.T, weight[16 * i : 16 * i + 16]) for i, column in enumerate(columns))
    assert torch.equal(packed[64:], weight[64:])


@njit
def call_matmul(x, rows, size, weight, bias, start, end, outputs, out, stride, adds, like_x, like):
    w, b = stored(weight, like), stored(bias, like)
    matmul.matmul(stored(x, like_x), rows, size, w, b, start, end, outputs, floats(out), stride, adds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_with_a_packed_weight(dtype, rng):
    for _ in range(ROUNDS):
        size, rows, outputs, more = 2 * rng.randint(1, 70), rng.randint(1, 40), rng.randint(1, 150), rng.randint(0, 9)
        start, adds = rng.randrange(0, outputs, 32), rng.random() < 0.5
        end = rng.choice([outputs, *range(start + 32, outputs, 32)])
        weight, bias = torch.randn(outputs, size).to(dtype), torch.randn(outputs).to(dtype)
        x, out = some_x(rows, size, dtype), guarded(rows, outputs + more)
        before = torch.randn(rows, end - start) if adds else torch.zeros(rows, end - start)
        out[:rows, start:end] = before
        packed, likes = weight.clone(), (like_of(x.dtype), like_of(dtype))
        pack(packed)
        arguments = packed.data_ptr(), bias.data_ptr(), start, end, outputs, out.data_ptr(), outputs + more, adds
        call_matmul(x.data_ptr(), rows, size, *arguments, *likes)
        result, expected = out[:rows, start:end], plain.linear(weight, bias, x.float())[:, start:end] + before
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=2e-4)
        assert (out[rows] == 7).all() and (out[:, outputs:] == 7).all() and (out[:, :start] == 7).all()
        for m in range(min(rows, 13)):
            alone = guarded(1, outputs + more)
            alone[0, start:end] = before[m]
            arguments = packed.data_ptr(), bias.data_ptr(), start, end, outputs, alone.data_ptr(), outputs + more, adds
            call_matmul(x[m].data_ptr(), 1, size, *arguments, *likes)
            assert equal_bits(alone[0], out[m]), "a row has the same bits alone"


@njit
def call_exp(x, out, size):
    for i in range(size):
        write(floats(out), i, vectors.exp(read(floats(x), i)))


def test_exp_is_exact_to_three_units_in_the_last_place():
    x = torch.cat((torch.linspace(-100, 100, 200_001), torch.tensor([0.0, -0.0, -1e30, 1e30, -torch.inf, torch.inf])))
    out = torch.empty_like(x)
    call_exp(x.data_ptr(), out.data_ptr(), len(x))
    errors = out.view(torch.int32) - plain.exp(x).view(torch.int32)
    assert errors.abs().max() <= 3 and out[x == 0].eq(1).all() and out.isfinite().all()


@njit
def call_rms_norm(x, weight, eps, size, out, like):
    elementwise.rms_norm(floats(x), stored(weight, like), eps, size, floats(out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_works_in_place(dtype, rng):
    for size in SIZES:
        x, weight, eps = (
            torch.randn(size) * 10 ** rng.uniform(-3, 3),
            torch.randn(size).to(dtype),
            10 ** rng.uniform(-8, -3),
        )
        expected, out = plain.rms_norm(x, weight, eps), guarded(size)
        for to in (out, x):
            call_rms_norm(x.data_ptr(), weight.data_ptr(), np.float32(eps), size, to.data_ptr(), like_of(dtype))
            torch.testing.assert_close(to[:size], expected, rtol=1e-5, atol=1e-5)
        assert out[size] == 7


@njit
def call_norm_and_rotate(x, norm, cos, sin, eps, scale, size, scratch, out, like):
    pointers = stored(cos, like), stored(sin, like)
    elementwise.norm_and_rotate(floats(x), norm, *pointers, eps, scale, size, floats(scratch), stored(out, like))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normalized_rotated_and_scaled(has_norm, dtype):
    for size in (2, 6, 20, 24, 32, 64, 66, 80):
        x, norm, angles, scratch = torch.randn(size), torch.randn(size), torch.randn(size // 2), torch.empty(size)
        cos, sin, out = angles.cos().to(dtype), angles.sin().to(dtype), guarded(size).to(dtype)
        addresses = cos.data_ptr(), sin.data_ptr(), np.float32(1e-5), np.float32(0.3), size, scratch.data_ptr()
        at_norm = norm.data_ptr() if has_norm else 0
        call_norm_and_rotate(x.data_ptr(), at_norm, *addresses, out.data_ptr(), like_of(dtype))
        normed = plain.rms_norm(x, norm, 1e-5) if has_norm else x
        expected = 0.3 * plain.rotate(normed, cos, sin)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[:size].float(), expected, rtol=tolerance, atol=tolerance)
        assert out[size] == 7


@njit
def call_silu_and_mul(gate, up, size, out, like):
    elementwise.silu_and_mul(stored(gate, like), stored(up, like), size, stored(out, like))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype):
    for size in SIZES:
        gate, up, out = (torch.randn(size) * 30).to(dtype), torch.randn(size).to(dtype), guarded(size).to(dtype)
        gate[0], gate[-1] = torch.tensor([-200.0, 200.0])
        call_silu_and_mul(gate.data_ptr(), up.data_ptr(), size, out.data_ptr(), like_of(dtype))
        expected = plain.silu_and_mul(gate.float(), up.float()).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[:size], expected, rtol=tolerance, atol=tolerance)
        assert out[size] == 7


@njit
def call_exp_of(x, out, size):
    for i in range(0, size, WIDTH):
        store(floats(out), i, vectors.exp_of(load(floats(x), i)))


def test_exp_of_sixteen_numbers():
    x = torch.linspace(-87, 88, 16_000)
    out = torch.empty_like(x)
    call_exp_of(x.data_ptr(), out.data_ptr(), len(x))
    torch.testing.assert_close(out, plain.exp(x), rtol=1e-6, atol=0)


# Attention


@njit
def call_attend(
    q, rows, group, first, pool, shape, layer, kv, table, start, end, scratch, places, out, peaks, sums, like
):
    attention.attend(
        floats(q), rows, group, first, stored(pool, like), shape, layer, kv, integers(table), start, end,
        floats(scratch), integers(places), floats(out), floats(peaks), floats(sums),
    )  # fmt: skip


@njit
def call_merge(out, peaks, sums, splits, rows, size, merged, like):
    attention.merge(floats(out), floats(peaks), floats(sums), splits, rows, size, stored(merged, like))


def attended(
    q: Tensor, group: int, first: int, pool: Tensor, layer: int, kv: int, table: list[int], start: int, end: int
):
    """Return the kernel's sums of values, peaks, and sums of weights."""
    rows, size = q.shape
    shape = Pool(pool.shape[1], pool.shape[3], pool.shape[4], pool.shape[5])
    out, peaks, sums = guarded(rows, size), guarded(rows), guarded(rows)
    scratch, places = torch.full((SCORES,), torch.nan), torch.full((PLACES,), -(2**40))
    block_table = torch.tensor(table)
    call_attend(
        q.data_ptr(), rows, group, first, pool.data_ptr(), shape, layer, kv, block_table.data_ptr(), start, end,
        scratch.data_ptr(), places.data_ptr(), out.data_ptr(), peaks.data_ptr(), sums.data_ptr(), like_of(pool.dtype),
    )  # fmt: skip
    assert (out[rows] == 7).all() and peaks[rows] == sums[rows] == 7
    return out[:rows], peaks[:rows], sums[:rows]


def random_pool(rng: random.Random, dtype: torch.dtype, length: int) -> tuple[Tensor, list[int]]:
    """Return a pool with `length` tokens in blocks of any order, and NaN everywhere else."""
    layers, block_size, kvs = rng.randint(1, 2), rng.choice((1, 3, 4, 16, 17, 32)), rng.randint(1, 3)
    head_dim, needed = rng.choice((2, 6, 16, 20, 24, 64, 80)), -(-length // block_size)
    pool = torch.full((needed + 3, layers, 2, block_size, kvs, head_dim), torch.nan)
    table = rng.sample(range(needed + 3), needed)
    for i, block in enumerate(table):
        used = min(block_size, length - i * block_size)
        pool[block, :, :, :used] = torch.randn(layers, 2, used, kvs, head_dim)
    return pool.to(dtype), table


def check_attention(rng: random.Random, dtype: torch.dtype) -> None:
    """Attend from the end of a context in splits of any length, and merge them."""
    length = rng.choice((1, 2, 15, 16, 17, 40, TILE - 1, TILE, TILE + 1, 600))
    pool, table = random_pool(rng, dtype, length)
    group, queries = rng.choice((1, 2, 3, 4, 5, 8)), rng.randint(1, min(length, 5))
    first, layer, kv = length - queries, rng.randrange(pool.shape[1]), rng.randrange(pool.shape[4])
    q = torch.randn(queries * group, pool.shape[5])  # [rows, head_dim]
    inner = {rng.randint(0, first) for _ in range(rng.randint(0, 2))}  # each query sees the first key of a split
    cuts, splits = sorted({0, *inner, length}), []
    for start, end in pairwise(cuts):
        result = attended(q, group, first, pool, layer, kv, table, start, end)
        keys, values = plain.gather(pool, layer, kv, table, start, end)
        expected = plain.attend(q, keys, values, group, first, start)
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
        splits.append(result)
        for m in range(len(q)):  # a row has the same bits alone, and sees no later key
            own = first + m // group
            alone = attended(q[m : m + 1], 1, own, pool, layer, kv, table, start, min(end, own + 1))
            assert all(equal_bits(a, b[m : m + 1]) for a, b in zip(alone, result, strict=True))
    out, peaks, sums = (torch.stack(each) for each in zip(*splits, strict=True))
    expected = plain.merge(out, peaks, sums)
    merged = torch.full((len(q) + 1, q.shape[1]), 7.0).to(dtype)
    addresses = out.data_ptr(), peaks.data_ptr(), sums.data_ptr()
    call_merge(*addresses, len(splits), *q.shape, merged.data_ptr(), like_of(dtype))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(merged[:-1].float(), expected, rtol=tolerance, atol=tolerance)
    assert (merged[-1] == 7).all()
    whole = plain.attend(q, *plain.gather(pool, layer, kv, table, 0, length), group, first, 0)
    expected = whole[0] / whole[2][:, None]
    torch.testing.assert_close(merged[:-1].float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=pytest.mark.nightly) for each in (torch.bfloat16, torch.float16))],
)
def test_attention_in_splits(dtype, rng):
    for _ in range(150):
        check_attention(rng, dtype)


# Workers that share a step


@njit(nogil=True)
def open_step(counters, count, step):
    team.open_phases(integers(counters), count, step)


@njit(nogil=True)
def take_part(counters, phases, step, count, done, pace):
    """Do tasks of all phases, count them in `done` int64 [phases, count], and return how many this worker did."""
    got, x = 0, 0.0
    for phase in range(phases):
        for task in team.tasks(integers(counters), phase, step, count):
            for i in range(pace):
                x += 1.0 / (i + 1)
            team.atomic_add(integers(done), phase * count + task, 1)
            got += 1
        for task in range(count):  # no worker continues before all of them are done
            if team.load_acquire(integers(done), phase * count + task) != 1 and pace >= 0:
                got -= 1_000_000
    return got if x >= 0 else -1


@njit(nogil=True)
def take_one(counters, phase, step, count):
    return team.take_task(integers(counters), phase, step, count)


@njit(nogil=True)
def finish_one(counters, phase):
    team.atomic_add(integers(counters), phase * STRIDE + 1, 1)


def no_counters(phases: int) -> Tensor:
    return torch.zeros(phases * STRIDE, dtype=torch.int64)


def test_each_task_is_done_once_and_late_helpers_take_nothing(rng):
    phases, late = 6, []
    counters = no_counters(phases)
    with ThreadPoolExecutor(4) as threads:
        for step in range(1, 150):
            count, workers = rng.choice((1, 2, 7, 40)), rng.randint(1, 4)
            done = torch.zeros(phases, count, dtype=torch.int64)
            old = torch.zeros(phases, 64, dtype=torch.int64)  # a helper of a step that has ended must not change it
            open_step(counters.data_ptr(), phases, step)
            running = []
            for _ in range(workers):
                arguments = counters.data_ptr(), phases, step, count, done.data_ptr(), rng.choice((0, 0, 30, 3000))
                running.append(threads.submit(take_part, *arguments))
                if rng.random() < 0.3:
                    stale = counters.data_ptr(), phases, rng.randint(0, step - 1), 64, old.data_ptr(), -1
                    late.append((threads.submit(take_part, *stale), old))
            assert sum(each.result() for each in running) == phases * count
            assert (done == 1).all()
    assert len(late) > 50 and all(each.result() == 0 and (old == 0).all() for each, old in late)


def test_a_phase_may_have_millions_of_tasks():
    counters, count = no_counters(1), 3 << 20
    open_step(counters.data_ptr(), 1, 2**38)
    counters[0] += count - 2  # all but two are taken
    assert [take_one(counters.data_ptr(), 0, 2**38, count) for _ in range(3)] == [count - 2, count - 1, -1]


def test_a_step_does_not_wait_for_helpers_that_never_come():
    counters, done = no_counters(3), torch.zeros(3, 9, dtype=torch.int64)
    open_step(counters.data_ptr(), 3, 1)
    assert take_part(counters.data_ptr(), 3, 1, 9, done.data_ptr(), 0) == 27


def test_a_step_waits_for_a_task_that_another_worker_has_taken():
    counters, done = no_counters(1), torch.zeros(1, 4, dtype=torch.int64)
    open_step(counters.data_ptr(), 1, 5)
    task = take_one(counters.data_ptr(), 0, 5, 4)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(take_part, counters.data_ptr(), 1, 5, 4, done.data_ptr(), -1)
        assert wait_until(lambda: done.sum() == 3)
        let_others_run()
        assert not first.done()
        finish_one(counters.data_ptr(), 0)
        assert first.result(timeout=60) == 3 and done[0, task] == 0
    assert take_one(counters.data_ptr(), 0, 5, 4) == -1
    assert take_one(counters.data_ptr(), 0, 4, 4) == take_one(counters.data_ptr(), 0, 6, 4) == -1


def wait_until(condition) -> bool:
    end = time.monotonic() + 60
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return result


def stops_growing(values: list) -> bool:
    def is_the_same() -> bool:
        before = len(values)
        let_others_run()
        return len(values) == before

    return wait_until(is_the_same)


def test_helpers_sleep_until_a_step_and_end_with_their_owner():
    helped = []

    def help(worker: int, seen: int) -> int:
        helped.append(worker)
        return newest[0]

    newest, before = [0], set(threading.enumerate())
    helpers = Helpers(3, help)
    shared = shared_of(helpers)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3 and wait_until(lambda: sorted(helped) == [1, 2, 3])
    for step in (1, 2, 3):
        assert wait_until(lambda: shared.is_asleep) and stops_growing(helped)
        count, newest[0] = len(helped), step
        assert helpers.start_step() == step
        assert wait_until(lambda count=count: len(helped) >= count + 3), "all helpers wake up"
    helpers.start_step()  # then an exception is raised, and the step never comes
    assert wait_until(lambda: shared.is_asleep)
    assert stops_growing(helped), "helpers stop waiting for it"
    del helpers
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def shared_of(helpers: Helpers) -> Shared:
    """Return what the owner and its threads share, which outlives the owner."""
    return helpers._shared  # noqa: SLF001 - whether threads sleep has no public name, since only tests ask


def test_helpers_end_before_the_interpreter(monkeypatch):
    """Even helpers that are waiting for a step at that moment end."""
    is_over = threading.Event()
    helpers = Helpers(3, lambda worker, seen: is_over.wait(60) and seen)
    end = shared_of(helpers).end
    monkeypatch.setattr(shared_of(helpers), "end", lambda: (end(), is_over.set()))
    monkeypatch.setattr(f"{Helpers.__module__}.SHARED", [shared_of(helpers)])
    threads = list(shared_of(helpers).threads)
    assert len(threads) == 3 and all(thread.is_alive() for thread in threads)
    end_all()
    assert not any(thread.is_alive() for thread in threads)


def test_a_helper_ends_if_its_owner_is_collected_just_before_it_sleeps():
    """A garbage collector runs in any thread between any two lines: here in the helper's, after its last check."""

    class Wakeup(SimpleQueue):
        def get(self):
            shared.end()
            return super().get()

    shared = Shared([Wakeup()])
    thread = threading.Thread(target=run_helper, args=(1, lambda worker, seen: seen, shared.wakeups[0], shared))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_started_helpers_end_if_another_thread_cannot_start(monkeypatch):
    start, started = threading.Thread.start, []

    def starts(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with pytest.raises(RuntimeError, match="can't start"):
        Helpers(2, lambda worker, seen: seen)
    started[0].join(60)
    assert not started[0].is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_wait_for_helpers():
    """Some helpers sleep and some wait for a step. The child drops them, and exits normally."""
    is_over = threading.Event()
    asleep, waiting = Helpers(2, lambda worker, seen: seen), Helpers(2, lambda worker, seen: is_over.wait(60) and seen)
    assert wait_until(lambda: shared_of(asleep).is_asleep)
    if (child := os.fork()) == 0:
        asleep.start_step()
        del asleep, waiting
        end_all()
        os._exit(0)
    has_ended = wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    if not has_ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    is_over.set()
    assert has_ended


def test_pointers_read_and_write_at_an_index(rng):
    @njit
    def walk(memory, i, value):
        put(at(integers(memory), i), 1, value)
        return get(integers(memory), i + 1)

    numbers = torch.arange(8)
    assert walk(numbers.data_ptr(), 2, 50) == 50 and numbers.tolist() == [0, 1, 2, 50, 4, 5, 6, 7]


def test_end_all_waits_for_helpers_whose_owner_was_collected():
    """They free the tensors they worked with, which happens without the interpreter's lock."""
    freed = []

    class Kept:
        def __del__(self):
            is_freeing.set()
            let_others_run()
            freed.append(True)

    is_freeing = threading.Event()
    helpers = Helpers(1, partial(lambda kept, worker, seen: seen, Kept()))
    del helpers
    assert is_freeing.wait(60)
    end_all()
    assert freed


@pytest.mark.parametrize("has_instruction", [True, False])
def test_every_float16_number_is_widened_exactly(has_instruction, monkeypatch):
    """A processor of 2011 has no instruction for it."""
    if not has_instruction:
        monkeypatch.setattr(vectors, "has_float16", lambda *target: False)

    @njit
    def widen(numbers, i, out):
        store(floats(out), 0, load(quantized.halves(numbers), i))

    bits, out = np.arange(1 << 16, dtype=np.uint16), np.empty(16, np.float32)
    expected = bits.view(np.float16).astype(np.float32)
    for i in range(0, len(bits), 16):
        widen(bits.ctypes.data, i, out.ctypes.data)
        assert np.array_equal(out, expected[i : i + 16], equal_nan=True)
