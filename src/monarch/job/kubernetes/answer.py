"""Look into answers of the API: JSON, in which each part may be missing or null. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["items", "part", "text"]


def part(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object at a name; an empty one if there is none.

    >>> part({"metadata": None}, "metadata")
    {}
    """
    value = found.get(name)
    return value if _is_object(value) else {}


def items(found: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects of the list at a name; none if there is no list.

    >>> items({"env": [{"name": "A"}, None]}, "env")
    [{'name': 'A'}]
    """
    value = found.get(name)
    return [one for one in value if _is_object(one)] if _is_list(value) else []


def text(found: Mapping[str, Any], name: str) -> str:
    """Return the text at a name; an empty one if there is none.

    >>> text({"name": "trainers-0"}, "name"), text({}, "name")
    ('trainers-0', '')
    """
    value = found.get(name)
    return "" if value is None else str(value)


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)
