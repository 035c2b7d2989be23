"""The examples in the docstrings of the shapes run.

They are collected class by class: ``doctest`` by module skips classes whose ``__module__`` is a
public path, which most of these classes have.
"""

import doctest
import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest

from monarch._engine import shapes

PUBLIC = {name: getattr(shapes, name) for name in shapes.__all__}
MODULES = [import_module(f"{shapes.__name__}.{m.name}") for m in iter_modules(shapes.__path__)]
FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = {
    test.name: test
    for module in MODULES
    for name, thing in vars(module).items()
    if inspect.isfunction(thing) or inspect.isclass(thing)
    if thing.__module__.startswith("monarch.")
    for test in FINDER.find(thing, name, module=False, globs=PUBLIC | vars(module))
    if test.examples
}


def test_there_are_examples():
    assert {"Slice", "Shape", "Extent", "Point", "Region", "MeshTrait", "quoted"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    result = doctest.DocTestRunner().run(EXAMPLES[name])
    assert result.attempted > 0
    assert result.failed == 0
