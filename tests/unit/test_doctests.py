"""The examples in public docstrings run and print exactly what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

FACADES = [
    "monarch",
    "monarch.actor",
    "monarch.config",
    "monarch.job",
    "monarch.rdma",
    "monarch.recipes",
    "monarch.testing",
]


def public() -> Iterator[tuple[str, Any]]:
    """Yield the façades, their exports and the bases of exported classes, each once."""
    seen: set[int] = set()
    for facade in FACADES:
        module = importlib.import_module(facade)
        for name in ("", *module.__all__):
            thing = getattr(module, name) if name else module
            for part in thing.__mro__ if inspect.isclass(thing) else (thing,):
                ours = getattr(part, "__module__", facade).startswith("monarch")
                if ours and hasattr(part, "__name__") and id(part) not in seen:
                    seen.add(id(part))
                    yield f"{facade}.{name}".rstrip("."), part


def examples() -> Iterator[Any]:
    """Yield one test for each docstring that has an example."""
    namespace: dict[str, Any] = {}
    for facade in FACADES:
        exec(f"from {facade} import *", namespace)
    namespace.update((thing.__name__, thing) for _, thing in public())
    # Functions and classes that an example defines are pickled by value, as in a session.
    namespace["__name__"] = "__main__"
    for title, thing in public():
        finder = doctest.DocTestFinder(recurse=inspect.isclass(thing))
        for test in finder.find(thing, title, module=False, globs=namespace):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("example", list(examples()))
def test_example_prints_what_it_shows(example: doctest.DocTest) -> None:
    told: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    runner.run(example, out=told.append)

    assert not told, "".join(told)
