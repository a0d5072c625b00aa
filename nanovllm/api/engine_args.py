"""EngineArgs: the engine's options by vLLM's names, and what they are as core's EngineConfig."""

import re
import warnings
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

import torch

from ..checkpoints.hub import find_checkpoint
from ..core.checks import is_number
from ..core.config import POOL_SIZES, EngineConfig
from ..core.kv_cache import bytes_per_token
from ..core.llama import ModelConfig
from .only_in_vllm import OnlyInVllm, is_refused, refusal

GONE = ("swap_space", "use_v2_block_manager", "max_seq_len_to_capture")  # vLLM had them, and scripts still name them
DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
GIB = 2**30
MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class UnknownOption(TypeError, ValueError):
    """A name that is no option: Python's error for it, and a ValueError as all that a caller gets wrong here."""


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
    # nanovllm's own
    kv_cache_tokens: int | None = None
    kv_offloading_tokens: int | None = None
    offload_policy: str | None = None
    tile_size: int | None = None
    device: str | None = None  # default: the GPU where there is one

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Raises UnknownOption, which says the nearest name. What vLLM has given up is taken with one warning."""
        if gone := [name for name in GONE if options.pop(name, None) is not None]:
            warnings.warn(f"{', '.join(gone)} is gone from vLLM, and means nothing here", stacklevel=3)
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOption(f"there is no option {name!r}{nearest(name, known)}")
        return cls(**options)

    def check(self) -> None:
        """Raises ValueError for the first option that only vLLM has."""
        for field in fields(self):
            if is_refused(field.name, value := getattr(self, field.name)):
                raise ValueError(refusal(field.name, value))
        if (backend := self.kv_offloading_backend) != "native":
            raise ValueError(f"vLLM has kv_offloading_backend {backend!r}, nanovllm has not: leave it at 'native'")

    def engine_config(self) -> EngineConfig:
        """The model is then a folder: one of the hub is fetched. Raises ValueError for a value that cannot be."""
        self.check()
        given = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        given |= {"dtype": dtype_name(self.dtype), "device": self.device or default_device()}
        given["model"] = str(self.model) if isinstance(self.model, Path) else self.model
        given["max_model_len"] = None if self.max_model_len in (-1, "auto") else whole_number(self.max_model_len)
        given["kv_cache_memory_bytes"] = whole_number(self.kv_cache_memory_bytes)
        if self.num_gpu_blocks_override is not None:
            given["kv_cache_tokens"] = self._tokens_of_blocks(self.num_gpu_blocks_override)
        config = EngineConfig(**{name: each for name, each in without_useless(given).items() if each is not None})
        folder = find_checkpoint(config.model, self.revision, cache_dir=self.download_dir, token=self.hf_token)
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


def nearest(name: str, known: list[str]) -> str:
    """
    >>> nearest("tensor_paralel_size", ["seed", "tensor_parallel_size"])
    ": did you mean 'tensor_parallel_size'?"
    """
    found = get_close_matches(name, known, n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def dtype_name(dtype: Any) -> Any:
    """
    >>> dtype_name("half"), dtype_name(torch.float16), dtype_name("auto")
    ('float16', 'float16', 'auto')
    """
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    return DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype


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


def whole_number(value: Any) -> Any:
    """The number that a text such as "1k" stands for; what is no text stays as it is.

    >>> whole_number("1k"), whole_number("1K"), whole_number("25.6k"), whole_number("4096"), whole_number(None)
    (1000, 1024, 25600, 4096, None)
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", value.strip())
    if not found or ("." in found[1] and not found[2].islower()):  # a fraction of 1,024 would be no whole number
        raise ValueError(f"{value!r} is no whole number, such as 4096, 4k (4,000) or 4K (4,096)")
    return round(float(found[1]) * MULTIPLIERS[found[2]]) if found[2] else int(found[1])


def length(text: str) -> Any:
    return -1 if text == "auto" else whole_number(text)


def flag_kind(hint: Any, default: Any) -> dict[str, Any]:
    """What argparse must know of an option with this type and default."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if kinds[0] is bool or isinstance(default, bool):
        return {"action": BooleanOptionalAction}
    if kinds[0] is int or type(default) is int:
        return {"type": length if str in kinds else whole_number}
    return {"type": float if kinds[0] is float or isinstance(default, float) else str}
