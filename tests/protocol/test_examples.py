"""The examples in the docstrings of the protocol cores run, and show what they really print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from monarch._engine import protocol

MODULES = [module.name for module in pkgutil.iter_modules(protocol.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"{protocol.__name__}.{name}")

    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)

    assert result.attempted > 0
    assert result.failed == 0
