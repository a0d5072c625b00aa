"""Build the tiers of an engine: choose their sizes, and measure whether loads are worthwhile on this machine."""

from collections import abc
from contextlib import suppress
from dataclasses import dataclass

from ..distributed.rank_group import RankGroup
from ..engine.kv_cache import KVCache
from ..engine.observer import Observer
from ..engine.tier import Tier
from ..host_memory import default_pool_bytes
from ..llama import ModelConfig
from ..options.config import EngineConfig
from .agreed_tier import AgreedTier
from .block_files import open_files
from .cost_model import CostModel, HitPolicy, measure_disk
from .disk_tier import DiskTier
from .host_tier import MAX_DEFAULT_BYTES, HostTier
from .tiers import Tiers


@dataclass(frozen=True)
class TierParts:
    """The tiers of an engine and, under offload_policy "auto", the speeds that decide when to use them."""

    tier: Tier  # all tiers as one, for the block manager
    host: HostTier
    disk: DiskTier | None
    cost_model: CostModel | None  # the host's, as measured at the start
    disk_cost_model: CostModel | None
    hit_policy: HitPolicy | None

    @property
    def has_tier(self) -> bool:
        return self.host.num_blocks > 0 or self.disk is not None


def build_tiers(
    config: EngineConfig,
    model_config: ModelConfig,
    max_model_len: int,
    kv_cache: KVCache,
    ranks: RankGroup,
    observer: Observer,
    measure: abc.Callable[[], CostModel],
) -> TierParts:
    """Build the host's tier, and the disk's if kv_disk_dir is set.

    If no sequence can outgrow a block, the host's tier has no blocks and there is no disk tier: a hit needs a full
    block and one more token. Under "auto", call measure() if there may be a tier. Also measure the disk, unless its
    folder is read-only (because another machine fills it).
    """
    can_hit, cost_model, disk_cost_model = max_model_len > config.block_size, None, None
    num_host_blocks = max_host_blocks(config, kv_cache, ranks) if can_hit else 0
    is_auto, block_bytes = config.offload_policy == "auto", kv_cache.blocks[0].nbytes
    if is_auto and num_host_blocks > 0:
        cost_model = measure()
        [num_host_blocks] = ranks.minimum([num_host_blocks * cost_model.prefers_load(kv_cache.bytes_per_token)])
    files, disk, policy = None, None, None
    if can_hit and config.kv_disk_dir is not None:
        files = open_files(config, model_config, kv_cache.blocks, ranks.rank, ranks.world_size)
    if is_auto and files is not None:  # before DiskTier starts threads: measure() may raise
        cost_model = cost_model or measure()
        with suppress(OSError):
            disk_cost_model = measure_disk(cost_model, files.root, block_bytes)
    tier: Tier
    tier = host = HostTier(kv_cache.blocks, num_host_blocks, observer)
    if files is not None:
        disk = DiskTier(kv_cache.blocks, files, config.kv_disk_save, num_host_blocks, observer)
        tier = Tiers(host, disk, num_host_blocks)
    if cost_model is not None and (num_host_blocks > 0 or disk is not None):
        policy = HitPolicy(host, kv_cache, cost_model, disk_cost_model)
    if ranks.world_size > 1 and (num_host_blocks > 0 or disk is not None):
        tier = AgreedTier(tier, ranks)
    return TierParts(tier, host, disk, cost_model, disk_cost_model, policy)


def max_host_blocks(config: EngineConfig, kv_cache: KVCache, ranks: RankGroup) -> int:
    """Return the number of blocks that the host's tier has if loading is faster than computing.

    The default is the size of the device's pool, up to 4 GiB, or less if memory is short. Ranks agree on the minimum.
    """
    if config.offload_policy == "recompute" or not config.enable_prefix_caching:
        return 0
    if config.kv_offloading_tokens is not None:
        num_blocks = config.kv_offloading_tokens // config.block_size
    else:
        room = default_pool_bytes(MAX_DEFAULT_BYTES) // ranks.world_size  # ranks share the machine's memory
        num_blocks = min(kv_cache.num_blocks, room // kv_cache.blocks[0].nbytes)
    [num_blocks] = ranks.minimum([num_blocks])
    return num_blocks
