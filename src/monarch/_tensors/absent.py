"""`Absent`: a member of the reference without a counterpart, which says so on access.

Such members are internals that take or give messages of the reference's processes. `hasattr` is
false for them, as without this.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Absent"]


class Absent:
    """A member that raises AttributeError with the replacement.

    >>> class Graph:
    ...     add_borrow = Absent("use insert_node()")
    >>> hasattr(Graph, "add_borrow")
    False
    >>> Graph().add_borrow
    Traceback (most recent call last):
    AttributeError: Graph.add_borrow has no counterpart in pymonarch: use insert_node()

    Args:
        instead: what to use.
    """

    def __init__(self, instead: str) -> None:
        self.__doc__ = f"Not available: {instead}."
        self._instead = instead
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"{self._name} has no counterpart in pymonarch: {self._instead}")
