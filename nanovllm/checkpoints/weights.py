"""Load a checkpoint's tensors into a model and check each one; or make random weights.

The stages have a simpler loader, llama/weights.py, which does not quantize, and makes fewer checks.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..distributed.layers import local_config, local_slices, parallelize
from ..distributed.rank_group import RankGroup
from ..host_memory import MADV_COLLAPSE, allocate, default_pool_bytes, use_huge_pages
from ..llama import LlamaForCausalLM, ModelConfig
from ..llama.weights import FUSED, NoInit
from ..log import logger, with_progress
from ..quantization import PAD_TO, Format, Formats, Integers, QuantizedLinear, format_at_load, quantize_layers
from . import gguf
from .entries import Entries, shards_of
from .packed import PackedTensors

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # in old checkpoints; it follows from config.json
MAX_ROTARY_BYTES = 2**31  # 2 million positions of 128 numbers
STD = 0.02  # standard deviation of the random weights in dummy_model(); norms are ones
ALIGNMENT = 64  # bytes: each tensor begins on a cache line


def load_model(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    quantization: str | None = None,
    ranks: RankGroup | None = None,
) -> LlamaForCausalLM:
    """Load the model of a checkpoint in `dtype` on `device`, for texts of up to `max_model_len` tokens.

    With several `ranks`, read and load only this rank's part.
    With `quantization` ("int8" or "int4"), quantize the weights of linear layers one by one as they are read.
    Without it, integer weights in the checkpoint stay integers if a Format can represent them exactly.
    Raise ValueError, naming the file and the tensor, if a tensor is missing, unreadable, unknown or of a wrong shape.
    Raise ValueError, too, if the model's sliding window is shorter than `max_model_len` (default:
    max_position_embeddings), or if the rotary table for so many positions is too large. Names and shapes are checked
    before the model is built.
    """
    max_model_len = max_model_len or config.max_position_embeddings
    check_window(config.sliding_window, max_model_len, Path(folder))
    check_device(quantization, device)
    reader, ranks = TensorReader(Path(folder)), ranks or RankGroup()
    reader.check(config)
    check_rotary(config.head_dim, max_model_len, Path(folder))
    keeps_integers = has_quantized_layers(device) and ranks.world_size == 1
    stored = partial(stored_formats, reader, config) if keeps_integers else None
    formats_of = stored if quantization is None else format_at_load(quantization)
    model, region = empty_model(config, dtype, device, max_model_len, formats_of, ranks)
    if config.tie_word_embeddings:
        shape = (config.vocab_size, config.hidden_size)
        reader.check_tied_head(local_slices("lm_head.weight", shape, config, ranks))
    shapes = dict(weight_shapes(config))
    for name, tensor in with_progress(dict(weights_of(model)).items(), "loading weights"):
        parts = checkpoint_tensors(name, shapes.get(name, ()), config)  # (): a part of a MixedLinear
        if isinstance(tensor, QuantizedLinear) and quantization is None:
            tensor.store(chain.from_iterable(reader.integers(part) for part, _ in parts))
            continue
        if isinstance(tensor, QuantizedLinear):
            tensor.quantize([reader.read(part) for part, _ in parts])
            continue
        # copy straight into the model, so that no tensor exists twice
        fill(tensor, (reader.read(part, local_slices(part, shape, config, ranks)) for part, shape in parts))
    if reader.widened and quantization is None:
        wide, first, count = str(dtype).removeprefix("torch."), min(reader.widened), len(reader.widened)
        logger.warning("integers that cannot be kept are widened to %s: %s (%d tensors in total)", wide, first, count)
    use_huge_pages(region, MADV_COLLAPSE)  # in case the system gave no huge pages to new memory
    return model


def dummy_model(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    quantization: str | None = None,
    ranks: RankGroup | None = None,
) -> LlamaForCausalLM:
    """Build a model with random weights, or this rank's part. Calls on the same type of device make the same weights.

    The cost of a step does not depend on the values of weights, so random ones are good enough to measure it.
    """
    check_window(config.sliding_window, max_model_len, Path(folder))
    check_rotary(config.head_dim, max_model_len, Path(folder))
    check_device(quantization, device)
    generator = torch.Generator(device).manual_seed(0)
    formats_of = None if quantization is None else format_at_load(quantization)
    ranks = ranks or RankGroup()
    model, region = empty_model(config, dtype, device, max_model_len, formats_of, ranks)
    whole_shapes = {} if ranks.world_size == 1 else dict(weight_shapes(config))
    for name, tensor in weights_of(model):
        if isinstance(tensor, QuantizedLinear):
            shape = (tensor.out_features, tensor.in_features)
            tensor.quantize([torch.randn(shape, generator=generator, device=device) * STD])
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name in whole_shapes:
            parts = checkpoint_tensors(name, whole_shapes[name], config)
            random = torch.empty(whole_shapes[name], dtype=dtype, device=device).normal_(std=STD, generator=generator)
            pieces = zip(random.split([shape[0] for _, shape in parts]), parts, strict=True)
            fill(tensor, (piece[local_slices(part, shape, config, ranks)] for piece, (part, shape) in pieces))
        else:
            tensor.normal_(std=STD, generator=generator)
    use_huge_pages(region, MADV_COLLAPSE)
    return model


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    formats_of: Callable[[str], Format | Formats | None] | None,
    ranks: RankGroup,
) -> tuple[LlamaForCausalLM, Tensor]:
    """Return a model with uninitialized weights, or this rank's part, and the region of memory with all weights.

    A single region fills huge pages; small matrices allocated separately would not. Raise ValueError if the region
    does not fit in memory, or if the model cannot be quantized.
    """
    with torch.device("meta"), NoInit():  # shapes without memory
        model = LlamaForCausalLM(local_config(config, ranks.world_size), max_model_len)
        if ranks.world_size > 1:
            parallelize(model, ranks)
        if formats_of is not None:
            quantize_layers(model, formats_of, dtype)
    parameters = dict(model.named_parameters())  # a tied head is listed once
    dtypes = {name: dtype if weight.is_floating_point() else weight.dtype for name, weight in parameters.items()}
    num_bytes = {name: weight.numel() * dtypes[name].itemsize for name, weight in parameters.items()}
    sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in num_bytes.values()]
    try:
        region = allocate((sum(sizes),), torch.uint8, device)
    except RuntimeError:
        raise ValueError(f"{device} has no room for the weights, {sum(sizes):,} bytes") from None
    use_huge_pages(region)
    state = {
        name: part[: num_bytes[name]].view(dtypes[name]).view(parameters[name].shape)
        for name, part in zip(parameters, region.split(sizes), strict=True)
    }
    model.load_state_dict(state, assign=True, strict=False)  # only a tied head may be missing
    if not isinstance(model.lm_head, QuantizedLinear):
        model.tie_weights()
    return model.to(device, dtype).eval().requires_grad_(False), region


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each weight of the whole model, layer by layer, without building it."""
    hidden, intermediate, q = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    linears = {
        "self_attn.qkv_proj": (q + 2 * config.num_key_value_heads * config.head_dim, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.attention_output_bias),
        "mlp.gate_up_proj": (2 * intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape[:2] for name, shape in linears.items()}
    layer |= {f"{name}.bias": (outputs,) for name, (outputs, _, has_bias) in linears.items() if has_bias}
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    layer |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk" if config.qk_norm}
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        yield from ((f"model.layers.{i}.{name}", shape) for name, shape in layer.items())
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def fill(tensor: Tensor, pieces: Iterable[Tensor]) -> None:
    """Copy pieces into a tensor, stacked along dimension 0, and set the remaining rows to zero."""
    start = 0
    for piece in pieces:
        tensor[start : start + len(piece)].copy_(piece)
        start += len(piece)
    tensor[start:].zero_()


def weights_of(model: LlamaForCausalLM) -> Iterator[tuple[str, Tensor | QuantizedLinear]]:
    """Yield the name of each weight with its tensor, or with its layer if it is quantized. Skip a tied head.

    A part of a MixedLinear has the name of the checkpoint's tensor.
    """
    for name, parameter in model.named_parameters():
        module, _, attribute = name.rpartition(".")
        if attribute == "values":
            layer = model.get_submodule(module)
            assert isinstance(layer, QuantizedLinear)
            module, _, part = module.removesuffix(".head").partition(".parts.")
            names = [name for name, _ in checkpoint_tensors(f"{module}.weight", (), model.config)]
            yield names[int(part)] if part else f"{module}.weight", layer
        elif attribute != "scales":
            yield name, parameter


def check_window(sliding_window: int | None, max_model_len: int, folder: Path) -> None:
    """Raise ValueError if texts can outgrow the sliding window: in this engine, a token attends to all earlier ones."""
    if sliding_window is not None and sliding_window < max_model_len:
        raise ValueError(
            f"{folder / 'config.json'}: sliding_window {sliding_window} is not implemented; it needs a max_model_len "
            f"of at most {sliding_window}, got {max_model_len}"
        )


def check_rotary(head_dim: int, max_model_len: int, folder: Path) -> None:
    """Raise ValueError if the rotary table, float32 cos and sin of each position, is too large."""
    size, room = 2 * 4 * max_model_len * head_dim, default_pool_bytes(MAX_ROTARY_BYTES)
    if size > room:
        raise ValueError(f"{folder}: {max_model_len:,} positions need {size:,} bytes of {room:,}: lower max_model_len")


def check_device(quantization: str | None, device: torch.device) -> None:
    """Raise ValueError if quantized layers cannot run on a device."""
    if quantization is not None and not has_quantized_layers(device):
        raise ValueError(f"quantization {quantization!r} needs a CPU or CUDA, got device {device}")


def has_quantized_layers(device: torch.device) -> bool:
    """Return whether there are kernels for quantized layers on a type of device."""
    return device.type in ("cpu", "cuda")


def stored_formats(reader: "TensorReader", config: ModelConfig, layer: str) -> Format | Formats | None:
    """Return the Format that represents a layer's stored integers exactly, or one for each tensor that it stacks.

    Return None to widen them to floating point.
    """
    name = "model.embed_tokens" if layer == "lm_head" and config.tie_word_embeddings else layer
    parts = checkpoint_tensors(f"{name}.weight", (0, 0), config)
    if any(shape[0] % PAD_TO for _, shape in parts):
        return None  # kernels compute PAD_TO rows at a time
    formats = [(shape[0], format) for part, shape in parts if (format := reader.format(part)) is not None]
    if len(formats) < len(parts):
        return None
    return formats if len({format for _, format in formats}) > 1 else formats[0][1]


def checkpoint_tensors(name: str, shape: tuple[int, ...], config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the checkpoint's tensors that the parameter `name` stacks along dimension 0."""
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    for fused, parts in FUSED.items():
        if fused in name:
            num_rows = (config.intermediate_size,) * 2 if fused == "gate_up_proj" else (q, kv, kv)
            return [(name.replace(fused, part), (num_rows[i], *shape[1:])) for i, part in enumerate(parts)]
    return [(name, tuple(shape))]


class TensorFile(Protocol):
    """An open file of tensors. The safetensors library has no type annotations."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> "Sliceable | Tensor": ...


class Sliceable(Protocol):
    """A tensor in a file. Indexing it reads only that part."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


class TensorReader:
    """The tensors of a checkpoint by name, from a GGUF file, model.safetensors or the shards that an index lists.

    A tensor in safetensors is read through a new memory mapping: the pages that a mapping has read stay in memory until
    the mapping closes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}  # tensor -> file name
        self.widened: set[str] = set()  # integer tensors that were read as floating point
        index = folder / "model.safetensors.index.json"
        self._gguf = gguf.GgufTensors(folder) if (folder / gguf.TABLE_NAME).exists() else None
        if self._gguf:
            self._file_of = dict.fromkeys(self._gguf.keys(), gguf.LINK_NAME)
        elif (folder / "model.safetensors").is_file():
            self._file_of = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        elif index.exists():
            self._file_of = shards_of(index)
        else:
            raise ValueError(f"{folder} has no model.safetensors and no {index.name}")
        self._packed = PackedTensors.from_config(Entries.read_if_exists(folder / "config.json"), self._file_of)

    def format(self, name: str) -> Format | None:
        """Return the Format that represents a tensor's stored integers exactly, or None if there is none."""
        if self._gguf:
            return self._gguf.format(name) if name in self._file_of else None
        return self._packed.format if self._packed and name in self._packed else None

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError, naming the first wrong tensor, unless names and shapes are those of config.json's model.

        Only headers are read. A num_hidden_layers that is far too large costs no time: the first missing layer raises.
        """
        stored, known = self._shapes(), set()
        head = {"lm_head.weight": (config.vocab_size, config.hidden_size)}  # may be stored even if it is tied
        for weight, whole_shape in chain(weight_shapes(config), head.items() if "lm_head.weight" in stored else ()):
            for name, shape in checkpoint_tensors(weight, whole_shape, config):
                packed = self._packed if self._packed and name in self._packed else None
                known.update(packed.tensor_names(name) if packed else [name])
                actual = packed.shape(name, stored) if packed else stored.get(name)
                if actual is None:
                    raise ValueError(f"{self._folder}: tensor {name} {[*shape]} is missing")
                if [*actual] != [*shape]:
                    path = self._folder / self._file_of.get(name, "")
                    raise ValueError(
                        f"{path}: tensor {name} has shape {[*actual]}, but config.json requires {[*shape]}"
                    )
        extra = sorted(name for name in stored if name not in known and not name.endswith(IGNORED_SUFFIXES))
        if extra:
            unexpected = f"unexpected tensor {extra[0]} ({len(extra)} in total)"
            raise ValueError(f"{self._folder}: {unexpected}, which the model of config.json does not have")

    def _shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor, from the files' headers. Each file is opened once."""
        if self._gguf:
            return self._gguf.shapes()
        shapes, files = {}, {name: self._open(name) for name in dict.fromkeys(self._file_of.values())}
        for name, file_name in self._file_of.items():
            try:
                stored = files[file_name].get_slice(name)
            except SafetensorError as error:
                raise ValueError(f"{self._folder / file_name}: tensor {name} cannot be read: {error}") from None
            shapes[name] = [*stored.shape] if isinstance(stored, Tensor) else stored.get_shape()
        return shapes

    def integers(self, name: str) -> Iterator[Integers]:
        """Yield a tensor that has a Format, some rows at a time. Raise ValueError if it is unreadable."""
        if self._gguf:
            yield from self._gguf.integers(name)
        else:
            assert self._packed, f"{name} has no format"
            yield self._packed.integers(name, self._get)

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Return the tensor `name`, or a part of it, in floating point. Raise ValueError if it is unreadable.

        Of a floating-point tensor in safetensors, only that part is read from the file.
        """
        if self._packed and name in self._packed:
            self.widened.add(name)
            return self._packed.integers(name, self._get).floats()[part]
        if self._gguf and self._gguf.is_quantized(name):
            self.widened.add(name)
        tensor = self._open(self._file_of[name]).get_slice(name)[part] if part else self._get(name)
        if not tensor.is_floating_point():
            path = self._folder / self._file_of[name]
            raise ValueError(f"{path}: tensor {name} must be floating point, got {tensor.dtype}")
        return tensor

    def _get(self, name: str) -> Tensor:
        path = self._folder / self._file_of[name]
        try:
            tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path}: tensor {name} cannot be read: {error}") from None
        return tensor

    def check_tied_head(self, part: tuple[slice, ...]) -> None:
        """Raise ValueError if a model with tied embeddings stores a head that differs from them in `part`."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self._file_of:
            return
        weight = self.read(head, part)
        if not torch.equal(weight, self.read(embedding, part).to(weight.dtype)):
            path = self._folder / self._file_of[head]
            raise ValueError(f"{path}: {head} differs from {embedding}, but config.json has tie_word_embeddings true")

    def _open(self, file_name: str) -> TensorFile:
        path = self._folder / file_name
        if not path.is_file():
            raise ValueError(f"{self._folder}: {file_name} is missing, but the index lists it")
        if self._gguf:
            return self._gguf
        try:
            file: TensorFile = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
        return file
