r"""The prefix cache: how a block's text is named, so that whoever begins with the same text finds it.

    the cat sat on (block 7) --- the mat and ate (block 2)      block size 4: each block is named by the hash of its
                             \-- a warm stone by (block 5)      tokens and of all before them, a chain of hashes

Keys and values of a token depend on all tokens before it, so equal tokens after different prefixes are different
blocks. The index from names to blocks is BlockPool's. vLLM's automatic prefix caching (2024) works like this; as a
tree, it is RadixAttention (Zheng et al. 2023, arXiv:2312.07104).
"""

import hashlib
from array import array
from dataclasses import dataclass

BlockHash = bytes  # 16 bytes of blake2b: two texts with one hash are not to be expected, so no tokens are compared


def hash_block_tokens(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    """Return the hash of a block's tokens and of all before them: `parent` is the hash of these, b"" if there are none.

    >>> hash_block_tokens(b"", [1, 2]) == hash_block_tokens(b"", [1, 2])
    True
    >>> hash_block_tokens(hash_block_tokens(b"", [9]), [1, 2]) == hash_block_tokens(b"", [1, 2])
    False
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def extend_block_hashes(hashes: list[BlockHash], token_ids: list[int], block_size: int) -> None:
    """Append to `hashes` until there is one for each full block of `token_ids`; what is known stays.

    >>> hashes: list[BlockHash] = []
    >>> extend_block_hashes(hashes, [1, 2, 3, 4, 5], block_size=2)
    >>> len(hashes), hashes[1] == hash_block_tokens(hashes[0], [3, 4])
    (2, True)
    """
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        hashes.append(hash_block_tokens(hashes[-1] if hashes else b"", token_ids[end - block_size : end]))


@dataclass
class PrefixCacheStats:
    """In tokens, of all admissions since the start or the last reset."""

    queries: int = 0
    hits: int = 0
