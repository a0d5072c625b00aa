"""Write knobs.py from the dataclasses that it repeats: python -m nanovllm.cli.make_knobs"""

from dataclasses import Field, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..backends.options import BACKENDS
from ..engine.config import EngineConfig
from ..engine.flags import knob, knobs
from ..engine.sampling_params import SamplingParams
from ..server.options import ServerOptions

HEAD = '''"""Every knob of engine, sampling and server, with its flag's help: --help is shown without torch.

Made by `python -m nanovllm.cli.make_knobs` from the fields of four dataclasses. A test compares.
"""

# ruff: noqa: E501
from .knob import Knob
'''


@dataclass(frozen=True)
class KernelOptions:
    attention_backend: str = knob(
        "auto", "numba: kernels on a CPU; triton: on a GPU; torch: plain operations; auto: the best", BACKENDS
    )
    enforce_eager: bool = knob(False, "on a GPU no CUDA graphs; on a CPU as --attention-backend torch")


def source() -> str:
    tables = {"ENGINE": EngineConfig, "KERNELS": KernelOptions, "SAMPLING": SamplingParams, "SERVER": ServerOptions}
    return HEAD + "".join(f"\n{name} = [\n{rows(options)}]\n" for name, options in tables.items())


def rows(options: type) -> str:
    hints = get_type_hints(options)
    return "".join(f"    {row(field, hints[field.name])},\n" for field in knobs(options))


def row(field: Field, hint: Any) -> str:
    """The line of one field.

    >>> row(next(field for field in knobs(SamplingParams) if field.name == "top_p"), float | None)
    'Knob("top_p", float, 1.0, "sample from the fewest tokens whose probabilities sum to p")'
    """
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
    choices = field.metadata["choices"]
    values = [quoted(field.name), kind.__name__, quoted(field.default), quoted(field.metadata["help"])]
    return f"Knob({', '.join(values + ([quoted(choices)] if choices else []))})"


def quoted(value: Any) -> str:
    r"""As the project writes it: in double quotes.

    >>> quoted(("auto", "float32")), quoted(None), quoted("the host's")
    ('("auto", "float32")', 'None', '"the host\'s"')
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(quoted, value))})"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    Path(__file__).with_name("knobs.py").write_text(source(), encoding="utf-8")
