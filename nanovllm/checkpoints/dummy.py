"""A model of random weights, made on the device: what a step costs does not depend on what the weights are."""

from pathlib import Path

import torch

from ..llama import LlamaForCausalLM, ModelConfig
from ..llama.weights import NoInit, check_window

STD = 0.02  # of matrices and biases; weights of norms are 1


def dummy_model(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> LlamaForCausalLM:
    """What load_model() returns, without a file of weights. The same on each call, for one kind of device."""
    check_window(config.sliding_window, max_model_len, Path(folder))
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"), NoInit():
        model = LlamaForCausalLM(config, max_model_len)
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = torch.ones(parameter.shape, dtype=dtype, device=device)
        if not name.endswith("norm.weight"):
            state[name].normal_(std=STD, generator=generator)
    model.load_state_dict(state, assign=True, strict=False)  # a tied head is missing: it is listed once
    model.tie_weights()
    return model.to(device, dtype).eval().requires_grad_(False)
