"""The examples in the docstrings of the tensor package run and print what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import monarch._tensors

pytestmark = pytest.mark.torch


def examples() -> Iterator[Any]:
    """Yield one test for each docstring that has an example."""
    for found in pkgutil.walk_packages(monarch._tensors.__path__, "monarch._tensors."):
        module = importlib.import_module(found.name)
        for test in doctest.DocTestFinder().find(module):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("example", list(examples()))
def test_example_prints_what_it_shows(example: doctest.DocTest) -> None:
    printed: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags, verbose=False).run(example, out=printed.append)

    assert not printed, "".join(printed)
