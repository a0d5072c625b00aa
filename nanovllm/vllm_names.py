"""vLLM's module names, so that a script can import from `nanovllm` instead of `vllm`; and vLLM's small helpers.

There is no nanovllm/sampling_params.py, for example: VLLMModuleFinder builds that module from MODULES when a script
imports it. The engine uses none of these modules.
"""

import socket
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal, NotRequired, TypedDict

THIS_MODULE = "vllm_names"
MODULES: dict[str, dict[str, str]] = {  # vLLM's module: {public name: our module that defines it}
    "config": {"ProfilerConfig": THIS_MODULE},
    "engine.arg_utils": dict.fromkeys(("AsyncEngineArgs", "EngineArgs"), "options.engine_args"),
    "engine.async_llm_engine": {"AsyncLLMEngine": "async_llm"},
    "engine.llm_engine": {"LLMEngine": "llm_engine"},
    "inputs": dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), "requests.prompts"),
    "outputs": dict.fromkeys(
        ("CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "RequestOutput"), "requests.outputs"
    ),
    "platforms": dict.fromkeys(("Platform", "current_platform"), THIS_MODULE),
    "pooling_params": {"PoolingParams": "requests.pooling_params"},
    "sampling_params": dict.fromkeys(
        ("RepetitionDetectionParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
        "requests.sampling_params",
    )
    | {"BeamSearchParams": "beam_search"},
    "utils": {"FlexibleArgumentParser": THIS_MODULE},
    "utils.argparse_utils": {"FlexibleArgumentParser": THIS_MODULE},
    "utils.network_utils": {"get_open_port": THIS_MODULE},
    "utils.print_utils": {"print_embeddings": THIS_MODULE},
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": {"AsyncLLM": "async_llm"},
    "v1.metrics": {},
    "v1.metrics.reader": dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), "metrics"),
}


class VLLMModuleFinder(MetaPathFinder, Loader):
    """A finder that builds the modules in MODULES. It runs first, so folders left by an older version are ignored."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module, or None if it is not in MODULES."""
        package, _, name = fullname.partition(".")
        if package != __package__ or name not in MODULES:
            return None
        is_package = any(module.startswith(f"{name}.") for module in MODULES)
        spec = ModuleSpec(fullname, self, origin=__file__, is_package=is_package)
        spec.has_location = True  # the ImportError for a missing name shows this file
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Fill a new module with its names, each of which is imported on first use."""
        sources = MODULES[module.__name__.partition(".")[2]]

        def get_attribute(name: str) -> Any:
            if name not in sources:
                raise missing_name_error(module.__name__, name)
            return getattr(import_module(f"{__package__}.{sources[name]}"), name)

        vars(module).update(__all__=[*sources], __getattr__=get_attribute)


def missing_name_error(module: str, name: str) -> AttributeError:
    """Return the error for a name that vLLM may have, but nanovllm doesn't."""
    return AttributeError(f"module {module!r} has no attribute {name!r}: nanovllm implements only a part of vLLM")


class ProfilerConfig(TypedDict):
    """The option `profiler_config`."""

    profiler: Literal["torch", "cuda"]
    torch_profiler_dir: NotRequired[str]


class Platform:
    """The platform of this machine: the type of device that an engine uses by default."""

    @property
    def device_type(self) -> str:
        from .options.config import default_device

        return default_device()

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.is_cuda_alike() and not self.is_rocm()

    def is_cuda_alike(self) -> bool:
        return self.device_type == "cuda"

    def is_rocm(self) -> bool:
        import torch

        return self.is_cuda_alike() and torch.version.hip is not None


current_platform = Platform()


class FlexibleArgumentParser(ArgumentParser):
    """A parser that reads --max_model_len as --max-model-len."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments, with dashes for the underscores in the names of options."""
        arguments = sys.argv[1:] if args is None else args
        return super().parse_known_args([with_dashes(argument) for argument in arguments], namespace)


def with_dashes(argument: str) -> str:
    """Return a command-line argument, with dashes for the underscores in the name of an option.

    >>> with_dashes("--max_tokens=a_b"), with_dashes("a_b")
    ('--max-tokens=a_b', 'a_b')
    """
    name, *value = argument.split("=", 1)
    return "=".join([name.replace("_", "-"), *value]) if argument.startswith("--") else argument


def get_open_port() -> int:
    """Return a free port on this machine."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    """Print the first four numbers of an embedding, and its size."""
    first_numbers = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{first_numbers}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")
