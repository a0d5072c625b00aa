"""*How PagedAttention Solves the Memory Fragmentation Problem*: its comparison in bytes, and threads."""

import threading

from nanovllm import LLMEngine
from nanovllm.options.config import EngineConfig
from notebooks.helpers.claims.programs import Case, attempt, sequence
from stages.bench.engines import silent
from stages.bench.models import STORYTELLER
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.block_pool import BlockPool

KB = 1024


def comparison(num_sequences: int = 2, num_tokens: int = 256, longest: int = 2048, token_bytes: int = 512 * KB) -> Case:
    """Compare reserved bytes with bytes in blocks, as the text prints them. The lengths are ours.

    A token of Llama-2-7B has 512 KB in fp16.
    """
    by_hand = [num_sequences * length * token_bytes for length in (longest, -(-num_tokens // 16) * 16)]
    slots = SlotManager(num_sequences * longest, "max_model_len", longest, silent("s1"))
    blocks = BlockManager(num_sequences * longest // 16, 16, silent("s2"))
    for i in range(num_sequences):
        slots.allocate(sequence("s1", str(i), [1] * num_tokens))
        blocks.allocate(sequence("s2", str(i), [1] * num_tokens))
    held = [manager.report().held * token_bytes for manager in (slots, blocks)]
    return Case(
        f"{num_sequences} sequences of {num_tokens} tokens, {token_bytes // KB} KB a token, at most {longest:,}. How "
        "many bytes are held?",
        *(f"{reserved / 2**30:g} GB reserved, {paged / 2**20:g} MB in blocks" for reserved, paged in (by_hand, held)),
    )


class TakenBetween(list[int]):
    """Free blocks, the last of which another thread takes after each look at their number."""

    def __len__(self) -> int:
        number = super().__len__()
        self.pop()
        return number


def threads() -> Case:
    """Let a second thread run between an allocator's check and its take. Let another one call the package's engine."""
    pool = BlockPool(2)
    pool.free = TakenBetween(pool.free)
    engine = LLMEngine(EngineConfig(model=str(STORYTELLER), kv_cache_tokens=512, attention_backend="torch"))
    engine.step()  # this thread owns it from now on
    answers = list[str]()
    thread = threading.Thread(target=lambda: answers.append(attempt(lambda: engine.add_request("0", [5]))))
    thread.start()
    thread.join()
    return Case(
        "Two threads share an allocator with 2 free blocks. One asks for both, and the other takes one in between.",
        f"without a lock: {attempt(lambda: pool.get_new_blocks(2))}",
        f"the package refuses: {answers[0]}",
    )


def cases() -> list[Case]:
    return [comparison(), threads()]
