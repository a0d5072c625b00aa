"""Hooks: methods of objects are wrapped on the objects, and later as if they had never been."""

from collections.abc import Callable
from typing import Any


class Hooks:
    """
    >>> text = type("Text", (), {"upper": lambda self: "ABC"})()
    >>> hooks = Hooks()
    >>> hooks.wrap(text, "upper", lambda upper: upper() + "!")
    >>> text.upper(), hooks.undo(), text.upper(), vars(text)
    ('ABC!', None, 'ABC', {})
    """

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str, Callable, Any]] = []  # owner, name, what is there now, what was in its dict

    def wrap(self, owner: Any, name: str, around: Callable) -> None:
        """From now on owner.name(...) is around(method, ...). Raises ValueError if another has hooked it already."""
        method = getattr(owner, name)
        if hasattr(method, "is_hook"):
            raise ValueError(f"{type(owner).__name__}.{name} is traced already: one trace at a time")

        def hooked(*args: Any, **kwargs: Any) -> Any:
            return around(method, *args, **kwargs)

        hooked.is_hook = True  # type: ignore[attr-defined]
        self._wrapped.append((owner, name, hooked, vars(owner).get(name)))
        setattr(owner, name, hooked)

    def undo(self) -> None:
        """Restore all. A method that somebody else has replaced since is left to them."""
        while self._wrapped:
            owner, name, hooked, before = self._wrapped.pop()
            if vars(owner).get(name) is not hooked:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def name_of(owner: Any, method: str) -> str:
    """The name of a method as its source has it: "BlockPool.get_new_blocks"."""
    return getattr(type(owner), method).__qualname__
