"""Build an engine from its options: checkpoint, pool, executor, tiers and scheduler, in that order."""

from collections import abc
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .backends.choice import choose_backend
from .checkpoints.hub import find_checkpoint, find_tokenizer
from .checkpoints.model_config import eos_token_ids
from .checkpoints.sizes import kv_bytes_per_token
from .checkpoints.tokenizer import HFTokenizer, load_tokenizer
from .checkpoints.weights import dummy_model, load_model
from .distributed.layers import local_config
from .distributed.rank_group import RankGroup
from .engine.block_manager import BlockManager
from .engine.core import Parts
from .engine.executor import Executor, Kernels
from .engine.input_processor import InputProcessor
from .engine.int8_blocks import int8_block_shape
from .engine.kv_cache import KVCache
from .engine.observer import Observers
from .engine.scheduler import Scheduler
from .host_memory import default_pool_bytes
from .llama import ModelConfig
from .options.config import EngineConfig
from .options.engine_args import EngineArgs
from .tally import Tally
from .tiers.cost_model import measure
from .tiers.setup import TierParts, build_tiers

DEFAULT_POOL_BYTES = 2**30
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9

ChooseExecutor = abc.Callable[[KVCache], tuple[Executor, Kernels]]  # builds an executor without loading weights


@dataclass(frozen=True)
class BuiltEngine:
    """The parts of an engine, and the attributes that LLMEngine exposes."""

    parts: Parts
    tiers: TierParts
    tally: Tally
    model_config: ModelConfig
    max_model_len: int
    tokenizer: HFTokenizer | None


def build(
    config: EngineConfig,
    model_config: ModelConfig,
    observers: abc.Iterable[object],
    choose_executor: ChooseExecutor | None,
    ranks: RankGroup,
) -> BuiltEngine:
    """Load the checkpoint, allocate the pools, and return the parts of the engine.

    Raise ValueError for an invalid checkpoint, or for an option that this machine doesn't support.
    """
    max_model_len = config.resolve_max_model_len(model_config.max_position_embeddings)
    tokenizer = tokenizer_of(config)
    kv_cache, executor, kernels = build_executor(config, model_config, max_model_len, choose_executor, ranks)
    if config.generation_config not in ("auto", "vllm"):
        model_config = replace(model_config, eos_token_ids=eos_token_ids(config.generation_config))
    speculation = config.speculation()
    input_processor = InputProcessor(model_config, tokenizer, max_model_len, config.seed, speculation)
    all_observers = Observers()
    num_measured_tokens = min(config.max_num_batched_tokens, max_model_len - 1, kv_cache.num_blocks * config.block_size)
    minimum = ranks.minimum if config.kv_disk_dir is None else None
    measure_speeds = partial(measure, kv_cache, executor, input_processor, num_measured_tokens, minimum)
    tiers = build_tiers(config, model_config, max_model_len, kv_cache, ranks, all_observers, measure_speeds)
    num_draft_tokens = speculation.num_speculative_tokens if speculation else 0
    tally = Tally(max_model_len, config.block_size, config.enable_prefix_caching, tiers.has_tier, num_draft_tokens)
    for observer in (tally, *observers, *([tiers.hit_policy] if tiers.hit_policy else [])):
        all_observers.append(observer)
    manager = BlockManager(
        kv_cache.num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        tiers.tier,
        all_observers,
        ranks.minimum if tiers.has_tier else list,
        tiers.hit_policy.num_worth_loading if tiers.hit_policy else len,
    )
    scheduler = Scheduler(config, manager, all_observers)
    parts = Parts(config, ranks, input_processor, kv_cache, executor, kernels, manager, scheduler, all_observers)
    return BuiltEngine(parts, tiers, tally, model_config, max_model_len, tokenizer)


