"""Steps against the plain model: the logits of decodes, and the tokens of whole engines."""

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from ... import LLM, PoolingParams, SamplingParams
from ...backends.cpu.layout import SPLIT
from ...backends.cpu.runner import StepRunner
from ...engine.kv_cache import KVCache
from ...llama import LlamaForCausalLM, ModelConfig
from ...options.attention_backend import BACKEND_VARIABLE
from ..testing.engines import OPTIONS
from ..testing.sequences import make_sequence
from . import plain

FULL = pytest.mark.full
ROOT = Path(__file__).resolve().parents[3]
MAX_MODEL_LEN = 3 * SPLIT
LENGTHS = (1, 2, 15, 16, 17, 33, 257, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 1300)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# One step of a random model


def random_config(rng: random.Random) -> ModelConfig:
    """Return a model with sizes that 16 does not divide, and any features of Llama, Mistral and Qwen models."""
    kv_heads, group, head_dim = rng.choice((1, 2)), rng.choice((1, 3, 8)), rng.choice((6, 20, 24, 64))
    return ModelConfig(
        vocab_size=rng.choice((53, 64, 321)),
        hidden_size=rng.choice((18, 34, 50)),
        intermediate_size=rng.choice((6, 32, 70, 96)),
        num_hidden_layers=rng.choice((1, 2)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=rng.choice((1e-6, 1e-5)),
        tie_word_embeddings=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
        attention_output_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        qk_norm=rng.random() < 0.5,
    )


def random_model(config: ModelConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config, MAX_MODEL_LEN)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape)
        weight.data = 1 + 0.2 * noise if "norm" in name else noise * 1.5 * (weight.shape[-1] ** -0.5)
    model.tie_weights()
    return model.to(dtype).eval().requires_grad_(False)


