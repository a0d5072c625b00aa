"""The same bytes in any company: a token's results depend on the tokens before it, and on nothing that runs beside it.

Results are compared as bits. Matrices are multiplied row by row in test_kernels.py and test_quantized.py.
"""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")
from llvmlite import binding
from numba import njit

from ... import LLM, SamplingParams
from ...backends.cpu.layout import PART, SPLIT
from ...backends.cpu.runner import StepRunner
from ...backends.cpu.vectors import add, floats, fma, has_float16, has_fma, kernel, load, multiply, store
from ...engine.kv_cache import KVCache
from ...llama import LlamaForCausalLM
from ...quantization import GROUP, Format, Integers, QuantizedLinear, quantize_layers
from ...requests.outputs import CompletionOutput, RequestOutput
from ..testing.checkpoints import CONFIG, random_tensors, train_tokenizer, write_checkpoint
from ..testing.engines import OPTIONS
from .test_kernels import equal_bits
from .test_quantized import random_integers
from .test_runner import CPU, LONGEST, Driver, random_model
from .test_step import is_idle, torch_threads

FULL, NIGHTLY = pytest.mark.full, pytest.mark.nightly
KINDS = [  # of a model and its KV cache. Kernels take half a minute to compile for each
    (torch.float32, False),
    (torch.float32, True),
    pytest.param(torch.bfloat16, False, marks=FULL),
    pytest.param(torch.bfloat16, True, marks=NIGHTLY),
    pytest.param(torch.float16, False, marks=NIGHTLY),
    pytest.param(torch.float16, True, marks=NIGHTLY),
]
LENGTHS = (2 * SPLIT + 70, SPLIT + 9, 40)  # of the sequences

# Steps


