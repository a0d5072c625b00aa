"""llama.cpp: its C functions through llama-cpp-python, with a slot per sequence and admission at every step."""

import ctypes
import time
from collections import deque
from collections.abc import Callable
from typing import Any

Output = tuple[list[list[int]], list[list[float]]]  # the tokens of each request, and when each one arrived
Serve = Callable[[list[list[int]], list[int]], Output]

MAX_BATCH = 2048  # tokens in a call, the default of llama-server
F32 = 0  # the type of float32 keys and values; the default is float16
FILE_TYPES = {b"0": "float32", b"1": "float16", b"32": "bfloat16"}


def load(settings: Any) -> tuple[str, Serve]:
    """Return llama-cpp-python's version, and a function that serves requests."""
    import llama_cpp
    import numpy as np

    return llama_cpp.__version__, Context(llama_cpp, np, settings).serve


class Context:
    """A model in a GGUF file, its cache, and a loop of continuous batching."""

    def __init__(self, c: Any, np: Any, settings: Any) -> None:
        """Load the file. Raise ValueError if its weights are of another kind than in `settings`."""
        self._c, self._np, self._slots = c, np, settings.max_num_seqs
        self._max_batch = max(MAX_BATCH, settings.max_model_len)
        c.llama_backend_init()
        self._quiet = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self._quiet, ctypes.c_void_p())
        self._model = c.llama_model_load_from_file(settings.file.encode(), c.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {settings.file!r} as a GGUF file")
        file_type = ctypes.create_string_buffer(32)
        c.llama_model_meta_val_str(self._model, b"general.file_type", file_type, len(file_type))
        if (found := FILE_TYPES.get(file_type.value, "quantized")) not in ("quantized", settings.dtype):
            raise ValueError(f"{settings.file} has {found} weights, but this engine's are {settings.dtype}")
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch = settings.max_num_seqs * settings.max_model_len, self._max_batch
        params.n_seq_max, params.kv_unified = settings.max_num_seqs, settings.kv_unified
        params.n_threads = params.n_threads_batch = settings.threads
        if settings.dtype == "float32":
            params.type_k = params.type_v = F32
        self._context = c.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp could not create a context")
        self._memory = c.llama_get_memory(self._context)
        self._batch = c.llama_batch_init(self._max_batch, 0, 1)

    def serve(self, prompts: list[list[int]], lengths: list[int]) -> Output:
        """Serve all requests, at most one per slot at a time."""
        tokens, times = [list[int]() for _ in prompts], [list[float]() for _ in prompts]
        waiting, running, free = deque(range(len(prompts))), dict[int, int](), list(range(self._slots))
        started = time.perf_counter()
        while waiting or running:
            self._batch.n_tokens, last_rows = 0, {}
            for number, slot in running.items():
                position = len(prompts[number]) + len(tokens[number]) - 1
                last_rows[number] = self._add(tokens[number][-1:], position, slot)
            while waiting and free and self._batch.n_tokens + len(prompts[waiting[0]]) <= self._max_batch:
                number = waiting.popleft()
                running[number] = free.pop(0)
                last_rows[number] = self._add(prompts[number], 0, running[number])
            if self._c.llama_decode(self._context, self._batch):
                raise RuntimeError("llama_decode failed")
            for number, row in last_rows.items():
                tokens[number].append(self._likeliest(row))
            now = time.perf_counter() - started
            for number in last_rows:
                times[number].append(now)
                if len(tokens[number]) == lengths[number]:
                    free.append(running.pop(number))
                    self._c.llama_memory_seq_rm(self._memory, free[-1], -1, -1)
        return tokens, times

    def _add(self, token_ids: list[int], position: int, slot: int) -> int:
        """Add a sequence's tokens to the batch. Return the row of the last one, the only one with logits."""
        batch = self._batch
        for offset, token in enumerate(token_ids):
            row = batch.n_tokens
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position + offset, 1
            batch.seq_id[row][0], batch.logits[row] = slot, offset == len(token_ids) - 1
            batch.n_tokens += 1
        return int(batch.n_tokens) - 1

    def _likeliest(self, row: int) -> int:
        """Return the token with the largest logit."""
        pointer = self._c.llama_get_logits_ith(self._context, row)
        logits = (ctypes.c_float * self._vocab_size).from_address(ctypes.addressof(pointer.contents))
        return int(self._np.frombuffer(logits, self._np.float32).argmax())
