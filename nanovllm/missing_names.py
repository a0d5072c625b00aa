"""One sentence for a name that vLLM has and nanovllm doesn't, and names that a module imports on first use.

Modules such as sampling_params.py repeat vLLM's layout, so that a script's imports work with `nanovllm` for `vllm`:

    from .engine.sampling_params import SamplingParams

    __all__ = ["SamplingParams"]
    __getattr__ = import_or_raise(__name__)
"""

import inspect
from collections.abc import Callable, Mapping
from dis import opname
from importlib import import_module
from types import MappingProxyType
from typing import Any


def import_or_raise(module: str, sources: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Return `__getattr__` for a module: it imports the names in `sources`, each from the module that it maps to.

    >>> import_or_raise("nanovllm.engine.async_llm_engine", {"RequestOutput": ".outputs"})("RequestOutput").__name__
    'RequestOutput'
    """

    def get(name: str) -> Any:
        if name not in sources:
            raise missing_name(module, name)
        return getattr(import_module(sources[name], module.rpartition(".")[0]), name)

    return get


def missing_name(module: str, name: str) -> ImportError | AttributeError:
    """Return the error for a missing name. Only a module's `__getattr__` may call this.

    `from module import name` replaces an AttributeError and its text, so that statement gets an ImportError.
    """
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back
    is_import = caller and opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
    error = ImportError if is_import else AttributeError
    return error(f"module {module!r} has no attribute {name!r}: nanovllm implements only a part of vLLM")
