"""Weights in 8 and 4 bits: their format, the kernels that multiply them, engines that use them, and their quality."""

import os
import platform
import random
import re
import subprocess
import sys
from ctypes import CFUNCTYPE, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")
from llvmlite import binding, ir
from numba import njit

from ... import LLM, EngineArgs, SamplingParams
from ...backends.cpu import quantized
from ...backends.cpu.layout import COLUMNS, SUMS
from ...backends.cpu.runner import StepRunner
from ...backends.cpu.vectors import floats
from ...backends.torch.attention import PagedAttention
from ...backends.torch.backend import TorchBackend
from ...checkpoints.weights import load_model
from ...engine.kv_cache import KVCache
from ...llama import LlamaForCausalLM, ModelConfig
from ...quantization import (
    GROUP,
    Format,
    Formats,
    Integers,
    MixedLinear,
    QuantizedLinear,
    format_at_load,
    quantize_int4,
    quantize_int8,
    quantize_layers,
)
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS
from ..testing.quantized import floats_of, random_integers, stored_linear
from .test_runner import CPU, LONGEST, sequence

STORYTELLER = Path(__file__).resolve().parents[3] / "models" / "storyteller"
HELD_OUT = Path(__file__).resolve().parents[1] / "data" / "held_out.txt"  # of a book that the storyteller never saw
BOTH = pytest.mark.parametrize("bits", [8, 4])
ALL = pytest.mark.parametrize("format", Format)
AT_LOAD = {8: Format.INT8, 4: Format.INT4}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def quantized_linear(weight: Tensor, bits: int, bias: bool = False) -> QuantizedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias).requires_grad_(False)
    layer = QuantizedLinear(linear, AT_LOAD[bits])
    layer.quantize([weight])
    return layer


# The format


@BOTH
@pytest.mark.parametrize("shape", [(32, 32), (7, 64), (70, 96), (200, 32)])
def test_dequantized_weights_are_within_half_a_step(bits, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * 10 ** torch.linspace(-4, 1, shape[0])[:, None]  # rows of any size
    weight[0, :GROUP] = 0
    weight[-1, :GROUP] = 3
    groups = weight.unflatten(1, (-1, GROUP)) if bits == 4 else weight[:, None]  # [outputs, groups, numbers]
    width = groups.amax(2) - groups.amin(2) if bits == 4 else 2 * groups.abs().amax(2)
    step = width / (15 if bits == 4 else 254)
    rounding = groups.abs().amax(2) / 1024 + 1e-6  # of a scale or a minimum to float16
    limit = (0.51 * step + rounding).repeat_interleave(groups.shape[2], 1)
    result = quantized_linear(weight, bits).dequantize()
    assert result.shape == shape and ((result - weight).abs() <= limit + 1e-9).all()


def test_four_numbers_of_sixteen_outputs_lie_side_by_side():
    weight = torch.arange(-127.0, 128).repeat(9)[: 32 * 64].view(32, 64)
    values = quantized_linear(weight, 8).values.view(2, 16, 16, 4)  # column, line, output, number
    scale = weight.abs().amax(1)[20] / 127
    assert values[1, 5, 4].tolist() == [round(float(number / scale)) + 128 for number in weight[20, 20:24]]
    ramp = torch.arange(32.0).remainder(16).repeat(32, 1)  # q is the number itself
    values = quantized_linear(ramp, 4).values.view(2, 5, 16, 4)
    assert values[0, 1, 3].tolist() == [8 | 12 << 4, 9 | 13 << 4, 10 | 14 << 4, 11 | 15 << 4]


@BOTH
def test_parts_are_quantized_as_one_weight(bits, monkeypatch):
    monkeypatch.setattr("nanovllm.quantization.NUMBERS_AT_A_TIME", 32 * 64)
    weight = torch.randn(150, 64)
    layer = QuantizedLinear(nn.Linear(64, 150, bias=False), AT_LOAD[bits])
    layer.quantize(weight.split([33, 1, 16, 100]))
    assert torch.equal(layer.values, quantized_linear(weight, bits).values)
    assert torch.equal(layer.scales, quantized_linear(weight, bits).scales)


@ALL
def test_a_format_holds_integers_exactly(format, monkeypatch):
    monkeypatch.setattr("nanovllm.quantization.NUMBERS_AT_A_TIME", 32 * 64)
    integers = random_integers(75, 96, format)
    assert torch.equal(stored_linear(integers, format).dequantize(), floats_of(integers))


def test_a_group_of_integers_may_be_longer_than_a_kernels():
    coarse = random_integers(33, 256, Format.INT4_FLOAT32)
    coarse = Integers(coarse.q, coarse.scales[:, :2].contiguous(), coarse.minima[:, :2].contiguous())
    assert torch.equal(stored_linear(coarse, Format.INT4_FLOAT32).dequantize(), coarse.floats())


@ALL
def test_rows_of_a_weight_are_those_of_the_whole(format):
    layer = stored_linear(random_integers(70, 64, format), format)
    numbers = torch.tensor([69, 0, 3, 3, 40])
    assert torch.equal(layer.dequantize_rows(numbers), layer.dequantize()[numbers])


# The kernels


@njit
def call_quantize(x, rows, size, values, scales, sums):
    quantized.quantize_rows(floats(x), rows, size, quantized.octets(values), floats(scales), floats(sums))


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0], x.shape[1] // GROUP)
    sums = torch.empty(*scales.shape, SUMS)
    call_quantize(x.data_ptr(), *x.shape, values.data_ptr(), scales.data_ptr(), sums.data_ptr())
    return values, scales, sums


