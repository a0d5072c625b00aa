"""Helpers of the tests: tiny random Llamas as checkpoint folders, and the same models without a cache."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceTrainer
from torch import Tensor

from ..llama import LlamaForCausalLM
from ..sampling import SamplingParams
from ..sequence import Sequence

BOS, EOS = 1, 2
SENTENCES = [
    "Once upon a time there was a little rabbit.",
    "The little rabbit and the old fox sat in the wood.",
    "And that is the end of the story, said the fox.",
]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
}


def train_tokenizer() -> bytes:
    """Return a tokenizer.model with Llama's conventions: ids 0, 1, 2 are <unk>, <s>, </s>, and byte b is id 3 + b."""
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 10),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def byte_ids(text: str) -> list[int]:
    """Return one token for each byte."""
    return [3 + byte for byte in text.encode()]


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a Llama by their names in a checkpoint, as diverse as those of a trained one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for part, linears in (("self_attn", attention), ("mlp", mlp)):
            has_bias = config.get("attention_bias" if part == "self_attn" else "mlp_bias")
            for name, shape in linears.items():
                shapes[f"model.layers.{i}.{part}.{name}.weight"] = shape
                if has_bias:
                    shapes[f"model.layers.{i}.{part}.{name}.bias"] = shape[:1]
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    return {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    return noise if "embed" in name else noise * 1.5 * shape[-1] ** -0.5


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] = CONFIG,
    tensors: dict[str, Tensor] | None = None,
    tokenizer_model: bytes | None = None,
    num_shards: int = 0,
) -> Path:
    """Write a folder in Hugging Face's layout: one file of tensors, or `num_shards` of them and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer_model:
        (folder / "tokenizer.model").write_bytes(tokenizer_model)
    tensors = random_tensors(config) if tensors is None else tensors
    if not num_shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def attend_without_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within one sequence, and cache nothing: each token sees itself and all tokens before it.

    q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]
    """
    num_tokens, num_heads, head_dim = q.shape
    k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))  # [num_tokens, num_heads, head_dim]
    scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(dim=-1), v)


@torch.inference_mode()
def next_logits(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """Return the logits [vocab_size] of the token after `token_ids`, computed from the whole text."""
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend_without_cache)
    return model.compute_logits(hidden[-1:])[0]


def greedy_without_cache(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the most likely continuation, with the whole text computed for each token. Raise near a tie."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = next_logits(model, token_ids)
        best, second = logits.topk(2).values
        assert best - second > 1e-3 * logits.std(), f"a tie after {token_ids}: choose another prompt"
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


def make_sequence(request_id: str, num_prompt_tokens: int, max_tokens: int) -> Sequence:
    """Return a sequence of that many tokens, for tests that run no model."""
    return Sequence(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[7] * num_prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_token_ids=set(),
        max_num_tokens=num_prompt_tokens + max_tokens,
    )
