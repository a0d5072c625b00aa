"""PrefillProcess: a second engine, in a process of its own, that computes prompts and sends their blocks.

    this process                                                    the other process
    add_request      ---- a prompt, and the blocks it lacks --->    add_request, for a single token
    abort_request    ---- abort ------------------------------->    abort_request
    step: receive    <--- NUM_BLOCKS blocks, by their hashes ---    step: a prompt is computed
                          EOF: the other process has died

A hash depends on nothing but tokens, so it names the same block in both engines. No block table is sent. A block that
is lost is computed again, and one that comes twice is stored once.

The idea is from Splitwise (Patel et al. 2023, arXiv:2311.18677) and DistServe (Zhong et al. 2024, arXiv:2401.09670).
There, the two engines have GPUs of their own.
"""

import multiprocessing
import pickle
import signal
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .config import EngineConfig
from .prefix_cache import BlockHash
from .sampling import SamplingParams

NUM_BLOCKS = 4  # in a message: a step receives at most one, and should not take much longer


class Prefilled(NamedTuple):
    """Blocks of a prompt that the other engine has computed."""

    hashes: list[BlockHash]
    blocks: Tensor  # [len(hashes), num_layers, 2, block_size, num_kv_heads, head_dim], on the CPU
    request_id: str | None  # the request that needs no more blocks than these; None: more will come


class PrefillProcess:
    """The other engine, as this one sees it."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the process. It ends with close(), with this object or with this process."""
        context = multiprocessing.get_context("spawn")  # a fork would have torch's locks, but not its threads
        self._commands = context.Queue()  # has no limit, and a thread that writes: send() never waits
        self._commands.cancel_join_thread()  # nor does the end of this process, if nobody reads
        self._results, results = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(config, self._commands, results), daemon=True)
        process.start()
        results.close()  # the other process has the only one: if it dies, receive() raises EOFError
        self.close = weakref.finalize(self, process.kill)

    def send(self, request_id: str, token_ids: list[int], hashes: list[BlockHash]) -> None:
        """Ask for the blocks of a prompt that have these hashes."""
        self._commands.put((request_id, token_ids, hashes))

    def abort(self, request_id: str) -> None:
        """Ask for nothing more. The answer may be on its way."""
        self._commands.put((request_id, [], []))

    def receive(self, wait: bool) -> Prefilled | None:
        """Return the next message, or None if there is none. Or `wait` for it.

        Raise EOFError or OSError if the process has died and all messages have been received.
        """
        return pickle.loads(self._results.recv_bytes()) if wait or self._results.poll() else None


def run(config: EngineConfig, commands: Any, results: Any) -> None:
    """Be the other process."""
    from .engine import LLMEngine  # which imports this file

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process, which may go on
    serve(LLMEngine(replace(config, disaggregated_prefill=False, kv_offloading_tokens=0)), commands, results)


def serve(engine: Any, commands: Any, results: Any) -> None:
    """Compute prompts forever. When one is computed, send those of its blocks that are wanted.

    commands   get() waits for the next one, as send() and abort() have put it; empty() is True if there is none
    results    send_bytes(), once for each message, a pickled Prefilled

    Before each step, read all commands; wait for one if there is nothing to compute. A prompt has one message or more,
    of at most NUM_BLOCKS blocks each. Its last block is sent first, because a full host drops what has come first, and
    a prompt without its beginning is worth nothing. A prompt that can't be computed has one message without blocks, and
    an aborted one has none.
    """
    cached, wanted = engine.kv_cache_manager.pool.cached, dict[str, list[BlockHash]]()
    while True:
        while not wanted or not commands.empty():
            request_id, token_ids, hashes = commands.get()
            if token_ids:
                wanted[request_id] = hashes
                engine.add_request(request_id, token_ids, SamplingParams(temperature=0.0, max_tokens=1))
            elif engine.abort_request(request_id):
                del wanted[request_id]
        for output in engine.step():
            hashes = [each for each in reversed(wanted.pop(output.request_id)) if each in cached]
            for start in range(0, max(len(hashes), 1), NUM_BLOCKS):
                part = hashes[start : start + NUM_BLOCKS]
                blocks = engine.kv_cache.blocks[[cached[each] for each in part]].cpu()  # a copy: [len(part), ...]
                request_id = None if start + NUM_BLOCKS < len(hashes) else output.request_id
                results.send_bytes(pickle.dumps(Prefilled(part, blocks, request_id)))  # send() would share memory
