"""All findings, by section of claims.ipynb: a function finding_N of this folder belongs to claim N."""

from importlib import import_module
from pathlib import Path

from notebooks.helpers.claims.findings import CLAIMS, Finding


def findings(*names: str) -> list[Finding]:
    """Return the findings of these sections of claims.toml, by default of all."""
    modules = [import_module(f"{__package__}.{path.stem}") for path in Path(__file__).parent.glob("[a-z]*.py")]
    functions = {name: function for module in modules for name, function in vars(module).items()}
    numbers = [number for name in names or CLAIMS["sections"] for number in CLAIMS["sections"][name]]
    return [functions[f"finding_{number}"]() for number in numbers]
