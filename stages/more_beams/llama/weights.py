"""load_model: load one or several safetensors files into the model."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

from .config import ModelConfig
from .model import LlamaForCausalLM

# parameter of the model: the checkpoint's tensors that it stacks, in order
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_model(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int | None = None
) -> LlamaForCausalLM:
    """Return the model of a checkpoint in `dtype` on `device`, for texts of up to `max_model_len` tokens.

    Raise ValueError for a missing or unknown tensor; torch raises RuntimeError for a tensor of the wrong shape.
    """
    files = [safe_open(path, framework="pt") for path in sorted(Path(folder).glob("model*.safetensors"))]
    file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    with torch.device("meta"), NoInit():  # shapes without memory
        model = LlamaForCausalLM(config, max_model_len)
    state = {}
    for name, _ in model.named_parameters():  # a tied head is listed once, as embed_tokens
        parts = parts_of(name)
        missing = [part for part in parts if part not in file_of]
        if missing:
            raise ValueError(f"{folder}: tensor {missing[0]} is missing")
        state[name] = torch.cat([file_of.pop(part).get_tensor(part).to(device, dtype) for part in parts])
    if config.tie_word_embeddings:
        file_of.pop("lm_head.weight", None)  # the same as embed_tokens
    unused = [name for name in file_of if not name.endswith("rotary_emb.inv_freq")]  # in old checkpoints
    if unused:
        raise ValueError(f"{folder}: the model of config.json has no tensor {unused[0]}")
    model.load_state_dict(state, strict=False, assign=True)  # only a tied head can be missing
    model.tie_weights()
    return model.to(device, dtype).eval().requires_grad_(False)


class NoInit(TorchFunctionMode):
    """A mode that skips torch.nn.init. Weights are replaced anyway, and its first call on the meta device is slow."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def parts_of(name: str) -> list[str]:
    """Return the names of the checkpoint's tensors that the parameter `name` stacks along dimension 0.

    >>> parts_of("mlp.gate_up_proj.weight")
    ['mlp.gate_proj.weight', 'mlp.up_proj.weight']
    """
    for fused, parts in FUSED.items():
        if fused in name:
            return [name.replace(fused, part) for part in parts]
    return [name]