def random_tables(rng: random.Random, pool: KVCache, lens: list[int]) -> list[list[int]]:
    """Return block tables in any order for contexts of these lengths.

    The pool holds all but the last token of each, and NaN everywhere else.
    """
    free = rng.sample(range(pool.num_blocks), pool.num_blocks)
    pool.blocks.fill_(torch.nan)
    tables = []
    for length in lens:
        table = [free.pop() for _ in range(-(-length // pool.block_size))]
        for i, block in enumerate(table):
            used = max(0, min(pool.block_size, length - 1 - i * pool.block_size))
            pool.blocks[block, :, :, :used] = torch.randn(pool.blocks[block, :, :, :used].shape).to(pool.blocks.dtype)
        tables.append(table + rng.sample(range(pool.num_blocks), rng.randint(0, 2)))  # an engine's tables may be longer
    return tables


class PlainAttend:
    """Attention of one new token per sequence, by plain.py. It records the new keys and values."""

    def __init__(self, pool: Tensor, tables: list[list[int]], lens: list[int]) -> None:
        self.pool, self.tables, self.lens = pool, tables, lens
        self.new: list[tuple[Tensor, Tensor]] = []  # for each layer: k, v [rows, num_kv_heads, head_dim]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.new.append((k, v))
        return torch.stack([self.row(layer, m, q[m], k[m], v[m]) for m in range(len(q))])

    def row(self, layer: int, m: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with one row: q, out [num_heads, head_dim]; k, v [num_kv_heads, head_dim]."""
        position, group, heads = self.lens[m] - 1, len(q) // len(k), []
        for kv in range(len(k)):
            keys, values = plain.gather(self.pool, layer, kv, self.tables[m], 0, position)
            keys, values = torch.cat((keys, k[kv : kv + 1])), torch.cat((values, v[kv : kv + 1]))  # [position + 1, ...]
            scaled = q[kv * group : (kv + 1) * group] * q.shape[1] ** -0.5
            out, _, sums = plain.attend(scaled, keys, values, len(scaled), position, 0)
            heads.append(out / sums[:, None])
        return torch.cat(heads)


def in_float32(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a model with the same rounded weights that computes in float32."""
    same = LlamaForCausalLM(model.config, MAX_MODEL_LEN)
    same.load_state_dict(model.state_dict())
    rotary = same.model.rotary_emb
    rotary.cos, rotary.sin = rotary.cos.to(dtype).float(), rotary.sin.to(dtype).float()
    same.tie_weights()
    return same.eval().requires_grad_(False)


TOLERANCE = {torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}  # relative to the standard deviation


def close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a is close to b: float32 sums run in a different order, and other dtypes round on the way."""
    spread = float(b.std(correction=0)) + 1e-2
    return bool((a.float() - b).abs().max() < TOLERANCE[dtype] * spread)


def check_model(rng: random.Random, dtype: torch.dtype, num_steps: int, workers: int) -> None:
    """Check steps of a random model, with up to 64 sequences."""
    config = random_config(rng)
    model = random_model(config, dtype)
    reference = in_float32(model, dtype)
    pool = KVCache(config, 1300, rng.choice((3, 4, 16, 17)), dtype, torch.device("cpu"))
    with torch_threads(workers):
        runner = StepRunner(model, pool, MAX_MODEL_LEN)
    for _ in range(num_steps):
        rows = rng.randint(1, rng.choice((4, 64)))
        lens = [rng.choice(LENGTHS) for _ in range(rows)]
        while sum(-(-length // pool.block_size) for length in lens) > pool.num_blocks:
            lens[lens.index(max(lens))] = 1
        check_step(rng, runner, reference, pool, lens, f"{config}, {dtype}, {lens}")


def decodes(token_ids: list[int], tables: list[list[int]], lens: list[int]) -> list[tuple[Any, int]]:
    """Return a batch of sequences whose last tokens are computed next."""
    batch: list[tuple[Any, int]] = []
    for token, table, n in zip(token_ids, tables, lens, strict=True):
        seq = make_sequence("a", n, max_tokens=1)
        seq.token_ids, seq.num_computed_tokens, seq.block_table = [0] * (n - 1) + [token], n - 1, table
        batch.append((seq, 1))
    return batch


def check_step(
    rng: random.Random, runner: StepRunner, reference: LlamaForCausalLM, pool: KVCache, lens: list[int], what: str
) -> None:
    tables, dtype = random_tables(rng, pool, lens), pool.blocks.dtype
    token_ids = [rng.randrange(reference.config.vocab_size) for _ in lens]
    attend = PlainAttend(pool.blocks.clone(), tables, lens)
    expected = reference(torch.tensor(token_ids), torch.tensor(lens) - 1, attend)
    hidden, logits = runner.run(decodes(token_ids, tables, lens))
    assert hidden.dtype == dtype and logits.dtype == torch.float32
    assert close(hidden, expected, dtype), what
    assert close(logits, reference.compute_logits(expected), dtype), what
    after = attend.pool
    for layer, (k, v) in enumerate(attend.new):
        for m, length in enumerate(lens):
            block, offset = tables[m][(length - 1) // pool.block_size], (length - 1) % pool.block_size
            written = pool.blocks[block, layer, :, offset]
            assert close(written, torch.stack((k[m], v[m])), dtype), what
            after[block, layer, :, offset] = written
    of_bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(pool.blocks.view(of_bits), after.view(of_bits)), f"nothing else is written: {what}"


@pytest.mark.parametrize(("dtype", "models", "workers"), [
    (torch.float32, 3, 1),
    pytest.param(torch.float32, 20, 3, marks=FULL),
    pytest.param(torch.bfloat16, 6, 2, marks=FULL),
    pytest.param(torch.bfloat16, 40, 2, marks=pytest.mark.nightly),
    pytest.param(torch.float16, 40, 1, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_step_of_any_model_gives_the_plain_logits(dtype, models, workers, compiled):
    compiled(dtype)
    torch.manual_seed(0)
    for seed in range(models):
        check_model(random.Random(seed), dtype, 6, workers)


@pytest.mark.parametrize(("arguments", "message"), [
    (([53], [[0]], [1]), r"token ids must be from 0 to 52, got \[53\]"),
    (([-1], [[0]], [1]), r"token ids must be from 0 to 52, got \[-1\]"),
    (([1], [[0, 1, 2, 3, 4]], [17]), "at most 16 tokens are allowed, got 17"),
    (([1, 1], [[0], [1]], [4, 5]), "a context of 5 tokens in 4 slots"),
    (([], [], []), "a step needs at least one token per sequence"),
])  # fmt: skip
def test_arguments_out_of_bounds_are_rejected(arguments, message, compiled):
    compiled(torch.float32)
    config = replace(random_config(random.Random(1)), vocab_size=53)
    pool = KVCache(config, 8, 4, torch.float32, torch.device("cpu"))
    runner = StepRunner(random_model(config, torch.float32), pool, 16)
    with pytest.raises(AssertionError, match=message):
        runner.run(decodes(*arguments))


def test_kernels_keep_the_old_weights_of_a_model_that_gets_new_ones(compiled):
    compiled(torch.float32)
    config = random_config(random.Random(1))
    model = random_model(config, torch.float32)
    runner = StepRunner(model, KVCache(config, 8, 4, torch.float32, torch.device("cpu")), 16)
    _, before = runner.run(decodes([1], [[0]], [1]))
    for weight in model.parameters():
        size = weight.numel()
        weight.data = torch.empty(0)
        torch.full((size,), torch.nan)  # reuses freed memory
    _, after = runner.run(decodes([1], [[0]], [1]))
    assert torch.equal(before, after)


# Engines


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, "seed": 1} | changes)


def requests(rng: random.Random, count: int, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests, some of which share a prefix, are sampled, or ask for several samples."""
    shared = [rng.randrange(3, vocab_size) for _ in range(21)]
    prompts = [
        shared[: rng.randint(0, 21)] + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 9))]
        for _ in range(count)
    ]
    all_params = []
    for i in range(count):
        temperature = rng.choice((0, 0.8, 1.2))
        n = rng.choice((1, 1, 2, 3)) if temperature else 1
        all_params.append(
            params(max_tokens=rng.randint(1, 14), temperature=temperature, n=n, seed=i, top_p=rng.choice((1, 0.9)))
        )
    return prompts, all_params


def tokens(outputs) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def is_idle(llm: LLM) -> bool:
    """Return whether all blocks are free and no request is left."""
    manager = llm.llm_engine.kv_cache_manager
    manager.check_integrity()
    return manager.num_free_blocks == manager.num_blocks and not llm.llm_engine.has_unfinished_requests()


def make(model, backend: str, **options) -> LLM:
    all_options: dict[str, Any] = {"kv_cache_tokens": 2048, "attention_backend": backend} | OPTIONS | options
    return LLM(model, **all_options)


def test_an_engine_generates_the_plain_engines_tokens(checkpoint, with_kernels):
    """The pool is small, so sequences are preempted and blocks are loaded from the host."""
    rng = random.Random(3)
    options = {"kv_cache_tokens": 80, "kv_offloading_tokens": 160, "block_size": 4}
    fast, slow = (make(checkpoint, backend, **options) for backend in ("numba", "torch"))
    assert fast.llm_engine.kernels.uses_kernels and not slow.llm_engine.kernels.uses_kernels
    for count in (1, 2, 4, 6):
        prompts, all_params = requests(rng, count, 320)
        assert tokens(fast.generate(prompts, all_params, use_tqdm=False)) == tokens(
            slow.generate(prompts, all_params, use_tqdm=False)
        )
        assert is_idle(fast)


def test_embeddings_equal_the_plain_engines(checkpoint, with_kernels):
    """Some prompts end in a chunk of one token, which a decode step computes beside sequences that generate."""
    engines = [make(checkpoint, backend, max_num_batched_tokens=4).llm_engine for backend in ("numba", "torch")]
    assert engines[0].kernels.uses_kernels
    ended = []
    for engine in engines:
        outputs = {}
        for i in range(1, 8):
            engine.add_request(f"text {i}", [5, i], params())
            engine.add_request(f"embedding {i}", list(range(20, 20 + i)), PoolingParams())
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        ended.append(outputs)
    for request_id, output in ended[1].items():
        assert ended[0][request_id].outputs[0].token_ids == output.outputs[0].token_ids
        if output.embedding is not None:
            assert ended[0][request_id].embedding == pytest.approx(output.embedding, abs=1e-5)


@pytest.mark.full
def test_the_storyteller_tells_the_same_stories(with_kernels):
    rng = random.Random(4)
    fast, slow = (make(ROOT / "models" / "storyteller", backend) for backend in ("numba", "torch"))
    for count in (1, 2, 3, 4, 5, 6):
        prompts, all_params = requests(rng, count, 1000)
        assert tokens(fast.generate(prompts, all_params, use_tqdm=False)) == tokens(
            slow.generate(prompts, all_params, use_tqdm=False)
        )
    story = params(max_tokens=200)
    assert tokens(fast.generate("Once upon a time", story)) == tokens(slow.generate("Once upon a time", story))
    assert is_idle(fast)


@pytest.mark.parametrize(
    "dtype", [pytest.param("bfloat16", marks=FULL), pytest.param("float16", marks=pytest.mark.nightly)]
)
def test_stories_in_half_precision_are_nearly_the_same(dtype, with_kernels, compiled):
    compiled(getattr(torch, dtype))
    fast, slow = (make(ROOT / "models" / "storyteller", backend, dtype=dtype) for backend in ("numba", "torch"))
    prompts = ["Once upon a time", "The cat", "A boy and his dog", "It was dark"]
    results, expected = (tokens(llm.generate(prompts, params(max_tokens=24), use_tqdm=False)) for llm in (fast, slow))
    firsts = [[sample[0] for sample in output] for output in results], [[s[0] for s in output] for output in expected]
    assert firsts[0] == firsts[1]
    same = sum(a == b for [x], [y] in zip(results, expected, strict=True) for a, b in zip(x, y, strict=True))
    assert same > 0.5 * 4 * 24


def test_aborts_leak_nothing_and_do_not_change_other_requests(checkpoint, with_kernels):
    llm = make(checkpoint, "numba", block_size=4)
    engine = llm.llm_engine
    [alone] = tokens(llm.generate([[5, 6, 7]], params()))
    for request_id, n in (("a", 1), ("b", 3), ("c", 1)):
        engine.add_request(request_id, [5, 6, 7], params(n=n, temperature=0 if n == 1 else 1))
    for i in range(20):
        outputs = engine.step()
        if i == 3:
            engine.abort_request("b")
        if i == 5:
            engine.abort_request("a")
        engine.kv_cache_manager.check_integrity()
        finished = [output for output in outputs if output.finished and output.request_id == "c"]
        if finished:
            assert tokens(finished) == [alone]
            break
    assert finished and is_idle(llm)


def test_two_engines_in_one_process_are_independent(checkpoint, with_kernels):
    first, second = (make(checkpoint, "numba", block_size=size) for size in (4, 16))
    plain_llm = make(checkpoint, "torch")
    prompts = [[5, 6, 7], [8, 9]]
    expected = tokens(plain_llm.generate(prompts, params()))
    for request_id, prompt in enumerate(prompts):
        first.llm_engine.add_request(str(request_id), prompt, params())
        second.llm_engine.add_request(str(request_id), prompt, params())
    done = {id(first): {}, id(second): {}}
    while any(llm.llm_engine.has_unfinished_requests() for llm in (first, second)):
        for llm in (first, second):
            done[id(llm)] |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
    for outputs in done.values():
        assert tokens([outputs["0"], outputs["1"]]) == expected
    assert is_idle(first) and is_idle(second)


def test_engines_in_two_threads_are_independent(checkpoint, with_kernels):
    prompts, plain_llm, results = [[5, 6, 7], [8, 9], [10] * 20], make(checkpoint, "torch"), {}
    expected = tokens(plain_llm.generate(prompts, params()))

    def serve(name: int) -> None:
        with torch_threads(2):
            llm = make(checkpoint, "numba", block_size=4)
            results[name] = [tokens(llm.generate(prompts[i:], params(), use_tqdm=False)) for i in (0, 2, 1, 0)]

    threads = [Thread(target=serve, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results.get(name) for name in range(2)] == [[expected[i:] for i in (0, 2, 1, 0)]] * 2


def test_deleting_an_engine_ends_its_helpers(checkpoint, with_kernels):
    before = set(threading.enumerate())
    with torch_threads(3):
        llm = make(checkpoint, "numba")
        llm.generate([[5, 6, 7]], params(), use_tqdm=False)
    helpers = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("helper")}
    assert len(helpers) == 2
    del llm
    gc.collect()
    for thread in helpers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in helpers)