def test_rows_are_quantized_in_groups():
    torch.manual_seed(0)
    x = torch.randn(5, 96) * torch.tensor([1e-6, 1, 30, 0, 1e4])[:, None]
    values, scales, sums = quantized_rows(x)
    groups = x.unflatten(1, (-1, GROUP))
    assert torch.allclose(scales, groups.abs().amax(2) / 127)
    halves = values.unflatten(1, (-1, 2, GROUP // 2)).float().sum(3)
    assert torch.equal(sums, torch.cat((halves.sum(2, keepdim=True), halves), 2))
    back = values.unflatten(1, (-1, GROUP)) * scales[..., None]
    assert ((back - groups).abs() <= 0.501 * scales[..., None]).all()
    x[1, 40] = torch.nan
    assert quantized_rows(x)[1].isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles instructions of x86")
@pytest.mark.parametrize(
    ("processor", "feature", "instruction"),
    [
        ("x86-64", None, "pmull|pmadd"),
        ("haswell", "avx2", "vpmaddwd"),
        ("alderlake", "avxvnni", "vpdpbusd .*ymm"),
        ("cascadelake", "avx512vnni", "vpdpbusd .*zmm"),
    ],
)
def test_every_processor_multiplies_bytes_exactly(processor, feature, instruction, monkeypatch):
    monkeypatch.setattr(quantized, "has", lambda name: name == feature)
    module, address = ir.Module(), quantized.WORDS.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [address] * 3), "add_dot")
    builder = ir.IRBuilder(function.append_basic_block())
    total, weight, x = (builder.load(argument, align=4) for argument in function.args)
    builder.store(quantized.add_dot(builder, total, weight, x), function.args[0], align=4)
    builder.ret_void()
    code, target = binding.parse_assembly(str(module)), binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=processor, opt=3)
    assert re.search(instruction.replace(" ", "[^\\n]*"), machine.emit_assembly(code))
    if feature and not binding.get_host_cpu_features().get(feature):
        return  # it compiles, but doesn't run here
    engine = binding.create_mcjit_compiler(code, machine)
    rng = np.random.default_rng(0)
    for low, high in [(0, 256), (255, 256)]:
        total = rng.integers(-(2**20), 2**20, 16, np.int32)
        weight, x = rng.integers(low, high, 64, np.uint8), rng.integers(-128, 127 if low == 0 else -127, 64, np.int8)
        expected = total + (weight.astype(np.int32) * x).reshape(16, 4).sum(1)
        CFUNCTYPE(None, *[c_void_p] * 3)(engine.get_function_address("add_dot"))(
            *(each.ctypes.data for each in (total, weight, x))
        )
        assert (total == expected).all()


@njit
def call_matmul(
    x, x_scales, x_sums, rows, size, weight, scales, format, bias, start, end, outputs, out, stride, adds, tile
):
    quantized.quantized_matmul(
        quantized.octets(x), floats(x_scales), floats(x_sums), rows, size, quantized.octets(weight),
        floats(scales), format, floats(bias), start, end, outputs, floats(out), stride, adds, floats(tile),
    )  # fmt: skip


