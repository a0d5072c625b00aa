"""Folders of GPTQ and compressed-tensors: exact weights, the same tokens as their floating-point twins, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import LLM, SamplingParams
from ..checkpoints.model_config import read_model_config
from ..checkpoints.weights import load_model
from ..quantization import Format, QuantizedLinear
from .testing.checkpoints import CONFIG, write_checkpoint
from .testing.engines import OPTIONS

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def compressed(**weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def load(folder: Path) -> Any:
    return load_model(folder, read_model_config(folder), torch.float32, torch.device("cpu"))


def words_of(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers along the last dimension, the first one in a word's lowest bits."""
    parts = numbers.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    words = parts.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(q: Tensor, zeros: Tensor, scales: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    stored = zeros.T - (0 if config.get("checkpoint_format") == "gptq_v2" else 1)
    order = torch.arange(q.shape[1]) // (q.shape[1] // scales.shape[1])
    packed = {"qweight": words_of(q, 4).T, "qzeros": words_of(stored, 4), "scales": scales.T, "g_idx": order.int()}
    return {name: tensor.contiguous() for name, tensor in packed.items()}


def pack_quantized(q: Tensor, zeros: Tensor, scales: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    weights = config["config_groups"]["group_0"]["weights"]
    shape = torch.tensor(q.shape)
    packed = {"weight_packed": words_of(q, weights["num_bits"]), "weight_scale": scales, "weight_shape": shape}
    if not weights["symmetric"]:
        packed["weight_zero_point"] = words_of(zeros.T, 4).T.contiguous()
    return packed


def write(folder: Path, config: dict[str, Any], keep: tuple[str, ...] = ("lm_head",)) -> tuple[Path, Path]:
    """Write a folder in integers, and its twin in float32. Layers in `keep` have floating-point numbers."""
    packed, twin = folder / "packed", folder / "twin"
    packed.mkdir()
    twin.mkdir()
    write_checkpoint(twin, **SHAPE)
    write_checkpoint(packed, **SHAPE, quantization_config=config)
    weights = config.get("config_groups", {}).get("group_0", {}).get("weights", {})
    bits = weights.get("num_bits", 4)
    is_symmetric = weights.get("symmetric", config.get("sym"))
    size = config.get("group_size") or (weights["group_size"] if weights["strategy"] == "group" else -1)
    floats, stored = load_file(twin / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in floats.items():
        if tensor.ndim == 1 or "embed" in name or name.startswith(keep):
            stored[name] = tensor
            continue
        groups = 1 if size == -1 else tensor.shape[1] // size
        q = torch.randint(0, 2**bits, tensor.shape, generator=generator)
        scales = (torch.rand(len(tensor), groups, generator=generator) / 2**bits).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
        if not is_symmetric:
            zeros = torch.randint(1, 16, scales.shape, generator=generator)
        pack = gptq if config["quant_method"] == "gptq" else pack_quantized
        parts = pack(q, zeros, scales, config)
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        each = (q.unflatten(1, (groups, -1)) - zeros[..., None]).float() * scales[..., None].float()
        floats[name] = each.flatten(1)
    save_file(stored, packed / "model.safetensors")
    save_file(floats, twin / "model.safetensors")
    return packed, twin


CASES = {
    "GPTQ": (GPTQ, Format.INT4_FLOAT32),
    "GPTQ, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, Format.INT4_FLOAT32),
    "GPTQ, a group per row": (GPTQ | {"group_size": -1, "sym": True}, Format.INT4_FLOAT32),
    "W4A16": (compressed(), Format.INT4_FLOAT32),
    "W4A16, asymmetric": (compressed(symmetric=False, group_size=128), Format.INT4_FLOAT32),
    "W4A16, a group per row": (compressed(strategy="channel", group_size=None), Format.INT4_FLOAT32),
    "W8A16": (compressed(num_bits=8, strategy="channel", group_size=None), Format.INT8),
    "W8A16, groups": (compressed(num_bits=8, group_size=64), Format.INT8_GROUPS),
}


@pytest.mark.parametrize(("config", "format"), CASES.values(), ids=CASES)
def test_weights_are_exactly_those_of_the_integers(tmp_path, config, format):
    packed, twin = write(tmp_path, config)
    exact, floats = (
        load_model(path, read_model_config(path), torch.float32, torch.device("cpu")) for path in (packed, twin)
    )
    layers = dict(exact.named_modules())
    linears = {name: layer for name, layer in floats.named_modules() if isinstance(layer, torch.nn.Linear)}
    for name, linear in linears.items():
        layer = layers[name]
        if name == "lm_head":
            assert isinstance(layer, torch.nn.Linear) and torch.equal(layer.weight, linear.weight)
        else:
            assert isinstance(layer, QuantizedLinear) and layer.format == format
            assert torch.equal(layer.dequantize(), linear.weight), name


@pytest.mark.parametrize("name", ["GPTQ", "W4A16, asymmetric", "W8A16"])
def test_plain_operations_give_the_tokens_of_the_twin(tmp_path, name):
    packed, twin = write(tmp_path, CASES[name][0])
    options = {"dtype": "float32", "attention_backend": "torch", **OPTIONS}
    prompts = [[1, 300, 17], [5, 6, 7, 8, 9, 250]]
    ours, wanted = (
        [output.outputs[0].token_ids for output in LLM(path, **options).generate(prompts, GREEDY)]
        for path in (packed, twin)
    )
    assert ours == wanted


def test_kernels_run_a_folder_of_integers(tmp_path):
    packed, twin = write(tmp_path, GPTQ)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    ours, wanted = (LLM(path, dtype="float32", **OPTIONS).generate([[1, 300, 17]], params) for path in (packed, twin))
    (ours,), (wanted,) = ours[0].outputs[0].logprobs, wanted[0].outputs[0].logprobs
    common = ours.keys() & wanted.keys()
    assert len(common) >= 4
    assert all(abs(ours[token].logprob - wanted[token].logprob) < 0.05 for token in common)


def test_order_of_groups_by_activation_is_refused(tmp_path):
    packed, _ = write(tmp_path, GPTQ)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model.layers.0.mlp.down_proj.weight don't fit .* groups are in another order"
    ):
        load(packed)


def test_missing_or_misshapen_part_is_named(tmp_path):
    packed, _ = write(tmp_path, GPTQ)
    tensors = load_file(packed / "model.safetensors")
    scales = tensors.pop("model.layers.1.mlp.up_proj.scales")
    for more in ({}, {"model.layers.1.mlp.up_proj.scales": scales[:, :5].contiguous()}):
        save_file(tensors | more, packed / "model.safetensors")
        with pytest.raises(
            ValueError, match=r"tensors of model.layers.1.mlp.up_proj.weight don't fit together \(qweight"
        ):
            load(packed)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq"},
        GPTQ | {"desc_act": True},
        GPTQ | {"bits": 3},
        GPTQ | {"bits": "4"},
        GPTQ | {"group_size": 16},
        compressed(type="float"),
        compressed(num_bits=8, symmetric=False),
        compressed(actorder="group"),
        compressed(strategy="tensor"),
        compressed() | {"format": "int-quantized"},
        compressed() | {"config_groups": {}},
        compressed() | {"config_groups": {"group_0": None}},
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    with pytest.raises(
        ValueError, match=rf"quant_method '{config['quant_method']}'\) is not supported; supported are GPTQ"
    ):
        read_model_config(tmp_path)