def test_an_engine_without_memory_for_kernels_uses_plain_operations(checkpoint, with_kernels, monkeypatch):
    expected = tokens(make(checkpoint, "torch").generate([[5, 6, 7]], params()))

    def no_memory(self, workers, dtype):
        raise RuntimeError("can't allocate memory")

    monkeypatch.delenv(BACKEND_VARIABLE)
    monkeypatch.setattr(StepRunner, "_make_workspace", no_memory)
    llm = make(checkpoint, "auto")
    assert tokens(llm.generate([[5, 6, 7]], params())) == expected
    assert llm.llm_engine.kernels.description.endswith("loaded: RuntimeError: can't allocate memory")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_computes_by_itself(checkpoint, with_kernels):
    with torch_threads(2):
        llm = make(checkpoint, "numba")
        expected = tokens(llm.generate([[5, 6, 7]], params()))
        x = torch.randn(300, 300)
        large = x @ x  # by two threads of OpenMP, for whose second thread the child would wait
        if (child := os.fork()) == 0:
            try:
                result = tokens(llm.generate([[5, 6, 7]], params(), use_tqdm=False))
                is_same = result == expected and torch.allclose(x @ x, large, atol=1e-3)
                os._exit(0 if is_same and llm.llm_engine.kernels.uses_kernels else 1)
            finally:
                os._exit(2)
        assert exit_code(child) == 0
        assert tokens(llm.generate([[5, 6, 7]], params())) == expected


