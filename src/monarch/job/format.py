"""The content of the file of a saved job: JSON, with a version, and never a pickle.

    {
      "pymonarch_job": 3,
      "class": "train:MyJob",
      "script": "train.py",
      "attributes": {"_meshes": {"trainers": 2}, "_hosts": {"$tuple": [...]}, ...}
    }

Invariants:

* Reading runs no code but the import of the module of ``class``, and methods of that class. The
  class has to be a subclass of `JobTrait`; the name is that of a module, never a path. `saved.read`
  has checked before that the file belongs to this user and that no other user can write it, as it
  does for the file that names the module of a spec. So a file may lead to the same modules as a
  spec, and to no other code.
* Of classes of values only those of this package are imported by name. Another class declares
  itself (`savable`), and is known once its module was imported, which the job's module does.
* An attribute that is no such value is an error when the job is saved, which names the attribute.
  A value of another type is never saved as something similar.

Values are those of JSON. A tuple, a float that is not finite, and an instance of a savable class
are objects with one key that begins with ``$``. The class of a running script is found in the
script that reads: ``script`` is for the error text.

Formats 1 and 2, of earlier releases, and the files of the reference implementation are pickles.
They are recognized by their first bytes, and refused.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

__all__ = ["class_name", "decode", "encode", "find_class", "savable"]

_VERSION = 3
_KEY = "pymonarch_job"
_OLD = b"pymonarch job "  # the first line of format 2, before a pickle
_PICKLE = b"\x80"  # the first byte of each pickle since protocol 2
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_T = TypeVar("_T", bound=type)


_savable: dict[type, tuple[str, ...]] = {}  # the names of the fields of each class


def savable(cls: _T) -> _T:
    """Declare a class of values that jobs may keep in attributes. A decorator.

    The class is a NamedTuple or a frozen dataclass whose fields are values that can be saved. When
    a job is loaded its constructor is called with the fields by name, so a later release may add
    fields with defaults. Raises TypeError for another class.

    >>> from typing import NamedTuple
    >>> @savable
    ... class Address(NamedTuple):
    ...     host: str
    ...     port: int = 0
    """
    names: Any = vars(cls).get("_fields") if issubclass(cls, tuple) else None
    parameters: Any = vars(cls).get("__dataclass_params__")
    if parameters is not None and parameters.frozen:
        fields: dict[str, Any] = vars(cls)["__dataclass_fields__"]
        names = [name for name, field in fields.items() if field.init]
    if names is None:
        raise TypeError(f"{cls.__qualname__} is neither a NamedTuple nor a frozen dataclass")
    _savable[cls] = tuple(names)
    return cls


def class_name(cls: type) -> str:
    """Return the name under which a class is saved, "module:qualname"."""
    return f"{cls.__module__}:{cls.__qualname__}"


# -- writing -------------------------------------------------------------------------------------


def encode(cls: type, attributes: object, is_job: Callable[[object], bool]) -> bytes:
    """Return the content of a file for a job of this class with these attributes.

    `is_job` says whether a value is a job, which can be an attribute of another. Raises TypeError
    for a value that cannot be saved, and ValueError for a class that could not be found again.
    """
    document = {_KEY: _VERSION, **_job(cls, attributes, is_job, "")}
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def _job(
    cls: type, attributes: object, is_job: Callable[[object], bool], where: str
) -> dict[str, Any]:
    name = class_name(cls)
    try:
        found = find_class(name)
    except ValueError as error:
        raise ValueError(f"a job of this class could not be loaded again: {error}") from error
    if found is not cls:
        raise ValueError(
            f"{name} is another class now: a job of the former one could not be loaded again"
        )
    if not _is_object(attributes):
        raise TypeError(
            f"__getstate__ of {cls.__qualname__} has to return a dict, not "
            f"{type(attributes).__name__}"
        )
    saved: dict[str, Any] = {}
    for key, value in attributes.items():
        if type(key) is not str:
            raise TypeError(f"{cls.__qualname__} has an attribute {key!r}, which is no str")
        try:
            saved[key] = _plain(value, is_job, f"{where}{key}")
        except _CannotSave as error:
            raise TypeError(
                f"attribute {error.where} of {cls.__qualname__} cannot be saved: {error.why}. Leave"
                " it out in __getstate__, and make it again when it is needed"
            ) from None
        except RecursionError:
            raise TypeError(
                f"attribute {where}{key} of {cls.__qualname__} cannot be saved: it contains itself,"
                " or is nested too deep"
            ) from None
    document: dict[str, Any] = {"class": name}
    if cls.__module__ == "__main__":
        document["script"] = getattr(sys.modules["__main__"], "__file__", None) or "a session"
    return {**document, "attributes": saved}


class _CannotSave(Exception):
    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where = where
        self.why = why


def _type_of(value: object) -> type:
    return type(value)


def _plain(value: Any, is_job: Callable[[object], bool], where: str) -> Any:
    """Return the JSON value for a value. `where` is its path, for errors."""
    kind = _type_of(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list or kind is tuple:
        items = [_plain(one, is_job, f"{where}[{n}]") for n, one in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise _CannotSave(where, f"its key {key!r} is no str")
        pairs = {key: _plain(one, is_job, f"{where}[{key!r}]") for key, one in value.items()}
        return {"$dict": pairs} if any(key.startswith("$") for key in pairs) else pairs
    fields = _savable.get(kind)
    if fields is not None:
        pairs = {n: _plain(getattr(value, n), is_job, f"{where}.{n}") for n in fields}
        return {"$value": class_name(kind), "fields": pairs}
    if is_job(value):
        return {"$job": _job(kind, value.__getstate__(), is_job, f"{where}.")}
    raise _CannotSave(
        where,
        f"it is of type {kind.__qualname__}, and a saved job has str, int, float, bool, None, "
        "list, tuple, dict with str keys, and classes marked with monarch.job.savable",
    )


# -- reading -------------------------------------------------------------------------------------


def decode(data: bytes, build: Callable[[type, dict[str, Any]], Any]) -> Any:
    """Return the job that `encode` wrote; `build` makes it of its class and its attributes.

    Imports the module of the job's class, and runs no other code from `data`. Raises ValueError
    with a description of the problem for data that cannot be read.
    """
    _refuse_pickles(data)
    try:
        document = json.loads(data.decode(), parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deep for a saved job") from None
    except ValueError as error:
        if not data.lstrip().startswith(b"{"):
            raise ValueError("it is no saved job") from None
        raise ValueError(f"it is damaged, or was not written to the end ({error})") from None
    pairs = document if _is_object(document) else {}
    if _KEY not in pairs:
        raise ValueError("it is no saved job")
    if pairs[_KEY] != _VERSION:
        raise ValueError(
            f"it is of format {pairs[_KEY]!r}, and this release reads format {_VERSION}: use "
            "the release that wrote it, also for `monarch kill`"
        )
    return _built(pairs, build)


def _refuse_pickles(data: bytes) -> None:
    if not data:
        raise ValueError("it is empty")
    if data.startswith((_PICKLE, _OLD)):
        raise ValueError(
            "it is a pickle, as earlier releases and the reference implementation write; reading "
            "one runs the code in it, so this release does not. End that job with the release that "
            "started it (`monarch kill`), then remove the file"
        )


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _built(document: Any, build: Callable[[type, dict[str, Any]], Any]) -> Any:
    pairs = document if _is_object(document) else {}
    name, attributes = pairs.get("class"), pairs.get("attributes")
    if not isinstance(name, str) or not _is_object(attributes):
        raise ValueError("it has no class with attributes, as a job has")
    script = pairs.get("script")
    cls = find_class(name, str(script) if script else "")
    return build(cls, {key: _value(value, build) for key, value in attributes.items()})


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _value(value: Any, build: Callable[[type, dict[str, Any]], Any]) -> Any:
    if _is_list(value):
        return [_value(one, build) for one in value]
    if not _is_object(value):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _value(one, build) for key, one in value.items()}
    content = value[tag]
    if tag == "$tuple" and _is_list(content) and len(value) == 1:
        return tuple(_value(content, build))
    if tag == "$dict" and _is_object(content) and len(value) == 1:
        return {key: _value(one, build) for key, one in content.items()}
    if tag == "$float" and content in ("nan", "inf", "-inf") and len(value) == 1:
        return float(content)
    if tag == "$job" and len(value) == 1:
        return _built(content, build)
    fields = value.get("fields")
    if tag == "$value" and isinstance(content, str) and _is_object(fields):
        known = _savable_class(content)
        if known is None:
            raise ValueError(f"it has a value of {content}, which the module of its class lacks")
        given = {key: _value(one, build) for key, one in fields.items()}
        try:
            return known(**given)
        except Exception as error:
            raise ValueError(f"its value of {content} does not fit that class: {error}") from error
    raise ValueError(f"it has a value {tag!r} that this release cannot read")


# -- classes by name -----------------------------------------------------------------------------


def _savable_class(name: str) -> type | None:
    """Return a class of values; one of this package is loaded if it is not yet."""
    # Names are looked up now, since a class may get the name of its façade when it is declared.
    for cls in _savable:
        if class_name(cls) == name:
            return cls
    if name.startswith("monarch."):
        found = find_class(name)
        return found if found in _savable else None
    return None


def find_class(name: str, script: str = "") -> type:
    """Import and return the class that is called ``"module:qualname"``.

    `script` is where a class of the module ``__main__`` was defined, for the error. Raises
    ValueError with a remedy.
    """
    module, colon, path = name.partition(":")
    if "<locals>" in path:
        raise ValueError(f"{name} is defined in a function: define it at the top of a module")
    if not colon or not _NAME.fullmatch(module) or not _NAME.fullmatch(path):
        raise ValueError(f"{name!r} is no name of a class")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            # Attributes of a class are looked up without descriptors, which would run code.
            found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
    except ImportError as error:
        raise ValueError(
            f"its class is in a module that cannot be imported here ({error}): run in the "
            "directory of the script that defines it, or set PYTHONPATH"
        ) from error
    except (AttributeError, KeyError):
        if module == "__main__" and script:
            raise ValueError(
                f"its class {path} is defined in {os.path.basename(script)}, and not in the program"
                " that reads it: run that script, or define the class in a module of its own"
            ) from None
        raise ValueError(f"module {module} has no class {path}") from None
    if not isinstance(found, type):
        raise ValueError(f"{name} is no class")  # noqa: TRY004 - an error of the file
    return found
