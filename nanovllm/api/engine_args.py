"""EngineArgs: the engine's options by vLLM's names, and what they are as core's EngineConfig."""

import warnings
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

import torch

from ..checkpoints.hub import find_checkpoint, find_tokenizer
from ..engine.checks import is_number
from ..engine.config import POOL_SIZES, EngineConfig
from ..engine.kv_cache import bytes_per_token
from ..llama import ModelConfig
from .engine_args_checks import check_names, check_options
from .engine_args_reading import dtype_name, flag_kind, whole_number
from .only_in_vllm import OnlyInVllm, is_refused, refusal

GONE = ("swap_space", "use_v2_block_manager", "max_seq_len_to_capture")  # vLLM had them, and scripts still name them
GIB = 2**30


@dataclass
class EngineArgs(OnlyInVllm):
    """Raises ValueError for an option that only vLLM has. None stands for the engine's own default."""

    model: str | Path = EngineConfig.model
    tokenizer: str | Path | None = None  # of another folder, or name of the hub, than the model
    skip_tokenizer_init: bool = False  # prompts are token ids, and there is no text
    revision: str | None = None  # of a model of the hub: a branch, a tag or a commit
    tokenizer_revision: str | None = None
    download_dir: str | None = None  # the hub's cache, in place of the environment's HF_HOME
    hf_token: bool | str | None = None  # in place of the environment's HF_TOKEN
    load_format: str = "auto"  # "dummy": random weights of the shape that config.json says
    served_model_name: str | list[str] | None = None  # what metrics call the model
    dtype: Any = "auto"  # a name, or torch's own
    seed: int | None = 0
    max_model_len: int | str | None = None  # "1k" is 1,000, "1K" 1,024; -1 or "auto": as the model was trained for
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | str | None = None
    kv_offloading_size: float | None = None  # GiB on the host
    kv_offloading_backend: str = "native"
    generation_config: str | Path = "auto"  # the model's own; "vllm": none; or a folder
    override_generation_config: dict[str, Any] | None = None
    watermark: float | None = None
    attention_backend: str | None = None  # "auto", "numba", "triton", "torch"; kernels/options.py says which is which
    enforce_eager: bool = False  # on a GPU no graphs, on a CPU plain operations
    # nanovllm's own
    kv_cache_tokens: int | None = None
    kv_offloading_tokens: int | None = None
    offload_policy: str | None = None
    tile_size: int | None = None
    device: str | torch.device | None = None  # default: the GPU where there is one

    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Raises UnknownOption, which says the nearest name."""
        check_names(options, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def of(cls, **options: Any) -> Self:
        """The same for LLM: what vLLM has given up is taken with one warning."""
        if gone := [name for name in GONE if options.pop(name, None) is not None]:
            warnings.warn(f"{', '.join(gone)} is gone from vLLM, and means nothing here", stacklevel=3)
        return cls(**options)

    def check(self) -> None:
        """Raises ValueError for the first option that only vLLM has, or that has a wrong value."""
        for field in fields(self):
            if is_refused(field.name, value := getattr(self, field.name)):
                raise ValueError(refusal(field.name, value))
        if (backend := self.kv_offloading_backend) != "native":
            raise ValueError(f"vLLM has kv_offloading_backend {backend!r}, nanovllm has not: leave it at 'native'")
        check_options(self)

    def engine_config(self) -> EngineConfig:
        """The model is then a folder: one of the hub is fetched. Raises ValueError for a value that cannot be."""
        self.check()
        given = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        given |= {"dtype": dtype_name(self.dtype), "device": device_name(self.device)}
        given["model"] = str(self.model) if isinstance(self.model, Path) else self.model
        given["max_model_len"] = None if self.max_model_len in (-1, "auto") else whole_number(self.max_model_len)
        given["kv_cache_memory_bytes"] = whole_number(self.kv_cache_memory_bytes)
        if self.num_gpu_blocks_override is not None:
            given["kv_cache_tokens"] = self._tokens_of_blocks(self.num_gpu_blocks_override)
        config = EngineConfig(**{name: each for name, each in without_useless(given).items() if each is not None})
        find = find_tokenizer if self.load_format == "dummy" else find_checkpoint  # all but the weights
        folder = find(config.model, self.revision, cache_dir=self.download_dir, token=self.hf_token)
        config = replace(config, model=str(folder))
        if self.kv_offloading_size is None:
            return config
        return replace(config, kv_offloading_tokens=self._host_tokens(config))

    def _tokens_of_blocks(self, num_blocks: int) -> int:
        if self.kv_cache_tokens is not None:
            raise ValueError("the pool's size was given 2 times: num_gpu_blocks_override, kv_cache_tokens")
        return num_blocks * (self.block_size or EngineConfig.block_size)

    def _host_tokens(self, config: EngineConfig) -> int:
        """Tokens whose keys and values fill kv_offloading_size GiB."""
        if not is_number(self.kv_offloading_size) or self.kv_offloading_size < 0:
            raise ValueError(f"kv_offloading_size must be a number of GiB, 0 or above, not {self.kv_offloading_size!r}")
        if self.kv_offloading_tokens is not None:
            raise ValueError("the host's pool was given 2 times: kv_offloading_size, kv_offloading_tokens")
        model = ModelConfig.from_folder(config.model)
        return int(self.kv_offloading_size * GIB) // bytes_per_token(model, config.torch_dtype(model.dtype))

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """A flag for each option: max_num_seqs becomes --max-num-seqs."""
        hints = get_type_hints(cls)
        for option in fields(cls):
            if not option.name.startswith("_"):
                kind = flag_kind(hints[option.name], option.default)
                parser.add_argument("--" + option.name.replace("_", "-"), default=option.default, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)})


@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False  # nothing is logged


def check_is_args(args: Any) -> None:
    if not isinstance(args, EngineArgs):
        raise ValueError(f"engine_args must be EngineArgs, not {type(args).__name__}")


def device_name(device: Any) -> Any:
    return str(device) if isinstance(device, torch.device) else device or default_device()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else EngineConfig.device


def without_useless(given: dict[str, Any]) -> dict[str, Any]:
    """`given` without gpu_memory_utilization if another size is given, as in vLLM, or if there is no GPU to share."""
    sizes = [name for name in POOL_SIZES if given[name] is not None and name != "gpu_memory_utilization"]
    is_useless = bool(sizes) or str(given["device"]).partition(":")[0] != "cuda"
    if given["gpu_memory_utilization"] is None or not is_useless:
        return given
    EngineConfig(gpu_memory_utilization=given["gpu_memory_utilization"])  # it must be right all the same
    if not sizes:
        told = f"gpu_memory_utilization is for cuda: on {given['device']} kv_cache_memory_bytes gives the pool its size"
        warnings.warn(told, stacklevel=4)
    return given | {"gpu_memory_utilization": None}
