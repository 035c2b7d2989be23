"""Guarantee: `runtime` and `mesh` start threads, park them and read the clock by the environment.

The simulator replaces the environment (`runtime/io/environment.py`), so code that goes round it
does not run in simulations, or runs in real time there. The exceptions are listed with reasons.
The linter cannot check this: TID251 has one list of banned names for the whole package.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import monarch

_ENGINE = Path(monarch.__file__).parent / "_engine"
_BANNED = {"threading.Thread", "threading.Event", "time.monotonic"}

# By file name: these names, since ...
_ALLOWED = {
    "environment.py": (_BANNED, "it is the environment"),
    "reactor.py": ({"threading.Thread", "time.monotonic"}, "a part of the real environment"),
    "slow_clock.py": (_BANNED, "a part of the real environment"),
    "cell.py": ({"threading.Event"}, "a flag, for which no thread waits"),
    "progress.py": (
        {"threading.Thread", "threading.Event"},
        "it reports to people while real time passes; off in simulations",
    ),
}


def _used(source: str) -> set[str]:
    """Return the banned names that the code mentions, other than in annotations."""
    tree = ast.parse(source)
    annotations = [
        annotation
        for node in ast.walk(tree)
        for annotation in (
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
        )
        if annotation is not None
    ]
    within = {id(part) for annotation in annotations for part in ast.walk(annotation)}
    used = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and id(node) not in within
    }
    used |= {
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    return used & _BANNED


@pytest.mark.parametrize("folder", ["runtime", "mesh"])
def test_threads_waits_and_time_come_from_the_environment(folder: str) -> None:
    found = {
        str(path.relative_to(_ENGINE)): left
        for path in sorted((_ENGINE / folder).rglob("*.py"))
        if (left := _used(path.read_text("utf-8")) - _ALLOWED.get(path.name, (set(), ""))[0])
    }
    assert found == {}


def test_the_check_finds_calls_references_and_imports_but_no_annotations() -> None:
    assert _used("thread = threading.Thread(target=run)") == {"threading.Thread"}
    assert _used("clock = time.monotonic") == {"time.monotonic"}
    assert _used("from threading import Event, Lock") == {"threading.Event"}
    assert _used("def f(done: threading.Event) -> threading.Thread: ...") == set()
