"""EngineConfig: the options that an engine runs with. They are built from EngineArgs, the options that scripts pass.

    EngineArgs(model="org/name", max_model_len="4k", ...)  -- engine_config() -->  EngineConfig(model="/a/folder", ...)

A field with help text is also a command-line option. Importing this module does not import torch, so that
`nanovllm --help` appears immediately.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from ..checks import AT_LEAST_1, SEED, Rule, check_fields, cli_option
from ..requests.speculation import SpeculativeConfig
from .attention_backend import BACKENDS, backend_of

if TYPE_CHECKING:
    import torch

POOL_SIZES = ("kv_cache_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization")  # set at most one of these
POOL_SIZE_RULE: Rule = ("at least 1 and below 2**63", lambda size: 1 <= size < 2**63)
DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", *DTYPES, "int8", "fp8")
QUANTIZATIONS = ("int8", "int4")
KV_DISK_SAVE = ("prompt", "all", "evicted")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
LAUNCHERS = ("mp", "external_launcher")
RULES: dict[str, Rule] = {
    "max_model_len": AT_LEAST_1,
    "max_num_seqs": AT_LEAST_1,
    "max_num_batched_tokens": AT_LEAST_1,
    "watermark": ("at least 0 and below 1", lambda share: 0 <= share < 1),
    "block_size": AT_LEAST_1,
    "kv_offloading_tokens": ("at least 0 and below 2**63", lambda size: 0 <= size < 2**63),
    "kv_offloading_size": ("a number of GiB, at least 0", lambda size: size >= 0),
    "kv_disk_dir": ("the path of a folder", lambda path: path != ""),
    "kv_disk_size": ("a number of GiB, above 0", lambda size: size > 0),
    "tile_size": AT_LEAST_1,
    "kv_cache_tokens": POOL_SIZE_RULE,
    "kv_cache_memory_bytes": POOL_SIZE_RULE,
    "num_gpu_blocks_override": AT_LEAST_1,
    "gpu_memory_utilization": ("above 0 and at most 1", lambda share: 0 < share <= 1),
    "seed": SEED,
    "tensor_parallel_size": AT_LEAST_1,
    "distributed_executor_backend": (f"one of {', '.join(LAUNCHERS)}", lambda value: value in LAUNCHERS),
    "load_format": (f"one of {', '.join(LOAD_FORMATS)}", lambda value: value in LOAD_FORMATS),
    "profiler_config": (
        """{"profiler": "cuda"} or {"profiler": "torch", "torch_profiler_dir": FOLDER}""",
        lambda config: config == {"profiler": "cuda"} or is_torch_profiler(config),
    ),
}
SPECULATIVE_CONFIG_HELP = (
    "guess tokens from the text so far, and check them in one step; a JSON object such as "
    """'{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'"""
)
DEFAULTS_ON_CUDA = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
GIB = 2**30


@dataclass(frozen=True)
class EngineConfig:
    """The options that an engine runs with. EngineArgs.engine_config() builds one."""

    model: str = cli_option("models/storyteller", "checkpoint folder, or a model on the hub (ORG/NAME)")
    device: str = cli_option("cpu", "cpu, cuda or mps; default: a GPU if there is one")
    dtype: str = cli_option(
        "auto",
        "type of weights and KV cache; auto: float32 on a CPU, the checkpoint's own type elsewhere",
        ("auto", *DTYPES),
    )
    max_model_len: int | None = cli_option(
        None, "longest prompt plus output, in tokens; default: the model's own limit"
    )
    max_num_seqs: int = cli_option(32, "maximum number of running sequences; default: 32, or 256 with cuda")
    max_num_batched_tokens: int = cli_option(
        512, "maximum number of tokens per step; longer prompts are computed in chunks; default: 512, or 8192 with cuda"
    )
    watermark: float = cli_option(0.05, "share of blocks that stay free when a sequence is admitted while others run")
    block_size: int = cli_option(16, "slots in a block of the KV cache, each for one token")
    enable_prefix_caching: bool = cli_option(True, "keep computed blocks for later prompts that begin the same way")
    offload_policy: str = cli_option(
        "auto",
        "load cached blocks from the host or the disk, recompute them, or (auto) choose the faster way",
        ("auto", "load", "recompute"),
    )
    kv_offloading_tokens: int | None = cli_option(
        None, "size of the host's KV cache in tokens; 0: none; default: as large as the device's, up to 4 GiB"
    )
    kv_disk_dir: str | None = cli_option(
        None, "folder for blocks of the KV cache that outlive the engine, and that several engines may share"
    )
    kv_disk_size: float = cli_option(8.0, "limit of kv_disk_dir in GiB; the least recently used blocks are evicted")
    kv_disk_save: str = cli_option(
        "prompt", "blocks to keep in kv_disk_dir: those of prompts, all, or only evicted ones", KV_DISK_SAVE
    )
    tile_size: int | None = cli_option(
        None, "slots that plain attention reads at a time; default: 4096 on a CPU, 16384 elsewhere"
    )
    kv_cache_tokens: int | None = cli_option(None, "size of the KV cache in tokens")
    kv_cache_memory_bytes: int | None = cli_option(
        None, "size of the KV cache in bytes; default without a GPU: at most 1 GiB"
    )
    kv_cache_dtype: str = cli_option(
        "auto", "type of keys and values; int8, fp8: half the bytes of bfloat16; auto: same as --dtype", KV_CACHE_DTYPES
    )
    gpu_memory_utilization: float | None = cli_option(
        None, "share of the GPU's memory for weights and KV cache; default on a GPU: 0.9"
    )
    seed: int = cli_option(0, "seed for requests that do not set one")
    attention_backend: str = cli_option(
        "auto", "numba: CPU kernels; triton: GPU kernels; torch: plain operations; auto: the fastest one here", BACKENDS
    )
    quantization: str | None = cli_option(None, "weights in 8 or 4 bits, quantized while they load", QUANTIZATIONS)
    enforce_eager: bool = cli_option(False, "no CUDA graphs on a GPU; on a CPU, the same as --attention-backend torch")
    async_scheduling: bool | None = cli_option(
        None, "launch each step before reading the tokens of the previous one; default: only on a GPU"
    )
    speculative_config: dict[str, Any] | None = field(
        default=None, metadata={"help": SPECULATIVE_CONFIG_HELP, "flags": ("-sc",)}
    )
    tensor_parallel_size: int = cli_option(
        1, "processes that share the model, each with its own GPU or a part of the CPU's cores", flags=("-tp",)
    )
    distributed_executor_backend: str = "mp"  # "mp": the engine starts the ranks; "external_launcher": torchrun does
    load_format: str = "auto"  # "dummy": random weights of the shape in config.json
    tokenizer: str | None = None  # folder, or name on the hub; default: the model's
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False  # prompts are token ids, and outputs have no text
    download_dir: str | None = None  # the hub's cache; default: HF_HOME in the environment
    hf_token: bool | str | None = None  # default: HF_TOKEN in the environment
    generation_config: str = "auto"  # source of end-of-text tokens: the model's folder (auto, vllm) or this folder
    served_model_name: str | None = None  # the model's name in metrics
    profiler_config: dict[str, Any] | None = None  # how start_profile() records: see ../profiling.py
    hf_overrides: dict[str, Any] | None = None  # entries that replace those in the checkpoint's config.json

    def __post_init__(self) -> None:
        """Check the options. Raise ValueError with the name and value of an invalid option."""
        check_fields(self, RULES)
        given_sizes = [name for name in POOL_SIZES if getattr(self, name) is not None]
        if len(given_sizes) > 1:
            raise ValueError(f"set the size of the KV cache only once, got {', '.join(given_sizes)}")
        backend_of(self.attention_backend, self.enforce_eager)  # raises if these two contradict each other
        if self.kv_disk_dir is not None and not self.enable_prefix_caching:
            raise ValueError(f"kv_disk_dir {self.kv_disk_dir!r} needs enable_prefix_caching, got False")
        if self.kv_disk_dir is not None and self.offload_policy == "recompute":
            raise ValueError(f"kv_disk_dir {self.kv_disk_dir!r} needs offload_policy auto or load, got 'recompute'")
        self.speculation()  # raises for invalid entries
        if self.tensor_parallel_size > 1:
            self._check_parallel()

    def speculation(self) -> SpeculativeConfig | None:
        """Return speculative_config as an object, or None if it is unset. Raise ValueError for an invalid entry."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    @property
    def max_rows(self) -> int:
        """The maximum number of rows of logits that a step of decodes needs."""
        speculation = self.speculation()
        return self.max_num_seqs * (1 + (speculation.num_speculative_tokens if speculation else 0))

    def _check_parallel(self) -> None:
        """Raise ValueError for options that tensor parallelism does not support."""
        got = f"got {self.tensor_parallel_size}"
        if self.quantization is not None:
            raise ValueError(f"tensor_parallel_size must be 1 with quantization {self.quantization!r}, {got}")
        if self.device_type not in ("cpu", "cuda"):
            raise ValueError(f"tensor_parallel_size must be 1 on device {self.device!r}, {got}")

    def torch_device(self) -> "torch.device":
        """Return the device. Raise ValueError if this machine does not have it."""
        import torch

        try:
            device = torch.device(self.device)
            torch.ones(1, device=device).item()  # fails on "meta", whose tensors have no values
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ValueError(f"device {self.device!r} is not available: {str(error).splitlines()[0]}") from None
        return device

    def on_rank(self, local_rank: int) -> Self:
        """Return the options of a rank, given its number on this machine. With CUDA, each rank has its own device."""
        return replace(self, device=f"cuda:{local_rank}") if self.device_type == "cuda" else self

    def torch_dtype(self, checkpoint_dtype: str) -> "torch.dtype":
        """Return the dtype; "auto" is float32 on a CPU, and otherwise the checkpoint's.

        Raise ValueError if kv_cache_dtype is another dtype.
        """
        import torch

        name = self.dtype
        if name == "auto":
            name = checkpoint_dtype if self.device_type != "cpu" and checkpoint_dtype in DTYPES else "float32"
        if self.kv_cache_dtype not in ("auto", "int8", "fp8", name):
            names = f"auto, int8, fp8 or the dtype, {name}"
            raise ValueError(f"kv_cache_dtype must be {names}, got {self.kv_cache_dtype!r}")
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]

    @property
    def device_type(self) -> str:
        """The device without its number: "cuda" for "cuda:1"."""
        return self.device.partition(":")[0]

    @property
    def overlaps_steps(self) -> bool:
        """True if a step is launched before the previous step's tokens are read: async_scheduling or its default.

        With several ranks on a CPU, it is False, so that all ranks are in the same step if one of them fails.
        """
        if self.tensor_parallel_size > 1 and self.device_type == "cpu":
            return False
        return self.device_type == "cuda" if self.async_scheduling is None else self.async_scheduling

    def tile_slots(self) -> int:
        """Return tile_size or its default. A GPU's tiles are larger, because each operation takes long to start."""
        return self.tile_size or (4096 if self.device_type == "cpu" else 16384)

    def resolve_max_model_len(self, max_position_embeddings: int) -> int:
        """Return max_model_len, or else the model's own limit. Raise ValueError if the model has too few positions."""
        if self.max_model_len is not None and self.max_model_len > max_position_embeddings:
            limit = f"the model has {max_position_embeddings} positions"
            raise ValueError(f"max_model_len is {self.max_model_len}, but {limit}")
        return self.max_model_len or max_position_embeddings


def is_torch_profiler(config: dict[str, Any]) -> bool:
    """Return whether `config` selects torch's profiler, and names a folder for its traces."""
    folder = config.get("torch_profiler_dir")
    return config == {"profiler": "torch", "torch_profiler_dir": folder} and isinstance(folder, str) and folder != ""


def default_device() -> str:
    """Return "cuda" on a machine with a GPU, and "cpu" on any other."""
    import torch

    return "cuda" if torch.cuda.is_available() else EngineConfig.device
