"""The changes of the mutation tests (tests/soak/mutant.py): each is of a kind, and alone."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest

from tests.soak.mutant import mutants


def changed(body: str) -> list[tuple[str, str]]:
    """Return the kind of each mutant of a function with this body, and its body."""
    code = "async def f():\n" + textwrap.indent(body, "    ")
    found = []
    for number in range(len(list(mutants(ast.parse(code))))):
        tree = ast.parse(code)
        mutant = list(mutants(tree))[number]
        mutant.apply()
        function: Any = ast.fix_missing_locations(tree).body[0]
        found.append((mutant.kind, ast.unparse(function.body)))
    return found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("with lock:\n    f(x)", [("lock", "f(x)"), ("deletion", "with lock:\n    pass")]),
        ("with open(x) as y:\n    f(y)", [("deletion", "with open(x) as y:\n    pass")]),
        (
            "async with lock:\n    await g()",
            [
                ("lock", "await g()"),
                ("await", "async with lock:\n    pass"),
            ],
        ),
        ("x.close()", [("cleanup", "pass")]),
        ("x.send()", [("deletion", "pass")]),
        (
            "try:\n    f(x)\nfinally:\n    g(x)",
            [
                ("cleanup", "f(x)"),
                ("deletion", "try:\n    pass\nfinally:\n    g(x)"),
            ],
        ),
        (
            "try:\n    pass\nexcept OSError:\n    g(x)\n    raise",
            [
                ("cleanup", "try:\n    pass\nexcept OSError:\n    raise"),
                ("deletion", "try:\n    pass\nexcept OSError:\n    pass\n    raise"),
                ("deletion", "try:\n    pass\nexcept OSError:\n    g(x)\n    pass"),
            ],
        ),
        (
            "if x > y:\n    pass",
            [
                ("condition", "if True:\n    pass"),
                ("condition", "if False:\n    pass"),
                ("condition", "if x >= y:\n    pass"),
            ],
        ),
        ("x = 7", [("deletion", "pass"), ("number", "x = 8")]),
        (
            "def f():\n    g()\n    return None",
            [("deletion", "def f():\n    pass\n    return None")],
        ),
        ("'''Text.'''\n__all__ = []\nassert x > 3", []),
    ],
)
def test_the_mutants_of_a_code(code: str, expected: list[tuple[str, str]]) -> None:
    assert sorted(changed(code)) == sorted(expected)