@ALL
def test_kernels_multiply_quantized_numbers_exactly(format):
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        size, rows, outputs, more = 32 * rng.randint(1, 5), rng.randint(1, 13), rng.randint(1, 150), rng.randint(0, 9)
        start, adds = rng.randrange(0, outputs, 32), rng.random() < 0.5
        end = rng.choice([outputs, *range(start + 32, outputs, 32)])
        integers = random_integers(outputs, size, format)
        size = integers.q.shape[1]
        bias, x = torch.randn(outputs + COLUMNS), torch.randn(rows, size)
        if rng.random() < 0.2:  # the largest sums of integers
            integers, x = integers._replace(q=integers.q.clamp(integers.q.max())), x[:, :1].sign().expand(-1, size)
        layer = stored_linear(integers, format)
        values, scales, sums = quantized_rows(x.contiguous())
        wanted, tile = torch.randn(rows + 1, outputs + more), torch.empty(rows, COLUMNS)
        out, before = wanted.clone(), wanted.clone()
        call_matmul(
            values.data_ptr(), scales.data_ptr(), sums.data_ptr(), rows, size, layer.values.data_ptr(),
            layer.scales.data_ptr(), int(format), bias.data_ptr(), start, end, outputs, out.data_ptr(), outputs + more,
            adds, tile.data_ptr(),
        )  # fmt: skip
        x = (values.unflatten(1, (-1, GROUP)) * scales[..., None]).flatten(1)
        tail = outputs if end == outputs else end
        wanted[:rows, start:tail] *= adds
        wanted[:rows, start:tail] += (x @ layer.dequantize().T + bias[:outputs])[:, start:tail]
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=2e-3)
        for m in range(rows):  # a row has the same bits alone
            alone, row = before[m : m + 1].clone(), (values[m], scales[m], sums[m])
            call_matmul(
                *(each.data_ptr() for each in row), 1, size, layer.values.data_ptr(), layer.scales.data_ptr(),
                int(format), bias.data_ptr(), start, end, outputs, alone.data_ptr(), outputs + more, adds,
                tile.data_ptr(),
            )  # fmt: skip
            assert torch.equal(alone[0], out[m])


@njit
def call_number(weight, scales, row, i, size, format):
    return quantized.quantized_number(weight, scales, row, i, size, format)


@ALL
def test_a_number_of_a_weight_equals_the_dequantized_one_exactly(format):
    torch.manual_seed(0)
    layer = stored_linear(random_integers(40, 64, format), format)
    size, addresses = layer.in_features, (layer.values.data_ptr(), layer.scales.data_ptr())
    for row, numbers in enumerate(layer.dequantize().tolist()):
        assert [call_number(*addresses, row, i, size, int(format)) for i in range(size)] == numbers


@pytest.mark.nightly
@pytest.mark.parametrize("feature", ["", "avx2"])
def test_kernels_are_right_on_a_processor_without_an_instruction_for_bytes(feature):
    """With AVX2, sums in 4 to 6 bits have 16 bits at first."""
    if feature and not quantized.has(feature):
        pytest.skip("needs AVX2")
    program = f"import sys, pytest; from nanovllm.backends.cpu import quantized; quantized.has = {feature!r}.__eq__; "
    program += "sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", __file__, "-k", "exactly or in_groups"]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-c", program, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]


# Steps and engines


