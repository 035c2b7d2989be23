"""Guarantees about annotations: links and sinks have types, which the type checkers then enforce.

An annotation `Any` silences the checkers for all that is done with the value. `Any` is for payloads
of users, so it is no type for what the engine passes on its message path.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import monarch

_SOURCES = Path(monarch.__file__).parent
_NAMES = {"link", "links", "sink", "sinks", "owner_link"}


def _annotated(tree: ast.AST) -> Iterator[tuple[int, str, ast.expr]]:
    """Yield the line, name and annotation of each argument, variable and attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.lineno, node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            target = node.target
            if isinstance(target, ast.Name):
                yield node.lineno, target.id, node.annotation
            elif isinstance(target, ast.Attribute):
                yield node.lineno, target.attr, node.annotation


def _untyped(source: str) -> list[str]:
    """Return `line: name` of each link and sink whose annotation mentions Any."""
    return [
        f"{line}: {name}"
        for line, name, annotation in _annotated(ast.parse(source))
        if name.lstrip("_") in _NAMES
        and any(isinstance(part, ast.Name) and part.id == "Any" for part in ast.walk(annotation))
    ]


def test_no_link_and_no_sink_is_any() -> None:
    found = [
        f"{path.relative_to(_SOURCES)}:{where}"
        for folder in ("_engine", "testing")
        for path in sorted((_SOURCES / folder).rglob("*.py"))
        for where in _untyped(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_check_finds_arguments_variables_and_attributes() -> None:
    source = (
        "def f(link: Any, links: list[Any], *, sink: Any | None, other: Any) -> None: ...\n"
        "class C:\n"
        "    _link: Any\n"
        "    def g(self, link: FrameLink) -> None:\n"
        "        self._links: dict[int, Any] = {}\n"
    )
    assert sorted(_untyped(source)) == ["1: link", "1: links", "1: sink", "3: _link", "5: _links"]