def some_model(rng: random.Random, group: int, format: Format | None, dtype: torch.dtype, is_int8: bool):
    """Return a model with `group` query heads for each KV head. Without a format, its sizes are odd."""
    kv_heads, has_groups = rng.choice((1, 2)), format is not None or is_int8
    config = replace(
        random_model(rng, dtype).config,
        vocab_size=77,  # 32 does not divide it
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=rng.choice((32, 64, 96) if has_groups else (6, 20, 64, 80)),
    )
    if format is None:
        return LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)
    times = format.groups  # the least size, in groups
    config = replace(config, hidden_size=64 * max(1, times // 2), intermediate_size=96 * times)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)

    def format_of(name: str) -> Format | None:
        return None if model.get_submodule(name).in_features % (GROUP * times) else format

    quantize_layers(model, format_of, dtype)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            q, scales, minima, factors = random_integers(layer.out_features, layer.in_features // times, format)
            if factors is None:
                layer.store([Integers(q, scales / 8, None if minima is None else minima / 8)])
            else:
                layer.store([Integers(q, scales, minima, factors / 8)])
    return model.to(dtype)


def rows_of(model: LlamaForCausalLM, steps: list[list[int]], workers: int, driver: Driver) -> Tensor:
    """Run steps, and return each token's hidden state and logits, in the order of sequences and positions."""
    with torch_threads(workers):
        runner = StepRunner(deepcopy(model), driver.kv_cache, LONGEST)

    def compute(batch):
        hidden, logits = runner.run(batch)
        ends = torch.tensor([count for _, count in batch]).cumsum(0) - 1
        assert equal_bits(runner.compute_logits(hidden[ends]), logits)
        return hidden

    def both(hidden):
        return torch.cat((hidden.float(), runner.compute_logits(hidden)), 1)

    order = [seq for step in steps for seq, count in enumerate(step) for _ in range(count)]
    return driver.run(compute, both, steps)[sorted(range(len(order)), key=order.__getitem__)]


def mixed_steps(rng: random.Random) -> list[list[int]]:
    """Return the number of tokens of each sequence in each step, until all have LENGTHS."""
    left, steps = list(LENGTHS), []
    while any(left):
        steps.append([min(count, rng.choice((0, 1, 1, 2, 3, 7, 60, 200))) for count in left])
        left = [count - few for count, few in zip(left, steps[-1], strict=True)]
    return [step for step in steps if any(step)]


def single_steps() -> list[list[int]]:
    """Return steps of one token, sequence by sequence."""
    return [
        [int(each == seq) for each in range(len(LENGTHS))] for seq, length in enumerate(LENGTHS) for _ in range(length)
    ]


@pytest.mark.parametrize(("dtype", "is_int8"), KINDS)
def test_a_token_does_not_depend_on_company_or_chunks(dtype, is_int8, compiled):
    """Several sequences in mixed steps and two threads give the bits of one token at a time."""
    compiled(dtype, is_kv_int8=is_int8)
    torch.manual_seed(0)
    rng = random.Random(0)
    for group, format in [(1, None), (3, None), (8, None), *zip(cycle((3, 8, 1)), Format)]:
        model, block_size = some_model(rng, group, format, dtype, is_int8), rng.choice((4, 16))
        together, alone = (Driver(model, block_size, dtype, len(LENGTHS), is_int8) for _ in range(2))
        rows = rows_of(model, mixed_steps(rng), 2, together)
        expected = rows_of(model, single_steps(), 1, alone)
        assert expected.isfinite().all() and expected.std() > 0.1
        assert equal_bits(rows, expected), (group, format, rows_that_differ(rows, expected))
        assert equal_bits(together.written(), alone.written()), (group, format)


def rows_that_differ(a: Tensor, b: Tensor) -> list[int]:
    return (a != b).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("size", [77, PART, 2 * PART + 45])
def test_a_rows_likeliest_token_does_not_depend_on_other_rows(size, compiled):
    compiled(torch.float32)
    torch.manual_seed(0)
    model = random_model(random.Random(0), torch.float32)
    with torch_threads(2):
        runner = StepRunner(model, KVCache(model.config, 3, 4, torch.float32, CPU), 12)
    logits = 5 * torch.randn(9, size)
    tokens, logprobs = runner.find_likeliest(logits)
    alone = [runner.find_likeliest(row[None]) for row in logits]
    assert (tokens, logprobs) == ([token for [token], _ in alone], [logprob for _, [logprob] in alone])


# Engines


@pytest.fixture(scope="module")
def loopy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a random model that looks mostly at the last token, so it repeats itself."""
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
    tensors = {
        name: tensor * 0.05 if "o_proj" in name or "down_proj" in name else tensor
        for name, tensor in random_tensors(config, 1).items()
    }
    return write_checkpoint(tmp_path_factory.mktemp("loopy"), config, tensors, train_tokenizer())


class Asked(NamedTuple):
    """A request of a history."""

    step: int  # of its arrival
    prompt: list[int]
    params: SamplingParams
    aborted_after: int | None  # steps


def random_requests(rng: random.Random, count: int) -> list[Asked]:
    """Return requests that share prefixes, with greedy and drawn samples. Some are aborted."""
    shared, requests = [rng.randrange(3, 320) for _ in range(30)], []
    for i in range(count):
        prompt = shared[: rng.choice((0, 13, 30))] + [rng.randrange(3, 320) for _ in range(rng.randint(1, 12))]
        temperature = rng.choice((0, 0, 0.3, 0.9))
        params = SamplingParams(
            max_tokens=rng.randint(8, 40), temperature=temperature, n=rng.choice((1, 2)) if temperature else 1, seed=i,
            ignore_eos=True, logprobs=rng.choice((None, None, 2)),
        )  # fmt: skip
        requests.append(Asked(rng.randint(0, 25), prompt, params, rng.choice((None, None, None, rng.randint(2, 12)))))
    return requests


def run_history(llm: LLM, requests: list[Asked]) -> list[RequestOutput]:
    """Run requests that arrive and are aborted at their steps. Return the last output of each."""
    engine, outputs = llm.llm_engine, dict[str, RequestOutput]()
    for step in range(10_000):
        for i, each in enumerate(requests):
            if each.step == step:
                engine.add_request(str(i), each.prompt, each.params)
            if each.aborted_after is not None and each.step + each.aborted_after == step:
                engine.abort_request(str(i))
        outputs |= {output.request_id: output for output in engine.step()}
        engine.kv_cache_manager.check_integrity()
        if step > 40 and not engine.has_unfinished_requests():
            break
    assert is_idle(llm)
    return [outputs.get(str(i)) for i in range(len(requests))]


def assert_prefix(completion: CompletionOutput, whole: CompletionOutput) -> None:
    """Assert that a sample, which may have been aborted, has the tokens and log-probabilities of the whole one."""
    count = len(completion.token_ids)
    assert completion.token_ids == whole.token_ids[:count]
    if count == len(whole.token_ids):
        assert completion.cumulative_logprob == whole.cumulative_logprob
    if completion.logprobs is not None and whole.logprobs is not None:
        assert completion.logprobs == whole.logprobs[:count]


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "quantization"),
    [
        ("float32", "auto", "int8"),
        pytest.param("float32", "int8", "int4", marks=FULL),
        pytest.param("float32", "auto", None, marks=NIGHTLY),
        pytest.param("bfloat16", "auto", None, marks=FULL),
        pytest.param("bfloat16", "int8", "int8", marks=NIGHTLY),
        pytest.param("float16", "auto", "int4", marks=NIGHTLY),
    ],
)
def test_each_request_of_a_history_equals_itself_alone(
    dtype, kv_cache_dtype, quantization, loopy, compiled, kernels_folder, monkeypatch, tmp_path
):
    """Requests run in chunks, with drafts, in a pool that is too small, and find blocks on the host and on the disk."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels_folder))
    compiled(getattr(torch, dtype), is_kv_int8=kv_cache_dtype == "int8")
    options: dict[str, Any] = {
        "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization, "block_size": 4,
        "attention_backend": "numba", **OPTIONS,
    }  # fmt: skip
    small: dict[str, Any] = options | {
        "kv_cache_tokens": 176, "kv_offloading_tokens": 400, "kv_disk_dir": str(tmp_path), "kv_disk_save": "all",
        "max_num_batched_tokens": 24, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }  # fmt: skip
    alone, requests = LLM(loopy, kv_cache_tokens=512, **options), random_requests(random.Random(2), 24)
    counts = Counter[str]()
    expected = [alone.generate([each.prompt], each.params, use_tqdm=False)[0] for each in requests]
    for threads in (2, 1):  # the second engine finds the first one's blocks on the disk
        with torch_threads(threads):
            llm = LLM(loopy, **small)
        for _ in range(2):
            for output, whole, each in zip(run_history(llm, requests), expected, requests, strict=True):
                assert output is not None or each.aborted_after is not None
                for sample, whole_sample in zip(output.outputs if output else [], whole.outputs, strict=False):
                    assert_prefix(sample, whole_sample)
                    counts["compared"] += len(sample.token_ids)
                    counts["aborted"] += len(sample.token_ids) < len(whole_sample.token_ids)
        stats = llm.stats()
        counts += Counter(
            preempted=stats.preemptions, accepted=stats.accepted_tokens, hits=stats.prefix_hits,
            from_host=stats.blocks_loaded, from_disk=stats.disk_blocks_loaded,
        )  # fmt: skip
        llm.llm_engine.disk_tier.flush()
    assert counts["compared"] > 1000 and min(counts.values()) > 0 and len(counts) == 7, counts


# The compiler


@kernel
def product_and_sum(x, out):
    store(out, 0, add(multiply(load(x, 0), load(x, 16)), load(x, 32)))


@kernel
def fused_product_and_sum(x, out):
    store(out, 0, fma(load(x, 0), load(x, 16), load(x, 32)))


@njit
def call_product_and_sum(x, out):
    product_and_sum(floats(x), floats(out))


@njit
def call_fused(x, out):
    fused_product_and_sum(floats(x), floats(out))


TARGETS = [  # triple, processor, instructions that multiply and add, or None if there are none
    ("x86_64-unknown-linux-gnu", "haswell", "vfmadd"),
    ("x86_64-unknown-linux-gnu", "sapphirerapids", "vfmadd"),
    ("x86_64-unknown-linux-gnu", "nehalem", None),
    ("aarch64-unknown-linux-gnu", "generic", r"fmla|fmadd"),
]


@pytest.mark.parametrize(("triple", "cpu", "instruction"), TARGETS)
def test_the_compiler_fuses_where_a_kernel_says_so_and_nowhere_else(triple, cpu, instruction):
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    assert has_fma(triple, cpu, "") == has_float16(triple, cpu, "") == (instruction is not None)
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    x, out = torch.randn(48), torch.empty(16)
    for function, is_fused in ((call_product_and_sum, False), (call_fused, True)):
        function(x.data_ptr(), out.data_ptr())
        [text] = function.inspect_llvm().values()
        assert not re.search(r"\b(reassoc|contract|fast|afn|nsz|arcp|nnan|ninf)\b", text)
        text = re.sub(r"target (triple|datalayout) = .*", "", text)
        assembly = machine.emit_assembly(binding.parse_assembly(f'target triple = "{triple}"\n{text}'))
        if instruction:
            assert bool(re.search(instruction, assembly)) == is_fused


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", ["haswell", "nehalem"])
def test_tokens_do_not_depend_on_company_on_older_processors(cpu, tmp_path):
    """Haswell has AVX2, and nehalem cannot multiply and add in one instruction."""
    assert has_fma(binding.get_default_triple(), cpu, "") == (cpu == "haswell")
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={tmp_path}", "--part", "all", __file__]
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "", "PYTEST_ADDOPTS": ""}
    chosen = ["-k", "company_or_chunks and dtype0 or company_or_chunks and dtype1"]
    done = subprocess.run(
        [*command, *chosen], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-2000:]
