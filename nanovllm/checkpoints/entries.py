"""Entries of a JSON file, each read as what it must be. An error names the file, the entry and what is there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_INT = 2**53  # the integers that JSON keeps exactly everywhere
MAX_NUMBER = 1e30  # far inside float32; excludes infinity and NaN, too


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise ValueError, naming the file, if there is none."""
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a checkpoint folder: it has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file."""
    return read_json(path) if path.exists() else {}


@dataclass(frozen=True)
class Entries:
    """The entries of one JSON object. `name in entries` is False for null, as for an entry that is not there."""

    values: dict[str, Any]
    path: Path
    within: str = ""  # "rope_scaling." for the entries of an object inside the file's

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_INT) -> int:
        """Return a whole number from `least` to `most`. A reader takes `default` for an entry that has no value."""
        value = self._get(name, default)
        if type(value) is int and value > most:
            raise self.error(name, f"at most {most}")
        if type(value) is not int or value < least:
            raise self.error(name, "a positive whole number" if least == 1 else f"a whole number, at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive and finite number."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text that is not empty."""
        value = self._get(name, default)
        if not isinstance(value, str) or not value:
            raise self.error(name, "a text")
        return value

    def entries(self, name: str) -> "Entries":
        """Return the object `name`; one without entries if it is null or left out."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Entries(value, self.path, f"{self.within}{name}.")

    def error(self, name: str, must_be: str) -> ValueError:
        """Return the error of an entry; `must_be` completes "NAME must be ..."."""
        return ValueError(f"{self.path}: {self.within}{name} must be {must_be}, not {brief(self.values.get(name))}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def brief(value: object) -> str:
    """Return a value from a file for an error: on one line, and not a long one.

    >>> brief("4" * 1000)[:9], len(brief("4" * 1000))
    ("'44444444", 80)
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
