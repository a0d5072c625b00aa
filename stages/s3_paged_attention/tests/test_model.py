"""The model: Llama on flat tokens. The reference is the architecture written out plainly."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ..llama import LlamaForCausalLM, ModelConfig, load_model
from ..llama.config import RopeScaling
from ..llama.model import rope_frequencies
from .helpers import CONFIG, attend_without_cache, next_logits, random_tensors, write_checkpoint

SHAPES = {
    "two heads share a KV head": {},
    "every head has its own KV head": {"num_key_value_heads": 4},
    "all heads share one KV head": {"num_key_value_heads": 1},
    "heads wider than hidden / heads": {"head_dim": 20},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "another epsilon and theta": {"rms_norm_eps": 0.1, "rope_theta": 100.0},
}
QWEN3 = {"model_type": "qwen3", "head_dim": 12, "rms_norm_eps": 0.1}
FAMILIES = {
    "Mistral has no biases, whatever config.json says": {
        "model_type": "mistral",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "Qwen 2.5 has biases on q, k, v": {"model_type": "qwen2"},
    "Qwen 3 has a norm on each head": QWEN3,
    "Qwen 3 with biases": QWEN3 | {"attention_bias": True},
}
LLAMA3 = RopeScaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def family_tensors(config: dict) -> dict[str, Tensor]:
    """Return random tensors of a family, by the names in its checkpoints."""
    family = config["model_type"]
    bias = {"mistral": False, "qwen2": True}.get(family, config.get("attention_bias"))
    tensors = random_tensors(
        config | {"attention_bias": bias, "mlp_bias": config.get("mlp_bias") and family == "llama"}
    )
    if family == "qwen2":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}
    if family == "qwen3":
        for i in range(config["num_hidden_layers"]):
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{i}.self_attn.{name}.weight"] = torch.linspace(0.5, 2.0, config["head_dim"])
    return tensors


def plain_logits(config: dict, tensors: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """Return the logits [vocab_size] after the last token, as in the papers: nothing fused, nothing flat."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    theta, eps = config.get("rope_theta", 10000.0), config.get("rms_norm_eps", 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return tensors[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def norm_if_any(x: Tensor, name: str) -> Tensor:
        return norm(x, name) if f"{name}.weight" in tensors else x

    def rotated(x: Tensor) -> Tensor:
        """Rotate each pair (i, i + head_dim / 2), a complex number, by position / theta^(2i / head_dim)."""
        pairs = torch.complex(*x.chunk(2, dim=-1))
        speeds = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
        angles = torch.arange(len(x)).unsqueeze(1) * speeds
        turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = tensors["model.embed_tokens.weight"][token_ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q = linear(y, f"{layer}.self_attn.q_proj").unflatten(1, (heads, head_dim))
        k, v = (linear(y, f"{layer}.self_attn.{n}_proj").unflatten(1, (kv_heads, head_dim)) for n in "kv")
        q, k = (norm_if_any(x, f"{layer}.self_attn.{n}_norm") for x, n in ((q, "q"), (k, "k")))
        out = attend_without_cache(i, rotated(q), rotated(k), v)
        x = x + linear(out.flatten(1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = linear(y, f"{layer}.mlp.gate_proj"), linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(gate * torch.sigmoid(gate) * up, f"{layer}.mlp.down_proj")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return norm(x, "model.norm")[-1] @ head.T


@pytest.mark.parametrize("changes", [*SHAPES.values(), *FAMILIES.values()], ids=[*SHAPES, *FAMILIES])
def test_logits_follow_the_architecture(tmp_path, changes):
    config = CONFIG | changes
    tensors = family_tensors(config)
    folder = write_checkpoint(tmp_path, config, tensors)
    model = load_model(folder, ModelConfig.from_folder(folder), torch.float32, torch.device("cpu"))
    token_ids = [1, 300, 5, 5, 260, 17, 319, 44]
    torch.testing.assert_close(
        next_logits(model, token_ids), plain_logits(config, tensors, token_ids), rtol=1e-4, atol=1e-4
    )


def test_place_in_the_batch_does_not_matter(model):
    """Two texts in one flat batch, with an `attend` that keeps them apart, give the same logits as each alone."""
    a, b = [1, 9, 8, 7], [1, 30, 31]

    def apart(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([attend_without_cache(layer, q[rows], k[rows], v[rows]) for rows in (slice(4), slice(4, 7))])

    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    with torch.inference_mode():
        logits = model.compute_logits(model(torch.tensor(a + b), positions, apart)[[3, 6]])
    torch.testing.assert_close(
        logits, torch.stack((next_logits(model, a), next_logits(model, b))), rtol=1e-5, atol=1e-5
    )


def test_only_distances_between_tokens_matter(model):
    """Moving a text by 20 positions leaves its logits the same."""
    token_ids = torch.tensor([1, 300, 5, 44])
    with torch.inference_mode():
        near, far = (
            model.compute_logits(model(token_ids, torch.arange(4) + shift, attend_without_cache)) for shift in (0, 20)
        )
        apart = model.compute_logits(model(token_ids, torch.tensor([0, 5, 6, 9]), attend_without_cache))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    assert (near - apart).abs().max() > 0.1, "positions change nothing at all"


def test_attend_that_changes_the_shape_is_an_error(model: LlamaForCausalLM):
    with pytest.raises(AssertionError, match="attend turned"):
        model(torch.tensor([1, 2]), torch.tensor([0, 1]), lambda layer, q, k, v: q[:1])


# Rotary angles


def test_rope_tables_have_max_model_len_rows(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG | {"max_position_embeddings": 1_000_000})
    model = load_model(folder, ModelConfig.from_folder(folder), torch.float32, torch.device("cpu"), max_model_len=10)
    assert model.model.rotary_emb.cos.shape == model.model.rotary_emb.sin.shape == (10, 8)


def test_llama3_scaling_divides_low_frequencies_and_keeps_high_ones():
    """More than 4 rotations in the original 64 positions are kept, less than 1 are divided by 8."""
    plain, scaled = rope_frequencies(16, 10000.0, None), rope_frequencies(16, 10000.0, LLAMA3)
    rotations = 64 * plain / (2 * math.pi)
    assert [round(float(t), 2) for t in rotations[:4]] == [10.19, 3.22, 1.02, 0.32]
    share = (rotations[1:3] - 1) / (4 - 1)
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[1:3], share * plain[1:3] + (1 - share) * plain[1:3] / 8)
    torch.testing.assert_close(scaled[3:], plain[3:] / 8)


def test_rope_tables_are_computed_in_float32(tmp_path):
    """bfloat16 cannot tell position 257 from 258, so only the cosines may be rounded to it."""
    config = CONFIG | {"max_position_embeddings": 512}
    folder = write_checkpoint(tmp_path, config)
    model = load_model(folder, ModelConfig.from_folder(folder), torch.bfloat16, torch.device("cpu"))
    cos, sin = model.model.rotary_emb(torch.tensor([257, 258]))
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert cos[:, 0, 0].tolist() == [torch.tensor(math.cos(p)).bfloat16().item() for p in (257, 258)]
