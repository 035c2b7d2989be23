"""Finds the part of an object that cannot be pickled, for the text of the error.

The search runs only after pickling was refused: it pickles the parts of the object one by one, in a
limited number of tries.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

from monarch._engine.wire.codec import encode

__all__ = ["REMEDY", "first_unsendable"]

_THRESHOLD = 1 << 16  # bytes from which a buffer is not copied when pickling is tried
_TRIES = 2000
_DEPTH = 16
_BARE = re.compile(r"cannot pickle '[\w.]+' object")  # Python's text, which has no remedy
REMEDY = "send the values that it is made from, and make it where it is used"


def first_unsendable(named: Iterable[tuple[str, Any]]) -> tuple[str, str] | None:
    """Return the part of the named objects that cannot be pickled, and the reason.

    The part is an expression that begins with the name: ``batch['guard']``. Return None if each
    object can be pickled by itself.

    >>> import threading
    >>> first_unsendable([("a", 1), ("b", [threading.Lock()])])[0]
    'b[0]'
    """
    search = _Search()
    for name, value in named:
        if (problem := search.problem(value)) is not None:
            path, part, problem = search.innermost(name, value, problem)
            kind = type(part).__name__
            article = "an" if kind[:1].lower() in "aeiou" else "a"
            text = str(problem)
            remedy = f"; {REMEDY}" if _BARE.fullmatch(text) else ""
            return path, f"{article} {kind}, cannot be sent: {text}{remedy}"
    return None


class _Search:
    """Searches for an object that cannot be pickled, in a limited number of tries."""

    def __init__(self) -> None:
        self._left = _TRIES

    def problem(self, value: Any) -> Exception | None:
        self._left -= 1
        try:
            encode(value, _THRESHOLD)
        except Exception as error:
            return error
        return None

    def innermost(
        self, path: str, value: Any, problem: Exception, depth: int = _DEPTH
    ) -> tuple[str, Any, Exception]:
        for step, part in _parts(value):
            if self._left <= 0 or depth <= 0:
                break
            if (found := self.problem(part)) is not None:
                return self.innermost(path + step, part, found, depth - 1)
        return path, value, problem


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that are pickled as parts of `value`, each with its expression in code."""
    whole: Any = value  # as Any, since type checkers would narrow `value` to unknown types
    if isinstance(value, dict):
        for key, part in whole.items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(whole):
            yield f"[{index}]", part
    elif isinstance(value, types.FunctionType):
        import inspect

        used = inspect.getclosurevars(value)
        for name, part in {**used.globals, **used.nonlocals}.items():
            yield f" (its variable {name})", part
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, type) or hasattr(value, "__dict__"):
        for name, part in list(vars(value).items()):
            if not (isinstance(value, type) and name.startswith("__")):
                yield f".{name}", part
