"""Weights of a checkpoint into the model, each tensor checked and written to its place; or random ones.

llama/ has a loader of its own, for checkpoints that are known to be whole.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..llama import LlamaForCausalLM, ModelConfig
from ..llama.weights import FUSED, NoInit
from .entries import Entries, read_json

IGNORED = ("rotary_emb.inv_freq",)  # old checkpoints store what config.json already says
STD = 0.02  # of random matrices and biases; weights of norms are 1


def load_model(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
) -> LlamaForCausalLM:
    """Return the model of a checkpoint in `dtype` on `device`, for texts of up to `max_model_len` tokens.

    Raise ValueError, naming the file and the tensor, if a tensor is missing, misshapen, unreadable or unknown; and
    for a sliding window that a text of `max_model_len` tokens (None: max_position_embeddings) would outgrow.
    """
    max_model_len = max_model_len or config.max_position_embeddings
    check_window(config.sliding_window, max_model_len, Path(folder))
    with torch.device("meta"), NoInit():  # shapes without memory: the real tensors replace these
        model = LlamaForCausalLM(config, max_model_len)
    with TensorReader(Path(folder)) as reader:
        if config.tie_word_embeddings:
            reader.check_tied_head((config.vocab_size, config.hidden_size))
        state = {}
        for name, parameter in model.named_parameters():  # a tied head is listed once, as embed_tokens
            state[name] = torch.empty(parameter.shape, dtype=dtype, device=device)
            parts = checkpoint_tensors(name, parameter.shape, config)
            for rows, part in zip(state[name].split([shape[0] for _, shape in parts]), parts, strict=True):
                rows.copy_(reader.read(*part))  # to its place and dtype in one go: nothing is held twice
        reader.check_all_read()
    model.load_state_dict(state, assign=True, strict=False)  # only a tied head can be missing: read() raises
    model.tie_weights()
    return model.to(device, dtype).eval().requires_grad_(False)


def check_window(sliding_window: int | None, max_model_len: int, folder: Path) -> None:
    """Raise ValueError if a text can be longer than the window: `attend` lets a token see all tokens before it."""
    if sliding_window is not None and sliding_window < max_model_len:
        path = folder / "config.json"
        raise ValueError(
            f"{path}: sliding_window {sliding_window} is not implemented: it needs a max_model_len of at most "
            f"{sliding_window}, not {max_model_len}"
        )


def dummy_model(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> LlamaForCausalLM:
    """Return a model of random weights, the same on each call for one kind of device, made on the device.

    What a step costs does not depend on the weights.
    """
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


def checkpoint_tensors(name: str, shape: torch.Size, config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return the checkpoint's tensors (name, shape) that make up our parameter `name`, stacked along dimension 0."""
    for fused, parts in FUSED.items():
        if fused in name:
            rows = part_rows(fused, config)
            return [(name.replace(fused, part), (rows[i], *shape[1:])) for i, part in enumerate(parts)]
    return [(name, tuple(shape))]


def part_rows(fused: str, config: ModelConfig) -> tuple[int, ...]:
    """Return how many rows each tensor has in a fused one."""
    if fused == "gate_up_proj":
        return (config.intermediate_size,) * 2
    kv_rows = config.num_key_value_heads * config.head_dim
    return (config.num_attention_heads * config.head_dim, kv_rows, kv_rows)


class TensorReader:
    """Tensors by name from model.safetensors, or from the shards that model.safetensors.index.json lists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, safe_open] = {}
        self._file_of: dict[str, str] = {}  # tensor -> file name
        self._read: set[str] = set()

    def __enter__(self) -> "TensorReader":
        index = self._folder / "model.safetensors.index.json"
        if (self._folder / "model.safetensors").is_file():
            self._file_of = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        elif index.exists():
            weight_map = Entries(read_json(index), index).entries("weight_map")
            self._file_of = {name: weight_map.text(name) for name in weight_map.values}
        else:
            raise ValueError(f"{self._folder} has no model.safetensors and no {index.name}")
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor `name`. Raise ValueError if it is missing, unreadable, or not of `shape`."""
        if name not in self._file_of:
            raise ValueError(f"{self._folder}: tensor {name} {list(shape)} is missing")
        file_name = self._file_of[name]
        try:
            tensor = self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self._folder / file_name}: tensor {name} cannot be read: {error}") from None
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self._folder / file_name}: tensor {name} is {list(tensor.shape)}, config.json makes it {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{self._folder / file_name}: tensor {name} is {tensor.dtype}: only floats are run here")
        self._read.add(name)
        return tensor

    def check_tied_head(self, shape: tuple[int, int]) -> None:
        """Raise ValueError if a tied model has a head of its own: that contradicts config.json."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self._file_of:
            return
        weight = self.read(head, shape)
        if not torch.equal(weight, self.read(embedding, shape).to(weight.dtype)):
            path = self._folder / self._file_of[head]
            raise ValueError(f"{path}: {head} is not {embedding}, but config.json has tie_word_embeddings true")

    def check_all_read(self) -> None:
        """Raise ValueError if a tensor was not read: that means another architecture."""
        extra = sorted(name for name in self._file_of if name not in self._read and not name.endswith(IGNORED))
        if extra:
            what = f"{len(extra)} tensors that the model of config.json does not have"
            raise ValueError(f"{self._folder}: {what}, the first is {extra[0]}")

    def _open(self, file_name: str) -> safe_open:
        if file_name not in self._files:
            path = self._folder / file_name
            if not path.is_file():
                raise ValueError(f"{self._folder}: the index names {file_name}, which is not there")
            try:
                self._files[file_name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
        return self._files[file_name]
