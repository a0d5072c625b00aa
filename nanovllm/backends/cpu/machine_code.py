"""The compiled step: how its machine code is stored, and how it becomes a function of this process.

LLVM links machine code in milliseconds. Numba would take a second for the same, so it is not even imported here.
"""

import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_int32, c_int64, c_void_p
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self

import torch

RunStep = Callable[[int, int, int, int], int]  # step.run_step() without its last two arguments, which only have types


class Variant(NamedTuple):
    """The data types that kernels are compiled for."""

    dtype: torch.dtype
    is_kv_int8: bool = False

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.") + "-int8-kv" * self.is_kv_int8

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the variant with this name.

        >>> Variant.of("bfloat16-int8-kv")
        Variant(dtype=torch.bfloat16, is_kv_int8=True)
        """
        dtype, _, rest = name.partition("-")
        return cls(getattr(torch, dtype), bool(rest))


class MachineCode(NamedTuple):
    """An object file, in the format of this system, with a function that follows Numba's calling convention."""

    function: str
    content: bytes

    def write(self, path: Path) -> None:
        """Store the code in a file, which appears when it is complete. Raise OSError if that fails."""
        body = self.function.encode() + b"\n" + self.content
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            unfinished.write_bytes(digest(body) + body)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the code in a file, or None if the file is missing or damaged."""
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        body = stored[DIGEST_SIZE:]
        function, _, content = body.partition(b"\n")
        return cls(function.decode(), content) if stored[:DIGEST_SIZE] == digest(body) else None

    def load(self) -> RunStep:
        """Make the code a function of this process. It stays until the process ends."""
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_default_triple().create_target_machine()
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        engine.add_object_file(binding.ObjectFileRef.from_data(self.content))
        engine.finalize_object()
        # the places of the result and of an error come first, and the status is returned
        signature = CFUNCTYPE(c_int32, POINTER(c_int64), POINTER(c_void_p), *[c_int64] * 6)
        function = signature(engine.get_function_address(self.function))
        ENGINES.append(engine)

        def run_step(worker: int, seen: int, step: int, model: int) -> int:
            result = c_int64()
            if status := function(byref(result), byref(c_void_p()), worker, seen, step, model, 0, 0):
                raise RuntimeError(f"a compiled step ended with status {status}")
            return result.value

        return run_step


DIGEST_SIZE = 16  # bytes


def digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_SIZE).digest()


ENGINES: list[object] = []  # LLVM's, which own the memory of all code that was loaded
STEPS: dict[Variant, RunStep] = {}  # the steps that were loaded
