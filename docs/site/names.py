"""An extension of griffe, which reads the source for the reference: public names, and examples.

griffe follows the imports of a package; those under ``TYPE_CHECKING`` are the ones of names that
are loaded on first use. This extension adds the names that no import shows: those of the tables in
`monarch` and `monarch._compat`, and functions of `monarch.config`, which are methods of an object.

Code in a docstring is a doctest, or indented. As Markdown the ``>>>`` of a doctest would be nested
quotes, and an indented block below ``Args:`` one of the arguments, so both become fenced blocks.
"""

from __future__ import annotations

import ast
import re
import textwrap
from types import MethodType
from typing import Any

import griffe
from reference import TABLES, homes_of

import monarch.config

__all__ = ["PublicNames"]

_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)    .*(?:\n+    .*)*")


class PublicNames(griffe.Extension):
    """Adds names that only a table has; fences code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the package once it is read."""
        if pkg.path != "monarch":
            return
        for path in TABLES:
            module = pkg
            if path != "monarch":
                module = griffe.Module(path.rpartition(".")[2], parent=pkg)
                pkg.set_member(module.name, module)
            for name, home in homes_of(path).items():
                _lead(module, name, home.replace(":", "."))
        config = pkg["config"]
        for name in monarch.config.__all__:
            function = getattr(monarch.config, name)
            if isinstance(function, MethodType):
                owner = type(function.__self__)
                _lead(config, name, f"{owner.__module__}.{function.__qualname__}")

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the code of a docstring."""
        if obj.docstring is not None:
            text = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = _INDENTED.sub(_fenced, text)


def _lead(module: griffe.Module, name: str, target: str) -> None:
    module.set_member(name, griffe.Alias(name, target, parent=module))


def _fenced(block: re.Match[str]) -> str:
    text = textwrap.dedent(block[0])
    try:
        ast.parse(text)
    except SyntaxError:
        return f"```text\n{text}\n```"
    return f"```python\n{text}\n```"
