"""How a figure of results.json is written: a timed one with its range, and a ratio that may be 1 as "the same".

    shown(results, "serving.s4_over_s3.ratio", ".2f times the speed")

The sentence around a figure has to be right for all of these, so that a new run changes no sentence:

    1.42 times the speed                     the range is at most WIDE of the figure
    1.42 times the speed (1.31 to 1.52)      it is wider
    the same speed (0.92 to 1.31 times)      it contains 1
    the same speed                           it contains 1, or the figure rounds to 1, and it is not wide
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

WIDE = 0.1  # as a share of the figure. Less is not worth a reader's time
SAME = {  # a ratio's words, and those for a ratio that may be 1
    "times as long": "the same time",
    "times the speed": "the same speed",
    "times sooner": "at the same time",
    "": "the same",
}
UNITS = re.compile(r"(?:.*_)?(?:ms|us|seconds|per_second|bandwidth)")  # names of timed figures that aren't ratios


class Figure(NamedTuple):
    """A timed number, and the least and the largest that it may be."""

    value: float
    least: float
    largest: float

    @property
    def is_wide(self) -> bool:
        """Return whether the range exceeds WIDE."""
        return self.largest - self.least > WIDE * abs(self.value)

    def shown(self, show: Callable[[float], str]) -> str:
        """Return the number, and its range if that is wide.

        >>> Figure(568, 556, 702).shown("{:.0f} ms".format), Figure(568, 560, 580).shown("{:.0f} ms".format)
        ('568 ms (556 to 702)', '568 ms')
        """
        return show(self.value) + self._range(show)

    def compared(self, show: Callable[[float], str], words: str = "") -> str:
        """Return a ratio in words, one of the keys of SAME.

        >>> Figure(1.42, 1.31, 1.52).compared("{:.2f}".format, "times the speed")
        '1.42 times the speed (1.31 to 1.52)'
        >>> Figure(1.1, 0.92, 1.31).compared("{:.2f}".format, "times the speed")
        'the same speed (0.92 to 1.31 times)'
        >>> Figure(1.002, 1.001, 1.003).compared("{:.2f}".format)
        'the same'
        """
        if self.least <= 1 <= self.largest or show(self.value) == show(1):
            return SAME[words] + self._range(show, " times" * bool(words))
        return f"{show(self.value)} {words}".rstrip() + self._range(show)

    def _range(self, show: Callable[[float], str], unit: str = "") -> str:
        """Return the range in parentheses if it is wide. A unit that all numbers share is left out."""
        if not self.is_wide:
            return ""
        *_, suffix = units = [re.sub(r"^[\d,.-]+", "", show(number)) for number in self]
        texts = [show(number).removesuffix(suffix if len({*units}) == 1 else "") for number in self[1:]]
        return f" ({' to '.join(texts)}{unit})"

    def __format__(self, spec: str) -> str:
        """Return the number in a format such as ".1f", or a ratio in one such as ".2f times as long".

        >>> f"{Figure(2, 1.5, 3):.1f}, {Figure(2, 1.5, 3):.1f times as long}"
        '2.0 (1.5 to 3.0), 2.0 times as long (1.5 to 3.0)'
        """
        form, words = parts_of(spec)

        def show(number: float) -> str:
            return format(number, form)

        return self.compared(show, words) if words else self.shown(show)


def parts_of(spec: str) -> tuple[str, str]:
    """Return the format of a number, and the words after it. Raise ValueError for words that SAME doesn't have.

    >>> parts_of(".2f times as long")
    ('.2f', 'times as long')
    """
    form, _, words = spec.partition(" ")
    if words not in SAME:
        raise ValueError(f"a ratio's words must be one of {', '.join(filter(None, SAME))}, got {words!r}")
    return form, words


def figure(results: Mapping[str, Any], key: str) -> Any:
    """Return the value under a dotted key: a Figure if it has a spread. Raise KeyError if there is none.

    >>> figure({"a": {"ms": 4, "ms_spread": [3, 5], "steps": 6}}, "a.ms"), figure({"a": {"steps": 6}}, "a.steps")
    (Figure(value=4, least=3, largest=5), 6)
    """
    part: Any = results
    for name in key.split("."):
        if not isinstance(part, Mapping) or name not in part:
            raise KeyError(key)
        beside, part = part, part[name]
    spread = beside.get(f"{name}_spread")
    return part if spread is None else Figure(part, *spread)


def shown(results: Mapping[str, Any], key: str, spec: str) -> str:
    """Return a figure in a format. Raise KeyError if there is none, and ValueError for a timed ratio without words.

    >>> shown({"a": {"ms": 4, "ms_spread": [3, 5], "steps": 6}}, "a.ms", ".1f")
    '4.0 (3.0 to 5.0)'
    """
    value, name = figure(results, key), key.rsplit(".", 1)[-1]
    if isinstance(value, Figure) and not UNITS.fullmatch(name) and " " not in spec:
        examples = ", ".join(f"{spec or '.2f'} {words}" for words in SAME if words)
        raise ValueError(f"{key} is a ratio, and may be 1: its format must have words, as one of {examples}")
    return format(value, spec)
