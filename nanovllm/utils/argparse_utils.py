"""vLLM's module `vllm.utils.argparse_utils`."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

from ..missing_names import import_or_raise


class FlexibleArgumentParser(ArgumentParser):
    """A parser that reads --max_model_len as --max-model-len."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments, with dashes for the underscores in the names of options."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([with_dashes(word) for word in words], namespace)


def with_dashes(word: str) -> str:
    """Return a word of a command line, with dashes in the name of an option.

    >>> with_dashes("--max_tokens=a_b"), with_dashes("a_b")
    ('--max-tokens=a_b', 'a_b')
    """
    name, *value = word.split("=", 1)
    return "=".join([name.replace("_", "-"), *value]) if word.startswith("--") else word


__all__ = ["FlexibleArgumentParser"]
__getattr__ = import_or_raise(__name__)
