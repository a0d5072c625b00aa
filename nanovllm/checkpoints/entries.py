"""Typed access to the JSON files of a checkpoint. An error names the file, the entry and its value."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_INT = 2**24  # far beyond any real model, to catch typos early
MAX_NUMBER = 1e30  # well inside float32; also excludes infinity and NaN


@dataclass(frozen=True)
class Entries:
    """The entries of one JSON object. A null counts as missing: `name in entries` is False for it.

    A missing entry has the value `default`. If it has no default, or if a value is invalid, methods raise ValueError.
    """

    values: dict[str, Any]
    path: Path
    prefix: str = ""  # such as "rope_scaling." for the entries of that nested object

    @classmethod
    def read(cls, path: Path) -> "Entries":
        """Read a JSON file. Raise ValueError, naming the file, if it is missing, unreadable or not a JSON object."""
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
        return cls(value, path)

    @classmethod
    def read_if_exists(cls, path: Path) -> "Entries":
        """Read a JSON file. A missing file has no entries."""
        return cls.read(path) if path.exists() else cls({}, path)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an integer from `minimum` to MAX_INT."""
        value = self._get(name, default)
        if type(value) is int and value > MAX_INT:
            raise self.error(name, f"at most {MAX_INT}")
        if type(value) is not int or value < minimum:
            raise self.error(name, "a positive integer" if minimum == 1 else f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
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
        """Return a nonempty string."""
        value = self._get(name, default)
        if not isinstance(value, str) or not value:
            raise self.error(name, "a string")
        return value

    def entries(self, name: str) -> "Entries":
        """Return the entries of the object `name`. A missing object has none."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Entries(value, self.path, f"{self.prefix}{name}.")

    def error(self, name: str, must_be: str) -> ValueError:
        """Return a ValueError for an entry. `must_be` completes the sentence "NAME must be ..."."""
        return ValueError(f"{self.path}: {self.prefix}{name} must be {must_be}, got {shorten(self.values.get(name))}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def shards_of(index: Path) -> dict[str, str]:
    """Return the file name of each tensor, from an index file. Raise ValueError if a name leads out of the folder.

    A file in the folder may itself be a symbolic link to anywhere, as in the Hub's cache.
    """
    files = Entries.read(index).entries("weight_map")
    for name in files.values:
        if {"..", "/", "//"} & {*Path(files.text(name)).parts}:
            raise files.error(name, "a file in the folder")
    return dict(files.values)


def shorten(value: object) -> str:
    """Return the repr of a value, truncated to 80 characters, for an error message.

    >>> shorten("4" * 1000)[:9], len(shorten("4" * 1000))
    ("'44444444", 80)
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
