"""EngineArgs: the options of an engine that scripts pass, with vLLM's names and types."""

import json
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

from ..checkpoints.sizes import kv_bytes_per_token, parse_size
from ..checks import check_field, did_you_mean
from ..log import logger
from .config import DEFAULTS_ON_CUDA, GIB, RULES, EngineConfig, default_device
from .vllm_options import CompatibilityOptions, check_compatibility

DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's aliases


@dataclass
class EngineArgs(CompatibilityOptions):
    """The options of an engine, with vLLM's names and types. None means the engine's default."""

    model: str | Path = EngineConfig.model
    tokenizer: str | Path | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None  # a branch, a tag or a commit on the hub
    tokenizer_revision: str | None = None
    download_dir: str | Path | None = None
    hf_token: bool | str | None = None
    load_format: str = "auto"
    served_model_name: str | list[str] | None = None
    dtype: Any = "auto"  # a name or a torch.dtype
    seed: int | None = 0
    max_model_len: int | str | None = None  # "1k" is 1,000, "1K" is 1,024; -1 or "auto": the model's own limit
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | str | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None  # size of the KV cache in blocks
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | str | None = None
    kv_offloading_size: float | None = None  # size of the host's KV cache in GiB
    generation_config: str | Path = "auto"  # source of sampling defaults: the model (auto), none (vllm), or a folder
    override_generation_config: dict[str, Any] | None = None
    watermark: float | None = None
    attention_backend: str | None = None
    quantization: str | None = None  # "int8" or "int4"
    kv_cache_dtype: str = "auto"  # or "int8" or "fp8"
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    speculative_config: dict[str, Any] | None = None  # {"method": "ngram", ...}: see ../requests/speculation.py
    tensor_parallel_size: int = 1
    distributed_executor_backend: Any = None  # "mp" or "external_launcher"; ignored with one rank
    profiler_config: dict[str, Any] | None = None  # {"profiler": "cuda"}, or "torch" with "torch_profiler_dir"
    hf_overrides: dict[str, Any] | None = None  # entries of config.json, such as {"max_position_embeddings": 4096}
    # Options that vLLM does not have
    kv_cache_tokens: int | str | None = None
    kv_offloading_tokens: int | str | None = None
    offload_policy: str | None = None
    kv_disk_dir: str | Path | None = None
    kv_disk_size: float | None = None
    kv_disk_save: str | None = None
    tile_size: int | None = None
    device: Any = None  # a name or a torch.device; default: a GPU if there is one

    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Raise TypeError for an unknown option, with the nearest known name."""
        option_names = [option.name for option in fields(cls)]
        for name in options:
            if name not in option_names:
                raise TypeError(f"unknown option {name!r}{did_you_mean(name, option_names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise ValueError for the first option with a wrong value."""
        self.check()

    def check(self) -> None:
        """Raise ValueError for the first option with a wrong value. Scripts may set options after __init__()."""
        check_compatibility(self)
        for option in fields(self):
            if option.name in ("revision", "num_gpu_blocks_override", "kv_offloading_size"):
                check_field(option, getattr(self, option.name), RULES)
        if not isinstance(self.override_generation_config, dict | None):
            raise ValueError(f"override_generation_config must be a dict, got {self.override_generation_config!r}")
        self._unresolved_config("cpu")

    def check_single_process(self) -> None:
        """Raise ValueError under torchrun, where each rank runs the script and no one process gets all requests."""
        if self.tensor_parallel_size > 1 and self.distributed_executor_backend == "external_launcher":
            raise ValueError(
                "distributed_executor_backend must be 'mp' for AsyncLLM and a server, got 'external_launcher'"
            )

    def engine_config(self) -> EngineConfig:
        """Return the config, with the checkpoint's folder as its model, downloaded from the hub if needed.

        Raise ValueError for a wrong value or a missing checkpoint.
        """
        from ..checkpoints.hub import find_checkpoint, find_tokenizer

        self.check()
        config = self._unresolved_config(default_device())
        if self.gpu_memory_utilization is not None and config.device_type != "cuda" and not self._has_pool_size:
            logger.warning("gpu_memory_utilization has no effect on %s: set kv_cache_memory_bytes", config.device)
        hub_options: dict[str, Any] = {"cache_dir": self.download_dir, "token": self.hf_token}
        if self.load_format == "dummy":
            folder = find_tokenizer(config.model, self.revision, **hub_options)  # dummy weights are not downloaded
        else:
            folder = find_checkpoint(config.model, self.revision, self.hf_overrides, **hub_options)
        name = config.served_model_name or (config.model if str(folder) != config.model else None)
        config = replace(config, model=str(folder), served_model_name=name)  # metrics show the name that the user gave
        if self.kv_offloading_size is None:
            return config
        return replace(config, kv_offloading_tokens=self._host_tokens(config, self.kv_offloading_size))

    @property
    def _has_pool_size(self) -> bool:
        sizes = (self.kv_cache_tokens, self.kv_cache_memory_bytes, self.num_gpu_blocks_override)
        return any(size is not None for size in sizes)

    def _unresolved_config(self, device: str) -> EngineConfig:
        """Return the config with the model's name as given, without looking for the checkpoint."""
        values = {option.name: getattr(self, option.name) for option in fields(EngineConfig)}
        values["dtype"] = dtype_name(self.dtype)
        values["device"] = device if self.device is None else str(self.device)
        values |= {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        if isinstance(self.served_model_name, list):
            values["served_model_name"] = next(iter(self.served_model_name), None)
        values["max_model_len"] = None if self.max_model_len in (-1, "-1", "auto") else self.max_model_len
        values |= {name: parse_size(size) for name, size in values.items() if is_size(name) and isinstance(size, str)}
        if self.tensor_parallel_size == 1:
            del values["distributed_executor_backend"]
        if self.num_gpu_blocks_override is not None:
            if self.kv_cache_tokens is not None:
                raise ValueError("set the size of the KV cache only once, got num_gpu_blocks_override, kv_cache_tokens")
            values["kv_cache_tokens"] = self.num_gpu_blocks_override * (self.block_size or EngineConfig.block_size)
        if self.gpu_memory_utilization is not None:
            EngineConfig(gpu_memory_utilization=self.gpu_memory_utilization)  # must be valid even if it has no effect
            if self._has_pool_size or not values["device"].startswith("cuda"):
                values["gpu_memory_utilization"] = None  # another size takes precedence, as in vLLM
        defaults = DEFAULTS_ON_CUDA if values["device"].startswith("cuda") else {}
        return EngineConfig(**defaults | {name: value for name, value in values.items() if value is not None})

    def _host_tokens(self, config: EngineConfig, size: float) -> int:
        """Return how many tokens fit in `size` GiB of KV cache. Raise ValueError if kv_offloading_tokens is set."""
        from ..checkpoints.model_config import read_model_config

        if self.kv_offloading_tokens is not None:
            raise ValueError(
                "set the size of the host's KV cache only once, got kv_offloading_size, kv_offloading_tokens"
            )
        model = read_model_config(config.model, config.hf_overrides)
        itemsize = config.torch_dtype(model.dtype).itemsize
        return int(size * GIB) // kv_bytes_per_token(model, itemsize, config.kv_cache_dtype)

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Add each option to a script's parser: max_num_seqs becomes --max-num-seqs."""
        hints = get_type_hints(cls)
        for option in fields(cls):
            types = get_args(hints[option.name]) or (hints[option.name],)
            name = "--" + option.name.replace("_", "-")
            if bool in types and str not in types:
                parser.add_argument(name, default=option.default, action=BooleanOptionalAction)
            else:
                parse = next((kind for kind in (int, float) if kind in types and str not in types), str)
                is_object = any(get_origin(kind) is dict for kind in types)
                parser.add_argument(name, default=option.default, type=json_object if is_object else parse)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Build the options from parsed arguments. Arguments that are not options are ignored."""
        return cls(**{option.name: getattr(args, option.name) for option in fields(cls) if hasattr(args, option.name)})


@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False  # accepted; requests are not logged


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object from the command line. Raise ValueError for anything else.

    >>> json_object('{"max_position_embeddings": 4096}')
    {'max_position_embeddings': 4096}
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text} is not a JSON object")
    return value


def is_size(name: str) -> bool:
    """Return whether an option is a number of tokens or bytes, which may be given with a unit, such as 4k."""
    return name == "max_model_len" or name.endswith(("_tokens", "_bytes"))


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, given as a torch.dtype or as a name, which may be an alias.

    >>> import torch
    >>> dtype_name("half"), dtype_name(torch.float16), dtype_name("auto")
    ('float16', 'float16', 'auto')
    """
    name = str(dtype).removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)
