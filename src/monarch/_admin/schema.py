"""JSON Schema 2020-12 of typed dictionaries. Pure."""

from __future__ import annotations

import types
import typing
from typing import Any, Union, get_args, get_origin, get_type_hints

__all__ = ["schema_of", "schemas_of"]

_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def schemas_of(models: typing.Iterable[type]) -> dict[str, Any]:
    """Return the schemas of typed dictionaries by name; they refer to each other by ``$ref``."""
    return {model.__name__: schema_of(model) for model in models}


def schema_of(model: type, base: str = "#/components/schemas/") -> dict[str, Any]:
    """Return the schema of one typed dictionary.

    >>> class Point(typing.TypedDict):
    ...     "A place."
    ...     x: int
    ...     tag: Union[str, None]
    >>> found = schema_of(Point)
    >>> found["properties"]["tag"], found["required"]
    ({'anyOf': [{'type': 'string'}, {'type': 'null'}]}, ['tag', 'x'])
    """
    hints = get_type_hints(model)
    return {
        "type": "object",
        "title": model.__name__,
        "description": (model.__doc__ or "").strip(),
        "properties": {name: _schema(hint, base) for name, hint in hints.items()},
        "required": sorted(getattr(model, "__required_keys__", hints)),
    }


def _schema(hint: Any, base: str) -> dict[str, Any]:
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint])
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], base)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], base)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, base) for each in arguments]}
    return {"$ref": base + hint.__name__}
