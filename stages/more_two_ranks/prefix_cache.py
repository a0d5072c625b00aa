r"""Names for blocks: a hash of all tokens up to a block's end, by which a sequence finds blocks that it can reuse.

    the cat sat on (block 7) --- the mat and ate (block 2)      block size 4: a block's hash covers its own tokens
                             \-- a warm stone by (block 5)      and the hash of the block before it

The keys and values of a token depend on all tokens before it, so equal tokens after different prefixes need different
blocks. BlockPool has the index from hashes to blocks. vLLM's automatic prefix caching works this way; RadixAttention
keeps the same information in a tree (Zheng et al. 2023, arXiv:2312.07104).
"""

import hashlib
from array import array
from dataclasses import dataclass

BlockHash = bytes  # a digest that no two prefixes share in practice, so tokens are never compared


def hash_block_tokens(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    """Return the hash of a full block, which identifies its tokens and all tokens before them.

    `parent` is the hash of the block before it, or b"" for the first block. Any other hash function would do, as
    long as different prefixes get different hashes.

    >>> hash_block_tokens(b"", [1, 2]) == hash_block_tokens(b"", [1, 2])
    True
    >>> hash_block_tokens(hash_block_tokens(b"", [9]), [1, 2]) == hash_block_tokens(b"", [1, 2])
    False
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def extend_block_hashes(hashes: list[BlockHash], token_ids: list[int], block_size: int) -> None:
    """Append to `hashes` until each full block of `token_ids` has one. Existing hashes are kept.

    >>> hashes: list[BlockHash] = []
    >>> extend_block_hashes(hashes, [1, 2, 3, 4, 5], block_size=2)
    >>> len(hashes), hashes[1] == hash_block_tokens(hashes[0], [3, 4])
    (2, True)
    """
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        hashes.append(hash_block_tokens(hashes[-1] if hashes else b"", token_ids[end - block_size : end]))


@dataclass
class PrefixCacheStats:
    """The tokens of all admitted sequences, and how many were cached. A readmitted sequence counts again."""

    queries: int = 0
    hits: int = 0