def build_executor(
    config: EngineConfig,
    model_config: ModelConfig,
    max_model_len: int,
    choose_executor: ChooseExecutor | None,
    ranks: RankGroup,
) -> tuple[KVCache, Executor, Kernels]:
    """Load the weights, then allocate a pool in the remaining memory. With `choose_executor`, load no weights."""
    rank_config = local_config(model_config, ranks.world_size)  # with only this rank's heads
    if config.kv_cache_dtype == "int8":
        int8_block_shape(rank_config, config.block_size)  # raises before the weights are read
    device, dtype = config.torch_device(), config.torch_dtype(model_config.dtype)
    model = None
    if choose_executor is None:
        load = dummy_model if config.load_format == "dummy" else load_model
        model = load(config.model, model_config, dtype, device, max_model_len, config.quantization, ranks)
    [num_blocks] = ranks.minimum([num_blocks_for(config, rank_config, max_model_len, device)])  # after loading weights
    kv_cache = KVCache(rank_config, num_blocks, config.block_size, dtype, device, config.kv_cache_dtype)
    if choose_executor is not None:
        return kv_cache, *choose_executor(kv_cache)
    assert model is not None, "weights are loaded unless `choose_executor` is given"
    executor, kernels = choose_backend(
        model,
        kv_cache,
        config.tile_slots(),
        max_model_len,
        config.max_rows,
        config.attention_backend,
        config.enforce_eager,
        ranks,
    )
    return kv_cache, executor, kernels


def num_blocks_for(config: EngineConfig, model: ModelConfig, max_model_len: int, device: torch.device) -> int:
    """Return the size of the pool in blocks. Raise ValueError if no block fits. Call this after loading the weights.

    By default, weights and pool take 90% of a GPU's memory, and the rest is left for activations. Without a GPU, the
    ranks' pools take 1 GiB together, or less if max_num_seqs sequences cannot fill them or if memory is short.
    """
    bytes_per_token = kv_bytes_per_token(model, config.torch_dtype(model.dtype).itemsize, config.kv_cache_dtype)
    if config.kv_cache_tokens is not None:
        pool_bytes = config.kv_cache_tokens * bytes_per_token
    elif config.kv_cache_memory_bytes is not None:
        pool_bytes = config.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        utilization = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        pool_bytes = int(utilization * total) - (total - free)
    elif config.gpu_memory_utilization is not None:
        raise ValueError(f"gpu_memory_utilization needs a GPU, got device {device.type}: set kv_cache_tokens instead")
    else:
        max_slots = config.max_num_seqs * (max_model_len + config.block_size - 1)  # + a partial last block
        pool_bytes = default_pool_bytes(DEFAULT_POOL_BYTES) // config.tensor_parallel_size  # the ranks share the memory
        pool_bytes = min(pool_bytes, max_slots * bytes_per_token)
    num_slots = max(pool_bytes, 0) // bytes_per_token
    if num_slots < config.block_size:
        raise ValueError(f"the pool must have at least one block of {config.block_size} slots, got {num_slots} slots")
    return num_slots // config.block_size


def with_checkpoint_folder(config: EngineConfig) -> EngineConfig:
    """Return the config with the checkpoint's folder as its model, downloaded from the hub if needed.

    With dummy weights, return the config unchanged, because there are no weights to find.
    """
    if config.load_format == "dummy":
        return config
    hub_options: dict[str, Any] = {"cache_dir": config.download_dir, "token": config.hf_token}
    return replace(config, model=str(find_checkpoint(config.model, hf_overrides=config.hf_overrides, **hub_options)))


def start_ranks(
    config: EngineConfig, model_config: ModelConfig, run_rank: abc.Callable[[EngineConfig, RankGroup], None]
) -> RankGroup:
    """Start or join the group of ranks, and return it. A rank that is started here calls `run_rank`.

    Raise ValueError if the model cannot be split, or if there are too few GPUs.
    """
    size, device = config.tensor_parallel_size, config.device_type
    local_config(model_config, size)
    if size == 1:
        return RankGroup()
    if config.distributed_executor_backend == "external_launcher":
        return RankGroup.join(size, device)
    if device == "cuda" and size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size must be at most {torch.cuda.device_count()}, the number of GPUs, got {size}"
        )
    return RankGroup.start(size, device, partial(run_rank, config))


def tokenizer_of(config: EngineConfig | EngineArgs) -> HFTokenizer | None:
    """Return the tokenizer that `config` names, or else the checkpoint's, or None with skip_tokenizer_init.

    A checkpoint without a tokenizer gives None. Raise ValueError if the tokenizer that `config` names is missing.
    """
    if config.skip_tokenizer_init:
        return None
    if not config.tokenizer:
        return load_tokenizer(config.model)
    folder = find_tokenizer(
        config.tokenizer, config.tokenizer_revision, cache_dir=config.download_dir, token=config.hf_token
    )
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"tokenizer {str(config.tokenizer)!r} has no tokenizer.json and no tokenizer.model")
    return tokenizer
