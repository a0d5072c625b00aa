"""TieredBlockManager: a cached text that the device has no room for is kept on the host, and found there.

_save      a text that is about to be evicted from the device is stored
_restore   a text that is found on the host only is loaded before its sequence runs
"""

from itertools import takewhile

from .offload import HostPool
from .prefix_cache import CachedBlock, PrefixCache
from .sequence import Sequence
from .swapping_block_manager import SwappingBlockManager


class TieredBlockManager(SwappingBlockManager):
    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None, host_pool: HostPool) -> None:
        """Without a `prefix_cache` nothing is ever cached."""
        super().__init__(num_blocks, block_size, prefix_cache, host_pool)
        self.prefix_cache.blocks.on_evict = self._save

    def allocate(self, seq: Sequence) -> None:
        """As in BlockManager; what is cached on the host only is loaded, or, if that fails, is not a hit."""
        loaded = self._restore(super()._hits(seq)) if self.can_allocate(seq) else []
        super().allocate(seq)
        self._pool.give_back(loaded)

    def reset_prefix_cache(self) -> bool:
        """Of both tiers. False, and nothing happens, while somebody holds blocks or copies are on their way."""
        if self.is_copying or self._swapped or not super().reset_prefix_cache():
            return False
        self._host.forget_all()
        return True

    def _hits(self, seq: Sequence) -> list[CachedBlock]:
        """Of the beginning that is cached what is on the device.

        Behind the first text that is on the host only none counts: if that cannot be loaded, they are not hits either.
        """
        return list(takewhile(lambda hit: self.prefix_cache.blocks in hit.places, super()._hits(seq)))

    def _restore(self, hits: list[CachedBlock]) -> list[int]:
        """Load those that are on the host only. Returns the blocks of all, held once more: or those that are here
        might be evicted to make room for the others. None, and nothing changes, if all are here or the load fails.
        """
        here, host = self.prefix_cache.blocks, self.prefix_cache.host_blocks
        away = [hit for hit in hits if here not in hit.places]
        if not away:
            return []
        sources, kept = [hit.places[host] for hit in away], [hit.places[here] for hit in hits if here in hit.places]
        self._pool.share(kept)
        self._host.share(sources)
        try:
            targets, transfer = self._copy(self._host_pool.load, sources, self._pool)
        except BaseException as error:
            self._pool.give_back(kept)
            self._host.give_back(sources)
            if isinstance(error, RuntimeError):
                return []
            raise
        for text in away:
            here.add(text, targets[text.places[host]])
        self._leaving.append((transfer, self._host, sources))
        self._arriving |= dict.fromkeys(targets.values(), transfer)
        self.collect()
        self.prefix_cache.stats.restored += len(away) * self.block_size
        return kept + list(targets.values())

    def _save(self, text: CachedBlock) -> None:
        """A text is about to leave the device: the host keeps it, if it does not have it and there is room."""
        if self.prefix_cache.host_blocks in text.places or not self._host.num_free:
            return
        try:
            targets, transfer = self._copy(self._host_pool.store, [text.places[self.prefix_cache.blocks]], self._host)
        except RuntimeError:
            return
        transfer.hold_back_compute()  # the device's block is about to be written
        [block] = targets.values()
        self.prefix_cache.host_blocks.add(text, block)
        self._leaving.append((transfer, self._host, [block]))
        self.collect()
