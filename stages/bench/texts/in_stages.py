"""The situations of the texts' programs in the stages' own block managers."""

from typing import Any

from stages.bench.engines import part, silent
from stages.bench.texts import attempt, sequence


def block_manager(name: str, num_blocks: int, block_size: int = 16, **options: Any) -> Any:
    """Return the block manager of a stage."""
    return part(name, "block_manager").BlockManager(num_blocks, block_size, observer=silent(name), **options)


def free_after_refusal() -> int:
    """Request 6 blocks from stage 2's pool of 4. Return the free blocks after the error."""
    manager = block_manager("s2", 4)
    attempt(lambda: manager.allocate(sequence("s2", "a", [1] * 96)))
    return len(manager.pool.free)


def forked(num_tokens: int, num_forks: int) -> tuple[Any, list[Any]]:
    """Return stage 5's manager, and a sequence with its forks."""
    manager = block_manager("s5", 64)
    parent, *children = (sequence("s5", str(n), [1] * num_tokens) for n in range(num_forks + 1))
    manager.allocate(parent)
    parent.num_computed_tokens = num_tokens
    for child in children:
        manager.fork(parent, child)
    return manager, [parent, *children]


def append(manager: Any, seq: Any) -> None:
    """Append a token to a sequence, and a slot."""
    seq.token_ids.append(1)
    manager.append_slot(seq)


def forked_and_appended(num_tokens: int, num_forks: int) -> list[Any]:
    """Fork a sequence in stage 5, and let all owners append a token. Return the owners."""
    manager, seqs = forked(num_tokens, num_forks)
    for seq in seqs:
        append(manager, seq)
    return seqs


def prefix_cache(num_blocks: int) -> Any:
    """Return stage 6's manager, with its cache."""
    return block_manager("s6", num_blocks, enable_caching=True)


def admit(manager: Any, tokens: list[int]) -> Any:
    """Allocate as stage 6's scheduler does, with the hits. Return the sequence."""
    seq = sequence("s6", "a", tokens)
    manager.allocate(seq, manager.find_hits(seq))
    return seq


def serve(manager: Any, tokens: list[int]) -> None:
    """Admit a sequence, compute its prompt, and free it."""
    seq = admit(manager, tokens)
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_blocks(seq, seq.num_tokens)
    manager.free(seq)
