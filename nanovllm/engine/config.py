"""The engine's options: EngineConfig, which the engine runs with, and EngineArgs, which scripts give by vLLM's names.

    EngineArgs(model="org/name", max_model_len="4k", ...)  -- engine_config() -->  EngineConfig(model="/a/folder", ...)

torch, and the model with it, is imported once an option needs it: a command's --help must not wait for it.
"""

import re
import warnings
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args, get_type_hints

from ..backends.options import BACKENDS, backend_of
from ..backends.options import RULE as BACKEND
from .checks import AT_LEAST_1, SEED, TYPES, Rule, check_fields, is_number, is_whole, knob, nearest
from .vllm_options import OnlyInVllm, is_refused, refusal

if TYPE_CHECKING:
    import torch

POOL_SIZES = ("kv_cache_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization")  # one of them at most
POOL_SIZE: Rule = ("a whole number, at least 1 and below 2**63", lambda size: 1 <= size < 2**63)
DTYPES = ("float32", "bfloat16", "float16")
RULES: dict[str, Rule] = {
    "max_model_len": AT_LEAST_1,
    "max_num_seqs": AT_LEAST_1,
    "max_num_batched_tokens": AT_LEAST_1,
    "watermark": ("0 or above and below 1", lambda share: 0 <= share < 1),
    "block_size": AT_LEAST_1,
    "kv_offloading_tokens": ("a whole number, 0 or above and below 2**63", lambda size: 0 <= size < 2**63),
    "tile_size": AT_LEAST_1,
    "kv_cache_tokens": POOL_SIZE,
    "kv_cache_memory_bytes": POOL_SIZE,
    "seed": SEED,
    "gpu_memory_utilization": ("above 0 and at most 1", lambda share: 0 < share <= 1),
}
PLACE: Rule = ("a folder or a name of the hub", lambda value: isinstance(value, str | Path))
LOAD_FORMATS = ("auto", "safetensors", "dummy")
ARGS_RULES: dict[str, Rule] = {  # checked as soon as EngineArgs are made; EngineConfig checks the others
    "tokenizer": PLACE,
    "skip_tokenizer_init": TYPES[bool],
    "revision": TYPES[str],
    "tokenizer_revision": TYPES[str],
    "download_dir": ("a folder", PLACE[1]),
    "hf_token": ("a text, True or False", lambda value: isinstance(value, str | bool)),
    "load_format": (f"one of {', '.join(LOAD_FORMATS)}", lambda value: value in LOAD_FORMATS),
    "served_model_name": ("a text, or a list of texts, at least one", lambda value: is_name(value)),
    "num_gpu_blocks_override": ("a whole number, at least 1", lambda value: is_whole(value) and value >= 1),
    "generation_config": ("auto, vllm or a folder", lambda value: isinstance(value, str | Path)),
    "attention_backend": BACKEND,
    "enforce_eager": TYPES[bool],
    "override_generation_config": ("a dictionary", lambda value: isinstance(value, dict)),
}
NEVER_NONE = ("skip_tokenizer_init", "generation_config", "enforce_eager", "load_format")
GONE = ("swap_space", "use_v2_block_manager", "max_seq_len_to_capture")  # vLLM had them, and scripts still name them
GIB = 2**30
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's other names
MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class UnknownOption(TypeError, ValueError):
    """An unknown name of an option: Python's error for it, and a ValueError like all that a caller gets wrong here."""


