"""llama.cpp: its C functions as llama-cpp-python binds them, a slot for each sequence, admission at every step."""

import ctypes
import time
from collections import deque
from collections.abc import Callable
from typing import Any

Made = tuple[list[list[int]], list[list[float]]]  # of each request its tokens, and when each came
Serve = Callable[[list[list[int]], list[int]], Made]

MAX_BATCH = 2048  # tokens in a call, the default of its server
F32 = 0  # the type of keys and values for float32; else its default, half of that


def load(settings: Any) -> tuple[str, Serve]:
    import llama_cpp
    import numpy as np

    context = Context(llama_cpp, np, settings)
    return llama_cpp.__version__, context.serve


class Context:
    def __init__(self, c: Any, np: Any, settings: Any) -> None:
        """Raises ValueError if the file is no model, or is one of another type."""
        self._c, self._np, self._slots = c, np, settings.max_num_seqs
        c.llama_backend_init()
        self._quiet = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self._quiet, ctypes.c_void_p())
        self._model = c.llama_model_load_from_file(settings.file.encode(), c.llama_model_default_params())
        if not self._model:
            raise ValueError(f"{settings.file!r} is no GGUF file that llama.cpp loads")
        self._check_type(settings)
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._context = c.llama_init_from_model(self._model, self._params(settings))
        if not self._context:
            raise ValueError("llama.cpp could not make a context")
        self._memory = c.llama_get_memory(self._context)
        self._max_batch = max(MAX_BATCH, settings.max_model_len)
        self._batch = c.llama_batch_init(self._max_batch, 0, 1)

    def _params(self, settings: Any) -> Any:
        params = self._c.llama_context_default_params()
        params.n_ctx = settings.max_num_seqs * settings.max_model_len
        params.n_batch = max(MAX_BATCH, settings.max_model_len)
        params.n_seq_max = settings.max_num_seqs
        params.n_threads = params.n_threads_batch = settings.threads
        if settings.dtype == "float32":
            params.type_k = params.type_v = F32
        return params

    def _check_type(self, settings: Any) -> None:
        text = ctypes.create_string_buffer(32)
        self._c.llama_model_meta_val_str(self._model, b"general.file_type", text, len(text))
        types = {b"0": "float32", b"1": "float16", b"32": "bfloat16"}
        if (found := types.get(text.value, "quantized")) != settings.dtype:
            raise ValueError(f"{settings.file} has {found} weights, the others compute in {settings.dtype}")

    def serve(self, prompts: list[list[int]], lengths: list[int]) -> Made:
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
        """Tokens of a sequence into the batch. Returns the row of the last one, whose logits are wanted."""
        batch = self._batch
        for offset, token in enumerate(token_ids):
            row = batch.n_tokens
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position + offset, 1
            batch.seq_id[row][0], batch.logits[row] = slot, offset == len(token_ids) - 1
            batch.n_tokens += 1
        return batch.n_tokens - 1

    def _likeliest(self, row: int) -> int:
        pointer = self._c.llama_get_logits_ith(self._context, row)
        logits = (ctypes.c_float * self._vocab_size).from_address(ctypes.addressof(pointer.contents))
        return int(self._np.frombuffer(logits, self._np.float32).argmax())