def exit_code(child: int) -> int:
    """Wait for a process, kill it after 60 s, and return its exit code."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("after", [False, True])
def test_after_a_kernel_error_each_sequence_runs_alone(after, checkpoint, with_kernels, monkeypatch):
    llm = make(checkpoint, "numba", block_size=4)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    expected, calls, real = tokens(llm.generate(prompts, params())), [], StepRunner.run

    def run(self, batch):
        calls.append(len(batch))
        result = real(self, batch) if after else None
        if len(calls) % 4 == 1 and len(batch) > 1:
            raise RuntimeError("a kernel broke")
        return result or real(self, batch)

    monkeypatch.setattr(StepRunner, "run", run)
    assert tokens(llm.generate(prompts, params())) == expected and 1 in calls and is_idle(llm)


def test_a_kernel_that_always_raises_ends_requests_and_leaks_nothing(checkpoint, with_kernels, monkeypatch):
    llm = make(checkpoint, "numba", block_size=4)
    prompts, real = [[5, 6, 7], [8, 9]], StepRunner.run
    expected = tokens(llm.generate(prompts, params()))

    def run(self, batch):
        if max(seq.num_computed_tokens for seq, _ in batch) >= 8:
            raise RuntimeError("a kernel broke")
        return real(self, batch)

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="a kernel broke"):
        patch.setattr(StepRunner, "run", run)
        results = tokens(llm.generate(prompts, params()))
    for [short], [whole] in zip(results, expected, strict=True):
        assert 0 < len(short) < len(whole) and whole[: len(short)] == short
    assert is_idle(llm)
    assert tokens(llm.generate(prompts, params())) == expected
