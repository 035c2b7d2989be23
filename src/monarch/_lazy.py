"""Packages whose names are loaded when they are first used.

Such a package has a table of its public names and the modules that define them, and imports of all
of them under ``TYPE_CHECKING``. So importing the package is quick, and a program pays only for the
names that it uses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(
    package: str, homes: Mapping[str, str], extras: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name, ``__name__``.
        homes: the module of each public name, relative to the package.
        extras: the extra that installs a package, by the names of packages that may be missing.

    A name that needs a missing package raises ModuleNotFoundError with the extra to install.

    >>> import monarch.recipes
    >>> get, names = lazily("monarch.recipes", {"first": "completion"})
    >>> get("first") is monarch.recipes.first, names()
    (True, ['first'])
    """
    extras = {} if extras is None else extras

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f"{package}.{home}"), name)
        except ModuleNotFoundError as error:
            extra = extras.get(error.name or "")
            if extra is None:
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}: pip install 'pymonarch[{extra}]'",
                name=error.name,
            ) from error
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(homes)