def tiny_model(tied: bool, bits: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=77, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=LONGEST, tie_word_embeddings=tied,
        attention_bias=True, qk_norm=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    weights = {name: layer.weight.clone() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    quantize_layers(model, mixed_formats if bits == "mixed" else format_at_load(bits), torch.float32)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        parts = layer.parts if isinstance(layer, MixedLinear) else [layer]
        for part, rows in zip(parts, weight.split([part.out_features for part in parts]), strict=True):
            part.store([quantize_int8(rows) if part.format.bits == 8 else quantize_int4(rows)])
    return model


def mixed_formats(name: str) -> Format | Formats:
    rows = {"qkv_proj": (64, 32, 32), "gate_up_proj": (96, 96)}.get(name.rpartition(".")[2])
    return [*zip(rows, (Format.INT4, Format.INT8_GROUPS, Format.INT5), strict=False)] if rows else Format.INT8


@pytest.mark.parametrize("quantization", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_gives_nearly_the_plain_logits_of_the_same_weights(quantization, tied, compiled):
    compiled(torch.float32)
    model = tiny_model(tied, quantization)
    plain, fast = (KVCache(model.config, 60, 16, torch.float32, CPU) for _ in range(2))
    backend = TorchBackend(model, PagedAttention(plain, 64), 16, CPU)
    runner = StepRunner(model, fast, LONGEST)
    seqs = [sequence(count, count) for count in (5, 1, 140)]
    for i, seq in enumerate(seqs):
        seq.token_ids = [(7 * j + i) % 77 for j in range(seq.num_uncomputed_tokens)]
        seq.block_table = list(range(20 * i, 20 * i + 20))
    batch = [(seq, seq.num_uncomputed_tokens) for seq in seqs]
    expected, (hidden, logits) = backend.compute(batch).hidden, runner.run(batch)
    assert (hidden - expected).square().mean().sqrt() < 0.02 * expected.std()
    ends = torch.tensor([5, 6, 146]) - 1
    assert (logits - backend.compute_logits(expected[ends])).square().mean().sqrt() < 0.03 * logits.std()


def stories(quantization: str | None, backend: str = "numba", **options) -> LLM:
    return LLM(STORYTELLER, quantization=quantization, attention_backend=backend, **{**OPTIONS, **options})


@pytest.fixture
def checkpoint_32(tmp_path):
    write_checkpoint(tmp_path, hidden_size=64, intermediate_size=96)
    return tmp_path


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_plain_operations_use_the_same_weights(quantization, checkpoint_32):
    llm = LLM(checkpoint_32, quantization=quantization, attention_backend="torch", kv_cache_tokens=512, **OPTIONS)
    [output] = llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    layer = llm.llm_engine.executor.model.model.layers[0].mlp.down_proj
    assert len(output.outputs[0].token_ids) == 24 and isinstance(layer, QuantizedLinear)
    weight = load_model(checkpoint_32, llm.model_config, torch.float32, CPU).model.layers[0].mlp.down_proj.weight
    assert (layer.dequantize() - weight).abs().max() < 0.1 * weight.abs().max()


def test_wrong_quantizations_are_errors(checkpoint):
    with pytest.raises(ValueError, match="quantization must be one of int8, int4, got 'awq'"):
        EngineArgs(model=checkpoint, quantization="awq")
    linear = nn.Linear(33, 64)
    with pytest.raises(ValueError, match="a weight of 64 x 33 cannot be quantized: 33 is not a multiple of 32"):
        QuantizedLinear(linear, 8)
    config = ModelConfig.from_folder(checkpoint)
    with pytest.raises(ValueError, match="quantization 'int8' needs a CPU or CUDA, got device meta"):
        load_model(checkpoint, config, torch.float32, torch.device("meta"), quantization="int8")


# Quality


def quality(quantization: str | None = None, **options: str) -> tuple[float, list[int]]:
    """Return the mean loss of the held-out text in nats per token, and the likeliest token after each prefix."""
    llm = stories(quantization, kv_cache_tokens=4096, max_num_batched_tokens=512, **options)
    ids = llm.get_tokenizer().encode(HELD_OUT.read_text("utf-8"))
    rows = [ids[i : i + 384] for i in range(0, len(ids) - 383, 384)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
    losses, greedy = [], []
    for row, output in zip(rows, outputs, strict=True):
        for token, logprobs in zip(row[1:], output.prompt_logprobs[1:], strict=True):
            losses.append(-logprobs[token].logprob)
            greedy.append(min(logprobs, key=lambda each: logprobs[each].rank))
    return sum(losses) / len(losses), greedy


@pytest.mark.nightly
def test_quantized_weights_predict_held_out_text_nearly_as_well(with_kernels):
    loss, greedy = quality()
    for quantization, more, changed in (("int8", 0.001, 0.015), ("int4", 0.012, 0.08)):
        its_loss, its_greedy = quality(quantization)
        share = sum(a != b for a, b in zip(greedy, its_greedy, strict=True)) / len(greedy)
        print(f"{quantization}: {its_loss - loss:+.4f} nats per token, {share:.2%} of greedy tokens changed")
        assert its_loss - loss <= more and share <= changed