@dataclass(frozen=True)
class EngineConfig:
    """The options that the engine itself runs with; EngineArgs makes one."""

    model: str = knob("models/storyteller", "checkpoint folder: config.json, *.safetensors, tokenizer.model")
    device: str = knob("cpu", "where the model and the pool are: cpu, cuda, mps")
    dtype: str = knob("auto", "auto is float32 on the CPU, elsewhere the checkpoint's", ("auto", *DTYPES))
    max_model_len: int | None = knob(None, "longest prompt + output, in tokens; default: as the model was trained for")
    max_num_seqs: int = knob(32, "most sequences that run at a time")
    max_num_batched_tokens: int = knob(512, "most tokens in a step: a longer prompt is computed in chunks")
    watermark: float = knob(0.05, "share of the blocks that admitting a sequence beside others leaves free")
    block_size: int = knob(16, "slots in a block of the KV pool")
    enable_prefix_caching: bool = knob(True, "keep computed blocks for prompts that begin alike")
    offload_policy: str = knob("auto", "whether evicted blocks come back from the host", ("auto", "load", "recompute"))
    kv_offloading_tokens: int | None = knob(None, "the host's pool in tokens; 0: none; default: KV pool's, to 4 GiB")
    tile_size: int | None = knob(None, "slots that attention reads at a time; default: 4096 on a CPU, else 16384")
    kv_cache_tokens: int | None = knob(None, "size of the KV pool in tokens (slots)")
    kv_cache_memory_bytes: int | None = knob(None, "size of the KV pool in bytes")
    gpu_memory_utilization: float | None = knob(None, "share of the GPU's memory for weights and pool (0.9 on cuda)")
    seed: int = knob(0, "what requests without a seed of their own draw theirs from")
    attention_backend: str = knob(
        "auto", "numba: kernels on a CPU; triton: on a GPU; torch: plain operations; auto: the best", BACKENDS
    )
    enforce_eager: bool = knob(False, "on a GPU no CUDA graphs; on a CPU as --attention-backend torch")
    load_format: str = "auto"  # "dummy": random weights of the shape that config.json says
    tokenizer: str | None = None  # of another folder, or name of the hub, than the model
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False  # prompts are token ids, and there is no text
    download_dir: str | None = None  # the hub's cache, in place of the environment's HF_HOME
    hf_token: bool | str | None = None  # in place of the environment's HF_TOKEN
    generation_config: str = "auto"  # what ends a text: the model's own; "vllm": likewise; or another folder's
    served_model_name: str | None = None  # what metrics call the model

    def __post_init__(self) -> None:
        """Raise ValueError, naming the option and its value."""
        check_fields(self, RULES | ARGS_RULES)
        given = [name for name in POOL_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"the pool's size was given {len(given)} times: {', '.join(given)}")

    def torch_device(self) -> "torch.device":
        """Return the device. Raise ValueError if this machine does not have it."""
        import torch

        try:
            device = torch.device(self.device)
            torch.ones(1, device=device).item()  # "meta" has room, but holds nothing
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ValueError(f"device {self.device!r} is not to be had here: {str(error).splitlines()[0]}") from None
        return device

    def torch_dtype(self, checkpoint_dtype: str) -> "torch.dtype":
        """Return the type of weights, keys and values; on a GPU "auto" is the checkpoint's."""
        import torch

        name = self.dtype
        if name == "auto":
            name = checkpoint_dtype if self.device_type != "cpu" and checkpoint_dtype in DTYPES else "float32"
        return getattr(torch, name)

    @property
    def device_type(self) -> str:
        """The device without its number: "cuda" for "cuda:1"."""
        return self.device.partition(":")[0]

    def slots_in_a_tile(self) -> int:
        """Return tile_size. A GPU takes longer to start an operation than to run it: there tiles are few and large."""
        return self.tile_size or (4096 if self.device_type == "cpu" else 16384)

    def longest_sequence(self, max_position_embeddings: int) -> int:
        """Return max_model_len, or the positions of the model. Raise ValueError if the model has too few."""
        if self.max_model_len is not None and self.max_model_len > max_position_embeddings:
            asked, positions = self.max_model_len, max_position_embeddings
            raise ValueError(f"max_model_len is {asked}, the model has {positions} positions")
        return self.max_model_len or max_position_embeddings


