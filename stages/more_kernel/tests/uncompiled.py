"""Run the kernel as the Python that it is written in. For a few small blocks this is faster than compiling it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def uncompiled(kernel: ModuleType) -> Iterator[None]:
    """Replace the functions of a paged_kernel.py that Numba would compile by their originals."""
    compiled = {name: value for name, value in vars(kernel).items() if hasattr(value, "py_func")}
    for name, value in compiled.items():
        setattr(kernel, name, value.py_func)
    try:
        yield
    finally:
        for name, value in compiled.items():
            setattr(kernel, name, value)