@dataclass
class EngineArgs(OnlyInVllm):
    """The options by vLLM's names. None stands for the engine's own default."""

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
    attention_backend: str | None = None  # one of backends.options.BACKENDS
    enforce_eager: bool = False  # on a GPU no graphs, on a CPU plain operations
    # nanovllm's own
    kv_cache_tokens: int | None = None
    kv_offloading_tokens: int | None = None
    offload_policy: str | None = None
    tile_size: int | None = None
    device: Any = None  # a name, or torch's own; default: the GPU where there is one

    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Raise UnknownOption, which says the nearest name."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOption(f"there is no option {name!r}{nearest(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make them for LLM, which takes options that vLLM has given up with one warning."""
        if gone := [name for name in GONE if options.pop(name, None) is not None]:
            warnings.warn(f"{', '.join(gone)} is gone from vLLM, and means nothing here", stacklevel=3)
        return cls(**options)

    def check(self) -> None:
        """Raise ValueError for the first option that only vLLM has, or that has a wrong value.

        EngineConfig checks the options that it has too.
        """
        for field in fields(self):
            if is_refused(field.name, value := getattr(self, field.name)):
                raise ValueError(refusal(field.name, value))
        if (backend := self.kv_offloading_backend) != "native":
            raise ValueError(f"vLLM has kv_offloading_backend {backend!r}, nanovllm has not: leave it at 'native'")
        for name, (words, holds) in ARGS_RULES.items():
            value = getattr(self, name)
            if (value is not None or name in NEVER_NONE) and not holds(value):
                raise ValueError(f"{name} must be {words}, not {value!r}")
        backend_of(self.attention_backend, self.enforce_eager)  # raises if the two contradict each other

    def engine_config(self) -> EngineConfig:
        """Return the config, its model a folder: one of the hub is fetched. Raise ValueError for a bad value."""
        from ..checkpoints.hub import find_checkpoint, find_tokenizer

        self.check()
        given = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        given |= {"dtype": dtype_name(self.dtype), "device": device_name(self.device)}
        for name in ("model", "tokenizer", "download_dir", "generation_config"):
            given[name] = str(given[name]) if isinstance(given[name], Path) else given[name]
        if isinstance(self.served_model_name, list):
            given["served_model_name"] = self.served_model_name[0]
        given["max_model_len"] = None if self.max_model_len in (-1, "auto") else whole_number(self.max_model_len)
        given["kv_cache_memory_bytes"] = whole_number(self.kv_cache_memory_bytes)
        if self.num_gpu_blocks_override is not None:
            given["kv_cache_tokens"] = self._tokens_of_blocks(self.num_gpu_blocks_override)
        config = EngineConfig(**{name: each for name, each in without_useless(given).items() if each is not None})
        find = find_tokenizer if self.load_format == "dummy" else find_checkpoint  # all but the weights
        folder = find(config.model, self.revision, cache_dir=self.download_dir, token=self.hf_token)
        name = config.served_model_name or (config.model if str(folder) != config.model else None)
        config = replace(config, model=str(folder), served_model_name=name)  # metrics show the name that was given
        if self.kv_offloading_size is None:
            return config
        return replace(config, kv_offloading_tokens=self._host_tokens(config))

    def _tokens_of_blocks(self, num_blocks: int) -> int:
        if self.kv_cache_tokens is not None:
            raise ValueError("the pool's size was given 2 times: num_gpu_blocks_override, kv_cache_tokens")
        return num_blocks * (self.block_size or EngineConfig.block_size)

    def _host_tokens(self, config: EngineConfig) -> int:
        """Return the tokens whose keys and values fill kv_offloading_size GiB."""
        from ..checkpoints.model_config import read_model_config
        from .kv_cache import bytes_per_token

        if not is_number(self.kv_offloading_size) or self.kv_offloading_size < 0:
            raise ValueError(f"kv_offloading_size must be a number of GiB, 0 or above, not {self.kv_offloading_size!r}")
        if self.kv_offloading_tokens is not None:
            raise ValueError("the host's pool was given 2 times: kv_offloading_size, kv_offloading_tokens")
        model = read_model_config(config.model)
        return int(self.kv_offloading_size * GIB) // bytes_per_token(model, config.torch_dtype(model.dtype))

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Add a flag for each option: max_num_seqs becomes --max-num-seqs."""
        hints = get_type_hints(cls)
        for option in fields(cls):
            if not option.name.startswith("_"):
                kind = flag_kind(hints[option.name], option.default)
                parser.add_argument("--" + option.name.replace("_", "-"), default=option.default, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Make them of parsed flags."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)})


@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False  # nothing is logged


def check_is_args(args: Any) -> None:
    """Raise ValueError unless `args` are EngineArgs."""
    if not isinstance(args, EngineArgs):
        raise ValueError(f"engine_args must be EngineArgs, not {type(args).__name__}")


def is_name(value: Any) -> bool:
    """Return whether `value` is a text, or a list of texts.

    >>> is_name("a"), is_name(["a", "b"]), is_name([])
    (True, True, False)
    """
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) for name in names)


def device_name(device: Any) -> Any:
    """Return the name of a device, which may be torch's own; of the default device for None."""
    import torch

    return str(device) if isinstance(device, torch.device) else device or default_device()


def default_device() -> str:
    """Return "cuda" on a machine with a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else EngineConfig.device


def dtype_name(dtype: Any) -> Any:
    """Return torch's name of a dtype.

    >>> import torch
    >>> dtype_name("half"), dtype_name(torch.float16), dtype_name("auto")
    ('float16', 'float16', 'auto')
    """
    import torch

    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    return DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype


def whole_number(value: Any) -> Any:
    """Return the number that a text such as "1k" stands for; other values stay as they are.

    >>> whole_number("1k"), whole_number("1K"), whole_number("25.6k"), whole_number("4096"), whole_number(None)
    (1000, 1024, 25600, 4096, None)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", value.strip())
    if not match or ("." in match[1] and not match[2].islower()):  # a fraction of 1,024 would be no whole number
        raise ValueError(f"{value!r} is no whole number, such as 4096, 4k (4,000) or 4K (4,096)")
    return round(float(match[1]) * MULTIPLIERS[match[2]]) if match[2] else int(match[1])


def length(text: str) -> Any:
    """Return the number of tokens that a flag says; -1 for "auto"."""
    return -1 if text == "auto" else whole_number(text)


def flag_kind(hint: Any, default: Any) -> dict[str, Any]:
    """Return what argparse must know of an option with this type and default."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if kinds[0] is bool or isinstance(default, bool):
        return {"action": BooleanOptionalAction}
    if kinds[0] is int or type(default) is int:
        return {"type": length if str in kinds else whole_number}
    return {"type": float if kinds[0] is float or isinstance(default, float) else str}


def without_useless(given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` without gpu_memory_utilization if another size is given, as in vLLM, or if there is no GPU."""
    sizes = [name for name in POOL_SIZES if given[name] is not None and name != "gpu_memory_utilization"]
    is_useless = bool(sizes) or str(given["device"]).partition(":")[0] != "cuda"
    if given["gpu_memory_utilization"] is None or not is_useless:
        return given
    EngineConfig(gpu_memory_utilization=given["gpu_memory_utilization"])  # it must be right all the same
    if not sizes:
        text = f"gpu_memory_utilization is for cuda: on {given['device']} kv_cache_memory_bytes gives the pool its size"
        warnings.warn(text, stacklevel=4)
    return given | {"gpu_memory_utilization": None}
